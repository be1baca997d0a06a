"""Golub–Kahan bidiagonalisation of a batch of linear maps, and its orthonormal bases."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from meanfield.checks import as_tensor, is_host, to_host
from meanfield.linalg.linear_map import LinearMap, Product
from meanfield.linalg.vectors import finite, lengths_in_range, units

# Vectors per block of memory: as many as fit this number of entries, within these bounds. A
# single block that grows would be held twice while it is copied; many small ones cost calls.
_BLOCK_ENTRIES, _LEAST_VECTORS, _MOST_VECTORS = 2**18, 8, 32
# Entries of vectors up to which NumPy calculates on the host: its calls take a quarter of the time
# of torch's. At 64 atoms in 16 dimensions 16 steps take 6 ms, and otherwise 13.
_FEW_ENTRIES = 2**14

# Tensors, or arrays where they are small: NumPy and torch name what is needed here alike.
_Values = Any


def _module_of(values: _Values) -> Any:
    return torch if isinstance(values, Tensor) else np


def lengths_of(length: _Values, whole: _Values) -> tuple[_Values, _Values]:
    """Of what `Basis.extend` returns: the length of the new direction, and what it may be at most.

    The length is 0 below rounding; rounding in the vectors themselves may hide as much again.
    """
    floor, xp = _floor(whole), _module_of(whole)
    return xp.where(length <= floor, 0.0, length), xp.maximum(length, 2 * floor)


def _floor(whole: _Values) -> _Values:
    """Lengths that rounding may be all of, beside that of the whole vector."""
    return 16 * float(_module_of(whole).finfo(whole.dtype).eps) * whole


def _lengths(vectors: _Values) -> _Values:
    if isinstance(vectors, Tensor):
        return lengths_in_range(vectors)
    return np.sqrt(np.square(vectors).sum(-1))


class Basis:
    """Orthonormal vectors (batch, count, size), in blocks that stay where they are as it grows.

    Args:
        batch: how many bases.
        like: a tensor, or an array, of the kind that the vectors are.
    """

    def __init__(self, batch: int, like: _Values) -> None:
        self.blocks: list[_Values] = []
        self.count, self.batch, self.like, self._per_block = 0, batch, like, _MOST_VECTORS

    def append(self, vectors: _Values) -> None:
        """One vector more, (batch, size)."""
        self._place(vectors.shape[-1])[...] = vectors

    def _place(self, size: int) -> _Values:
        """Where one vector more is to be written, (batch, size)."""
        if self.count == 0:
            fitting = _BLOCK_ENTRIES // max(1, self.batch * size)
            self._per_block = min(max(fitting, _LEAST_VECTORS), _MOST_VECTORS)
        if self.count % self._per_block == 0:
            shape = self.batch, self._per_block, size
            is_tensor = isinstance(self.like, Tensor)
            new = self.like.new_empty(shape) if is_tensor else np.empty(shape, self.like.dtype)
            self.blocks.append(new)
        self.count += 1
        return self.newest()

    def extend(self, vectors: _Values, *, by_recurrence: bool = False) -> tuple[_Values, _Values]:
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
        xp = _module_of(whole)
        divisor = xp.where(length <= _floor(whole), math.inf, length)[:, None]
        xp.divide(rest, divisor, out=self._place(rest.shape[-1]))
        return length, whole

    def newest(self) -> _Values:
        """The vector appended last, (batch, size)."""
        return self.blocks[-1][:, (self.count - 1) % self._per_block]

    def remainder(
        self, vectors: _Values, *, by_recurrence: bool = False
    ) -> tuple[_Values, _Values, _Values]:
        """What the basis does not span of the vectors, its length and theirs, (batch,)."""
        whole = _lengths(vectors)
        if self.count == 0:
            return vectors, whole, whole
        # Twice is enough (Kahan, Parlett): one pass of Gram–Schmidt loses orthogonality when the
        # remainder is small beside what it took. By a recurrence the newest vector takes it all.
        filled = self._filled()
        first = [self.newest()[:, None]] if by_recurrence else filled
        # As rows: products of many rows with one column are several times slower.
        rest = _without(_without(vectors[:, None], first), filled)[:, 0]
        return rest, _lengths(rest), whole

    def _filled(self) -> list[_Values]:
        last = self.blocks[-1][:, : (self.count - 1) % self._per_block + 1]
        return [*self.blocks[:-1], last]

    def combine(self, coefficients: Tensor) -> Tensor:
        """Σ_k cₖ vₖ over the first vectors: c (batch, ..., k) gives (batch, ..., size)."""
        parts = coefficients.split(self._per_block, -1)
        out = None
        for part, block in zip(parts, self.blocks, strict=False):
            block = as_tensor(block[:, : part.shape[-1]])
            term = torch.einsum("b...k,bki->b...i", part, block)
            out = term if out is None else out + term
        assert out is not None
        return out


def _without(rows: _Values, blocks: list[_Values]) -> _Values:
    """Rows (batch, 1, size) less their shares in orthonormal vectors."""
    shares = [rows @ block.swapaxes(-1, -2) for block in blocks]
    for block, share in zip(blocks, shares, strict=True):
        rows = rows - share @ block
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
    the device of A, small ones on the host in arrays. The numbers of each step wait there, packed,
    until `steps` are read: nothing else waits for a device.

    Args:
        linear_map: A.
        start: unit vectors (batch, n·d), the first column of V.
    """

    def __init__(self, linear_map: LinearMap, start: Tensor) -> None:
        self.map, self.batch = linear_map, start.shape[0]
        self._small = is_host(start.device) and start.numel() <= _FEW_ENTRIES
        self._forth, self._back = self._flat(linear_map), self._flat(linear_map.T)
        first = to_host(start) if self._small else start
        self.right, self.left = Basis(self.batch, first), Basis(self.batch, first)
        self.right.append(first)
        self.products = 0  # with A so far; as many with Aᵀ
        self._unit: _Values = None  # of the images, (batch, 1), by the first of them
        self._waiting: list[_Values] = []
        self._steps = Steps(*np.zeros((2, self.batch, 0)))

    @property
    def steps(self) -> Steps:
        """The entries of B so far.

        Raises:
            OverflowError: a product was not finite.
        """
        if self._waiting:
            columns = _module_of(self._unit).stack([*self._waiting, self._unit[:, 0]], -1)
            self._waiting.clear()
            numbers = to_host(as_tensor(columns))
            # What is not finite in a product is not finite in its length.
            finite(torch.from_numpy(numbers))
            unit = numbers[:, -1:].astype(float)
            new = lengths_of(numbers[:, 0:-1:2], numbers[:, 1:-1:2])
            both = zip(self._steps, (unit * each for each in new), strict=True)
            self._steps = Steps(*(np.concatenate(parts, -1) for parts in both))
        return self._steps

    def advance(self) -> None:
        """One product with A and one with Aᵀ."""
        with np.errstate(all="ignore"):  # `steps` says what is not finite
            image = self._in_units(self._forth(self.right.newest()))
            alpha = self.left.extend(image, by_recurrence=True)
            image = self._in_units(self._back(self.left.newest()))
            beta = self.right.extend(image, by_recurrence=True)
        self._waiting += [*alpha, *beta]
        self.products += 1

    def _flat(self, linear_map: LinearMap) -> Callable[[_Values], _Values]:
        """The product on flat vectors (b, n·d), b the flattened batch, (b, m·e)."""
        product = linear_map.matvec
        arrays = product.arrays() if self._small and isinstance(product, Product) else None

        def apply(vectors: _Values) -> _Values:
            shaped = as_tensor(vectors).view(*linear_map.batch_shape, *linear_map.in_shape)
            image = product(shaped).reshape(self.batch, linear_map.rows)
            return to_host(image) if self._small else image

        return arrays or apply

    def _in_units(self, image: _Values) -> _Values:
        """Divided by a power of two, the same always: squares of lengths stay in range."""
        if self._unit is None:
            unit = units(as_tensor(image))
            self._unit = to_host(unit) if self._small else unit
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
