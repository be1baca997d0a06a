"""W₂ and W_p between particle measures: which solver answers what."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from meanfield.checks import as_bool, choice, number
from meanfield.habits import with_hints
from meanfield.transport.certificate import Interval, in_unit, narrower, without_plan
from meanfield.transport.pairs import Measure, Pair, as_pair
from meanfield.transport.plans.clusters import solve_clusters
from meanfield.transport.plans.columns import solve_columns
from meanfield.transport.plans.exact import solve_dense, solve_finely
from meanfield.transport.plans.formulas import closed_form, solve_paired
from meanfield.transport.problem import Problem, costs_between
from meanfield.transport.result import TransportResult, assemble, gathered, refuse_unconverged

# The roads of `automatic`, in their order (CPU times of one core of an AMD EPYC):
#
# road                      | for                                  | the next road takes, or leaves
# --------------------------|--------------------------------------|-----------------------------
# arrays of many problems   | batches, to _BATCHED atoms a side    | 40 times (1,000 of 8 atoms)
# formulas                  | one atom, two atoms, the line        | all digits of light atoms
# nearest partners          | equal weights, one by one            | 9 times (n = 1,000, d = 16)
# clusters                  | first beyond _SMALL pairs; below it  | ends 1.0 apart, relatively,
#                           | where the simplex leaves a gap       | in the place of 1e-13
# assignments               | uniform batches, or clouds in many   | 1 to 4 times (n = 300, 1,000,
#                           | dimensions, to _DENSE pairs          | d = 8, 64)
# dense simplex             | to _DENSE pairs; to _MOST_PAIRS_WP   | n = 300, 500, 700, 1,000:
#                           | for orders other than 2              | d = 2:  2.9, 1.0, 0.8, 0.6
#                           |                                      | d = 8:  3.6, 2.0, 0.9, 0.7
#                           |                                      | d = 16: 4.0, 2.4, 1.4, 0.9
# column generation         | W2 beyond, to _MOST_PAIRS            | 3 to 66 (POT, n = 10,000)
# dense simplex, fine costs | gaps that are left, to _FINE pairs   | 4e-5 and not 2e-14
_SMALL = 160_000
_DENSE = {4: _SMALL, 12: 400_000, math.inf: 1_200_000}  # up to which dimension how many pairs
_FINE = 25_000_000  # a matrix of costs takes 0.2 GB, and the simplex as much again
# Column generation holds 4.5 kB for an atom, and 0.45 for each of its first 64 coordinates: two
# million atoms a side take 10 GB in the plane. Of another order there is the dense simplex only,
# whose matrices of 10^8 pairs take 0.8 GB each.
_MOST_PAIRS, _MOST_PAIRS_WP = 4 * 10**12, 10**8
_BATCHED = 400  # atoms a side up to which a batch is solved in arrays
_BLOCK = 1_000_000  # costs and coordinates held at once
_THREADED_FROM = 30  # atoms a side from which threads pay


@dataclass(frozen=True)
class Settings:
    """What the caller asked for, and when; refused if it means nothing."""

    method: str = "auto"
    rtol: float = 1e-9
    order: float = 2
    time_limit: float = math.inf
    exact_weights: bool = False
    strict: bool = True
    device: str = "cpu"
    start: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        choice(self.method, "method", _METHODS)
        as_bool(self.exact_weights, "exact_weights")
        as_bool(self.strict, "strict")
        number(self.time_limit, "time_limit", above=0, finite=False)
        vars(self).update(rtol=number(self.rtol, "rtol", above=0, below=1))


@with_hints
def solve_w2(
    mu: Measure,
    nu: Measure,
    *,
    weights: tuple[Any, Any] | None = None,
    method: str = "auto",
    rtol: float = 1e-9,
    time_limit: float | None = None,
    exact_weights: bool = False,
    strict: bool = True,
) -> TransportResult:
    """W₂(μ, ν) = min (Σ π_ij ‖xᵢ − y_j‖²)^½ over couplings π, with a certified interval.

    Masses of clusters far apart that agree in μ and ν to a few units in the last place of their
    weights are taken as equal: otherwise their rounding, 1e-17 of mass that has to go from cluster
    to cluster, would outweigh displacements of 1e-9 inside of them. The interval is that of such
    weights; `exact_weights` takes them as they are stored.

    Args:
        mu: μ: a `ParticleMeasure`, points (..., n, d) of a uniform measure, or (points, weights).
            Tensors, lists, NumPy arrays and data frames; NumPy in, NumPy out. A list of clouds,
            of any sizes, is a batch.
        nu: ν, likewise; sizes may differ, batch axes broadcast.
        weights: (a, b) for points without weights of their own; None is uniform.
        method: "auto" takes the cheapest solver that gives `rtol`. By name: "simplex" (dense),
            "column generation" (large: 100,000 points in half a minute to minutes, a million in
            the plane in half an hour, memory linear in the points). The gap after each of its
            rounds goes to the logger "meanfield.transport", at level INFO.
        rtol: how closely plan and potentials must meet, relative to W₂.
        time_limit: seconds after which column generation begins no further round, and gives the
            interval that it has. A round takes from a tenth of a second (10,000 atoms a side) to
            minutes (a million).
        exact_weights: whether weights that differ in their last places are different.
        strict: raise if `rtol` is not met; otherwise the answer comes back flagged.

    Returns:
        The distance in the unit of the points, its interval, coupling and method.

    Raises:
        ConvergenceError: under `strict`, when `rtol` is not met; its `result` is the answer.
        TypeError, ValueError: input of unequal kinds or shapes, NaN, unequal masses; more than
            4·10¹² pairs, where no formula applies.

    Example:
        >>> import torch
        >>> x = torch.tensor([[0.0, 0.0]], dtype=torch.float64)
        >>> solve_w2(x, x + torch.tensor([3.0, 0.0])).value
        tensor(3., dtype=torch.float64)
        >>> import numpy as np
        >>> x, a = np.array([[0.0], [1.0]]), np.array([0.25, 0.75])
        >>> float(solve_w2((x, a), x[:1]))
        0.8660254037844386
    """
    limit = math.inf if time_limit is None else time_limit
    settings = Settings(method, rtol, time_limit=limit, exact_weights=exact_weights, strict=strict)
    return solved(as_pair(mu, nu, weights), settings)


@with_hints
def solve_wp(
    mu: Measure,
    nu: Measure,
    p: float,
    *,
    weights: tuple[Any, Any] | None = None,
    rtol: float = 1e-9,
    exact_weights: bool = False,
    strict: bool = True,
) -> TransportResult:
    """W_p(μ, ν) = min (Σ π_ij ‖xᵢ − y_j‖^p)^(1/p) over couplings π, with a certified interval.

    By quantiles on the line, unless large orders leave them few digits; by nearest neighbours
    where both measures have the same weights in the same order and no atom moves past another;
    cluster by cluster where they are collapsed; by POT's network simplex on the dense matrix of
    costs otherwise, O(n m) memory. Of order 2 it is `solve_w2`, which knows more.

    Args:
        mu: μ, as for `solve_w2`.
        nu: ν, likewise.
        p: the order, from 1 to 100. Large orders look at the largest displacements only, and leave
            a solver few digits for the others: the interval says how many.
        weights: as for `solve_w2`.
        rtol: how closely plan and potentials must meet, relative to W_p.
        exact_weights: as for `solve_w2`.
        strict: raise if they do not; otherwise the answer comes back flagged.

    Returns:
        The distance in the unit of the points, its interval, coupling and method. Potentials
        satisfy fᵢ + g_j ≤ ‖xᵢ − y_j‖^p.

    Raises:
        ConvergenceError: under `strict`, when `rtol` is not met.
        TypeError, ValueError: as `solve_w2`; more than 10⁸ pairs where no formula applies.

    Example:
        >>> import numpy as np
        >>> x = np.array([[0.0], [1.0]])
        >>> float(solve_wp(x, x[:1], 3).value ** 3)
        0.5
    """
    settings = Settings(rtol=rtol, order=as_order(p), exact_weights=exact_weights, strict=strict)
    return solved(as_pair(mu, nu, weights), settings)


def as_order(p: Any) -> float:
    """The order of a distance; whole numbers as integers, whose powers are cheaper."""
    p = number(p, "p", least=1, most=100)  # beyond it powers leave the number range
    return int(p) if p.is_integer() else p


def solved(pair: Pair, settings: Settings) -> TransportResult:
    """The distance of a pair of measures, or of a batch of pairs."""
    answer = solve_arrays(*pair.flat, replace(settings, device=pair.device))
    return finished(pair, answer, settings)


def finished(
    pair: Pair, answer: Interval, settings: Settings, *, conditional: bool = False
) -> TransportResult:
    """The answer as the caller's kind of arrays, refused under `strict` if it is open."""
    seconds = time.perf_counter() - settings.start
    result = assemble(pair, answer, seconds=seconds, conditional=conditional)
    return refuse_unconverged(result, settings.rtol) if settings.strict else result


