"""Small clusters far apart: digits of what stays inside, and masses that cross between them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import mpmath
import numpy as np
import pytest
import torch

from meanfield.errors import CertificateError
from meanfield.measures import ParticleMeasure
from meanfield.transport import solve_w2, solve_wp
from meanfield.transport.certificate import in_unit
from meanfield.transport.plans import clusters
from meanfield.transport.plans.clusters import solve_clusters
from meanfield.transport.plans.exact import solve_dense
from meanfield.transport.problem import Problem


@pytest.mark.parametrize("extra", [1e-7, 1e-12])
def test_clusters_that_exchange_mass_are_known_to_rounding(extra: float) -> None:
    """More than rounding of the weights crosses: that is no problem of each cluster."""
    rng = np.random.default_rng(0)
    x, y = rng.uniform(-0.5, 0.5, size=(2, 600, 2)) + np.repeat([[40.0], [0.0]], 300, axis=0)
    a, b = rng.dirichlet(np.ones(600), size=2)
    for weights, more in ((a, extra), (b, 0.0)):
        weights[:300] *= (0.5 + more) / weights[:300].sum()
        weights[300:] *= (0.5 - more) / weights[300:].sum()
    found = solve_w2((x, a), (y, b))
    assert found.converged
    assert found.relative_width < 1e-8  # rounding of the weights over a distance of 40


@pytest.mark.parametrize("log_weight", [-20.0, -25.0, -30.0, -33.0])
def test_a_little_mass_that_leaves_one_of_three_far_atoms_is_known_to_rounding(
    log_weight: float,
) -> None:
    """Weights are known to 1e-16, and so is what leaves: e^−30 of it to four digits."""

    def logs(light: float) -> list[float]:
        return [light] + 2 * [math.log((1 - math.exp(light)) / 2)]

    points = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    mu = ParticleMeasure(points, log_weights=logs(log_weight))
    nu = ParticleMeasure(points, log_weights=logs(log_weight - 1))
    with mpmath.workdps(50):
        a, b = ([mpmath.exp(float(t)) for t in m.log_weights] for m in (mu, nu))
        gains = [y / sum(b) - x / sum(a) for x, y in zip(a, b, strict=True)]
        true = float(mpmath.sqrt(gains[1] + 4 * gains[2]))
    found = solve_w2(mu, nu)
    assert float(found.value) == pytest.approx(true, rel=1e-16 * math.exp(-log_weight))
    assert float(found.lower) <= true <= float(found.upper)
    assert float(found.rounding) >= 0.98 * float(found.upper - found.lower)


@pytest.mark.parametrize(
    ("order", "size", "uniform"), [(2, 1e-6, False), (2, 1e-8, True), (3, 1e-6, True)]
)
def test_small_moves_of_many_shuffled_atoms_are_known_to_their_own_digits(
    order: int, size: float, uniform: bool
) -> None:
    """Potentials as large as the clouds would leave 1e-4 of the first open, all of the others.

    Atoms that move by less than half of what is between them go to their nearest.
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(450, 2))
    sigma, moves = rng.permutation(450), size * rng.normal(size=(450, 2))
    a = np.full(450, 1 / 450) if uniform else rng.dirichlet(np.ones(450))
    y, b = (x + moves)[sigma], a[sigma]
    found = solve_wp((x, a), (y, b), order)
    lengths = np.linalg.norm(x[sigma] - y, axis=-1)
    truth = (b @ lengths**order) ** (1 / order)
    assert float(found.relative_width) < 1e-12
    assert float(found.value) == pytest.approx(truth, rel=1e-13)


@pytest.mark.parametrize(("weight", "truth"), [(1e-18, 1.0e-9), (1e-15, 3.16228e-8)])
def test_what_pricing_leaves_open_is_no_rounding(weight: float, truth: float) -> None:
    """The empty plan costs less than the error of the products with which pairs are priced."""
    found = solve_w2(*core_and_far(450, 1e-12, weight), strict=False)
    assert float(found.lower) <= truth * (1 + 1e-4)
    assert float(found.upper) >= truth * (1 - 1e-4)
    assert not found.converged or float(found.relative_width) < 1e-6
    assert float(found.value) == pytest.approx(truth, rel=1e-3)


