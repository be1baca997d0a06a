"""Several maps of one measure, added up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import final

from torch import Tensor

from meanfield.capabilities import Nearby, is_causal, is_particlewise
from meanfield.layers.composition import checked_maps, dim_of, name_of, nearby_of, upper_of
from meanfield.linearisation import Linearisation, linearize
from meanfield.measures import MeasureMap, ParticleMeasure, image_of

__all__ = ["Sum"]


@final
@dataclass(frozen=True, eq=False)
class Sum:
    """Atoms move to Σ_m yᵢ^m, y^m the atoms of F_m(μ): branches side by side.

    ``Residual(Sum([attention, mlp]))`` is the parallel block of GPT-NeoX. The maps are those of
    `single_heads`, so that a local constant can be shared out among them.

    Args:
        maps: maps of measures into one dimension.
    """

    maps: Sequence[MeasureMap]

    def __post_init__(self) -> None:
        object.__setattr__(self, "maps", checked_maps(self.maps, "Sum"))

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

    def local_upper(self, mu: ParticleMeasure) -> Tensor:
        """The sum of the maps' own bounds, ``(*batch,)``."""
        return reduce(add, [upper_of(each, mu) for each in self.maps])

    def nearby(
        self, mu: ParticleMeasure, radii: Tensor | float, *, splitting: bool = True
    ) -> Nearby:
        """The sums of what the maps declare.

        Raises:
            NotImplementedError: one of the maps declares nothing near an input.
        """
        found = [nearby_of(each, mu, radii, splitting) for each in self.maps]
        return Nearby.of(
            reduce(add, [each.constant for each in found]),
            reduce(add, [each.change for each in found]),
            reduce(add, [each.upper for each in found]),
            reduce(add, [each.displacement for each in found]),
        )

    def single_heads(self) -> Sequence[MeasureMap]:
        """The maps."""
        return self.maps

    @property
    def particlewise(self) -> bool:
        """Whether all of the maps move every particle by itself."""
        return all(is_particlewise(each) for each in self.maps)

    @property
    def causal(self) -> bool:
        """Whether one of the maps is masked."""
        return any(is_causal(each) for each in self.maps)

    @property
    def dim(self) -> int:
        """d, of the first map that says it.

        Raises:
            AttributeError: none of them does.
        """
        return dim_of(self.maps)
