"""One map of measures after another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from meanfield.habits import with_hints
from meanfield.images import image_of
from meanfield.layers.composition import Composite
from meanfield.maps import BallBounds, Linearisation, Map, linearize
from meanfield.maps.intervals import Intervals
from meanfield.maps.map import certain_norm, derivative_if_any, has_blocks
from meanfield.measures import MeasureMap, ParticleMeasure


@with_hints
@final
@dataclass(frozen=True, eq=False, init=False)
class Chain(Composite):
    """μ ↦ F_m(… F_2(F_1(μ))): the first of `maps` acts first.

    Both parts of the linearisation are products of those of the maps, each at the measure that
    enters it: J = J_m ⋯ J_1, and atom by atom D_xΓ = D_xΓ^m ⋯ D_xΓ^1. The second holds since
    moving a vanishing mass changes the measure by nothing to first order, so that at each map
    only the query moves. It is not in [CAP24].

    Args:
        maps: maps of measures that keep weights and positions; chains among them are unfolded.

    Example:
        >>> from meanfield.layers import Pointwise
        >>> square = Pointwise(lambda x: x**2)
        >>> Chain([square, square])(ParticleMeasure([[2.0]])).points
        tensor([[16.]], dtype=torch.float64)
    """

    def __init__(self, maps: Iterable[MeasureMap]) -> None:
        super().__init__(maps)
        unfolded = (F.maps if isinstance(F, Chain) else (F,) for F in self.maps)
        object.__setattr__(self, "maps", sum(unfolded, ()))

    @property
    def stages(self) -> tuple[Map, ...]:
        """Its maps."""
        return self.maps

    @property
    def dim(self) -> int | None:  # type: ignore[override]
        """d, if the first map declares it: a later one declares that of the points it gets."""
        return self.maps[0].dim

    def __call__(self, mu: ParticleMeasure, /) -> ParticleMeasure:
        """F(μ)."""
        for each in self.maps:
            mu = image_of(each, mu)
        return mu

    def linearisation(self, mu: ParticleMeasure, *, geometry: str = "euclidean") -> Linearisation:
        """The product of those of the maps."""
        first, *others = self.maps
        whole = linearize(first, mu, geometry=geometry)
        for before, each in zip(self.maps, others, strict=False):
            mu = before(mu)
            whole = linearize(each, mu, geometry=geometry) @ whole
        return whole

    def largest_logits(self, mu: ParticleMeasure) -> Tensor:
        """Those of the maps, each at the measure that enters it."""
        found = []
        for each in self.maps:
            found.append(each.largest_logits(mu))
            mu = each(mu)
        return torch.cat(found, -1)

    def _upper_of_parts(self, mu: ParticleMeasure) -> Tensor:
        """The product of the bounds of runs of maps, as long ones as can be joined, ``(*batch,)``.

        Raises:
            NotImplementedError: a map has no blocks and declares no bound.
        """
        first, *others = self.maps
        bound, at = torch.ones(mu.batch_shape).to(mu.points), derivative_if_any(first, mu)
        of_run: partial[Any] = partial(first.local_upper, mu)
        for before, each in zip(self.maps, others, strict=False):
            mu = image_of(before, mu)
            here = derivative_if_any(each, mu)
            joined = None if at is None or here is None else here @ at
            if joined is not None and has_blocks(joined):
                at, of_run = joined, partial(certain_norm, joined)
            else:
                bound, at, of_run = bound * of_run(), here, partial(each.local_upper, mu)
        return bound * of_run()

    def ball_bounds(
        self, mu: ParticleMeasure, radii: Tensor | float, *, splitting: bool = True
    ) -> BallBounds:
        """Map by map, each in a ball whose radii are the displacements by the maps before it.

        Derivatives multiply, J = J_m ⋯ J_1, also where atoms have split; so do their bounds. The
        change of a product is the smaller of that of `BallBounds.after` and, for three maps or
        more of up to 1,024 coordinates n · d, that of `meanfield.maps.intervals`, which takes
        m(m + 1)/2 factorisations.

        Raises:
            NotImplementedError: one of the maps declares nothing in a ball.
        """
        return Intervals.of(self.maps, mu).within(radii, splitting=splitting)[0]
