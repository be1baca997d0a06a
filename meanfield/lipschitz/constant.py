"""A local Lipschitz constant with its evidence, from a linearisation."""

from __future__ import annotations

from dataclasses import replace

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
            always, and larger.
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
) -> LocalLipschitz:
    """The local constant of a map with this linearisation in this geometry."""
    whole = operator_norm(at.atoms, rtol=rtol, upper_rtol=upper_rtol, solver=solver, strict=strict)
    if at.check_direction is not None:
        at.check_direction(whole.direction)
    alone = LocalLipschitz(
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
        return alone
    small = min(at.field.rows, at.field.columns) <= _FACTORED_ROWS
    field, atom = largest_block_norm(
        at.field,
        rtol=rtol,
        upper_rtol=upper_rtol,
        solver=None if small else solver,
        strict=strict,
        beside=whole.value.detach(),
    )
    return replace(
        alone,
        value=torch.maximum(whole.value, field.value),
        splitting=field.value,
        splitting_atom=atom,
        splitting_direction=field.direction.squeeze(-2),
        residual=torch.maximum(whole.residual, field.residual),
        error=torch.maximum(whole.error, field.error),
        upper=torch.maximum(whole.upper, field.upper),
        miss=max(whole.miss, field.miss),
        converged=whole.converged & field.converged,
        n_matvecs=whole.n_matvecs + field.n_matvecs,
    )
