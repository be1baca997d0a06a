"""Many small problems of one shape at once: costs, certificates and closed forms in arrays.

Only the call of the solver itself is a loop; it releases the interpreter, so blocks of problems go
to threads from about thirty atoms on. A problem that does not come out certified is handed to the
full dispatch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from meanfield.transport.certificates import c_transforms
from meanfield.transport.closed_forms import two_atom_plans
from meanfield.transport.exact import assignment_potentials, assignments, simplex_plans
from meanfield.transport.problems import (
    UNIT,
    Answer,
    lengths,
    log_rms,
    mass_error,
    squared_distances,
)

__all__ = ["LARGEST", "SmallAnswers", "solve_small"]

LARGEST = 400  # atoms a side; beyond it the full dispatch costs nothing in comparison
_BLOCK = 1_000_000  # coordinates differences held at once
_THREADED_FROM = 30
_LOOPED_PAIRS = 400  # costs of one problem from which on they are worth a call of their own


class SmallAnswers(NamedTuple):
    """Answers of b problems in arrays; where `certified` is false nothing else counts."""

    value: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    rows: np.ndarray
    cols: np.ndarray
    log_mass: np.ndarray
    f: np.ndarray
    g: np.ndarray
    method: str
    certified: np.ndarray

    def answer(self, k: int) -> Answer:
        """The k-th one by itself."""
        kept = self.log_mass[k] > -np.inf
        return Answer(
            float(self.value[k]),
            float(self.lower[k]),
            float(self.upper[k]),
            self.rows[k, kept],
            self.cols[k, kept],
            self.log_mass[k, kept],
            self.f[k],
            self.g[k],
            self.method,
            True,
        )


class _Scaled(NamedTuple):
    """b problems of one shape, each in a unit in which it spans about one."""

    x: np.ndarray
    y: np.ndarray
    log_a: np.ndarray
    log_b: np.ndarray
    a: np.ndarray
    b: np.ndarray
    cost: np.ndarray


class _Plans(NamedTuple):
    rows: np.ndarray
    cols: np.ndarray
    log_mass: np.ndarray
    f: np.ndarray
    g: np.ndarray
    exact: np.ndarray  # whether the marginals hold by construction
    misplaced: np.ndarray  # mass that rounding may have put elsewhere


def solve_small(
    x: np.ndarray, y: np.ndarray, log_a: np.ndarray, log_b: np.ndarray, *, rtol: float
) -> Iterator[tuple[slice, SmallAnswers]]:
    """Answers of problems x (b, n, d), y (b, m, d), log a (b, n), log b (b, m), block by block.

    All log-weights are finite.
    """
    count, n, d = x.shape
    m = y.shape[1]
    step = max(1, _BLOCK // (n * m * d))
    blocks = [slice(start, start + step) for start in range(0, count, step)]

    def solved(block: slice) -> SmallAnswers:
        return _solve_block(x[block], y[block], log_a[block], log_b[block], rtol)

    threads = os.cpu_count() or 1
    if max(n, m) < _THREADED_FROM or threads == 1 or len(blocks) == 1:
        yield from ((block, solved(block)) for block in blocks)
        return
    with ThreadPoolExecutor(threads) as pool:
        yield from zip(blocks, pool.map(solved, blocks), strict=True)


def _solve_block(
    x: np.ndarray, y: np.ndarray, log_a: np.ndarray, log_b: np.ndarray, rtol: float
) -> SmallAnswers:
    problem, exponent = _scaled(x, y, log_a, log_b)
    n, m = x.shape[1], y.shape[1]
    if n == m == 2:
        plans, method = _two_atoms(problem), "two atoms"
    elif n == 1 or m == 1:
        plans, method = _one_atom(problem), "one atom"
    else:
        plans, method = _general(problem)
    return _certified(problem, plans, exponent, method, rtol)


def _scaled(
    x: np.ndarray, y: np.ndarray, log_a: np.ndarray, log_b: np.ndarray
) -> tuple[_Scaled, np.ndarray]:
    low = np.minimum(x.min(1), y.min(1))
    high = np.maximum(x.max(1), y.max(1))
    span = (high / 2 - low / 2).max(-1)
    exponent = np.where(span > 0, np.frexp(span)[1] + 1, 0)
    x, y = (np.ldexp(t, -exponent[:, None, None]) for t in (x, y))
    if x.shape[1] * y.shape[1] >= _LOOPED_PAIRS:
        cost = np.stack([squared_distances(*pair) for pair in zip(x, y, strict=True)])
    else:
        moves = x[:, :, None] - y[:, None]
        cost = np.einsum("bnmd,bnmd->bnm", moves, moves)
    a, b = np.exp(log_a), np.exp(log_b)
    a, b = a / a.sum(-1, keepdims=True), b / b.sum(-1, keepdims=True)
    return _Scaled(x, y, log_a, log_b, a, b, cost), exponent


def _one_atom(problem: _Scaled) -> _Plans:
    count, n, m = problem.cost.shape
    size = max(n, m)
    many, zero = np.broadcast_to(np.arange(size), (count, size)), np.zeros((count, size), int)
    f, g = np.zeros((count, n)), np.zeros((count, m))
    exact, none = np.ones(count, bool), np.zeros(count)
    if m == 1:
        return _Plans(many, zero, problem.log_a, problem.cost[:, :, 0], g, exact, none)
    return _Plans(zero, many, problem.log_b, f, problem.cost[:, 0], exact, none)


def _two_atoms(problem: _Scaled) -> _Plans:
    rows, cols, logs, error = two_atom_plans(problem.x, problem.y, problem.log_a, problem.log_b)
    # The third entry is tight too where mass crosses, which fixes the potentials.
    first, second, third = (
        np.take_along_axis(
            problem.cost.reshape(-1, 4), (2 * rows[:, k] + cols[:, k])[:, None], -1
        )[:, 0]
        for k in range(3)
    )
    sender_first = rows[:, 2] == 0
    # f at the first row is 0; the column that the sender also reaches fixes the other row.
    g_first = first
    f_second = np.where(sender_first, second - third, third - first)
    g_second = second - f_second
    f = np.stack([np.zeros_like(first), f_second], -1)
    straight = cols[:, 0] == 0
    g = np.where(
        straight[:, None],
        np.stack([g_first, g_second], -1),
        np.stack([g_second, g_first], -1),
    )
    return _Plans(rows, cols, logs, f, g, np.ones(len(rows), bool), np.exp(error))


def _general(problem: _Scaled) -> tuple[_Plans, str]:
    count, n, m = problem.cost.shape
    size = n + m - 1
    rows = np.zeros((count, size), int)
    cols = np.zeros((count, size), int)
    logs = np.full((count, size), -np.inf)
    f, g = np.zeros((count, n)), np.zeros((count, m))
    plans = _Plans(rows, cols, logs, f, g, np.zeros(count, bool), np.zeros(count))
    todo = np.ones(count, bool)
    methods = []
    if n == m:
        identical = _identity(problem, plans)
        uniform = (np.ptp(problem.log_a, -1) == 0) & (np.ptp(problem.log_b, -1) == 0) & ~identical
        if uniform.any():
            _assign(problem, plans, np.flatnonzero(uniform))
            methods.append("assignment")
        if identical.any():
            methods.append("identity")
        todo = ~identical & ~uniform
    if todo.any():
        _simplex(problem, plans, np.flatnonzero(todo))
        methods.append("simplex")
    return plans, " + ".join(sorted(methods))


def _identity(problem: _Scaled, plans: _Plans) -> np.ndarray:
    """Fill in the problems whose identity coupling is certified by nearest neighbours."""
    n = problem.cost.shape[1]
    paired = (problem.log_a == problem.log_b).all(-1)
    if not paired.any():
        return paired
    index = np.arange(n)
    along = problem.cost[:, index, index]
    forward = (along <= problem.cost.min(2)).all(-1)
    backward = (along <= problem.cost.min(1)).all(-1)
    found = paired & (forward | backward)
    plans.rows[found, :n] = plans.cols[found, :n] = index
    plans.log_mass[found, :n] = problem.log_a[found]
    plans.f[found & forward] = along[found & forward]
    mirrored = found & ~forward
    plans.g[mirrored] = along[mirrored]
    plans.exact[found] = True
    return found


def _assign(problem: _Scaled, plans: _Plans, which: np.ndarray) -> None:
    n = problem.cost.shape[1]
    cost = problem.cost[which]
    sigma = assignments(cost)
    _, g = assignment_potentials(cost, sigma, max_rounds=2 * n)
    plans.f[which], plans.g[which] = c_transforms(cost, g)
    plans.rows[which, :n], plans.cols[which, :n] = np.arange(n), sigma
    plans.log_mass[which, :n] = problem.log_a[which]
    plans.exact[which] = True


def _simplex(problem: _Scaled, plans: _Plans, which: np.ndarray) -> None:
    cost = problem.cost[which]
    a, b = problem.a[which], problem.b[which]
    mass, g = simplex_plans(a, b, cost)
    problem_of, rows, cols = np.nonzero(mass)
    starts = np.searchsorted(problem_of, np.arange(len(which)))
    slot = np.arange(len(rows)) - starts[problem_of]
    place = which[problem_of], slot
    plans.rows[place], plans.cols[place] = rows, cols
    plans.log_mass[place] = np.log(mass[problem_of, rows, cols])
    plans.f[which], plans.g[which] = c_transforms(cost, g)


def _certified(
    problem: _Scaled, plans: _Plans, exponent: np.ndarray, method: str, rtol: float
) -> SmallAnswers:
    moved = lengths(
        np.take_along_axis(problem.x, plans.rows[..., None], 1)
        - np.take_along_axis(problem.y, plans.cols[..., None], 1)
    )
    value = log_rms(plans.log_mass, moved)
    n, m, d = *problem.cost.shape[1:], problem.x.shape[-1]
    relative = mass_error(n + m) + (d + 16) * UNIT * 2
    reach = np.sqrt(np.where(plans.exact, plans.misplaced, _misplaced(problem, plans)))
    reach = reach * np.sqrt(d) * 2.0  # the unit makes every side at most one
    upper = np.hypot(value * (1 + relative), reach) * (1 + 4 * UNIT)
    direct = value * (1 - relative)  # of a plan known to be optimal
    known = np.full(len(value), method in ("two atoms", "one atom"))
    known |= plans.exact & _is_nearest(problem, plans, value)
    inner = np.sqrt(np.maximum((direct - reach) * (direct + reach), 0)) * (1 - 4 * UNIT)
    lower = np.where(known, np.maximum(inner, 0), _dual_bound(problem, plans))
    lower = np.minimum(lower, upper)
    certified = known | (upper - lower <= rtol * upper)
    value, lower, upper = (np.ldexp(t, exponent) for t in (value, lower, upper))
    f, g = (np.ldexp(t, 2 * exponent[:, None]) for t in (plans.f, plans.g))
    value = np.clip(value, lower, upper)
    return SmallAnswers(
        value, lower, upper, plans.rows, plans.cols, plans.log_mass, f, g, method, certified
    )


def _is_nearest(problem: _Scaled, plans: _Plans, value: np.ndarray) -> np.ndarray:
    """Whether one potential is 0 and the other the cost of a bijection: `_identity`'s mark."""
    n, m = problem.cost.shape[1:]
    if n != m:
        return np.zeros(len(value), bool)
    index = np.arange(n)
    at_home = (plans.cols[:, :n] == index).all(-1)
    if not at_home.any():
        return at_home
    along = problem.cost[:, index, index]
    forward = (along <= problem.cost.min(2)).all(-1)
    backward = (along <= problem.cost.min(1)).all(-1)
    paired = (problem.log_a == problem.log_b).all(-1)
    return at_home & paired & (forward | backward)


