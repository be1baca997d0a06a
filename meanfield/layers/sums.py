"""Sums of maps of one measure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import final

from torch import Tensor

from meanfield.checks import name_of
from meanfield.images import image_of
from meanfield.layers.composition import Composite, part_in_ball
from meanfield.maps import BallBounds, Linearisation, Map, linearize
from meanfield.measures import ParticleMeasure


@final
@dataclass(frozen=True, eq=False, init=False)
class Sum(Composite):
    """Atoms move to Σ_m yᵢ^m, y^m the atoms of F_m(μ): branches side by side.

    ``Residual(Sum([attention, mlp]))`` is the parallel block of GPT-NeoX. The maps are its
    `heads`, so that `lipschitz.localize` can tell their contributions to a local constant.

    Args:
        maps: maps of measures into one dimension.
    """

    def __call__(self, mu: ParticleMeasure, /) -> ParticleMeasure:
        """The sum.

        Raises:
            ValueError: the maps go to several dimensions.
        """
        images = [image_of(each, mu).points for each in self.maps]
        if len({image.shape for image in images}) > 1:
            shapes = {name_of(F): tuple(y.shape) for F, y in zip(self.maps, images, strict=True)}
            raise ValueError(f"Sum: expected maps into one dimension, got points {shapes}")
        return mu.replace(reduce(add, images))

    def linearisation(self, mu: ParticleMeasure, *, geometry: str = "euclidean") -> Linearisation:
        """The sum of those of the maps."""
        parts = [linearize(each, mu, geometry=geometry) for each in self.maps]
        return Linearisation(
            reduce(add, [part.atoms for part in parts]),
            reduce(add, [part.field for part in parts]),
        )

    def _upper_of_parts(self, mu: ParticleMeasure) -> Tensor:
        """The sum of the maps' own bounds, ``(*batch,)``."""
        return reduce(add, [each.local_upper(mu) for each in self.maps])

    def ball_bounds(
        self, mu: ParticleMeasure, radii: Tensor | float, *, splitting: bool = True
    ) -> BallBounds:
        """The sums of what the maps declare.

        Raises:
            NotImplementedError: one of the maps declares nothing in a ball.
        """
        found = [part_in_ball(each, mu, radii, splitting=splitting) for each in self.maps]
        return BallBounds.of(
            reduce(add, [each.constant for each in found]),
            reduce(add, [each.change for each in found]),
            reduce(add, [each.upper for each in found]),
            reduce(add, [each.displacement for each in found]),
        )

    @property
    def heads(self) -> tuple[Map, ...]:  # type: ignore[override]
        """The maps."""
        return self.maps
