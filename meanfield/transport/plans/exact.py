"""Dense problems: POT's network simplex and SciPy's assignment, one problem or many in arrays.

POT's compiled core is called directly where it answers a known problem rightly: the Python
wrapper around it costs twenty times the solution of a problem of eight atoms. Elsewhere, and for
sparse problems, the public `ot.emd` is used. Only the calls of the solvers are a loop.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from meanfield.errors import ConvergenceError
from meanfield.transport.certificate import (
    Answer,
    Plan,
    certify,
    feasible,
    log_masses,
    narrower,
)
from meanfield.transport.plans.formulas import staircase
from meanfield.transport.problem import Problem

__all__ = [
    "assignment",
    "compiled_core",
    "simplexes",
    "solve_assignment",
    "solve_dense",
    "solve_finely",
    "sparse_simplex",
]

_PIVOTS = 10**12  # the default of POT, 1e5, silently moves 15 to 78 % of the mass
_LEAST_MASS = 1e-300  # atoms of weight 0 make the core return meaningless potentials
_REFINEMENTS = 4
_FEW_FROM = 40_000  # pairs from which a few arcs beat all of them
_SCALINGS = 10  # steps of Sinkhorn that choose the arcs
_BLUR = 0.05  # their temperature, over the mean reduced cost
_MISPLACED = 0.1  # mass that they may leave misplaced: clusters that exchange mass need more steps
_REACH = 4.0  # times the gap that they leave: arcs of an optimal plan cost less than that
_FEW = 100  # arcs per atom, at most: with more, the dense simplex is as fast
_ADDITIONS = 4
_TIGHT = 1e-15  # reduced costs that are 0 up to rounding


def solve_dense(problem: Problem, *, rtol: float, by_simplex: bool = False) -> Answer:
    """A batch (one leading axis) of problems of one shape: nearest neighbours, then the simplex.

    Args:
        problem: the batch.
        rtol: how closely plans and potentials must meet.
        by_simplex: not to look for nearest neighbours.
    """
    draft = _Draft(problem)
    todo = np.ones(len(problem.x), bool)
    if not by_simplex and problem.is_paired.any():
        todo &= ~draft.pair()
    draft.route(np.flatnonzero(todo))
    plan = Plan(draft.rows, draft.cols, draft.logs)
    method = " + ".join(sorted(draft.methods))
    return certify(problem, plan, (draft.f, draft.g), method=method, rtol=rtol)


def solve_assignment(problem: Problem, *, rtol: float) -> Answer:
    """One problem of uniform clouds of one size: accurate relative to the answer."""
    sigma = assignment(problem.costs)
    g = _assignment_potentials(problem.costs, sigma)
    return certify(
        problem,
        Plan(np.arange(problem.n), sigma, problem.logs_a),
        feasible(problem.costs, g, problem.b),
        method="assignment",
        rtol=rtol,
    )


def solve_finely(problem: Problem, *, rtol: float, answer: Answer) -> Answer:
    """One problem whose dense answer has not closed: assignment, then reduced costs.

    The simplex has absolute tolerances. What it leaves is a problem of the same form whose costs
    are the reduced costs: clipped at a multiple of the gap and brought to order one, the same
    tolerances become as much finer. Potentials add up.
    """
    if problem.is_uniform:
        answer = narrower(answer, solve_assignment(problem, rtol=rtol), rtol)
    for _ in range(_REFINEMENTS):
        if answer.converged or answer.f is None or answer.g is None:
            break
        reduced = np.maximum(problem.costs - answer.f[:, None] - answer.g, 0)
        left = np.exp(answer.log_mass) @ reduced[answer.rows, answer.cols]
        ceiling = 1e3 * max(float(left), 1e-30 * float(problem.diameter) ** problem.order)
        np.minimum(reduced, ceiling, out=reduced)
        plans, g = simplexes(problem.a[None], problem.b[None], reduced[None] / ceiling)
        rows, cols = np.nonzero(plans[0])
        plan = Plan(rows, cols, log_masses(plans[0][rows, cols]))
        potentials = feasible(problem.costs, answer.g + g[0] * ceiling, problem.b)
        finer = certify(problem, plan, potentials, method="simplex", rtol=rtol)
        answer = narrower(answer, finer, rtol)
    return answer


class _Draft:
    """Plans and potentials of a batch, filled in by one solver after the other."""

    def __init__(self, problem: Problem) -> None:
        count, n, m = problem.costs.shape
        self._problem = problem
        self.rows, self.cols = (np.zeros((count, n + m - 1), np.int64) for _ in range(2))
        self.logs = np.full((count, n + m - 1), -np.inf)
        self.f, self.g = np.zeros((count, n)), np.zeros((count, m))
        self.methods: set[str] = set()

    def pair(self) -> np.ndarray:
        """Fill in xᵢ → yᵢ where nearest neighbours prove it optimal; g = 0, or f = 0."""
        problem, n = self._problem, self._problem.n
        index = np.arange(n)
        along = problem.costs[:, index, index]
        to_y, to_x = (problem.costs.min(axis) for axis in (2, 1))
        forth, back = ((along <= t).all(-1) for t in (to_y, to_x))
        found = problem.is_paired & (forth | back)
        if found.any():
            self.rows[found, :n] = self.cols[found, :n] = index
            self.logs[found, :n] = problem.logs_a[found]
            self.f[found & forth] = to_y[found & forth]
            self.g[found & ~forth] = to_x[found & ~forth]
            self.methods.add("identity")
        return found

    def route(self, which: np.ndarray) -> None:
        """The network simplex."""
        if not len(which):
            return
        problem = self._problem if len(which) == len(self.f) else self._problem[which]
        unit = problem.diameter[:, None] ** problem.order
        unit = np.where(unit > 0, unit, 1.0)
        plans, g = simplexes(problem.a, problem.b, problem.costs / unit[..., None])
        owner, rows, cols = np.nonzero(plans)
        slot = np.arange(len(rows)) - np.searchsorted(owner, np.arange(len(which)))[owner]
        kept = slot < self.rows.shape[1]  # a vertex has no more entries; what else, is missed
        place = which[owner[kept]], slot[kept]
        self.rows[place], self.cols[place] = rows[kept], cols[kept]
        self.logs[place] = log_masses(plans[owner, rows, cols][kept])
        self.f[which], self.g[which] = feasible(problem.costs, g * unit, problem.b)
        self.methods.add("simplex")


@functools.cache
def compiled_core() -> Any:
    """POT's private compiled module if it solves a known problem rightly, otherwise None."""
    try:
        from ot.lp import emd_wrap

        weights = np.array([0.25, 0.75])
        cost = np.array([[0.0, 1.0], [2.0, 0.5]])
        plan, value, f, g, code = emd_wrap.emd_c(weights, weights, cost, 1000, 1, None, None)
        right = np.allclose(plan, np.diag(weights)) and abs(value - 0.375) < 1e-12
        tight = np.allclose([f[0] + g[0], f[1] + g[1]], [0.0, 0.5])
        if right and tight and emd_wrap.check_result(code) is None:
            return emd_wrap
    except (ImportError, AttributeError, TypeError, ValueError):
        pass
    return None


