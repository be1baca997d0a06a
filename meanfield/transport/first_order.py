"""W₁ with a certified interval: the cost is the distance itself."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np
from torch import Tensor

from meanfield.measures import ParticleMeasure
from meanfield.transport.answers import (
    TransportResult,
    as_pair,
    assemble,
    problem_of,
    refuse_unconverged,
)
from meanfield.transport.certificates import (
    dual_bound,
    identity_answer,
    matched_atoms,
)
from meanfield.transport.closed_forms import (
    distances_along,
    misplaced_mass,
    monotone_plan,
    relative_error,
)
from meanfield.transport.dense import narrower, refined_simplex
from meanfield.transport.dispatch import in_callers_unit
from meanfield.transport.distances import checked_settings, extended_potentials, flat_arrays
from meanfield.transport.exact import Plan
from meanfield.transport.problems import UNIT, Answer, Problem, squared_distances

__all__ = ["solve_w1", "w1"]


def solve_w1(
    mu: ParticleMeasure | Tensor,
    nu: ParticleMeasure | Tensor,
    *,
    rtol: float = 1e-9,
    strict: bool = True,
) -> TransportResult:
    """W₁(μ, ν) = min over couplings of Σ π_ij ‖xᵢ − y_j‖, with a certified interval.

    By quantiles on the line; by nearest neighbours where both measures have the same weights in
    the same order and no atom moves past another; by POT's network simplex on the dense matrix of
    distances otherwise, O(n m) memory.

    Args:
        mu: μ, or points (..., n, d) of a uniform measure.
        nu: ν, or points (..., m, d); sizes may differ, batch axes broadcast.
        rtol: how closely plan and potentials must meet, relative to W₁.
        strict: raise if they do not; otherwise the answer comes back flagged.

    Returns:
        The distance in the unit of the points, its interval, coupling and method. Potentials
        satisfy fᵢ + g_j ≤ ‖xᵢ − y_j‖.

    Raises:
        ConvergenceError: under `strict`, when `rtol` is not met.
        TypeError, ValueError: as `solve_w2`.

    Example:
        >>> import torch
        >>> x = torch.tensor([[0.0, 0.0], [4.0, 0.0]], dtype=torch.float64)
        >>> solve_w1(x, x[:1]).value
        tensor(2., dtype=torch.float64)
    """
    start = time.perf_counter()
    checked_settings("auto", rtol)
    pair = as_pair(mu, nu)
    answers = [_solve_one(*case, rtol) for case in zip(*flat_arrays(pair), strict=True)]
    result = assemble(pair, answers, seconds=time.perf_counter() - start)
    result = replace(result, order=1)
    return refuse_unconverged(result, rtol) if strict else result


def w1(mu: ParticleMeasure | Tensor, nu: ParticleMeasure | Tensor) -> Tensor:
    """W₁(μ, ν), the value of `solve_w1`.

    Args:
        mu: μ, or points (..., n, d) of a uniform measure.
        nu: ν, or points (..., m, d).

    Returns:
        The distance in the unit of the points, shape of the batch.

    Raises:
        ConvergenceError: when plan and potentials do not meet within 1e-9; `solve_w1` gives the
            interval instead.
        TypeError, ValueError: as `solve_w2`.
    """
    return solve_w1(mu, nu).value


def _solve_one(
    x: np.ndarray, y: np.ndarray, log_a: np.ndarray, log_b: np.ndarray, rtol: float
) -> Answer:
    problem, rows, cols = problem_of(x, y, log_a, log_b)
    answer = in_callers_unit(_solve(problem, rtol), problem, rows, cols, order=1)
    if rows is None and cols is None:
        return answer
    return extended_potentials(answer, x, y, rows, cols, cost=_distances)


def _distances(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.sqrt(squared_distances(x, y))


def _solve(problem: Problem, rtol: float) -> Answer:
    """The answer in the problem's own unit and numbering."""
    if problem.n == 1 or problem.m == 1:
        rows, cols = (index.ravel() for index in np.indices((problem.n, problem.m)))
        mass = problem.a[rows] * problem.b[cols]  # one of the two is 1
        lengths = distances_along(problem, rows, cols)
        f, g = (lengths, np.zeros(1)) if problem.m == 1 else (np.zeros(1), lengths)
        plan = Plan(rows, cols, mass, f, g)
        return _certified(problem, plan, f, g, "one atom", rtol, is_exact=True)
    near = _identity(problem, rtol) if problem.is_paired else None
    if near is not None and near.converged:
        return near
    answer = _line(problem) if problem.dim == 1 else _simplex(problem, rtol)
    return answer if near is None else narrower(answer, near, rtol)


