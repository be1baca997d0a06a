"""The operator norm of linear maps."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meanfield.checks import as_bool, describe, number
from meanfield.linalg.dense import Dense
from meanfield.linalg.evidence import NormEstimate, certify, certify_largest, checked
from meanfield.linalg.krylov import Lanczos
from meanfield.linalg.linear_map import LinearMap
from meanfield.linalg.solvers import NormSolver, as_solver

# Below this many rows or columns a factorisation costs less than a Krylov iteration.
_DENSE_LIMIT = 512
# Likewise for each of many blocks; and for larger ones while all have no more entries than this.
_BLOCK_LIMIT, _LARGER_BLOCK_LIMIT, _BLOCK_ENTRIES = 16, 192, 2**22
# Entries up to which a batch is assembled once, to be factored and multiplied by (128 MiB).
_ASSEMBLED_ENTRIES = 2**24


def operator_norm(
    linear_map: LinearMap,
    *,
    rtol: float = 1e-4,
    solver: NormSolver | None = None,
    strict: bool = True,
) -> NormEstimate:
    """‖J‖₂ = max ‖Jε‖ / ‖ε‖ (Frobenius norms) of each map in the batch.

    Gradients go through `Dense` only; an iteration records nothing.

    Args:
        linear_map: J.
        rtol: largest estimated relative error that counts as converged; the residual must be at
            most four times that.
        solver: `meanfield.linalg.Dense`, `meanfield.linalg.Lanczos` or another
            `meanfield.linalg.NormSolver`; by default dense for small matrices.
        strict: raise when not converged; otherwise the estimate comes back flagged.

    Raises:
        TypeError: the solver is none.
        ConvergenceError: not converged, if strict; see `meanfield.linalg.certify`.
        OverflowError: the map leaves the number range of its dtype.
    """
    _check_linear_map(linear_map)
    rtol, strict = number(rtol, "rtol", least=0, below=1), as_bool(strict, "strict")
    small = min(linear_map.rows, linear_map.columns) <= _DENSE_LIMIT
    solver = as_solver(solver, Dense() if small else Lanczos())
    with torch.set_grad_enabled(solver.assembles and torch.is_grad_enabled()):
        if solver.assembles and _entries(linear_map) <= _ASSEMBLED_ENTRIES:
            linear_map = linear_map.assembled()
        candidate = solver.candidate(linear_map, rtol)
        found = certify(linear_map, candidate, rtol=rtol, upper_rtol=solver.upper_rtol)
    return checked(found, rtol, solver.upper_rtol, strict)


def largest_block_norm(
    linear_map: LinearMap,
    *,
    rtol: float = 1e-4,
    solver: NormSolver | None = None,
    strict: bool = True,
) -> tuple[NormEstimate, Tensor]:
    """Norm of a block-diagonal map whose blocks are the last batch axis, and the block it is in.

    Args:
        linear_map: the blocks, batch shape ``(*batch, n)``.
        rtol: as for `operator_norm`.
        solver: as for `operator_norm`.
        strict: as for `operator_norm`.

    Returns:
        An estimate of batch shape ``(*batch,)``, whose direction ``(*batch, *in_shape)`` lives in
        the block of the index returned beside it, ``(*batch,)``.
    """
    _check_linear_map(linear_map)
    rtol, strict = number(rtol, "rtol", least=0, below=1), as_bool(strict, "strict")
    size = min(linear_map.rows, linear_map.columns)
    few = size <= _LARGER_BLOCK_LIMIT and _entries(linear_map) <= _BLOCK_ENTRIES
    small = size <= _BLOCK_LIMIT or few
    solver = as_solver(solver, Dense() if small else Lanczos())
    with torch.set_grad_enabled(solver.assembles and torch.is_grad_enabled()):
        linear_map = linear_map.assembled() if solver.assembles else linear_map
        candidate, block = solver.largest(linear_map, rtol)
        if block is None:
            found, block = certify_largest(
                linear_map, candidate, rtol=rtol, upper_rtol=solver.upper_rtol
            )
        else:
            one = linear_map.block(block)
            found = certify(one, candidate, rtol=rtol, upper_rtol=solver.upper_rtol)
    return checked(found, rtol, solver.upper_rtol, strict), block


def _entries(linear_map: LinearMap) -> int:
    """Of all matrices of the batch."""
    return math.prod(linear_map.batch_shape) * linear_map.rows * linear_map.columns


def _check_linear_map(linear_map: object) -> None:
    if not isinstance(linear_map, LinearMap):
        raise TypeError(
            f"linear_map: expected a LinearMap, got {describe(linear_map)}; "
            "linearize(F, mu).atoms is that of a map of measures, LinearMap.pointwise(matrices) "
            "of matrices"
        )
