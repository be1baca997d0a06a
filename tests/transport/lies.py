"""Solvers that are wrong on purpose: the table LIES.

Each takes the right plan (n, m) and potentials f (n,), g (m,) of a problem and returns others.
They are told to the package by the solvers that it calls (`tell`), and by users (`certify`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from meanfield.transport.plans import exact

Claim = tuple[np.ndarray, np.ndarray, np.ndarray]  # plan, f, g
Lie = Callable[[np.ndarray, np.ndarray, np.ndarray], Claim]


def of_plan(change: Callable[[np.ndarray], Any]) -> Lie:
    return lambda plan, f, g: (np.asarray(change(plan.copy()), float), f, g)


def of_potentials(change: Callable[[np.ndarray], Any]) -> Lie:
    return lambda plan, f, g: (plan, *(np.asarray(change(t.copy()), float) for t in (f, g)))


def stopped(plan: np.ndarray) -> np.ndarray:
    """Part of the mass along right arcs, as POT's at 100,000 pivots."""
    plan[: len(plan) // 2] = 0
    return plan


def with_nan(plan: np.ndarray) -> np.ndarray:
    plan[np.unravel_index(plan.argmax(), plan.shape)] = np.nan
    return plan


def minibatch(plan: np.ndarray) -> np.ndarray:
    """The mass of each row to four columns at random."""
    rng = np.random.default_rng(0)
    return sum(plan.sum(1)[:, None] / 4 * np.eye(plan.shape[1])[
        rng.integers(plan.shape[1], size=len(plan))] for _ in range(4))  # fmt: skip


def waves(values: np.ndarray) -> np.ndarray:
    return np.sin(3.0 * np.arange(values.size) + 1).reshape(values.shape)


LIES: dict[str, Lie] = {
    "the truth": lambda plan, f, g: (plan, f, g),
    "the product": of_plan(lambda plan: np.outer(plan.sum(1), plan.sum(0))),
    "an early stop": of_plan(stopped),
    "rolled": of_plan(lambda plan: np.roll(plan, 1, axis=1)),
    "a minibatch": of_plan(minibatch),
    "a little noise": of_plan(lambda plan: plan * np.exp(1e-9 * waves(plan) - 1e-9)),
    "much noise": of_plan(lambda plan: plan * np.exp(0.3 * waves(plan) - 0.3)),
    "a plan of single precision": of_plan(lambda plan: (plan * (1 - 1e-7)).astype(np.float32)),
    "a thinned plan": of_plan(lambda plan: np.where(plan > 0.01, plan, 0)),
    "half the mass": of_plan(lambda plan: 0.501 * plan),
    "twice the mass": of_plan(lambda plan: 2 * plan),
    "no mass": of_plan(lambda plan: 0 * plan),
    "negative mass": of_plan(lambda plan: -plan),
    "a mass that is NaN": of_plan(with_nan),
    "infinite masses": of_plan(lambda plan: np.where(plan > 0, np.inf, 0)),
    "potentials that are NaN": of_potentials(lambda t: t * np.nan),
    "one potential that is infinite": of_potentials(lambda t: np.where(t == t.max(), np.inf, t)),
    "one that is infinite below": of_potentials(lambda t: np.where(t == t.min(), -np.inf, t)),
    "no potentials": of_potentials(lambda t: 0 * t),
    "infeasible potentials": of_potentials(lambda t: t + 3 * np.abs(t).max() * np.arange(t.size)),
    "potentials 2 % too high": of_potentials(lambda t: 1.02 * (t - t.min()) + 0.02),
    "potentials of the wrong sign": of_potentials(lambda t: -t),
    "huge potentials": of_potentials(lambda t: 1e6 * (t + 1)),
    "half the potentials": of_potentials(lambda t: t / 2),
    "potentials of half precision": of_potentials(lambda t: t.astype(np.float16)),
    "rough potentials": of_potentials(lambda t: t + 1e-6 * np.abs(t).max() * waves(t)),
    "shifted potentials": lambda plan, f, g: (plan, f - 1e6, g + 1e6),
    "f alone is right": lambda plan, f, g: (plan, f, waves(g)),
    "g alone is right": lambda plan, f, g: (plan, waves(f), g),
}


class Liar:
    """POT's compiled core, whose plans and potentials are changed."""

    def __init__(self, right: Any, lie: Lie) -> None:
        self._right, self._lie, self.calls = right, lie, 0

    def _told(self, plan: np.ndarray, f: np.ndarray, g: np.ndarray) -> Claim:
        self.calls += 1
        with np.errstate(all="ignore"):
            return self._lie(plan, f, g)

    def emd_c(self, *problem: Any) -> tuple:
        plan, value, f, g, code = self._right.emd_c(*problem)
        plan, f, g = self._told(plan, f, g)
        return plan, value, f, g, code

    def emd_c_sparse(self, a: np.ndarray, b: np.ndarray, *rest: Any) -> tuple:
        i, j, mass, value, f, g, code = self._right.emd_c_sparse(a, b, *rest)
        plan = np.zeros((len(a), len(b)))
        plan[i.astype(int), j.astype(int)] = mass
        plan, f, g = self._told(plan, f, g)
        i, j = np.nonzero(plan)
        return i, j, plan[i, j], value, f, g, code

    def check_result(self, code: int) -> None:
        assert self._right.check_result(code) is None


def tell(monkeypatch: pytest.MonkeyPatch, lie: Lie) -> Liar:
    """Every answer of the network simplex and of SciPy's assignment is changed from here on."""
    import scipy.optimize

    liar, assign = Liar(exact.compiled_core(), lie), scipy.optimize.linear_sum_assignment

    def linear_sum_assignment(costs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows, cols = assign(costs)
        plan = liar._told(np.eye(len(cols))[cols], costs.min(1), costs.min(0))[0]
        return rows, np.argsort(np.nan_to_num(-plan).argmin(1), kind="stable")

    monkeypatch.setattr(exact, "compiled_core", lambda: liar)
    monkeypatch.setattr(scipy.optimize, "linear_sum_assignment", linear_sum_assignment)
    return liar
