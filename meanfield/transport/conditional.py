"""Conditional W₂: transport that keeps positions, or pays for changing them [CAP24, HHT23]."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from meanfield.checks import (
    as_float_tensor,
    check_finite,
    check_positioned,
    check_same_labels,
    describe,
    number,
    to_host,
)
from meanfield.habits import with_hints
from meanfield.measure_arguments import MASS_TOLERANCE
from meanfield.measures import ParticleMeasure, check_measure
from meanfield.transport.certificate import Interval, Part, scaled, united, without_plan
from meanfield.transport.pairs import Measure, Measures, Pair, as_measures, points_of
from meanfield.transport.problem import UNIT, Problem, normalised_logs, row_norms
from meanfield.transport.result import TransportResult, gathered
from meanfield.transport.solve import Settings, extended, finished, solve_arrays


@with_hints
def solve_conditional_w2(
    mu: Measure,
    nu: Measure,
    *,
    conditions: tuple[Any, Any] | None = None,
    penalty: float | None = None,
    method: str = "auto",
    rtol: float = 1e-9,
    exact_weights: bool = False,
    strict: bool = True,
) -> TransportResult:
    """d₂(μ̄, ν̄) = (∫ W₂(μˢ, νˢ)² dθ(s))^½ with a certified interval.

    With a penalty λ mass may change its condition at a price:
    d₂,λ(μ̄, ν̄)² = min over couplings of Σ π_ij (‖xᵢ − y_j‖² + λ ‖sᵢ − t_j‖²). That is W₂ of the
    points at λ = 0, grows with λ, and tends to d₂ as λ → ∞. Between samples of continuous
    conditions, no two of which are equal, it is the distance that is finite.

    Args:
        mu: positioned measure μ̄ (batch axes broadcast); with `conditions`, anything that
            `solve_w2` takes.
        nu: ν̄ with the same first marginal θ; if the marginals differ the distance is +∞, which
            is a value and not an error. With a penalty they may differ. Masses of a position
            that agree within 1e-8, in single precision 1e-5, are equal, whatever
            `exact_weights`; by how much they differ is in the interval.
        conditions: (s, t) in the place of positions: numbers (..., n) and (..., m), or vectors
            (..., n, k) and (..., m, k) of any dimension k.
        penalty: λ ≥ 0, in squared units of the points over those of the conditions; None or
            infinity forbids every change of condition. A power of four rounds nothing; others
            round the points once, which is in the interval.
        method: "auto", or a solver for every position by name.
        rtol: how closely plans and potentials must meet at every position.
        exact_weights: as for `solve_w2`, at every position.
        strict: raise if they do not; otherwise the answer comes back flagged.

    Returns:
        Distance in the unit of the points; interval, coupling of the points (without a penalty
        inside conditions only), potentials (feasible for the cost with its penalty, or inside
        conditions). ``coupling.sample(size)`` draws pairs, and says by `rows` and `cols` which
        conditions they have.

    Raises:
        ValueError: measures without positions, positions that differ in their last digits alone,
            and what `solve_w2` refuses.
        ConvergenceError: under `strict`, when `rtol` is not met.

    Example:
        >>> mu = ParticleMeasure([[0.0], [1.0]], positions=[0.5, 1.0])
        >>> nu = ParticleMeasure([[1.0], [0.0]], positions=[0.5, 1.0])
        >>> solve_conditional_w2(mu, nu).value
        tensor(1., dtype=torch.float64)
        >>> solve_conditional_w2(mu, nu, penalty=0.0).value
        tensor(0., dtype=torch.float64)
    """
    settings = Settings(method=method, rtol=rtol, exact_weights=exact_weights, strict=strict)
    given = conditioned_pair(mu, nu, conditions)
    return solved_by_condition(*given, penalty, settings)


def conditioned_pair(
    mu: Measure, nu: Measure, conditions: tuple[Any, Any] | None
) -> tuple[Measures, Tensor, Tensor]:
    """Two measures, and of their atoms `conditions`, or positions, (..., n, k) and (..., m, k)."""
    if conditions is None:
        for name, measure in (("mu", mu), ("nu", nu)):
            check_positioned(check_measure(measure, name), name)
        both = as_measures(mu, nu)
        given = [t.positions[..., None] for t in both[:2] if t.positions is not None]
    else:
        if not isinstance(conditions, (tuple, list)) or len(conditions) != 2:
            raise ValueError(
                f"conditions: expected a pair (s, t) of arrays, got {describe(conditions)}"
            )
        both = as_measures(mu, nu)
        if any(isinstance(t, Tensor) for t in conditions):  # may have a gradient, as weights may
            both = both._replace(as_numpy=False)
        for name, own, value in zip(("mu", "nu"), (mu, nu), conditions, strict=True):
            check_same_labels(points_of(own), name, value, f"conditions of {name}")
        named = zip(("mu", "nu"), conditions, both[:2], strict=True)
        given = [_conditions(value, measure, name) for name, value, measure in named]
        if given[0].shape[-1] != given[1].shape[-1]:
            raise ValueError(
                "conditions: expected one dimension k, got "
                f"{given[0].shape[-1]} for mu and {given[1].shape[-1]} for nu"
            )
    s, t = (t.double() for t in given)
    return both, s, t


def flat_conditions(conditions: Tensor) -> np.ndarray:
    """(..., n, k) as an array (B, n, k)."""
    return to_host(conditions).reshape(-1, *conditions.shape[-2:])


def _conditions(value: Any, measure: ParticleMeasure, name: str) -> Tensor:
    """Conditions of the atoms of a measure, (*batch, n, k)."""
    _refuse_large_integers(value, f"conditions of {name}")
    # Of double precision beside points in single too: other numbers are other conditions.
    found = as_float_tensor(value, f"conditions of {name}", like=measure.points[..., :1].double())
    check_finite(found, f"conditions of {name}")
    n = measure.n_particles
    is_number = found.ndim and found.shape[-1] == n and found.shape[-2:-1] != (n,)
    if is_number or found.shape == (*measure.batch_shape, n):
        found = found[..., None]
    if found.ndim < 2 or found.shape[-2] != n:
        raise ValueError(
            f"conditions of {name}: expected one number or vector for each of its {n} atoms, "
            f"shape (..., {n}) or (..., {n}, k), got {tuple(found.shape)}"
        )
    batch = tuple(measure.batch_shape)
    try:
        return found.expand(*batch, n, found.shape[-1])
    except RuntimeError:
        raise ValueError(
            f"conditions of {name}: expected the batch axes of its points, {batch}, got "
            f"{tuple(found.shape[:-2])}"
        ) from None


def _refuse_large_integers(value: Any, name: str) -> None:
    """Integers that double precision does not tell apart, as hashes."""
    pandas: Any = sys.modules.get("pandas")  # whoever has a frame has imported it
    if pandas is not None and isinstance(value, pandas.DataFrame):
        for column in value:  # of several kinds NumPy makes floats
            _refuse_large_integers(value[column].to_numpy(), name)
        return
    try:  # lists may mix them with others, of which NumPy makes floats
        mixed = None if isinstance(value, (np.ndarray, Tensor)) else object
        found = to_host(value) if isinstance(value, Tensor) else np.asarray(value, mixed)
    except (ValueError, TypeError, RuntimeError):
        return  # no array of numbers, which is said elsewhere
    if found.dtype.kind == "O":
        # By their items: NumPy counts its time differences among its integers.
        given = (t.item() if isinstance(t, (Tensor, np.integer)) else t for t in found.flat)
        largest = max((abs(t) for t in given if isinstance(t, int)), default=0)
    else:
        counted = found.dtype.kind in "iu" and found.size
        largest = max(abs(int(found.max())), abs(int(found.min()))) if counted else 0
    if largest > 2**53:
        raise ValueError(
            f"{name}: expected integers up to 2⁵³, which float64 tells apart, got larger ones; "
            "number them anew, as numpy.unique(..., return_inverse=True) does"
        )


def solved_by_condition(
    measures: Measures, s: Tensor, t: Tensor, penalty: float | None, settings: Settings
) -> TransportResult:
    """The conditional distance of a pair with conditions, or of a batch of pairs."""
    pair, (u, v) = measures.pair, map(flat_conditions, (s, t))
    price = math.inf if penalty is None else number(penalty, "penalty", least=0, finite=False)
    settings = replace(settings, device=pair.device)
    if price < math.inf:
        answer = _solve_penalised(pair, u, v, price, settings)
    else:
        tolerance = MASS_TOLERANCE[measures.mu.dtype]
        answers = [
            _solve_case(Problem(*case), mine, theirs, settings, tolerance)[None]
            for *case, mine, theirs in zip(*pair.flat, u, v, strict=True)
        ]
        shape = pair.x.shape[-2], pair.y.shape[-2]
        empty = without_plan(np.zeros(0), "empty batch", *shape)
        answer = gathered(answers) if answers else empty
    return finished(pair, answer, settings, conditional=True)


def _solve_penalised(
    pair: Pair, s: np.ndarray, t: np.ndarray, penalty: float, settings: Settings
) -> Interval:
    """W₂ of the points (x, √λ s), in units in which as little as possible is rounded.

    λ = 4^e r with 1 ≤ r < 4: conditions are multiplied by 2^e, which rounds nothing, and points
    divided by √r, so that a large λ cannot round the points away.
    """
    x, y, log_a, log_b = pair.flat
    if penalty == 0:
        return solve_arrays(x, y, log_a, log_b, settings)
    power = (math.frexp(penalty)[1] - 1) // 2
    root = math.sqrt(math.ldexp(penalty, -2 * power))
    with np.errstate(over="ignore"):
        prices = [
            np.where(np.isinf(each) & (logs == -math.inf)[..., None], 0.0, each)  # absent
            for each, logs in ((np.ldexp(s, power), log_a), (np.ldexp(t, power), log_b))
        ]
    if not all(np.isfinite(each).all() for each in prices):
        raise ValueError(
            f"penalty: expected √λ ‖s − t‖ in the number range, got λ = {penalty:g} beside "
            "conditions that leave it; measure them in another unit"
        )
    first, second = (
        np.concatenate([points / root, price], -1)
        for points, price in zip((x, y), prices, strict=True)
    )
    answer = solve_arrays(first, second, log_a, log_b, settings)
    if root == 1:
        return answer
    # Points of weight 0 may be anywhere.
    sizes = (
        row_norms(np.where((logs > -math.inf)[..., None], points, 0.0)).max(-1)
        for points, logs in ((x, log_a), (y, log_b))
    )
    return scaled(answer, root, 4 * UNIT * sum(sizes))


class Groups(NamedTuple):
    """Members of each position: order[starts[k]:starts[k] + sizes[k]], and log θ."""

    order: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray
    log_masses: np.ndarray


def _solve_case(
    case: Problem, s: np.ndarray, t: np.ndarray, settings: Settings, tolerance: float
) -> Interval:
    """One pair in the caller's unit, with the conditions of its atoms."""
    groups = groups_of(s, t, case.log_a, case.log_b, tolerance)
    if groups is None:
        return without_plan(np.asarray(math.inf), "unequal first marginals", case.n, case.m)
    (mine, theirs), parts = groups, []
    mismatch = float(np.abs(mine.log_masses - theirs.log_masses).max())
    for ids, xs, ys in by_shape(mine, theirs):
        found = solve_arrays(case.x[xs], case.y[ys], case.log_a[xs], case.log_b[ys], settings)
        parts.append(Part(found, xs, ys, mine.log_masses[ids]))
    answer = united(parts, (case.n, case.m), 2, log_error=mismatch)
    f, g = answer.f, answer.g
    is_whole = min(case.log_a.min(), case.log_b.min()) > -math.inf
    if not is_whole:
        labels = grouped_conditions(s, t)
        absent = labels[0][case.log_a == -math.inf], labels[1][case.log_b == -math.inf]
        for label in np.union1d(*absent):
            i, j = (np.flatnonzero(each == label) for each in labels)
            here = Problem(case.x[i], case.y[j], case.log_a[i], case.log_b[j])
            f[i], g[j] = extended(here, f[i], g[j])
    return answer


