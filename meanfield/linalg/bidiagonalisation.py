"""Golub–Kahan bidiagonalisation of a batch of linear maps, and its orthonormal bases."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from meanfield.checks import to_host
from meanfield.linalg.linear_map import LinearMap
from meanfield.linalg.vectors import finite, lengths_in_range

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


class Steps(NamedTuple):
    """The entries of the upper bidiagonal B, (batch, steps) each, on the host in float64.

    Attributes:
        alphas: the diagonal.
        betas: beside it; the last is the length of the remainder.
        alpha_limits: what the first may be at most where rounding hides them (there they are 0).
        beta_limits: likewise.
    """

    alphas: Tensor
    betas: Tensor
    alpha_limits: Tensor
    beta_limits: Tensor


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
        self.map, self.batch = linear_map, start.shape[0]
        self.right, self.left = Basis(self.batch, start), Basis(self.batch, start)
        self.right.append(start)
        self.products = 0  # with A so far; as many with Aᵀ
        self._waiting: list[Tensor] = []
        self._steps = Steps(*torch.zeros(4, self.batch, 0, dtype=torch.float64))

    @property
    def steps(self) -> Steps:
        """The entries of B so far.

        Raises:
            OverflowError: a product was not finite.
        """
        if self._waiting:
            numbers = torch.from_numpy(to_host(torch.stack(self._waiting, -1)))
            self._waiting.clear()
            # What is not finite in a product is not finite in its length.
            numbers = finite(numbers).unflatten(-1, (-1, 6))
            alphas, alpha_limits = lengths_of(*numbers[..., :3].unbind(-1))
            betas, beta_limits = lengths_of(*numbers[..., 3:].unbind(-1))
            new = (alphas, betas, alpha_limits, beta_limits)
            both = zip(self._steps, new, strict=True)
            self._steps = Steps(*(torch.cat([old, more.double()], -1) for old, more in both))
        return self._steps

    def advance(self) -> None:
        """One product with A and one with Aᵀ."""
        alpha = self.left.extend(image(self.map, self.right.newest()))
        beta = self.right.extend(image(self.map.T, self.left.newest()))
        self._waiting += [*alpha, *beta]
        self.products += 1

    def triples(self, part: slice = slice(None)) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Left vectors, values, right vectors (rows) of B, and relative residuals."""
        alphas, betas = self.steps.alphas[part], self.steps.betas[part]
        B = torch.diag_embed(alphas) + torch.diag_embed(betas[:, :-1], offset=1)
        left, values, right = torch.linalg.svd(B)
        share = betas[:, -1:] / torch.where(values > 0, values, 1.0)
        return left, values, right, share * left[:, -1, :].abs()


def image(linear_map: LinearMap, vectors: Tensor) -> Tensor:
    """J of flat vectors (b, n·d), b the flattened batch; (b, m·e)."""
    shaped = vectors.reshape(*linear_map.batch_shape, *linear_map.in_shape)
    return linear_map.matvec(shaped).reshape(len(vectors), linear_map.rows)
