"""One potential from the other, for any cost and any number of points."""

from __future__ import annotations

import numpy as np

from meanfield.transport.plans.c_transform import CTransform
from meanfield.transport.problem import Problem, costs_between

_DIRECT = 50_000_000  # coordinate differences up to which every cost is taken from its own
_BLOCK = 1 << 21  # costs held at once
_CANDIDATES = 8  # of a row, taken again where products are not precise enough


def priced(
    problem: Problem,
    known: np.ndarray,
    *,
    mirror: bool = False,
    allowed: float = 0.0,
    device: str = "cpu",
) -> tuple[np.ndarray, float]:
    """fᵢ = min_j C_ij − g_j, and how far it may be too high.

    Args:
        problem: one problem.
        known: g (m,), or f (n,) if it is `mirror`.
        mirror: g_j = min_i C_ij − fᵢ instead.
        allowed: a slack up to which fast products of coordinates will do.
        device: where they are computed.
    """
    if problem.pairs <= _BLOCK:
        left = problem.costs - (known[:, None] if mirror else known)
        return left.min(0 if mirror else 1), 0.0
    x, y = (problem.y, problem.x) if mirror else (problem.x, problem.y)
    if problem.order != 2 or problem.pairs * problem.dim <= _DIRECT:
        step = max(1, _BLOCK // len(y))
        blocks = (x[start : start + step] for start in range(0, len(x), step))
        minima = [(costs_between(block, y, problem.order) - known).min(1) for block in blocks]
        return np.concatenate(minima), 0.0
    transform = CTransform(x, y, device=device)
    found = transform(known, 1)
    if found.slack > allowed:
        found = transform.precise(known, _CANDIDATES, found.minima)
    return found.minima, found.slack
