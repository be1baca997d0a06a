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
that are not feasible are a `CertificateError`, and so are ends the wrong way round. A theorem that
calls a plan optimal is believed where the potentials that it comes with agree.

Every function takes one problem or a batch of them (leading axes).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from meanfield.errors import CertificateError
from meanfield.transport.problem import UNIT, Problem, costs_between, row_norms, taken

_EXACT, _MEASURED = -math.inf, math.inf
_TINY = 1e-150  # of the unit: lengths below it may be lost to underflow of their squares
_NO_MASS = 1e-300  # weights below it have no right digits
_LENGTHS = ("primal", "dual", "plan_doubt", "dual_doubt")
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
class Certified:
    """lower ≤ W_p ≤ upper in the unit of its problem, with plan and feasible potentials.

    Leading axes are those of the problem; `f` and `g` are None where none were made.

    Attributes:
        primal: cost of the plan with the repair of its marginals; its p-th root, as all of these.
        dual: ⟨a, f⟩ + ⟨b, g⟩ less the slack of f and g, with its sign; of a plan that a theorem
            calls optimal its cost.
        plan_doubt: what rounding in this problem may have done to the power of `primal`.
        dual_doubt: likewise to `dual`. What pricing leaves open is no rounding: it is in the
            interval alone, and keeps the two apart.
    """

    value: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    rows: np.ndarray
    cols: np.ndarray
    log_mass: np.ndarray
    f: np.ndarray | None
    g: np.ndarray | None
    method: str
    converged: np.ndarray
    primal: np.ndarray
    dual: np.ndarray
    plan_doubt: np.ndarray
    dual_doubt: np.ndarray
    order: float

    @property
    def width(self) -> np.ndarray:
        """Relative width of the interval."""
        upper = np.where(self.upper > 0, self.upper, 1.0)
        return np.where(self.upper > 0, (self.upper - self.lower) / upper, 0.0)

    def __getitem__(self, index: Any) -> Certified:
        """Some answers of the batch."""
        held = {name: getattr(self, name) for name in self.arrays()}
        return replace(self, **{k: t[index] for k, t in held.items() if t is not None})

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
    f = (costs - g[..., None, :]).min(-1)
    return f, (costs - f[..., :, None]).min(-2)


def centred(g: np.ndarray, b: np.ndarray) -> np.ndarray:
    """g less its median by mass."""
    order = np.argsort(g, -1)
    mass = np.cumsum(taken(b, order), -1)
    middle = (mass < mass[..., -1:] / 2).sum(-1, keepdims=True)
    with np.errstate(invalid="ignore"):  # ∞ − ∞, of a wrong solver
        return g - taken(g, taken(order, middle))


