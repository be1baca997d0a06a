"""Large problems to a proven gap: a sparse simplex on few arcs, and pricing of all of them.

An optimal plan uses n + m − 1 of the n m arcs. Potentials of a coarser problem show where they
lie; the simplex is solved on the arcs with the smallest reduced costs; all pairs are priced,
nothing n × m is stored; what violates is added. Pricing makes the potentials feasible, so each
round ends with a certified interval, and the gap says when to stop.

Coarser problems are nested: a quarter of the atoms, drawn by weight, with the mass of what lies
nearest to them, and so on down to a size that is solved densely.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace

import numpy as np

from meanfield.transport.certificates import certify, dual_bound
from meanfield.transport.closed_forms import monotone_plan
from meanfield.transport.exact import Plan, simplex, sparse_simplex
from meanfield.transport.pricing import Prices, Pricing
from meanfield.transport.problems import UNIT, Answer, Problem, squared_distances

__all__ = ["solve_columns"]

_DENSE = 400  # atoms of the coarsest problem, at most
_COARSER = 4  # times fewer atoms from level to level
_COARSE_GAP = 2e-3  # of W₂² on a coarser level: potentials are right that far at best
_COARSE_ROUNDS = 4
_TREE_DIM = 6  # up to here a tree finds neighbours faster than products do
_FIRST_ARCS = 16
_NEW_ARCS = 8  # of a row and a round
_COLUMN_ARCS = 64  # heavy atoms are asked for by many rows
_ROUNDS = 40
_MOST_SLACK = 0.1  # of the gap asked for
_GROWTH = 1.7  # exponent of the simplex's time in its number of arcs, measured 1.5 to 1.8


def solve_columns(
    problem: Problem, *, rtol: float, time_limit: float | None = None, device: str = "cpu"
) -> Answer:
    """W₂ with a proven gap, in memory proportional to (n + m) · 100 and a block.

    Args:
        problem: the problem.
        rtol: gap at which to stop, relative to W₂.
        time_limit: seconds; no round is begun that would probably end later. The best interval
            so far is returned, unconverged: it may be the plan and the potentials of a coarser
            level, carried over to all atoms.
        device: where to price; the simplex is on the CPU.
    """
    clock = _Clock(math.inf if time_limit is None else time.perf_counter() + time_limit)
    levels = _levels(problem, device)
    coarse = levels[0]
    cost = squared_distances(coarse.problem.x, coarse.problem.y)
    unit = max(float(cost.max()), 1e-300)
    plan = simplex(coarse.problem.a, coarse.problem.b, cost / unit)
    plan = plan._replace(f=plan.f * unit, g=plan.g * unit)
    for finer in levels[1:]:
        is_finest = finer is levels[-1]
        f, g, arcs, slack = _carried(coarse.problem, plan.f, finer.problem, device)
        if not clock.allows(len(arcs)):
            break
        rounds = _ColumnGeneration(finer.problem, f, g, arcs, device=device, clock=clock)
        rounds.floor = math.sqrt(dual_bound(finer.problem, f, g, slack)) * (1 - 4 * UNIT)
        rounds.run(rtol if is_finest else _COARSE_GAP, _ROUNDS if is_finest else _COARSE_ROUNDS)
        if is_finest:
            return rounds.best
        coarse, plan = finer, rounds.plan
    return _spread(problem, coarse, plan, device, rtol)


@dataclass(frozen=True, eq=False)
class _Level:
    """A coarser problem, and to which of its atoms each atom of the whole belongs."""

    problem: Problem
    row_of: np.ndarray
    col_of: np.ndarray


def _levels(problem: Problem, device: str) -> list[_Level]:
    """From coarse to fine; the last one is the problem itself."""
    generator = np.random.default_rng(0)
    # Drawn by weight, without replacement: uniform draws miss the heavy atoms and stall.
    order_x, order_y = (
        np.argsort(-(logs + generator.gumbel(size=len(logs))))
        for logs in (problem.log_a, problem.log_b)
    )
    rows, cols = np.arange(problem.n), np.arange(problem.m)
    levels = [_Level(problem, rows, cols)]
    n, m = problem.n, problem.m
    while max(n, m) > _DENSE:
        n, m = (size if size <= _DENSE // 2 else size // _COARSER for size in (n, m))
        kept_rows, kept_cols = np.sort(order_x[:n]), np.sort(order_y[:m])
        places = np.searchsorted(rows, kept_rows), np.searchsorted(cols, kept_cols)
        levels.append(_coarsened(levels[-1], *places, device))
        rows, cols = kept_rows, kept_cols
    if len(levels) == 1:
        levels.append(levels[0])
    return levels[::-1]


def _coarsened(level: _Level, rows: np.ndarray, cols: np.ndarray, device: str) -> _Level:
    """Some of the atoms of a level, with the mass of those that lie nearest to them."""
    finer = level.problem
    x, y = finer.x[rows], finer.y[cols]
    row_of, col_of = _closest(finer.x, x, device), _closest(finer.y, y, device)
    log_a = np.log(np.bincount(row_of, finer.a, len(x)) + 1e-300)
    log_b = np.log(np.bincount(col_of, finer.b, len(y)) + 1e-300)
    coarser = Problem(x, y, log_a, log_b, finer.exponent)
    return _Level(coarser, row_of[level.row_of], col_of[level.col_of])


def _closest(points: np.ndarray, centres: np.ndarray, device: str) -> np.ndarray:
    if len(points) == len(centres):
        return np.arange(len(points))
    if points.shape[1] <= _TREE_DIM:
        from scipy.spatial import cKDTree

        return cKDTree(centres).query(points)[1]
    return Pricing(points, centres, device=device)(np.zeros(len(centres)), 1).cols


def _carried(
    coarse: Problem, f: np.ndarray, finer: Problem, device: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Potentials of the coarser problem on the finer one, and arcs that they make cheap."""
    g = Pricing(finer.y, coarse.x, device=device)(f, 1).minima
    forth = Pricing(finer.x, finer.y, device=device)(g, _FIRST_ARCS)
    back = Pricing(finer.y, finer.x, device=device)(forth.minima, _FIRST_ARCS)
    rows, cols = _staircase(finer)
    arcs = np.concatenate([_arcs(forth, finer), back.cols * finer.m + back.rows])
    arcs = np.unique(np.append(arcs, rows * finer.m + cols))
    return forth.minima, back.minima, arcs, back.slack


