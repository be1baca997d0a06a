"""The one certificate: from a plan an upper bound of W_p, from potentials a lower one.

Solvers propose; nothing they say is believed. Any pair with fᵢ + g_j ≤ ‖xᵢ − y_j‖^p gives
⟨a, f⟩ + ⟨b, g⟩ ≤ W_p^p, whatever solver it came from, and any plan, repaired where it misses its
marginals, gives an upper bound. This file is the only place that accounts for rounding:

- a computed length is right to (d + 4) u relative, its power to p times that;
- a weight exp(l) is right to a few u and |l| u (its logarithm was rounded when normalised);
- a potential fᵢ = min_j C_ij − g_j is right to u |fᵢ|, *if nothing is added to it afterwards*: so
  g is centred before, never f;
- marginal errors of a plan are repaired, and the repair is added to the cost.

What solvers and formulas promise is looked at, by sample where all pairs are many: potentials
that are not feasible are a `CertificateError`, and so are ends the wrong way round. `is_optimal`
counts only if the plan's cost and the dual value agree within their errors.

Every function takes one problem or a batch of them (leading axes).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from meanfield.errors import CertificateError
from meanfield.transport.problem import (
    UNIT,
    Problem,
    costs_between,
    powers_added,
    powers_less,
    root,
    row_norms,
    taken,
)

_EXACT, _MEASURED = -math.inf, math.inf
_LEAST = 2.0**-1074  # the least positive number
_TINY = 1e-150  # of the unit: lengths below it may be lost to underflow of their squares
_NO_MASS = 1e-300  # weights below it have no right digits
_LOST = 1e-317  # what underflow hides of a million powers of lengths, of orders above 2
_ALL_PAIRS = 4096  # up to here every pair is asked whether its potentials are feasible
_SAMPLE = 16  # rows, and columns, that are asked beyond


class SparsePlan(NamedTuple):
    """A sparse plan Σ_k exp(log_mass_k) δ_(rows_k, cols_k), shapes (..., k); −inf pads.

    `log_doubt` is the logarithm of the mass that may lie elsewhere than the plan says: −inf where
    the marginals hold to the last bit by construction, +inf where they are to be measured.
    """

    rows: np.ndarray
    cols: np.ndarray
    log_mass: np.ndarray
    log_doubt: np.ndarray | float = _MEASURED


@dataclass(frozen=True, eq=False)
class Interval:
    """lower ≤ W_p ≤ upper in the unit of its problem, with plan and feasible potentials.

    Leading axes are those of the problem. Potentials are NaN where their powers leave the number
    range, and where the distance is infinite.

    Attributes:
        converged: whether the ends meet within rtol and what rounding explains.
        plan_doubt: what rounding in this problem may have done to the power of `upper`; its p-th
            root.
        dual_doubt: likewise for `lower`, without `slack`.
    """

    value: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    rows: np.ndarray
    cols: np.ndarray
    log_mass: np.ndarray
    f: np.ndarray
    g: np.ndarray
    method: str
    converged: np.ndarray
    plan_doubt: np.ndarray
    dual_doubt: np.ndarray
    order: float

    @property
    def width(self) -> np.ndarray:
        """Relative width of the interval."""
        upper = np.where(self.upper > 0, self.upper, 1.0)
        return np.where(self.upper > 0, (self.upper - self.lower) / upper, 0.0)

    def __getitem__(self, index: Any) -> Interval:
        """Some answers of the batch."""
        return replace(self, **{name: getattr(self, name)[index] for name in self.arrays()})

    @property
    def rounding(self) -> np.ndarray:
        """How much of upper − lower is explained by rounding in this problem."""
        doubt = powers_added(self.plan_doubt, self.dual_doubt, self.order)
        rest = powers_less(self.upper, np.minimum(doubt, self.upper), self.order)
        with np.errstate(invalid="ignore"):  # ∞ − ∞ where the distance is infinite
            both = np.minimum(self.upper - rest, self.upper - self.lower)
        return np.where(np.isfinite(self.upper), both, 0.0)

    @classmethod
    def arrays(cls) -> list[str]:
        """The fields that have the axes of the batch."""
        return [f.name for f in fields(cls) if f.name not in ("method", "order")]


def feasible(costs: np.ndarray, g: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Potentials from any g: fᵢ = min_j C_ij − g_j, then g_j = min_i C_ij − fᵢ.

    g is centred first, at its median by mass. An offset D² common to all of g would be taken off
    again by f, and leave an error u D² in numbers that may be u D² themselves.
    """
    g = centred(g, b)
    left = costs - g[..., None, :]
    f = left.min(-1)
    np.subtract(costs, f[..., None], out=left)  # new pages would take longer than the minima
    return f, left.min(-2)


