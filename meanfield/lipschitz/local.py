"""The local Lipschitz constant of a map of measures at a measure."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from meanfield.linalg import NormEstimate, NormSolver, operator_norm
from meanfield.linalg.norms import largest_block_norm
from meanfield.lipschitz.differentiable import Components, differentiable_value
from meanfield.maps import Linearisation, as_map, linearize
from meanfield.measures import MeasureMap, ParticleMeasure
from meanfield.results.answers import Answer, labelled

# The field's derivative at an atom is factored up to this size: iterations over as many small
# blocks as there are atoms cost more in time and memory, whatever suits the atoms together.
_FACTORED_ROWS = 16


class LocalLipschitz(Answer, noun="constant", title="Local Lipschitz constant"):
    """A local Lipschitz constant and its evidence; tensors have the measure's batch shape.

    Attributes:
        value: the constant: the larger of the components, with its gradient where one is asked
            for. Each is σ = ‖Jv‖ of a unit vector v,
            so a lower bound up to rounding even when it has not converged.
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
        converged: whether the error is at most rtol, the residual at most four times that, and
            `upper` at most (1 + upper_rtol) times each component.
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


def local_lipschitz(
    F: MeasureMap,
    mu: ParticleMeasure,
    *,
    geometry: str = "wasserstein",
    rtol: float = 1e-4,
    solver: NormSolver | None = None,
    strict: bool = True,
) -> LocalLipschitz:
    """Local Lipschitz constant of F at μ, in W₂ or, for "euclidean", ‖Df(X)‖.

    lim sup W₂(F(ν), F(μ)) / W₂(ν, μ) as mass moves by shrinking steps.

    For "wasserstein" the constant is max(‖D^½JD^−½‖, maxᵢ ‖D_xΓ_μ(xᵢ)‖) with D = diag(aᵢ) and J
    the derivative of the atoms of F(μ) in those of μ. The first component ([CAP24] Lemma C.5)
    moves atoms as a whole. The second is not in the paper (derived here, tested numerically):
    W₂ lets an atom split, and one that splits about its place moves queries without moving what
    they see. Equivalently: the norm on the measure with every atom stored twice. For positioned
    measures atoms move at fixed position, as in the conditional distance.

    The limit is over ν → μ in W_∞: all mass moves little. A small share of the mass that moves
    *far* is a small step in W₂ as well, and its ratio can be larger. So a secant ratio from μ may
    exceed the constant at μ. It never exceeds the largest constant on the displacement
    interpolation from μ to ν, so the two have the same supremum over measures on a convex set.

    For "euclidean" it is the spectral norm of J, the constant of the discrete map at X.

    Where the points, the log-weights or parameters of F ask for a gradient, `value` has one: the
    constant of a layer is a penalty like any other. It costs one more derivative of F, along the
    worst direction, and in the backward pass the second singular value, since a double one has no
    derivative. The relative error of the gradient is about `residual` over the gap between the
    two. With ``strict=False``, as in a training loop, nobody looks: where the two are close the
    gradient is one of the generalised gradients. Under ``torch.no_grad()`` nothing is recorded.

    Args:
        F: a map of measures that keeps weights (and positions).
        mu: where; batch axes give a batch of constants. Atoms of weight 0 are absent.
        geometry: "wasserstein" or "euclidean".
        rtol: largest estimated relative error that counts as converged.
        solver: such as ``Dense()`` or ``Lanczos(upper_rtol=0.1)`` of `meanfield.linalg`; by
            default chosen by size. Its ``upper_rtol`` says how far `upper` may be above each
            component, so that `converged` is about the constant and not about a smaller singular
            value. Derivatives of the field in at most 16 dimensions are always factored.
        strict: raise when not converged; otherwise the answer comes back flagged.

    Raises:
        ConvergenceError: not converged, if strict.
        OverflowError: the linearisation leaves the number range.
        ValueError: in the backward pass, where the largest singular value is not simple, if
            strict.

    Example:
        >>> from meanfield.attention import AttentionParameters, SelfAttention
        >>> A = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
        >>> F = SelfAttention(AttentionParameters.from_bilinear(A, [[1.0]]))
        >>> mu = ParticleMeasure([[1.0], [-1.0]], weights=[0.1, 0.9])
        >>> constant = local_lipschitz(F, mu).value
        >>> round(float(constant.detach()), 4)
        2.9937
        >>> constant.backward()
        >>> A.grad
        tensor([[-3.8078]], dtype=torch.float64)
    """
    F = as_map(F)
    with torch.no_grad():
        at = linearize(F, mu, geometry=geometry)
        found = constant_of(at, geometry=geometry, rtol=rtol, solver=solver, strict=strict)
    parts = Components(
        found.particle,
        found.direction,
        found.splitting,
        found.splitting_atom,
        found.splitting_direction,
        found.residual,
    )
    return replace(found, value=differentiable_value(F, mu, at, parts, rtol=rtol, strict=strict))


def constant_of(
    at: Linearisation,
    *,
    geometry: str = "wasserstein",
    rtol: float = 1e-4,
    solver: NormSolver | None = None,
    strict: bool = True,
) -> LocalLipschitz:
    """The local constant of a map with this linearisation in this geometry."""
    whole = operator_norm(at.atoms, rtol=rtol, solver=solver, strict=strict)
    if geometry == "euclidean":
        return _result(whole, None, geometry)
    small = min(at.field.rows, at.field.columns) <= _FACTORED_ROWS
    apart = largest_block_norm(
        at.field, rtol=rtol, solver=None if small else solver, strict=strict
    )
    return _result(whole, apart, geometry)


def _result(
    whole: NormEstimate, apart: tuple[NormEstimate, Tensor] | None, geometry: str
) -> LocalLipschitz:
    if apart is None:
        return LocalLipschitz(
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
    field, atom = apart
    return LocalLipschitz(
        value=torch.maximum(whole.value, field.value),
        particle=whole.value,
        splitting=field.value,
        direction=whole.direction,
        splitting_atom=atom,
        splitting_direction=field.direction.squeeze(-2),
        residual=torch.maximum(whole.residual, field.residual),
        error=torch.maximum(whole.error, field.error),
        upper=torch.maximum(whole.upper, field.upper),
        miss=max(whole.miss, field.miss),
        converged=whole.converged & field.converged,
        n_matvecs=whole.n_matvecs + field.n_matvecs,
        geometry=geometry,
    )