def solve_arrays(
    x: np.ndarray, y: np.ndarray, log_a: np.ndarray, log_b: np.ndarray, settings: Settings
) -> Interval:
    """Answers of a batch x (b, n, d), y (b, m, d), log a, log b, in the caller's unit.

    Many small problems of one shape are solved in arrays; those that do not close, and all
    others, one by one.
    """
    count, (n, d), m = len(x), x.shape[1:], y.shape[1]
    if not count:
        return without_plan(np.zeros(0), "empty batch", n, m, order=settings.order)
    is_small = max(n, m) <= _BATCHED and settings.method == "auto" and (d > 1 or count > 1)
    if not is_small or min(log_a.min(), log_b.min()) == -math.inf:
        cases = zip(x, y, log_a, log_b, strict=True)
        return gathered([_solve_one(*case, settings)[None] for case in cases])
    step = max(1, _BLOCK // (n * m + (n + m) * d))
    blocks = [slice(start, start + step) for start in range(0, count, step)]

    def answer_of(block: slice) -> Interval:
        arrays = (t[block] for t in (x, y, log_a, log_b))
        problem = Problem.of(*arrays, order=settings.order)
        formula = closed_form(problem, rtol=settings.rtol)
        answer = formula or solve_dense(problem, rtol=settings.rtol)
        return in_unit(answer, problem.exponent)

    if max(n, m) < _THREADED_FROM or len(blocks) == 1:
        found = [answer_of(block) for block in blocks]
    else:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            found = list(pool.map(answer_of, blocks))
    whole = gathered(found)
    is_open = whole.upper - whole.lower > settings.rtol * whole.upper
    if not is_open.any():
        return whole
    left = np.flatnonzero(is_open)
    alone = [_solve_one(x[k], y[k], log_a[k], log_b[k], settings)[None] for k in left]
    place = np.argsort(is_open, kind="stable").argsort()  # the closed ones come first
    return gathered([whole[~is_open], *alone])[place]


def _solve_one(
    x: np.ndarray, y: np.ndarray, log_a: np.ndarray, log_b: np.ndarray, settings: Settings
) -> Interval:
    """One pair by the whole dispatch, in the caller's unit and numbering."""
    whole = Problem(x, y, log_a, log_b, order=settings.order)
    problem = whole.part(*whole.atoms, snap=not settings.exact_weights)
    answer = in_unit(_METHODS[settings.method](problem, settings), problem.exponent)
    return in_numbering(answer, whole)


def in_numbering(answer: Interval, whole: Problem) -> Interval:
    """An answer between the atoms that have mass, in the numbering of all, and in their unit."""
    rows, cols = whole.atoms
    if len(rows) == whole.n and len(cols) == whole.m:
        return answer
    f, g = np.zeros(whole.n), np.zeros(whole.m)
    f[rows], g[cols] = answer.f, answer.g
    f, g = extended(whole, f, g)
    return replace(answer, rows=rows[answer.rows], cols=cols[answer.cols], f=f, g=g)


def extended(whole: Problem, f: np.ndarray, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Potentials at atoms of weight 0 by c-transforms of those at the others, which stay."""
    f, g, x, y = f.copy(), g.copy(), whole.x, whole.y
    in_x, in_y = whole.log_a > -math.inf, whole.log_b > -math.inf

    def transformed(points: np.ndarray, others: np.ndarray, known: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore", over="ignore"):
            costs = costs_between(points, others, whole.order)
            left = np.where(np.isfinite(costs), costs - known, math.inf).min(1, initial=math.inf)
        # An atom that is nowhere (NaN, ∞) is far from everything: 0 is feasible.
        return np.where(left == math.inf, 0.0, left)

    f[~in_x] = transformed(x[~in_x], y[in_y], g[in_y])
    g[~in_y] = transformed(y[~in_y], x, f)
    return f, g


def automatic(problem: Problem, settings: Settings) -> Interval:
    """One problem by the cheapest solver that gives `rtol`: the roads of the table, in order."""
    rtol, is_small = settings.rtol, problem.pairs <= _SMALL
    best = closed_form(problem, rtol=rtol)
    if best is not None and (best.width <= rtol or 1 in (problem.n, problem.m)):
        return best
    if best is not None and not is_small:  # a long line, which other solvers know no better
        return narrower(best, _clusters(problem, settings), rtol)
    if is_small:
        best = narrower(solve_dense(problem, rtol=rtol), best, rtol)
    elif problem.is_paired:
        best = solve_paired(problem, rtol=rtol, device=settings.device)
    if best is not None and best.width <= rtol:
        return best
    split = _clusters(problem, settings)
    if split is not None:
        best = narrower(split, best, rtol)
        if split.converged:
            return best
    if best is None or not is_small:
        most = next(pairs for dim, pairs in _DENSE.items() if problem.dim <= dim)
        is_columns = problem.order == 2 and problem.pairs > most
        best = narrower((_columns if is_columns else _dense)(problem, settings), best, rtol)
    # Displacements that are small beside the clouds: dense solves reach finer costs. Nothing can
    # stop one, and it may take a hundred times what columns took.
    is_free = settings.time_limit == math.inf or is_small
    if best.width <= rtol or problem.pairs > _FINE or not is_free:
        return best
    return solve_finely(problem, rtol=rtol, answer=best)


def _clusters(problem: Problem, settings: Settings) -> Interval | None:
    solve_batch = partial(solve_arrays, settings=settings)
    return solve_clusters(problem, solve_batch, snap=not settings.exact_weights)


def _refuse_pairs(problem: Problem, most: int) -> None:
    if problem.pairs > most:
        raise ValueError(
            f"W{problem.order:g}: expected at most {most:.0e} pairs of atoms, got {problem.n} × "
            f"{problem.m} = {problem.pairs:.0e}, which memory does not hold; take fewer points"
        )


def _dense(problem: Problem, settings: Settings) -> Interval:
    _refuse_pairs(problem, _MOST_PAIRS_WP)
    return solve_dense(problem, rtol=settings.rtol, by_simplex=settings.method == "simplex")


def _simplex(problem: Problem, settings: Settings) -> Interval:
    return solve_finely(problem, rtol=settings.rtol, answer=_dense(problem, settings))


def _columns(problem: Problem, settings: Settings) -> Interval:
    _refuse_pairs(problem, _MOST_PAIRS)
    end, device = settings.start + settings.time_limit, settings.device
    return solve_columns(problem, rtol=settings.rtol, deadline=end, device=device)


# Closed: a method is a line here, by the name that answers print. Other solvers' answers are
# graded by `certify`.
_METHODS: dict[str, Callable[[Problem, Settings], Interval]] = {
    "auto": automatic,
    "simplex": _simplex,
    "column generation": _columns,
}