def centred(g: np.ndarray, b: np.ndarray) -> np.ndarray:
    """g less its median by mass."""
    order = g.argsort(-1)
    mass = taken(b, order).cumsum(-1)
    middle = (mass < mass[..., -1:] / 2).sum(-1, keepdims=True)
    with np.errstate(invalid="ignore"):  # ∞ − ∞, of a wrong solver
        return g - taken(g, taken(order, middle))


def clipped(problem: Problem, g: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Anybody's potentials, centred, and cut where they say nothing.

    Large potentials are valid but lose digits: their rounding would widen the interval.
    """
    most = 4 * float(problem.diameter) ** problem.order
    return np.minimum(np.maximum(centred(g, weights), -most), most)  # `clip` takes twice as long


def certified(
    problem: Problem,
    plan: SparsePlan,
    potentials: np.ndarray | tuple[np.ndarray, np.ndarray],
    *,
    method: str,
    rtol: float,
    slack: float = 0.0,
    is_optimal: bool = False,
) -> Interval:
    """The interval of a plan and of potentials that are feasible up to rounding and `slack`.

    Args:
        problem: one problem or a batch.
        plan: any plan; misplaced mass is paid for.
        potentials: any g (..., m), of which c-transforms are taken here; or f (..., n) and g from
            a c-transform, which are looked at.
        method: what to call the answer.
        rtol: what `converged` means.
        slack: how far fᵢ + g_j may lie above C_ij.
        is_optimal: a theorem says that no plan with the marginals of this one costs less.
    """
    order = problem.order
    plan = _settled(problem, plan)
    moved = problem.moved(plan.rows, plan.cols)
    value = power_mean(plan.log_mass, moved, order)
    rounded = _sum_error(plan.rows.shape[-1]) + 2 * problem.dim + 24
    error = (rounded - 2 * problem.logs.min(-1)) * UNIT  # logarithms are at most 0
    missing, plan_doubt = _misplaced(problem, plan, moved)
    repair = root(missing + plan_doubt, order)
    underflow = _lost_to_underflow(plan.log_mass, moved, value)
    upper = powers_added(value * (1 + error), repair, order) * (1 + 4 * UNIT) + underflow
    both = _feasible(problem, potentials, slack)
    f, g = both[..., : problem.n], both[..., problem.n :]
    gained, lost = _dual(problem, both)
    lower = root(np.maximum(gained - lost - slack, 0.0), order) * (1 - 4 * UNIT)
    if not slack and (gained < 1e20 * _tiny(order)).any():  # it may have underflowed
        lower = np.maximum(lower, _one_sided(problem, f, g, error))
    if is_optimal:
        # A theorem speaks of the plan; the potentials that it comes with must not contradict it.
        highest = root(np.maximum(gained + slack, 0.0), order)
        is_known = np.asarray(plan.log_doubt) < _MEASURED
        is_known &= _meet(order, rtol, value, highest, (plan_doubt + lost) / 2)
        certain = np.where(is_known, powers_less(value * (1 - error), repair, order), 0.0)
        lost = np.where(certain > lower, plan_doubt, lost)
        lower = np.maximum(lower, certain)
    lower = np.maximum(lower - underflow, 0.0)
    return Interval(
        value=np.clip(value, lower, upper),
        lower=_below(lower, upper),
        upper=upper,
        rows=plan.rows,
        cols=plan.cols,
        log_mass=plan.log_mass,
        f=f,
        g=g,
        method=method,
        converged=_meet(order, rtol, upper, lower, plan_doubt + lost),
        plan_doubt=root(plan_doubt, order),
        dual_doubt=root(lost, order),
        order=order,
    )


def _meet(
    order: float, rtol: float, upper: np.ndarray, lower: np.ndarray, doubt: np.ndarray
) -> np.ndarray:
    """Whether s^p − t^p ≤ p rtol s^p + 2 doubt, which follows from s − t ≤ rtol s.

    Twice, as upper and lower each contain it.
    """
    power = upper**order
    return power - lower**order <= order * rtol * power + 2 * doubt


def is_open(answer: Interval, rtol: float) -> bool:
    """Whether better potentials may narrow the interval: its plan's doubt does not explain it."""
    doubt = answer.plan_doubt**answer.order
    return not _meet(answer.order, rtol, answer.upper, answer.lower, doubt).all()


def narrower(one: Interval, other: Interval | None, rtol: float) -> Interval:
    """The better plan with the better potentials: the intersection of two valid intervals.

    It is converged if rounding explains it, in what is kept or in one that has converged: of the
    latter it is told as doubt of the lower end.
    """
    if other is None:
        return one
    plan = one if one.upper <= other.upper else other
    dual = one if one.lower >= other.lower else other
    order, lower, upper = plan.order, dual.lower, plan.upper
    kept = doubt = plan.plan_doubt**order + dual.dual_doubt**order
    for answer in (one, other):
        whole = answer.plan_doubt**order + answer.dual_doubt**order
        doubt = np.where(answer.converged, np.maximum(doubt, whole), doubt)
    meets = _meet(order, rtol, upper, lower, kept)
    explained = root(doubt - plan.plan_doubt**order, order)
    return replace(
        plan,
        value=np.clip(plan.value, lower, upper),
        lower=_below(lower, upper),
        f=dual.f,
        g=dual.g,
        dual_doubt=np.where(meets, dual.dual_doubt, explained),
        converged=meets | _meet(order, rtol, upper, lower, doubt),
    )


def without_plan(value: np.ndarray, method: str, n: int, m: int, *, order: float = 2) -> Interval:
    """Values that are exact, of n × m atoms, without a plan."""
    mass, zero = np.zeros((*value.shape, 0)), np.zeros(value.shape)
    ends, plan, yes = (value, value, value), (mass.astype(np.int64),) * 2, zero == 0
    f, g = (np.full((*value.shape, size), math.nan) for size in (n, m))
    return Interval(*ends, *plan, mass, f, g, method, yes, zero, zero, order)


class Part(NamedTuple):
    """Answers of problems of one shape (k of them) inside a larger one, and where they stand."""

    answer: Interval
    rows: np.ndarray  # atoms of μ, (k, n)
    cols: np.ndarray  # atoms of ν, (k, m)
    log_masses: np.ndarray  # of each problem, (k,)


def united(
    parts: Sequence[Part], shape: tuple[int, int], order: float, *, log_error: float = 0.0
) -> Interval:
    """One problem of n × m atoms from its parts, which exchange nothing.

    Args:
        parts: the parts.
        shape: n and m.
        order: p.
        log_error: by how much the log-masses of the parts are in doubt.
    """
    answers = [part.answer for part in parts]
    logs = np.concatenate([part.log_masses for part in parts])
    value, lower, upper, plan_doubt, dual_doubt = (
        power_mean(logs, np.concatenate([getattr(t, name) for t in answers]), order)
        for name in ("value", "lower", "upper", "plan_doubt", "dual_doubt")
    )
    largest = float(np.abs(logs).max(initial=0.0, where=logs > -math.inf))
    error = log_error + (32 + 2 * largest + _sum_error(len(logs))) * UNIT
    uppers = np.concatenate([t.upper for t in answers])
    underflow = _lost_to_underflow(logs, uppers, upper)
    lower, upper = np.maximum(lower * (1 - error) - underflow, 0), upper * (1 + error) + underflow
    moved = np.where(upper < math.inf, upper, 0.0) * root(np.asarray(order * log_error), order)
    plan_doubt, dual_doubt = (powers_added(t, moved, order) for t in (plan_doubt, dual_doubt))
    f, g = (np.zeros(size) for size in shape)
    tiny = float(upper) < (np.finfo(float).tiny / UNIT) ** (1 / order)
    entries = []
    for t, rows, cols, log_mass in parts:
        there = t.log_mass > -math.inf
        i, j = np.take_along_axis(rows, t.rows, -1), np.take_along_axis(cols, t.cols, -1)
        entries.append((i[there], j[there], (t.log_mass + log_mass[:, None])[there]))
        # Of a distance that is far below the whole, potentials that underflowed are 0.
        lost = np.isnan(t.f).any(-1) & (t.upper < 1) & ~tiny
        f[rows], g[cols] = (np.where(lost[:, None], 0.0, each) for each in (t.f, t.g))
    i, j, log_mass = (np.concatenate(t) for t in zip(*entries, strict=True))
    return Interval(
        value=np.clip(value, lower, upper),
        lower=lower,
        upper=upper,
        rows=i,
        cols=j,
        log_mass=log_mass,
        f=f,
        g=g,
        method=joined_names(answers),
        converged=np.asarray(all(t.converged.all() for t in answers)),
        order=order,
        plan_doubt=plan_doubt,
        dual_doubt=dual_doubt,
    )


def joined_names(answers: Sequence[Interval]) -> str:
    """The methods that occur."""
    return " + ".join(sorted({name for t in answers for name in t.method.split(" + ")}))


def largest_of(f: np.ndarray, g: np.ndarray) -> np.ndarray:
    """The largest size of potentials, of each pair."""
    return np.maximum(np.abs(f).max(-1), np.abs(g).max(-1))


def in_unit(answer: Interval, exponent: np.ndarray) -> Interval:
    """The answer with distances times 2^exponent; ends rounded outward where that underflows."""
    ends = (answer.lower, answer.value, answer.upper)
    with np.errstate(over="ignore"):
        low, value, high = (np.ldexp(t, exponent) for t in ends)
    low = np.minimum(low, np.finfo(float).max)  # a distance beyond it is finite all the same
    if (low < 1e-290).any():
        low = np.where((low > 0) & (low < 1e-290), np.nextafter(low, 0.0), low)
        high = np.where((answer.upper > 0) & (high < 1e-290), np.nextafter(high, 1.0), high)
        value = np.clip(value, low, high)
    peak = largest_of(answer.f, answer.g)
    with np.errstate(over="ignore", invalid="ignore"):
        unit = np.exp2(answer.order * np.asarray(exponent, float))
        f, g, size = answer.f * unit[..., None], answer.g * unit[..., None], peak * unit
    # Powers of lengths may leave the number range; those of order 1 go with the distance.
    small = (peak > 0) & (size < np.finfo(float).tiny) & (answer.order > 1)
    lost = (small | ~np.isfinite(size))[..., None]
    if lost.any():
        f, g = np.where(lost, math.nan, f), np.where(lost, math.nan, g)
    return replace(
        answer,
        value=value,
        lower=low,
        upper=high,
        f=f,
        g=g,
        plan_doubt=np.ldexp(answer.plan_doubt, exponent),
        dual_doubt=np.ldexp(answer.dual_doubt, exponent),
    )


def scaled(answer: Interval, factor: float, doubt: np.ndarray) -> Interval:
    """The answer with distances times a factor, where lengths are in doubt by `doubt` besides."""
    order, exact = answer.order, 4 * UNIT
    upper = answer.upper * (factor * (1 + exact)) + doubt
    lower = np.maximum(answer.lower * (factor * (1 - exact)) - doubt, 0.0)
    moved = powers_less(upper + doubt, upper, order) + exact ** (1 / order) * upper
    return replace(
        answer,
        value=np.clip(answer.value * factor, lower, upper),
        lower=lower,
        upper=upper,
        f=answer.f * factor**order,
        g=answer.g * factor**order,
        plan_doubt=powers_added(answer.plan_doubt * factor, moved, order),
        dual_doubt=powers_added(answer.dual_doubt * factor, moved, order),
    )


def power_mean(log_weights: np.ndarray, distances: np.ndarray, order: float) -> np.ndarray:
    """(Σ exp(lᵢ) tᵢ^p)^(1/p) along the last axis, also where the sum leaves the number range.

    exp(−900)·1 underflows, and so does (1e-170)²; their roots do not. The largest term is
    scaled out where it has to be.
    """
    with np.errstate(over="ignore"):
        total = np.asarray((np.exp(log_weights) * distances**order).sum(-1))
    found = np.asarray(root(total, order))
    out = (total < 1e-250) | (total == math.inf)
    if not out.any():
        return found
    logs, distances = np.broadcast_arrays(log_weights, distances)
    out &= np.isfinite(distances).all(-1)
    found[out] = _scaled_mean(logs[out], distances[out], order)
    return found


def _lost_to_underflow(
    log_weights: np.ndarray, distances: np.ndarray, mean: np.ndarray
) -> np.ndarray | float:
    """What underflow may take from a power mean: a last place for each length that is not 0."""
    if (mean > 1e-290).all():  # a last place of anything this large is more
        return 0.0
    return 4 * _LEAST * ((distances > 0) & (log_weights > -math.inf)).sum(-1)


def _scaled_mean(logs: np.ndarray, distances: np.ndarray, order: float) -> np.ndarray:
    is_there = (distances > 0) & (logs > -math.inf)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
        terms = np.where(is_there, logs / order + np.log(distances), -math.inf)
        top = terms.argmax(-1)[..., None]
        top_log, top_distance = (np.take_along_axis(t, top, -1) for t in (logs, distances))
        roots = np.exp(np.clip((logs - top_log) / order, -690, 690))
        shares = np.where(is_there, roots * (distances / top_distance), 0.0)
        half = np.exp(top_log / (2 * order))  # its square may underflow where the product does not
        scaled = half * top_distance * half
    total = root((shares**order).sum(-1), order)
    return np.where(is_there.any(-1), scaled[..., 0] * total, 0.0)


def _below(lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """The lower end; ends that are valid are in order."""
    if not (lower <= upper).all():  # NaN as well
        k = np.unravel_index(np.argmax(np.where(lower <= upper, 0, 1)), np.shape(lower))
        raise CertificateError(
            f"expected a lower bound below the upper one, got {float(lower[k]):.17g} and "
            f"{float(upper[k]):.17g} in the problem's unit: a solver or a formula has broken its "
            "promise, or this is a defect of this library"
        )
    return lower


def _feasible(
    problem: Problem, potentials: np.ndarray | tuple[np.ndarray, np.ndarray], slack: float
) -> np.ndarray:
    """f, then g; zeros, which are feasible, in the place of those not finite."""
    if isinstance(potentials, tuple):
        pair = potentials
    else:
        pair = feasible(problem.costs, potentials, problem.b)
    both = np.concatenate(pair, -1)
    finite = np.isfinite(both).all(-1)
    if not finite.all():
        both = np.where(finite[..., None], both, 0.0)
    if pair is potentials:
        _refuse_infeasible(problem, both[..., : problem.n], both[..., problem.n :], slack)
    return both


def _refuse_infeasible(problem: Problem, f: np.ndarray, g: np.ndarray, slack: float) -> None:
    """Look at fᵢ + g_j ≤ C_ij + slack, for all pairs where they are few, or for a sample.

    Raises:
        CertificateError: where it fails by more than rounding.
    """
    order = problem.order
    if problem.pairs <= _ALL_PAIRS:
        looks = [(problem.costs, f[:, None], g)]
    else:
        rows, cols = (
            np.unique(np.r_[np.linspace(0, t.size - 1, _SAMPLE), t.argmax()]).astype(int)
            for t in (f, g)
        )
        looks = [
            (costs_between(problem.x[rows], problem.y, order), f[rows, None], g),
            (costs_between(problem.x, problem.y[cols], order), f[:, None], g[cols]),
        ]
    for costs, mine, theirs in looks:
        excess = mine + theirs - costs
        size = costs + np.abs(mine) + np.abs(theirs)
        allowed = slack + 4 * order * (problem.dim + 8) * UNIT * size + 4 * _tiny(order)
        if not (excess <= allowed).all():
            worst = float((excess - allowed).max())
            raise CertificateError(
                f"potentials: expected fᵢ + g_j ≤ ‖xᵢ − y_j‖^{order} for every pair, got a pair "
                f"that exceeds it by {worst:.3g} in the problem's unit, beyond the slack of "
                f"{slack:.3g} that was stated; take `feasible` or a c-transform"
            )


def _tiny(order: float) -> float:
    """Powers of lengths below it may be lost to underflow."""
    return max(_TINY**order, _NO_MASS)


def _sum_error(count: int) -> float:
    """Units in the last place of a sum of `count` terms: NumPy adds pairwise, 128 in a row."""
    return 24 + math.log2(count + 1)


def _doubts(problem: Problem, added: float = 0.0) -> np.ndarray:
    """Bounds of the errors of the computed weights, and of `added` more units of them."""
    few = _sum_error(max(problem.n, problem.m)) + 8 + added
    return problem.weights * ((few - 2 * problem.logs) * UNIT) + _NO_MASS


def _settled(problem: Problem, plan: SparsePlan) -> SparsePlan:
    """The plan without NaN and infinite masses, and exact where it permutes atoms of equal weight.

    A permutation has the marginals of the problem to the last bit. The masses that a simplex
    returns do not, and their errors would be added to the cost.
    """
    count, n = problem.log_a.shape[:-1], problem.n
    if not plan.rows.shape[-1]:
        none = np.zeros((*count, 1), np.int64)
        plan = SparsePlan(none, none, none - math.inf, plan.log_doubt)
    logs = np.where(plan.log_mass < 700, plan.log_mass, -math.inf)  # NaN as well
    plan = SparsePlan(plan.rows, plan.cols, logs, np.full(count, plan.log_doubt))
    if n != problem.m or logs.shape[-1] < n:
        return plan
    is_asked = plan.log_doubt == _MEASURED
    is_asked &= problem.log_a.min(-1) == problem.log_b.min(-1)  # or they do not permute
    if not is_asked.any():
        return plan
    rows, cols, sigma, index = plan.rows, plan.cols, np.full((*count, n), -1), np.arange(n)
    if logs.shape[-1] > n:  # the last, largest, entry of each row stays
        order = np.argsort(logs, -1, kind="stable")
        rows, cols = taken(rows, order), taken(cols, order)
    sigma.reshape(-1)[_flat(rows, n)] = cols
    found = is_asked & (np.sort(sigma, -1) == index).all(-1)
    found &= (problem.log_a == taken(problem.log_b, sigma)).all(-1)
    if not found.any():
        return plan
    if found.all():
        exact = np.full(count, _EXACT)
        return SparsePlan(np.zeros_like(sigma) + index, sigma, problem.logs_a, exact)
    here, (rows, cols, logs) = found[..., None], (np.array(t) for t in plan[:3])
    matched = ((rows, index), (cols, sigma), (logs, problem.logs_a))
    for held, matching in matched:
        held[..., :n] = np.where(here, matching, held[..., :n])
    logs[..., n:] = np.where(here, -math.inf, logs[..., n:])
    return SparsePlan(rows, cols, logs, np.where(found, _EXACT, plan.log_doubt))


def _misplaced(
    problem: Problem, plan: SparsePlan, moved: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The largest cost of repairing the plan's marginals: of errors measured, and of rounding.

    Rows, then columns, that hold too much are scaled down, and what is missing is sent through
    the centre z: ‖x − y‖^p ≤ P(x) + P(y) with P = 2^{p−1} ‖· − z‖^p. Mass taken off a column
    that holds too much leaves its row short; P(xᵢ) ≤ 4^{p−1} (C_ij + ‖y_j − z‖^p) pays for it.
    No pair costs more than the diameter does, and so no atom: of large orders that is far less.
    """
    order, doubt = problem.order, np.asarray(plan.log_doubt)
    if (doubt == _EXACT).all():
        return np.zeros(doubt.shape), np.zeros(doubt.shape)
    measured, farthest = doubt == _MEASURED, problem.diameter**order
    with np.errstate(over="ignore"):
        stated = np.exp(np.where(measured, -math.inf, doubt)) * farthest
    mass, count = np.exp(plan.log_mass), problem.n + problem.m
    index = _flat(np.concatenate([plan.rows, problem.n + plan.cols], -1), count).ravel()
    held, spent, entries = (  # of each row, then of each column
        np.bincount(index, np.concatenate([t, t], -1).ravel(), problem.weights.size)
        for t in (mass, mass * moved**order, mass > 0)
    )
    held, spent, entries = (t.reshape(problem.weights.shape) for t in (held, spent, entries))
    centre = (problem.a[..., None] * problem.x).sum(-2, keepdims=True)
    away = row_norms(np.concatenate([problem.x - centre, problem.y - centre], -2))
    growth, most = 4.0 ** (order - 1), farthest[..., None]
    mean = np.minimum(spent / np.maximum(held, _NO_MASS), most)
    price = np.minimum((4 * away) ** order / 4 + (growth - 1) * mean, most) * (1 + 1e-9)
    missing = (np.abs(problem.weights - held) * price).sum(-1)
    rounding = ((_doubts(problem) + 2 * entries * UNIT * held) * price).sum(-1)
    rounding += growth * _LOST if order > 2 else 0.0
    return np.where(measured, missing, 0.0), np.where(measured, rounding, stated)


def _flat(index: np.ndarray, size: int) -> np.ndarray:
    """An index into rows of a size, problem by problem, as one into all of them in a row."""
    return index if index.ndim == 1 else index + size * np.arange(len(index))[:, None]


def _dual(problem: Problem, potentials: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """⟨a, f⟩ + ⟨b, g⟩ of f, then g, and what rounding may have added to it."""
    dual = (problem.weights * potentials).sum(-1)
    added = _sum_error(problem.n + problem.m) + 8
    lost = (_doubts(problem, added) * np.abs(potentials)).sum(-1)
    # Costs are right to p (d + 4) u, and potentials feasible for costs as they are computed.
    lost += max(2, problem.order) * (problem.dim + 8) * UNIT * np.abs(dual) + _tiny(problem.order)
    return dual, lost


def _one_sided(problem: Problem, f: np.ndarray, g: np.ndarray, error: np.ndarray) -> np.ndarray:
    """A lower bound where one potential is 0: nothing cancels, so rounding is relative.

    The other is then the cost of reaching the nearest point of the other cloud.
    """
    best = np.zeros(f.shape[:-1])
    for mine, other, logs in ((f, g, problem.logs_a), (g, f, problem.logs_b)):
        fits = (other == 0).all(-1)  # a negative potential may be 0: costs are not negative
        safe = root(np.where(mine > _tiny(problem.order), mine, 0.0), problem.order)
        best = np.maximum(best, np.where(fits, power_mean(logs, safe, problem.order), 0.0))
    return best * (1 - 2 * error)