def _misplaced(problem: _Scaled, plans: _Plans) -> np.ndarray:
    """How much mass the plans miss of their marginals, rounding of the weights included."""
    count, n, m = problem.cost.shape
    mass = np.exp(plans.log_mass)
    offset = np.arange(count)[:, None]
    total = np.full(count, 2 * mass_error(n + m) + (n + m) * 1e-300)
    sides = ((plans.rows, problem.a, n), (plans.cols, problem.b, m))
    for index, weights, size in sides:
        flat = np.bincount((offset * size + index).ravel(), mass.ravel(), count * size)
        total += np.abs(flat.reshape(count, size) - weights).sum(-1)
    return total


def _dual_bound(problem: _Scaled, plans: _Plans) -> np.ndarray:
    n, m, d = *problem.cost.shape[1:], problem.x.shape[-1]
    middle = np.median(plans.f, -1, keepdims=True)
    f, g = plans.f - middle, plans.g + middle
    dual = (problem.a * f).sum(-1) + (problem.b * g).sum(-1)
    size = (problem.a * np.abs(f)).sum(-1) + (problem.b * np.abs(g)).sum(-1)
    lost = (mass_error(n + m) + 4 * UNIT) * (size + np.abs(middle[:, 0]) * UNIT)
    tiny = 1e-300 * (np.abs(f).max(-1) + np.abs(g).max(-1))
    squared = dual * (1 - 2 * (d + 6) * UNIT) - lost - tiny
    return np.sqrt(np.maximum(squared, 0)) * (1 - 2 * UNIT)
