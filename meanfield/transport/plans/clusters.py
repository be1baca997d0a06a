"""Collapsed clusters: far apart and small, solved cluster by cluster.

Between two clusters at distance D with inner displacements s, a solver with absolute tolerances
sees W_p ≈ s beside costs of D^p; at s = 1e-8 D nothing is left of it. If both measures put the
same mass in each cluster, nothing crosses, and each cluster is a problem in its own unit. Where
the masses differ by more than rounding, what crosses is most of the distance, and the other
solvers know it as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from meanfield.errors import CertificateError
from meanfield.transport.certificate import Interval, Part, united
from meanfield.transport.problem import UNIT, Problem, row_norms

_NAME = "clusters of "
_SEPARATION = 20.0  # distance between centres over radius of the clusters
_MOST_CLUSTERS = 64
# Points by which clusters show, and how; of 32 a tenth do by chance. Without the sample W2 takes a
# third more at 500 atoms in 64 dimensions (25 and 33 ms).
_SAMPLE, _SEEN = 64, 8.0


class _Cluster(NamedTuple):
    rows: np.ndarray
    cols: np.ndarray


def solve_clusters(
    problem: Problem, solve_batch: Callable[..., Interval], *, snap: bool
) -> Interval | None:
    """The answer from well-separated clusters of equal mass, or None where there are none.

    Args:
        problem: one problem.
        solve_batch: from x (k, n, d), y (k, m, d), log a and log b of problems of one shape to
            their answers, in the unit of these points.
        snap: whether masses that agree up to rounding of the weights are taken as equal. Two
            masses of 0.3, spread over their atoms in different ways, differ by 1e-17 or so; moved
            between far clusters, that would be more than all displacements of 1e-9.
    """
    labels = _separated(problem.x, problem.y)
    clusters = None if labels is None else _clusters(problem, labels)
    logs = None if clusters is None else _log_masses(problem, clusters, snap)
    if clusters is None or logs is None:
        return None
    of_shape: dict[tuple[int, int], list[int]] = {}
    for k, (rows, cols) in enumerate(clusters):
        of_shape.setdefault((len(rows), len(cols)), []).append(k)
    parts = []
    for ids in of_shape.values():
        rows, cols = (np.stack(side) for side in zip(*(clusters[k] for k in ids), strict=True))
        arrays = (problem.x[rows], problem.y[cols], problem.log_a[rows], problem.log_b[cols])
        parts.append(Part(_lowered(solve_batch(*arrays)), rows, cols, logs[ids]))
    _refuse_masses(problem, parts)
    inside = united(parts, (problem.n, problem.m), problem.order)
    return replace(inside, method=_NAME + inside.method)


def _refuse_masses(problem: Problem, parts: list[Part]) -> None:
    """Masses of the parts, added once more: none above that of its atoms, and nothing missing.

    Raises:
        CertificateError: otherwise.
    """
    total = 0.0
    for part in parts:
        masses = np.exp(part.log_masses)
        there = np.minimum(problem.a[part.rows].sum(-1), problem.b[part.cols].sum(-1))
        total += masses.sum()
        if not (masses <= there * (1 + 1e-9)).all():
            k = int((masses - there).argmax())
            raise CertificateError(
                f"clusters: expected a part of mass {there[k]:.9g} at most, got {masses[k]:.9g}"
            )
    if not total >= 1 - 1e-9:
        raise CertificateError(f"clusters: expected parts of mass 1 together, got {total:.9g}")


def _lowered(answer: Interval) -> Interval:
    """Potentials shifted to g ≤ 0 in each case of a batch: feasible across clusters too."""
    answer = replace(answer, method=answer.method.replace(_NAME, ""))
    top = answer.g.max(-1, keepdims=True)
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
    away = np.abs(points - points[0]).max(-1)
    labels = np.zeros(len(points), np.int64)
    radius = float(away.max())
    for k in range(1, min(_MOST_CLUSTERS, len(points))):
        if radius == 0:
            return None
        distance = np.abs(points - points[int(away.argmax())]).max(-1)
        closer = distance < away
        labels[closer] = k
        away = np.minimum(away, distance)
        smaller = float(away.max())
        if smaller * separation <= radius:
            return labels
        radius = smaller
    return None


def _clusters(problem: Problem, labels: np.ndarray) -> list[_Cluster] | None:
    """The members of the clusters; None where two are nearer to each other than one is wide.

    Potentials 0 ≤ f ≤ diam^p and g ≤ 0 inside each are feasible between the others.
    """
    points = np.concatenate([problem.x, problem.y])
    members = [np.flatnonzero(labels == k) for k in range(int(labels.max()) + 1)]
    centres = np.stack([points[which[0]] for which in members])
    radii = np.array(
        [row_norms(points[which] - c).max() for which, c in zip(members, centres, strict=True)]
    )
    between = row_norms(centres[:, None] - centres[None]) - radii[:, None] - radii
    np.fill_diagonal(between, np.inf)
    if between.min() < 2 * radii.max() * (1 + 1e-9):
        return None
    n = problem.n
    return [_Cluster(which[which < n], which[which >= n] - n) for which in members]


def _log_masses(problem: Problem, clusters: list[_Cluster], snap: bool) -> np.ndarray | None:
    """Logarithms of the masses of the clusters, (k,); None where μ and ν differ in one.

    By more than rounding, that is: a weight is known through its logarithm, to a few units in the
    last place and as many of log a. A mass of e^−800 counts, which may be far away.
    """
    if np.ptp(problem.log_a) == 0 and np.ptp(problem.log_b) == 0:
        # Counting is exact: 50 of 100 atoms balance 100 of 200.
        mine, theirs = np.array([(len(rows), len(cols)) for rows, cols in clusters]).T
        is_equal = (mine * problem.m == theirs * problem.n).all()
        return np.log(mine / problem.n) if is_equal else None
    if not snap:
        return None
    found = []
    for rows, cols in clusters:
        if not (len(rows) and len(cols)):
            return None
        held, doubt_a = _log_mass(problem.logs_a[rows])
        asked, doubt_b = _log_mass(problem.logs_b[cols])
        if not abs(held - asked) <= doubt_a + doubt_b:
            return None
        found.append(min(held, asked))
    return np.array(found)


def _log_mass(logs: np.ndarray) -> tuple[float, float]:
    """log Σ exp(l), and by how much rounding of the logarithms may have moved it."""
    top = logs.max()
    shares = np.exp(logs - top)
    doubt = (shares * (8 + 2 * np.abs(logs))).sum() / shares.sum()
    return top + math.log(shares.sum()), UNIT * doubt
