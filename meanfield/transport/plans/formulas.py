"""Plans that need no solver: one atom, two atoms each, the line, partners that are nearest."""

from __future__ import annotations

import math

import numpy as np

from meanfield.transport.certificate import (
    Interval,
    SparsePlan,
    certified,
)
from meanfield.transport.plans.c_transform import CTransform
from meanfield.transport.problem import UNIT, Problem, costs_between, log_masses

_LONG = np.longdouble
_LONG_UNIT = float(np.finfo(_LONG).eps)
_PROBES = 64  # atoms that tell whether nearest neighbours can prove the identity
# Products find neighbours in 0.5 s at n = 10,000, a tree in 0.01 to 0.3 s below this dimension and
# in 1 to 8 s above it, unless the atoms hardly move.
_TREE_DIM = 24
_PRODUCTS = 400_000_000  # pairs; beyond, n log n wins after all
_UNSAFE = 1e-140  # distances whose squares underflow inside a tree


def closed_form(problem: Problem, *, rtol: float) -> Interval | None:
    """The answer where there is a formula, otherwise None; on the line of one problem only."""
    if problem.n == 1 or problem.m == 1:
        return solve_one_atom(problem, rtol=rtol)
    if problem.n == problem.m == problem.order == 2:
        return solve_two_atoms(problem, rtol=rtol)
    if problem.dim == 1 and problem.x.ndim == 2:
        return solve_line(problem, rtol=rtol)
    return None


def solve_one_atom(problem: Problem, *, rtol: float) -> Interval:
    """W_p^p = Σᵢ aᵢ ‖xᵢ − y‖^p: there is one coupling only."""
    i, j = np.divmod(np.arange(problem.pairs), problem.m)
    logs = problem.logs_a[..., i] + problem.logs_b[..., j]  # one of the two is 0
    rows, cols = (np.zeros(logs.shape, np.int64) + t for t in (i, j))
    plan = SparsePlan(rows, cols, logs, -math.inf)
    g = np.zeros_like(problem.b)
    return certified(problem, plan, g, method="one atom", rtol=rtol, is_optimal=True)


def solve_two_atoms(problem: Problem, *, rtol: float) -> Interval:
    """Two atoms each, p = 2.

    The cost is linear in π₁₁ with slope −2⟨x₁ − x₂, y₁ − y₂⟩, so an end of its range is optimal:
    partners share what both have, and the excess crosses. It is the difference of the *light*
    weights, never of the heavy ones: 1 − e^{−900} is stored as 1.
    """
    x, y, log_a = problem.x, problem.y, problem.logs_a
    flip = ((x[..., 0, :] - x[..., 1, :]) * (y[..., 0, :] - y[..., 1, :])).sum(-1) < 0
    partner = np.where(flip[..., None], [1, 0], [0, 1])  # (..., 2)
    mine, theirs = log_a, np.take_along_axis(problem.logs_b, partner, -1)
    light = np.maximum(mine, theirs).argmin(-1)[..., None]
    light_a, light_b = (np.take_along_axis(t, light, -1)[..., 0] for t in (mine, theirs))
    top, gap = np.maximum(light_a, light_b), light_a - light_b
    with np.errstate(divide="ignore"):
        excess = np.where(gap == 0, -math.inf, top + np.log(-np.expm1(-np.abs(gap))))
    sender = np.where((gap > 0)[..., None], light, 1 - light)
    rows = np.concatenate([np.broadcast_to([0, 1], partner.shape), sender], -1)
    receiver = np.take_along_axis(partner, 1 - sender, -1)
    cols = np.concatenate([partner, receiver], -1)
    logs = np.concatenate([np.minimum(mine, theirs), excess[..., None]], -1)
    equal = (problem.log_a == np.take_along_axis(problem.log_b, partner, -1)).all(-1)
    doubt = np.where(equal, -math.inf, top + np.log(16 * UNIT * (1 + np.abs(top))))
    # The entry that crosses is tight too, which fixes g: f of its sender is 0.
    g = np.take_along_axis(problem.costs, sender[..., None], -2)[..., 0, :]
    return certified(
        problem,
        SparsePlan(rows, cols, logs, doubt),
        g,
        method="two atoms",
        rtol=rtol,
        is_optimal=True,
    )


