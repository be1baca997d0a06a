"""The line: potentials along a staircase, and the rounding that they state."""

from __future__ import annotations

import numpy as np
import pytest

from meanfield.transport.plans import formulas
from meanfield.transport.problem import UNIT, Problem


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("n", [2, 5_000])
def test_potentials_along_a_staircase_are_feasible_up_to_what_they_say(n: int, order: int) -> None:
    rng = np.random.default_rng(n)
    x, y = np.sort(rng.normal(size=(2, n))) * [[1.0], [1.3]]
    a, b = np.log(rng.dirichlet(np.ones(n), size=2))
    p = Problem.of(x[:, None], y[:, None], a, b, order=order)
    x, y = p.x[:, 0], p.y[:, 0]
    i, j, _ = formulas.monotone_plan(p.a, p.b)
    f, g, slack = formulas._staircase_potentials(p, i, j)
    size = float(p.diameter) ** order
    allowed = slack + 4 * UNIT * (size + np.abs(f).max() + np.abs(g).max())  # to double precision
    x, y = x.astype(np.longdouble), y.astype(np.longdouble)
    rows = rng.integers(n, size=60)
    costs = np.abs(x[rows, None] - y) ** order
    assert (f[rows, None] + g - costs <= allowed).all()
    assert (np.abs(f[i] + g[j] - np.abs(x[i] - y[j]) ** order) <= allowed).all()
    if order == 2:
        assert slack <= (1e-17 if np.finfo(np.longdouble).eps < 1e-18 else 1e-13) * n**0.5 * 100


@pytest.mark.parametrize("count", [0, 1, 2, 3, 8, 9, 100])
def test_running_sums_are_sums(count: int) -> None:
    terms = np.random.default_rng(count).integers(-9, 9, size=count).astype(np.longdouble)
    sums, depth = formulas._running(terms)
    assert sums.tolist() == np.concatenate([[0], np.cumsum(terms)]).tolist()
    assert depth >= min(count, 2 * count**0.5)
