"""The local Lipschitz constant of a map of measures at a measure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meanfield.html import span, table
from meanfield.linalg import LinearMap, NormEstimate, largest_block_norm, operator_norm
from meanfield.lipschitz.tangents import field_tangent, tangent
from meanfield.measures import MeasureMap, ParticleMeasure

__all__ = ["LocalLipschitz", "local_lipschitz"]

# Up to this many entries the derivatives of the field at all atoms are cheapest as matrices.
_FIELD_ENTRIES = 2**22


@dataclass(frozen=True, eq=False)
class LocalLipschitz:
    """A local Lipschitz constant and its evidence; tensors have the measure's batch shape.

    Attributes:
        value: the constant: the larger of the components. Each is σ = ‖Jv‖ of a unit vector v,
            so a lower bound up to rounding even when it has not converged.
        particle: ‖D^½JD^−½‖ ("wasserstein") or ‖J‖ ("euclidean"): atoms move as a whole.
        splitting: maxᵢ ‖D_xΓ_μ(xᵢ)‖: one atom splits about its place. None for "euclidean".
        direction: unit displacement that attains `particle`, (*batch, n, d); weighted (√aᵢ εᵢ)
            for "wasserstein".
        splitting_atom: the atom that attains `splitting`, or None.
        splitting_direction: the unit vector along which it splits, (*batch, d), or None.
        residual: relative residual of the singular triples behind the components: each is
            within residual · component of a singular value. The larger of the two.
        error: estimated relative error of the components by their residuals and the gaps below
            them, see `meanfield.linalg.NormEstimate.error`. The larger of the two.
        upper: the constant is at most this; with probability 0.999 for each start of an iteration,
            for certain (up to rounding) when factored. See `meanfield.linalg.NormEstimate.upper`;
            `meanfield.bounds.local_upper` is certain always, and larger.
        converged: whether the error is at most the rtol asked for, the residual at most four times
            that, and `upper` within the upper_rtol if one was asked for.
        n_matvecs: products with the linearisation; 0 when it was factored.
        geometry: "wasserstein" or "euclidean".
    """

    value: Tensor
    particle: Tensor
    splitting: Tensor | None
    direction: Tensor
    splitting_atom: Tensor | None
    splitting_direction: Tensor | None
    residual: Tensor
    error: Tensor
    upper: Tensor
    converged: Tensor
    n_matvecs: int
    geometry: str

    def __repr__(self) -> str:
        parts = [f"value={span(self.value)}", f"particle={span(self.particle)}"]
        if self.splitting is not None:
            parts.append(f"splitting={span(self.splitting)}")
        parts += [f"error={span(self.error)}", f"converged={bool(self.converged.all())}"]
        return f"LocalLipschitz({', '.join(parts)}, geometry={self.geometry!r})"

    def _repr_html_(self) -> str:
        splitting = None if self.splitting is None else span(self.splitting)
        rows = [
            ("value", span(self.value)),
            ("particle: atoms move as a whole", span(self.particle)),
            ("splitting: one atom splits", splitting),
            ("relative residual", span(self.residual)),
            ("relative error, by residual and gap", span(self.error)),
            ("at most (probability 0.999)" if self.n_matvecs else "at most", span(self.upper)),
            ("converged", bool(self.converged.all())),
        ]
        return table(f"Local Lipschitz constant, {self.geometry}", rows)


def local_lipschitz(
    F: MeasureMap,
    mu: ParticleMeasure,
    *,
    geometry: str = "wasserstein",
    rtol: float = 1e-4,
    max_steps: int = 300,
    method: str = "auto",
    generator: torch.Generator | None = None,
    strict: bool = True,
    confirm: int = 0,
    upper_rtol: float | None = None,
) -> LocalLipschitz:
    """lim sup W₂(F(ν), F(μ)) / W₂(ν, μ) as mass moves by shrinking steps, or ‖Df(X)‖.

    For "wasserstein" the constant is max(‖D^½JD^−½‖, maxᵢ ‖D_xΓ_μ(xᵢ)‖) with D = diag(aᵢ) and J
    the derivative of the atoms of F(μ) in those of μ. The first component ([CAP24] Lemma C.5)
    moves atoms as a whole. The second is not in the paper (derived here, tested numerically):
    W₂ lets an atom split, and one that splits about its place moves queries without moving what
    they see. Equivalently: the norm on the measure with every atom stored twice. For positioned
    measures atoms move at fixed position, as in the conditional distance.

    The limit is over ν → μ in W_∞: every bit of mass moves little. A vanishing share of the mass
    that moves *far* is W₂-small too, and can have a larger ratio, up to the secant slope of
    Γ_μ; so a secant ratio at μ may exceed the constant at μ. It does not exceed the largest
    constant along the displacement interpolation to ν, and suprema over a convex set of places
    are those of the constant here.

    For "euclidean" it is the spectral norm of J, the constant of the discrete map at X.

    Args:
        F: a map of measures that keeps weights (and positions).
        mu: where; batch axes give a batch of constants. Atoms of weight 0 are absent.
        geometry: "wasserstein" or "euclidean".
        rtol: largest estimated relative error that counts as converged.
        max_steps: largest number of products with the linearisation.
        method: "auto", "dense" or "lanczos", see `meanfield.linalg.operator_norm`.
        generator: of random starts; a fixed seed if None.
        strict: raise when not converged; otherwise the answer comes back flagged.
        confirm: how many more independent random starts the iteration for `particle` gets; the
            largest answer counts. Residuals prove *a* singular value: a start orthogonal to the
            top direction to less than rtol can settle on another one. No cost when factored.
        upper_rtol: go on until `upper` is at most (1 + upper_rtol) · value, too: then the
            constant is known to lie between them, whatever the residuals say.

    Raises:
        ConvergenceError: not converged after `max_steps` steps, if strict.
        OverflowError: the linearisation leaves the number range.

    Example:
        >>> from meanfield.attention import AttentionParameters, SelfAttention
        >>> F = SelfAttention(AttentionParameters.from_bilinear([[-1.0]], [[1.0]]))
        >>> mu = ParticleMeasure([[1.0], [-1.0]], weights=[0.1, 0.9])
        >>> constant = local_lipschitz(F, mu)
        >>> constant.value
        tensor(3.0, dtype=torch.float64)
    """
    if geometry not in ("wasserstein", "euclidean"):
        raise ValueError(f"geometry: expected 'wasserstein' or 'euclidean', got {geometry!r}")
    settings: dict[str, Any] = {
        "rtol": rtol,
        "max_steps": max_steps,
        "generator": generator,
        "strict": strict,
        "upper_rtol": upper_rtol,
    }
    if confirm < 0:
        raise ValueError(f"confirm: expected a number ≥ 0, got {confirm}")
    whole = _confirmed_norm(tangent(F, mu, geometry), confirm, method=method, **settings)
    if geometry == "euclidean":
        return _result(whole, None, geometry)
    field = field_tangent(F, mu)
    apart = largest_block_norm(field, method=_field_method(field, method), **settings)
    return _result(whole, apart, geometry)


def _confirmed_norm(
    linear_map: LinearMap, confirm: int, *, generator: torch.Generator | None, **settings: Any
) -> NormEstimate:
    """The largest of 1 + `confirm` norm estimates from independent starts, entry by entry."""
    best = operator_norm(linear_map, generator=generator, **settings)
    for seed in range(1, confirm + 1):
        if best.n_matvecs == 0:  # factored: there is no start
            return best
        # A generator that is given goes on; the default one would start at the same place.
        source = generator or torch.Generator().manual_seed(seed)
        best = _larger(best, operator_norm(linear_map, generator=source, **settings))
    return best


def _larger(one: NormEstimate, other: NormEstimate) -> NormEstimate:
    better = other.value > one.value
    return NormEstimate(
        value=torch.where(better, other.value, one.value),
        residual=torch.where(better, other.residual, one.residual),
        error=torch.where(better, other.error, one.error),
        upper=torch.minimum(one.upper, other.upper),
        converged=torch.where(better, other.converged, one.converged),
        n_matvecs=one.n_matvecs + other.n_matvecs,
        direction=torch.where(better[..., None, None], other.direction, one.direction),
    )


def _field_method(field: LinearMap, method: str) -> str:
    if method != "auto":
        return method
    entries = field.rows * field.columns * field.batch_shape.numel()
    small = min(field.rows, field.columns) <= 16
    return "dense" if small or entries <= _FIELD_ENTRIES else "lanczos"


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
        converged=whole.converged & field.converged,
        n_matvecs=whole.n_matvecs + field.n_matvecs,
        geometry=geometry,
    )
