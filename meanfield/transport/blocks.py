"""Collapsed clusters: far apart and small, solved cluster by cluster.

Between two clusters at distance D with inner displacements s, a solver with absolute tolerances
sees W₂² ≈ s² beside costs of D²; at s = 1e-8 D nothing is left of it. If both measures put the
same mass in each cluster, nothing crosses, and each cluster is a problem in its own unit. If the
masses differ by a little, exactly that little crosses, and block potentials c_k added to f and
taken from g certify it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from meanfield.transport.closed_forms import monotone_plan
from meanfield.transport.exact import simplex
from meanfield.transport.problems import UNIT, Answer, Problem, lengths, log_rms

__all__ = ["solve_blocks"]

_SEPARATION = 20.0  # distance between centres over radius of the clusters
_MOST_BLOCKS = 64
_MOST_CROSSING = 1e-6  # more mass than this is no rounding: its cost can be seen from outside


class _Blocks(NamedTuple):
    rows: list[np.ndarray]
    cols: list[np.ndarray]
    nearest: np.ndarray  # squared distances between blocks: lower and upper bounds, (k, k)
    farthest: np.ndarray
    diameters: np.ndarray  # squared, upper bounds


class _Masses(NamedTuple):
    log_common: np.ndarray  # log min(A_k, B_k)
    excess: np.ndarray  # A_k − B_k
    error: float  # bound of the sum of the errors of the excesses


class _Crossing(NamedTuple):
    """What crosses between blocks: how much, from where to where, and what that costs.

    `cost` is that of the weights as they stand; `upper` and `lower` also hold what their rounding
    leaves open.
    """

    sources: np.ndarray
    targets: np.ndarray
    mass: np.ndarray
    upper: float
    lower: float
    cost: float


def solve_blocks(
    problem: Problem, solve_part: Callable[[Problem], Answer], *, rtol: float
) -> Answer | None:
    """The answer from well-separated blocks of equal mass, or None where there are none.

    Args:
        problem: the whole problem.
        solve_part: answers the problem of one block (in its own unit).
        rtol: as for `solve_w2`.
    """
    points = np.concatenate([problem.x, problem.y])
    labels = _separated(points)
    if labels is None:
        return None
    blocks = _blocks(problem, points, labels)
    masses = _masses(problem, blocks)
    if np.abs(masses.excess).sum() > _MOST_CROSSING:
        return None
    crossing = _crossing(blocks, masses)
    if crossing is None:
        return None
    parts = [
        _in_unit(solve_part(problem.part(r, c)), problem, r, c) if len(r) and len(c) else None
        for r, c in zip(blocks.rows, blocks.cols, strict=True)
    ]
    return _combined(problem, blocks, masses, crossing, parts, rtol)


def _separated(points: np.ndarray) -> np.ndarray | None:
    """Labels of clusters of radius r whose centres are 20 r or more apart, if there are any.

    Farthest-point clustering: with k centres the covering radius is r_k and the centres are
    r_{k−1} apart, so a drop of the radius shows the clusters.
    """
    reach = lengths(points - points[0])
    labels = np.zeros(len(points), np.int64)
    radius = float(reach.max())
    for k in range(1, min(_MOST_BLOCKS, len(points))):
        if radius == 0:
            return None
        centre = points[int(reach.argmax())]
        distance = lengths(points - centre)
        closer = distance < reach
        labels[closer] = k
        reach = np.minimum(reach, distance)
        smaller = float(reach.max())
        if smaller * _SEPARATION <= radius:
            return labels
        radius = smaller
    return None


def _blocks(problem: Problem, points: np.ndarray, labels: np.ndarray) -> _Blocks:
    count = int(labels.max()) + 1
    members = [np.flatnonzero(labels == k) for k in range(count)]
    centres = np.stack([points[which[0]] for which in members])
    radii = np.array(
        [lengths(points[which] - c).max() for which, c in zip(members, centres, strict=True)]
    )
    radii = radii * (1 + 1e-12)
    apart = lengths(centres[:, None] - centres[None])
    nearest = np.maximum(apart * (1 - 1e-12) - radii[:, None] - radii[None], 0) ** 2
    farthest = (apart * (1 + 1e-12) + radii[:, None] + radii[None]) ** 2
    n = problem.n
    rows = [which[which < n] for which in members]
    cols = [which[which >= n] - n for which in members]
    return _Blocks(rows, cols, nearest, farthest, (2 * radii) ** 2)


def _masses(problem: Problem, blocks: _Blocks) -> _Masses:
    """Block masses; exactly balanced where they differ by no more than rounding of the weights.

    Two masses of 0.3, spread over their atoms in different ways, differ by 1e-17 or so; moved
    between far clusters, that would be more than all displacements of 1e-9. They are meant to be
    the same, so the answer is that of weights rounded to make them the same.
    """
    if np.ptp(problem.log_a) == 0 and np.ptp(problem.log_b) == 0:
        return _uniform_masses(problem, blocks)
    a, error = _accurate_masses(problem.log_a)
    b, other_error = _accurate_masses(problem.log_b)
    mine = np.array([a[r].sum() for r in blocks.rows], dtype=np.longdouble)
    theirs = np.array([b[c].sum() for c in blocks.cols], dtype=np.longdouble)
    excess, error = mine - theirs, error + other_error
    if (np.abs(excess) <= _rounding(problem, blocks)).all():
        excess, error = np.zeros_like(excess), 0.0
    with np.errstate(divide="ignore"):
        log_common = np.log(np.minimum(mine, theirs)).astype(np.float64)
    return _Masses(log_common, excess.astype(np.float64), error)


def _rounding(problem: Problem, blocks: _Blocks) -> np.ndarray:
    """What rounding may have done to the masses of the blocks, shape (k,).

    A weight is known through its logarithm: to a few units in the last place and as many of log a.
    """
    doubt_a = problem.a * (8 + 2 * np.abs(problem.log_a))
    doubt_b = problem.b * (8 + 2 * np.abs(problem.log_b))
    sums = [
        doubt_a[r].sum() + doubt_b[c].sum() for r, c in zip(blocks.rows, blocks.cols, strict=True)
    ]
    return UNIT * np.array(sums)


def _uniform_masses(problem: Problem, blocks: _Blocks) -> _Masses:
    """Counting is exact: 50 of 100 atoms balance 100 of 200."""
    n, m = problem.n, problem.m
    mine = np.array([len(r) for r in blocks.rows])
    theirs = np.array([len(c) for c in blocks.cols])
    with np.errstate(divide="ignore"):
        log_common = np.log(np.minimum(mine / n, theirs / m))
    return _Masses(log_common, (mine * m - theirs * n) / (n * m), 0.0)


def _accurate_masses(logs: np.ndarray) -> tuple[np.ndarray, float]:
    """Weights in extended precision (where the machine has it), and the error of any sum."""
    long = np.longdouble
    masses = np.exp(logs.astype(long) - long(logs.max()))
    return masses / masses.sum(), 24 * float(np.finfo(long).eps)


def _crossing(blocks: _Blocks, masses: _Masses) -> _Crossing | None:
    """Where the excess goes and what that costs; None if blocks are not far enough apart.

    Potentials f ≤ diam², g ≤ 0 exist inside each block, so block potentials must satisfy
    c_k − c_l ≤ nearest² − diam_k² =: w_kl. Mass may pass through third blocks (one atom arrives,
    another leaves), so the cost of crossing is the shortest path for w.
    """
    from scipy.sparse.csgraph import floyd_warshall

    room = blocks.nearest - np.maximum(blocks.diameters[:, None], blocks.diameters[None])
    np.fill_diagonal(room, 0)
    if (room < 0).any():
        return None
    excess = masses.excess
    reach = float(blocks.farthest.max())
    doubt = masses.error * reach
    inner = float(np.abs(excess).sum() + masses.error) * float(blocks.diameters.max())
    give, take = np.flatnonzero(excess > 0), np.flatnonzero(excess < 0)
    if not len(give) or not len(take):
        return _Crossing(give[:0], take[:0], excess[:0], doubt, -inner, 0.0)
    closed = floyd_warshall(room)
    moved = max(float(excess[give].sum()), float(-excess[take].sum()))
    a, b = excess[give] / excess[give].sum(), excess[take] / excess[take].sum()
    far = blocks.farthest[np.ix_(give, take)]
    plan = simplex(a, b, far / far.max())
    near = closed[np.ix_(give, take)]
    dual = simplex(a, b, near / near.max())
    g = dual.g * near.max()
    f = (near - g).min(1)
    lower = float(a @ f + b @ g) * (1 - 1e-12) * moved
    mass = plan.mass * moved
    upper = float(mass @ far[plan.rows, plan.cols]) * (1 + 1e-12)
    # Weights come from float64: a few units of their last place may be meant to be nothing.
    certain = max(lower - 16 * UNIT * reach, 0) - inner
    cost = (lower + upper) / 2
    return _Crossing(give[plan.rows], take[plan.cols], mass, upper + doubt, certain, cost)


def _in_unit(answer: Answer, problem: Problem, rows: np.ndarray, cols: np.ndarray) -> Answer:
    """Distances of the part in the unit of the whole (its own unit may underflow: kept long)."""
    part = problem.part(rows, cols)
    e = part.exponent - problem.exponent
    f = None if answer.f is None else np.ldexp(answer.f, 2 * e)
    g = None if answer.g is None else np.ldexp(answer.g, 2 * e)
    low, value, high = (math.ldexp(t, e) for t in (answer.lower, answer.value, answer.upper))
    return Answer(
        value,
        low,
        high,
        rows[answer.rows],
        cols[answer.cols],
        answer.log_mass,
        f,
        g,
        answer.method,
        answer.converged,
    )


def _combined(
    problem: Problem,
    blocks: _Blocks,
    masses: _Masses,
    crossing: _Crossing,
    parts: list[Answer | None],
    rtol: float,
) -> Answer:
    solved = [(k, part) for k, part in enumerate(parts) if part is not None]
    logs = np.array([masses.log_common[k] for k, _ in solved])
    fields = np.array([(p.value, p.lower, p.upper) for _, p in solved]).reshape(-1, 3)
    value, lower, upper = (float(log_rms(logs, fields[:, c])) for c in range(3))
    error = (32 + 2 * math.log2(len(parts) + 1)) * UNIT
    upper = math.hypot(upper * (1 + error), math.sqrt(max(crossing.upper, 0))) * (1 + 4 * UNIT)
    lower = _root_of_sum(lower * (1 - error), crossing.lower)
    value = min(max(math.hypot(value, math.sqrt(crossing.cost)), lower), upper)
    rows, cols, log_mass = _joined(problem, blocks, masses, crossing, solved)
    f, g = _joined_potentials(problem, solved) if not len(crossing.mass) else (None, None)
    names = sorted({name for _, p in solved for name in p.method.split(" of ")[-1].split(" + ")})
    method = f"blocks of {' + '.join(names)}"
    converged = all(p.converged for _, p in solved) or upper - lower <= rtol * upper
    return Answer(value, lower, upper, rows, cols, log_mass, f, g, method, converged)


def _root_of_sum(root: float, added: float) -> float:
    """(root² + added)^½, 0 where that is negative, without underflow of root² for added = 0."""
    if added >= 0:
        return math.hypot(root, math.sqrt(added)) * (1 - 4 * UNIT)
    taken = math.sqrt(-added)
    if root <= taken:
        return 0.0
    return math.sqrt((root - taken) * (root + taken)) * (1 - 4 * UNIT)


def _joined(
    problem: Problem,
    blocks: _Blocks,
    masses: _Masses,
    crossing: _Crossing,
    solved: list[tuple[int, Answer]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows = [p.rows for _, p in solved]
    cols = [p.cols for _, p in solved]
    logs = [p.log_mass + masses.log_common[k] for k, p in solved]
    for k, m, moved in zip(crossing.sources, crossing.targets, crossing.mass, strict=True):
        source, target = blocks.rows[k], blocks.cols[m]
        a, b = problem.a[source], problem.b[target]
        i, j, mass = monotone_plan(a / a.sum(), b / b.sum())
        rows.append(source[i])
        cols.append(target[j])
        logs.append(np.log(mass) + math.log(moved))
    return np.concatenate(rows), np.concatenate(cols), np.concatenate(logs)


def _joined_potentials(
    problem: Problem, solved: list[tuple[int, Answer]]
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Potentials of the blocks side by side, shifted to g ≤ 0: feasible across blocks too."""
    f, g = np.zeros(problem.n), np.zeros(problem.m)
    for _, part in solved:
        if part.f is None or part.g is None:
            return None, None
        rows, cols = np.unique(part.rows), np.unique(part.cols)
        if len(rows) != len(part.f) or len(cols) != len(part.g):
            return None, None
        top = part.g.max()
        f[rows], g[cols] = part.f + top, part.g - top
    return f, g
