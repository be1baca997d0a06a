"""Solvers that are wrong on purpose: what they return must never get into a certificate.

Each takes the right plan (n, m) and potentials g (m,) of a problem and returns others.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from meanfield.transport.plans import columns, exact

__all__ = ["ADVERSARIES", "install", "install_sparse"]

Adversary = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


def _corner(plan: np.ndarray, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A coupling with the right marginals, whatever it costs: the product."""
    return np.outer(plan.sum(1), plan.sum(0)), g


def _stopped(plan: np.ndarray, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """An early stop: part of the mass along right arcs, as POT's at 100,000 pivots."""
    kept = plan.copy()
    kept[: len(plan) // 2] = 0
    return kept, g


def _crossed(plan: np.ndarray, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mass sent to the wrong columns."""
    return np.roll(plan, 1, axis=1), g


def _with_nan(plan: np.ndarray, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    spoilt = plan.copy()
    spoilt[np.unravel_index(plan.argmax(), plan.shape)] = np.nan
    return spoilt, g


ADVERSARIES: dict[str, Adversary] = {
    "a poor plan": _corner,
    "an early stop": _stopped,
    "wrong marginals": _crossed,
    "half the mass": lambda plan, g: (plan / 2, g),
    "twice the mass": lambda plan, g: (2 * plan, g),
    "no mass": lambda plan, g: (0 * plan, g),
    "negative mass": lambda plan, g: (-plan, g),
    "a mass that is NaN": _with_nan,
    "infinite masses": lambda plan, g: (plan * np.inf, g),
    "potentials that are NaN": lambda plan, g: (plan, g * np.nan),
    "one potential that is infinite": lambda plan, g: (plan, np.where(g == g.max(), np.inf, g)),
    "no potentials": lambda plan, g: (plan, 0 * g),
    "infeasible potentials": lambda plan, g: (plan, g + 3.0 * np.arange(len(g))),
    "potentials 2 % too high": lambda plan, g: (plan, 1.02 * (g - g.min()) + 0.02),
    "potentials of the wrong sign": lambda plan, g: (plan, -g),
    "huge potentials": lambda plan, g: (plan, 1e12 * (g + 1)),
}


def install(monkeypatch: pytest.MonkeyPatch, adversary: Adversary) -> None:
    """Every call of the dense simplex, and of assignment, answers wrongly."""
    right, right_sigma, right_g = (
        exact.simplexes,
        exact.assignment,
        exact._assignment_potentials,
    )

    def simplexes(a: np.ndarray, b: np.ndarray, costs: np.ndarray) -> tuple:
        found = right(a, b, costs)
        with np.errstate(invalid="ignore"):
            given = [adversary(*each) for each in zip(*found, strict=True)]
        return np.stack([plan for plan, _ in given]), np.stack([g for _, g in given])

    def assignment(costs: np.ndarray) -> np.ndarray:
        return np.roll(right_sigma(costs), 1)

    def potentials(costs: np.ndarray, sigma: np.ndarray) -> np.ndarray:
        g = right_g(costs, sigma)
        with np.errstate(invalid="ignore"):
            return adversary(np.eye(len(g)), g)[1]

    monkeypatch.setattr(exact, "simplexes", simplexes)
    monkeypatch.setattr(exact, "assignment", assignment)
    monkeypatch.setattr(exact, "_assignment_potentials", potentials)


def install_sparse(monkeypatch: pytest.MonkeyPatch, adversary: Adversary) -> None:
    """Every call of the sparse simplex answers wrongly."""
    right = columns.sparse_simplex

    def sparse_simplex(
        a: np.ndarray, b: np.ndarray, arcs: tuple, **settings: bool
    ) -> exact.SparseFound:
        found = right(a, b, arcs, **settings)
        plan = np.zeros((len(a), len(b)))
        plan[found.rows, found.cols] = found.mass
        with np.errstate(invalid="ignore"):
            plan, g = adversary(plan, found.g)
        rows, cols = np.nonzero(plan)
        return exact.SparseFound(rows, cols, plan[rows, cols], found.f, g)

    monkeypatch.setattr(columns, "sparse_simplex", sparse_simplex)
