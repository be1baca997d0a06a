"""LayerNorm and RMSNorm: every particle divided by its own spread."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from meanfield.capabilities import Nearby
from meanfield.checks import as_float_tensor, check_finite, check_same_kind, is_traced, number
from meanfield.layers.particlewise import blockwise, expanded_radii, present_rows, scaled_radii
from meanfield.linearisation import Linearisation
from meanfield.measures import ParticleMeasure

__all__ = ["LayerNorm", "RMSNorm"]

# Relative: what upper bounds are raised by, to stay above the rounding of what they come from.
_ROUNDING = 1e-9


@final
@dataclass(frozen=True, eq=False)
class LayerNorm:
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

    def __post_init__(self) -> None:
        weight, eps = _checked(self.weight, self.eps)
        object.__setattr__(self, "weight", weight)
        object.__setattr__(self, "eps", eps)
        if self.bias is not None:
            bias = as_float_tensor(self.bias, "bias", like=weight)
            check_same_kind(weight, "weight", bias, "bias")
            if bias.shape != weight.shape:
                raise ValueError(
                    f"bias: expected shape {tuple(weight.shape)}, got {tuple(bias.shape)}"
                )
            check_finite(bias, "bias")
            object.__setattr__(self, "bias", bias)

    def __call__(self, mu: ParticleMeasure, /) -> ParticleMeasure:
        """The normalised measure.

        Raises:
            ValueError: another dimension; ε = 0 and an atom whose coordinates agree.
        """
        unit, _ = _unit(mu, self.weight, self.eps, centred=True)
        image = self.weight * unit
        return mu.replace(image if self.bias is None else image + self.bias)

    def linearisation(self, mu: ParticleMeasure, *, geometry: str = "euclidean") -> Linearisation:
        """diag(γ)(I − 11ᵀ/d − x̂x̂ᵀ/d)/σ at every atom."""
        return _linearisation(mu, self.weight, self.eps, geometry, centred=True)

    def local_upper(self, mu: ParticleMeasure) -> Tensor:
        """maxᵢ max|γ|/σ(xᵢ), ``(*batch,)``."""
        return _local_upper(mu, self.weight, self.eps, centred=True)

    def nearby(
        self, mu: ParticleMeasure, radii: Tensor | float, *, splitting: bool = True
    ) -> Nearby:
        """With σ₋ the least spread within the radius r, e = r/√d: σ₋² = (√(σ²−ε) − e)₊² + ε.

        The derivative is at most max|γ|/σ₋. The second derivative of z ↦ z/(|z|²+ε)^½ is the
        symmetric form of 3s(s²−1)/σ², s = ⟨z, h⟩/σ, so at most (2/√3)/σ² in norm; along a step
        σ falls by e at most, and the derivative changes by (2/√3) max|γ| e/(σ(σ − e)) at most.
        Images have length √d max|γ| at most, before β.
        """
        return _nearby(mu, self.weight, self.eps, radii, centred=True)

    @property
    def global_upper(self) -> float:
        """max|γ|/√ε: no local constant is above it; ∞ at ε = 0."""
        return _global_upper(self.weight, self.eps)

    @property
    def particlewise(self) -> bool:
        """Every particle moves by itself."""
        return True

    @property
    def dim(self) -> int:
        """d."""
        return len(self.weight)


@final
@dataclass(frozen=True, eq=False)
class RMSNorm:
    """x ↦ γ ∘ x/ρ(x), ρ(x)² = mean(x²) + ε: LayerNorm without its mean.

    The derivative is diag(γ)(I − x̂x̂ᵀ/d)/ρ with x̂ = x/ρ, of norm at most max|γ|/ρ(x).

    Args:
        weight: γ, (d,).
        eps: ε ≥ 0; at ε = 0 the map is undefined at 0.
    """

    weight: Any
    eps: float = 1e-6

    def __post_init__(self) -> None:
        weight, eps = _checked(self.weight, self.eps)
        object.__setattr__(self, "weight", weight)
        object.__setattr__(self, "eps", eps)

    def __call__(self, mu: ParticleMeasure, /) -> ParticleMeasure:
        """The normalised measure.

        Raises:
            ValueError: another dimension; ε = 0 and an atom at 0.
        """
        unit, _ = _unit(mu, self.weight, self.eps, centred=False)
        return mu.replace(self.weight * unit)

    def linearisation(self, mu: ParticleMeasure, *, geometry: str = "euclidean") -> Linearisation:
        """diag(γ)(I − x̂x̂ᵀ/d)/ρ at every atom."""
        return _linearisation(mu, self.weight, self.eps, geometry, centred=False)

    def local_upper(self, mu: ParticleMeasure) -> Tensor:
        """maxᵢ max|γ|/ρ(xᵢ), ``(*batch,)``."""
        return _local_upper(mu, self.weight, self.eps, centred=False)

    def nearby(
        self, mu: ParticleMeasure, radii: Tensor | float, *, splitting: bool = True
    ) -> Nearby:
        """As `LayerNorm.nearby`, with ρ for σ."""
        return _nearby(mu, self.weight, self.eps, radii, centred=False)

    @property
    def global_upper(self) -> float:
        """max|γ|/√ε: no local constant is above it; ∞ at ε = 0."""
        return _global_upper(self.weight, self.eps)

    @property
    def particlewise(self) -> bool:
        """Every particle moves by itself."""
        return True

    @property
    def dim(self) -> int:
        """d."""
        return len(self.weight)


def _checked(weight: Any, eps: float) -> tuple[Tensor, float]:
    tensor = as_float_tensor(weight, "weight")
    if tensor.ndim != 1 or not len(tensor):
        raise ValueError(f"weight: expected shape (d,), got {tuple(tensor.shape)}")
    check_finite(tensor, "weight")
    return tensor, number(eps, "eps", least=0)


def _unit(
    mu: ParticleMeasure, weight: Tensor, eps: float, *, centred: bool
) -> tuple[Tensor, Tensor]:
    """x̂ ``(*batch, n, d)`` and the spread ``(*batch, n, 1)``."""
    if mu.dim != len(weight):
        raise ValueError(f"expected a measure on R^{len(weight)}, got one on R^{mu.dim}")
    check_same_kind(weight, "the weight", mu.points, "the measure")
    x = mu.points
    if centred:
        x = x - x.mean(-1, keepdim=True)
    square = x.square().mean(-1, keepdim=True) + eps
    if eps == 0 and not is_traced(square) and bool((square == 0).any()):
        raise ValueError(
            "the normalisation is undefined at an atom of spread 0; give eps > 0, or leave the "
            "atom out"
        )
    spread = square.sqrt()
    return x / spread, spread


def _linearisation(
    mu: ParticleMeasure, weight: Tensor, eps: float, geometry: str, *, centred: bool
) -> Linearisation:
    unit, spread = (t.detach() for t in _unit(mu, weight, eps, centred=centred))

    def across(vectors: Tensor) -> Tensor:
        """(I − 11ᵀ/d − x̂x̂ᵀ/d)/σ, which is symmetric."""
        rest = vectors - unit * (unit * vectors).mean(-1, keepdim=True)
        return (rest - rest.mean(-1, keepdim=True) if centred else rest) / spread

    push: Callable[[Tensor], Tensor] = lambda eps: weight * across(eps)  # noqa: E731
    return blockwise(mu, push, lambda zeta: across(weight * zeta), mu.dim, geometry)


def _local_upper(mu: ParticleMeasure, weight: Tensor, eps: float, *, centred: bool) -> Tensor:
    _, spread = _unit(mu, weight, eps, centred=centred)
    largest = (present_rows(mu) / spread).amax((-2, -1))
    return (1 + _ROUNDING) * weight.abs().max() * largest


def _nearby(
    mu: ParticleMeasure, weight: Tensor, eps: float, radii: Tensor | float, *, centred: bool
) -> Nearby:
    each, largest = expanded_radii(mu, radii), (1 + _ROUNDING) * weight.abs().max()
    spread = _unit(mu, weight, eps, centred=centred)[1].squeeze(-1)
    step = each / math.sqrt(mu.dim)
    least = ((spread.square() - eps).clamp_min(0).sqrt() - step).clamp_min(0).square().add(eps)
    least = torch.where(step > 0, least.sqrt(), spread)
    bent = torch.where(step < spread, step / (spread * (spread - step)), math.inf)
    bent = (2 / math.sqrt(3) * bent).minimum(1 / spread + 1 / least)
    reach = scaled_radii(1 / least, each).clamp_max(2 * math.sqrt(mu.dim))
    present = mu.log_weights > -math.inf
    change, upper = (
        largest * torch.where(present, part, 0.0).amax(-1) for part in (bent, 1 / least)
    )
    constant = _local_upper(mu, weight, eps, centred=centred)
    return Nearby.of(constant, change, upper, largest * reach)


def _global_upper(weight: Tensor, eps: float) -> float:
    largest = float(weight.abs().max())
    if not eps:
        return math.inf if largest else 0.0
    return (1 + _ROUNDING) * largest / math.sqrt(eps)
