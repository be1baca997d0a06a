"""W₂ between particle measures: the public doors."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from torch import Tensor

from meanfield.measures import ParticleMeasure
from meanfield.transport.answers import (
    Pair,
    TransportResult,
    as_pair,
    assemble,
    assemble_arrays,
    problem_of,
    refuse_unconverged,
)
from meanfield.transport.dispatch import METHODS, Settings, in_callers_unit, solve
from meanfield.transport.problems import Answer, squared_distances
from meanfield.transport.small import LARGEST, SmallAnswers, solve_small

__all__ = ["checked_settings", "extended_potentials", "flat_arrays", "solve_one", "solve_w2"]

_Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def solve_w2(
    mu: ParticleMeasure | Tensor,
    nu: ParticleMeasure | Tensor,
    *,
    method: str = "auto",
    rtol: float = 1e-9,
    time_limit: float | None = None,
    strict: bool = True,
) -> TransportResult:
    """W₂(μ, ν) = (min over couplings of Σ π_ij ‖xᵢ − y_j‖²)^½, with a certified interval.

    Masses of clusters far apart that agree in μ and ν to a few units in the last place of their
    weights are taken as equal: moved from cluster to cluster, 1e-17 of mass would outweigh
    displacements of 1e-9.

    Args:
        mu: μ, or points (..., n, d) of a uniform measure.
        nu: ν, or points (..., m, d); sizes may differ, batch axes broadcast.
        method: "auto" takes the cheapest solver that gives `rtol`. By name: "identity" (with
            nearest neighbours), "assignment", "simplex" (dense), "column_generation" (large:
            100,000 points in minutes, memory linear in the points), "bounds" (seconds at 100,000
            points, an interval of percents), "sinkhorn" (GeomLoss, on the device, an interval of
            percents).
        rtol: how closely plan and potentials must meet, relative to W₂. Beyond 150,000 points a
            side "auto" gives cheap bounds only, unless a time limit allows more.
        time_limit: seconds. Column generation begins no round that would probably end later, and
            gives the interval that it has; without time for the whole problem, that of a quarter
            of the atoms carried over to all.
        strict: raise if they do not; otherwise the answer comes back flagged.

    Returns:
        The distance in the unit of the points, its interval, coupling and method.

    Raises:
        ConvergenceError: under `strict`, when `rtol` is not met.
        TypeError, ValueError: input of unequal kinds or shapes, NaN, unequal masses.

    Example:
        >>> import torch
        >>> x = torch.tensor([[0.0, 0.0]], dtype=torch.float64)
        >>> solve_w2(x, x + torch.tensor([3.0, 0.0])).value
        tensor(3., dtype=torch.float64)
    """
    start = time.perf_counter()
    settings = checked_settings(method, rtol, time_limit)
    pair = as_pair(mu, nu)
    settings = replace(settings, device=str(pair.mu.device))
    arrays = flat_arrays(pair)
    found = _solve_small(arrays, settings)
    if found is not None and found.certified.all():
        ends = np.stack([found.value, found.lower, found.upper], -1)
        result = assemble_arrays(
            pair,
            ends,
            (found.rows, found.cols, found.log_mass),
            (found.f, found.g),
            method=found.method,
            converged=True,
            seconds=time.perf_counter() - start,
        )
    else:
        answers = _solve_each(arrays, settings, found)
        result = assemble(pair, answers, seconds=time.perf_counter() - start)
    return refuse_unconverged(result, rtol) if strict else result


def checked_settings(method: str, rtol: float, time_limit: float | None = None) -> Settings:
    """The settings, refused if they mean nothing."""
    if method not in METHODS:
        raise ValueError(f"method: expected one of {', '.join(METHODS)}, got {method!r}")
    if not 0 < rtol < 1:
        raise ValueError(f"rtol: expected a number between 0 and 1, got {rtol}")
    if time_limit is not None and not time_limit > 0:
        raise ValueError(f"time_limit: expected a positive number of seconds, got {time_limit}")
    return Settings(method, rtol, time_limit)


def flat_arrays(pair: Pair) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """x (B, n, d), y (B, m, d), log a (B, n), log b (B, m) in float64 on the CPU."""

    def array(tensor: Tensor, axes: int) -> np.ndarray:
        flat = tensor.detach().reshape(-1, *tensor.shape[tensor.ndim - axes :])
        return flat.double().cpu().numpy()

    (mu, nu) = pair
    return (
        array(mu.points, 2),
        array(nu.points, 2),
        array(mu.log_weights, 1),
        array(nu.log_weights, 1),
    )


def solve_one(
    x: np.ndarray, y: np.ndarray, log_a: np.ndarray, log_b: np.ndarray, settings: Settings
) -> Answer:
    """One pair by the whole dispatch, in the caller's unit and numbering."""
    problem, rows, cols = problem_of(x, y, log_a, log_b)
    answer = in_callers_unit(solve(problem, settings), problem, rows, cols)
    if rows is None and cols is None:
        return answer
    return extended_potentials(answer, x, y, rows, cols, cost=squared_distances)


def extended_potentials(
    answer: Answer,
    x: np.ndarray,
    y: np.ndarray,
    rows: np.ndarray | None,
    cols: np.ndarray | None,
    *,
    cost: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> Answer:
    """Potentials on atoms of weight 0 too, by c-transforms: still feasible."""
    if answer.f is None or answer.g is None:
        return answer
    rows = np.arange(len(x)) if rows is None else rows
    cols = np.arange(len(y)) if cols is None else cols
    f, g = np.empty(len(x)), np.empty(len(y))
    f[rows], g[cols] = answer.f, answer.g
    absent_x, absent_y = (np.setdiff1d(np.arange(len(t)), k) for t, k in ((x, rows), (y, cols)))
    if len(absent_x):
        f[absent_x] = (cost(x[absent_x], y[cols]) - answer.g).min(1)
    if len(absent_y):
        g[absent_y] = (cost(y[absent_y], x) - f).min(1)
    return replace(answer, f=f, g=g)


def _solve_small(arrays: _Arrays, settings: Settings) -> SmallAnswers | None:
    """A batch of small problems in arrays; None where this is not one."""
    x, y, log_a, log_b = arrays
    if len(x) < 2 or settings.method != "auto" or max(x.shape[1], y.shape[1]) > LARGEST:
        return None
    if log_a.min() == -np.inf or log_b.min() == -np.inf:
        return None
    parts = [found for _, found in solve_small(*arrays, rtol=settings.rtol)]
    names = sorted({name for part in parts for name in part.method.split(" + ")})

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(part, name) for part in parts])

    return SmallAnswers(
        **{name: joined(name) for name in SmallAnswers._fields if name != "method"},
        method=" + ".join(names),
    )


def _solve_each(arrays: _Arrays, settings: Settings, found: SmallAnswers | None) -> list[Answer]:
    """Every pair of the batch by itself, but for what is certified already."""
    return [
        found.answer(k) if found is not None and found.certified[k] else solve_one(*case, settings)
        for k, case in enumerate(zip(*arrays, strict=True))
    ]
