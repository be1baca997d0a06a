"""Norms of small maps, from the eigenvectors of their Gram matrices."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from scipy.linalg import eigh
from torch import Tensor

from meanfield.checks import at_once, is_host, to_host
from meanfield.habits import with_hints
from meanfield.linalg.evidence import Candidate
from meanfield.linalg.linear_map import LinearMap
from meanfield.linalg.solvers import NormSolver
from meanfield.linalg.vectors import finite, lengths, power_of_two

# Entries of one chunk of dense matrices (float64: 8 MiB); larger batches go chunk by chunk.
_CHUNK_ENTRIES = 2**20
# Up to here one call of LAPACK for singular vectors takes less than all that scaling and Gram
# matrices need: 0.10 against 0.28 ms for one matrix of 4 × 4.
_FEW_ENTRIES = 2**8
# From here on LAPACK's last eigenpair alone takes half of the time of all of them, and a third
# from 256 on (18 against 6 ms); torch has no call for it.
_LAST_PAIR = 64
# Blocks are ruled out whose squared norm is below this share of the largest.
_NEAR = 0.999


@with_hints
@dataclass(frozen=True)
class Dense(NormSolver):
    """The matrices, and the top eigenpairs of their Gram matrices; certain up to rounding.

    They are scaled first, so that entries up to the ends of the number range do no harm.
    """

    assembles: ClassVar[bool] = True

    @torch.no_grad()
    def candidate(self, linear_map: LinearMap, rtol: float, upper_rtol: float) -> Candidate:
        """The top right singular vectors, with σ itself for an upper end."""
        dense = linear_map.dense or linear_map.assembled().dense
        assert dense is not None
        sigma, v = _chunked(
            lambda part: _top_vectors(dense(part)),
            math.prod(linear_map.batch_shape),
            linear_map.rows * linear_map.columns,
            linear_map.device,
        )
        return _candidate(sigma, v, linear_map, linear_map.batch_shape)

    @torch.no_grad()
    def largest(
        self, linear_map: LinearMap, rtol: float, upper_rtol: float
    ) -> tuple[Candidate, Tensor]:
        """Skips blocks that are shown to be smaller, unless all are soon done."""
        n = linear_map.batch_shape[-1]
        blocks = linear_map.to_dense().reshape(-1, n, linear_map.rows, linear_map.columns)
        if blocks.numel() <= _FEW_ENTRIES:
            sigma, v = (t.unflatten(0, (-1, n)) for t in _factor(blocks.flatten(0, 1)))
        else:
            sigma, v = _factor_largest(blocks)
        sigma, best = sigma.max(-1)
        v = v[torch.arange(len(v), device=v.device), best]
        shape = linear_map.batch_shape[:-1]
        return _candidate(sigma, v, linear_map, shape), best.reshape(shape)


def _factor_largest(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """σ and v of the blocks (b, n, rows, columns) that may be the largest; −1 for the others."""
    frobenius = lengths(blocks.flatten(-2))
    sigma = torch.full_like(frobenius, -1.0)
    v = blocks.new_zeros(*blocks.shape[:2], blocks.shape[-1])

    def factor(*chosen: Tensor) -> None:
        sigma[chosen], v[chosen] = _factor(blocks[chosen])

    factor(torch.arange(len(blocks), device=blocks.device), frobenius.argmax(-1))
    largest = sigma.amax(-1, keepdim=True)

    def near(some: Tensor) -> Tensor:
        """Those not shown to be smaller: tI − BᵀB has a Cholesky factor where it is positive."""
        measure, block = some.unbind(-1)
        unit = blocks[measure, block] / largest[measure, :, None]
        bounds = _gram(unit.double()).neg_()  # in which rounding is far below what is left
        bounds.diagonal(0, -2, -1).add_(_NEAR)
        return some[torch.linalg.cholesky_ex(bounds)[1] > 0]

    others = ((frobenius > largest) & (sigma < 0)).nonzero()
    step = max(1, at_once(_CHUNK_ENTRIES, blocks.device) // blocks[0, 0].numel())
    others = torch.cat([near(some) for some in others.split(step)])
    if len(others):
        factor(*others.unbind(-1))
    return sigma, v


def _candidate(sigma: Tensor, v: Tensor, linear_map: LinearMap, shape: torch.Size) -> Candidate:
    # Gram matrices and their eigenvalues are as accurate as products of so many terms.
    room = 4 * (max(linear_map.rows, linear_map.columns) + 2) * torch.finfo(linear_map.dtype).eps
    upper = (sigma * (1 + room)).reshape(shape)
    return Candidate(v.reshape(*shape, *linear_map.in_shape), upper=upper, miss=0.0)


def _factor(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """σ and v of each matrix (b, rows, columns), chunk by chunk."""
    rows, columns = matrices.shape[-2:]
    return _chunked(
        lambda part: _top_vectors(matrices[part]), len(matrices), rows * columns, matrices.device
    )


def _chunked(
    solve: Callable[[slice], tuple[Tensor, Tensor]],
    batch: int,
    entries: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Solve slices of a batch and join them, several at a time on the host."""
    workers = torch.get_num_threads() if is_host(device) else 1
    share = -(-batch // workers) if batch > 256 else batch
    size = max(1, min(at_once(_CHUNK_ENTRIES, device) // entries, share))
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
    sigma, v = (torch.cat(part) for part in zip(*parts, strict=True))
    return sigma, v


def _top_vectors(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """σ and v of each matrix (b, rows, columns)."""
    if is_host(matrices.device) and matrices.numel() <= _FEW_ENTRIES:
        with contextlib.suppress(torch.linalg.LinAlgError):  # numbers that are not finite too
            _, sigma, vectors = torch.linalg.svd(matrices, full_matrices=False)
            return sigma[..., 0], vectors[..., 0, :]
    # Gram matrices of what is left stay in range.
    peak = finite(matrices.abs().amax((-2, -1)), "an entry of the linear map")
    scale = power_of_two(peak)
    unit = matrices / scale[..., None, None]
    value, v = _last_eigenpair(_gram(unit))
    sigma = value.clamp_min(0).sqrt()
    if unit.shape[-1] > unit.shape[-2]:
        # The largest entry is from 1 to 2: only the matrix 0 has σ = 0, and any v is its own.
        v = (unit.mT @ v[..., None])[..., 0] / torch.where(sigma > 0, sigma, 1.0)[:, None]
        v[:, 0] += torch.where(sigma > 0, 0.0, 1.0)
    return sigma * scale, v


def _gram(matrices: Tensor) -> Tensor:
    """Of the rows or of the columns, whichever are fewer."""
    wide = matrices.shape[-1] > matrices.shape[-2]
    return matrices @ matrices.mT if wide else matrices.mT @ matrices


def _last_eigenpair(gram: Tensor) -> tuple[Tensor, Tensor]:
    """The largest eigenvalue of each matrix (b, k, k), and its vector."""
    # Single precision: LAPACK's divide and conquer fails where entries are denormal, with an error
    # or with NaN.
    try:
        value, vector = _in_its_precision(gram)
        if bool(torch.isfinite(vector.sum())):
            return value, vector
    except (np.linalg.LinAlgError, torch.linalg.LinAlgError):
        pass
    value, vector = _in_its_precision(gram.double())
    return value.to(gram.dtype), vector.to(gram.dtype)


def _in_its_precision(gram: Tensor) -> tuple[Tensor, Tensor]:
    last = gram.shape[-1] - 1
    if len(gram) == 1 and last >= _LAST_PAIR and is_host(gram.device):
        value, vector = eigh(to_host(gram[0]), subset_by_index=[last, last], check_finite=False)
        if value.size:  # LAPACK finds none where many eigenvalues are the last
            return torch.from_numpy(value), torch.from_numpy(vector).mT
    values, vectors = torch.linalg.eigh(gram)
    return values[..., -1], vectors[..., -1]
