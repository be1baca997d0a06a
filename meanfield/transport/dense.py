"""Dense problems solved to a certificate: assignment or simplex, then reduced costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from meanfield.transport.certificates import c_transforms, certify
from meanfield.transport.exact import Plan, assignment, assignment_potentials, simplex
from meanfield.transport.problems import Answer, Problem, squared_distances

__all__ = [
    "narrower",
    "raised",
    "refined_simplex",
    "solve_assignment",
    "solve_dense",
    "solve_simplex",
]

_REFINEMENTS = 4
_BELLMAN_FORD_ROUNDS = 60


def solve_dense(problem: Problem, *, rtol: float, identity_gap: float = 1.0) -> Answer:
    """The cheaper of the two exact solvers, certified; the other one if that fails.

    SciPy's assignment wins in high dimension and near the identity, and its accuracy is
    relative to the answer; in low dimension it is up to ten times slower than the simplex.
    """
    suits = problem.dim >= 8 or problem.n <= 300 or identity_gap < 0.1
    if problem.is_uniform and suits:
        answer = solve_assignment(problem, rtol=rtol)
        if answer.converged:
            return answer
        return narrower(answer, solve_simplex(problem, rtol=rtol))
    return solve_simplex(problem, rtol=rtol)


def solve_assignment(problem: Problem, *, rtol: float) -> Answer:
    """Uniform clouds of one size: an optimal permutation with shortest-path potentials."""
    cost = squared_distances(problem.x, problem.y)
    sigma = assignment(cost)
    _, g = assignment_potentials(cost, sigma, max_rounds=_BELLMAN_FORD_ROUNDS)
    plan = Plan(np.arange(problem.n), sigma, problem.a, g, g)
    return certify(
        problem, plan, c_transforms(cost, g), method="assignment", rtol=rtol, is_exact=True
    )


def solve_simplex(problem: Problem, *, rtol: float) -> Answer:
    """POT's network simplex for the squared distance."""

    def certified(plan: Plan, potentials: tuple[np.ndarray, np.ndarray]) -> Answer:
        return certify(problem, plan, potentials, method="simplex", rtol=rtol)

    return refined_simplex(problem, squared_distances(problem.x, problem.y), certified, rtol)


def refined_simplex(
    problem: Problem,
    cost: np.ndarray,
    certified: Callable[[Plan, tuple[np.ndarray, np.ndarray]], Answer],
    rtol: float,
) -> Answer:
    """POT's network simplex, solved again on reduced costs until the gap closes.

    The simplex has absolute tolerances. What it leaves is a problem of the same form whose
    costs are the reduced costs: clipped at a multiple of the gap and brought to order one, the
    same tolerances become as much finer. Potentials add up.

    Args:
        problem: masses.
        cost: of every pair, (n, m).
        certified: the answer of a plan and feasible potentials.
        rtol: gap at which to stop.
    """
    unit = max(float(cost.max()), 1e-300)
    plan = simplex(problem.a, problem.b, cost / unit)
    answer = certified(plan, c_transforms(cost, plan.g * unit))
    for _ in range(_REFINEMENTS):
        if answer.converged:
            break
        f, g = answer.f, answer.g
        assert f is not None and g is not None  # certificates always set them
        reduced = np.maximum(cost - f[:, None] - g[None, :], 0)
        ceiling = 1e3 * max(float(plan.mass @ reduced[plan.rows, plan.cols]), 1e-30 * unit)
        np.minimum(reduced, ceiling, out=reduced)
        plan = simplex(problem.a, problem.b, reduced / ceiling)
        answer = narrower(answer, certified(plan, c_transforms(cost, g + plan.g * ceiling)), rtol)
    return answer


def narrower(one: Answer, other: Answer, rtol: float | None = None) -> Answer:
    """The better plan with the better potentials: both intervals hold, so their meet does."""
    plan = one if one.upper <= other.upper else other
    dual = one if one.lower >= other.lower else other
    closed = rtol is not None and dual.lower >= plan.upper * (1 - rtol)
    return Answer(
        min(max(plan.value, dual.lower), plan.upper),
        dual.lower,
        plan.upper,
        plan.rows,
        plan.cols,
        plan.log_mass,
        dual.f,
        dual.g,
        plan.method,
        one.converged or other.converged or closed,
    )


def raised(answer: Answer, lower: float, rtol: float) -> Answer:
    """The answer with another lower bound taken into account."""
    lower = min(max(answer.lower, lower), answer.upper)
    closed = answer.upper - lower <= rtol * answer.upper
    return replace(
        answer,
        lower=lower,
        value=max(answer.value, lower),
        converged=answer.converged or closed,
    )
