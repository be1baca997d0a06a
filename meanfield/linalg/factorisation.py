"""Norms of small maps, from the eigenvectors of their Gram matrices."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from meanfield.linalg.evidence import NormEstimate
from meanfield.linalg.linear_map import LinearMap
from meanfield.linalg.vectors import lengths

__all__ = ["dense_norm", "largest_dense"]

# Entries of one chunk of dense matrices (float64: 8 MiB); larger batches go chunk by chunk.
_CHUNK_ENTRIES = 2**20


def largest_dense(linear_map: LinearMap, rtol: float) -> tuple[NormEstimate, Tensor]:
    """Blocks whose Frobenius norm is below a spectral norm already found are not factored."""
    n = linear_map.batch_shape[-1]
    blocks = linear_map.to_dense().reshape(-1, n, linear_map.rows, linear_map.columns)
    frobenius = lengths(blocks.flatten(-2))
    every = torch.arange(len(blocks), device=blocks.device)
    best = frobenius.argmax(-1)
    sigma, v, residual = _factor(blocks[every, best])
    frobenius[every, best] = -1.0
    rows, others = (frobenius > sigma[:, None]).nonzero(as_tuple=True)
    if len(rows):
        more, v_more, residual_more = _factor(blocks[rows, others])
        # The largest of each row: sorted by value, the last write to a row wins.
        order = more.argsort()
        winner = torch.full_like(every, -1).scatter_reduce(
            0, rows[order], torch.arange(len(order), device=blocks.device), "amax"
        )
        place = order[winner.clamp_min(0)]
        better = (winner >= 0) & (more[place] > sigma)
        sigma = torch.where(better, more[place], sigma)
        v = torch.where(better[:, None], v_more[place], v)
        residual = torch.where(better, residual_more[place], residual)
        best = torch.where(better, others[place], best)
    shape = linear_map.batch_shape[:-1]
    estimate = _dense_estimate(sigma, v, residual, shape, linear_map, rtol)
    return estimate, best.reshape(shape)


def _factor(matrices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(σ, v, relative residual) of each matrix (b, rows, columns), chunk by chunk."""
    rows, columns = matrices.shape[-2:]
    return _chunked(lambda part: _top_triples(matrices[part]), len(matrices), rows * columns)


def dense_norm(linear_map: LinearMap, rtol: float) -> NormEstimate:
    """The norm of each map of a batch."""
    batch = math.prod(linear_map.batch_shape)
    if linear_map.dense is not None:
        dense = linear_map.dense
        entries = linear_map.rows * linear_map.columns
        sigma, v, residual = _chunked(lambda part: _top_triples(dense(part)), batch, entries)
    else:
        flat = linear_map.to_dense().reshape(-1, linear_map.rows, linear_map.columns)
        sigma, v, residual = _factor(flat)
    return _dense_estimate(sigma, v, residual, linear_map.batch_shape, linear_map, rtol)


def _dense_estimate(
    sigma: Tensor,
    v: Tensor,
    residual: Tensor,
    shape: torch.Size,
    linear_map: LinearMap,
    rtol: float,
) -> NormEstimate:
    # The factorisation itself is accurate to rounding, whatever was asked for.
    eps = torch.finfo(linear_map.dtype).eps
    floor, room = 1e3 * eps, min(linear_map.rows, linear_map.columns) * eps
    return NormEstimate(
        value=sigma.reshape(shape),
        residual=residual.reshape(shape),
        error=residual.reshape(shape),
        upper=(sigma * (1 + residual + room)).reshape(shape),
        miss=0.0,
        converged=(residual <= max(rtol, floor)).reshape(shape),
        n_matvecs=0,
        direction=v.reshape(*shape, *linear_map.in_shape),
    )


def _chunked(
    solve: Callable[[slice], tuple[Tensor, Tensor, Tensor]], batch: int, entries: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Solve slices of a batch and join them, several at a time."""
    workers = torch.get_num_threads()
    size = max(1, min(_CHUNK_ENTRIES // entries, -(-batch // workers) if batch > 256 else batch))
    slices = [slice(i, min(i + size, batch)) for i in range(0, batch, size)] or [slice(0, 0)]
    if len(slices) == 1:
        return solve(slices[0])
    # LAPACK loops over a batch on one core and lets go of the interpreter lock. One torch thread
    # in each: nested teams are 1.5 times slower. The caller's number is what new threads inherit.
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            parts = list(pool.map(solve, slices))
    finally:
        torch.set_num_threads(threads)
    sigma, v, residual = (torch.cat(part) for part in zip(*parts, strict=True))
    return sigma, v, residual


def _top_triples(matrices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale = _power_of_two(matrices)
    unit = matrices / scale[..., None, None]
    wide = unit.shape[-1] > unit.shape[-2]
    gram = unit @ unit.mT if wide else unit.mT @ unit
    v = _eigenvectors(gram)[..., -1:]
    if wide:
        v = unit.mT @ v
        v = v / _or_one(torch.linalg.vector_norm(v, dim=-2, keepdim=True))
    # The largest entry is from 1 to 2: squares stay in range, and only the matrix 0 has σ = 0.
    image = unit @ v
    sigma = torch.linalg.vector_norm(image, dim=-2, keepdim=True)
    whole = _or_one(sigma)
    defect = unit.mT @ (image / whole) - sigma * v
    residual = torch.linalg.vector_norm(defect, dim=-2) / whole[..., 0]
    return sigma[..., 0, 0] * scale, v[..., 0], residual[..., 0]


def _or_one(lengths: Tensor) -> Tensor:
    return torch.where(lengths > 0, lengths, 1.0)


def _eigenvectors(gram: Tensor) -> Tensor:
    # Single precision: LAPACK's divide and conquer fails where entries are denormal, with an error
    # or with NaN.
    try:
        vectors = torch.linalg.eigh(gram)[1]
        if bool(torch.isfinite(vectors.sum())):
            return vectors
    except torch.linalg.LinAlgError:
        pass
    return torch.linalg.eigh(gram.double())[1].to(gram.dtype)


def _power_of_two(matrices: Tensor) -> Tensor:
    """The power of two at or below the largest entry of each matrix (b, rows, columns), (b,).

    Division by it is exact, and Gram matrices of what is left stay in range.

    Raises:
        OverflowError: an entry is not finite.
    """
    peak = matrices.abs().amax((-2, -1))
    if not bool(torch.isfinite(peak).all()):
        raise OverflowError(
            f"the linear map has entries beyond the range of {matrices.dtype}: its norm cannot "
            "be represented; use less extreme weights or a smaller radius"
        )
    return torch.ldexp(torch.ones_like(peak), torch.frexp(peak).exponent - 1)
