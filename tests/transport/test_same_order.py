"""Clouds ordered alike along every axis: what is recognised, and the rounding that is allowed."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import ortho_group

from meanfield.transport import solve_w2
from meanfield.transport.plans import formulas
from meanfield.transport.problem import UNIT, Problem


def shuffled(y: np.ndarray) -> np.ndarray:
    return y[np.random.default_rng(9).permutation(len(y))]


def grid(size: int, d: int) -> np.ndarray:
    return np.stack(np.meshgrid(*[np.arange(size) / 7] * d), -1).reshape(-1, d)


def images(n: int, d: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(3)
    x, half = rng.normal(size=(n, d)), rng.normal(size=(d, d))
    return {
        "translation": (x, x + 0.5),
        "far translation": (x, x + 100.0),
        "symmetric positive matrix": (x, x @ (np.eye(d) + 0.3 * half @ half.T)),
        "separable": (x, x + 0.4 * np.tanh(2 * x)),
    }


@pytest.mark.parametrize("d", [2, 3])
@pytest.mark.parametrize("name", images(2, 2))
def test_shuffled_images_under_gradients_are_recognised(name: str, d: int) -> None:
    x, y = images(10_000, d)[name]
    found = solve_w2(x, shuffled(y))
    truth = np.sqrt(np.square(x - y).sum(-1).mean())
    assert found.method == "same order"
    assert found.relative_width < 1e-10
    assert found.lower <= truth * (1 + 1e-14)
    assert found.upper >= truth * (1 - 1e-14)


@pytest.mark.parametrize(("size", "d"), [(100, 2), (22, 3)])
def test_shuffled_grids_are_recognised_though_all_their_coordinates_are_shared(
    size: int, d: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = grid(size, d)
    for many in (10**10, 10**7):  # all atoms at once, and a few before them
        monkeypatch.setattr(formulas, "_MANY_PAIRS", many)
        found = solve_w2(x, shuffled(x + 0.25))
        assert found.method == "same order"
        assert found.value == pytest.approx(0.25 * np.sqrt(d), rel=1e-12)


def test_a_few_atoms_tell_that_clouds_are_not_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(2, 3000, 4))
    log = np.zeros(3000)
    problem = Problem.of(x, y, log, log)
    assert formulas._may_be_alike(problem, np.eye(4))  # they are few: nobody asks
    monkeypatch.setattr(formulas, "_MANY_PAIRS", 1)
    assert not formulas._may_be_alike(problem, np.eye(4))
    for name, (x, y) in images(3000, 4).items():
        problem = Problem.of(x, shuffled(y), log, log)
        axes = formulas._optimal_axes(problem)
        bases = [np.eye(4), axes] if "translation" in name else [np.eye(4)]
        bases = [axes] if "matrix" in name else bases
        assert all(formulas._may_be_alike(problem, basis) for basis in bases), name


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("n", [2, 5_000])
def test_potentials_along_a_staircase_are_feasible_up_to_what_they_say(n: int, order: int) -> None:
    rng = np.random.default_rng(n)
    x, y = np.sort(rng.normal(size=(2, n))) * [[1.0], [1.3]]
    a, b = np.log(rng.dirichlet(np.ones(n), size=2))
    p = Problem.of(x[:, None], y[:, None], a, b, order=order)
    x, y = p.x[:, 0], p.y[:, 0]
    _, (i, j) = formulas._on_line(p, (np.arange(n), np.arange(n)))
    f, g, slack = formulas._staircase_potentials(p, (i, j), x, y)
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


@pytest.mark.parametrize("d", [2, 5, 16])
@pytest.mark.parametrize("askew", [0.0, 1e-13])
def test_squares_of_turned_coordinates_are_right_to_what_is_said(d: int, askew: float) -> None:
    """The worst of many pairs, in extended precision; a basis that is askew is measured."""
    rng = np.random.default_rng(d)
    x, y = 1e3 + rng.normal(size=(2, 200, d))
    p = Problem.of(x, y, np.zeros(200), np.zeros(200))
    centre, size = p.x.mean(0), float(p.diameter) ** 2
    axes = ortho_group.rvs(d, random_state=1)
    axes = axes + askew * axes @ np.eye(d)[::-1]
    exact = p.x.astype(np.longdouble)[:, None] - p.y
    squares = (exact**2).sum(-1)
    for basis in (None, axes):
        x, y = p.x - centre, p.y - centre
        if basis is not None:
            x, y = x @ basis, y @ basis
        found = ((x.astype(np.longdouble)[:, None] - y) ** 2).sum(-1)
        lost = float(np.abs(found - squares).max()) / size
        assert lost <= formulas._turned(p, basis)
        assert formulas._turned(p, basis) < 200 * d**1.5 * UNIT + 2 * askew * d
        assert not askew or basis is None or lost > askew / 10
