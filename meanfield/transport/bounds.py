"""Two-sided bounds for sizes at which nothing exact is affordable: seconds for 100,000 points.

Above: a bijection by random binary space partitions (POT's BSP-OT; uniform clouds of one size)
or the best monotone coupling along a few directions. Below: Gelbrich's bound from means and
covariances (exact for affine images) and the sum of the exact distances of the coordinates in an
orthonormal basis, since E‖x − y‖² is the sum of the coordinates' parts for every coupling.
"""

from __future__ import annotations

import math

import numpy as np

from meanfield.transport.certificates import primal_bound
from meanfield.transport.closed_forms import monotone_plan, solve_line
from meanfield.transport.exact import Plan
from meanfield.transport.problems import UNIT, Answer, Problem, mass_error

__all__ = ["coordinate_lower", "gelbrich_lower", "solve_bounds"]

_PLANS = 16
_DIRECTIONS = 8


def solve_bounds(problem: Problem, *, rtol: float) -> Answer:
    """The best cheap interval; its plan is the one that gives the upper end."""
    plan, exact = _coupling(problem)
    squares = np.square(problem.x[plan.rows] - problem.y[plan.cols]).sum(-1)
    cost, upper = primal_bound(problem, plan, squares, is_exact=exact)
    lower = min(max(gelbrich_lower(problem), coordinate_lower(problem)), upper)
    low, high = math.sqrt(lower) * (1 - 2 * UNIT), math.sqrt(upper) * (1 + 2 * UNIT)
    with np.errstate(divide="ignore"):
        logs = np.log(plan.mass)
    value = min(max(math.sqrt(cost), low), high)
    converged = high - low <= rtol * high
    return Answer(value, low, high, plan.rows, plan.cols, logs, None, None, "bounds", converged)


def gelbrich_lower(problem: Problem) -> float:
    """‖m − m'‖² + tr(Σ + Σ' − 2 (Σ^½ Σ' Σ^½)^½) ≤ W₂², rounding taken off."""
    mean_x, cov_x = _moments(problem.x, problem.a)
    mean_y, cov_y = _moments(problem.y, problem.b)
    values, vectors = np.linalg.eigh(cov_x)
    root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    inner = root @ cov_y @ root
    # Eigenvalues are right to η only; rounding them up keeps the bound a bound.
    eta = 64 * problem.dim * UNIT * float(np.linalg.norm(inner))
    cross = np.sqrt(np.maximum(np.linalg.eigvalsh(inner), 0) + eta).sum()
    total = float(np.trace(cov_x) + np.trace(cov_y))
    shift = float(np.square(mean_x - mean_y).sum())
    drift = 2 * mass_error(problem.n + problem.m) * (total + shift + problem.diameter_squared)
    return max(shift + total - 2 * float(cross) - drift, 0.0)


def coordinate_lower(problem: Problem) -> float:
    """Σ over an orthonormal basis of the exact squared distances of the coordinates."""
    bases = [np.eye(problem.dim)]
    difference = _moments(problem.x, problem.a)[1] - _moments(problem.y, problem.b)[1]
    bases.append(np.linalg.eigh(difference)[1])
    centre = problem.x.mean(0)
    best = 0.0
    for basis in bases:
        total = 0.0
        for axis in basis.T:
            x, y = (problem.x - centre) @ axis, (problem.y - centre) @ axis
            line = Problem(x[:, None], y[:, None], problem.log_a, problem.log_b)
            total += solve_line(line).lower ** 2
        best = max(best, total)
    # Projections are right to (d + 2) u of the length; the basis is orthonormal to d u.
    off = 8 * (problem.dim + 4) * problem.dim * UNIT * problem.diameter_squared
    return max(best - off, 0.0)


def _moments(points: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    anchor = points[0]
    offset = weights @ (points - anchor)
    centred = points - anchor - offset
    return anchor + offset, (centred * weights[:, None]).T @ centred


def _coupling(problem: Problem) -> tuple[Plan, bool]:
    if problem.is_uniform:
        sigma = _bijection(problem)
        if sigma is not None:
            none = np.zeros(0)
            return Plan(np.arange(problem.n), sigma, problem.a, none, none), True
    candidates = (_monotone_along(problem, u) for u in _directions(problem))
    return min(candidates, key=_cost)[0], False


def _bijection(problem: Problem) -> np.ndarray | None:
    """POT's BSP matching, or None where this POT has none."""
    try:
        from ot.bsp import compute_bspot_bijection
    except ImportError:
        return None
    centre = problem.x.mean(0)
    found = compute_bspot_bijection(problem.x - centre, problem.y - centre, n_plans=_PLANS)
    sigma = np.asarray(found[1], dtype=np.int64)
    is_bijection = np.array_equal(np.sort(sigma), np.arange(problem.n))
    return sigma if is_bijection else None


def _directions(problem: Problem) -> np.ndarray:
    covariance = _moments(problem.x, problem.a)[1] + _moments(problem.y, problem.b)[1]
    return np.linalg.eigh(covariance)[1].T[::-1][:_DIRECTIONS]


def _monotone_along(problem: Problem, direction: np.ndarray) -> tuple[Plan, float]:
    order_x, order_y = (np.argsort(t @ direction) for t in (problem.x, problem.y))
    i, j, mass = monotone_plan(problem.a[order_x], problem.b[order_y])
    rows, cols = order_x[i], order_y[j]
    cost = float(mass @ np.square(problem.x[rows] - problem.y[cols]).sum(-1))
    none = np.zeros(0)
    return Plan(rows, cols, mass, none, none), cost


def _cost(candidate: tuple[Plan, float]) -> float:
    return candidate[1]
