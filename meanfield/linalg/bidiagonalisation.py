"""Golub–Kahan bidiagonalisation of a batch of linear maps, and its orthonormal bases."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from meanfield.checks import to_host
from meanfield.linalg.linear_map import LinearMap
from meanfield.linalg.vectors import finite, lengths_in_range, units

# Vectors per block of memory: as many as fit this number of entries, within these bounds. A
# single block that grows would be held twice while it is copied; many small ones cost calls.
_BLOCK_ENTRIES, _LEAST_VECTORS, _MOST_VECTORS = 2**18, 8, 32


def lengths_of(length: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """Of what `Basis.extend` returns: the length of the new direction, and what it may be at most.

    The length is 0 below rounding; rounding in the vectors themselves may hide as much again.
    """
    floor = _floor(whole)
    return torch.where(length <= floor, 0.0, length), torch.maximum(length, 2 * floor)


def _floor(whole: Tensor) -> Tensor:
    """Lengths that rounding may be all of, beside that of the whole vector."""
    return (16 * torch.finfo(whole.dtype).eps) * whole


class Basis:
    """Orthonormal vectors (batch, count, size), in blocks that stay where they are as it grows."""

    def __init__(self, batch: int, like: Tensor) -> None:
        self.blocks: list[Tensor] = []
        self.count, self.batch, self.like, self._per_block = 0, batch, like, _MOST_VECTORS
        self._infinite = like.new_full((), math.inf)

    def append(self, vectors: Tensor) -> None:
        """One vector more, (batch, size)."""
        self._place(vectors.shape[-1]).copy_(vectors)

    def _place(self, size: int) -> Tensor:
        """Where one vector more is to be written, (batch, size)."""
        if self.count == 0:
            fitting = _BLOCK_ENTRIES // max(1, self.batch * size)
            self._per_block = min(max(fitting, _LEAST_VECTORS), _MOST_VECTORS)
        if self.count % self._per_block == 0:
            self.blocks.append(self.like.new_empty(self.batch, self._per_block, size))
        self.count += 1
        return self.newest()

    def extend(self, vectors: Tensor, *, by_recurrence: bool = False) -> tuple[Tensor, Tensor]:
        """Append what the basis does not span of the vectors, of length 1.

        Args:
            vectors: (batch, size); their squares stay in the number range.
            by_recurrence: whether the basis spans no more of them, up to rounding, than the
                vector appended last does.

        Returns:
            Two lengths of each, (batch,), for `lengths_of`: of the new direction, and of the
            vectors. Zeros are appended where rounding may be all there is.
        """
        rest, length, whole = self.remainder(vectors, by_recurrence=by_recurrence)
        # Division by ∞ leaves zeros.
        divisor = torch.where(length <= _floor(whole), self._infinite, length)[:, None]
        torch.div(rest, divisor, out=self._place(rest.shape[-1]))
        return length, whole

    def newest(self) -> Tensor:
        """The vector appended last, (batch, size)."""
        return self.blocks[-1][:, (self.count - 1) % self._per_block]

    def remainder(
        self, vectors: Tensor, *, by_recurrence: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What the basis does not span of the vectors, its length and theirs, (batch,)."""
        whole = lengths_in_range(vectors)
        if self.count == 0:
            return vectors, whole, whole
        # Twice is enough (Kahan, Parlett): one pass of Gram–Schmidt loses orthogonality when the
        # remainder is small beside what it took. By a recurrence the newest vector takes it all.
        filled = self._filled()
        first = [self.newest()[:, None]] if by_recurrence else filled
        # As rows: products of many rows with one column are several times slower.
        rest = _without(_without(vectors[:, None], first), filled)[:, 0]
        return rest, lengths_in_range(rest), whole

    def _filled(self) -> list[Tensor]:
        last = self.blocks[-1][:, : (self.count - 1) % self._per_block + 1]
        return [*self.blocks[:-1], last]

    def combine(self, coefficients: Tensor) -> Tensor:
        """Σ_k cₖ vₖ over the first vectors: c (batch, ..., k) gives (batch, ..., size)."""
        parts = coefficients.split(self._per_block, -1)
        out = None
        for part, block in zip(parts, self.blocks, strict=False):
            term = torch.einsum("b...k,bki->b...i", part, block[:, : part.shape[-1]])
            out = term if out is None else out + term
        assert out is not None
        return out