def solve_line(problem: Problem, *, rtol: float) -> Interval:
    """d = 1: the monotone coupling, W_p^p = ∫₀¹ |F⁻¹(t) − G⁻¹(t)|^p dt."""
    steps = monotone_along_widest(problem, problem.a, problem.b)
    f, g, slack = _staircase_potentials(problem, steps.rows, steps.cols)
    kept = steps.log_mass > -math.inf
    plan = SparsePlan(*(t[kept] for t in steps[:3]))
    potentials = f, g
    return certified(
        problem, plan, potentials, method="line", rtol=rtol, slack=slack, is_optimal=True
    )


def solve_paired(problem: Problem, *, rtol: float, device: str) -> Interval | None:
    """The coupling of xᵢ with yᵢ, and nearest neighbours against it; None where a probe fails.

    If yᵢ is a nearest point of ν to xᵢ for every i (or the mirror image), then g = 0 and
    fᵢ = ‖xᵢ − yᵢ‖^p are feasible and the coupling is optimal for every common weight vector.
    [CAP24, Lemma B.3] is the special case of displacements below half the separation.
    """
    sides = [
        (*pair, mirror)
        for mirror, pair in enumerate(((problem.y, problem.x), (problem.x, problem.y)))
        if _may_be_nearest(*pair, problem.logs_a, rtol)
    ]
    if not sides:
        return None
    index = np.arange(problem.n)
    moved = problem.moved(index, index)
    plan = SparsePlan(index, index.copy(), problem.logs_a, -math.inf)
    zero, best = np.zeros(problem.n), None
    for points, queries, mirror in sides:
        nearest = _nearest(points, queries, moved, device) ** problem.order
        potentials = (zero, nearest) if mirror else (nearest, zero)
        answer = certified(problem, plan, potentials, method="identity", rtol=rtol)
        best = answer if best is None or answer.lower > best.lower else best
        if best.converged:
            break
    return best