def grouped_conditions(s: np.ndarray, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Group numbers of conditions (n, k), (m, k): equal conditions, and only they, are one."""
    ranks = np.unique(np.concatenate([s, t]), axis=0, return_inverse=True)[1].reshape(-1)
    return ranks[: len(s)], ranks[len(s) :]


def groups_of(
    s: np.ndarray, t: np.ndarray, log_a: np.ndarray, log_b: np.ndarray, tolerance: float
) -> tuple[Groups, Groups] | None:
    """The groups of two measures in the same order; None where the first marginals differ."""
    labels = grouped_conditions(s, t)
    mine, theirs = _grouped(labels[0], log_a), _grouped(labels[1], log_b)
    present = (labels[0][mine.order[mine.starts]], labels[1][theirs.order[theirs.starts]])
    if not np.array_equal(*present):
        _check_last_digits(s[log_a > -math.inf], t[log_b > -math.inf])
        return None
    mismatch = np.abs(mine.log_masses - theirs.log_masses).max()
    return (mine, theirs) if mismatch <= tolerance else None


def _check_last_digits(s: np.ndarray, t: np.ndarray) -> None:
    """Refuse conditions that would be the same without their last digits, as 3 · 0.1 and 3/10."""
    columns = zip(s.T, t.T, strict=True)
    rough = np.stack([_without_last_digits(*column) for column in columns], -1)
    mine, theirs = (np.unique(each, axis=0) for each in np.split(rough, [len(s)]))
    if np.array_equal(mine, theirs):
        raise ValueError(
            "positions: expected the same of both measures, or different ones, got positions or "
            "conditions that differ in their last digits alone, as 3 * 0.1 and 3 / 10, or 0.1 in "
            "single and in double precision, at an infinite distance; make both in one way, or "
            "round them"
        )


def _without_last_digits(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Numbers of groups of values: neighbours that may be apart by rounding alone are in one."""
    column = np.concatenate([one, other])
    if _is_whole(column) and np.abs(column).max() < 2**53:
        return column  # whole numbers, all of whose digits count
    order = column.argsort()
    # Of single precision, as fractions that it holds are, fewer digits are the last ones.
    has_single = any(_is_single(each) and not _is_whole(each) for each in (one, other))
    room = (5e-7 if has_single else 1e-13) * np.abs(column).max()
    numbers = np.empty(len(column))
    numbers[order] = np.cumsum(np.diff(column[order], prepend=column[order[0]]) > room)
    return numbers


def _is_whole(values: np.ndarray) -> bool:
    return bool((values == np.rint(values)).all())


def _is_single(values: np.ndarray) -> bool:
    """Whether single precision holds these numbers."""
    with np.errstate(over="ignore"):
        return bool((values == values.astype(np.float32)).all())


def _grouped(labels: np.ndarray, logs: np.ndarray) -> Groups:
    present = np.flatnonzero(logs > -math.inf)
    order = present[np.argsort(labels[present], kind="stable")]
    starts = np.flatnonzero(np.diff(labels[order], prepend=-1))
    sizes = np.diff(starts, append=len(order))
    top = np.maximum.reduceat(logs[order], starts)
    scaled = np.exp(logs[order] - np.repeat(top, sizes))
    # Normalised in double precision: log(1/n) in float32 is wrong by 2e-7.
    log_masses = normalised_logs(top + np.log(np.add.reduceat(scaled, starts)))
    return Groups(order, starts, sizes, log_masses)


def by_shape(mine: Groups, theirs: Groups) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Groups of one shape together: their numbers, members in μ (g, n) and in ν (g, m)."""
    shapes = np.stack([mine.sizes, theirs.sizes], -1)
    kinds, which = np.unique(shapes, axis=0, return_inverse=True)
    for k, (n, m) in enumerate(kinds):
        ids = np.flatnonzero(which.reshape(-1) == k)
        yield (
            ids,
            mine.order[mine.starts[ids][:, None] + np.arange(n)],
            theirs.order[theirs.starts[ids][:, None] + np.arange(m)],
        )
