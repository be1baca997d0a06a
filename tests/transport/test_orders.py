"""W_p of any order: exact programs, quantiles, gradients."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist

from meanfield.transport import solve_wp, wp
from meanfield.transport.certificate import powers_added, powers_less
from tests.transport.transport_oracles import exact_optimum

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
    assert float(found.relative_width) < 1e-9
    f, g = found.potentials
    assert (f[:, None] + g <= cdist(x, y) ** p + 1e-12 * np.abs(f).max() + 1e-14).all()


@given(seeds, st.sampled_from(ORDERS), st.integers(2, 60), st.integers(2, 60))
@settings(max_examples=30, deadline=None)
def test_on_the_line_it_is_the_distance_of_quantile_functions(
    seed: int, p: float, n: int, m: int
) -> None:
    x, y, a, b = clouds(seed, n, m, 1)
    order_x, order_y = x[:, 0].argsort(), y[:, 0].argsort()
    ends = np.union1d(np.cumsum(a[order_x]), np.cumsum(b[order_y])).clip(max=1)
    middles = (np.r_[0, ends[:-1]] + ends) / 2
    at_x = np.searchsorted(np.cumsum(a[order_x]), middles).clip(max=n - 1)
    at_y = np.searchsorted(np.cumsum(b[order_y]), middles).clip(max=m - 1)
    moved = np.abs(x[order_x, 0][at_x] - y[order_y, 0][at_y])
    truth = (np.diff(ends, prepend=0) @ moved**p) ** (1 / p)
    found = solve_wp((x, a), (y, b), p)
    assert found.method == "line"
    assert float(found.value) == pytest.approx(truth, rel=1e-9)


@pytest.mark.parametrize("p", [1.5, 2, 3, 4.5])
def test_gradients_are_those_of_differences(p: float) -> None:
    x, y, a, b = clouds(5, 6, 7, 2)
    points = torch.tensor(x, requires_grad=True)
    logs = torch.tensor(np.log(a), requires_grad=True)
    nu = (torch.tensor(y), torch.tensor(b))
    wp((points, logs.softmax(0)), nu, p).backward()
    way, turn = np.random.default_rng(1).normal(size=x.shape), np.arange(6) - 2.5
    step = 1e-6

    def value(moved: float, turned: float) -> float:
        shifted = np.log(a) + turned * turn
        return float(wp((x + moved * way, np.exp(shifted) / np.exp(shifted).sum()), (y, b), p))

    along = (value(step, 0) - value(-step, 0)) / (2 * step)
    assert float((points.grad * torch.tensor(way)).sum()) == pytest.approx(along, rel=1e-6)
    turned = (value(0, step) - value(0, -step)) / (2 * step)
    assert float((logs.grad * torch.tensor(turn)).sum()) == pytest.approx(turned, rel=1e-6)


@given(st.floats(1e-300, 1e300), st.floats(0, 1), st.sampled_from([1.0, 1.5, 2.0, 3.0, 10.0]))
def test_sums_and_differences_of_powers_do_not_leave_the_range(
    whole: float, share: float, p: float
) -> None:
    import mpmath

    s, t = np.float64(whole), np.float64(whole * share)
    with mpmath.workdps(60):
        power = [mpmath.mpf(float(v)) ** p for v in (s, t)]
        total, rest = (power[0] + sign * power[1] for sign in (1, -1))
        # Where their squares underflow or overflow too.
        if s < 1e300:
            added = float(total ** (1 / mpmath.mpf(p)))
            assert float(powers_added(s, t, p)) == pytest.approx(added, rel=1e-14)
        less = float(max(rest, 0) ** (1 / mpmath.mpf(p)))
        assert float(powers_less(s, t, p)) <= less * (1 + 1e-15)
        if share < 0.5:
            assert float(powers_less(s, t, p)) == pytest.approx(less, rel=1e-12)


@pytest.mark.parametrize("p", [0.5, 0, -1, float("nan"), float("inf")])
def test_orders_below_one_and_without_end_are_refused(p: float) -> None:
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
