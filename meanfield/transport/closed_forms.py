"""Problems whose answer is a formula: one atom, two atoms each, the line, equal measures."""

from __future__ import annotations

import math

import numpy as np

from meanfield.transport.problems import UNIT, Answer, Problem, lengths, log_rms, mass_error

__all__ = [
    "closed_form",
    "distances_along",
    "exact_answer",
    "monotone_plan",
    "relative_error",
    "solve_line",
    "solve_one_atom",
    "solve_two_atoms",
    "two_atom_plans",
]


def closed_form(problem: Problem) -> Answer | None:
    """The answer where there is a formula for it, otherwise None."""
    if problem.n == 1 or problem.m == 1:
        return solve_one_atom(problem)
    if problem.n == 2 and problem.m == 2:
        return solve_two_atoms(problem)
    if problem.dim == 1:
        return solve_line(problem)
    return None


def solve_one_atom(problem: Problem) -> Answer:
    """W₂² = Σᵢ aᵢ ‖xᵢ − y‖²: one coupling only."""
    rows, cols = np.arange(problem.n), np.arange(problem.m)
    if problem.m == 1:
        cols = np.zeros_like(rows)
    else:
        rows = np.zeros_like(cols)
    logs = problem.log_a if problem.m == 1 else problem.log_b
    lengths_ = distances_along(problem, rows, cols)
    squares = lengths_**2
    zero = np.zeros(1)
    f, g = (squares, zero) if problem.m == 1 else (zero, squares)
    return exact_answer(problem, rows, cols, logs, lengths_, "one atom", (f, g))


def solve_two_atoms(problem: Problem) -> Answer:
    """Two atoms each, by `two_atom_plans`."""
    rows, cols, logs, errors = two_atom_plans(
        problem.x[None], problem.y[None], problem.log_a[None], problem.log_b[None]
    )
    lengths_ = distances_along(problem, rows[0], cols[0])
    answer = exact_answer(problem, rows[0], cols[0], logs[0], lengths_, "two atoms")
    return _with_crossing_error(problem, answer, float(errors[0]))