def _arcs(prices: Prices, problem: Problem) -> np.ndarray:
    return prices.rows * problem.m + prices.cols


@dataclass
class _Clock:
    """Whether there is time for a simplex, from how long the last one took."""

    deadline: float
    _seconds: float = 0.0
    _arcs: int = 1

    def allows(self, arcs: int) -> bool:
        expected = self._seconds * (arcs / self._arcs) ** _GROWTH
        return time.perf_counter() + expected < self.deadline

    def note(self, arcs: int, seconds: float) -> None:
        self._seconds, self._arcs = seconds, arcs


@dataclass
class _ColumnGeneration:
    """The rounds on one level. f and g are the best feasible potentials so far."""

    problem: Problem
    f: np.ndarray
    g: np.ndarray
    arcs: np.ndarray
    device: str
    clock: _Clock
    floor: float = 0.0  # W₂ is at least this, by f and g
    best: Answer = field(init=False)

    def run(self, rtol: float, rounds: int) -> None:
        problem = self.problem
        pricing = Pricing(problem.x, problem.y, device=self.device)
        for k in range(rounds):
            if k and not self.clock.allows(len(self.arcs)):
                break
            start = time.perf_counter()
            plan = self._on_arcs()
            self.clock.note(len(self.arcs), time.perf_counter() - start)
            prices = pricing(plan.g, _NEW_ARCS, plan.f)
            if prices.slack > _MOST_SLACK * rtol * self._cost(plan):
                prices = pricing.precise(plan.g, _NEW_ARCS, plan.f)
            answer = certify(
                problem,
                plan,
                (prices.minima, plan.g),
                method="column generation",
                rtol=rtol / 4,  # the interval, rounding included, is to be narrower than rtol
                slack=prices.slack,
            )
            self._keep(answer)
            new = np.setdiff1d(_few_arcs(prices, plan, problem), self.arcs)
            if self.best.converged or not len(new):
                break
            self.arcs = np.union1d(self.arcs, new)
        if self.best.width <= rtol:
            self.best = replace(self.best, converged=True)

    @property
    def plan(self) -> Plan:
        return Plan(self.best.rows, self.best.cols, np.exp(self.best.log_mass), self.f, self.g)

    def _cost(self, plan: Plan) -> float:
        moves = self.problem.x[plan.rows] - self.problem.y[plan.cols]
        return float(plan.mass @ np.square(moves).sum(-1))

    def _on_arcs(self) -> Plan:
        """The simplex on reduced costs: four times faster than on costs, and more accurate.

        Most reduced costs of arcs that matter are small, so they, and not the artificial arcs,
        lead the way; and its tolerance is relative to the largest of them.
        """
        problem, f, g = self.problem, self.f, self.g
        rows, cols = np.divmod(self.arcs, problem.m)
        costs = np.square(problem.x[rows] - problem.y[cols]).sum(-1)
        reduced = np.maximum(costs - f[rows] - g[cols], 0)
        plan = sparse_simplex(
            np.maximum(problem.a, 1e-300), np.maximum(problem.b, 1e-300), (rows, cols, reduced)
        )
        return plan._replace(f=plan.f + f, g=plan.g + g)

    def _keep(self, answer: Answer) -> None:
        """Plans improve from round to round; potentials need not."""
        assert answer.f is not None and answer.g is not None
        if answer.lower >= self.floor:
            self.f, self.g, self.floor, self.best = answer.f, answer.g, answer.lower, answer
            return
        floor = min(self.floor, answer.upper)
        value = max(answer.value, floor)
        self.best = replace(answer, value=value, lower=floor, f=self.f, g=self.g)


