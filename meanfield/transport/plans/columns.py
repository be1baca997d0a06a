"""Large problems to a proven gap: a sparse simplex on few arcs, and c-transforms over all pairs.

An optimal plan uses n + m − 1 of the n m arcs. Potentials of a coarser problem show where they
lie. Each round solves the simplex on the arcs with the smallest reduced costs, takes the
c-transform of its potentials, which stores nothing n × m, and adds the arcs that violate them.
c-transforms are feasible, so each round ends with a certified interval; its gap says when to stop.
Before the first, steps of Sinkhorn on the arcs sharpen the potentials of the coarser problem.

Coarser problems are nested: groups of up to four neighbours become one atom at their centroid,
with the sum of their masses, and so on down to a size that is solved densely.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from meanfield.transport.certificate import Interval, SparsePlan, centred, certified, narrower
from meanfield.transport.plans.c_transform import CTransform, halved
from meanfield.transport.plans.exact import solve_dense, sparse_simplex
from meanfield.transport.plans.formulas import both_ways, monotone_along_widest
from meanfield.transport.problem import Problem

if TYPE_CHECKING:
    from scipy.sparse import csr_array

_logger = logging.getLogger("meanfield.transport")

_NAME = "column generation"
_DENSE = 400  # atoms of the coarsest problem, at most
_TOGETHER = 4  # neighbours that are one atom of the next coarser level
_COARSE_GAP = 2e-3  # of W₂² on a coarser level: potentials are right that far at best
_COARSE_ROUNDS = 4
_FIRST_ARCS = 16
_NEW_ARCS = 8  # of a row and a round
_ENTRIES = 1 << 17  # of differences at once: in 384 dimensions 3 times as fast as all at once
_ROUNDS = 40
_TEMPERATURES, _COOLING = 8, 0.35
_SCALINGS, _RELAXATION = 15, 1.85  # Sinkhorn at each; plain steps leave a gap 7 times as wide
_MOST_LOG = 50.0  # of the kernel, where potentials are infeasible
_CEILING = 1e3  # clip reduced costs at 1e3 × gap once no arc is missing
_MOST_SLACK = 0.1  # of the gap asked for


def solve_columns(
    problem: Problem, *, rtol: float, deadline: float = math.inf, device: str = "cpu"
) -> Interval:
    """W₂ with a proven gap, in memory proportional to (n + m) · 100 and a block.

    No round begins after the deadline (of `time.perf_counter`): the best interval so far is
    returned then, unconverged. c-transforms run on the device, the simplex on the CPU.
    """
    # Neighbours get neighbouring numbers: what the simplex looks at together then lies together
    # in memory. At 262,144 atoms that halves its time.
    rows, cols = (halved(points, _TOGETHER)[0] for points in (problem.x, problem.y))
    parts = problem.x[rows], problem.y[cols], problem.log_a[rows], problem.log_b[cols]
    found = _by_levels(Problem(*parts, problem.exponent), rtol, deadline, device)
    f, g = np.empty_like(found.f), np.empty_like(found.g)
    f[rows], g[cols] = found.f, found.g
    return replace(found, rows=rows[found.rows], cols=cols[found.cols], f=f, g=g)


def _by_levels(problem: Problem, rtol: float, deadline: float, device: str) -> Interval:
    coarse, *levels = _levels(problem)
    answer = solve_dense(coarse, rtol=rtol)
    for finer in levels:
        is_finest = finer is levels[-1]
        if time.perf_counter() > deadline and not is_finest:
            continue
        carried = _carried(coarse, answer, finer, device)
        settings = (rtol, _ROUNDS) if is_finest else (_COARSE_GAP, _COARSE_ROUNDS)
        answer, coarse = _in_rounds(finer, *carried, *settings, deadline, device), finer
    return answer


def _levels(problem: Problem) -> list[Problem]:
    """Coarser and coarser problems, from the coarsest to the problem itself."""
    levels = [problem]
    while max(levels[0].n, levels[0].m) > _DENSE:
        finer = levels[0]
        x, log_a = _centroids(finer.x, finer.a, finer.logs_a)
        y, log_b = _centroids(finer.y, finer.b, finer.logs_b)
        levels.insert(0, Problem(x, y, log_a, log_b, finer.exponent))
    return levels if len(levels) > 1 else [problem, problem]


def _centroids(
    points: np.ndarray, masses: np.ndarray, logs: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Centroids of groups of up to `_TOGETHER` neighbours, and their log-masses."""
    if len(points) <= _DENSE // 2:
        return points, logs
    order, starts = halved(points, _TOGETHER)
    weights = np.maximum(masses, 1e-300)[order]
    total = np.add.reduceat(weights, starts)
    moments = np.add.reduceat(weights[:, None] * points[order], starts)
    return moments / total[:, None], np.log(total)


