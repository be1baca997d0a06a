"""Maps of measures: what they may declare about themselves, and how they are linearised.

A map is any function that sends a `ParticleMeasure` to one with the same weights and positions.
A subclass of `Map` can say more; all members have defaults, and `as_map` wraps a plain function.
Code that takes a map calls `as_map` once and then reads these members.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from types import FunctionType
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from meanfield.checks import describe, name_of, without_autocast
from meanfield.errors import NoDerivativeError
from meanfield.habits import Hinted, NoArithmetic, with_hints
from meanfield.images import check_map
from meanfield.linalg import Certified, Dense, NormSolver, operator_norm
from meanfield.linalg.evidence import proved
from meanfield.linalg.norms import largest_block_norm
from meanfield.maps.autodiff import (
    Linearisation,
    check_declared,
    check_geometry,
    linearize_by_autodiff,
)
from meanfield.measures import MeasureMap, ParticleMeasure, check_measure

# Constants come from a factorisation up to this many coordinates n · d (half a second each), and
# for particlewise maps up to this many entries of all blocks together (a few seconds).
_FACTORED, _FACTORED_ENTRIES = 1024, 2**24

# Other classes with these members are refused: they would be ignored.
_DECLARED = {
    *("ball_bounds", "causal", "largest_logits", "linearisation", "local_upper", "particlewise"),
}


class BallBounds(NamedTuple):
    """Bounds that hold for every input in a ball around a given one; ∞ where nothing is known.

    The norm of a derivative is that on L²(μ) with atoms that may split: the larger of the two
    components of the local constant. All bounds have the leading axes of the radii.

    Attributes:
        constant: no less than the local constant at the input, ``(*batch,)``.
        change: no less than the norm of J′ − J, J the derivative at the input and J′ in the ball.
        upper: no local constant in the ball exceeds it.
        displacement: the image of atom i, if it has mass, moves by at most this,
            ``(*batch, n)``; a bound may differ where one atom is stored as two.
    """

    constant: Tensor
    change: Tensor
    upper: Tensor
    displacement: Tensor

    @classmethod
    def of(
        cls, constant: Tensor, change: Tensor, upper: Tensor, displacement: Tensor
    ) -> BallBounds:
        """With the smaller of `upper` and `constant` + `change`; NaN becomes ∞.

        NaN comes from overflow (∞ − ∞, 0 · ∞), and ∞ is a valid bound.
        """
        constant, change, upper, displacement = map(known, (constant, change, upper, displacement))
        upper = upper.minimum(constant + change)
        shape = torch.broadcast_tensors(upper, displacement[..., 0])[0].shape
        return cls(
            constant.expand(shape),
            change.expand(shape),
            upper.expand(shape),
            displacement.expand(*shape, displacement.shape[-1]),
        )

    def at_most(self, constant: Tensor) -> BallBounds:
        """The same with another bound of the local constant at the input, if that is smaller."""
        return BallBounds.of(*self._replace(constant=self.constant.minimum(constant)))

    def after(self, first: BallBounds) -> BallBounds:
        """The bounds of G∘F from those of G at F(μ) (`self`, radii F's displacement) and of F.

        J′_G J′_F − J_G J_F equals (J′_G − J_G)J′_F + J_G(J′_F − J_F) as well as
        (J′_G − J_G)J_F + J′_G(J′_F − J_F).
        """
        one = self.change * first.upper + self.constant * first.change
        other = self.change * first.constant + self.upper * first.change
        return BallBounds.of(
            self.constant * first.constant,
            known(one).minimum(known(other)),
            self.upper * first.upper,
            self.displacement,
        )


def _is_own(cls: type) -> bool:
    """Whether a class is one of the package."""
    return cls.__module__.startswith("meanfield.")


def _linearisation(own: Callable[..., Linearisation]) -> Callable[..., Linearisation]:
    """`Map.linearisation` of a class outside of the package, compared with the map's values."""

    @wraps(own)
    def linearisation(
        self: Map, mu: ParticleMeasure, *, geometry: str = "euclidean"
    ) -> Linearisation:
        found = own(self, mu, geometry=geometry)
        check_declared(self, mu, found, geometry, particlewise=self.particlewise)
        return found

    return linearisation


def _local_upper(own: Callable[..., Any]) -> Callable[..., Tensor]:
    """`Map.local_upper` of a subclass, its answer checked."""

    @wraps(own)
    def local_upper(self: Map, mu: ParticleMeasure) -> Tensor:
        name = f"local_upper of {name_of(self)}"
        return _as_bound(own(self, mu), mu, mu.batch_shape, name)

    return local_upper


def _ball_bounds(own: Callable[..., Any]) -> Callable[..., BallBounds]:
    """`Map.ball_bounds` of a subclass, its answer checked."""

    @wraps(own)
    def ball_bounds(
        self: Map, mu: ParticleMeasure, radii: Tensor | float, *, splitting: bool = True
    ) -> BallBounds:
        found, name = own(self, mu, radii, splitting=splitting), f"ball_bounds of {name_of(self)}"
        if not isinstance(found, BallBounds):
            raise TypeError(f"{name}: expected maps.BallBounds, got {describe(found)}")
        moved = torch.as_tensor(radii, device=mu.device)
        each = torch.broadcast_tensors(moved, mu.log_weights)[0].shape
        shapes = (each[:-1], each[:-1], each[:-1], each)
        fields = zip(found, shapes, BallBounds._fields, strict=True)
        return BallBounds(*(_as_bound(b, mu, of, f"{part} of {name}") for b, of, part in fields))

    return ball_bounds


def _as_bound(bound: object, mu: ParticleMeasure, shape: torch.Size, name: str) -> Tensor:
    """An upper bound of each measure in the dtype of μ, no smaller; ∞ where it is NaN."""
    if not isinstance(bound, (int, float, Tensor)):
        raise TypeError(f"{name}: expected a tensor, got {describe(bound)}")
    kind = bound.dtype if isinstance(bound, Tensor) else torch.float64
    given = torch.as_tensor(bound, dtype=kind, device=mu.device)
    kept = given.to(mu.dtype)
    above = torch.nextafter(kept, kept.new_tensor(math.inf))
    try:
        return known(torch.where(kept < given, above, kept)).expand(shape)
    except RuntimeError as error:
        raise ValueError(
            f"{name}: expected bounds of shape {tuple(shape)}, or what broadcasts to it, got "
            f"{tuple(given.shape)}"
        ) from error


def known(bound: Tensor) -> Tensor:
    """The bound, ∞ where it is NaN."""
    return bound.nan_to_num(nan=math.inf, posinf=math.inf)


class Gain(NamedTuple):
    """What is linear in a normalisation: x ↦ γ ∘ N(x) + β.

    Attributes:
        weight: γ, (d,).
        bias: β, (d,), or None for 0.
        eps: ε of N.
        centred: whether N(x) has mean 0.
        unit: N.
    """

    weight: Tensor
    bias: Tensor | None
    eps: float
    centred: bool
    unit: Map


class Map(NoArithmetic, Hinted, ABC):
    """A map of measures F that can declare its properties, its derivative and its bounds.

    A subclass gives `__call__`; everything else has a default. A derivative that a subclass gives,
    or inherits beside images of its own, is compared with difference quotients of its images at
    each call. What it declares besides is taken as true: of bounds nothing is checked but their
    shapes, and others than those are converted to the dtype of the measure, upwards.

    Attributes:
        causal: whether F is masked: an atom depends only on atoms at earlier or equal positions.
        particlewise: whether the image of every atom depends on that atom alone.
        dim: d, of the points of μ, or None if any will do.
        heads: maps whose images add up to that of F, up to a constant; none by default.
        score_matrices: A of each head of attention with scores ⟨Ax, y⟩, for which worst cases are
            known; none by default.
        gain: of a normalisation, what is linear in it; None for other maps.

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

    _instead = "F(mu) is the image; layers.Chain([F, G]) composes, layers.Residual(F) adds mu"
    causal: bool = False
    particlewise: bool = False
    dim: int | None = None
    heads: Sequence[Map] = ()
    score_matrices: Sequence[Tensor] | Tensor = ()
    gain: Gain | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # One that comes from a class of the package, or from no `Map`, may be of other images.
        owner = next(base for base in cls.__mro__ if "linearisation" in vars(base))
        is_checked = owner is not cls and issubclass(owner, Map) and not _is_own(owner)
        if not (_is_own(cls) or owner is Map or is_checked):
            cls.linearisation = _linearisation(cls.linearisation)  # type: ignore[method-assign]
        # What a map says of itself is about the numbers that come in, whatever autocast makes.
        for name in ("linearisation", "largest_logits"):
            if name in vars(cls):
                setattr(cls, name, without_autocast(vars(cls)[name]))
        # Bounds are the least of several, of which some have no gradient: that of a part is none.
        for name, checked in (("local_upper", _local_upper), ("ball_bounds", _ball_bounds)):
            if name in vars(cls):
                setattr(cls, name, torch.no_grad()(checked(without_autocast(vars(cls)[name]))))

    @property
    def stages(self) -> tuple[Map, ...]:
        """The maps that F applies one after another: F alone, unless it is a chain."""
        return (self,)

    @abstractmethod
    def __call__(self, mu: ParticleMeasure, /) -> ParticleMeasure:
        """F(μ): the atoms move, weights and positions stay."""

    @without_autocast
    def linearisation(self, mu: ParticleMeasure, *, geometry: str = "euclidean") -> Linearisation:
        """The derivative at μ, see `linearize`; by automatic differentiation if not overridden."""
        return linearize_by_autodiff(self, mu, geometry=geometry)

    def largest_logits(self, mu: ParticleMeasure) -> Tensor:
        """The largest |score| at μ of each head of attention inside F, ``(*batch, heads)``.

        They grow before training diverges; QK-clip and soft caps bound them. Without log-weights
        and without what a mask hides; a map without attention has no heads.
        """
        return mu.points.new_zeros(*mu.batch_shape, 0)

    def asks_for_gradient(self, mu: ParticleMeasure) -> bool:
        """Whether the image of μ has a gradient in something of F, such as its parameters."""
        return self(mu).points.requires_grad

    @torch.no_grad()
    @without_autocast
    def local_upper(self, mu: ParticleMeasure) -> Tensor:
        """A certain upper bound of the local Wasserstein constant at μ, ``(*batch,)``.

        From the blocks of the linearisation, if F's has them, see `meanfield.linalg.Certified`; a
        small map is factored. No gradient is recorded, in a subclass neither.

        Raises:
            NotImplementedError: F has no such blocks and declares no other bound.
        """
        at = derivative_if_any(self, mu)
        found = None if at is None else certain_norm(at)
        if found is None:
            raise NotImplementedError(
                f"F: expected a map that declares an upper bound, got {name_of(self)}; give "
                "the subclass of Map a method local_upper(mu)"
            )
        return found

    def ball_bounds(
        self, mu: ParticleMeasure, radii: Tensor | float, *, splitting: bool = True
    ) -> BallBounds:
        """Bounds that hold as atom i moves by at most radii[..., i], at fixed positions sᵢ.

        A subclass may leave `constant` at ∞: `meanfield.lipschitz.ball_upper` and chains fill it
        in from `local_upper`.
        No gradient is recorded.

        Args:
            mu: μ.
            radii: ≥ 0, ``(*batch, n)`` or broadcastable to it; further leading axes give bounds
                for each of their entries. Radii of absent atoms are ignored.
            splitting: whether atoms may split into parts that move differently.

        Raises:
            NotImplementedError: F declares none.
        """
        raise NotImplementedError(
            f"F: expected a map that declares bounds in a ball, got {name_of(self)}; "
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
            which would be ignored.
    """
    if isinstance(F, Map):
        return F
    check_map(F, name)
    declared = sorted(_DECLARED.intersection(dir(F)))
    if declared:
        raise TypeError(
            f"{name}: expected a subclass of meanfield.Map, got {type(F).__name__}, which is none "
            f"but has {', '.join(declared)}; write class {type(F).__name__}(meanfield.Map), or "
            "pass lambda mu: F(mu), which declares nothing"
        )
    return _Function(F)


@torch.no_grad()
def ball_bounds(
    F: MeasureMap, mu: ParticleMeasure, radii: Tensor | float, *, splitting: bool = True
) -> BallBounds:
    """The bounds that F declares in a ball, with `constant_upper` at μ.

    Raises:
        NotImplementedError: F declares no bounds in a ball.
    """
    F = as_map(F)
    found = F.ball_bounds(mu, radii, splitting=splitting)
    try:
        found = found.at_most(constant_upper(F, mu))
    except NotImplementedError:  # F declares bounds in a ball and none at an input
        return found
    if not F.particlewise:
        return found
    moved = scaled_radii(found.upper[..., None], expanded_radii(mu, radii))
    return found._replace(displacement=found.displacement.minimum(moved))


@with_hints
def expanded_radii(mu: ParticleMeasure, radii: Tensor | float) -> Tensor:
    """The radius of each atom, ``(*batch, n)``; 0 for absent ones.

    Raises:
        ValueError: a radius that is negative or NaN.
    """
    each = torch.as_tensor(radii, dtype=mu.dtype, device=mu.device)
    if not bool((each >= 0).all()):
        raise ValueError(f"radii: expected numbers ≥ 0, got a smallest of {float(each.min())}")
    return torch.where(mu.log_weights > -math.inf, each, 0.0)


def scaled_radii(slope: Tensor, radii: Tensor) -> Tensor:
    """slope · radii, with 0 · ∞ = 0."""
    return torch.where(radii > 0, slope * radii, 0.0)


def normalised_in_ball(size: Tensor, step: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Of z ↦ z/σ, σ² = |z|² + ε: what σ is at least, and the slope's change at most, in a ball.

    σ₋² = (√(σ²−ε) − e)₊² + ε. The second derivative is the symmetric form of 3s(s²−1)/σ²,
    s = ⟨z, h⟩/σ, so at most (2/√3)/σ² in norm; along a step σ falls by e at most, and the slope,
    which is at most 1/σ, changes by (2/√3) e/(σ(σ − e)) at most.

    Args:
        size: σ at the centre of the ball.
        step: e, how far z moves at most.
        eps: ε.
    """
    root = size.new_tensor(math.sqrt(eps))
    inside = (size - root).clamp_min(0).sqrt() * (size + root).sqrt() - step
    least = torch.where(step > 0, torch.hypot(inside.clamp_min(0), root), size)
    bent = torch.where(step < size, 2 / math.sqrt(3) * step / size / (size - step), math.inf)
    bent = bent.minimum(1 / size + 1 / least)
    return least, torch.where(step > 0, bent, 0.0)


@with_hints
@without_autocast
def linearize(F: MeasureMap, mu: ParticleMeasure, *, geometry: str = "euclidean") -> Linearisation:
    """The derivative of a map of measures at μ, weights held fixed.

    A `Map` may declare it. Otherwise it comes from automatic differentiation, and its products
    are checked once: against difference quotients, and the transpose against the product.
    No gradient is recorded: `meanfield.lipschitz.local_lipschitz` has one.

    Args:
        F: a map of measures that keeps weights, positions and the number of atoms.
        mu: μ; batch axes give a batch of maps. Atoms of weight 0 are absent.
        geometry: "euclidean": J on displacements. "wasserstein": D^½ J D^−½, D = diag(aᵢ).

    Raises:
        TypeError: F is no function, or does not return a ParticleMeasure.
        NoDerivativeError: F has no derivative at μ, as ReLU at exactly 0, or (geometry
            "wasserstein") none where atoms split, as the largest of all atoms.
        ValueError: F changes weights, positions or the number of atoms, or its derivative
            disagrees with a difference quotient; or it gives another image when called again, or
            (geometry "wasserstein") when atoms are stored in two parts.

    Example:
        >>> from meanfield.measures import ParticleMeasure, pushforward
        >>> mu = ParticleMeasure([[1.0], [2.0]])
        >>> linearize(lambda mu: pushforward(lambda x: x**2, mu), mu).atoms.to_dense()
        tensor([[2., 0.],
                [0., 4.]], dtype=torch.float64)
    """
    check_geometry(geometry)
    at = as_map(F).linearisation(check_measure(mu), geometry=geometry)
    return replace(at, atoms=at.atoms.without_gradient(), field=at.field.without_gradient())


def derivative_if_any(F: Map, mu: ParticleMeasure) -> Linearisation | None:
    """The derivative with the weights, or None where F has none, as at the kink of a ReLU."""
    try:
        return F.linearisation(check_measure(mu), geometry="wasserstein")
    except NoDerivativeError:
        return None


def has_blocks(at: Linearisation) -> bool:
    """Whether every map of the batch offers its blocks, see `meanfield.linalg.LinearMap`."""
    blocks, count = at.atoms.blocks, math.prod(at.atoms.batch_shape)
    return blocks is not None and all(blocks(index) is not None for index in range(count))


def certain_norm(at: Linearisation) -> Tensor | None:
    """A certain bound of both components from the blocks of rows, ``(*batch,)``; None without.

    Small maps are factored.
    """
    if not has_blocks(at):
        return None
    if at.atoms.columns <= _FACTORED:
        return norm_upper(at)
    whole = proved(at.atoms, Certified().weights(at.atoms))
    field, _ = largest_block_norm(at.field, solver=Dense(), strict=False, beside=whole)
    return torch.maximum(whole, field.upper)


@torch.no_grad()
def constant_upper(F: MeasureMap, mu: ParticleMeasure) -> Tensor:
    """The least certain bound of the local Wasserstein constant at μ that is known, ``(*batch,)``.

    Of a small map with a derivative it is sharp: both components are factored. Of others it is
    what they declare, see `Map.local_upper`.

    Raises:
        NotImplementedError: F is large and declares none.
    """
    F = as_map(F)
    alone, size = F.particlewise, mu.log_weights.numel() * mu.dim
    small = size * mu.dim <= _FACTORED_ENTRIES if alone else is_small(mu)
    at = derivative_if_any(F, mu) if small else None
    if at is None:
        return F.local_upper(mu)
    if alone:  # both components are one
        return largest_block_norm(at.field, solver=Dense(), strict=False)[0].upper
    return norm_upper(at)


def is_small(mu: ParticleMeasure) -> bool:
    """Whether derivatives at μ are factored."""
    return mu.n_particles * mu.dim <= _FACTORED


def norm_upper(at: Linearisation, solver: NormSolver | None = None) -> Tensor:
    """An upper end of both components, ``(*batch,)``; they are factored without a solver."""
    whole = operator_norm(at.atoms, solver=solver or Dense(), strict=False)
    blocks = None if solver else Dense()
    field, _ = largest_block_norm(at.field, solver=blocks, strict=False, beside=whole.value)
    return torch.maximum(whole.upper, field.upper)
