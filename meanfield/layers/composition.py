"""Maps made of maps: what a composite declares follows from its parts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from meanfield.checks import describe
from meanfield.linalg import LinearMap
from meanfield.maps import BallBounds, Linearisation, Map
from meanfield.maps.map import as_map, ball_bounds
from meanfield.measures import MeasureMap, ParticleMeasure


@dataclass(frozen=True, eq=False, init=False)
class Composite(Map):
    """A map made of others, its `maps`.

    Args:
        maps: maps of measures that keep weights and positions, at least one.
    """

    maps: tuple[Map, ...]

    def __init__(self, maps: Iterable[MeasureMap]) -> None:
        object.__setattr__(self, "maps", self._checked(maps))

    @property
    def causal(self) -> bool:  # type: ignore[override]
        """Whether one of the maps is masked."""
        return any(each.causal for each in self.maps)

    @property
    def particlewise(self) -> bool:  # type: ignore[override]
        """Whether all of the maps move every particle by itself."""
        return all(each.particlewise for each in self.maps)

    @property
    def dim(self) -> int | None:  # type: ignore[override]
        """d, from the first map that declares it, or None: all take the same points."""
        return next((each.dim for each in self.maps if each.dim is not None), None)

    def largest_logits(self, mu: ParticleMeasure) -> Tensor:
        """Those of the maps, which all take μ."""
        return torch.cat([each.largest_logits(mu) for each in self.maps], -1)

    def local_upper(self, mu: ParticleMeasure) -> Tensor:
        """Of the composite as one map, if its parts can be joined; else from the parts' own.

        Raises:
            NotImplementedError: one of the parts declares no bound.
        """
        try:
            return super().local_upper(mu)
        except NotImplementedError:
            return self._upper_of_parts(mu)

    def _upper_of_parts(self, mu: ParticleMeasure) -> Tensor:
        """A bound from the bounds of the maps."""
        raise NotImplementedError

    def _checked(self, maps: Iterable[MeasureMap]) -> tuple[Map, ...]:
        name = type(self).__name__
        if not isinstance(maps, Iterable):
            raise TypeError(f"{name}: expected a list of maps of measures, got {describe(maps)}")
        found = tuple(as_map(F, f"maps[{place}]") for place, F in enumerate(maps))
        if not found:
            raise ValueError(f"{name}: expected at least one map of measures, got none")
        return found


def part_in_ball(
    F: Map, mu: ParticleMeasure, radii: Tensor | float, *, splitting: bool
) -> BallBounds:
    """The bounds of a part of a whole whose constant at μ will replace that of the part.

    Only maps of particles need theirs: it bounds how far they move them.
    """
    if F.particlewise:
        return ball_bounds(F, mu, radii, splitting=splitting)
    return F.ball_bounds(mu, radii, splitting=splitting)


def identity_at(mu: ParticleMeasure) -> Linearisation:
    """The linearisation of μ ↦ μ: atoms of weight 0 are absent from it, as from any other."""
    present = (mu.log_weights > -math.inf)[..., None].to(mu.dtype).expand(mu.points.shape)
    return Linearisation(LinearMap.diagonal(present), LinearMap.diagonal(present.unsqueeze(-2)))