def core_and_far(n: int, radius: float, weight: float) -> tuple:
    """A collapsed core, and one atom of small weight at distance 1 that has to come home."""
    rng = np.random.default_rng(0)
    x, y = radius * rng.normal(size=(2, n, 2))
    x[0] = [1, 0]
    a, b = rng.dirichlet(np.ones(n), size=2)
    a[0] = weight
    return (x, a / a.sum()), (y, b)


def test_clusters_that_are_wider_than_far_apart_are_none() -> None:
    """30 apart along an axis, and √4000 from corner to corner: what stays inside is dearer."""
    corner, far = np.full(4000, 0.5), 30 * np.eye(1, 4000)[0]
    x, y = np.stack([corner, far - corner]), np.stack([-corner, far + corner])
    found = solve_clusters(Problem.of(x, y, np.zeros(2), np.zeros(2)), no_solver, snap=True)
    assert found is None


def test_clusters_that_are_not_two_widths_apart_are_none() -> None:
    """21 apart along an axis, 6 wide in 36 dimensions: 9 are between them, and 12 are asked."""
    far = 21 * np.eye(1, 36)
    x, y = np.concatenate([0 * far, far]), np.concatenate([0 * far + 1, far + 1])
    p = Problem.of(x, y, np.zeros(2), np.zeros(2))
    assert clusters._separated(p.x, p.y) is not None
    assert solve_clusters(p, no_solver, snap=True) is None


def no_solver(*arrays: np.ndarray) -> Any:
    raise AssertionError("there are no clusters to solve")


@pytest.mark.parametrize("factors", [1.1, 0.5, np.array([1.1, 1.0]), np.array([0.9, 1.1])])
def test_parts_whose_masses_are_wrong_are_not_believed(
    monkeypatch: pytest.MonkeyPatch, factors: Any
) -> None:
    right = clusters._log_masses

    def wrong(*args: Any) -> Any:
        return right(*args) + np.log(factors)

    monkeypatch.setattr(clusters, "_log_masses", wrong)
    x = np.array([[0.0, 0.0], [1.0, 0.0], [50.0, 0.0], [50.0, 1.0]])
    dense = lambda *arrays: solve_dense(Problem.of(*arrays), rtol=1e-9)  # noqa: E731
    problem = Problem.of(x, x + 0.1, np.zeros(4), np.zeros(4))
    with pytest.raises(CertificateError, match="clusters: expected"):
        solve_clusters(problem, dense, snap=True)


