"""Maps of measures: what they may declare about themselves, and how they are linearised.

A map is any function that sends a `ParticleMeasure` to one with the same weights and positions.
A subclass of `Map` can say more; all members have defaults, and `as_map` wraps a plain function.
Code that is handed a map calls `as_map` once and then reads members.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import final

import torch
from torch import Tensor

from meanfield.autodiff import Linearisation, check_geometry, linearize_by_autodiff
from meanfield.linalg import Dense, largest_block_norm, operator_norm
from meanfield.measures import MeasureMap, ParticleMeasure, check_map, check_measure, name_of

__all__ = [
    "BallBounds",
    "Linearisation",
    "Map",
    "as_map",
    "ball_bounds",
    "expanded_radii",
    "factored_constant",
    "linearize",
    "linearize_by_autodiff",
]

# Constants are factored up to this many coordinates of all atoms (half a second each), and where
# atoms move by themselves up to this many entries of their matrices (some seconds).
_FACTORED, _FACTORED_ENTRIES = 1024, 2**24

# A class with one of these expects them to be read, which happens in subclasses of `Map` only.
_DECLARED = {"ball_bounds", "causal", "linearisation", "local_upper", "particlewise"}


@dataclass(frozen=True, eq=False)
class BallBounds:
    """What holds for every input in a ball round one; ∞ where nothing is known.

    Derivatives are compared as maps of L²(μ), with atoms that have split: the norm of one is the
    larger of the two components of the local constant. All have the leading axes of
    `displacement`, those of the radii.

    Attributes:
        constant: no less than the local constant at the input, ``(*batch,)``.
        change: the derivative in the ball differs from that at the input by at most this, in norm.
        upper: no local constant in the ball exceeds it.
        displacement: the image of atom i, if it has mass, moves by at most this,
            ``(*batch, n)``.
    """

    constant: Tensor
    change: Tensor
    upper: Tensor
    displacement: Tensor

    @classmethod
    def of(
        cls, constant: Tensor, change: Tensor, upper: Tensor, displacement: Tensor
    ) -> BallBounds:
        """With the less of `upper` and `constant` + `change`; NaN is read as not known.

        Overflow leaves ∞ − ∞ and 0 · ∞ behind, and ∞ bounds everything.
        """
        constant, change, upper, displacement = (
            _known(x) for x in (constant, change, upper, displacement)
        )
        upper = upper.minimum(constant + change)
        shape = torch.broadcast_shapes(upper.shape, displacement.shape[:-1])
        return cls(
            constant.expand(shape),
            change.expand(shape),
            upper.expand(shape),
            displacement.expand(*shape, displacement.shape[-1]),
        )

    def at_most(self, constant: Tensor) -> BallBounds:
        """The same with another bound of the local constant at the input, if that is less."""
        return BallBounds.of(
            self.constant.minimum(constant), self.change, self.upper, self.displacement
        )

    def after(self, first: BallBounds) -> BallBounds:
        """Of a composition G∘F: this is G's at F(μ), within F's displacement; the other is F's.

        J′_G J′_F − J_G J_F is (J′_G − J_G)J′_F + J_G(J′_F − J_F), and it is
        (J′_G − J_G)J_F + J′_G(J′_F − J_F).
        """
        one = self.change * first.upper + self.constant * first.change
        other = self.change * first.constant + self.upper * first.change
        return BallBounds.of(
            self.constant * first.constant,
            _known(one).minimum(_known(other)),
            self.upper * first.upper,
            self.displacement,
        )


def _known(bound: Tensor) -> Tensor:
    return bound.nan_to_num(nan=math.inf, posinf=math.inf)


class Map(ABC):
    """A map of measures F that says what it knows about itself.

    A subclass gives `__call__`; everything else has a default. Whoever overrides a member
    vouches for it: nothing is checked at each call.

    Attributes:
        causal: whether it is masked: atoms see only those at earlier or equal positions.
        particlewise: whether it moves every atom by itself.
        dim: d, of the points that come in, or None if any will do.
        heads: maps whose displacements add up to those of F, but for a constant; none by default.
        score_matrices: A of each head of attention with scores ⟨Ax, y⟩, for which worst cases are
            known; none by default.

    Example:
        >>> class Twist(Map):
        ...     particlewise = True
        ...     dim = 2
        ...
        ...     def __call__(self, mu):
        ...         return mu.replace(mu.points.flip(-1))
        ...
        ...     def local_upper(self, mu):
        ...         return torch.ones(mu.batch_shape, dtype=mu.dtype)
        >>> mu = ParticleMeasure([[1.0, 2.0]])
        >>> Twist()(mu).points
        tensor([[2., 1.]], dtype=torch.float64)
        >>> linearize(Twist(), mu).field.to_dense()
        tensor([[[0., 1.],
                 [1., 0.]]], dtype=torch.float64)
    """

    causal: bool = False
    particlewise: bool = False
    dim: int | None = None
    heads: Sequence[Map] = ()
    score_matrices: Sequence[Tensor] | Tensor = ()

    @abstractmethod
    def __call__(self, mu: ParticleMeasure, /) -> ParticleMeasure:
        """F(μ): the atoms move, weights and positions stay."""

    def linearisation(self, mu: ParticleMeasure, *, geometry: str = "euclidean") -> Linearisation:
        """The derivative at μ, see `linearize`; by automatic differentiation if not overridden."""
        return linearize_by_autodiff(self, mu, geometry=geometry)

    def local_upper(self, mu: ParticleMeasure) -> Tensor:
        """A certain upper bound of the local Wasserstein constant at μ, ``(*batch,)``.

        Raises:
            NotImplementedError: F declares none.
        """
        raise NotImplementedError(
            f"local_upper: expected a map that declares a bound, got {name_of(self)}; give the "
            "subclass of Map a method local_upper(mu)"
        )

    def ball_bounds(
        self, mu: ParticleMeasure, radii: Tensor | float, *, splitting: bool = True
    ) -> BallBounds:
        """What holds as atom i moves by radii[..., i] at most, at fixed position.

        Args:
            mu: μ.
            radii: ≥ 0, ``(*batch, n)``, or what broadcasts to it; more axes before give bounds
                for each. What absent atoms do does not count.
            splitting: whether atoms may split into parts that move differently.

        Raises:
            NotImplementedError: F declares none.
        """
        raise NotImplementedError(
            f"ball_bounds: expected a map that declares bounds in a ball, got {name_of(self)}; "
            "give the subclass of Map a method ball_bounds(mu, radii, *, splitting=True)"
        )


@final
@dataclass(frozen=True)
class _Function(Map):
    """A function that declares nothing."""

    function: MeasureMap

    def __call__(self, mu: ParticleMeasure, /) -> ParticleMeasure:
        return self.function(mu)

    @property
    def __name__(self) -> str:
        own = self.function
        return own.__name__ if isinstance(own, FunctionType) else type(own).__name__


def as_map(F: MeasureMap, name: str = "F") -> Map:
    """F itself if it is a `Map`, else a map that declares nothing and calls F.

    Raises:
        TypeError: F is no function, or an object of another class that has members of `Map`,
            which nobody would read.
    """
    if isinstance(F, Map):
        return F
    check_map(F, name)
    told = sorted(_DECLARED.intersection(dir(F)))
    if told:
        raise TypeError(
            f"{name}: expected a subclass of meanfield.Map, got {type(F).__name__}, which is none "
            f"but has {', '.join(told)}; write class {type(F).__name__}(meanfield.Map), or pass "
            "lambda mu: F(mu), which declares nothing"
        )
    return _Function(F)


def ball_bounds(
    F: MeasureMap, mu: ParticleMeasure, radii: Tensor | float, *, splitting: bool = True
) -> BallBounds:
    """What F declares in a ball, with the constant at μ itself where it can be factored.

    Raises:
        NotImplementedError: it declares nothing.
    """
    F = as_map(F)
    found, constant = F.ball_bounds(mu, radii, splitting=splitting), factored_constant(F, mu)
    if constant is None:
        return found
    found = found.at_most(constant)
    if not F.particlewise:
        return found
    moved = scaled_radii(found.upper[..., None], expanded_radii(mu, radii))
    return replace(found, displacement=found.displacement.minimum(moved))


def expanded_radii(mu: ParticleMeasure, radii: Tensor | float) -> Tensor:
    """How far each atom moves, ``(*batch, n)``; absent ones do not."""
    each = torch.as_tensor(radii, dtype=mu.dtype, device=mu.device)
    return torch.where(mu.log_weights > -math.inf, each, 0.0)


def scaled_radii(slope: Tensor, radii: Tensor) -> Tensor:
    """slope · radii, with 0 · ∞ = 0."""
    return torch.where(radii > 0, slope * radii, 0.0)


def linearize(F: MeasureMap, mu: ParticleMeasure, *, geometry: str = "euclidean") -> Linearisation:
    """The derivative of a map of measures at μ, weights held fixed.

    A `Map` may declare it. Otherwise it comes from automatic differentiation, and its products
    are checked once: against a difference quotient, and the transpose against the product.

    Args:
        F: a map of measures that keeps weights, positions and the number of atoms.
        mu: μ; batch axes give a batch of maps. Atoms of weight 0 are absent.
        geometry: "euclidean": J on displacements. "wasserstein": D^½ J D^−½, D = diag(aᵢ).

    Raises:
        TypeError: F is no function, or does not return a ParticleMeasure.
        ValueError: F changes weights, positions or the number of atoms, or its derivative
            disagrees with a difference quotient.

    Example:
        >>> from meanfield.measures import ParticleMeasure, pushforward
        >>> mu = ParticleMeasure([[1.0], [2.0]])
        >>> linearize(lambda mu: pushforward(lambda x: x**2, mu), mu).atoms.to_dense()
        tensor([[2., 0.],
                [0., 4.]], dtype=torch.float64)
    """
    check_geometry(geometry)
    F = as_map(F)
    return F.linearisation(check_measure(mu), geometry=geometry)


def factored_constant(F: MeasureMap, mu: ParticleMeasure) -> Tensor | None:
    """No less than the local Wasserstein constant at μ, certain up to rounding, ``(*batch,)``.

    The larger of its two components by factoring their matrices; None where those are large.
    """
    F = as_map(F)
    alone, size = F.particlewise, mu.log_weights.numel() * mu.dim
    if size * mu.dim > _FACTORED_ENTRIES if alone else mu.n_particles * mu.dim > _FACTORED:
        return None
    at = linearize(F, mu, geometry="wasserstein")
    apart = largest_block_norm(at.field, solver=Dense(), strict=False)[0].upper
    if alone:
        return apart
    return torch.maximum(operator_norm(at.atoms, solver=Dense(), strict=False).upper, apart)
