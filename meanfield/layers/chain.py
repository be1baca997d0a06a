"""One map of measures after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from meanfield.capabilities import Nearby, is_causal, is_particlewise
from meanfield.layers.composition import checked_maps, dim_of, nearby_of, upper_of
from meanfield.linearisation import Linearisation, linearize
from meanfield.measures import MeasureMap, ParticleMeasure, image_of

__all__ = ["Chain"]


@final
@dataclass(frozen=True, eq=False)
class Chain:
    """μ ↦ F_m(… F_2(F_1(μ))): the first of `maps` acts first.

    Both parts of the linearisation are products of those of the maps, each at the measure that
    enters it: J = J_m ⋯ J_1, and atom by atom D_xΓ = D_xΓ^m ⋯ D_xΓ^1. The second holds since a
    vanishing mass that splits moves no measure to first order, so that each map sees a query
    that moves alone. It is not in [CAP24].

    Args:
        maps: maps of measures that keep weights and positions; chains among them are unfolded.

    Example:
        >>> from meanfield.layers import Pointwise
        >>> square = Pointwise(lambda x: x**2)
        >>> Chain([square, square])(ParticleMeasure([[2.0]])).points
        tensor([[16.]], dtype=torch.float64)
    """

    maps: Sequence[MeasureMap]

    def __post_init__(self) -> None:
        parts: list[MeasureMap] = []
        for each in checked_maps(self.maps, "Chain"):
            parts += each.maps if isinstance(each, Chain) else [each]
        object.__setattr__(self, "maps", tuple(parts))

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

    def local_upper(self, mu: ParticleMeasure) -> Tensor:
        """The product of the maps' own bounds, each at the measure that enters it, ``(*batch,)``.

        Raises:
            NotImplementedError: one of them declares none.
        """
        bound = upper_of(self.maps[0], mu)
        for before, each in zip(self.maps, self.maps[1:], strict=False):
            mu = before(mu)
            bound = bound * upper_of(each, mu)
        return bound

    def nearby(
        self, mu: ParticleMeasure, radii: Tensor | float, *, splitting: bool = True
    ) -> Nearby:
        """Map by map, each within the displacement of those before it.

        Derivatives multiply, J = J_m ⋯ J_1, also where atoms have split; so do their bounds, and
        the change of a product is that of `Nearby.after`.

        Raises:
            NotImplementedError: one of the maps declares nothing near an input.
        """
        whole = nearby_of(self.maps[0], mu, radii, splitting)
        for before, each in zip(self.maps, self.maps[1:], strict=False):
            mu = before(mu)
            whole = nearby_of(each, mu, whole.displacement, splitting).after(whole)
        return whole

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
        """d, of the points that come in: that of the first map that says it.

        Raises:
            AttributeError: none of them does.
        """
        return dim_of(self.maps)