def monotone_plan(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """North-west staircase between cumulative weights, all at once; every step, also without mass.

    Cumulative weights are summed in extended precision where the machine has it.
    """
    ends_a, ends_b = np.cumsum(a, dtype=_LONG), np.cumsum(b, dtype=_LONG)
    ends = np.concatenate([ends_a / ends_a[-1], ends_b / ends_b[-1]])
    order = np.argsort(ends, kind="stable")  # two sorted runs: one merge
    mass = np.diff(ends[order], prepend=_LONG(0)).astype(np.float64)
    from_a = order < len(a)
    i = np.minimum(np.cumsum(from_a) - from_a, len(a) - 1)
    j = np.minimum(np.cumsum(~from_a) - ~from_a, len(b) - 1)
    return i, j, mass


def both_ways(rows: np.ndarray, cols: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Arcs of a staircase, both ways around its corners: rounding cannot disconnect it."""
    i, j = (rows, rows[:-1], rows[1:]), (cols, cols[1:], cols[:-1])
    return np.concatenate(i), np.concatenate(j)


def monotone_along_widest(problem: Problem, a: np.ndarray, b: np.ndarray) -> SparsePlan:
    """The monotone plan of masses a and b along the direction in which both clouds are widest.

    All of its steps, in their order, also those without mass; masses are normalised.
    """
    points = np.concatenate([problem.x, problem.y])
    points = points - points.mean(0)
    widest = np.linalg.eigh(points.T @ points)[1][:, -1]
    order_x, order_y = (np.argsort(t @ widest) for t in (problem.x, problem.y))
    i, j, mass = monotone_plan(a[order_x], b[order_y])
    return SparsePlan(order_x[i], order_y[j], log_masses(mass))


def _staircase_potentials(
    problem: Problem, i: np.ndarray, j: np.ndarray
) -> tuple[np.ndarray, np.ndarray, float]:
    """f and g that are tight along a staircase on the line, and how far they may be infeasible.

    Between sorted points the cost has the Monge property, so what is tight along one staircase is
    feasible everywhere. From one step to the next f gains C(i′, j) − C(i, j), and g gains
    C(i′, j′) − C(i′, j). For squares these are products (x′ − x)(x′ − y + x − y), right to a few
    units of (x′ − x) times the diameter D; as the x are sorted, that is a few units of D² in all.
    """
    order, size = problem.order, float(problem.diameter) ** problem.order
    along, beside = problem.x[i, 0].astype(_LONG), problem.y[j, 0].astype(_LONG)
    tight, turned = along - beside, along[1:] - beside[:-1]
    if order == 2:
        gained_f = np.diff(along) * (turned + tight[:-1])
        gained_g = -np.diff(beside) * (turned + tight[1:])
        rounded = 16.0
    else:
        tight, turned = np.abs(tight) ** order, np.abs(turned) ** order
        gained_f, gained_g = turned - tight[:-1], tight[1:] - turned
        rounded = float(order * len(i))
    f, g = np.zeros(problem.n, _LONG), np.zeros(problem.m, _LONG)
    f[i], count = _running(gained_f)
    g[j], _ = _running(gained_g)
    g += np.abs(along[0] - beside[0]) ** order
    middle = np.median(g)
    f, g = f + middle, g - middle
    size += float(max(np.abs(f).max(), np.abs(g).max()))
    slack = 8 * (rounded + order * count) * _LONG_UNIT * size
    return f.astype(np.float64), g.astype(np.float64), slack


def _running(terms: np.ndarray) -> tuple[np.ndarray, int]:
    """0 and all sums from the first term on, and how many additions each is away from them.

    Sums inside blocks and sums of blocks: 2 √n additions instead of n.
    """
    width = math.isqrt(len(terms)) + 1
    blocks = np.zeros((width, width), terms.dtype)  # more than n terms
    blocks.reshape(-1)[1 : len(terms) + 1] = terms
    sums = np.cumsum(blocks, axis=1)
    sums[1:] += np.cumsum(sums[:-1, -1])[:, None]
    return sums.reshape(-1)[: len(terms) + 1], 2 * width


def _may_be_nearest(
    points: np.ndarray, queries: np.ndarray, logs: np.ndarray, rtol: float
) -> bool:
    """Whether a few atoms, drawn by weight, have their partners nearest to them."""
    draws = logs + np.random.default_rng(0).gumbel(size=len(logs))
    drawn = np.argpartition(-draws, min(_PROBES, len(draws)) - 1)[:_PROBES]
    for few in (drawn[:1], drawn):  # most clouds are told apart by one atom
        nearest = costs_between(queries[few], points, 2).min(-1)
        squares = np.square(points[few] - queries[few]).sum(-1)
        if (squares - np.minimum(nearest, squares)).sum() > 4 * rtol * squares.sum():
            return False
    return True


def _nearest(
    points: np.ndarray, queries: np.ndarray, moved: np.ndarray, device: str
) -> np.ndarray:
    """min_j ‖qᵢ − p_j‖ or less, at most moved[i]."""
    if points.shape[1] >= _TREE_DIM and len(points) * len(queries) <= _PRODUCTS:
        squares = moved**2
        transform = CTransform(queries, points, device=device)
        nearest = transform.precise(np.zeros(len(points)), 2, squares)
        return np.sqrt(np.clip(nearest.minima, 0.0, squares))
    from scipy.spatial import cKDTree

    # Without balancing and compacting: the tree is used once, and duplicates do not hurt it.
    tree = cKDTree(points, balanced_tree=False, compact_nodes=False)
    farthest = float(moved.max()) * (1 + 1e-12)
    found, _ = tree.query(queries, distance_upper_bound=max(farthest, _UNSAFE))
    # The tree squares distances: those below 1e-154 may have underflowed, and count as 0.
    found = np.where(found > 2 * _UNSAFE, found, 0.0)
    return np.minimum(found, moved)
