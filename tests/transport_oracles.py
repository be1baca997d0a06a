"""Slow, independent ways to the same numbers, for small problems."""

from __future__ import annotations

import itertools
import math

import numpy as np


def linear_program_w2_squared(x: np.ndarray, y: np.ndarray, a: np.ndarray, b: np.ndarray) -> float:
    """W₂² by HiGHS, cost by direct differences."""
    return linear_program(((x[:, None] - y[None]) ** 2).sum(-1), a, b)


def linear_program_w1(x: np.ndarray, y: np.ndarray, a: np.ndarray, b: np.ndarray) -> float:
    """W₁ by HiGHS."""
    return linear_program(np.sqrt(((x[:, None] - y[None]) ** 2).sum(-1)), a, b)


def linear_program(cost: np.ndarray, a: np.ndarray, b: np.ndarray) -> float:
    """min Σ π C over couplings by HiGHS, the cost brought to order one."""
    from scipy.optimize import linprog

    n, m = cost.shape
    unit = cost.max()
    if unit == 0:
        return 0.0
    rows = np.kron(np.eye(n), np.ones(m))
    cols = np.kron(np.ones(n), np.eye(m))
    # The last equation follows from the others when the masses agree.
    matrix, rhs = np.vstack([rows, cols])[:-1], np.concatenate([a, b])[:-1]
    options = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    # Its presolve finds masses infeasible whose sums differ by rounding.
    for presolve in (True, False):
        found = linprog(
            cost.ravel() / unit, A_eq=matrix, b_eq=rhs, method="highs-ds",
            options=options | {"presolve": presolve},
        )  # fmt: skip
        if found.status == 0:
            break
    assert found.status == 0, found.message
    return float(found.fun) * unit


def brute_force_w2(x: np.ndarray, y: np.ndarray) -> float:
    """Uniform clouds of one size: the best permutation, by trying all of them."""
    costs = (
        sum(math.dist(x[i], y[j]) ** 2 for i, j in enumerate(sigma)) / len(x)
        for sigma in itertools.permutations(range(len(x)))
    )
    return math.sqrt(min(costs))


def quantile_w2(x: np.ndarray, y: np.ndarray, a: np.ndarray, b: np.ndarray) -> float:
    """On the line: (∫₀¹ (F⁻¹ − G⁻¹)²)^½ by a loop that empties both piles in order."""
    i, j = np.argsort(x), np.argsort(y)
    left, right = list(a[i]), list(b[j])
    p = q = 0
    total = 0.0
    while p < len(left) and q < len(right):
        moved = min(left[p], right[q])
        total += moved * (x[i[p]] - y[j[q]]) ** 2
        left[p] -= moved
        right[q] -= moved
        if left[p] <= right[q]:
            p += 1
        else:
            q += 1
    return math.sqrt(total)
