"""The projection onto a ball."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from meanfield.checks import number
from meanfield.layers.particlewise import Particlewise, Product
from meanfield.linalg.vectors import units
from meanfield.maps import BallBounds, expanded_radii
from meanfield.measures import ParticleMeasure


@final
@dataclass(frozen=True, eq=False)
class Clip(Particlewise):
    """x ↦ x · min(1, R/|x|): the nearest point of the ball of radius R round 0.

    It has the constant 1. In front of attention it makes bounds on B_R hold everywhere: with
    n tokens, whatever comes in,

        F = Chain([Clip(R), attention])
        constant = bounds.table(attention, R, n).row("tokens").value
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
        """ε inside; (R/|x|)(ε − ⟨x̂, ε⟩x̂) outside. It is symmetric."""
        points = mu.points.detach()
        factor, inside = self._shrinking(points), self._lengths(points) <= self.radius
        unit = points / self._lengths(points).clamp_min(torch.finfo(points.dtype).tiny)

        def across(eps: Tensor) -> Tensor:
            along = (unit * eps).sum(-1, keepdim=True) * unit
            return torch.where(inside, eps, factor * (eps - along))

        return across, across

    def ball_bounds(
        self, mu: ParticleMeasure, radii: Tensor | float, *, splitting: bool = True
    ) -> BallBounds:
        """Derivatives are between 0 and I: they change by 1 at most, inside the ball by 0."""
        each, length = expanded_radii(mu, radii), self._lengths(mu.points).squeeze(-1)
        stays = (length + each <= self.radius) | (each == 0)
        change = torch.where(stays, 0.0, 1.0).to(mu.dtype).amax(-1)
        return BallBounds.of(self.local_upper(mu), change, torch.ones_like(change), each)

    def _lengths(self, points: Tensor) -> Tensor:
        unit = units(points)
        return unit * torch.linalg.vector_norm(points / unit, dim=-1, keepdim=True)

    def _shrinking(self, points: Tensor) -> Tensor:
        """min(1, R/|x|), ``(*batch, n, 1)``; its gradient is finite at 0."""
        return self.radius / self._lengths(points).clamp_min(self.radius)