def certified(
    problem: Problem,
    plan: SparsePlan,
    potentials: tuple[np.ndarray, np.ndarray] | None,
    *,
    method: str,
    rtol: float,
    slack: float = 0.0,
    is_optimal: bool = False,
) -> Certified:
    """The interval of a plan and of potentials that are feasible up to rounding and `slack`.

    Args:
        problem: one problem or a batch.
        plan: any plan; misplaced mass is paid for.
        potentials: f (..., n) and g (..., m), from `feasible` or from a c-transform.
        method: what to call the answer.
        rtol: plan and potentials that meet this closely (beyond what rounding of the weights
            and points leaves open, which is in the interval) are `converged`.
        slack: how far fᵢ + g_j may lie above C_ij.
        is_optimal: a theorem says that no plan with the marginals of this one costs less.
    """
    order = problem.order
    plan = _settled(problem, plan, may_match=not is_optimal)
    moved = problem.moved(plan.rows, plan.cols)
    value = power_mean(plan.log_mass, moved, order)
    error = _relative_error(problem, plan.rows.shape[-1])
    missing, plan_doubt = _misplaced(problem, plan, moved)
    reach = np.asarray(missing + plan_doubt) ** (1 / order)
    upper = powers_added(value * (1 + error), reach, order) * (1 + 4 * UNIT)
    primal = powers_added(value, missing ** (1 / order), order)
    plan_doubt = plan_doubt ** (1 / order)
    f, g = _finite(problem, potentials)
    _refuse_infeasible(problem, f, g, slack)
    gained, lost = _dual(problem, f, g)
    lower = np.maximum(gained - lost - slack, 0.0) ** (1 / order) * (1 - 4 * UNIT)
    dual, highest = (_signed_root(gained + t, order) for t in (-slack, slack))
    dual_doubt = lost ** (1 / order)
    lower = np.maximum(lower, _one_sided(problem, f, g, error, slack))
    if is_optimal:
        # A theorem speaks of the plan; the potentials that it comes with must not contradict it.
        is_known = np.asarray(plan.log_doubt) < _MEASURED
        is_known &= _meet(order, rtol, primal, highest, plan_doubt, dual_doubt)
        certain = powers_less(value * (1 - error), reach, order)
        lower = np.maximum(lower, np.where(is_known, certain, 0))
        dual = np.where(is_known, np.maximum(primal, dual), dual)
        dual_doubt = np.where(is_known, 0.0, dual_doubt)
    return Certified(
        value=np.clip(value, lower, upper),
        lower=_below(lower, upper),
        upper=upper,
        rows=plan.rows,
        cols=plan.cols,
        log_mass=plan.log_mass,
        f=None if potentials is None else f,
        g=None if potentials is None else g,
        method=method,
        converged=_closed(lower, upper, rtol)
        | _meet(order, rtol, primal, dual, plan_doubt, dual_doubt) & (potentials is not None),
        primal=primal,
        dual=dual,
        plan_doubt=plan_doubt,
        dual_doubt=dual_doubt,
        order=order,
    )


def _meet(
    order: float, rtol: float, primal: np.ndarray, dual: np.ndarray, *doubts: np.ndarray
) -> np.ndarray:
    """Whether s^p − t^p ≤ p rtol s^p + Σ doubts^p: plan and potentials meet up to rounding."""
    top = np.maximum(primal, np.abs(dual))
    top = np.where(top > 0, top, 1.0)
    with np.errstate(over="ignore"):
        paid, gained, *open_by = (np.abs(t / top) ** order for t in (primal, dual, *doubts))
    return paid - np.sign(dual) * gained <= order * rtol * paid + sum(open_by)


def _signed_root(power: np.ndarray, order: float) -> np.ndarray:
    return np.sign(power) * np.abs(power) ** (1 / order)


def _closed(lower: np.ndarray, upper: np.ndarray, rtol: float) -> np.ndarray:
    return upper - lower <= rtol * upper


def narrower(one: Certified, other: Certified | None, rtol: float) -> Certified:
    """The better plan with the better potentials: the intersection of two valid intervals.

    It is converged if this plan and these potentials meet, or if one of the two answers has and
    the interval that is left is no wider than rounding explains there.
    """
    if other is None:
        return one
    plan = one if one.upper <= other.upper else other
    dual = one if one.lower >= other.lower else other
    order = plan.order
    met = _meet(order, rtol, plan.primal, dual.dual, plan.plan_doubt, dual.dual_doubt)
    for answer in (one, other):
        doubts = (answer.plan_doubt, answer.dual_doubt) * 2
        met = met | answer.converged & _meet(order, rtol, plan.upper, dual.lower, *doubts)
    return replace(
        plan,
        value=np.clip(plan.value, dual.lower, plan.upper),
        lower=_below(dual.lower, plan.upper),
        f=dual.f,
        g=dual.g,
        dual=dual.dual,
        dual_doubt=dual.dual_doubt,
        converged=_closed(dual.lower, plan.upper, rtol) | met,
    )


