"""The operator norm of linear maps."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meanfield.checks import as_bool, describe, number, without_autocast
from meanfield.habits import with_hints
from meanfield.linalg.dense import Dense
from meanfield.linalg.evidence import (
    RTOL,
    UPPER_RTOL,
    NormEstimate,
    certify,
    certify_largest,
    checked,
    of_the_map,
)
from meanfield.linalg.krylov import Lanczos
from meanfield.linalg.linear_map import LinearMap
from meanfield.linalg.solvers import NormSolver, as_solver

# To factor B matrices with n ≤ m rows and columns takes less than an iteration on all of them at
# once while n is at most the first number, or B n² m the second. In ms: one of 320 in 7 against
# 14, two of 256 in 18 against 15, 16 of 256 in 130 against 23, 64 of 128 in 110 against 39.
_DENSE_SIZE, _DENSE_WORK = 48, 2**25
# Up to here where a gradient is recorded, which an iteration does not have.
_DENSE_LIMIT = 512
# Likewise for each of many blocks; and for larger ones while all have no more entries than this.
_BLOCK_LIMIT, _LARGER_BLOCK_LIMIT, _BLOCK_ENTRIES = 16, 192, 2**22
# Entries up to which a batch is assembled once, to be factored and multiplied by (128 MiB).
_ASSEMBLED_ENTRIES = 2**24


@with_hints
@without_autocast
def operator_norm(
    linear_map: LinearMap,
    *,
    rtol: float = RTOL,
    upper_rtol: float = UPPER_RTOL,
    solver: NormSolver | None = None,
    strict: bool = True,
) -> NormEstimate:
    """‖J‖₂ = max ‖Jε‖ / ‖ε‖ (Frobenius norms) of each map in the batch.

    Gradients go through `Dense` only; an iteration records nothing.

    Args:
        linear_map: J.
        rtol: largest estimated relative error that counts as converged; the residual must be at
            most four times that.
        upper_rtol: how far `upper` may be above the value, relatively, for an answer to have
            converged; `math.inf` to ask for the value alone, which may then be of a smaller
            singular value.
        solver: `meanfield.linalg.Dense`, `meanfield.linalg.Lanczos` or another
            `meanfield.linalg.NormSolver`; by default dense for small matrices if they are few.
        strict: raise when not converged; otherwise the estimate comes back flagged.

    Raises:
        TypeError: the solver is none.
        ConvergenceError: not converged, if strict; see `meanfield.linalg.certify`.
        OverflowError: the map leaves the number range of its dtype.
    """
    rtol, upper_rtol, strict = _settings(linear_map, rtol, upper_rtol, strict)
    size = min(linear_map.rows, linear_map.columns)
    small = size <= _DENSE_SIZE or _entries(linear_map) * size <= _DENSE_WORK
    small |= torch.is_grad_enabled() and size <= _DENSE_LIMIT
    solver = as_solver(solver, Dense() if small else Lanczos())
    with torch.set_grad_enabled(solver.assembles and torch.is_grad_enabled()):
        assembled = solver.assembles and _entries(linear_map) <= _ASSEMBLED_ENTRIES
        used = linear_map.assembled() if assembled else linear_map
        candidate = solver.candidate(used, rtol, upper_rtol)
        found = certify(used, candidate, rtol=rtol, upper_rtol=upper_rtol)
    if assembled:
        found = of_the_map(found, linear_map, used, rtol, strict)
    return checked(found, rtol, upper_rtol, strict)


def largest_block_norm(
    linear_map: LinearMap,
    *,
    rtol: float = RTOL,
    upper_rtol: float = UPPER_RTOL,
    solver: NormSolver | None = None,
    strict: bool = True,
    beside: Tensor | None = None,
) -> tuple[NormEstimate, Tensor]:
    """Norm of a block-diagonal map whose blocks are the last batch axis, and the block it is in.

    Args:
        linear_map: the blocks, batch shape ``(*batch, n)``.
        rtol: as for `operator_norm`, and so are the others.
        upper_rtol: as there.
        solver: as there.
        strict: as there.
        beside: norms ``(*batch,)`` of which only the larger of each and its norm here counts.

    Returns:
        An estimate of batch shape ``(*batch,)``, whose direction ``(*batch, *in_shape)`` lives in
        the block of the index returned beside it, ``(*batch,)``.
    """
    rtol, upper_rtol, strict = _settings(linear_map, rtol, upper_rtol, strict)
    size = min(linear_map.rows, linear_map.columns)
    few = size <= _LARGER_BLOCK_LIMIT and _entries(linear_map) <= _BLOCK_ENTRIES
    small = size <= _BLOCK_LIMIT or few
    solver = as_solver(solver, Dense() if small else Lanczos())
    with torch.set_grad_enabled(solver.assembles and torch.is_grad_enabled()):
        used = linear_map.assembled() if solver.assembles else linear_map
        candidate, block = solver.largest(used, rtol, upper_rtol)
        if block is None:
            found, block = certify_largest(used, candidate, rtol=rtol, upper_rtol=upper_rtol)
        else:
            found = certify(used.block(block), candidate, rtol=rtol, upper_rtol=upper_rtol)
    if solver.assembles:
        found = of_the_map(found, linear_map, used, rtol, strict, beside)
    return checked(found, rtol, upper_rtol, strict), block


def _entries(linear_map: LinearMap) -> int:
    """Of all matrices of the batch."""
    return math.prod(linear_map.batch_shape) * linear_map.rows * linear_map.columns


def _settings(
    linear_map: object, rtol: float, upper_rtol: float, strict: bool
) -> tuple[float, float, bool]:
    if not isinstance(linear_map, LinearMap):
        raise TypeError(
            f"linear_map: expected a LinearMap, got {describe(linear_map)}; "
            "linearize(F, mu).atoms is that of a map of measures, LinearMap.pointwise(matrices) "
            "of matrices"
        )
    return (
        number(rtol, "rtol", least=0, below=1),
        number(upper_rtol, "upper_rtol", least=0, finite=False),
        as_bool(strict, "strict"),
    )
