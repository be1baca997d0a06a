"""A cheap model of a linear map on a coarse space, and what it corrects."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from meanfield.linalg.maps import CoarseSpace
from meanfield.linalg.ritz import top_ritz
from meanfield.linalg.vectors import random_vectors

__all__ = ["CoarseModel"]

# The Krylov space that the model is solved in: the vectors of its first block if none are known,
# and their share beside known ones; the most vectors of all blocks with and without known ones;
# the residual of the top vector that is as good as the model itself. Up to `_WHOLE`, it is the
# whole space.
_BLOCK, _BESIDE, _LIMIT_KNOWN, _LIMIT, _RESIDUAL, _WHOLE = 8, 0.1, 24, 96, 1e-2, 64
# The nearest that the square of a shift comes to those of the model's values, relatively.
_DISTANCE = 1e-4


class CoarseModel:
    """The largest singular values λᵢ of ZᵀJΦ and their right vectors yᵢ, roughly.

    Args:
        space: Φ and ZᵀJΦ.
        generator: of the random start.
    """

    def __init__(self, space: CoarseSpace, generator: torch.Generator) -> None:
        self._batch = space.shapes.shape[:-2]
        self._shapes = space.shapes.reshape(self._batch.numel(), *space.shapes.shape[-2:])
        size = math.prod(space.in_shape)
        whole = size <= _WHOLE
        known = None if whole else space.start
        count = size if whole else (_BLOCK if known is None else len(known))
        start = random_vectors(
            len(self._shapes),
            size,
            count,
            dtype=space.shapes.dtype,
            device=space.shapes.device,
            generator=generator,
        )
        if known is not None:
            start *= _BESIDE / math.sqrt(size)
            start += known.reshape(count, -1, size).movedim(0, -1)
        self._values, self._vectors = top_ritz(
            lambda x: self._product(space.matvec, x, space.in_shape),
            lambda z: self._product(space.rmatvec, z, space.out_shape),
            start,
            _LIMIT if known is None else _LIMIT_KNOWN,
            _RESIDUAL,
        )

    def _product(
        self, product: Callable[[Tensor], Tensor], columns: Tensor, shape: tuple[int, int]
    ) -> Tensor:
        """Of columns (batch, size, k)."""
        batch, k = len(columns), columns.shape[-1]
        image = product(columns.movedim(-1, 0).reshape(k, *self._batch, *shape))
        # It is a model: where it leaves the number range it says nothing.
        return image.reshape(k, batch, -1).movedim(0, -1).nan_to_num(0.0, 0.0, 0.0)

    def direction(self) -> Tensor:
        """Φy₁, (batch, n·d)."""
        return self._lifted(self._vectors[:, 0])

    def share(self, v: Tensor) -> Tensor:
        """‖Φᵀv‖², the share of unit vectors (batch, n·d) that lies in the coarse space."""
        fine = v.reshape(*self._shapes.shape[:2], -1)
        return (self._shapes.mT @ fine).square().sum((-2, -1))

    def corrected(self, residual: Tensor, v: Tensor, sigma: Tensor) -> Tensor:
        """A direction, (batch, n·d), that brings an approximate top singular vector v nearer.

        With the model A of JᵀJ that has the values λᵢ² on Φyᵢ and 0 beside them, Davidson's
        correction in the form of Olsen, Jørgensen and Simons (Chem. Phys. Lett. 169, 1990,
        463–472): t = (σ² − A)⁻¹ (r − εv) with ⟨t, v⟩ = 0. Without A it is the residual r, and the
        iteration Lanczos'.
        """
        squares = (self._values / torch.where(sigma > 0, sigma, 1.0)[:, None]).square()
        shift = squares[:, :1].clamp_min(1.0)
        gains = squares / torch.maximum(shift - squares, _DISTANCE * shift)
        r, w = (self._solved(x, gains.to(x.dtype)) for x in (residual, v))
        # At least ‖v‖²; v is 0 for a map that is.
        most = (v * w).sum(-1)
        along = (v * r).sum(-1) / torch.where(most > 0, most, 1.0)
        return r - along[:, None] * w

    def _solved(self, vectors: Tensor, gains: Tensor) -> Tensor:
        """σ² (σ² − A)⁻¹ of vectors (batch, n·d)."""
        fine = vectors.reshape(*self._shapes.shape[:2], -1)
        shares = self._vectors @ (self._shapes.mT @ fine).reshape(len(fine), -1, 1)
        parts = (gains[:, None] @ (shares * self._vectors))[:, 0]
        return vectors + self._lifted(parts)

    def _lifted(self, y: Tensor) -> Tensor:
        """Φy of (batch, p·d)."""
        return (self._shapes @ y.reshape(len(y), self._shapes.shape[-1], -1)).flatten(-2)
