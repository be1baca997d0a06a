"""Which solver answers which problem."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import numpy as np

from meanfield.transport.blocks import solve_blocks
from meanfield.transport.bounds import coordinate_lower, gelbrich_lower, solve_bounds
from meanfield.transport.certificates import identity_answer
from meanfield.transport.closed_forms import closed_form
from meanfield.transport.column_generation import solve_columns
from meanfield.transport.dense import (
    narrower,
    raised,
    solve_assignment,
    solve_dense,
    solve_simplex,
)
from meanfield.transport.entropic import solve_sinkhorn
from meanfield.transport.problems import UNIT, Answer, Problem

__all__ = ["METHODS", "Settings", "solve"]

METHODS = (
    "auto",
    "identity",
    "assignment",
    "simplex",
    "column_generation",
    "bounds",
    "sinkhorn",
)

_SMALL_PAIRS = 4096  # looking for clusters costs more than solving
_DENSE_PAIRS = 160_000  # from here on column generation is faster
_NEAR_PAIRS = 25_000_000  # near the identity, assignment is nearly free, and finer
_CHEAP_RTOL = 1e-4  # no cheap bound of unlike clouds is narrower
_PRICED_PAIRS = 25_000_000_000  # beyond, one pass over all pairs takes minutes


@dataclass(frozen=True)
class Settings:
    """What the caller asked for."""

    method: str = "auto"
    rtol: float = 1e-9
    time_limit: float | None = None
    device: str = "cpu"


def solve(problem: Problem, settings: Settings) -> Answer:
    """The answer in the problem's own unit and numbering."""
    if settings.method != "auto":
        return _named(problem, settings)
    formula, rtol = closed_form(problem), settings.rtol
    if formula is not None and (formula.width <= rtol or not problem.is_paired):
        return formula
    identity = identity_answer(problem, rtol=rtol) if problem.is_paired else None
    if formula is not None and identity is not None:
        # Sums of weights are rounded, paired weights are the same.
        return narrower(formula, identity, rtol)
    if identity is not None and identity.converged:
        return identity
    answer = _by_size(problem, settings, identity)
    return answer if identity is None else narrower(answer, identity, rtol)


def _by_size(problem: Problem, settings: Settings, identity: Answer | None) -> Answer:
    rtol = settings.rtol
    gap = identity.width if identity is not None else 1.0
    is_small = problem.n * problem.m <= _SMALL_PAIRS
    if not is_small:
        split = solve_blocks(problem, lambda part: solve(part, settings), rtol=rtol)
        if split is not None and split.converged:
            return split
    is_near = problem.is_uniform and gap < 0.1
    pairs = problem.n * problem.m
    if pairs > (_NEAR_PAIRS if is_near else _DENSE_PAIRS):
        return _solve_large(problem, settings, identity)
    answer = solve_dense(problem, rtol=rtol, identity_gap=gap)
    if is_small and answer.width > rtol:
        split = solve_blocks(problem, lambda part: solve(part, settings), rtol=rtol)
        if split is not None:
            return narrower(split, answer, rtol)
    return answer


def _solve_large(problem: Problem, settings: Settings, identity: Answer | None) -> Answer:
    """Cheap bounds if they are as narrow as asked, column generation if it is affordable."""
    rtol, best = settings.rtol, identity
    affordable = problem.n * problem.m <= _PRICED_PAIRS
    if identity is not None:  # affine images: Gelbrich's bound meets the identity coupling
        floor = math.sqrt(max(gelbrich_lower(problem), coordinate_lower(problem)))
        best = raised(identity, floor * (1 - 4 * UNIT), rtol)
        if best.converged:
            return best
    if not affordable or rtol >= _CHEAP_RTOL:
        cheap = solve_bounds(problem, rtol=rtol)
        best = cheap if best is None else narrower(cheap, best, rtol)
        if best.converged or not (affordable or settings.time_limit):
            return best
    start = time.perf_counter()
    answer = solve_columns(
        problem, rtol=rtol, time_limit=settings.time_limit, device=settings.device
    )
    is_late = time.perf_counter() - start > (settings.time_limit or math.inf)
    if answer.width > rtol and problem.n * problem.m <= _NEAR_PAIRS and not is_late:
        # Displacements small beside the clouds: a dense problem is solved to finer costs.
        answer = narrower(solve_dense(problem, rtol=rtol), answer, rtol)
    return answer if best is None else narrower(answer, best, rtol)


def in_callers_unit(
    answer: Answer,
    problem: Problem,
    rows: np.ndarray | None,
    cols: np.ndarray | None,
    *,
    order: int = 2,
) -> Answer:
    """Undo the unit (a power of two) and the removal of atoms of weight 0.

    Potentials are in the unit of ‖xᵢ − y_j‖^order.
    """
    e = problem.exponent
    low, value, high = (float(np.ldexp(t, e)) for t in (answer.lower, answer.value, answer.upper))
    if high == 0 and answer.upper > 0:
        high = 5e-324
    f = None if answer.f is None else np.ldexp(answer.f, order * e)
    g = None if answer.g is None else np.ldexp(answer.g, order * e)
    return replace(
        answer,
        value=value,
        lower=low,
        upper=high,
        rows=answer.rows if rows is None else rows[answer.rows],
        cols=answer.cols if cols is None else cols[answer.cols],
        f=f,
        g=g,
    )


def _named(problem: Problem, settings: Settings) -> Answer:
    method, rtol = settings.method, settings.rtol
    if method == "identity":
        if not problem.is_paired:
            raise ValueError(
                "method 'identity': expected two measures with the same weights in the same "
                "order; use method='auto'"
            )
        return identity_answer(problem, rtol=rtol)
    if method == "assignment":
        if not problem.is_uniform:
            raise ValueError(
                "method 'assignment': expected uniform measures of one size, got "
                f"n = {problem.n} and m = {problem.m} or unequal weights; use method='auto'"
            )
        return solve_assignment(problem, rtol=rtol)
    if method == "column_generation":
        return solve_columns(
            problem, rtol=rtol, time_limit=settings.time_limit, device=settings.device
        )
    if method == "bounds":
        return solve_bounds(problem, rtol=rtol)
    if method == "sinkhorn":
        return solve_sinkhorn(problem, rtol=rtol, device=settings.device)
    return solve_simplex(problem, rtol=rtol)