def simplexes(a: np.ndarray, b: np.ndarray, costs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Plans (k, n, m) and potentials g (k, m) of dense problems whose costs are at most about one.

    Raises:
        ConvergenceError: if POT reports anything but an optimum.
    """
    core = compiled_core()
    plans, g, messages = np.empty(costs.shape), np.empty(b.shape), set()
    (a, b), costs = _positive(a, b), np.ascontiguousarray(costs)
    for k, cost in enumerate(costs):
        start: np.ndarray | float = 0.0
        if cost.size >= _FEW_FROM:
            cost, start, active = _reduced(a[k], b[k], cost)
            found = None if active is None else _on_active_arcs(a[k], b[k], cost, active)
            if found is not None:
                plans[k] = 0
                plans[k][found.rows, found.cols] = found.mass
                g[k] = found.g + start
                continue
        if core is not None:
            plans[k], _, _, g[k], code = core.emd_c(a[k], b[k], cost, _PIVOTS, 1, None, None)
            messages.add(code)
        else:
            import ot

            plans[k], log = ot.emd(a[k], b[k], cost, numItermax=_PIVOTS, log=True)
            g[k] = log["v"]
            _refuse(log["warning"])
        g[k] += start
    for code in messages:
        _refuse(core.check_result(code))
    return plans, g


def _reduced(
    a: np.ndarray, b: np.ndarray, costs: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Costs less potentials of a few Sinkhorn steps, their g, and the arcs that are then cheap.

    Sinkhorn's plan costs `gap` more than its potentials, so an optimal plan does not cost more
    than that either. None in the place of the arcs where they are too many or the steps too few.
    """
    reduced = costs - costs.min(1, keepdims=True)
    g = reduced.min(0)
    reduced -= g
    level = _BLUR * float(a @ reduced @ b)
    if not level > 0:
        return reduced, g, None
    kernel = np.exp(np.multiply(reduced, -1 / level))
    u = np.ones_like(a)
    with np.errstate(all="ignore"):
        for _ in range(_SCALINGS):
            v = b / (u @ kernel)
            u = a / (kernel @ v)
        misplaced = float(np.abs(v * (u @ kernel) - b).sum())
        kernel *= reduced
        gap = float(u @ kernel @ v)
    if not misplaced <= _MISPLACED:  # NaN as well; such potentials are worse than none
        return costs, np.zeros_like(b), None
    g = g + level * np.log(v)
    np.subtract(costs, g, out=reduced)
    reduced -= reduced.min(1)[:, None]
    last = reduced.min(0)
    reduced -= last
    active = reduced <= _REACH * gap
    is_few = np.count_nonzero(active) <= _FEW * sum(costs.shape)
    return reduced, g + last, active if is_few else None


def _on_active_arcs(
    a: np.ndarray, b: np.ndarray, costs: np.ndarray, active: np.ndarray
) -> SparseFound | None:
    """The optimum from the active arcs and those that it turns out to need; None if many."""
    active[staircase(a, b)] = True
    for _ in range(_ADDITIONS):
        rows, cols = np.nonzero(active)
        found = sparse_simplex(a, b, (rows, cols, costs[rows, cols]))
        missed = costs - found.f[:, None] - found.g < -_TIGHT
        missed &= ~active
        if not missed.any():
            return found
        active |= missed
    return None


def assignment(costs: np.ndarray) -> np.ndarray:
    """The optimal permutation σ, xᵢ to y_σ(i)."""
    from scipy.optimize import linear_sum_assignment

    return linear_sum_assignment(costs)[1]


def _assignment_potentials(costs: np.ndarray, sigma: np.ndarray) -> np.ndarray:
    """Potentials g of an optimal permutation: fᵢ = min_j C_ij − g_j, g_σ(i) = C_iσ(i) − fᵢ.

    Repeated, this is Bellman–Ford in the residual graph; it is at rest after as many rounds as
    the longest shortest path has arcs. Stopping early leaves a gap, never a wrong bound.
    """
    along = costs[np.arange(len(costs)), sigma]
    g, new = np.zeros_like(along), np.empty_like(along)
    reduced = np.empty_like(costs)  # one for all rounds: a new one would be new pages each time
    for _ in range(min(2 * len(costs), 200)):
        new[sigma] = along - np.subtract(costs, g, out=reduced).min(-1)
        if np.abs(new - g).max() <= 1e-16 * np.abs(new).max():
            break
        g[:] = new
    return g


class SparseFound(NamedTuple):
    """What the sparse simplex says: a plan and potentials, on the arcs it was given."""

    rows: np.ndarray
    cols: np.ndarray
    mass: np.ndarray
    f: np.ndarray
    g: np.ndarray


def sparse_simplex(
    a: np.ndarray, b: np.ndarray, arcs: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> SparseFound:
    """An optimal plan on given arcs (rows, columns, costs).

    Raises:
        ConvergenceError: if POT reports anything but an optimum.
    """
    import ot
    from scipy.sparse import coo_array

    rows, cols, costs = arcs
    a, b = _positive(a, b)
    unit = max(float(costs.max()), 1e-300)
    cost = coo_array((costs / unit, (rows, cols)), shape=(len(a), len(b)))
    found, log = ot.emd(a, b, cost, numItermax=_PIVOTS, log=True)
    _refuse(log["warning"])
    plan, f, g = found.tocoo(), log["u"], log["v"]
    middle = float(np.median(g))  # the artificial root leaves an offset of some thousands
    return SparseFound(
        plan.row.astype(np.int64),
        plan.col.astype(np.int64),
        plan.data,
        (f + middle) * unit,
        (g - middle) * unit,
    )


def _positive(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Masses that the core can take: none 0, equal totals."""
    a, b = (np.ascontiguousarray(np.maximum(t, _LEAST_MASS)) for t in (a, b))
    return a, b * (a.sum(-1, keepdims=True) / b.sum(-1, keepdims=True))


def _refuse(message: str | None) -> None:
    if message is not None:
        raise ConvergenceError(f"POT's network simplex gave no optimal plan: {message}")
