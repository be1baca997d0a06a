"""Where a transformer normalises: Pre-, Post-, Peri-LN and nGPT as velocities of one flow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from meanfield.measures import MeasureMap, ParticleMeasure

__all__ = ["PLACEMENTS", "Normalised", "Placed", "layer_norm", "placed", "rms_norm", "unit_norm"]

PLACEMENTS = ("post", "pre", "peri", "ngpt")


def unit_norm(points: Tensor) -> Tensor:
    """x/|x|, (..., d): RMSNorm up to the constant √d."""
    return points / torch.linalg.vector_norm(points, dim=-1, keepdim=True)


def rms_norm(points: Tensor) -> Tensor:
    """√d x/|x|, (..., d)."""
    return points.shape[-1] ** 0.5 * unit_norm(points)


def layer_norm(points: Tensor) -> Tensor:
    """√d (x − x̄)/|x − x̄|, x̄ the mean of the coordinates, (..., d)."""
    return rms_norm(points - points.mean(-1, keepdim=True))


@dataclass(frozen=True)
class Normalised:
    """μ ↦ after(F(before(μ))): a map of measures with pointwise functions around it.

    Args:
        F: a map of measures.
        before: T(points (..., n, d)) applied first; nothing if None.
        after: applied last; nothing if None.
    """

    F: MeasureMap
    before: Callable[[Tensor], Tensor] | None = None
    after: Callable[[Tensor], Tensor] | None = None

    def __call__(self, mu: ParticleMeasure, /) -> ParticleMeasure:
        """The image of μ; weights and positions ride along."""
        if self.before is not None:
            mu = mu.replace(self.before(mu.points))
        image = self.F(mu)
        return image if self.after is None else image.replace(self.after(image.points))


class Placed(NamedTuple):
    """A map and the constraint of its flow, as `flow` takes them."""

    F: MeasureMap
    constraint: str | None


def placed(
    F: MeasureMap, placement: str, *, norm: Callable[[Tensor], Tensor] = unit_norm
) -> Placed:
    """The flow of a transformer that normalises at a given place.

    With N the norm, θ = N(x) and P_θ the projection on the tangent space of the sphere:
    Post-LN, N(x + F(x)), flows as θ̇ = P_θ F(θ); Pre-LN, x + F(N(x)), as ẋ = F(θ), that is
    θ̇ = P_θ F(θ)/|x|; Peri-LN, x + N(F(N(x))), as ẋ = N(F(θ)); nGPT as θ̇ = P_θ N(F(θ)).

    Args:
        F: attention, a map of measures.
        placement: "post", "pre", "peri" or "ngpt".
        norm: N, one of `unit_norm`, `rms_norm`, `layer_norm`.

    Raises:
        ValueError: an unknown placement.

    Source: Karagodin, Ge, Polyanskiy, Rigollet (arXiv 2510.22026).
    """
    if placement not in PLACEMENTS:
        raise ValueError(f"placement: expected one of {PLACEMENTS}, got {placement!r}")
    before = norm if placement in ("pre", "peri") else None
    after = norm if placement in ("peri", "ngpt") else None
    sphere = "layer_norm" if norm is layer_norm else "sphere"
    constraint = sphere if placement in ("post", "ngpt") else None
    return Placed(Normalised(F, before, after) if before or after else F, constraint)
