"""LayerNorm and RMSNorm: every particle divided by its own spread; the projection onto a ball."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from meanfield.checks import (
    as_float_tensor,
    check_dim,
    check_finite,
    check_same_kind,
    is_traced,
    number,
)
from meanfield.copies import own_copy
from meanfield.errors import NoDerivativeError
from meanfield.habits import with_hints
from meanfield.layers.particlewise import Particlewise, Product, above_rounding, present_rows
from meanfield.linalg.blocks import Metric
from meanfield.linalg.vectors import beside, units
from meanfield.maps import BallBounds, expanded_radii
from meanfield.maps.map import Gain, normalised_in_ball, scaled_radii
from meanfield.measures import ParticleMeasure
from meanfield.results.labels import copied

# Sums over features are made in a tree: their rounding is that of so many terms.
_TERMS = 16


class _Norm(Particlewise):
    """x ↦ γ ∘ x̂ + β with x̂ = z/σ, σ² = mean(z²) + ε; z is x, less its mean if centred.

    The derivative is diag(γ)(I − x̂x̂ᵀ/d)/σ, times I − 11ᵀ/d on the right if centred; its norm is
    at most max|γ|/σ.
    """

    weight: Any
    bias: Any = None
    eps: float
    _centred: bool
    broadcasts = True

    def __post_init__(self) -> None:
        weight = own_copy(as_float_tensor(self.weight, "weight"), type(self).__name__)
        if weight.ndim != 1 or not len(weight):
            raise ValueError(f"weight: expected shape (d,), got {tuple(weight.shape)}")
        check_finite(weight, "weight")
        object.__setattr__(self, "weight", weight)
        object.__setattr__(self, "eps", number(self.eps, "eps", least=0))
        if self.bias is not None:
            object.__setattr__(self, "bias", _bias(self.bias, weight))

    def __deepcopy__(self, memo: dict[int, Any]) -> _Norm:
        return copied(self, memo)

    def __repr__(self) -> str:
        bias = "" if self.bias is None else ", bias"
        return f"{type(self).__name__}(dim={self.dim}, eps={self.eps:g}{bias})"

    def __call__(self, mu: ParticleMeasure, /) -> ParticleMeasure:
        """The normalised measure.

        Raises:
            ValueError: another dimension; ε = 0 and an atom of spread 0.
        """
        unit = self._unit(mu)[0]
        image = beside(self.weight, unit) * unit
        return mu.replace(image if self.bias is None else image + beside(self.bias, image))

    def products(self, mu: ParticleMeasure) -> tuple[Product, Product]:
        """The derivative at every atom and its transpose."""
        unit, spread = (t.detach() for t in self._unit(mu))

        def across(vectors: Tensor) -> Tensor:
            """(I − 11ᵀ/d − x̂x̂ᵀ/d)/σ, which is symmetric."""
            rest = vectors - unit * (unit * vectors).mean(-1, keepdim=True)
            return (rest - rest.mean(-1, keepdim=True) if self._centred else rest) / spread

        return lambda eps: self.weight * across(eps), lambda zeta: across(self.weight * zeta)

    def metric(self, mu: ParticleMeasure, index: int) -> Metric:
        """ΓCΓ/σ² less (2/d − |x̂|²/d²) γ∘x̂ (γ∘x̂)ᵀ/σ², C the centring or the identity."""
        # In double precision: where the derivative is nearly 0 its two parts cancel.
        exact: _Norm = type(self)(self.weight.double(), eps=self.eps)  # type: ignore[call-arg]
        per_token = (*exact._unit(mu.to(torch.float64)), present_rows(mu).double())
        parts = (t.detach().reshape(-1, *t.shape[-2:])[index] for t in per_token)
        unit, spread, present = parts
        spread, present = spread[:, 0], present[:, 0]
        centring = torch.eye(self.dim, dtype=torch.float64, device=mu.device)
        centring = centring - self._centred / self.dim
        scale = present / spread.square()
        less = 2 / self.dim - unit.square().sum(-1) / self.dim**2
        weight = exact.weight
        return Metric(scale, weight[:, None] * centring, scale * less, weight * unit)

    def local_upper(self, mu: ParticleMeasure) -> Tensor:
        """maxᵢ max|γ|/σ(xᵢ), ``(*batch,)``."""
        return self._largest * (present_rows(mu) / self._unit(mu)[1]).amax((-2, -1))

    def ball_bounds(
        self, mu: ParticleMeasure, radii: Tensor | float, *, splitting: bool = True
    ) -> BallBounds:
        """From `normalised_in_ball`, with a step of r/√d, times max|γ|.

        Images have length √d max|γ| at most, before β.
        """
        each, spread = expanded_radii(mu, radii), self._unit(mu)[1].squeeze(-1)
        least, bent = normalised_in_ball(spread, each / math.sqrt(mu.dim), self.eps)
        reach = scaled_radii(1 / least, each).clamp_max(2 * math.sqrt(mu.dim))
        present = mu.log_weights > -math.inf
        change, upper = (
            self._largest * torch.where(present, part, 0.0).amax(-1) for part in (bent, 1 / least)
        )
        return BallBounds.of(self.local_upper(mu), change, upper, self._largest * reach)

    @property
    def global_upper(self) -> float:
        """max|γ|/√ε, which bounds all local constants; ∞ at ε = 0."""
        largest = float(self._largest.detach())
        if not self.eps:
            return math.inf if largest else 0.0
        return largest / math.sqrt(self.eps)

    @property
    def gain(self) -> Gain:  # type: ignore[override]
        """γ and β, and this norm without them."""
        unit = type(self)(torch.ones_like(self.weight), eps=self.eps)  # type: ignore[call-arg]
        return Gain(self.weight, self.bias, self.eps, self._centred, unit)

    @property
    def dim(self) -> int:  # type: ignore[override]
        """d."""
        return len(self.weight)

    @property
    def out_dim(self) -> int:  # type: ignore[override]
        """d."""
        return len(self.weight)

    @property
    def _largest(self) -> Tensor:
        return above_rounding(self.weight.abs().max(), _TERMS)

    def _unit(self, mu: ParticleMeasure) -> tuple[Tensor, Tensor]:
        """x̂ ``(*batch, n, d)`` and the spread σ ``(*batch, n, 1)``."""
        check_dim(mu, self.dim)
        check_same_kind(self.weight, "the weight", mu.points, "the measure")
        z = mu.points
        if self._centred:
            z = z - z.mean(-1, keepdim=True)
            # Far from the origin the mean is rounded, by a mean of what is left.
            z = z - z.mean(-1, keepdim=True)
        unit = units(z, math.sqrt(self.eps))
        eps, unit = (beside(t, z) for t in (self.eps / unit / unit, unit))
        z = z / unit
        square = z.square().mean(-1, keepdim=True) + eps
        if self.eps == 0 and not is_traced(square) and bool((square == 0).any()):
            raise ValueError(
                "the normalisation is undefined at an atom of spread 0; give eps > 0, or leave "
                "the atom out"
            )
        spread = square.sqrt()
        return z / spread, spread * unit


@with_hints
@final
@dataclass(frozen=True, eq=False, repr=False)
class LayerNorm(_Norm):
    """x ↦ γ ∘ (x − x̄)/σ(x) + β, σ(x)² = mean((x − x̄)²) + ε, x̄ the mean of the coordinates.

    With x̂ = (x − x̄)/σ the derivative is diag(γ)(I − 11ᵀ/d − x̂x̂ᵀ/d)/σ, of norm at most
    max|γ|/σ(x), and so at most max|γ|/√ε anywhere: γ and β may be absorbed into whatever linear
    layer comes next.

    Args:
        weight: γ, (d,).
        bias: β, (d,), or None for 0.
        eps: ε ≥ 0; at ε = 0 the map is undefined where all coordinates agree.

    Example:
        >>> LayerNorm([1.0, 1.0], None, 0.0)(ParticleMeasure([[3.0, 5.0]])).points
        tensor([[-1.,  1.]], dtype=torch.float64)
    """

    weight: Any
    bias: Any = None
    eps: float = 1e-5
    _centred = True


@with_hints
@final
@dataclass(frozen=True, eq=False, repr=False)
class RMSNorm(_Norm):
    """x ↦ γ ∘ x/ρ(x), ρ(x)² = mean(x²) + ε: LayerNorm without its mean.

    The derivative is diag(γ)(I − x̂x̂ᵀ/d)/ρ with x̂ = x/ρ, of norm at most max|γ|/ρ(x).

    Args:
        weight: γ, (d,).
        eps: ε ≥ 0; at ε = 0 the map is undefined at 0.
    """

    weight: Any
    eps: float = 1e-6
    _centred = False


def _bias(value: Any, weight: Tensor) -> Tensor:
    bias = own_copy(as_float_tensor(value, "bias", like=weight), "LayerNorm")
    check_same_kind(weight, "weight", bias, "bias")
    if bias.shape != weight.shape:
        raise ValueError(f"bias: expected shape {tuple(weight.shape)}, got {tuple(bias.shape)}")
    check_finite(bias, "bias")
    return bias


@with_hints
@final
@dataclass(frozen=True, eq=False)
class Clip(Particlewise):
    """x ↦ x · min(1, R/|x|): the nearest point of the ball of radius R round 0.

    It has the constant 1. In front of attention it makes bounds on B_R hold everywhere: with
    n tokens, whatever comes in,

        F = Chain([Clip(R), attention])
        constant = bounds.table(attention, R, n).row("tokens").value  # not masked
        layer = Residual(Bounded(F, constant), c / constant)

    has the constant 1 + c, the recipe of [CAP24] Section 5.3 for a fixed number of tokens.

    Args:
        radius: R > 0.

    Example:
        >>> Clip(1.0)(ParticleMeasure([[3.0, 4.0], [0.5, 0.0]])).points
        tensor([[0.6000, 0.8000],
                [0.5000, 0.0000]], dtype=torch.float64)
    """

    radius: float

    broadcasts = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "radius", number(self.radius, "radius", above=0))

    def __call__(self, mu: ParticleMeasure, /) -> ParticleMeasure:
        """The projected measure."""
        return mu.replace(mu.points * self._shrinking(mu.points))

    def products(self, mu: ParticleMeasure) -> tuple[Product, Product]:
        """ε inside; (R/|x|)(ε − ⟨x̂, ε⟩x̂) outside. It is symmetric.

        Raises:
            NoDerivativeError: an atom on the sphere, where it has none.
        """
        points = mu.points.detach()
        if not is_traced(points) and bool((self._is_at_kink(mu) & (present_rows(mu) > 0)).any()):
            raise NoDerivativeError(
                f"{self!r}: expected atoms off the sphere of this radius, where the derivative "
                "jumps, got one on it; move that atom a little, or ask bounds.local_upper"
            )
        factor, inside = self._shrinking(points), self._lengths(points) < self.radius
        unit = points / self._lengths(points).clamp_min(torch.finfo(points.dtype).tiny)

        def across(eps: Tensor) -> Tensor:
            along = (unit * eps).sum(-1, keepdim=True) * unit
            return torch.where(inside, eps, factor * (eps - along))

        return across, across

    def local_upper(self, mu: ParticleMeasure) -> Tensor:
        """R/|x| of the atom that is the least far out, and 1 for one in the ball."""
        return (present_rows(mu) * self._shrinking(mu.points)).amax((-2, -1))

    def ball_bounds(
        self, mu: ParticleMeasure, radii: Tensor | float, *, splitting: bool = True
    ) -> BallBounds:
        """Derivatives are between 0 and I: they change by 1 at most, inside the ball by 0."""
        each, length = expanded_radii(mu, radii), self._lengths(mu.points).squeeze(-1)
        at_kink = self._is_at_kink(mu).squeeze(-1)
        stays = ((length + each < self.radius) | (each == 0)) & ~at_kink
        change = torch.where(stays, 0.0, 1.0).to(mu.dtype).amax(-1)
        return BallBounds.of(self.local_upper(mu), change, torch.ones_like(change), each)

    def _is_at_kink(self, mu: ParticleMeasure) -> Tensor:
        """Whether |x| is R, up to its rounding."""
        room = (mu.dim + 4) * torch.finfo(mu.dtype).eps * self.radius
        return (self._lengths(mu.points) - self.radius).abs() <= room

    def _lengths(self, points: Tensor) -> Tensor:
        unit = units(points)
        return unit * torch.linalg.vector_norm(points / unit, dim=-1, keepdim=True)

    def _shrinking(self, points: Tensor) -> Tensor:
        """min(1, R/|x|), ``(*batch, n, 1)``; its gradient is finite at 0."""
        return self.radius / self._lengths(points).clamp_min(self.radius)
