"""Which solver answers which problem."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from meanfield.transport.blocks import solve_blocks
from meanfield.transport.certificates import identity_answer
from meanfield.transport.closed_forms import closed_form, solve_line
from meanfield.transport.dense import narrower, solve_assignment, solve_dense, solve_simplex
from meanfield.transport.problems import Answer, Problem

__all__ = ["METHODS", "Settings", "solve"]

METHODS = ("auto", "identity", "assignment", "simplex")

_SMALL_PAIRS = 4096  # looking for clusters costs more than solving
DENSE_PAIRS = 25_000_000  # the dense simplex needs 40 bytes a pair: one gigabyte


@dataclass(frozen=True)
class Settings:
    """What the caller asked for."""

    method: str = "auto"
    rtol: float = 1e-9


def solve(problem: Problem, settings: Settings) -> Answer:
    """The answer in the problem's own unit and numbering."""
    if settings.method != "auto":
        return _named(problem, settings)
    formula = closed_form(problem)
    if formula is not None:
        return formula
    rtol = settings.rtol
    identity = identity_answer(problem, rtol=rtol) if problem.is_paired else None
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
    answer = solve_dense(problem, rtol=rtol, identity_gap=gap)
    if is_small and answer.width > rtol:
        split = solve_blocks(problem, lambda part: solve(part, settings), rtol=rtol)
        if split is not None:
            return narrower(split, answer, rtol)
    return answer


def in_callers_unit(
    answer: Answer,
    problem: Problem,
    rows: np.ndarray | None,
    cols: np.ndarray | None,
) -> Answer:
    """Undo the unit (a power of two) and the removal of atoms of weight 0."""
    e = problem.exponent
    low, value, high = (float(np.ldexp(t, e)) for t in (answer.lower, answer.value, answer.upper))
    if high == 0 and answer.upper > 0:
        high = 5e-324
    f = None if answer.f is None else np.ldexp(answer.f, 2 * e)
    g = None if answer.g is None else np.ldexp(answer.g, 2 * e)
    if rows is not None or cols is not None:
        f = g = None
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
    if method == "line":
        return solve_line(problem)
    return solve_simplex(problem, rtol=rtol)
