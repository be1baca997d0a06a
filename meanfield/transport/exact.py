"""The solvers that give optimal plans: POT's network simplex and SciPy's assignment.

POT's compiled core is called directly where it answers a known problem rightly: the Python
wrapper around it costs twenty times the solution of a problem of eight atoms. Elsewhere the
public `ot.emd` is used.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from meanfield.errors import ConvergenceError

__all__ = [
    "Plan",
    "assignment",
    "assignment_potentials",
    "assignments",
    "compiled_core",
    "simplex",
    "simplex_plans",
    "sparse_simplex",
]

_PIVOTS = 10**12  # the default of POT, 1e5, silently moves 15 to 78 % of the mass


class Plan(NamedTuple):
    """A sparse plan with the potentials that came with it (not yet certified)."""

    rows: np.ndarray
    cols: np.ndarray
    mass: np.ndarray
    f: np.ndarray
    g: np.ndarray


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


def simplex(a: np.ndarray, b: np.ndarray, cost: np.ndarray) -> Plan:
    """An optimal plan of a dense problem whose costs are at most about one.

    Raises:
        ConvergenceError: if POT reports anything but an optimum.
    """
    core = compiled_core()
    b = b * (a.sum() / b.sum())
    if core is not None:
        # Atoms of weight 0 make the core return meaningless potentials.
        if a.all() and b.all():
            plan, _, f, g, code = core.emd_c(a, b, cost, _PIVOTS, 1, None, None)
            message = core.check_result(code)
        else:
            return _without_zeros(a, b, cost)
    else:
        plan, f, g, message = _public_simplex(a, b, cost)
    _refuse(message)
    rows, cols = np.nonzero(plan)
    return Plan(rows, cols, plan[rows, cols], f, g)


def simplex_plans(a: np.ndarray, b: np.ndarray, cost: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Optimal plans (k, n, m) and potentials g (k, m) of small dense problems in a row.

    All checks and normalisations are done for all of them at once: they cost more than the
    compiled core does.
    """
    core = compiled_core()
    plans, g = np.zeros(cost.shape), np.empty(b.shape)
    b = b * (a.sum(-1, keepdims=True) / b.sum(-1, keepdims=True))
    if core is None or not (a.all() and b.all()):
        for k in range(len(cost)):
            plan = simplex(a[k], b[k], cost[k])
            plans[k, plan.rows, plan.cols], g[k] = plan.mass, plan.g
        return plans, g
    codes = set()
    for k in range(len(cost)):
        plans[k], _, _, g[k], code = core.emd_c(a[k], b[k], cost[k], _PIVOTS, 1, None, None)
        codes.add(code)
    for code in codes:
        _refuse(core.check_result(code))
    return plans, g


def _refuse(message: str | None) -> None:
    if message is not None:
        raise ConvergenceError(f"POT's network simplex gave no optimal plan: {message}")


def assignments(cost: np.ndarray) -> np.ndarray:
    """Optimal permutations (k, n) of square problems in a row."""
    from scipy.optimize import linear_sum_assignment

    return np.stack([linear_sum_assignment(each)[1] for each in cost])


def assignment(cost: np.ndarray) -> np.ndarray:
    """An optimal permutation σ (xᵢ to y_σ(i)); accurate relative to the answer, not to max C."""
    from scipy.optimize import linear_sum_assignment

    return linear_sum_assignment(cost)[1]


def assignment_potentials(
    cost: np.ndarray, sigma: np.ndarray, *, max_rounds: int
) -> tuple[np.ndarray, np.ndarray]:
    """Potentials of an optimal permutation: fᵢ = min_j C_ij − g_j, g_σ(i) = C_iσ(i) − fᵢ.

    Repeated, this is Bellman–Ford in the residual graph; it is at rest after as many rounds as
    the longest shortest path has arcs. Stopping early leaves a gap, never a wrong bound.
    Leading axes are a batch.
    """
    along = np.take_along_axis(cost, sigma[..., None], -1)[..., 0]
    g = np.zeros_like(along)
    f = along.copy()
    reduced = np.empty_like(cost)  # one for all rounds: a new one would be new pages each time
    for _ in range(max_rounds):
        f = np.subtract(cost, g[..., None, :], out=reduced).min(-1)
        new = np.empty_like(g)
        np.put_along_axis(new, sigma, along - f, -1)
        if np.abs(new - g).max(initial=0.0) <= 1e-16 * (1 + np.abs(new).max(initial=0.0)):
            break
        g = new
    return f, g


def _without_zeros(a: np.ndarray, b: np.ndarray, cost: np.ndarray) -> Plan:
    """Solve between the atoms whose weight can be represented; c-transforms give the rest."""
    i, j = np.flatnonzero(a), np.flatnonzero(b)
    inner = simplex(a[i], b[j], np.ascontiguousarray(cost[np.ix_(i, j)]))
    g = (cost[i] - inner.f[:, None]).min(0)
    f = (cost - g[None, :]).min(1)
    return Plan(i[inner.rows], j[inner.cols], inner.mass, f, g)


def _public_simplex(
    a: np.ndarray, b: np.ndarray, cost: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, str | None]:
    import ot

    plan, log = ot.emd(a, b, cost, numItermax=_PIVOTS, log=True)
    return plan, log["u"], log["v"], log["warning"]


def sparse_simplex(
    a: np.ndarray,
    b: np.ndarray,
    arcs: tuple[np.ndarray, np.ndarray, np.ndarray],
    potentials: tuple[np.ndarray, np.ndarray] | None = None,
) -> Plan:
    """An optimal plan on given arcs (rows, columns, costs), warm-started from potentials.

    Raises:
        ConvergenceError: if POT reports anything but an optimum.
    """
    rows, cols, costs = arcs
    b = b * (a.sum() / b.sum())
    unit = max(float(costs.max()), 1e-300)
    core = compiled_core()
    if core is None or not hasattr(core, "emd_c_sparse"):
        return _public_sparse(a, b, arcs, unit)
    index_rows, index_cols = rows.astype(np.uint64), cols.astype(np.uint64)
    start = (None, None) if potentials is None else tuple(t / unit for t in potentials)
    i, j, mass, _, f, g, code = core.emd_c_sparse(
        a, b, index_rows, index_cols, costs / unit, _PIVOTS, *start
    )
    message = core.check_result(code)
    _refuse(message)
    middle = float(np.median(g))  # the artificial root leaves an offset of some thousands
    f, g = (f + middle) * unit, (g - middle) * unit
    return Plan(i.astype(np.int64), j.astype(np.int64), mass, f, g)


def _public_sparse(
    a: np.ndarray, b: np.ndarray, arcs: tuple[np.ndarray, np.ndarray, np.ndarray], unit: float
) -> Plan:
    import ot
    from scipy.sparse import coo_array

    rows, cols, costs = arcs
    cost = coo_array((costs / unit, (rows, cols)), shape=(len(a), len(b)))
    plan, log = ot.emd(a, b, cost, numItermax=_PIVOTS, log=True)
    _refuse(log["warning"])
    plan = plan.tocoo()
    return Plan(
        plan.row.astype(np.int64),
        plan.col.astype(np.int64),
        plan.data,
        log["u"] * unit,
        log["v"] * unit,
    )
