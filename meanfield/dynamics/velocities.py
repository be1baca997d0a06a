"""From maps of measures to velocities: one map for all times, or one map per layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meanfield.dynamics.constraints import Constraint
from meanfield.measures import MeasureMap, ParticleMeasure, check_map, image_of

__all__ = ["Layers", "Velocity", "layers_of"]


@dataclass(frozen=True, eq=False)
class Velocity:
    """x ↦ P_x Γ_μ(x) at the atoms of μ, whose weights and positions do not change.

    Attributes:
        F: Γ, as a map of measures.
        measure: a measure with these weights and positions, whatever its points.
        constraint: where the particles stay.
    """

    F: MeasureMap
    measure: ParticleMeasure
    constraint: Constraint

    def __call__(self, points: Tensor) -> Tensor:
        """The velocities (..., n, d) of particles at `points`, which are on the constraint."""
        moved = image_of(self.F, self.measure.replace(points))
        logs, image = self.measure.log_weights, moved.points
        if moved.log_weights is not logs and not torch.equal(moved.log_weights, logs):
            raise ValueError(
                "F: expected a velocity at the atoms of the measure, got an image with other "
                "weights; keep them: mu.replace(points), or pushforward(T, mu)"
            )
        if image.shape != points.shape:
            raise ValueError(
                f"F: expected an image in R^{points.shape[-1]}, where the particles are, got one "
                f"of shape {tuple(image.shape)}; a velocity has the dimension of the space"
            )
        return self.constraint.tangent(points, image)


@dataclass(frozen=True)
class Layers:
    """Which map acts when: one for all times, or the k-th for k ≤ t < k + 1.

    Attributes:
        maps: the maps.
        shared: whether the only map acts at all times.
    """

    maps: tuple[MeasureMap, ...]
    shared: bool

    def at(self, time: float, *, last: bool = False) -> MeasureMap:
        """The map that acts from a time on; the one that acted until then if it is the last."""
        if self.shared:
            return self.maps[0]
        return self.maps[math.ceil(time) - 1 if last and time > 0 else int(time)]

    def between(self, start: float, end: float) -> Iterator[tuple[MeasureMap, float, float]]:
        """The pieces of an interval in which one map acts: (map, from, to)."""
        if self.shared:
            yield self.maps[0], start, end
            return
        while start < end:
            k = int(start)
            stop = min(end, float(k + 1))
            yield self.maps[k], start, stop
            start = stop


def layers_of(F: MeasureMap | Sequence[MeasureMap], start: float, end: float) -> Layers:
    """One map for all times, or a sequence of them, checked against the times of a flow.

    Raises:
        TypeError: something that is not callable.
        ValueError: an empty sequence, or times that the layers do not cover.
    """
    sequence = isinstance(F, Sequence)
    maps: tuple[MeasureMap, ...] = tuple(F) if isinstance(F, Sequence) else (F,)
    if isinstance(F, (str, bytes)):
        raise TypeError(f"F: expected a map of measures or a list of them, got {F!r:.40}")
    for one in maps:
        check_map(one)
    if sequence and not maps:
        raise ValueError("F: expected at least one map, got an empty sequence")
    if sequence and not (start >= 0 and end <= len(maps)):
        raise ValueError(
            f"times: expected numbers in [0, {len(maps)}], the layers (layer k acts for "
            f"k ≤ t < k + 1), got [{start:g}, {end:g}]"
        )
    return Layers(maps, not sequence)
