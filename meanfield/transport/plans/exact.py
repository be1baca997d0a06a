"""Dense problems: POT's network simplex, one problem or many in arrays.

The simplex is ``ot.lp.emd_c`` (see `core`); where that is not to be had, the public ``ot.emd``.
Only the calls of the solvers are a loop.
"""

from __future__ import annotations

import numpy as np

from meanfield.errors import ConvergenceError
from meanfield.transport.certificate import (
    Interval,
    SparsePlan,
    certified,
    is_open,
    narrower,
)
from meanfield.transport.plans.core import compiled_core
from meanfield.transport.problem import Problem, log_masses

_PIVOTS = 10**12  # the default of POT, 1e5, silently moves 15 to 78 % of the mass
_LEAST_MASS = 1e-300  # atoms of weight 0 make the core return meaningless potentials
_REFINEMENTS = 4
_FORD_ROUNDS, _FORD_GAP = 400, 1e-13
# Normal clouds and clusters of a thousand atoms take 60 rounds. A chain of atoms, each of which is
# nearly as near to the next one's partner, takes one for each: the simplex is faster then.
_FEW_ROUNDS = 100
# Uniform batches by assignments: with 10 and 30 atoms in half the time of the simplex, with 50 in
# nine tenths. Their potentials cost a few problems more than the simplex does.
_ASSIGNED, _FEW = 32, 16
# So are single uniform problems from so many dimensions on, with so many atoms: normal clouds in a
# third to a half of the time (n = 150, 300, 1,000), clusters in 0.8 to 1.3 times as long, heavy
# tails at 700 in 0.6 to 1.3 times; in the plane, and beyond 1,300 atoms, in up to ten times.
_WIDE, _MANY = 8, range(100, 1101)


def solve_dense(problem: Problem, *, rtol: float, by_simplex: bool = False) -> Interval:
    """One problem, or a batch (one leading axis): nearest neighbours, assignments or the simplex.

    Args:
        problem: the problems.
        rtol: how closely plans and potentials must meet.
        by_simplex: no assignments.
    """
    n, m = problem.n, problem.m
    costs = problem.costs.reshape(-1, n, m)
    a, b = problem.a.reshape(-1, n), problem.b.reshape(-1, m)
    is_near = np.zeros(len(costs), bool)
    if problem.is_paired.any():
        # Where yᵢ is nearest to xᵢ for every i, g = 0 proves xᵢ → yᵢ optimal.
        is_near = (costs.diagonal(axis1=1, axis2=2) <= costs.min(2)).all(-1) & problem.is_paired
    is_uniform = n == m and (a == a[:, :1]).all() and (b == b[:, :1]).all()
    is_many = len(costs) >= _FEW and n <= _ASSIGNED
    is_wide = problem.dim >= _WIDE and n in _MANY
    todo, g = ~is_near, np.zeros_like(b)
    those = slice(None) if todo.all() else todo
    if is_uniform and (is_many or is_wide) and not by_simplex:
        sigma, core = np.zeros(a.shape, np.int64) + np.arange(n), "assignment"
        sigma[those], g[those] = assignments(costs[those], _FEW_ROUNDS)
        sigma = sigma.reshape(problem.a.shape)
        plan = SparsePlan(np.broadcast_to(np.arange(n), sigma.shape), sigma, problem.logs_a)
    else:
        plans, core = np.zeros(costs.shape), "simplex"
        plans[is_near] = np.eye(n, m)
        plans[those], g[those] = simplexes(a[those], b[those], costs[those])
        plan = _sparse(plans.reshape(problem.costs.shape))
    roads = ("identity", is_near.any()), (core, todo.any())
    method = " + ".join(name for name, is_taken in roads if is_taken)
    answer = certified(problem, plan, g.reshape(problem.b.shape), method=method, rtol=rtol)
    if core == "assignment" and is_wide and len(costs) == 1 and is_open(answer, rtol):
        return solve_dense(problem, rtol=rtol, by_simplex=True)
    return answer