def _identity(problem: Problem, rtol: float) -> Answer:
    """The coupling of xᵢ with yᵢ against nearest neighbours, as for W₂."""
    squared = identity_answer(problem, rtol=rtol)
    assert squared.f is not None and squared.g is not None  # that answer has both
    f, g = np.sqrt(squared.f), np.sqrt(squared.g)
    plan = Plan(squared.rows, squared.cols, problem.a, f, g)
    return _certified(problem, plan, f, g, "identity", rtol, is_exact=True)


def _line(problem: Problem) -> Answer:
    """d = 1: the monotone coupling, W₁ = ∫₀¹ |F⁻¹(t) − G⁻¹(t)| dt."""
    order_x, order_y = (np.argsort(t[:, 0], kind="stable") for t in (problem.x, problem.y))
    i, j, mass = monotone_plan(problem.a[order_x], problem.b[order_y])
    rows, cols = order_x[i], order_y[j]
    wrong = misplaced_mass(problem, rows, cols, mass)
    sigma = matched_atoms(problem, Plan(rows, cols, mass, mass, mass))
    # A permutation within the support of the monotone coupling is optimal too. Entries above
    # the rounding of the masses are in that support for certain.
    largest = np.zeros(problem.n)
    np.maximum.at(largest, rows, mass)
    if sigma is not None and largest.min() > wrong:
        rows, cols, mass, wrong = np.arange(problem.n), sigma, problem.a, 0.0
    value = float(mass @ distances_along(problem, rows, cols))
    # A mass of uncertain place may cost the diameter more, or less.
    doubt = relative_error(problem, len(mass)) * value + wrong * math.sqrt(
        problem.diameter_squared
    )
    ends = max(value - doubt, 0.0), value + doubt
    with np.errstate(divide="ignore"):
        logs = np.log(mass)
    return Answer(value, *ends, rows, cols, logs, None, None, "line", True)


def _simplex(problem: Problem, rtol: float) -> Answer:
    def certified(plan: Plan, potentials: tuple[np.ndarray, np.ndarray]) -> Answer:
        return _certified(problem, plan, *potentials, "simplex", rtol)

    return refined_simplex(problem, _distances(problem.x, problem.y), certified, rtol)


def _certified(
    problem: Problem,
    plan: Plan,
    f: np.ndarray,
    g: np.ndarray,
    method: str,
    rtol: float,
    *,
    is_exact: bool = False,
) -> Answer:
    """The interval of a plan and feasible potentials; `is_exact`: the plan has the marginals."""
    sigma = None if is_exact else matched_atoms(problem, plan)
    if sigma is not None:
        plan, is_exact = Plan(np.arange(problem.n), sigma, problem.a, f, g), True
    lengths = distances_along(problem, plan.rows, plan.cols)
    cost = float(plan.mass @ lengths)
    far = math.sqrt(problem.diameter_squared)
    upper = cost * (1 + 2 * relative_error(problem, len(plan.mass)))
    upper += 1e-300 * (problem.n + problem.m) * far  # weights that underflowed
    if not is_exact:
        upper += misplaced_mass(problem, plan.rows, plan.cols, plan.mass) * far
    lower = min(dual_bound(problem, f, g), upper)
    reduced = float(plan.mass @ np.maximum(lengths - f[plan.rows] - g[plan.cols], 0))
    noise = 64 * UNIT * float(problem.a @ np.abs(f) + problem.b @ np.abs(g))
    with np.errstate(divide="ignore"):
        logs = np.log(plan.mass)
    converged = bool(reduced <= rtol * cost + noise or upper - lower <= rtol * upper)
    value = min(max(cost, lower), upper)
    return Answer(value, lower, upper, plan.rows, plan.cols, logs, f, g, method, converged)
