"""Residual layers x + c·F(x)/L that can be inverted, and the Lipschitz constants they need."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from meanfield.checks import choice, number
from meanfield.habits import with_hints
from meanfield.layers.composition import Composite, Residual, part_in_ball
from meanfield.linalg.vectors import lengths
from meanfield.maps import BallBounds, Linearisation, Map, expanded_radii, linearize
from meanfield.maps.map import as_map, scaled_radii
from meanfield.measures import MeasureMap, ParticleMeasure

_NORMS = ("l2", "max")


@with_hints
@final
@dataclass(frozen=True, eq=False, init=False)
class Bounded(Composite):
    """A map of measures with a Lipschitz constant in the norm of its atoms' displacements.

    ‖F(μ') − F(μ)‖ ≤ constant · ‖μ' − μ‖ for measures μ, μ' of the same weights, atom by atom.
    That is not checked here; `meanfield.layers.invert` relies on it, and refuses the map if it
    meets a larger ratio.

    Args:
        map: F.
        constant: the Lipschitz constant.
        norm: "l2": (Σ aᵢ|xᵢ|²)^½. "max": maxᵢ |xᵢ| over atoms that have mass.
    """

    constant: float
    norm: str

    def __init__(self, map: MeasureMap, constant: float, norm: str = "l2") -> None:
        super().__init__([as_map(map, "map")])
        object.__setattr__(self, "constant", _number(constant))
        object.__setattr__(self, "norm", choice(norm, "norm", _NORMS))

    @property
    def map(self) -> Map:
        """F."""
        return self.maps[0]

    def __call__(self, mu: ParticleMeasure, /) -> ParticleMeasure:
        """F(μ)."""
        return self.map(mu)

    def linearisation(self, mu: ParticleMeasure, *, geometry: str = "euclidean") -> Linearisation:
        """The derivative of F."""
        return linearize(self.map, mu, geometry=geometry)

    def local_upper(self, mu: ParticleMeasure) -> Tensor:
        """The bound that F declares."""
        return self.map.local_upper(mu)

    def ball_bounds(
        self, mu: ParticleMeasure, radii: Tensor | float, *, splitting: bool = True
    ) -> BallBounds:
        """The bounds that F declares, and those by the constant.

        A constant in "l2" is one of measures whose atoms keep their weights, so that it says
        nothing of atoms that split, unless F moves each by itself.

        Raises:
            NotImplementedError: F declares none, and the constant does not say enough.
        """
        if splitting and not self.particlewise:
            return part_in_ball(self.map, mu, radii, splitting=splitting)
        by_constant = self._by_constant(mu, expanded_radii(mu, radii))
        try:
            own = part_in_ball(self.map, mu, radii, splitting=splitting)
        except NotImplementedError:
            return by_constant
        return BallBounds.of(*map(torch.minimum, own, by_constant))

    def _by_constant(self, mu: ParticleMeasure, radii: Tensor) -> BallBounds:
        bound = torch.full_like(radii[..., 0], self.constant)
        present = mu.log_weights > -math.inf
        if self.norm == "max":
            far = scaled_radii(bound, torch.where(present, radii, 0.0).amax(-1))
            nothing = torch.full_like(bound, math.inf)
            return BallBounds.of(nothing, nothing, nothing, far[..., None].expand(radii.shape))
        moved = size(radii[..., None], mu, "l2")[..., None]
        roots = torch.where(present, (0.5 * mu.log_weights).exp(), 1.0)
        displacement = radii if self.particlewise else moved / roots
        change = torch.where(moved[..., 0] > 0, 2 * bound, 0.0)
        return BallBounds.of(bound, change, bound, scaled_radii(bound[..., None], displacement))


@with_hints
def contractive(F: MeasureMap, factor: float, *, constant: float, norm: str = "l2") -> Residual:
    """x + factor · F(x)/constant: the invertible residual layer of [KPM21] Section 4.

    What it adds has the Lipschitz constant `factor` < 1, so that x ↦ y − factor·F(x)/constant
    is a contraction for every y, and its fixed point is the one preimage of y.

    Args:
        F: a map of measures into the same dimension.
        factor: c, 0 < c < 1. A small one takes fewer steps to invert, a large one lets points
            move farther.
        constant: L, a Lipschitz constant of F at the weights that it will see. A bound such as
            `meanfield.bounds.l2_attention_2` (norm "l2") or `l2_attention_max` ("max") holds
            everywhere; one for tokens in a ball does behind `meanfield.layers.Clip`. A constant
            measured at a single input holds nowhere else.
        norm: the norm of L, see `Bounded`.

    Raises:
        ValueError: a factor outside (0, 1), a constant that is not finite and > 0.
        TypeError: a constant that is no number.

    Example:
        >>> from meanfield.layers import Pointwise, invert
        >>> G = contractive(Pointwise(torch.sin), 0.5, constant=1.0)
        >>> nu = G(ParticleMeasure([[1.0], [2.0]]))
        >>> invert(G, nu).measure.points
        tensor([[1.],
                [2.]], dtype=torch.float64)
    """
    # From 1 on the layer need not have an inverse.
    factor = number(factor, "factor", above=0, below=1)
    bounded = Bounded(as_map(F), constant, norm)
    if bounded.constant == 0:
        raise ValueError("constant: expected a number > 0, got 0")
    return Residual(bounded, factor / bounded.constant)


def size(displacement: Tensor, mu: ParticleMeasure, norm: str) -> Tensor:
    """The norm of displacements ``(*batch, n, d)`` of the atoms of μ, ``(*batch,)``."""
    present = mu.log_weights[..., None] > -math.inf
    each = lengths(torch.where(present, displacement, 0.0))
    if norm == "max":
        return each.amax(-1)
    return lengths((0.5 * mu.log_weights).exp() * each)


def _number(constant: object) -> float:
    try:
        return number(constant, "constant", least=0)
    except TypeError as error:
        raise TypeError(
            f"{error}; a local constant holds at one measure only, give a bound for all that the "
            "layer will see"
        ) from None