def _sparse(plans: np.ndarray) -> SparsePlan:
    """A dense plan (n, m), or a batch of them padded with −inf, by its entries."""
    *batch, n, m = plans.shape
    found = np.flatnonzero(plans > 0)
    logs = np.log(plans.reshape(-1)[found])
    if plans.size == n * m:
        return SparsePlan(*(t.reshape(*batch, -1) for t in (*np.divmod(found, m), logs)))
    owner, entry = np.divmod(found, n * m)
    sizes = np.bincount(owner, minlength=len(plans))
    place = owner, np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    shape = (len(plans), sizes.max(initial=0))
    plan = SparsePlan(
        np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.full(shape, -np.inf)
    )
    for held, values in zip(plan[:3], (*np.divmod(entry, m), logs), strict=True):
        held[place] = values
    return plan


def solve_finely(problem: Problem, *, rtol: float, answer: Interval) -> Interval:
    """One problem whose answer is open: potentials of a permutation, then reduced costs.

    Those of a permutation are as small as its displacements; others may be as large as the
    clouds, and rounded accordingly. The simplex has absolute tolerances: what it leaves is a
    problem of the same form whose costs are the reduced costs. Clipped at a multiple of the gap
    and brought to order one, they make the same tolerances as much finer. Potentials add up.
    """
    is_square = problem.n == problem.m
    is_uniform = is_square and np.ptp(problem.log_a) == np.ptp(problem.log_b) == 0
    permutes = is_square and answer.rows.size == problem.n and not answer.plan_doubt
    if is_open(answer, rtol) and (is_uniform or permutes):
        if is_uniform:  # W_40 and more: costs lie too far apart for the simplex
            (sigma,), (g,) = assignments(problem.costs[None])
        else:
            sigma = answer.cols[np.argsort(answer.rows)]
            (g,) = _permutation_potentials(problem.costs[None], sigma[None])
        plan = SparsePlan(np.arange(problem.n), sigma, problem.logs_a)
        other = certified(problem, plan, g, method="assignment", rtol=rtol)
        answer = narrower(answer, other, rtol)
    for _ in range(_REFINEMENTS):
        if not is_open(answer, rtol):
            break
        reduced = np.maximum(problem.costs - answer.f[:, None] - answer.g, 0)
        left = np.exp(answer.log_mass) @ reduced[answer.rows, answer.cols]
        ceiling = 1e3 * max(float(left), 1e-30 * float(problem.diameter) ** problem.order)
        np.minimum(reduced, ceiling, out=reduced)
        plans, g = simplexes(problem.a[None], problem.b[None], reduced[None] / ceiling)
        plan = _sparse(plans[0])
        g = answer.g + g[0] * ceiling
        finer = certified(problem, plan, g, method="simplex", rtol=rtol)
        answer = narrower(answer, finer, rtol)
    return answer