def _without(rows: Tensor, blocks: list[Tensor]) -> Tensor:
    """Rows (batch, 1, size) less their shares in orthonormal vectors."""
    shares = [torch.bmm(rows, block.mT) for block in blocks]
    for block, share in zip(blocks, shares, strict=True):
        rows = torch.baddbmm(rows, share, block, alpha=-1)
    return rows


class Steps(NamedTuple):
    """The entries α₁, β₁, α₂, β₂ … of the upper bidiagonal B, (batch, 2 · steps), in float64.

    Attributes:
        lengths: α is the diagonal, β beside it; the last β is the length of the remainder.
        limits: what they may be at most where rounding hides them (there they are 0).
    """

    lengths: np.ndarray
    limits: np.ndarray

    @property
    def alphas(self) -> np.ndarray:
        """The diagonal, (batch, steps)."""
        return self.lengths[:, ::2]

    @property
    def betas(self) -> np.ndarray:
        """What stands beside it, (batch, steps)."""
        return self.lengths[:, 1::2]


class Bidiagonalisation:
    """The state of a batched Golub–Kahan–Lanczos process.

    A V = U B, Aᵀ U = V Bᵀ + β v eᵀ with V and U orthonormal, B upper bidiagonal. V and U stay on
    the device of A. The numbers of each step wait there, packed, until `steps` are read: nothing
    else waits for a device.

    Args:
        linear_map: A.
        start: unit vectors (batch, n·d), the first column of V.
    """

    def __init__(self, linear_map: LinearMap, start: Tensor) -> None:
        self.map, self._transposed, self.batch = linear_map, linear_map.T, start.shape[0]
        self.right, self.left = Basis(self.batch, start), Basis(self.batch, start)
        self.right.append(start)
        self.products = 0  # with A so far; as many with Aᵀ
        self._unit: Tensor | None = None  # of the images, (batch, 1), by the first of them
        self._waiting: list[Tensor] = []
        self._steps = Steps(*np.zeros((2, self.batch, 0)))

    @property
    def steps(self) -> Steps:
        """The entries of B so far.

        Raises:
            OverflowError: a product was not finite.
        """
        if self._waiting:
            assert self._unit is not None
            columns = torch.stack([*self._waiting, self._unit[:, 0]], -1)
            self._waiting.clear()
            # What is not finite in a product is not finite in its length.
            numbers = finite(torch.from_numpy(to_host(columns)))
            unit = to_host(numbers[:, -1:].double())
            new = lengths_of(numbers[:, 0:-1:2], numbers[:, 1:-1:2])
            both = zip(self._steps, (unit * to_host(each) for each in new), strict=True)
            self._steps = Steps(*(np.concatenate(parts, -1) for parts in both))
        return self._steps

    def advance(self) -> None:
        """One product with A and one with Aᵀ."""
        image = self._image(self.map, self.right.newest())
        alpha = self.left.extend(image, by_recurrence=True)
        image = self._image(self._transposed, self.left.newest())
        beta = self.right.extend(image, by_recurrence=True)
        self._waiting += [*alpha, *beta]
        self.products += 1

    def _image(self, linear_map: LinearMap, vectors: Tensor) -> Tensor:
        """J of flat vectors (b, n·d), b the flattened batch, in units of the first; (b, m·e)."""
        shaped = vectors.view(*linear_map.batch_shape, *linear_map.in_shape)
        image = linear_map.matvec(shaped).reshape(self.batch, linear_map.rows)
        if self._unit is None:
            # Powers of two, once: no square of a length then leaves the number range.
            self._unit = units(image)
        return image / self._unit

    def triples(
        self, part: slice = slice(None)
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Left vectors, values, right vectors (rows) of B, and relative residuals."""
        alphas, betas = self.steps.alphas[part], self.steps.betas[part]
        B = np.zeros((*alphas.shape, alphas.shape[-1]))
        step = np.arange(self.products)
        B[:, step, step], B[:, step[:-1], step[1:]] = alphas, betas[:, :-1]
        left, values, right = np.linalg.svd(B)
        share = betas[:, -1:] / np.where(values > 0, values, 1.0)
        return left, values, right, share * np.abs(left[:, -1, :])