@pytest.mark.parametrize("n", [2, 3, 50, 500])
@pytest.mark.parametrize(("order", "log_mass"), [(10, -760.0), (2, -800.0), (3, -740.0)])
@pytest.mark.parametrize("answered", [False, True])
def test_a_cluster_whose_mass_underflows_is_not_left_out(
    n: int, order: float, log_mass: float, answered: bool
) -> None:
    """The only atom that moves has a mass of e^−760: its tenth root is an ordinary number.

    With `answered`, ν has an atom of another such mass near to it.
    """
    x = np.zeros((n, 2))
    x[0] = 1.0
    logs = np.full(n, -math.log(n - 1))
    logs[0] = log_mass
    mu, nu = ParticleMeasure(x, log_weights=logs), ParticleMeasure(np.zeros((n, 2)))
    if answered:
        less = np.append(log_mass - 1, logs[1:])
        nu = ParticleMeasure(x, log_weights=less)
    found = solve_wp(mu, nu, order, strict=False)
    moved = log_mass + (math.log1p(-math.exp(-1)) if answered else 0.0)
    truth = math.sqrt(2) * math.exp(moved / order)
    assert float(found.lower) <= truth * (1 + 1e-12)
    assert float(found.upper) >= truth * (1 - 1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_masses_that_agree_but_for_rounding_of_the_weights_are_equal(seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(4), 25)
    x, y = 1e-6 * rng.normal(size=(2, 100, 2)) + np.array([0.0, 7.0, 19.0, 30.0])[labels, None]
    a, b = rng.dirichlet(np.ones(100), size=2)
    for k in range(4):
        b[labels == k] *= a[labels == k].sum() / b[labels == k].sum()
    found = solve_w2((x, a), (y, b))
    assert str(found.method).startswith("clusters of")
    inside = [
        a[labels == k].sum()
        * float(solve_w2(*((t[labels == k], w[labels == k] / w[labels == k].sum())
                           for t, w in ((x, a), (y, b))))) ** 2
        for k in range(4)
    ]  # fmt: skip
    assert float(found.value) == pytest.approx(math.sqrt(sum(inside)), rel=1e-11)
    assert found.relative_width < 1e-9


def test_clusters_of_one_shape_are_solved_together() -> None:
    """One by one forty of two atoms took nine tenths of a comparison of secants."""
    centres = 100.0 * np.arange(12.0)[:, None]
    sizes = np.array([1, 2, 3] * 4)
    x = np.repeat(centres, sizes, axis=0)
    x += np.random.default_rng(0).normal(size=x.shape)
    y = x + np.random.default_rng(1).normal(size=x.shape)
    shapes = []

    def dense(*arrays: np.ndarray) -> Any:
        shapes.append(arrays[0].shape)
        problem = Problem.of(*arrays)
        return in_unit(solve_dense(problem, rtol=1e-9), problem.exponent)

    problem = Problem.of(x, y, np.zeros(len(x)), np.zeros(len(x)))
    found = solve_clusters(problem, dense, snap=True)
    assert found is not None
    assert sorted(shapes) == [(4, 1, 1), (4, 2, 1), (4, 3, 1)]
    # On the line the monotone coupling is optimal.
    squares = (np.sort(x[:, 0]) - np.sort(y[:, 0])) ** 2
    assert np.ldexp(found.value, problem.exponent) == pytest.approx(squares.mean() ** 0.5)
    assert found.lower <= found.value <= found.upper


def test_clusters_whose_masses_differ_are_left_to_others() -> None:
    """By a millionth, by 40 last places, or by one where weights are taken as they are stored."""
    x = np.array([[0.0, 0.0], [1.0, 0.0], [50.0, 0.0], [50.0, 1.0]])
    a = np.log([0.3, 0.2, 0.25, 0.25])
    for move, snap in ((1e-6, True), (2e-15, True), (1e-16, False)):
        b = np.log(np.exp(a) + move * np.array([1, 1, -1, -1]))
        assert solve_clusters(Problem.of(x, x + 0.1, a, b), no_solver, snap=snap) is None


@pytest.mark.parametrize("turned", [False, True])
def test_as_many_atoms_are_not_as_much_mass(turned: bool) -> None:
    x, logs = np.array([[0.0], [1.0], [50.0], [51.0]]), (np.zeros(4), np.log([0.4, 0.2, 0.2, 0.2]))
    problem = Problem.of(x, x + 0.1, *(logs[::-1] if turned else logs))
    assert solve_clusters(problem, no_solver, snap=True) is None


def test_the_mass_of_a_cluster_is_the_lesser_of_two_that_rounding_tells_apart() -> None:
    is_less = set()
    for seed in range(8):
        rng = np.random.default_rng(seed)
        a, b = rng.dirichlet(np.ones(20), size=2)
        for part in (slice(10), slice(10, None)):
            b[part] *= a[part].sum() / b[part].sum()
        x = np.repeat([[0.0], [50.0]], 10, 0)
        p = Problem.of(x, x, np.log(a), np.log(b))
        parts = [clusters._Cluster(k, k) for k in (np.arange(10), np.arange(10, 20))]
        found = clusters._log_masses(p, parts, snap=True)
        for k, (rows, cols) in enumerate(parts):
            mine, theirs = (np.logaddexp.reduce(t) for t in (p.logs_a[rows], p.logs_b[cols]))
            assert found[k] <= min(mine, theirs) + 2e-16
            is_less.add(np.sign(mine - theirs))
    assert {-1.0, 1.0} <= is_less


def test_counts_have_to_agree_in_every_cluster() -> None:
    """Of three one has as many atoms in both clouds: the others exchange an atom."""
    centres, moves = np.array([0.0, 50.0, 90.0]), np.array([[0.0], [0.1], [0.3], [0.4]])
    x, y = (np.repeat(centres, sizes)[:, None] for sizes in ((1, 1, 2), (1, 2, 1)))
    problem = Problem.of(x, y + moves, np.zeros(4), np.zeros(4))
    assert solve_clusters(problem, no_solver, snap=True) is None


@pytest.mark.parametrize("far", [0, 1, 2, 4])
def test_one_atom_of_many_that_is_far_away_is_a_cluster(far: int) -> None:
    """A sample of 64 atoms of each cloud would miss most of them."""
    x, y = 1e-10 * np.random.default_rng(0).normal(size=(2, 450, 2))
    x[far, 0] = y[far, 0] = 1.0
    found = solve_w2(x, np.concatenate([y, y]), strict=False)
    assert found.relative_width < 1e-6


@pytest.mark.parametrize("order", [1, 2, 3])
def test_clusters_on_a_long_line_are_known_as_well_as_on_a_short_one(order: int) -> None:
    """Rounding of the weights moves 1e-17 of the mass by 1, more than 1e-9 of all of it."""
    moves = 1e-9 * np.random.default_rng(0).normal(size=(3, 500, 1))
    x, y = moves[0] + np.arange(500)[:, None] % 2, moves[1:].reshape(-1, 1)
    y += np.arange(1000)[:, None] % 2
    for mu, nu in ((x, y), (x[:100], y[:200])):
        assert solve_wp(mu, nu, order).relative_width < 1e-9


@pytest.mark.parametrize("order", [1, 2, 3])
def test_potentials_of_clusters_are_feasible_between_them_too(order: int) -> None:
    rng = np.random.default_rng(0)
    centres = 100 * np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.5]])
    x, y = np.repeat(centres, 4, 0) + rng.normal(size=(2, 12, 2))
    p = Problem(x, y, np.zeros(12), np.zeros(12), order=order)

    def solver(*arrays: np.ndarray) -> Any:
        part = Problem.of(*arrays, order=order)
        found = in_unit(solve_dense(part, rtol=1e-9), part.exponent)
        return replace(
            found, f=found.f - 3 * 100**order, g=found.g + 3 * 100**order
        )  # as good inside

    found = solve_clusters(p, solver, snap=True)
    assert found is not None and found.f is not None
    costs = np.linalg.norm(x[:, None] - y, axis=-1) ** order
    assert (found.f[:, None] + found.g <= costs + 1e-7).all()
    gained = (found.f.mean() + found.g.mean()) ** (1 / order)
    assert gained == pytest.approx(float(found.lower), rel=1e-6)


@pytest.mark.parametrize("offset", [0.0, -700.0])
def test_the_doubt_of_a_mass_is_what_a_place_of_each_logarithm_moves(offset: float) -> None:
    logs = offset - np.random.default_rng(0).uniform(0, 1, 1000)
    mass, doubt = clusters._log_mass(logs)
    for end in (-math.inf, math.inf):
        assert abs(clusters._log_mass(np.nextafter(logs, end))[0] - mass) <= doubt
    assert doubt <= 2**-53 * (8 + 2 * np.abs(logs).max())
    alone, doubt = clusters._log_mass(np.zeros(1))
    assert alone == 0 and doubt >= 4 * 2**-53  # a weight of 1 is rounded too
