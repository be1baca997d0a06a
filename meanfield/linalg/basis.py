"""Orthonormal vectors that grow in number."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meanfield.linalg.vectors import lengths_in_range

# Vectors per block of memory. A single block that grows would be held twice while it is copied.
_BLOCK_VECTORS = 8


def lengths_of(length: Tensor, whole: Tensor, peak: Tensor) -> tuple[Tensor, Tensor]:
    """Of what `Basis.extend` returns: the length of the new direction, and what it may be at most.

    The length is 0 below rounding; rounding in the vectors themselves may hide as much again.
    """
    floor = _floor(whole)
    hidden = torch.where(length <= floor, 0.0, length)
    return peak * hidden, peak * torch.maximum(length, 2 * floor)


def _floor(whole: Tensor) -> Tensor:
    """Lengths that rounding may be all of, beside that of the whole vector."""
    return 16 * torch.finfo(whole.dtype).eps * whole


class Basis:
    """Orthonormal vectors (batch, count, size), in blocks that stay where they are as it grows."""

    def __init__(self, batch: int, like: Tensor) -> None:
        self.blocks: list[Tensor] = []
        self.count, self.batch, self.like = 0, batch, like
        self._infinite = like.new_full((), math.inf)

    def append(self, vectors: Tensor) -> None:
        """One vector more, (batch, size)."""
        self._place(vectors.shape[-1]).copy_(vectors)

    def _place(self, size: int) -> Tensor:
        """Where one vector more is to be written, (batch, size)."""
        place = self.count % _BLOCK_VECTORS
        if place == 0:
            self.blocks.append(self.like.new_empty(self.batch, _BLOCK_VECTORS, size))
        self.count += 1
        return self.blocks[-1][:, place]

    def extend(self, vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Append what the basis does not span of the vectors, of length 1.

        Returns:
            Three lengths of each, (batch,), for `lengths_of`: of the new direction and of the
            vectors, both in the unit of the third, their largest entry. Zeros are appended where
            rounding may be all there is.
        """
        # Scaled once: no square of a length then leaves the number range.
        least = torch.finfo(vectors.dtype).tiny
        peak = torch.linalg.vector_norm(vectors, math.inf, dim=-1).clamp_min(least)
        rest, length, whole = self.remainder(vectors / peak[:, None])
        # Division by ∞ leaves zeros.
        divisor = torch.where(length <= _floor(whole), self._infinite, length)[:, None]
        torch.div(rest, divisor, out=self._place(rest.shape[-1]))
        return length, whole, peak

    def newest(self) -> Tensor:
        """The vector appended last, (batch, size)."""
        return self.blocks[-1][:, (self.count - 1) % _BLOCK_VECTORS]

    def remainder(self, vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the basis does not span of the vectors, its length and theirs, (batch,)."""
        whole = lengths_in_range(vectors)
        if self.count == 0:
            return vectors, whole, whole
        # Twice is enough (Kahan, Parlett): one pass of Gram–Schmidt loses orthogonality when the
        # remainder is small beside what it took.
        rest = self._without(self._without(vectors))
        return rest, lengths_in_range(rest), whole

    def _without(self, vectors: Tensor) -> Tensor:
        """The vectors less their shares in the basis."""
        # As rows: products of many rows with one column are several times slower.
        rows = vectors[:, None]
        shares = [rows @ block.mT for block in self._filled()]
        for block, share in zip(self._filled(), shares, strict=True):
            rows = torch.baddbmm(rows, share, block, alpha=-1)
        return rows[:, 0]

    def _filled(self) -> list[Tensor]:
        if not self.blocks:
            return []
        last = self.blocks[-1][:, : (self.count - 1) % _BLOCK_VECTORS + 1]
        return [*self.blocks[:-1], last]

    def combine(self, coefficients: Tensor) -> Tensor:
        """Σ_k cₖ vₖ over the first vectors: c (batch, ..., k) gives (batch, ..., size)."""
        parts = coefficients.split(_BLOCK_VECTORS, -1)
        out = None
        for part, block in zip(parts, self.blocks, strict=False):
            term = torch.einsum("b...k,bki->b...i", part, block[:, : part.shape[-1]])
            out = term if out is None else out + term
        assert out is not None
        return out
