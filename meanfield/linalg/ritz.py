"""Rough top singular vectors of cheap linear maps, many at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from meanfield.linalg.vectors import lengths

__all__ = ["top_ritz"]


def top_ritz(
    matvec: Callable[[Tensor], Tensor],
    rmatvec: Callable[[Tensor], Tensor],
    start: Tensor,
    limit: int,
    residual: float,
) -> tuple[Tensor, Tensor]:
    """σᵢ and right singular vectors of A, largest first, by a block Krylov space.

    Rayleigh and Ritz on start, AᵀA start, ... Where a product costs the reading of a matrix,
    several vectors cost hardly more than one.

    Args:
        matvec: columns (batch, n, k) ↦ (batch, m, k).
        rmatvec: the transpose.
        start: the first block, (batch, n, k).
        limit: vectors at which the space is large enough; a last block may exceed it.
        residual: ‖AᵀAv − σ²v‖/σ² of the top vectors at which it is good enough.

    Returns:
        Values (batch, c) in float64 and vectors (batch, c, n), orthonormal or 0.
    """
    new, limit = _orthonormal(start), min(limit, start.shape[-2])
    image = matvec(new)
    # Squares of the values may leave the number range.
    scale = image.abs().amax((-2, -1), keepdim=True)
    scale = torch.where(scale > 0, scale, 1.0)
    vectors, images, backs = new, image / scale, new[..., :0]
    while True:
        squares, turn = torch.linalg.eigh((images.mT @ images).double())
        squares, turn = squares.flip(-1).clamp_min(0.0), turn.flip(-1).to(images.dtype)
        if vectors.shape[-1] >= limit:
            break
        rest = rmatvec(images[..., -start.shape[-1] :]) / scale
        backs = torch.cat([backs, rest], -1)
        first = turn[..., :1]
        defect = (backs @ first - squares[:, None, :1].to(first.dtype) * (vectors @ first))[..., 0]
        if bool((lengths(defect) <= residual * squares[:, 0]).all()):
            break
        for _ in range(2):
            rest = rest - vectors @ (vectors.mT @ rest)
        new = _orthonormal(rest)
        vectors = torch.cat([vectors, new], -1)
        images = torch.cat([images, matvec(new) / scale], -1)
    return squares.sqrt() * scale[..., 0].double(), (vectors @ turn).mT


def _orthonormal(columns: Tensor) -> Tensor:
    """Orthonormal columns that span those of (batch, size, k), and 0 where they depend."""
    q, r = torch.linalg.qr(columns)
    diagonal = r.diagonal(dim1=-2, dim2=-1).abs()
    least = torch.finfo(q.dtype).eps ** 0.5 * diagonal.amax(-1, keepdim=True)
    return q * (diagonal > least)[..., None, :]
