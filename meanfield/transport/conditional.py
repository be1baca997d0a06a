"""Conditional W₂: transport that keeps positions [CAP24, Definition 4.1; HHT23]."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from meanfield.checks import number
from meanfield.measures import MASS_TOLERANCE, ParticleMeasure, check_measure
from meanfield.transport.certificate import Certified, Part, united
from meanfield.transport.pairs import Pair, as_pair, flat_arrays
from meanfield.transport.problem import normalised_logs
from meanfield.transport.result import TransportResult, gathered
from meanfield.transport.solve import Settings, extend, finished, solve_arrays

__all__ = ["positioned_pair", "solve_conditional_w2", "solved_by_position"]


def solve_conditional_w2(
    mu: ParticleMeasure,
    nu: ParticleMeasure,
    *,
    method: str = "auto",
    position_atol: float = 0.0,
    rtol: float = 1e-9,
    exact_weights: bool = False,
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
        exact_weights: as for `solve_w2`, at every position.
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
        >>> solve_conditional_w2(mu, nu).value
        tensor(1., dtype=torch.float64)
    """
    settings = Settings.of(method=method, rtol=rtol, exact_weights=exact_weights, strict=strict)
    return solved_by_position(positioned_pair(mu, nu), position_atol, settings)


def positioned_pair(mu: ParticleMeasure, nu: ParticleMeasure) -> Pair:
    """The two measures, as `as_pair`; both must carry positions."""
    for name, measure in (("mu", mu), ("nu", nu)):
        if check_measure(measure, name).positions is None:
            raise ValueError(
                f"{name}: expected a ParticleMeasure with positions, got one without; give "
                "positions= or use ParticleMeasure.from_sequence"
            )
    return as_pair(mu, nu)


def solved_by_position(pair: Pair, position_atol: float, settings: Settings) -> TransportResult:
    """The conditional distance of a pair with positions, or of a batch of pairs."""
    position_atol = number(position_atol, "position_atol", least=0, below=1)
    settings = replace(settings, device=str(pair.mu.device))
    tolerance = MASS_TOLERANCE[pair.mu.dtype]
    both = (t.positions for t in pair[:2] if t.positions is not None)
    flat = (t.detach().double().cpu().numpy().reshape(-1, t.shape[-1]) for t in both)
    answers = [
        _solve_case(_Case(*case), settings, position_atol, tolerance)[None]
        for case in zip(*flat_arrays(pair), *flat, strict=True)
    ]
    return finished(pair, gathered(answers) if answers else None, settings)


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


def _solve_case(
    case: _Case, settings: Settings, position_atol: float, tolerance: float
) -> Certified:
    labels = _labels(case, position_atol)
    mine, theirs = _grouped(labels[0], case.log_a), _grouped(labels[1], case.log_b)
    present = (labels[0][mine.order[mine.starts]], labels[1][theirs.order[theirs.starts]])
    if not np.array_equal(*present):
        return _infinite()
    mismatch = float(np.abs(mine.log_masses - theirs.log_masses).max())
    if mismatch > tolerance:  # no longer one marginal
        return _infinite()
    parts = []
    for ids, xs, ys in _by_shape(mine, theirs):
        found = solve_arrays(case.x[xs], case.y[ys], case.log_a[xs], case.log_b[ys], settings)
        assert found is not None  # a class of groups is not empty
        parts.append(Part(found, xs, ys, mine.log_masses[ids]))
    answer = united(parts, (len(case.x), len(case.y)), 2, log_error=mismatch)
    f, g = answer.f, answer.g
    if f is not None and g is not None:
        in_x, in_y = case.log_a > -math.inf, case.log_b > -math.inf
        for label in np.union1d(labels[0][~in_x], labels[1][~in_y]):
            i, j = (np.flatnonzero(t == label) for t in labels)
            here_f, here_g = f[i], g[j]
            extend(here_f, here_g, case.x[i], case.y[j], in_x[i], in_y[j], 2)
            f[i], g[j] = here_f, here_g
    return answer


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
    # Normalised in double precision: log(1/n) in float32 is wrong by 2e-7.
    log_masses = normalised_logs(top + np.log(np.add.reduceat(scaled, starts)))
    return _Groups(order, starts, sizes, log_masses)


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


def _infinite() -> Certified:
    none, inf, name = np.zeros(0, np.int64), np.asarray(math.inf), "unequal first marginals"
    yes = np.asarray(True)
    ends = (inf, inf, inf, none, none, np.zeros(0), None, None, name, yes)
    zero = np.zeros(())
    return Certified(*ends, primal=inf, dual=inf, plan_doubt=zero, dual_doubt=zero, order=2)
