"""One potential from the other, for any cost and any number of points."""

from __future__ import annotations

import numpy as np

from meanfield.transport.plans.c_transform import CTransform
from meanfield.transport.problem import Problem, costs_between

_DIRECT = 50_000_000  # coordinate differences up to which every cost is taken from its own
_BLOCK = 1 << 21  # costs held at once
_CANDIDATES = 8  # of a row, whose costs are taken again from differences


def priced(
    problem: Problem, known: np.ndarray, *, mirror: bool = False, device: str = "cpu"
) -> np.ndarray:
    """fᵢ = min_j C_ij − g_j of one problem.

    Args:
        problem: one problem.
        known: g (m,), or f (n,) if it is `mirror`.
        mirror: g_j = min_i C_ij − fᵢ instead.
        device: where products of many coordinates are computed.
    """
    x, y = (problem.y, problem.x) if mirror else (problem.x, problem.y)
    if problem.order == 2 and problem.pairs > _BLOCK and problem.pairs * problem.dim > _DIRECT:
        nowhere = np.full(len(x), np.inf)
        return CTransform(x, y, device=device).precise(known, _CANDIDATES, nowhere).minima
    step = max(1, _BLOCK // len(y))
    blocks = (x[start : start + step] for start in range(0, len(x), step))
    minima = [(costs_between(block, y, problem.order) - known).min(1) for block in blocks]
    return np.concatenate(minima)