def simplexes(a: np.ndarray, b: np.ndarray, costs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Plans (k, n, m) and potentials g (k, m) of dense problems, by POT's `ot.lp.emd_c`.

    Raises:
        ConvergenceError: if POT reports anything but an optimum.
    """
    core = compiled_core()
    plans, g, messages = np.empty(costs.shape), np.empty(b.shape), set()
    (a, b), costs = _positive(a, b), np.ascontiguousarray(costs)
    for k, cost in enumerate(costs):
        if core is not None:
            plans[k], _, _, g[k], code = core.emd_c(a[k], b[k], cost, _PIVOTS, 1, None, None)
            messages.add(code)
        else:
            import ot

            plans[k], log = ot.emd(a[k], b[k], cost, numItermax=_PIVOTS, log=True)
            g[k] = log["v"]
            _refuse(log["warning"])
    for code in messages:
        _refuse(core.check_result(code))
    return plans, g


def assignments(costs: np.ndarray, rounds: int = _FORD_ROUNDS) -> tuple[np.ndarray, np.ndarray]:
    """Optimal permutations (k, n) of square costs (k, n, n), and potentials g (k, n).

    The potentials are those after this many rounds, see `_permutation_potentials`.
    """
    from scipy.optimize import linear_sum_assignment

    # Least costs of rows and of columns taken away first: a third of the time, or less.
    reduced = costs - costs.min(2, keepdims=True)
    reduced -= reduced.min(1, keepdims=True)
    each = [linear_sum_assignment(cost)[1] for cost in reduced]
    sigma = np.array(each, np.int64).reshape(costs.shape[:2])
    return sigma, _permutation_potentials(costs, sigma, rounds)


def _permutation_potentials(
    costs: np.ndarray, sigma: np.ndarray, rounds: int = _FORD_ROUNDS
) -> np.ndarray:
    """Potentials g (k, n) of optimal permutations: g_σ(i) = C_iσ(i) − fᵢ, fᵢ = min_j C_ij − g_j.

    Repeated, this is Bellman–Ford in the residual graph; it converges in at most n rounds. By
    how much g grows in a round is the gap that is left; stopping early is never a wrong bound.
    A round looks at the columns whose g grew. Problems that are done leave; the others stand
    along the last axis, where minima are fastest.
    """
    rows, count = np.argsort(sigma, -1), np.arange(len(costs))
    found = np.zeros(sigma.shape)
    # [c, j]: in column c the row that has its partner in j.
    matched = costs[count[:, None], rows].transpose(2, 1, 0).copy()
    along = matched.diagonal().T.copy()
    g, grew = np.zeros_like(along), np.ones(len(along), bool)
    least = np.full_like(along, np.inf)
    for _ in range(rounds):
        seen = matched if grew.all() else matched[grew]
        least = np.minimum(least, (seen - g[grew, None]).min(0))
        new = along - least
        grew = (new > g).any(-1)
        is_left = (new - g).sum(0) > _FORD_GAP * along.sum(0)
        g = new
        if 2 * is_left.sum() <= len(count):
            found[count] = g.T
            if not is_left.any():
                return found
            count = count[is_left]
            matched, along, g, least = (
                t.compress(is_left, -1) for t in (matched, along, g, least)
            )
    found[count] = g.T
    return found


def sparse_simplex(
    a: np.ndarray,
    b: np.ndarray,
    arcs: tuple[np.ndarray, np.ndarray, np.ndarray],
    *,
    is_warm: bool = False,
) -> tuple[SparsePlan, np.ndarray, np.ndarray]:
    """An optimal plan on given arcs, f and g, by POT's `ot.lp.emd_c_sparse`.

    Args:
        a: masses of the rows.
        b: masses of the columns.
        arcs: rows, columns and costs.
        is_warm: whether potentials 0 are nearly optimal; the simplex then starts from them.

    Raises:
        ConvergenceError: if POT reports anything but an optimum.
    """
    rows, cols, costs = arcs
    a, b = _positive(a, b)
    unit = max(float(costs.max()), 1e-300)
    core = compiled_core()
    if core is not None:
        ends = (t.astype(np.uint64) for t in (rows, cols))
        zeros = (np.zeros(len(a)), np.zeros(len(b))) if is_warm else (None, None)
        *entries, _, f, g, code = core.emd_c_sparse(a, b, *ends, costs / unit, _PIVOTS, *zeros)
        message, (i, j, mass) = core.check_result(code), entries
    else:
        import ot
        from scipy.sparse import coo_array

        cost = coo_array((costs / unit, (rows, cols)), shape=(len(a), len(b)))
        plan, log = ot.emd(a, b, cost, numItermax=_PIVOTS, log=True)
        message, f, g = log["warning"], log["u"], log["v"]
        (i, j), mass = plan.tocoo().coords, plan.tocoo().data
    _refuse(message)
    middle = float(np.median(g))  # the artificial root leaves an offset of some thousands
    plan = SparsePlan(i.astype(np.int64), j.astype(np.int64), log_masses(mass))
    return plan, (f + middle) * unit, (g - middle) * unit


def _positive(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Masses that the core can take: none 0, equal totals."""
    a, b = (np.ascontiguousarray(np.maximum(t, _LEAST_MASS)) for t in (a, b))
    return a, b * (a.sum(-1, keepdims=True) / b.sum(-1, keepdims=True))


def _refuse(message: str | None) -> None:
    if message is not None:
        raise ConvergenceError(f"POT's network simplex gave no optimal plan: {message}")
