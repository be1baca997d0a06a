"""Residual maps x + scale · F(x)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor

from meanfield.checks import name_of, number
from meanfield.images import image_of
from meanfield.layers.composition import Composite, identity_at, part_in_ball
from meanfield.maps import BallBounds, Linearisation, Map, expanded_radii, linearize
from meanfield.maps.map import as_map
from meanfield.measures import MeasureMap, ParticleMeasure


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
            ValueError: F goes to another dimension.
        """
        image = image_of(self.map, mu).points
        if image.shape != mu.points.shape:
            raise ValueError(
                f"Residual: expected {name_of(self.map)} to keep the shape "
                f"{tuple(mu.points.shape)} of the points, got {tuple(image.shape)}"
            )
        return mu.replace(mu.points + self.scale * image)

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