def _few_arcs(prices: Prices, plan: Plan, problem: Problem) -> np.ndarray:
    """The most violated arcs, at most a few in each row (as priced) and then in each column."""
    rows, cols = prices.rows, prices.cols
    order = np.lexsort((prices.values - plan.f[rows], cols))
    starts = np.flatnonzero(np.diff(cols[order], prepend=-1))
    rank = np.arange(len(order)) - np.repeat(starts, np.diff(starts, append=len(order)))
    kept = order[rank < _COLUMN_ARCS]
    return rows[kept] * problem.m + cols[kept]


def _staircase(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """A feasible coupling: monotone along the direction in which the clouds are widest."""
    direction = _widest(problem)
    order_x, order_y = (np.argsort(t @ direction) for t in (problem.x, problem.y))
    i, j, _ = monotone_plan(problem.a[order_x], problem.b[order_y])
    # Both ways around a corner, so that rounding of the sums cannot cut the staircase.
    rows = np.concatenate([i, i[:-1], i[1:]])
    cols = np.concatenate([j, j[1:], j[:-1]])
    return order_x[rows], order_y[cols]


def _spread(problem: Problem, level: _Level, plan: Plan, device: str, rtol: float) -> Answer:
    """Plan and potentials of a coarser level carried over to all atoms.

    What the coarse plan moves from group k to group l is split over their atoms, in the order of
    their projections on the widest direction.
    """
    g = Pricing(problem.y, level.problem.x, device=device)(plan.f, 1).minima
    prices = Pricing(problem.x, problem.y, device=device)(g, 1)
    along = _widest(problem)
    x, y = problem.x @ along, problem.y @ along
    from_x, from_y = level.problem.x @ along, level.problem.y @ along
    entry_of_row, rows, mass_of_row = _within(
        np.lexsort((from_y[plan.cols], plan.rows)),
        plan.mass,
        np.lexsort((x, level.row_of)),
        problem.a,
    )
    entry_of_col, cols, mass_of_col = _within(
        np.lexsort((from_x[plan.rows], plan.cols)),
        plan.mass,
        np.lexsort((y, level.col_of)),
        problem.b,
    )
    i, j, mass = _within(
        np.lexsort((x[rows], entry_of_row)),
        mass_of_row,
        np.lexsort((y[cols], entry_of_col)),
        mass_of_col,
    )
    none = np.zeros(0)
    return certify(
        problem,
        Plan(rows[i], cols[j], mass, none, none),
        (prices.minima, g),
        method="column generation",
        rtol=rtol / 4,
        slack=prices.slack,
    )


def _within(
    first: np.ndarray, masses: np.ndarray, second: np.ndarray, others: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The monotone plan in two given orders, in the numbering before ordering."""
    i, j, mass = monotone_plan(masses[first], others[second])
    return first[i], second[j], mass


def _widest(problem: Problem) -> np.ndarray:
    """The direction in which the two clouds together are widest."""
    points = np.concatenate([problem.x, problem.y])
    centred = points - points.mean(0)
    return np.linalg.eigh(centred.T @ centred)[1][:, -1]
