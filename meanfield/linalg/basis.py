"""Orthonormal vectors that grow in number."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meanfield.checks import at_once, is_host
from meanfield.linalg.vectors import lengths

# Vectors per block of memory. A single block that grows would be held twice while it is copied.
_BLOCK_VECTORS = 8
# Entries that a rotation holds beside the basis (float64: 8 MiB).
_PIECE_ENTRIES = 2**20


class Basis:
    """Orthonormal vectors (batch, count, size), in blocks that stay where they are as it grows."""

    def __init__(self, batch: int, like: Tensor) -> None:
        self.blocks: list[Tensor] = []
        self.count, self.batch, self.like = 0, batch, like

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

    def extend(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Append what the basis does not span of the vectors, of length 1.

        Returns:
            length: norm of the new direction, 0 below rounding; zeros are then appended.
            bound: the largest norm that rounding may hide. (batch,) each.
        """
        rest, length, whole = self.remainder(vectors)
        floor = 16 * torch.finfo(vectors.dtype).eps * whole
        finished = length <= floor
        # Division by ∞ leaves zeros.
        divisor = torch.where(finished, math.inf, length)[:, None]
        torch.div(rest, divisor, out=self._place(rest.shape[-1]))
        # Rounding in the vectors themselves may hide as much again.
        return torch.where(finished, 0.0, length), torch.maximum(length, 2 * floor)

    def newest(self) -> Tensor:
        """The vector appended last, (batch, size)."""
        return self.blocks[-1][:, (self.count - 1) % _BLOCK_VECTORS]

    def remainder(self, vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the basis does not span of the vectors, its length and theirs, (batch,)."""
        if self.count == 0:
            length = lengths(vectors)
            return vectors, length, length
        # Mostly along the newest vector; what is left is nearly orthogonal to the others already.
        newest = self.newest()
        share = (newest[:, None] @ vectors[..., None])[..., 0]
        vectors, taken = self._without(torch.addcmul(vectors, share, newest, value=-1))
        length = lengths(vectors)
        whole = torch.hypot(torch.hypot(share[:, 0], taken), length)
        # Twice is enough (Kahan, Parlett): one pass of Gram–Schmidt loses orthogonality when the
        # remainder is small beside what it took, and then only. To ask costs a device more.
        if not is_host(vectors.device) or not bool((taken <= length).all()):
            vectors, _ = self._without(vectors)
            length = lengths(vectors)
        return vectors, length, whole

    def _without(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """The vectors less their shares in the basis, and the length of what was taken."""
        # As rows: products of many rows with one column are several times slower.
        rows = vectors[:, None]
        shares = [rows @ block.mT for block in self._filled()]
        for block, share in zip(self._filled(), shares, strict=True):
            rows = torch.baddbmm(rows, share, block, alpha=-1)
        return rows[:, 0], lengths(torch.cat(shares, -1)[:, 0])

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

    def rotate(self, coefficients: Tensor) -> None:
        """Replace the vectors by Σ_k cₖ vₖ, orthonormal c (batch, fewer, k), in place."""
        keep, count = coefficients.shape[-2:]
        width = max(
            1, at_once(_PIECE_ENTRIES, self.like.device) // max(1, self.batch * self.count)
        )
        for start in range(0, self.blocks[0].shape[-1], width):
            piece = slice(start, start + width)
            rows = torch.cat([block[..., piece] for block in self._filled()], 1)[:, :count]
            turned = (coefficients @ rows).split(_BLOCK_VECTORS, 1)
            for block, part in zip(self.blocks, turned, strict=False):
                block[:, : part.shape[1], piece] = part
        self.count = keep
        del self.blocks[-(-keep // _BLOCK_VECTORS) :]
