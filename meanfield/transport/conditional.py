"""Conditional W₂: transport that keeps positions [CAP24, Definition 4.1; HHT23]."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from meanfield.measures import ParticleMeasure
from meanfield.transport.answers import (
    TransportResult,
    as_pair,
    assemble,
    refuse_unconverged,
)
from meanfield.transport.dispatch import Settings
from meanfield.transport.distances import checked_settings, flat_arrays, solve_one
from meanfield.transport.problems import UNIT, Answer, log_rms
from meanfield.transport.small import LARGEST, SmallAnswers, solve_small

__all__ = ["conditional_w2", "solve_conditional_w2"]

# How far log-masses of a position may differ and still be one marginal.
_MARGINAL_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-8}


def conditional_w2(
    mu: ParticleMeasure, nu: ParticleMeasure, *, position_atol: float = 0.0, rtol: float = 1e-9
) -> Tensor:
    """d₂(μ̄, ν̄) = (∫ W₂(μˢ, νˢ)² dθ(s))^½; +∞ where the first marginals differ.

    Arguments and errors as for `solve_conditional_w2`.
    """
    return solve_conditional_w2(mu, nu, position_atol=position_atol, rtol=rtol).value


def solve_conditional_w2(
    mu: ParticleMeasure,
    nu: ParticleMeasure,
    *,
    method: str = "auto",
    position_atol: float = 0.0,
    rtol: float = 1e-9,
    strict: bool = True,
) -> TransportResult:
    """d₂(μ̄, ν̄) = (∫ W₂(μˢ, νˢ)² dθ(s))^½ with a certified interval.

    Args:
        mu: positioned measure μ̄ (batch axes broadcast).
        nu: positioned measure ν̄ with the same first marginal θ; if the marginals differ the
            distance is +∞, which is a value and not an error.
        method: "auto", or a solver for every position by name.
        position_atol: positions at most this far from the next are one group; 0 compares
            exactly.
        rtol: how closely plans and potentials must meet at every position.
        strict: raise if they do not; otherwise the answer comes back flagged.

    Returns:
        Distance in the unit of the points; interval, coupling (inside positions only),
        potentials (feasible inside positions).

    Raises:
        ValueError: measures without positions, and what `solve_w2` refuses.
        ConvergenceError: under `strict`, when `rtol` is not met.

    Example:
        >>> mu = ParticleMeasure([[0.0], [1.0]], positions=[0.5, 1.0])
        >>> nu = ParticleMeasure([[1.0], [0.0]], positions=[0.5, 1.0])
        >>> conditional_w2(mu, nu)
        tensor(1., dtype=torch.float64)
    """
    start = time.perf_counter()
    for name, measure in (("mu", mu), ("nu", nu)):
        if not isinstance(measure, ParticleMeasure) or measure.positions is None:
            raise ValueError(
                f"{name}: expected a ParticleMeasure with positions, got one without; give "
                "positions= or use ParticleMeasure.from_sequence"
            )
    if not 0 <= position_atol < 1:
        raise ValueError(f"position_atol: expected a number in [0, 1), got {position_atol}")
    settings = checked_settings(method, rtol)
    pair = as_pair(mu, nu)
    tolerance = _MARGINAL_TOLERANCE[pair.mu.dtype]
    positions = [
        t.positions.detach().double().cpu().numpy() for t in pair if t.positions is not None
    ]
    flat = (t.reshape(-1, t.shape[-1]) for t in positions)
    answers = [
        _solve_one_case(_Case(*case), settings, position_atol, tolerance)
        for case in zip(*flat_arrays(pair), *flat, strict=True)
    ]
    result = assemble(pair, answers, seconds=time.perf_counter() - start)
    return refuse_unconverged(result, rtol) if strict else result


class _Case(NamedTuple):
    x: np.ndarray
    y: np.ndarray
    log_a: np.ndarray
    log_b: np.ndarray
    s: np.ndarray
    t: np.ndarray


class _Groups(NamedTuple):
    """Members of each position: order[starts[k]:starts[k] + sizes[k]], and log θ."""

    order: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray
    log_masses: np.ndarray


def _solve_one_case(
    case: _Case, settings: Settings, position_atol: float, tolerance: float
) -> Answer:
    labels_s, labels_t = _labels(case, position_atol)
    mine, theirs = _grouped(labels_s, case.log_a), _grouped(labels_t, case.log_b)
    present = (labels_s[mine.order[mine.starts]], labels_t[theirs.order[theirs.starts]])
    if not np.array_equal(*present):
        return _infinite(case)
    mismatch = float(np.abs(mine.log_masses - theirs.log_masses).max())
    if mismatch > tolerance:
        return _infinite(case)
    answers = _Collected(case, mine, theirs)
    for ids, xs, ys in _by_shape(mine, theirs):
        _solve_class(case, answers, ids, xs, ys, settings)
    return answers.combined(mismatch)


def _labels(case: _Case, atol: float) -> tuple[np.ndarray, np.ndarray]:
    """Group numbers in order of position; positions chained by steps ≤ atol are one."""
    everything = np.concatenate([case.s, case.t])
    order = np.argsort(everything, kind="stable")
    ranks = np.empty(len(everything), np.int64)
    ranks[order] = np.cumsum(np.diff(everything[order], prepend=-np.inf) > atol)
    return ranks[: len(case.s)], ranks[len(case.s) :]


def _grouped(labels: np.ndarray, logs: np.ndarray) -> _Groups:
    alive = np.flatnonzero(logs > -math.inf)
    order = alive[np.argsort(labels[alive], kind="stable")]
    starts = np.flatnonzero(np.diff(labels[order], prepend=-1))
    sizes = np.diff(starts, append=len(order))
    top = np.maximum.reduceat(logs[order], starts)
    scaled = np.exp(logs[order] - np.repeat(top, sizes))
    return _Groups(order, starts, sizes, top + np.log(np.add.reduceat(scaled, starts)))


def _by_shape(
    mine: _Groups, theirs: _Groups
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
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


class _Collected:
    """Answers of the groups, gathered into one coupling and one pair of potentials."""

    def __init__(self, case: _Case, mine: _Groups, theirs: _Groups) -> None:
        self.case, self.log_masses, self.masses_nu = case, mine.log_masses, theirs.log_masses
        count = len(mine.starts)
        self.value, self.lower, self.upper = (np.zeros(count) for _ in range(3))
        self.rows: list[np.ndarray] = []
        self.cols: list[np.ndarray] = []
        self.logs: list[np.ndarray] = []
        self.f: np.ndarray | None = np.zeros(len(case.x))
        self.g: np.ndarray | None = np.zeros(len(case.y))
        self.methods: set[str] = set()
        self.converged = True

    def add(self, k: int, xs: np.ndarray, ys: np.ndarray, answer: Answer) -> None:
        """One group."""
        self.value[k], self.lower[k], self.upper[k] = answer.value, answer.lower, answer.upper
        self.rows.append(xs[answer.rows])
        self.cols.append(ys[answer.cols])
        self.logs.append(answer.log_mass + self.log_masses[k])
        if answer.f is None or answer.g is None:
            self.f = self.g = None
        if self.f is not None and self.g is not None:
            self.f[xs], self.g[ys] = answer.f, answer.g
        self.methods.update(answer.method.split(" + "))
        self.converged &= answer.converged

    def combined(self, mismatch: float) -> Answer:
        """Root mean squares over θ; where the two θ differ by rounding, so may the answer."""
        # A log-mass of −900 is right to 1e-13, and so is the mass.
        largest = float(np.abs(self.log_masses).max())
        slack = mismatch + (16 + 4 * largest + 2 * math.log2(len(self.value) + 1)) * UNIT
        value, lower, upper = (
            float(log_rms(self.log_masses, t)) for t in (self.value, self.lower, self.upper)
        )
        rows, cols, logs = (np.concatenate(t) for t in (self.rows, self.cols, self.logs))
        return Answer(
            value,
            lower * (1 - slack),
            upper * (1 + slack),
            rows,
            cols,
            logs,
            self.f,
            self.g,
            " + ".join(sorted(self.methods)),
            self.converged,
        )


def _solve_class(
    case: _Case,
    collected: _Collected,
    ids: np.ndarray,
    xs: np.ndarray,
    ys: np.ndarray,
    settings: Settings,
) -> None:
    """All groups of one shape, in arrays where they are small."""
    log_a, log_b = _conditional_weights(case, collected, ids, xs, ys)
    remaining = np.arange(len(ids))
    if max(xs.shape[1], ys.shape[1]) <= LARGEST and settings.method == "auto":
        certified = np.zeros(len(ids), bool)
        blocks = solve_small(case.x[xs], case.y[ys], log_a, log_b, rtol=settings.rtol)
        for block, found in blocks:
            certified[block] = found.certified
            good = np.flatnonzero(found.certified)
            _add_many(collected, ids[block][good], xs[block][good], ys[block][good], found, good)
        remaining = np.flatnonzero(~certified)
    for k in remaining:
        answer = solve_one(case.x[xs[k]], case.y[ys[k]], log_a[k], log_b[k], settings)
        collected.add(ids[k], xs[k], ys[k], answer)


def _conditional_weights(
    case: _Case, collected: _Collected, ids: np.ndarray, xs: np.ndarray, ys: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """log-weights given the position; bit-equal weights of μ and ν stay bit-equal."""
    log_a, log_b = case.log_a[xs], case.log_b[ys]
    mine, theirs = collected.log_masses[ids], collected.masses_nu[ids]
    if log_a.shape == log_b.shape:
        same = (np.sort(log_a, -1) == np.sort(log_b, -1)).all(-1)
        theirs = np.where(same, mine, theirs)
    return log_a - mine[:, None], log_b - theirs[:, None]


def _add_many(
    collected: _Collected,
    ids: np.ndarray,
    xs: np.ndarray,
    ys: np.ndarray,
    found: SmallAnswers,
    good: np.ndarray,
) -> None:

    for name in ("value", "lower", "upper"):
        getattr(collected, name)[ids] = getattr(found, name)[good]
    logs = found.log_mass[good]
    kept = logs > -math.inf
    collected.rows.append(np.take_along_axis(xs, found.rows[good], -1)[kept])
    collected.cols.append(np.take_along_axis(ys, found.cols[good], -1)[kept])
    collected.logs.append((logs + collected.log_masses[ids][:, None])[kept])
    if collected.f is not None and collected.g is not None:
        collected.f[xs], collected.g[ys] = found.f[good], found.g[good]
    collected.methods.update(found.method.split(" + "))


def _infinite(case: _Case) -> Answer:
    none = np.zeros(0, np.int64)
    inf = math.inf
    return Answer(
        inf, inf, inf, none, none, np.zeros(0), None, None, "unequal first marginals", True
    )
