"""Certificates: from a plan an upper bound of W₂, from potentials a lower one, rounding included.

Any pair with fᵢ + g_j ≤ C_ij gives ⟨a, f⟩ + ⟨b, g⟩ ≤ W₂², whatever solver it came from, and any
coupling gives an upper bound. Where rounding enters: computed costs are right to (d + 2) u
relative, potentials and weights to a few u, and what a plan misses of its marginals may have to
travel the diameter.
"""

from __future__ import annotations

import math

import numpy as np

from meanfield.transport.closed_forms import distances_along, relative_error
from meanfield.transport.exact import Plan
from meanfield.transport.problems import UNIT, Answer, Problem, log_rms, mass_error

__all__ = [
    "c_transforms",
    "certify",
    "dual_bound",
    "identity_answer",
    "matched_atoms",
    "primal_bound",
]


def c_transforms(cost: np.ndarray, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """fᵢ = min_j C_ij − g_j, then g_j = min_i C_ij − fᵢ: feasible, and no worse than before."""
    f = (cost - g[..., None, :]).min(-1)
    return f, (cost - f[..., :, None]).min(-2)


def dual_bound(problem: Problem, f: np.ndarray, g: np.ndarray, slack: float = 0.0) -> float:
    """A number below W₂², from potentials feasible up to rounding and up to `slack`."""
    middle = float(np.median(f))  # fᵢ − c, g_j + c: the smaller they are, the less is lost
    f, g = f - middle, g + middle
    dual = float(problem.a @ f + problem.b @ g)
    size = float(problem.a @ np.abs(f) + problem.b @ np.abs(g))
    lost = (mass_error(problem.n + problem.m) + 4 * UNIT) * (size + abs(middle) * UNIT)
    tiny = 1e-300 * float(np.abs(f).max() + np.abs(g).max())  # weights that underflowed
    relative = 2 * (problem.dim + 6) * UNIT
    return max(dual * (1 - relative) - lost - tiny - slack, 0.0)


def primal_bound(
    problem: Problem, plan: Plan, squares: np.ndarray, *, is_exact: bool = False
) -> tuple[float, float]:
    """(Σ π C, a number above W₂²); `is_exact` says that the marginals hold by construction."""
    cost = float(plan.mass @ squares)
    relative = relative_error(problem, len(plan.mass))
    if is_exact:
        return cost, cost * (1 + 2 * relative)
    missing = np.abs(np.bincount(plan.rows, plan.mass, problem.n) - problem.a).sum()
    missing += np.abs(np.bincount(plan.cols, plan.mass, problem.m) - problem.b).sum()
    missing += 2 * mass_error(problem.n + problem.m) + (problem.n + problem.m) * 1e-300
    return cost, cost * (1 + 2 * relative) + float(missing) * problem.diameter_squared


def certify(
    problem: Problem,
    plan: Plan,
    potentials: tuple[np.ndarray, np.ndarray],
    *,
    method: str,
    rtol: float,
    slack: float = 0.0,
    is_exact: bool = False,
) -> Answer:
    """The interval of a plan and feasible potentials.

    `converged` compares the plan with the potentials: W₂ is known within rtol up to what
    rounding of the given weights and points leaves open, which is in the interval.
    """
    f, g = potentials
    sigma = None if is_exact else matched_atoms(problem, plan)
    if sigma is not None:
        plan, is_exact = Plan(np.arange(problem.n), sigma, problem.a, f, g), True
    squares = np.square(problem.x[plan.rows] - problem.y[plan.cols]).sum(-1)
    cost, upper = primal_bound(problem, plan, squares, is_exact=is_exact)
    lower = dual_bound(problem, f, g, slack)
    reduced = float(plan.mass @ np.maximum(squares - f[plan.rows] - g[plan.cols], 0))
    noise = 64 * UNIT * float(problem.a @ np.abs(f) + problem.b @ np.abs(g))
    with np.errstate(divide="ignore"):
        logs = np.log(plan.mass)
    low, high = math.sqrt(lower) * (1 - 2 * UNIT), math.sqrt(upper) * (1 + 2 * UNIT)
    low = min(low, high)
    value = min(max(math.sqrt(cost), low), high)
    converged = bool(reduced <= 2 * rtol * cost + noise or high - low <= rtol * high)
    return Answer(value, low, high, plan.rows, plan.cols, logs, f, g, method, converged)


def matched_atoms(problem: Problem, plan: Plan) -> np.ndarray | None:
    """σ if the plan moves atom i to atom σ(i) of the same weight, up to rounding; else None.

    As a permutation it has the marginals of the problem to the last bit; as masses out of a
    simplex, what they miss might have to travel the diameter.
    """
    if problem.n != problem.m or len(plan.mass) < problem.n:
        return None
    sigma = np.full(problem.n, -1)
    order = np.argsort(plan.mass, kind="stable")
    sigma[plan.rows[order]] = plan.cols[order]  # the last, largest, entry of each row stays
    if sigma.min() < 0:  # an atom whose weight underflowed
        return None
    if not np.array_equal(problem.log_a, problem.log_b[sigma]):
        return None
    return sigma if len(np.unique(sigma)) == problem.n else None


def identity_answer(problem: Problem, *, rtol: float) -> Answer:
    """The coupling of xᵢ with yᵢ, and nearest neighbours against it.

    If yᵢ is a nearest point of ν to xᵢ for every i (or the mirror image), then g = 0 and
    fᵢ = ‖xᵢ − yᵢ‖² are feasible and the coupling is optimal for every common weight vector;
    otherwise the same query bounds W₂ from below. [CAP24, Lemma B.3] is the special case of
    displacements below half the separation.
    """
    index = np.arange(problem.n)
    moved = distances_along(problem, index, index)
    upper = float(log_rms(problem.log_a, moved))
    nearest = _nearest(problem.y, problem.x, moved)
    mirror = False
    lower = float(log_rms(problem.log_a, nearest))
    if lower < upper * (1 - rtol / 2):
        other = _nearest(problem.x, problem.y, moved)
        other_lower = float(log_rms(problem.log_b, other))
        mirror = other_lower > lower
        nearest, lower = (other, other_lower) if mirror else (nearest, lower)
    error = relative_error(problem, problem.n)
    zero = np.zeros(problem.n)
    f, g = (zero, nearest**2) if mirror else (nearest**2, zero)
    converged = lower >= upper * (1 - rtol)
    return Answer(
        upper,
        lower * (1 - error),
        upper * (1 + error),
        index,
        index,
        problem.log_a,
        f,
        g,
        "identity",
        converged,
    )


def _nearest(points: np.ndarray, queries: np.ndarray, moved: np.ndarray) -> np.ndarray:
    """min_j ‖qᵢ − p_j‖, at most moved[i]."""
    from scipy.spatial import cKDTree

    # Without balancing and compacting: the tree is used once, and duplicates do not hurt it.
    tree = cKDTree(points, balanced_tree=False, compact_nodes=False)
    reach = float(moved.max()) * (1 + 1e-12)
    found, _ = tree.query(queries, distance_upper_bound=max(reach, 5e-324))
    return np.minimum(found, moved)
