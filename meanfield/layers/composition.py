"""Maps made of maps: what they have in common, residual maps x + scale · F(x), and sums."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import final

import torch
from torch import Tensor

from meanfield.checks import describe, name_of, number
from meanfield.habits import with_hints
from meanfield.images import image_of, kept_atoms
from meanfield.linalg import LinearMap
from meanfield.maps import BallBounds, Linearisation, Map, expanded_radii, linearize
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
        name = type(self).__name__
        if not isinstance(maps, Iterable):
            raise TypeError(f"{name}: expected a list of maps of measures, got {describe(maps)}")
        found = tuple(as_map(F, f"maps[{place}]") for place, F in enumerate(maps))
        if not found:
            raise ValueError(f"{name}: expected at least one map of measures, got none")
        object.__setattr__(self, "maps", found)

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
        raise NotImplementedError(
            f"local_upper: expected a map that declares blocks or a bound, got {name_of(self)}; "
            "local_lipschitz(F, mu).upper holds but for a stated probability"
        )


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


@with_hints
@final
@dataclass(frozen=True, eq=False, init=False)
class Residual(Composite):
    """Atoms move from xᵢ to xᵢ + scale · yᵢ, yᵢ the atom of F(μ); weights and positions stay.

    A residual block of a transformer: pre-norm is ``Residual(Chain([norm, F]))``, post-norm
    ``Chain([Residual(F), norm])``, peri-norm ``Residual(Chain([norm, F, norm]))``.

    Args:
        map: F, a map of measures into the same dimension.
        scale: factor of the displacement.

    Example:
        >>> from meanfield.layers import Pointwise
        >>> G = Residual(Pointwise(lambda x: x**2), scale=0.5)
        >>> G(ParticleMeasure([[2.0]])).points
        tensor([[4.]], dtype=torch.float64)
    """

    scale: float

    def __init__(self, map: MeasureMap, scale: float = 1.0) -> None:
        super().__init__([as_map(map, "map")])
        object.__setattr__(self, "scale", number(scale, "scale"))

    @property
    def map(self) -> Map:
        """F."""
        return self.maps[0]

    def __call__(self, mu: ParticleMeasure, /) -> ParticleMeasure:
        """The displaced measure.

        Raises:
            ValueError: F goes to another dimension, or changes weights or positions.
        """
        image = kept_atoms(image_of(self.map, mu), mu, "Residual").points
        if image.shape != mu.points.shape:
            raise ValueError(
                f"Residual: expected {name_of(self.map)} to keep the shape "
                f"{tuple(mu.points.shape)} of the points, got {tuple(image.shape)}"
            )
        # In forward mode a product with a number takes torch half a millisecond, this nothing.
        return mu.replace(torch.add(mu.points, image, alpha=self.scale))

    def linearisation(self, mu: ParticleMeasure, *, geometry: str = "euclidean") -> Linearisation:
        """I + scale · that of F, for the atoms and for the field."""
        still, moved = identity_at(mu), linearize(self.map, mu, geometry=geometry)
        return Linearisation(
            still.atoms + self.scale * moved.atoms, still.field + self.scale * moved.field
        )

    def _upper_of_parts(self, mu: ParticleMeasure) -> Tensor:
        """1 + |scale| times the bound that F declares, ``(*batch,)``."""
        return 1 + abs(self.scale) * self.map.local_upper(mu)

    def ball_bounds(
        self, mu: ParticleMeasure, radii: Tensor | float, *, splitting: bool = True
    ) -> BallBounds:
        """I + scale · J changes as scale · J does; an atom's own step adds to its displacement.

        Raises:
            NotImplementedError: F declares nothing in a ball.
        """
        found = part_in_ball(self.map, mu, radii, splitting=splitting)
        factor = abs(self.scale)
        return BallBounds.of(
            1 + factor * found.constant,
            factor * found.change,
            1 + factor * found.upper,
            expanded_radii(mu, radii) + factor * found.displacement,
        )


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
            ValueError: the maps go to several dimensions, or change weights or positions.
        """
        images = [kept_atoms(image_of(each, mu), mu, "Sum").points for each in self.maps]
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
        return BallBounds.of(*(reduce(add, parts) for parts in zip(*found, strict=True)))

    @property
    def heads(self) -> tuple[Map, ...]:  # type: ignore[override]
        """The maps."""
        return self.maps
