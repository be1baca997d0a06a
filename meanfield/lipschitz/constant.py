"""A local Lipschitz constant with its evidence, from a linearisation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meanfield.linalg import NormSolver, operator_norm
from meanfield.linalg.evidence import RTOL, UPPER_RTOL
from meanfield.linalg.norms import largest_block_norm
from meanfield.maps import Linearisation
from meanfield.results.answers import Answer, labelled

# The field's derivative at an atom is factored up to this size: iterations over as many small
# blocks as there are atoms cost more in time and memory, whatever suits the atoms together.
_FACTORED_ROWS = 16
# Relative difference between images by two ways to differentiate.
AGREES = {torch.float64: 1e-6, torch.float32: 1e-2}


class LocalLipschitz(Answer, noun="constant", title="Local Lipschitz constant"):
    """A local Lipschitz constant and its evidence; tensors have the measure's batch shape.

    Attributes:
        value: the constant: the larger of the components, with its gradient where one is asked
            for. Each is σ = ‖Jv‖ of a unit vector v, so a lower bound up to rounding even when it
            has not converged.
        particle: ‖D^½JD^−½‖ ("wasserstein") or ‖J‖ ("euclidean"): atoms move as a whole.
        splitting: maxᵢ ‖D_xΓ_μ(xᵢ)‖: one atom splits about its place. None for "euclidean".
        direction: unit displacement that attains `particle`, ``(*batch, n, d)``; weighted (√aᵢ εᵢ)
            for "wasserstein".
        splitting_atom: the atom that attains `splitting`, or None.
        splitting_direction: the unit vector along which it splits, ``(*batch, d)``, or None.
        residual: relative residual of the singular triples behind the components: each is
            within residual · component of a singular value. The larger of the two.
        error: estimated relative error of the components by their residuals and the gaps below
            them, see `meanfield.linalg.NormEstimate.error`. The larger of the two.
        upper: the constant is at most this, with probability 1 − `miss`. See
            `meanfield.linalg.NormEstimate.upper`; `meanfield.bounds.local_upper` is certain
            always, and of large maps mostly larger.
        miss: the probability, over the random start of an iteration, that the constant exceeds
            `upper`; 0 if both components were factored.
        converged: whether both components are within rtol of what they claim to be, and `upper`
            within upper_rtol: errors are at most rtol, residuals at most four times that, and
            each upper end at most (1 + upper_rtol) times its component.
        n_matvecs: products with the linearisation; 0 when it was factored.
        geometry: "wasserstein" or "euclidean".
    """

    value: Tensor = labelled("local Lipschitz constant")
    particle: Tensor = labelled("component with atoms moved as a whole", name="particle_component")
    splitting: Tensor | None = labelled(
        "component with one atom split", name="splitting_component"
    )
    direction: Tensor = labelled("worst displacement", dims=("particle", "feature"))
    splitting_atom: Tensor | None = labelled(
        "the atom whose splitting is the worst", dtype="int64", shown=False
    )
    splitting_direction: Tensor | None = labelled(
        "direction of the worst splitting", dims=("feature",)
    )
    residual: Tensor = labelled("relative residual", beside=True)
    error: Tensor = labelled("relative error, by residual and gap", name="constant_error")
    upper: Tensor = labelled("upper end", beside=True)
    miss: float = labelled("probability that the constant is above its upper end", attribute=True)
    converged: Tensor = labelled("whether it has converged", dtype="bool", beside=True)
    n_matvecs: int = labelled("products with the linearisation", attribute=True)
    geometry: str = labelled("geometry", attribute=True)


def constant_of(
    at: Linearisation,
    *,
    geometry: str = "wasserstein",
    rtol: float = RTOL,
    upper_rtol: float = UPPER_RTOL,
    solver: NormSolver | None = None,
    strict: bool = True,
    particlewise: bool = False,
) -> LocalLipschitz:
    """The local constant of a map with this linearisation in this geometry.

    Of a map that says that it moves each atom by itself both components are the norm of the
    largest block, if a product says so too: an iteration on all atoms does not tell blocks of
    nearly one norm apart.
    """
    asked: Any = {"rtol": rtol, "upper_rtol": upper_rtol, "strict": strict}
    small = min(at.field.rows, at.field.columns) <= _FACTORED_ROWS
    solver_of_blocks = None if small else solver
    alone = particlewise and moves_each_alone(at)
    if alone:
        field, atom = largest_block_norm(at.field, solver=solver_of_blocks, **asked)
        own = field.direction
        index = atom[..., None, None].expand(own.shape)
        direction = own.new_zeros(*atom.shape, at.field.batch_shape[-1], own.shape[-1])
        whole = replace(field, direction=direction.scatter(-2, index, own))
    else:
        whole = operator_norm(at.atoms, solver=solver, **asked)
    if at.check_direction is not None:
        at.check_direction(whole.direction)
    found = LocalLipschitz(
        value=whole.value,
        particle=whole.value,
        splitting=None,
        direction=whole.direction,
        splitting_atom=None,
        splitting_direction=None,
        residual=whole.residual,
        error=whole.error,
        upper=whole.upper,
        miss=whole.miss,
        converged=whole.converged,
        n_matvecs=whole.n_matvecs,
        geometry=geometry,
    )
    if geometry == "euclidean":
        return found
    if not alone:
        beside = whole.value.detach()
        field, atom = largest_block_norm(at.field, solver=solver_of_blocks, beside=beside, **asked)
    return replace(
        found,
        value=torch.maximum(whole.value, field.value),
        splitting=field.value,
        splitting_atom=atom,
        splitting_direction=field.direction.squeeze(-2),
        residual=torch.maximum(whole.residual, field.residual),
        error=torch.maximum(whole.error, field.error),
        upper=torch.maximum(whole.upper, field.upper),
        miss=max(whole.miss, field.miss),
        converged=whole.converged & field.converged,
        n_matvecs=whole.n_matvecs + (0 if alone else field.n_matvecs),
    )


@torch.no_grad()
def moves_each_alone(at: Linearisation) -> bool:
    """Whether no atom moves another here, by the image of a random displacement."""
    J, generator = at.atoms, torch.Generator().manual_seed(0)
    eps = torch.randn(J.in_shape, generator=generator, dtype=J.dtype, device=generator.device).to(
        J.device
    )
    eps = eps.expand(*J.batch_shape, *J.in_shape)
    image, own = J.matvec(eps), at.field.matvec(eps[..., None, :])[..., 0, :]
    room = AGREES[J.dtype] * image.abs().amax((-2, -1), keepdim=True)
    return bool(((image - own).abs() <= room).all())
