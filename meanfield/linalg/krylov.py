"""Norms of a batch of linear maps by Golub–Kahan–Lanczos, from random starts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from meanfield.checks import as_generator, count, is_host, number
from meanfield.habits import with_hints
from meanfield.linalg.bidiagonalisation import Bidiagonalisation
from meanfield.linalg.evidence import (
    ROUNDINGS,
    TRUST,
    Candidate,
    may_be_largest,
    met,
    relative_error,
)
from meanfield.linalg.linear_map import LinearMap
from meanfield.linalg.solvers import NormSolver
from meanfield.linalg.upper_end import is_at_most, per_share, start_tangent, upper_end
from meanfield.linalg.vectors import normalised

# Steps between two looks: each decomposes the small matrices, and waits for a device. At 64 atoms
# in 16 dimensions a constant takes 37 ms on the CPU with a look a step and 28 with one in four.
# With more coordinates than _FEW on the host a product takes longer than a look: of adversarial
# inputs of 512 tokens in 768 dimensions 7 products do, and 9 with a look in four.
_STEPS, _FEW = 4, 2**14
# The angle of the start is taken this much wider than it is with probability 1 − miss, so that
# rounding in the upper end (at worst the square root of the unit roundoff) is covered.
_SLACK = 1.001
# Starts whose share of the top direction is 1e-11 show it in double precision; rounding hides a
# share below about 1e-12, and in single precision below about 1e-5. With what probability a start
# has no more is the least that can be promised (see `per_share`).
_MISS = {torch.float64: 1e-9, torch.float32: 1e-3}
_HIDDEN = {torch.float64: 1e-12, torch.float32: 1e-5}
# Entries of the small matrices of a batch that are decomposed at once (float64: 8 MiB).
_SMALL_ENTRIES = 2**20


@with_hints
@dataclass(frozen=True)
class Lanczos(NormSolver):
    """Golub–Kahan–Lanczos bidiagonalisation with full re-orthogonalisation from a random start.

    It goes on until both hold: the relative error of σ, by the residual of its singular triple
    and the gap below it, is at most rtol; and the upper end is at most (1 + upper_rtol) · σ. Both
    tolerances are arguments of the call. The first is about the singular value that the iteration
    has found, the second about the norm, which is the largest of all.

    Both bases are kept: k steps take k · (n·d + m·e) numbers of memory.

    Args:
        max_steps: largest number of products with J; one more measures the residual.
        miss: the probability, over the random start, that the norm may exceed the upper end, in
            which rounding of a thousand units is included; by default 1e-9 in double and 1e-3 in
            single precision. Rounding hides a share of the start of 1e-12 or 1e-5: less than its
            probability is not promised, and `miss` of the answer says what is.
        generator: of the random start, or its seed.

    Raises:
        ValueError: settings that mean nothing.
    """

    max_steps: int = 300
    miss: float | None = None
    generator: torch.Generator | int = 0

    def __post_init__(self) -> None:
        as_generator(self.generator)
        object.__setattr__(self, "max_steps", count(self.max_steps, "max_steps"))
        if self.miss is not None:
            object.__setattr__(self, "miss", number(self.miss, "miss", above=0, below=1))

    def candidate(self, linear_map: LinearMap, rtol: float, upper_rtol: float) -> Candidate:
        """The top right singular vectors of the whole batch at once."""
        return _iterated(linear_map, rtol, upper_rtol, self, blocks=1)

    def largest(
        self, linear_map: LinearMap, rtol: float, upper_rtol: float
    ) -> tuple[Candidate, None]:
        """Goes on until the blocks have converged that may be the largest by their residuals."""
        blocks = linear_map.batch_shape[-1]
        return _iterated(linear_map, rtol, upper_rtol, self, blocks=blocks), None


@torch.no_grad()
def _iterated(
    linear_map: LinearMap, rtol: float, upper_rtol: float, solver: Lanczos, *, blocks: int
) -> Candidate:
    """Neighbours in the batch form groups of `blocks`; of each the largest norm must converge."""
    start = _random_start(linear_map, as_generator(solver.generator))
    miss = _MISS[linear_map.dtype] if solver.miss is None else solver.miss
    miss = min(max(miss, _HIDDEN[linear_map.dtype] * per_share(linear_map.columns)), 1.0)
    tangent = _SLACK * start_tangent(linear_map.columns, miss)
    room = 1 + ROUNDINGS * torch.finfo(linear_map.dtype).eps
    process = Bidiagonalisation(linear_map, start)
    rank = min(linear_map.rows, linear_map.columns)
    between = 1 if is_host(start.device) and linear_map.columns > _FEW else _STEPS
    while True:
        process.advance()
        # After one step more than the rank the bases span everything.
        ended = process.products >= solver.max_steps or process.products > rank
        if not ended and process.products % between:
            continue
        sigma, residual, gap, coefficients = _top_triples(process)
        if ended:
            break
        if not bool((residual <= TRUST * rtol).any()):  # as `met` asks
            continue
        counting = may_be_largest(sigma.reshape(-1, blocks), residual.reshape(-1, blocks))
        reached = met(relative_error(residual, gap), residual, rtol)
        if bool(reached[counting.flatten()].all()):
            # Of blocks, only the largest norm has to be known so well.
            peak = sigma.reshape(-1, blocks).amax(-1, keepdim=True).expand(-1, blocks).flatten()
            ends = (1 + upper_rtol) / room * peak
            if bool(is_at_most(ends, sigma, process.steps, tangent).all()):
                break
    upper = room * upper_end(sigma, process.steps, tangent)
    shape = linear_map.batch_shape
    return Candidate(
        normalised(process.right.combine(coefficients.to(start)))[0].reshape(
            *shape, *linear_map.in_shape
        ),
        upper=upper.to(start).reshape(shape),
        miss=miss,
        gap=gap.to(start).reshape(shape),
        n_matvecs=process.products,
    )


def _random_start(linear_map: LinearMap, generator: torch.Generator) -> Tensor:
    """Uniform on the sphere, for each map of the flattened batch."""
    shape = math.prod(linear_map.batch_shape), linear_map.columns
    draw = torch.randn(shape, dtype=linear_map.dtype, generator=generator, device=generator.device)
    return normalised(draw.to(linear_map.device))[0]


def _top_triples(process: Bidiagonalisation) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """σ, relative residual, relative gap, coefficients of v in the right basis; per map."""
    # A part of the batch at a time: many small matrices at once would outweigh the bases.
    size, parts = max(1, _SMALL_ENTRIES // process.products**2), []
    for start in range(0, max(process.batch, 1), size):
        _, values, right, residuals = process.triples(slice(start, start + size))
        largest, gaps = values[:, 0], np.zeros(len(values))
        if process.products > 2:
            # The second singular value may lie above the second Ritz value by that one's residual.
            second = values[:, 1] * (1 + residuals[:, 1]) / np.where(largest > 0, largest, 1.0)
            gaps = np.maximum(1 - second**2, 0.0)
        parts.append((largest, residuals[:, 0], gaps, right[:, 0, :].copy()))
    columns = [torch.from_numpy(np.concatenate(column)) for column in zip(*parts, strict=True)]
    sigma, residual, gap, coefficients = (t.to(process.map.dtype) for t in columns)
    return sigma, residual, gap, coefficients
