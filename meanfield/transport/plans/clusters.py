"""Collapsed clusters: far apart and small, solved cluster by cluster.

Between two clusters at distance D with inner displacements s, a solver with absolute tolerances
sees W_p ≈ s beside costs of D^p; at s = 1e-8 D nothing is left of it. If both measures put the
same mass in each cluster, nothing crosses, and each cluster is a problem in its own unit. If the
masses differ by a little, exactly that little crosses, and block potentials c_k added to f and
taken from g certify it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from meanfield.errors import CertificateError
from meanfield.transport.certificate import (
    Interval,
    Part,
    in_unit,
    powers_added,
    powers_less,
    united,
)
from meanfield.transport.plans.exact import simplexes
from meanfield.transport.plans.formulas import monotone_plan
from meanfield.transport.problem import UNIT, Problem, row_norms

_NAME = "clusters of "
_SEPARATION = 20.0  # distance between centres over radius of the clusters
_MOST_CLUSTERS = 64
_SAMPLE, _SEEN = 64, 8.0  # points by which clusters show, and how; of 32 a tenth do by chance
_MOST_CROSSING = 1e-6  # larger differences of mass are real: leave them to the other solvers


class _Layout(NamedTuple):
    rows: list[np.ndarray]
    cols: list[np.ndarray]
    nearest: np.ndarray  # distances between clusters: lower and upper bounds, (k, k)
    farthest: np.ndarray
    diameters: np.ndarray  # upper bounds


class _Masses(NamedTuple):
    log_common: np.ndarray  # log min(A_k, B_k)
    excess: np.ndarray  # A_k − B_k
    error: float  # bound of the sum of the errors of the excesses


class _Crossing(NamedTuple):
    """What crosses between clusters, from where to where, and what that costs (to the power p).

    `cost` is that of the weights as they stand; `upper` and `lower` also hold what their rounding
    leaves open, and what it changes inside the clusters.
    """

    sources: np.ndarray
    targets: np.ndarray
    mass: np.ndarray
    upper: float
    lower: float
    cost: float


def solve_clusters(
    problem: Problem, solve_part: Callable[[Problem], Interval], *, rtol: float, snap: bool
) -> Interval | None:
    """The answer from well-separated clusters of equal mass, or None where there are none.

    With `snap`, masses that agree up to rounding of the weights are taken as equal.
    """
    labels = _separated(problem.x, problem.y)
    if labels is None:
        return None
    clusters = _clusters(problem, labels)
    masses = _masses(problem, clusters, snap)
    if np.abs(masses.excess).sum() > _MOST_CROSSING:
        return None
    crossing = _crossing(problem.order, clusters, masses, snap)
    if crossing is None:
        return None
    parts = []
    for rows, cols, log_mass in zip(clusters.rows, clusters.cols, masses.log_common, strict=True):
        if len(rows) and len(cols):
            part = problem.part(rows, cols, snap=snap)
            answer = in_unit(solve_part(part), part.exponent)
            parts.append(Part(_lowered(answer)[None], rows[None], cols[None], log_mass[None]))
    _refuse_masses(problem, parts)
    # Solved: the excess is rounding; else only bounded.
    is_solved = bool((np.abs(masses.excess) <= _rounding(problem, clusters)).all())
    inside = united(parts, (problem.n, problem.m), problem.order)
    joined = _joined(problem, clusters, crossing, inside, is_solved)
    closed = joined.width <= rtol
    return replace(joined, converged=np.asarray((joined.converged and is_solved) or closed))


def _refuse_masses(problem: Problem, parts: list[Part]) -> None:
    """Masses of the parts, added once more: none above that of its atoms, and nothing missing.

    Raises:
        CertificateError: otherwise.
    """
    total = 0.0
    for part in parts:
        mass = float(np.exp(part.log_masses).sum())
        there = min(problem.a[part.rows].sum(), problem.b[part.cols].sum())
        total += mass
        if not mass <= there * (1 + 1e-9):
            raise CertificateError(
                f"clusters: expected a part of mass {there:.9g} at most, got {mass:.9g}"
            )
    if not total >= 1 - 2 * _MOST_CROSSING:
        raise CertificateError(f"clusters: expected parts of mass 1 together, got {total:.9g}")


def _lowered(answer: Interval) -> Interval:
    """Its potentials shifted to g ≤ 0: feasible across clusters too."""
    answer = replace(answer, method=answer.method.removeprefix(_NAME))
    if answer.f is None or answer.g is None:
        return answer
    top = answer.g.max()
    return replace(answer, f=answer.f + top, g=answer.g - top)


def _separated(x: np.ndarray, y: np.ndarray) -> np.ndarray | None:
    """Labels of clusters of radius r whose centres are 20 r or more apart, if there are any.

    A sample that has the first point and the farthest from it has atoms of two such clusters at
    least, 18 r apart and within 2 r of each other: where its covering radius does not drop by 8
    there are none.
    """
    if len(x) + len(y) > 4 * _SAMPLE:
        rng, few = np.random.default_rng(0), [x[:1]]
        for points in (x, y):
            away = np.zeros(len(points))
            for axis, start in zip(points.T, x[0], strict=True):
                np.maximum(away, np.abs(axis - start), out=away)
            few += [points[away.argmax()][None], points[rng.integers(len(points), size=_SAMPLE)]]
        if _farthest_first(np.concatenate(few), _SEEN) is None:
            return None
    return _farthest_first(np.concatenate([x, y]), _SEPARATION)


def _farthest_first(points: np.ndarray, separation: float) -> np.ndarray | None:
    """Labels by the nearest centre as soon as the covering radius drops by `separation`.

    Farthest-point clustering in the maximum norm, which does not underflow: with k centres the
    covering radius is r_k and the centres are r_{k−1} apart, so a drop shows the clusters.
    """
    reach = np.abs(points - points[0]).max(-1)
    labels = np.zeros(len(points), np.int64)
    radius = float(reach.max())
    for k in range(1, min(_MOST_CLUSTERS, len(points))):
        if radius == 0:
            return None
        distance = np.abs(points - points[int(reach.argmax())]).max(-1)
        closer = distance < reach
        labels[closer] = k
        reach = np.minimum(reach, distance)
        smaller = float(reach.max())
        if smaller * separation <= radius:
            return labels
        radius = smaller
    return None


def _clusters(problem: Problem, labels: np.ndarray) -> _Layout:
    points = np.concatenate([problem.x, problem.y])
    members = [np.flatnonzero(labels == k) for k in range(int(labels.max()) + 1)]
    centres = np.stack([points[which[0]] for which in members])
    radii = np.array(
        [row_norms(points[which] - c).max() for which, c in zip(members, centres, strict=True)]
    )
    apart, radii = row_norms(centres[:, None] - centres[None]), radii * (1 + 1e-12)
    between = radii[:, None] + radii[None]
    nearest = np.maximum(apart * (1 - 1e-12) - between, 0)
    rows = [which[which < problem.n] for which in members]
    cols = [which[which >= problem.n] - problem.n for which in members]
    return _Layout(rows, cols, nearest, apart * (1 + 1e-12) + between, 2 * radii)


def _masses(problem: Problem, clusters: _Layout, snap: bool) -> _Masses:
    """Masses of the clusters; balanced where they differ by no more than rounding of the weights.

    Two masses of 0.3, spread over their atoms in different ways, differ by 1e-17 or so; moved
    between far clusters, that would be more than all displacements of 1e-9. They are meant to be
    the same, so the answer is that of weights rounded to make them the same.
    """
    n, m = problem.n, problem.m
    if np.ptp(problem.log_a) == 0 and np.ptp(problem.log_b) == 0:
        # Counting is exact: 50 of 100 atoms balance 100 of 200.
        mine, theirs = (
            np.array([len(t) for t in side]) for side in (clusters.rows, clusters.cols)
        )
        with np.errstate(divide="ignore"):
            log_common = np.log(np.minimum(mine / n, theirs / m))
        return _Masses(log_common, (mine * m - theirs * n) / (n * m), 0.0)
    a, error = _accurate_masses(problem.log_a)
    b, other_error = _accurate_masses(problem.log_b)
    held = np.array([a[r].sum() for r in clusters.rows], dtype=np.longdouble)
    asked = np.array([b[c].sum() for c in clusters.cols], dtype=np.longdouble)
    excess, error = held - asked, error + other_error
    if snap and (np.abs(excess) <= _rounding(problem, clusters)).all():
        excess, error = np.zeros_like(excess), 0.0
    with np.errstate(divide="ignore"):
        log_common = np.log(np.minimum(held, asked)).astype(np.float64)
    return _Masses(log_common, excess.astype(np.float64), error)


def _rounding(problem: Problem, clusters: _Layout) -> np.ndarray:
    """What rounding may have done to the masses of the clusters, shape (k,).

    A weight is known through its logarithm: to a few units in the last place and as many of log a.
    """
    doubt_a = problem.a * (8 + 2 * np.abs(problem.logs_a))
    doubt_b = problem.b * (8 + 2 * np.abs(problem.logs_b))
    both = zip(clusters.rows, clusters.cols, strict=True)
    return UNIT * np.array([doubt_a[r].sum() + doubt_b[c].sum() for r, c in both])


def _accurate_masses(logs: np.ndarray) -> tuple[np.ndarray, float]:
    """Weights in extended precision (where the machine has it), and the error of any sum."""
    masses = np.exp(logs.astype(np.longdouble) - np.longdouble(logs.max()))
    unit = float(np.finfo(np.longdouble).eps)
    return masses / masses.sum(), (24 + len(logs) / 64) * unit + 1e-300


def _crossing(order: float, clusters: _Layout, masses: _Masses, snap: bool) -> _Crossing | None:
    """Where the excess goes and what that costs; None if clusters are not far enough apart.

    Potentials 0 ≤ f ≤ diam^p, g ≤ 0 exist inside each cluster, so block potentials must satisfy
    c_k − c_l ≤ nearest^p − diam_k^p =: w_kl. Mass may pass through third clusters (one atom
    arrives, another leaves), so the cost of crossing is the shortest path for w.
    """
    from scipy.sparse.csgraph import floyd_warshall

    size = clusters.diameters**order
    room = clusters.nearest**order - np.maximum(size[:, None], size[None])
    np.fill_diagonal(room, 0)
    if (room < 0).any():
        return None
    excess, farthest = masses.excess, clusters.farthest**order
    reach = float(farthest.max())
    doubt = masses.error * reach
    inner = float(np.abs(excess).sum() + masses.error) * float(size.max())
    give, take = np.flatnonzero(excess > 0), np.flatnonzero(excess < 0)
    if not len(give) or not len(take):
        return _Crossing(give[:0], take[:0], excess[:0], doubt, -inner - doubt, 0.0)
    far = farthest[np.ix_(give, take)]
    near = floyd_warshall(room)[np.ix_(give, take)]
    moved = min(float(excess[give].sum()), float(-excess[take].sum()))
    a, b = excess[give] / excess[give].sum(), excess[take] / excess[take].sum()
    plan = simplexes(a[None], b[None], far[None] / far.max())[0][0]
    misplaced = np.abs(plan.sum(1) - a).sum() + np.abs(plan.sum(0) - b).sum()
    if not (misplaced <= 1e-12 and plan.min() >= 0):  # a solver is not believed
        return None
    i, j = np.nonzero(plan)
    g = simplexes(a[None], b[None], near[None] / near.max())[1][0] * near.max()
    f = (near - (g - g[0])).min(1)
    lower = float(a @ f + b @ (g - g[0])) * (1 - 1e-12) * moved - doubt
    upper = float(plan[i, j] @ far[i, j]) * (1 + 1e-12) * moved + doubt
    # Weights come from float64: masses a few units in the last place apart may stand for equal.
    certain = max(lower - 16 * UNIT * reach, 0) if snap else max(lower, 0)
    return _Crossing(
        give[i], take[j], plan[i, j] * moved, upper, certain - inner, (lower + upper) / 2
    )


def _joined(
    problem: Problem,
    clusters: _Layout,
    crossing: _Crossing,
    inside: Interval,
    is_solved: bool,
) -> Interval:
    """What stays inside the clusters, and what crosses between them."""
    order, is_whole = problem.order, not len(crossing.mass)
    entries = [(inside.rows, inside.cols, inside.log_mass)]
    for k, m, moved in zip(crossing.sources, crossing.targets, crossing.mass, strict=True):
        source, target = clusters.rows[k], clusters.cols[m]
        i, j, mass = monotone_plan(problem.a[source], problem.b[target])
        kept = mass > 0
        logs = np.log(mass[kept]) + math.log(moved)
        entries.append((source[i[kept]], target[j[kept]], logs))
    rows, cols, log_mass = (np.concatenate(t) for t in zip(*entries, strict=True))
    size = abs(crossing.lower) ** (1 / order)
    if crossing.lower >= 0:
        lower = powers_added(inside.lower, size, order) * (1 - 4 * UNIT)
    else:
        lower = powers_less(inside.lower, size, order)
    more = crossing.upper ** (1 / order)
    upper = powers_added(inside.upper, more, order) * (1 + 4 * UNIT)
    cost = max(crossing.cost, 0)
    value = powers_added(inside.value, cost ** (1 / order), order)
    # Only an excess that is itself rounding leaves open what rounding explains.
    open_above = max(crossing.upper - cost, 0) ** (1 / order) * is_solved
    open_below = max(cost - crossing.lower, 0) ** (1 / order) * is_solved
    return replace(
        inside,
        value=np.clip(value, lower, upper),
        lower=lower,
        upper=upper,
        rows=rows,
        cols=cols,
        log_mass=log_mass,
        f=inside.f if is_whole else None,
        g=inside.g if is_whole else None,
        method=_NAME + inside.method,
        plan_doubt=powers_added(inside.plan_doubt, open_above, order),
        dual_doubt=powers_added(inside.dual_doubt, open_below, order),
    )
