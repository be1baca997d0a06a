"""Slow, independent ways to the same numbers, for small problems."""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath
import networkx
import numpy as np

MASS_BITS = 1500  # e^-900 is 2^-1299


def exact_transport(
    x: np.ndarray, y: np.ndarray, log_a: np.ndarray, log_b: np.ndarray, order: int = 2
) -> Fraction:
    """W_p^p in integers: points as they are stored, weights exp(l) / Σ exp(l) to 2^-1500.

    Of an odd order roots are taken to 2^-400 of the span.
    """
    both = np.concatenate([x, y]).astype(float)
    unit = Fraction(1, max(Fraction(t).denominator for t in both.ravel().tolist()))
    places = [[int(Fraction(t) / unit) for t in row] for row in both.tolist()]
    cost = [
        [sum((s - t) ** 2 for s, t in zip(p, q, strict=True)) for q in places[len(x) :]]
        for p in places[: len(x)]
    ]
    cost = [[math.isqrt(c**order << 800) for c in row] for row in cost]
    a, b = _integer_masses(log_a), _integer_masses(log_b)
    total = _integer_simplex(cost, a, b)
    return Fraction(total, 1 << MASS_BITS + 400) * unit**order


def exact_optimum(costs: list[list[Fraction]], log_a: np.ndarray, log_b: np.ndarray) -> Fraction:
    """The least Σ π_ij C_ij, of rational costs and weights to 2^-1500."""
    unit = math.lcm(*(c.denominator for row in costs for c in row))
    whole = [[int(c * unit) for c in row] for row in costs]
    total = _integer_simplex(whole, _integer_masses(log_a), _integer_masses(log_b))
    return Fraction(total, (1 << MASS_BITS) * unit)


def priced_optimum(
    x: np.ndarray, y: np.ndarray, s: np.ndarray, t: np.ndarray, *logs: np.ndarray, penalty: float
) -> Fraction:
    """The least Σ π_ij (‖xᵢ − y_j‖² + λ ‖sᵢ − t_j‖²), of conditions (n, k) and (m, k)."""
    prices = [Fraction(1)] * x.shape[1] + [Fraction(penalty)] * s.shape[1]
    rows, cols = (
        [[Fraction(v) for v in row] for row in np.c_[z, c].tolist()] for z, c in ((x, s), (y, t))
    )
    costs = [
        [sum(w * (u - v) ** 2 for w, u, v in zip(prices, r, c, strict=True)) for c in cols]
        for r in rows
    ]
    return exact_optimum(costs, *logs)


def _integer_masses(logs: np.ndarray) -> list[int]:
    with mpmath.workprec(MASS_BITS + 200):
        raw = [mpmath.exp(mpmath.mpf(float(t))) if t > -math.inf else mpmath.mpf(0) for t in logs]
        total = mpmath.fsum(raw)
        masses = [int(mpmath.floor(mpmath.ldexp(t / total, MASS_BITS))) for t in raw]
    masses[masses.index(max(masses))] += (1 << MASS_BITS) - sum(masses)
    return masses


def _integer_simplex(cost: list[list[int]], a: list[int], b: list[int]) -> int:
    """The least Σ π_ij C_ij, by the network simplex of networkx, whose integers have no end."""
    graph, n = networkx.DiGraph(), len(a)
    graph.add_nodes_from((k, {"demand": t}) for k, t in enumerate([*(-t for t in a), *b]))
    for i, row in enumerate(cost):
        for j, c in enumerate(row):
            graph.add_edge(i, n + j, weight=c, capacity=sum(a))
    return networkx.network_simplex(graph)[0]
