"""Maps that move every particle by itself: T♯μ, block-diagonal linearisations."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import final

import torch
from torch import Tensor

from meanfield.checks import at_once, describe, is_traced, number
from meanfield.errors import NoDerivativeError
from meanfield.habits import is_function, with_hints
from meanfield.linalg import LinearMap
from meanfield.linalg.blocks import Metric, TokenBlocks
from meanfield.linalg.vectors import normal_like, pushed_forward
from meanfield.maps import BallBounds, Linearisation, Map, expanded_radii
from meanfield.maps.autodiff import check_geometry
from meanfield.maps.derivative_checks import Product, compare, kinked, quotients
from meanfield.maps.map import scaled_radii
from meanfield.measures import ParticleMeasure, pushforward

# Allowed difference between T of one particle alone and T of all: the order of sums may differ.
_ALONE = {torch.float64: 1e-9, torch.float32: 1e-3}
# Entries of the images of unit vectors that are found at once (float64: 8 MiB).
_UNIT_ENTRIES = 2**20


def above_rounding(bounds: Tensor, terms: int) -> Tensor:
    """Raised, relatively by 1e-9 or 4 k eps, above the rounding of a norm of k terms in a row."""
    return (1 + max(1e-9, 4 * terms * torch.finfo(bounds.dtype).eps)) * bounds


def present_rows(mu: ParticleMeasure) -> Tensor:
    """1 for atoms with mass and 0 for absent ones, ``(*batch, n, 1)``."""
    return (mu.log_weights > -math.inf)[..., None].to(mu.dtype)


class Particlewise(Map):
    """A map that moves every particle by itself, with derivative εᵢ ↦ Bᵢεᵢ.

    A subclass gives `__call__` and `products`; `linearisation` and `local_upper` follow. The
    weights cancel, √aᵢ Bᵢ/√aᵢ = Bᵢ, so both geometries and both components have the same blocks.

    Attributes:
        out_dim: rows of Bᵢ; found by a product if None.
        broadcasts: whether the first product takes vectors that are the same for all atoms, many
            at once, ``(k, *(1, …), d)`` with as many axes of length 1 as μ has before d. The
            matrices Bᵢ are then found by one product instead of d.

    Example:
        >>> class Scaling(Particlewise):
        ...     def __init__(self, factors):
        ...         self.factors = factors
        ...
        ...     def __call__(self, mu):
        ...         return mu.replace(self.factors * mu.points)
        ...
        ...     def products(self, mu):
        ...         return lambda eps: self.factors * eps, lambda zeta: self.factors * zeta
        >>> F = Scaling(torch.tensor([2.0, 3.0], dtype=torch.float64))
        >>> F.local_upper(ParticleMeasure([[1.0, 1.0]]))
        tensor(3., dtype=torch.float64)
    """

    particlewise = True
    out_dim: int | None = None
    broadcasts: bool = False

    @abstractmethod
    def products(self, mu: ParticleMeasure) -> tuple[Product, Product]:
        """ε ``(*batch, n, d)`` ↦ (Bᵢεᵢ) and ζ ``(*batch, n, out_dim)`` ↦ (Bᵢᵀζᵢ) at μ."""

    def linearisation(self, mu: ParticleMeasure, *, geometry: str = "euclidean") -> Linearisation:
        """Block-diagonal; the blocks of absent atoms are 0."""
        check_geometry(geometry)
        push, pull = self.products(mu)
        present = present_rows(mu) > 0
        out_dim = self.out_dim or push(torch.zeros_like(mu.points)).shape[-1]

        @cache
        def matrices() -> Tensor:
            """Of the flattened batch."""
            blocks = torch.where(present[..., None], self._blocks(push, mu), 0.0)
            return blocks.reshape(-1, *blocks.shape[-3:])

        atoms = LinearMap.of(
            mu.points,
            lambda eps: torch.where(present, push(eps), 0.0),
            lambda zeta: torch.where(present, pull(present * zeta), 0.0),
            out_dim=out_dim,
            dense=lambda part: LinearMap.pointwise(matrices()[part]).to_dense(),
            blocks=lambda index: TokenBlocks(matrices()[index], metric=self.metric(mu, index)),
        )
        field = LinearMap.of(
            mu.points,
            atoms.matvec,
            atoms.rmatvec,
            out_dim=out_dim,
            each=True,
            dense=lambda part: matrices().flatten(0, 1)[part],
        )
        return Linearisation(atoms, field)

    def _blocks(self, push: Product, mu: ParticleMeasure) -> Tensor:
        """Bᵢ, ``(*batch, n, out_dim, d)``, from the images of the unit vectors."""
        units, points = torch.eye(mu.dim, dtype=mu.dtype, device=mu.device), mu.points
        if not self.broadcasts:
            return torch.stack([push(unit.expand(points.shape)) for unit in units], -1)
        together = max(1, at_once(_UNIT_ENTRIES, mu.device) // max(1, points.numel()))
        units = units.reshape(-1, *[1] * (points.ndim - 1), mu.dim)
        images = torch.cat([push(part) for part in units.split(together)])
        return images.expand(-1, *points.shape[:-1], -1).movedim(0, -1)

    def metric(self, mu: ParticleMeasure, index: int) -> Metric | None:
        """BᵢBᵢᵀ of one measure of the flattened batch, as a multiple of one matrix less a square.

        None where it is not of that form. Where it is, attention after the map is bounded with it.
        """
        return None

    def local_upper(self, mu: ParticleMeasure) -> Tensor:
        """maxᵢ ‖Bᵢ‖, ``(*batch,)``: the constant itself, by factoring the blocks."""
        blocks = self.linearisation(mu).field.to_dense()
        return above_rounding(torch.linalg.matrix_norm(blocks, 2).amax(-1), max(blocks.shape[-2:]))


@with_hints
@final
@dataclass(frozen=True, eq=False)
class Pointwise(Particlewise):
    """μ ↦ T♯μ for a map T of points, differentiated automatically, particle by particle.

    Args:
        transport: T, from points (..., d) to points (..., d'), each by itself, in torch
            operations.
        lipschitz: a Lipschitz constant of T on all of R^d, ∞ if none is known.
        curvature: a Lipschitz constant of DT, ∞ if none is known; 0 for a linear T. `ball_bounds`
            uses both constants and does not check them.

    Example:
        >>> Pointwise(torch.tanh)(ParticleMeasure([[0.0], [1.0]])).points
        tensor([[0.0000],
                [0.7616]], dtype=torch.float64)
    """

    transport: Callable[[Tensor], Tensor]
    lipschitz: float = math.inf
    curvature: float = math.inf

    def __post_init__(self) -> None:
        for name in ("lipschitz", "curvature"):
            number(getattr(self, name), name, least=0, finite=False)
        if not is_function(self.transport):
            raise TypeError(
                f"transport: expected a function of points, got {describe(self.transport)}"
            )

    def __call__(self, mu: ParticleMeasure, /) -> ParticleMeasure:
        """T♯μ."""
        return pushforward(self.transport, mu)

    def products(self, mu: ParticleMeasure) -> tuple[Product, Product]:
        """Those with DT(xᵢ), by automatic differentiation.

        Raises:
            ValueError: T does not move every particle by itself, or its derivative is not that of
                its values, as of what leaves torch or is detached.
            NoDerivativeError: T has none at an atom, as torch.abs at 0.
        """
        points = mu.points.detach()
        image, pull, *_ = torch.func.vjp(lambda x: self(mu.replace(x)).points, points)
        self._check_alone(points, image.detach(), present_rows(mu) > 0)

        def push(eps: Tensor) -> Tensor:
            return self._pushed(points, eps.contiguous())

        self._check_slopes(mu, image, push)
        return push, lambda zeta: pull(zeta)[0]

    def local_upper(self, mu: ParticleMeasure) -> Tensor:
        """maxᵢ ‖DT(xᵢ)‖, and `lipschitz` where T has no derivative, ``(*batch,)``."""
        try:
            return super().local_upper(mu).clamp_max(self.lipschitz)
        except NoDerivativeError:
            return mu.log_weights.new_full(mu.batch_shape, self.lipschitz)

    def ball_bounds(
        self, mu: ParticleMeasure, radii: Tensor | float, *, splitting: bool = True
    ) -> BallBounds:
        """From the two constants: |DT(x′) − DT(x)| ≤ curvature · |x′ − x|, and |DT| ≤ lipschitz.

        If one of them is ∞, so are the bounds, except at radius 0.
        """
        constant, radii = self.local_upper(mu), expanded_radii(mu, radii)
        bent = torch.where(radii > 0, self.curvature * radii, 0.0).amax(-1)
        if math.isinf(self.curvature):  # T may have a kink where its constant is attained
            bent = torch.where(constant < self.lipschitz, bent, math.inf)
        upper = torch.full_like(constant, self.lipschitz)
        near = BallBounds.of(constant, bent.minimum(constant + upper), upper, radii)
        return near._replace(displacement=scaled_radii(near.upper[..., None], radii))

    def _moved(self, points: Tensor) -> Tensor:
        """T of a copy, which it may overwrite."""
        return self.transport(points.clone())

    def _pushed(self, points: Tensor, eps: Tensor) -> Tensor:
        with suppress(NotImplementedError, RuntimeError):
            moved: Tensor = pushed_forward(self._moved, points, eps)[1]
            return moved
        # No forward derivative, as of torch.cdist: the rows of DT at all atoms at once.
        image, pull, *_ = torch.func.vjp(self._moved, points)
        units = torch.eye(image.shape[-1], dtype=image.dtype, device=image.device)
        rows = torch.stack([pull(unit.expand_as(image))[0] for unit in units], -2)
        return (rows @ eps.unsqueeze(-1)).squeeze(-1)

    def _check_slopes(self, mu: ParticleMeasure, image: Tensor, push: Product) -> None:
        points, present = mu.points.detach(), present_rows(mu) > 0
        if is_traced(points):
            return
        generator = torch.Generator().manual_seed(0)
        along = torch.where(present, normal_like(points, generator), 0.0)
        # Each atom is a measure of its own, with steps of its size, if that is not far below all.
        least = 1e-3 * torch.where(present, points, 0.0).abs().amax((-2, -1), keepdim=True)
        x, eps, y, kept = (t.unsqueeze(-2) for t in (points, along, image, present))
        found = [q.masked(kept) for q in quotients(self._moved, x, eps, y, least.unsqueeze(-1))]

        def derivative(points: Tensor) -> Tensor:
            return torch.where(kept, self._pushed(points, eps), 0.0)

        product = torch.where(present, push(along), 0.0).unsqueeze(-2)
        at, beside = kinked(found, product, x, eps, derivative)
        if bool(at.any()):
            raise NoDerivativeError(
                "Pointwise: expected a function with a derivative at every atom, got one that "
                "changes at other rates to one side than to the other, as torch.abs does at 0; "
                "move that atom a little, or give lipschitz=, with which the bounds hold there"
            )
        kept = kept & ~beside[..., None]
        found = [q.masked(kept) for q in found]
        compare(torch.where(kept, product, 0.0), found, "Pointwise")

    def _check_alone(self, points: Tensor, image: Tensor, present: Tensor) -> None:
        if is_traced(points):
            return
        room = _ALONE[points.dtype]

        def near(alone: Tensor, image: Tensor, present: Tensor) -> bool:
            if alone.shape != image.shape:
                return False
            alone, image = (torch.where(present, t, 0.0) for t in (alone, image))
            return torch.allclose(alone, image, rtol=room, atol=room * float(image.abs().max()))

        # On an axis of their own, which a mean over the particles does not see, and two in fact:
        # a mean over the first axis sees only these.
        alone = near(self._moved(points.unsqueeze(-2)).squeeze(-2), image, present)
        flat, moved, there = (t.flatten(0, -2) for t in (points, image, present))
        ends = (slice(0, 1), slice(len(flat) - 1, None))
        if not (
            alone and all(near(self._moved(flat[end]), moved[end], there[end]) for end in ends)
        ):
            raise ValueError(
                "Pointwise: expected a function that moves each particle by itself, got one "
                "whose value at a particle depends on the others; for that give a map of "
                "measures of your own, which is differentiated as a whole"
            )