def two_atom_plans(
    x: np.ndarray, y: np.ndarray, log_a: np.ndarray, log_b: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Optimal plans of many pairs with two atoms each, shapes (b, 2, d) and (b, 2).

    The cost is linear in π₁₁ with slope −2⟨x₁ − x₂, y₁ − y₂⟩, so an end of its range is optimal:
    partners share what both have, and the excess crosses. It is the difference of the *light*
    weights, never of the heavy ones: 1 − e^{−900} is stored as 1.

    Returns:
        Rows, columns and log-masses of three entries each, (b, 3), and the logarithm of how far
        rounding may put the mass that crosses from its true value, (b,).
    """
    flip = ((x[:, 0] - x[:, 1]) * (y[:, 0] - y[:, 1])).sum(-1) < 0
    partner = np.where(flip[:, None], [1, 0], [0, 1])  # (b, 2)
    mine, theirs = log_a, np.take_along_axis(log_b, partner, -1)
    light = np.maximum(mine, theirs).argmin(-1)[:, None]
    light_a, light_b = (np.take_along_axis(t, light, -1)[:, 0] for t in (mine, theirs))
    equal = (mine == theirs).all(-1)
    top, gap = np.maximum(light_a, light_b), light_a - light_b
    with np.errstate(divide="ignore"):
        excess = np.where(gap == 0, -math.inf, top + np.log(-np.expm1(-np.abs(gap))))
    sender = np.where(gap > 0, light[:, 0], 1 - light[:, 0])[:, None]
    receiver = np.take_along_axis(partner, 1 - sender, -1)
    rows = np.concatenate([np.broadcast_to([0, 1], partner.shape), sender], -1)
    cols = np.concatenate([partner, receiver], -1)
    logs = np.concatenate([np.minimum(mine, theirs), excess[:, None]], -1)
    error = np.where(equal, -math.inf, top + np.log(16 * UNIT * (1 + np.abs(top))))
    return rows, cols, logs, error


def solve_line(problem: Problem) -> Answer:
    """d = 1: the monotone coupling, W₂² = ∫₀¹ (F⁻¹(t) − G⁻¹(t))² dt.

    Cumulative weights are summed in extended precision where the machine has it. Their
    rounding moves mass δ, which changes W₂² by at most δ D² (D the diameter): potentials of
    oscillation D² exist.
    """
    order_x = np.argsort(problem.x[:, 0], kind="stable")
    order_y = np.argsort(problem.y[:, 0], kind="stable")
    log_a, log_b = problem.log_a[order_x], problem.log_b[order_y]
    if problem.n == problem.m and np.array_equal(log_a, log_b):
        lengths_ = distances_along(problem, order_x, order_y)
        return exact_answer(problem, order_x, order_y, log_a, lengths_, "line")
    i, j, mass = monotone_plan(problem.a[order_x], problem.b[order_y])
    rows, cols = order_x[i], order_y[j]
    with np.errstate(divide="ignore"):
        logs = np.log(mass)
    answer = exact_answer(problem, rows, cols, logs, distances_along(problem, rows, cols), "line")
    misplaced = misplaced_mass(problem, rows, cols, mass)
    return _with_crossing_error(problem, answer, math.log(misplaced))


def distances_along(problem: Problem, rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
    """‖x_{i_k} − y_{j_k}‖."""
    return lengths(problem.x[rows] - problem.y[cols])


def exact_answer(
    problem: Problem,
    rows: np.ndarray,
    cols: np.ndarray,
    log_mass: np.ndarray,
    lengths_: np.ndarray,
    method: str,
    potentials: tuple[np.ndarray, np.ndarray] | None = None,
) -> Answer:
    """The answer of a coupling known to be optimal; only rounding widens its interval."""
    value = float(log_rms(log_mass, lengths_))
    error = relative_error(problem, len(rows))
    f, g = potentials if potentials is not None else (None, None)
    return Answer(
        value,
        value * (1 - error),
        value * (1 + error),
        rows,
        cols,
        log_mass,
        f,
        g,
        method,
        True,
    )


def relative_error(problem: Problem, count: int) -> float:
    """Rounding of Σ exp(l) t²: a few units for the sum, |l| units for the exponentials."""
    return mass_error(count) + (problem.dim + 16) * UNIT * 2


def _with_crossing_error(problem: Problem, answer: Answer, log_mass: float) -> Answer:
    """Widen by a mass of uncertain place: it may cost up to D² more, or less."""
    if log_mass == -math.inf:
        return answer
    reach = math.exp(log_mass / 2) * math.sqrt(problem.diameter_squared)
    upper = math.hypot(answer.upper, reach) * (1 + 4 * UNIT)
    low = answer.lower
    lower = math.sqrt((low - reach) * (low + reach)) * (1 - 8 * UNIT) if low > reach else 0.0
    return Answer(
        answer.value,
        lower,
        upper,
        answer.rows,
        answer.cols,
        answer.log_mass,
        answer.f,
        answer.g,
        answer.method,
        True,
    )


def monotone_plan(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """North-west staircase between cumulative weights, all at once."""
    long = np.longdouble
    ends_a, ends_b = np.cumsum(a, dtype=long), np.cumsum(b, dtype=long)
    ends_a, ends_b = ends_a / ends_a[-1], ends_b / ends_b[-1]
    ends = np.concatenate([ends_a, ends_b])
    order = np.argsort(ends, kind="stable")  # two sorted runs: one merge
    mass = np.diff(ends[order], prepend=long(0)).astype(np.float64)
    from_a = order < len(a)
    i = np.minimum(np.cumsum(from_a) - from_a, len(a) - 1)
    j = np.minimum(np.cumsum(~from_a) - ~from_a, len(b) - 1)
    kept = mass > 0
    return i[kept], j[kept], mass[kept]


def misplaced_mass(
    problem: Problem, rows: np.ndarray, cols: np.ndarray, mass: np.ndarray
) -> float:
    """What a plan misses of the marginals, errors of the weights themselves included."""
    error_a = np.abs(np.bincount(rows, mass, problem.n) - problem.a).sum()
    error_b = np.abs(np.bincount(cols, mass, problem.m) - problem.b).sum()
    return float(error_a + error_b) + 2 * mass_error(problem.n + problem.m)
