"""W_p of any order: exact programs, quantiles, gradients."""

from __future__ import annotations

from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist

from meanfield.measures import ParticleMeasure
from meanfield.transport import solve_wp, wp
from meanfield.transport.certificate import SparsePlan, certified, in_unit
from meanfield.transport.problem import Problem
from tests.transport.transport_oracles import exact_optimum, exact_transport

seeds = st.integers(0, 2**31)
ORDERS = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 7.0)


def clouds(seed: int, n: int, m: int, d: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(n, d)), rng.normal(size=(m, d)) + 0.3
    return x, y, rng.dirichlet(np.ones(n)), rng.dirichlet(np.ones(m))


@given(seeds, st.sampled_from(ORDERS), st.integers(1, 7), st.integers(1, 7), st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_it_is_the_exact_optimum(seed: int, p: float, n: int, m: int, d: int) -> None:
    x, y, a, b = clouds(seed, n, m, d)
    found = solve_wp((x, a), (y, b), p)
    costs = [[Fraction(c) for c in row] for row in (cdist(x, y) ** p).tolist()]
    truth = float(exact_optimum(costs, np.log(a), np.log(b))) ** (1 / p)
    assert float(found.value) == pytest.approx(truth, rel=1e-12)
    assert found.order == p
    assert (found.method == "line") == (d == 1 < min(n, m)) or n == m == p == 2
    assert float(found.relative_width) < 1e-9
    f, g = found.potentials
    assert (f[:, None] + g <= cdist(x, y) ** p + 1e-12 * np.abs(f).max() + 1e-14).all()


@pytest.mark.parametrize("p", [0.5, 0, -1, float("nan"), float("inf"), 101])
def test_orders_below_one_and_beyond_a_hundred_are_refused(p: float) -> None:
    with pytest.raises(ValueError, match="p: expected"):
        wp(np.zeros((2, 1)), np.ones((2, 1)), p)


@pytest.mark.parametrize(("p", "place"), [(2, 1e300), (3, 1e158), (20, -1e18)])
def test_atoms_that_are_all_in_one_place_are_at_distance_zero_however_far(p, place) -> None:
    points = np.full((3, 1), place)
    a, b = np.array([0.2, 0.3, 0.5]), np.array([0.33, 0.33, 0.34])
    found = solve_wp((points, a), (points, b), p)
    assert found.lower == found.value == 0
    assert found.converged
    assert found.upper <= 1e-5 * abs(place)


def test_uniform_clouds_are_known_at_orders_whose_costs_lie_far_apart() -> None:
    """The simplex finds a plan that costs 1e-4 too much: a permutation that is not the best."""
    for seed in range(3):
        x, y = np.random.default_rng(seed).normal(size=(2, 30, 2))
        assert float(solve_wp(x, y, 60).relative_width) < 1e-12


@pytest.mark.parametrize(("p", "width"), [(8, 1e-12), (20, 1e-8), (40, 1e-4), (60, 0.2)])
def test_large_orders_of_weighted_atoms_keep_the_digits_that_their_weights_have(p, width) -> None:
    x, y, a, b = [-1.0, 1.0], [-0.875, 0.25], [0.875, 0.125], [0.75, 0.25]
    found = solve_wp((np.array(x)[:, None], np.array(a)), (np.array(y)[:, None], np.array(b)), p)
    # By quantiles; that the weights are known to a unit in their last place costs 2^p of it.
    entries = ((0, 0, 0.75), (0, 1, 0.125), (1, 1, 0.125))
    power = sum(Fraction(m) * abs(Fraction(x[i]) - Fraction(y[j])) ** p for i, j, m in entries)
    with mpmath.workdps(40):
        truth = (mpmath.mpf(power.numerator) / power.denominator) ** (mpmath.mpf(1) / p)
        assert mpmath.mpf(found.lower) <= truth <= mpmath.mpf(found.upper)
    assert float(found.relative_width) < width


@pytest.mark.parametrize("p", [12, 40, 100])
def test_mass_that_has_to_cross_is_in_the_upper_end_of_large_orders(p: int) -> None:
    """Two clusters, whose atoms hardly move; 1e-17 of mass may have to go across."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        at = np.repeat([0.0, 0.55], 3)
        x, y = at + 1e-2 * rng.random(6), at + 1e-2 * rng.random(6)
        a, b = rng.dirichlet(np.ones(6)), np.zeros(6)
        for part in (slice(0, 3), slice(3, 6)):
            b[part] = a[part].sum() * rng.dirichlet(np.ones(3))
        mu, nu = (ParticleMeasure(t[:, None], w) for t, w in ((x, a), (y, b)))
        found = solve_wp(mu, nu, p, exact_weights=True, strict=False)
        logs = [t.log_weights.numpy() for t in (mu, nu)]
        truth = exact_transport(x[:, None], y[:, None], *logs, order=p)
        with mpmath.workdps(60):
            root = (mpmath.mpf(truth.numerator) / truth.denominator) ** (mpmath.mpf(1) / p)
            assert mpmath.mpf(float(found.lower)) <= root <= mpmath.mpf(float(found.upper))


def test_a_plan_of_which_powers_underflow_still_pays_for_what_it_misses() -> None:
    x, y = np.array([[0.0], [0.55]]), np.array([[1e-5], [0.55]])
    problem = Problem.of(x, y, np.log([0.3, 0.7]), np.log([0.7, 0.3]), order=100)
    plan = SparsePlan(np.array([0]), np.array([0]), np.array([np.log(0.3)]))
    answer = certified(problem, plan, np.zeros(problem.m), method="m", rtol=1e-9)
    found = in_unit(answer, problem.exponent)
    assert float(found.upper) >= 0.55 * 0.4 ** (1 / 100) * (1 - 1e-9)


@pytest.mark.parametrize("mass", [0.1, 1e-20])
def test_what_has_less_far_to_go_than_powers_reach_is_paid_for(mass: float) -> None:
    """Of two atoms 1e-4 apart, at the centre of a cloud with one at 1; (1e-4)^100 is 0."""
    x = np.array([[0.0], [1e-4], [1.0]])
    a = np.log([0.9, 0.1, 1e-16]) if mass == 0.1 else np.log([1.0, mass, 1e-16])
    b = np.log([1.0, 1e-40, 1e-16])
    problem = Problem.of(x, x, a, b, order=100)
    logs = np.minimum(problem.logs_a, problem.logs_b)
    plan = SparsePlan(np.arange(3), np.arange(3), logs)
    answer = certified(problem, plan, np.zeros(problem.m), method="m", rtol=1e-9)
    found = in_unit(answer, problem.exponent)
    assert float(found.upper) >= 1e-4 * mass ** (1 / 100)


@given(seeds, st.sampled_from((1, 2, 3, 8, 20)), st.floats(0, 1), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_plan_that_misses_its_marginals_has_its_repair_in_the_upper_end(seed, p, kept, far):
    """Some of the right entries are left out, or all: what is missing may have farthest to go."""
    x, y, a, b = clouds(seed, 3, 4, 1)
    x, y = (0 * x, 0 * y + 1) if far else (x, y)
    costs = [[Fraction(c) for c in row] for row in (cdist(x, y) ** p).tolist()]
    truth = float(exact_optimum(costs, np.log(a), np.log(b))) ** (1 / p)
    problem = Problem.of(x, y, np.log(a), np.log(b), order=p)
    rows, cols = (t.ravel() for t in np.indices((3, 4)))
    those = np.random.default_rng(seed).random(12) < kept
    logs = (problem.logs_a[rows] + problem.logs_b[cols])[those]
    plan = SparsePlan(rows[those], cols[those], logs)
    answer = certified(problem, plan, np.zeros(problem.m), method="m", rtol=1e-9)
    found = in_unit(answer, problem.exponent)
    assert float(found.upper) >= truth * (1 - 1e-12)


@pytest.mark.parametrize(
    ("p", "step", "d"),
    [
        (1.1, 1e-200, 2),
        (1.5, 1e-150, 1),
        (2.5, 1e-95, 2),
        (3, 1e-80, 2),
        (3, 1e-40, 2),
        (7, 1e-34, 2),
    ],
)
def test_roots_whose_exponent_is_no_float_are_inside(p: float, step: float, d: int) -> None:
    """1/p is rounded, which moves the root of 1e-240 by fifty last places."""
    x = np.eye(2, d, -1)
    y = x.copy()
    y[0, 0] += step
    y[1, -1] += step if d == 2 else 0.0
    found = solve_wp(x, y, p)
    with mpmath.workdps(60):
        mass = mpmath.mpf(d) / 2
        truth = mpmath.mpf(step) * mass ** (1 / mpmath.mpf(p))
        assert mpmath.mpf(found.lower) <= truth <= mpmath.mpf(found.upper)
    assert float(found.relative_width) < 1e-12


def test_of_a_batch_in_single_precision_each_pair_has_its_potentials() -> None:
    x = torch.tensor([[[1.0], [2.0]], [[1e-3], [2e-3]]])
    both = solve_wp(x, torch.zeros(2, 1, 1), 20).potentials
    alone = solve_wp(x[0], torch.zeros(1, 1), 20).potentials
    for of_both, of_one in zip(both, alone, strict=True):
        assert torch.equal(of_both[0], of_one) and bool(of_both[1].isnan().any())
    assert solve_wp(x[1], torch.zeros(1, 1), 20).potentials is None


def test_a_pair_beyond_the_number_range_leaves_the_others_their_potentials() -> None:
    x, y = np.random.default_rng(0).normal(size=(2, 4, 2))
    units = np.array([1.0, 1e200])[:, None, None]
    f, g = solve_wp(units * x, units * y, 2).potentials
    assert np.isfinite(f[0]).all() and np.isfinite(g[0]).all()
    assert np.isnan(f[1]).all() and np.isnan(g[1]).all()


def test_of_pairs_beyond_both_precisions_none_has_potentials() -> None:
    x = torch.tensor([[[1e-20], [2e-20]], [[1e-3], [2e-3]]])  # in double, in single
    assert solve_wp(x, torch.zeros(2, 1, 1), 20).potentials is None
