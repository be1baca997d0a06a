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


@pytest.mark.parametrize("power", [20, 40, 50])
def test_the_theorem_of_the_line_speaks_where_its_potentials_are_lost(power: int) -> None:
    """Squares of 2⁻⁵⁰ are far below what rounding leaves of potentials of order one."""
    x = np.arange(64.0)[:, None] / 64
    p = Problem.of(x, x[::-1] + 2.0**-power, np.zeros(64), np.zeros(64))
    found = formulas.solve_line(p, rtol=1e-9)
    assert float(found.value) * 2.0 ** int(p.exponent) == pytest.approx(2.0**-power, rel=1e-12)
    assert float(found.width) < 1e-12


@pytest.mark.parametrize(
    ("light", "lighter"), [(-30.0, -31.0), (-600.0, -600.5), (-900.0, -901.0), (-50.0, -50.0)]
)
def test_what_crosses_between_two_atoms_is_known_however_light_it_is(light, lighter) -> None:
    x = np.array([[0.0, 0.0], [1.0, 0.0]])
    y = x + np.array([0.0, 2.0**-40]) * (light == lighter)
    p = Problem.of(x, y, np.array([0.0, light]), np.array([0.0, lighter]))
    assert float(formulas.solve_two_atoms(p, rtol=1e-9).width) < 1e-11


def test_a_nearest_point_is_never_said_to_be_farther_than_it_is() -> None:
    """Squares of 1.6e-162 are stored as 5e-324, whose root is more, and those of 1e-165 as 0."""
    for x, y in (
        ([[1.0, 0.0], [0.0, 0.0]], [[0.0, 1.6e-162], [1.0, 0.0]]),
        ([[1e-163, 0.0], [0.0, 0.0]], [[0.0, 0.0], [1e-165, 0.0]]),
    ):
        points, queries = np.array(x), np.array(y)
        truth = np.abs(queries[:, None] - points).max(-1).min(1)  # along an axis each
        moved = np.abs(queries - points).max(-1)
        assert (formulas._nearest(points, queries, moved, "cpu") <= truth).all()
    for d in (20, 32):  # by a tree, and by products
        points, moves = np.random.default_rng(0).normal(size=(2, 200, d))
        points[::5] = points[1::5] = points[2::5]
        for step in (1e-3, 1e-9, 0.0):
            queries = points + step * moves
            moved = np.linalg.norm(queries - points, axis=-1)
            found = formulas._nearest(points, queries, moved, "cpu")
            assert (found <= moved).all() and (found >= 0).all()
            truth = np.linalg.norm(queries[:, None] - points, axis=-1).min(1)
            assert (found <= truth * (1 + 1e-12)).all()
            assert step < 1e-3 or (found >= truth * (1 - 1e-6)).all()  # what products round


@pytest.mark.parametrize("swap", [False, True])
def test_of_both_clouds_the_one_whose_partners_are_nearest_proves_the_identity(swap) -> None:
    """A light atom at 0 is nearer to −0.9, the partner of −1.4, than to its own at 1."""
    rest = np.arange(10.0, 410.0)
    x, y = np.r_[0.0, -1.4, rest][:, None], np.r_[1.0, -0.9, rest + 0.25][:, None]
    x, y = (np.hstack([t, 0 * t]) for t in ((y, x) if swap else (x, y)))
    logs = np.log(np.r_[1e-6, 1e-6, np.ones(400)])
    p = Problem.of(x, y, logs, logs)
    found = formulas.solve_paired(p, rtol=1e-9, device="cpu")
    truth = (p.a @ np.square(x - y).sum(1)) ** 0.5
    assert found is not None and found.converged
    assert float(found.lower) * 2.0 ** int(p.exponent) == pytest.approx(truth, rel=1e-12)
