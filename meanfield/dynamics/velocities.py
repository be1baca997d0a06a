"""From maps of measures to velocities: one map for all times, or one map per layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch

from meanfield.dynamics.constraints import Constraint, Sphere
from meanfield.images import image_of
from meanfield.layers.composition import Composite, identity_at
from meanfield.linalg import LinearMap
from meanfield.maps import Linearisation, Map, linearize
from meanfield.maps.map import as_map
from meanfield.measures import MeasureMap, ParticleMeasure


@final
@dataclass(frozen=True, eq=False, init=False)
class Velocity(Composite):
    """μ ↦ (x ↦ P_x Γ_μ(x))♯μ: the velocities of a flow as a map of measures.

    Its Lipschitz constant is what Grönwall's inequality asks for.

    Args:
        F: Γ, as a map of measures.
        constraint: where the particles stay.
    """

    constraint: Constraint

    def __init__(self, F: MeasureMap, constraint: Constraint) -> None:
        super().__init__([F])
        object.__setattr__(self, "constraint", constraint)

    def __call__(self, mu: ParticleMeasure, /) -> ParticleMeasure:
        """Each particle, which is on the constraint, moves to its velocity.

        Raises:
            ValueError: F changes the weights, or goes to another dimension.
        """
        image = image_of(self.maps[0], mu)
        logs, moved = image.log_weights, image.points
        if logs is not mu.log_weights and not torch.equal(logs, mu.log_weights):
            raise ValueError(
                "F: expected a velocity at the atoms of the measure, got an image with other "
                "weights; keep them: mu.replace(points), or pushforward(T, mu)"
            )
        if moved.shape != mu.points.shape:
            raise ValueError(
                f"F: expected an image in R^{mu.dim}, where the particles are, got one of shape "
                f"{tuple(moved.shape)}; a velocity has the dimension of the space"
            )
        return mu.replace(self.constraint.tangent(mu.points, moved))

    def linearisation(self, mu: ParticleMeasure, *, geometry: str = "euclidean") -> Linearisation:
        """The projected derivative of Γ, plus the derivative of the projection."""
        F, x, on = self.maps[0], mu.points, self.constraint
        inner = linearize(F, mu, geometry=geometry)
        if not isinstance(on, Sphere):
            return inner
        units = torch.eye(mu.dim, dtype=mu.dtype, device=mu.device)
        projection = on.tangent(x[..., None, :], units)
        turned, still = on.turned(x, image_of(F, mu).points), identity_at(mu)
        one = LinearMap.pointwise
        return Linearisation(  # `still`: without absent atoms
            one(projection) @ inner.atoms + one(turned) @ still.atoms,
            one(projection[..., None, :, :]) @ inner.field
            + one(turned[..., None, :, :]) @ still.field,
        )


@dataclass(frozen=True)
class Schedule:
    """Which map acts when: one for all times, or the k-th for k ≤ t < k + 1.

    Attributes:
        maps: the maps.
        shared: whether the only map acts at all times.
    """

    maps: tuple[Map, ...]
    shared: bool

    def at(self, time: float, *, last: bool = False) -> Map:
        """The map that acts from this time on; with `last`, the one that acts up to it."""
        if self.shared:
            return self.maps[0]
        return self.maps[math.ceil(time) - 1 if last and time > 0 else int(time)]

    def between(self, start: float, end: float) -> Iterator[tuple[Map, float, float]]:
        """The pieces of an interval in which one map acts: (map, from, to)."""
        if self.shared:
            yield self.maps[0], start, end
            return
        while start < end:
            k = int(start)
            stop = min(end, float(k + 1))
            yield self.maps[k], start, stop
            start = stop

    def check_start(self, mu: ParticleMeasure) -> None:
        """Refuse a measure that one of the maps cannot take, before any of them is called."""
        for k, F in enumerate(self.maps):
            name = "F" if self.shared else f"F[{k}]"
            if F.dim not in (None, mu.dim):
                raise ValueError(f"{name}: expected a map on R^{mu.dim}, got one on R^{F.dim}")
            if F.causal and mu.positions is None:
                raise ValueError(
                    f"mu: expected positions, which {name} looks at, got none; "
                    "ParticleMeasure.from_sequence(points) gives token i of n the position i/n"
                )


def schedule_of(F: MeasureMap | Sequence[MeasureMap], start: float, end: float) -> Schedule:
    """One map for all times, or a sequence of them, checked against the times of a flow.

    Raises:
        TypeError: something that is not callable.
        ValueError: an empty sequence, or times that the layers do not cover.
    """
    if isinstance(F, (str, bytes)):
        raise TypeError(f"F: expected a map of measures or a list of them, got {F!r:.40}")
    if not isinstance(F, Sequence):
        return Schedule((as_map(F),), shared=True)
    maps = tuple(as_map(each, f"F[{k}]") for k, each in enumerate(F))
    if not maps:
        raise ValueError("F: expected at least one map, got an empty sequence")
    if not (start >= 0 and end <= len(maps)):
        raise ValueError(
            f"times: expected numbers in [0, {len(maps)}], the layers (layer k acts for "
            f"k ≤ t < k + 1), got [{start:g}, {end:g}]"
        )
    return Schedule(maps, shared=False)