def _carried(
    coarse: Problem, answer: Interval, finer: Problem, device: str
) -> tuple[Interval, np.ndarray]:
    """The coarser problem's potentials on the finer one, and arcs of small reduced cost.

    With the monotone plan along the widest direction they are a first interval; the arcs that
    join its atoms make sure that the arcs can carry the weights.
    """
    g = centred(CTransform(finer.y, coarse.x, device=device)(answer.f, 1).minima, finer.b)
    forth = CTransform(finer.x, finer.y, device=device)(g, _FIRST_ARCS)
    back = CTransform(finer.y, finer.x, device=device)(forth.minima, _FIRST_ARCS)
    steps = monotone_along_widest(finer, finer.a, finer.b)
    rows, cols = both_ways(steps.rows, steps.cols)
    near = forth.rows * finer.m + forth.cols, back.cols * finer.m + back.rows
    arcs = _sorted_set(np.concatenate([*near, rows * finer.m + cols]))
    pair = forth.minima, back.minima
    return certified(finer, steps, pair, method=_NAME, rtol=0.0, slack=back.slack), arcs


def _sharpened(
    problem: Problem, carried: Interval, arcs: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Better potentials, by steps of Sinkhorn on the arcs whose temperature falls.

    Potentials that are carried over are wrong by about the reduced costs of neighbours, and there
    the temperature begins. All of a solve then takes a half (100,000 atoms in the plane) or a
    fifth (80,000 in space) of its time; to 20,000 atoms it takes as long as without. Nothing else
    depends on how well this goes: the c-transforms that follow prove what they prove from any
    potentials. Where weights differ by e^9 and the arcs cannot carry them, the simplex takes as
    long as without; scalings that overflow are left out.
    """
    from scipy.sparse import csr_array

    rows, cols, costs = _with_costs(problem, arcs)
    a, b = np.maximum(problem.a, 1e-300), np.maximum(problem.b, 1e-300)
    f, g = carried.f, carried.g
    starts = np.searchsorted(rows, np.arange(problem.n + 1))
    temperature = float(np.median(costs - f[rows] - g[cols]))
    with np.errstate(all="ignore"):
        for _ in range(_TEMPERATURES):
            logs = np.minimum((f[rows] + g[cols] - costs) / temperature, _MOST_LOG)
            u, v = _scalings(csr_array((np.exp(logs), cols, starts)), a, b)
            mine, theirs = f + temperature * np.log(u / a), g + temperature * np.log(v / b)
            if not np.isfinite(mine.sum() + theirs.sum()):
                break
            f, g = mine, theirs
            temperature *= _COOLING
    # No reduced cost of an arc is below 0, where the simplex would clip it.
    return np.minimum.reduceat(costs - g[cols], starts[:-1]), g


def _scalings(kernel: csr_array, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """u and v for which the marginals of uᵢ Kᵢⱼ vⱼ are nearly a and b, by overrelaxed steps."""
    transposed, v = kernel.T.tocsr(), b
    u = a / (kernel @ v)
    for _ in range(_SCALINGS):
        v = v * (b / (v * (transposed @ u))) ** _RELAXATION
        u = u * (a / (u * (kernel @ v))) ** _RELAXATION
    return u, v


def _in_rounds(
    problem: Problem,
    best: Interval,
    arcs: np.ndarray,
    rtol: float,
    rounds: int,
    deadline: float,
    device: str,
) -> Interval:
    """Solve on the arcs, look at all pairs, add what violates; until the interval closes.

    From an interval with potentials, and from arcs i m + j that can carry the weights.
    """
    transform = CTransform(problem.x, problem.y, device=device)
    (f, g), ceiling = _sharpened(problem, best, arcs), math.inf  # of reduced costs
    for k in range(rounds):
        if time.perf_counter() > deadline:
            break
        # On reduced costs the simplex is four times faster, and more accurate: most that matter
        # are small, so they, and not the artificial arcs, lead the way; and its tolerance is
        # relative to the largest of them.
        rows, cols, costs = _with_costs(problem, arcs)
        reduced = np.clip(costs - f[rows] - g[cols], 0, ceiling)
        plan, u, v = sparse_simplex(problem.a, problem.b, (rows, cols, reduced), is_warm=k > 0)
        f, g = u + f, np.where(np.isfinite(v), v, 0.0) + g
        best, wanted = _improved(problem, best, plan, f, g, transform, rtol)
        f, g = best.f, best.g
        numbers = (problem.n, problem.m, k + 1, len(arcs), float(best.width))
        _logger.info("%d × %d atoms, round %d: %d arcs, relative width %.1e", *numbers)
        place = np.searchsorted(arcs, wanted)
        new = wanted[arcs[np.minimum(place, len(arcs) - 1)] != wanted]
        # A multiple of the gap: below it the tolerance of the simplex is finer.
        left = problem.moved(best.rows, best.cols) ** 2 - f[best.rows] - g[best.cols]
        lowest = _CEILING * float(np.exp(best.log_mass) @ np.maximum(left, 0))
        if best.converged or (not len(new) and ceiling <= lowest):
            break
        arcs = _sorted_set(np.concatenate([arcs, new]))
        ceiling = math.inf if len(new) else lowest
    return replace(best, converged=np.asarray(True)) if best.width <= rtol else best


def _improved(
    problem: Problem,
    best: Interval,
    plan: SparsePlan,
    f: np.ndarray,
    g: np.ndarray,
    transform: CTransform,
    rtol: float,
) -> tuple[Interval, np.ndarray]:
    """The interval after a look at all pairs, and arcs below the simplex's f."""
    middle = g - centred(g, problem.b)
    f, g = f + middle[0], g - middle
    row = transform(g, _NEW_ARCS, f)
    moved = problem.moved(plan.rows, plan.cols)
    if row.slack > _MOST_SLACK * rtol * float((np.exp(plan.log_mass) * moved**2).sum()):
        row = transform.precise(g, _NEW_ARCS, f)
    # A quarter: the interval, rounding included, is to be narrower than rtol.
    pair, rtol = (row.minima, g), rtol / 4
    latest = certified(problem, plan, pair, method=_NAME, rtol=rtol, slack=row.slack)
    return narrower(latest, best, rtol), _sorted_set(row.rows * problem.m + row.cols)


def _with_costs(problem: Problem, arcs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, columns and costs of arcs i m + j."""
    rows, cols = np.divmod(arcs, problem.m)
    costs, step = np.empty(len(arcs)), max(1, _ENTRIES // problem.dim)
    for start in range(0, len(arcs), step):
        part = slice(start, start + step)
        costs[part] = np.square(problem.x[rows[part]] - problem.y[cols[part]]).sum(-1)
    return rows, cols, costs


def _sorted_set(arcs: np.ndarray) -> np.ndarray:
    """The arcs in order, each once; `numpy.unique` hashes integers, 60 times as slowly."""
    arcs = np.sort(arcs)
    return arcs[np.diff(arcs, prepend=-1) > 0]