def combined(
    log_masses: np.ndarray, parts: np.ndarray, order: float, *, log_error: float = 0.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(value, lower, upper) of parts of given masses that exchange nothing.

    Args:
        log_masses: log θ_k, shape (k,).
        parts: value, lower and upper of each part, shape (3, k).
        order: p.
        log_error: by how much the log-masses themselves are in doubt.
    """
    value, lower, upper = (power_mean(log_masses, t, order) for t in parts)
    largest = float(np.abs(log_masses).max(initial=0.0, where=log_masses > -math.inf))
    error = log_error + (32 + 2 * largest + _sum_error(log_masses.shape[-1])) * UNIT
    return value, lower * (1 - error), upper * (1 + error)


class Part(NamedTuple):
    """Answers of problems of one shape (k of them) inside a larger one, and where they stand."""

    answer: Certified
    rows: np.ndarray  # atoms of μ, (k, n)
    cols: np.ndarray  # atoms of ν, (k, m)
    log_masses: np.ndarray  # of each problem, (k,)


def united(
    parts: Sequence[Part], shape: tuple[int, int], order: float, *, log_error: float = 0.0
) -> Certified:
    """One problem of n × m atoms from its parts, which exchange nothing; as `combined`."""
    answers = [part.answer for part in parts]
    ends = [[t.value, t.lower, t.upper] for t in answers]
    logs = np.concatenate([part.log_masses for part in parts])
    value, lower, upper = combined(logs, np.concatenate(ends, -1), order, log_error=log_error)
    f, g = (np.zeros(size) for size in shape)
    has_potentials = not any(t.f is None or t.g is None for t in answers)
    entries = []
    for t, rows, cols, log_mass in parts:
        there = t.log_mass > -math.inf
        i, j = np.take_along_axis(rows, t.rows, -1), np.take_along_axis(cols, t.cols, -1)
        entries.append((i[there], j[there], (t.log_mass + log_mass[:, None])[there]))
        if has_potentials:
            f[rows], g[cols] = t.f, t.g
    i, j, log_mass = (np.concatenate(t) for t in zip(*entries, strict=True))
    return Certified(
        value=np.clip(value, lower, upper),
        lower=lower,
        upper=upper,
        rows=i,
        cols=j,
        log_mass=log_mass,
        f=f if has_potentials else None,
        g=g if has_potentials else None,
        method=joined_names(answers),
        converged=np.asarray(all(t.converged.all() for t in answers)),
        order=order,
        **{name: _shared(logs, answers, name, order) for name in _LENGTHS},
    )


def _shared(logs: np.ndarray, answers: Sequence[Certified], name: str, order: float) -> np.ndarray:
    """(Σ θ_k t_k^p)^(1/p), of parts of both signs."""
    each = np.concatenate([getattr(t, name) for t in answers])
    for_it, against = (power_mean(logs, np.maximum(t, 0), order) for t in (each, -each))
    if not against.any():
        return for_it
    return _signed_root(for_it**order - against**order, order)


def joined_names(answers: Sequence[Certified]) -> str:
    """The methods that occur."""
    return " + ".join(sorted({name for t in answers for name in t.method.split(" + ")}))


def in_unit(answer: Certified, exponent: np.ndarray, order: float) -> Certified:
    """The answer with distances times 2^exponent; ends rounded outward where that underflows."""
    low, value, high = (np.ldexp(t, exponent) for t in (answer.lower, answer.value, answer.upper))
    low = np.where((low > 0) & (low < 1e-290), np.nextafter(low, 0.0), low)
    high = np.where((answer.upper > 0) & (high < 1e-290), np.nextafter(high, 1.0), high)
    f, g, value = answer.f, answer.g, np.clip(value, low, high)
    if f is not None and g is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            f, g = (t * np.exp2(order * np.asarray(exponent, float)[..., None]) for t in (f, g))
        if not (np.isfinite(f).all() and np.isfinite(g).all()):  # squares beyond 1e308
            f = g = None
    lengths = {name: np.ldexp(getattr(answer, name), exponent) for name in _LENGTHS}
    return replace(answer, value=value, lower=low, upper=high, f=f, g=g, **lengths)


def scaled(answer: Certified, factor: float, doubt: np.ndarray) -> Certified:
    """The answer with distances times a factor, where lengths are in doubt by `doubt` besides."""
    order, exact = answer.order, 4 * UNIT
    lengths = {name: getattr(answer, name) * factor for name in _LENGTHS}
    upper = answer.upper * (factor * (1 + exact)) + doubt
    lower = np.maximum(answer.lower * (factor * (1 - exact)) - doubt, 0.0)
    for name in ("plan_doubt", "dual_doubt"):
        moved = powers_less(upper + doubt, upper, order) + exact ** (1 / order) * upper
        lengths[name] = powers_added(lengths[name], moved, order)
    f, g = (None if t is None else t * factor**order for t in (answer.f, answer.g))
    value = np.clip(answer.value * factor, lower, upper)
    return replace(answer, value=value, lower=lower, upper=upper, f=f, g=g, **lengths)


def log_masses(masses: np.ndarray) -> np.ndarray:
    """Logarithms of a solver's masses; −inf where they are not positive."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(masses > 0, np.log(masses), -math.inf)


def power_mean(log_weights: np.ndarray, distances: np.ndarray, order: float) -> np.ndarray:
    """(Σ exp(lᵢ) tᵢ^p)^(1/p) along the last axis, also where the sum underflows.

    exp(−900)·1 underflows, and so does (1e-170)²; their roots do not. The largest term is
    scaled out where it has to be.
    """
    logs, distances = np.broadcast_arrays(log_weights, distances)
    total = np.asarray((np.exp(logs) * distances**order).sum(-1))
    small = total < 1e-250
    if not small.any():
        return total ** (1 / order)
    found = np.asarray(total ** (1 / order))
    found[small] = _scaled_mean(logs[small], distances[small], order)
    return found


def powers_added(one: np.ndarray, other: np.ndarray, order: float) -> np.ndarray:
    """(s^p + t^p)^(1/p) without underflow."""
    if order in (1, 2):
        return np.hypot(one, other) if order == 2 else np.add(one, other)
    top, least = np.maximum(one, other), np.minimum(one, other)
    share = np.divide(least, top, out=np.zeros(np.shape(top)), where=np.isfinite(top) & (top > 0))
    return top * (1 + share**order) ** (1 / order)


def powers_less(whole: np.ndarray, taken: np.ndarray, order: float) -> np.ndarray:
    """(s^p − t^p)^(1/p), rounded down, 0 where that is negative."""
    left = np.maximum(whole - taken, 0)
    if order in (1, 2):
        return (np.sqrt(left) * np.sqrt(whole + taken) if order == 2 else left) * (1 - 8 * UNIT)
    share = np.divide(taken, whole, out=np.ones(np.shape(left)), where=left > 0)
    # A power of a quotient right to u is right to (p + 1) u.
    rest = np.maximum(1 - share**order - 4 * (order + 1) * UNIT, 0)
    return whole * rest ** (1 / order) * (1 - 8 * UNIT)


def _scaled_mean(logs: np.ndarray, distances: np.ndarray, order: float) -> np.ndarray:
    is_there = (distances > 0) & (logs > -math.inf)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
        terms = np.where(is_there, logs / order + np.log(distances), -math.inf)
        top = terms.argmax(-1)[..., None]
        top_log, top_distance = (np.take_along_axis(t, top, -1) for t in (logs, distances))
        roots = np.exp(np.clip((logs - top_log) / order, -690, 690))
        shares = np.where(is_there, roots * (distances / top_distance), 0.0)
        scaled = np.exp(top_log / order) * top_distance
    total = (shares**order).sum(-1) ** (1 / order)
    return np.where(is_there.any(-1), scaled[..., 0] * total, 0.0)


def _below(lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """The lower end; ends that are valid are in order."""
    if not np.all(lower <= upper):  # NaN as well
        k = np.unravel_index(np.argmax(np.where(lower <= upper, 0, 1)), np.shape(lower))
        raise CertificateError(
            f"expected a lower bound below the upper one, got {float(lower[k]):.17g} and "
            f"{float(upper[k]):.17g} in the problem's unit: a solver or a formula has broken its "
            "promise, or this is a defect of this library"
        )
    return lower


def _refuse_infeasible(problem: Problem, f: np.ndarray, g: np.ndarray, slack: float) -> None:
    """Look at fᵢ + g_j ≤ C_ij + slack, for all pairs where they are few, or for a sample.

    Raises:
        CertificateError: where it fails by more than rounding.
    """
    order, n, m = problem.order, problem.n, problem.m
    if problem.x.ndim > 2 or problem.pairs <= _ALL_PAIRS:
        looks = [(problem.costs, f[..., :, None], g[..., None, :])]
    else:
        some = np.unique(np.r_[np.linspace(0, n - 1, _SAMPLE).astype(int), f.argmax()])
        others = np.unique(np.r_[np.linspace(0, m - 1, _SAMPLE).astype(int), g.argmax()])
        rows = costs_between(problem.x[some], problem.y, order)
        cols = costs_between(problem.x, problem.y[others], order)
        looks = [(rows, f[some, None], g), (cols, f[:, None], g[others])]
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


def _relative_error(problem: Problem, count: int) -> np.ndarray:
    """Of a power mean of `count` lengths."""
    largest = np.maximum(np.abs(problem.logs_a).max(-1), np.abs(problem.logs_b).max(-1))
    return (_sum_error(count) + 2 * problem.dim + 24 + 2 * largest) * UNIT


def _doubts(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Bounds of the errors of the computed weights."""
    few = _sum_error(max(problem.n, problem.m)) + 8
    sides = ((problem.a, problem.logs_a), (problem.b, problem.logs_b))
    first, second = (w * ((few + 2 * np.abs(logs)) * UNIT) + _NO_MASS for w, logs in sides)
    return first, second


def _settled(problem: Problem, plan: SparsePlan, *, may_match: bool) -> SparsePlan:
    """The plan without NaN and infinite masses, and exact where it permutes atoms of equal weight.

    A permutation has the marginals of the problem to the last bit. The masses that a simplex
    returns do not, and their errors would be added to the cost.
    """
    count = problem.log_a.shape[:-1]
    if not plan.rows.shape[-1]:
        none = np.zeros((*count, 1), np.int64)
        plan = SparsePlan(none, none, none - math.inf, plan.log_doubt)
    logs = np.where(plan.log_mass < 700, plan.log_mass, -math.inf)  # NaN as well
    doubt = np.full(count, plan.log_doubt)
    plan = SparsePlan(plan.rows, plan.cols, logs, doubt)
    n = problem.n
    if not may_match or n != problem.m or logs.shape[-1] < n or not (doubt == _MEASURED).any():
        return plan
    if not (np.sort(problem.log_a, -1) == np.sort(problem.log_b, -1)).all(-1).any():
        return plan
    sigma = np.full((*count, n), -1)
    order = np.argsort(logs, -1, kind="stable")
    rows, cols = (taken(t, order) for t in (plan.rows, plan.cols))
    np.put_along_axis(sigma, rows, cols, -1)  # the last, largest, entry of each row stays
    index = np.arange(n)
    found = (np.sort(sigma, -1) == index).all(-1) & (doubt == _MEASURED)
    found &= (problem.log_a == taken(problem.log_b, sigma)).all(-1)
    if not found.any():
        return plan
    here, (rows, cols, logs) = found[..., None], (np.array(t) for t in plan[:3])
    matched = ((rows, index), (cols, sigma), (logs, problem.logs_a))
    for held, exact in matched:
        held[..., :n] = np.where(here, exact, held[..., :n])
    logs[..., n:] = np.where(here, -math.inf, logs[..., n:])
    return SparsePlan(rows, cols, logs, np.where(found, _EXACT, doubt))


def _misplaced(
    problem: Problem, plan: SparsePlan, moved: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The largest cost of repairing the plan's marginals: of errors measured, and of rounding.

    Rows, then columns, that hold too much are scaled down, and what is missing is sent through
    the centre z: ‖x − y‖^p ≤ P(x) + P(y) with P = 2^{p−1} ‖· − z‖^p. Mass taken off a column
    that holds too much leaves its row short; P(xᵢ) ≤ 4^{p−1} (C_ij + ‖y_j − z‖^p) pays for it.
    """
    order, doubt = problem.order, np.asarray(plan.log_doubt)
    with np.errstate(over="ignore"):
        stated = np.exp(np.where(doubt == _MEASURED, -math.inf, doubt)) * problem.diameter**order
    measured = doubt == _MEASURED
    if not measured.any():
        return np.zeros_like(stated), stated
    mass = np.exp(plan.log_mass)
    paid = mass * moved**order
    centre = (problem.a[..., None] * problem.x).sum(-2, keepdims=True)
    growth = 4.0 ** (order - 1)
    missing, rounding = np.zeros_like(stated), np.zeros_like(stated)
    sides = (
        (plan.rows, problem.a, problem.x, _doubts(problem)[0]),
        (plan.cols, problem.b, problem.y, _doubts(problem)[1]),
    )
    for index, weights, points, in_doubt in sides:
        held, spent = (_summed(t, index, weights.shape[-1]) for t in (mass, paid))
        entries = _summed((mass > 0).astype(float), index, weights.shape[-1])
        mean = np.minimum(spent / np.maximum(held, _NO_MASS), problem.diameter[..., None] ** order)
        price = (growth * row_norms(points - centre) ** order + (growth - 1) * mean) * (1 + 1e-9)
        missing = missing + (np.abs(weights - held) * price).sum(-1)
        rounding = rounding + ((in_doubt + 2 * entries * UNIT * held) * price).sum(-1)
    return np.where(measured, missing, 0.0), np.where(measured, rounding, stated)


def _summed(values: np.ndarray, index: np.ndarray, size: int) -> np.ndarray:
    """Sums of values by index, problem by problem."""
    if index.ndim == 1:
        return np.bincount(index, values, size)
    offset = size * np.arange(len(index))[:, None]
    return np.bincount((offset + index).ravel(), values.ravel(), size * len(index)).reshape(
        -1, size
    )


def _finite(
    problem: Problem, potentials: tuple[np.ndarray, np.ndarray] | None
) -> tuple[np.ndarray, np.ndarray]:
    """f and g; zeros, which are feasible, in the place of none and of those not finite."""
    f, g = potentials or (np.zeros_like(problem.a), np.zeros_like(problem.b))
    finite = np.isfinite(f).all(-1) & np.isfinite(g).all(-1)
    if finite.all():
        return f, g
    return np.where(finite[..., None], f, 0.0), np.where(finite[..., None], g, 0.0)


def _dual(problem: Problem, f: np.ndarray, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """⟨a, f⟩ + ⟨b, g⟩ and what rounding may have added to it."""
    doubt_f, doubt_g = _doubts(problem)
    gain_f, gain_g = problem.a * f, problem.b * g
    dual = gain_f.sum(-1) + gain_g.sum(-1)
    size = np.abs(gain_f).sum(-1) + np.abs(gain_g).sum(-1)
    lost = (doubt_f * np.abs(f)).sum(-1) + (doubt_g * np.abs(g)).sum(-1)
    lost += (_sum_error(problem.n + problem.m) + 8) * UNIT * size
    # Costs are right to p (d + 4) u, and potentials feasible for costs as they are computed.
    lost += max(2, problem.order) * (problem.dim + 8) * UNIT * np.abs(dual) + _tiny(problem.order)
    return dual, lost


def _one_sided(
    problem: Problem, f: np.ndarray, g: np.ndarray, error: np.ndarray, slack: float
) -> np.ndarray:
    """A lower bound where one potential is 0: nothing cancels, so rounding is relative.

    The other is then the cost of reaching the nearest point of the other cloud.
    """
    best = np.zeros(f.shape[:-1])
    if slack:
        return best
    for mine, other, logs in ((f, g, problem.logs_a), (g, f, problem.logs_b)):
        fits = (other == 0).all(-1)  # a negative potential may be 0: costs are not negative
        if fits.any():
            safe = np.where(mine > _tiny(problem.order), mine, 0.0) ** (1 / problem.order)
            best = np.maximum(best, np.where(fits, power_mean(logs, safe, problem.order), 0.0))
    return best * (1 - 2 * error)
