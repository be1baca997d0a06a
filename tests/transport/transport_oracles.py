"""Slow, independent ways to the same numbers, for small problems."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np

from meanfield.transport import TransportResult, solve_wp


def solve_w1(mu: Any, nu: Any, **settings: Any) -> TransportResult:
    """`solve_wp` of order 1."""
    return solve_wp(mu, nu, 1, **settings)


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


MASS_BITS = 1500  # e^-900 is 2^-1299


def exact_transport(
    x: np.ndarray, y: np.ndarray, log_a: np.ndarray, log_b: np.ndarray, order: int = 2
) -> Fraction:
    """W_p^p in integers: points as they are stored, weights exp(l) / Σ exp(l) to 2^-1500.

    The transportation simplex with Bland's rule; of an odd order roots are taken to 2^-400 of the
    span.
    """
    both = np.concatenate([x, y]).astype(float)
    unit = Fraction(1, max(Fraction(t).denominator for t in both.ravel().tolist()))
    places = [[int(Fraction(t) / unit) for t in row] for row in both.tolist()]
    cost = [
        [sum((s - t) ** 2 for s, t in zip(p, q, strict=True)) for q in places[len(x) :]]
        for p in places[: len(x)]
    ]
    root = 1 << 400 if order % 2 else 1
    if order % 2:
        cost = [[math.isqrt(c**order << 800) for c in row] for row in cost]
    else:
        cost = [[c ** (order // 2) for c in row] for row in cost]
    a, b = _integer_masses(log_a), _integer_masses(log_b)
    total = _integer_simplex(cost, a, b)
    return Fraction(total, 1 << MASS_BITS) * unit**order / root


def exact_optimum(costs: list[list[Fraction]], log_a: np.ndarray, log_b: np.ndarray) -> Fraction:
    """The least Σ π_ij C_ij, of rational costs and weights to 2^-1500."""
    unit = math.lcm(*(c.denominator for row in costs for c in row))
    whole = [[int(c * unit) for c in row] for row in costs]
    total = _integer_simplex(whole, _integer_masses(log_a), _integer_masses(log_b))
    return Fraction(total, (1 << MASS_BITS) * unit)


def _integer_masses(logs: np.ndarray) -> list[int]:
    with mpmath.workprec(MASS_BITS + 200):
        raw = [mpmath.exp(mpmath.mpf(float(t))) if t > -math.inf else mpmath.mpf(0) for t in logs]
        total = mpmath.fsum(raw)
        masses = [int(mpmath.floor(mpmath.ldexp(t / total, MASS_BITS))) for t in raw]
    masses[masses.index(max(masses))] += (1 << MASS_BITS) - sum(masses)
    return masses


def _integer_simplex(cost: list[list[int]], a: list[int], b: list[int]) -> int:
    n, m = len(a), len(b)
    flow: dict[tuple[int, int], int] = {}
    i, j, rest_a, rest_b = 0, 0, list(a), list(b)
    while len(flow) < n + m - 1:  # north-west corner: a spanning tree, also where it is degenerate
        moved = min(rest_a[i], rest_b[j])
        flow[i, j] = moved
        rest_a[i] -= moved
        rest_b[j] -= moved
        if (rest_a[i] == 0 and i < n - 1) or j == m - 1:
            i += 1
        else:
            j += 1
    while True:
        u, v = _tree_potentials(cost, list(flow), n, m)
        entering = next(
            (
                (i, j)
                for i in range(n)
                for j in range(m)
                if (i, j) not in flow and cost[i][j] < u[i] + v[j]
            ),
            None,
        )
        if entering is None:
            return sum(cost[i][j] * moved for (i, j), moved in flow.items())
        _pivot(flow, entering, n)


def _tree_potentials(
    cost: list[list[int]], arcs: list[tuple[int, int]], n: int, m: int
) -> tuple[list[int], list[int]]:
    u: list[int | None] = [0, *[None] * (n - 1)]
    v: list[int | None] = [None] * m
    left = list(arcs)
    while left:
        later = []
        for i, j in left:
            if u[i] is not None:
                v[j] = cost[i][j] - u[i]
            elif v[j] is not None:
                u[i] = cost[i][j] - v[j]
            else:
                later.append((i, j))
        left = later
    return u, v  # type: ignore[return-value]


def _pivot(flow: dict[tuple[int, int], int], entering: tuple[int, int], n: int) -> None:
    """Send mass around the cycle that the entering arc closes; the first emptied arc leaves."""
    neighbours: dict[int, list[int]] = {}
    for i, j in flow:
        neighbours.setdefault(i, []).append(n + j)
        neighbours.setdefault(n + j, []).append(i)
    start, end = entering[0], n + entering[1]
    parent = {start: start}
    queue = [start]
    for node in queue:
        for other in neighbours.get(node, []):
            if other not in parent:
                parent[other] = node
                queue.append(other)
    path = [end]
    while path[-1] != start:
        path.append(parent[path[-1]])
    # From the column of the entering arc back to its row: minus, plus, minus, ...
    arcs = [(min(s, t), max(s, t) - n) for s, t in itertools.pairwise(path)]
    moved = min(flow[arc] for arc in arcs[::2])
    leaving = min(arc for arc in arcs[::2] if flow[arc] == moved)
    for k, arc in enumerate(arcs):
        flow[arc] += moved if k % 2 else -moved
    del flow[leaving]
    flow[entering] = moved
