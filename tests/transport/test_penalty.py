"""Conditional transport at a price: both limits, rational optima, closed forms, any conditions."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist

from meanfield.measures import ParticleMeasure
from meanfield.transport import (
    conditional_sinkhorn_divergence,
    conditional_w2,
    solve_conditional_w2,
)
from tests.transport.transport_oracles import priced_optimum

seeds = st.integers(0, 2**31)
PENALTIES = (0.0, 2.0**-10, 0.3, 1.0, 7.0, 4.0**5, 1e9)


def clouds(seed: int, n: int, m: int, k: int = 1) -> tuple[np.ndarray, ...]:
    """Points, conditions on a grid of three values, and weights of conditions that agree."""
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(n, 2)), rng.normal(size=(m, 2)) + 0.3
    places = rng.normal(size=(3, k))
    at_x, at_y = (np.r_[:3, rng.integers(3, size=size - 3)] for size in (n, m))
    share = rng.dirichlet(np.ones(3))
    a, b = (share[at] * rng.uniform(0.5, 1, size=len(at)) for at in (at_x, at_y))
    for weights, at in ((a, at_x), (b, at_y)):
        for group in range(3):
            weights[at == group] *= share[group] / weights[at == group].sum()
    return x, y, places[at_x], places[at_y], a, b


@given(seeds, st.sampled_from(PENALTIES[1:]), st.integers(3, 6), st.integers(3, 6))
@settings(max_examples=12, deadline=None)
def test_the_interval_contains_the_rational_optimum(
    seed: int, penalty: float, n: int, m: int
) -> None:
    x, y, s, t, a, b = clouds(seed, n, m, 2)
    mu, nu = ParticleMeasure(x, a), ParticleMeasure(y, b)
    logs = [each.log_weights.numpy() for each in (mu, nu)]
    truth = math.sqrt(priced_optimum(x, y, s, t, *logs, penalty=penalty))
    # Masses of conditions differ by 1e-17, which a price of 1e9 makes felt: as they are stored.
    room = 1e-9 if penalty < 1e6 else 1e-4
    found = solve_conditional_w2(
        mu, nu, conditions=(s, t), penalty=penalty, exact_weights=True, strict=False
    )
    assert float(found.lower) <= truth * (1 + 1e-15)
    assert float(found.upper) >= truth * (1 - 1e-15)
    assert float(found.relative_width) < room
    f, g = (np.asarray(each) for each in found.potentials)
    assert np.exp(logs[0]) @ f + np.exp(logs[1]) @ g == pytest.approx(truth**2, rel=room)
    costs = cdist(x, y) ** 2 + penalty * cdist(s, t) ** 2
    size = costs + np.abs(f[:, None]) + np.abs(g)
    assert (f[:, None] + g <= costs + 1e-12 * (1 + size)).all()


@pytest.mark.parametrize("k", [1, 3])
def test_it_grows_with_the_price_up_to_the_conditional_distance(k: int) -> None:
    x, y, s, t, a, b = clouds(1, 12, 9, k)
    pair, both = ((x, a), (y, b)), {"conditions": (s, t)}
    values = [float(conditional_w2(*pair, **both, penalty=p)) for p in PENALTIES]
    last = float(conditional_w2(*pair, **both))
    assert values[0] < values[2] < values[4]
    # Masses of the conditions agree to 1e-17, and a price of λ is paid for what is left; where it
    # is so high that conditions are far apart, such masses are taken as equal.
    slack = 1e-16 * np.array(PENALTIES) + 1e-12
    assert (np.diff(values) >= -slack[1:] * last).all()
    assert (np.array(values) <= last * (1 + slack)).all()
    for penalty in (4.0**12, 1e9, 1e60, math.inf):
        dear = solve_conditional_w2(*pair, **both, penalty=penalty)
        near = 1e-12 + (1e-16 * penalty if penalty < 1e12 else 0)
        assert float(dear.value) == pytest.approx(last, rel=near)


@pytest.mark.parametrize("penalty", [None, 0.7])
def test_swapped_arguments_and_shapes_of_conditions_change_nothing(penalty: float) -> None:
    x, y, s, t, a, b = clouds(6, 8, 9)
    there = solve_conditional_w2((x, a), (y, b), conditions=(s, t), penalty=penalty)
    back = solve_conditional_w2((y, b), (x, a), conditions=(t, s), penalty=penalty)
    flat = solve_conditional_w2(
        (x, a), (y, b), conditions=(s[:, 0], torch.tensor(t[:, 0])), penalty=penalty
    )
    assert float(back.value) == pytest.approx(float(there.value), rel=1e-13)
    assert float(flat.value) == float(there.value)
    batch = solve_conditional_w2(
        np.stack([x[:8], x[:8] + 1]), y[:8], conditions=(s[:8], t[:8]), penalty=0.7, strict=False
    )
    assert batch.value.shape == (2,)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"penalty": -1.0}, "penalty: expected"),
        ({"penalty": math.nan}, "penalty: expected"),
        ({"conditions": (np.zeros(4), np.zeros(6))}, r"conditions of mu: .*5 atoms.*\(4,\)"),
        ({"conditions": (np.zeros((5, 2)), np.zeros((6, 3)))}, "one dimension k, got 2 .* 3"),
        ({"conditions": (np.zeros(5), np.full(6, np.nan))}, "conditions of nu"),
        ({"conditions": np.zeros(5)}, "a pair"),
        ({"conditions": None}, "ParticleMeasure"),
    ],
)
def test_what_cannot_be_meant_is_refused(settings: dict, match: str) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(5, 2)), rng.normal(size=(6, 2))
    both = {"conditions": (np.zeros(5), np.zeros(6))} | settings
    with pytest.raises((ValueError, TypeError), match=match):
        solve_conditional_w2(x, y, **both)


@pytest.mark.parametrize("penalty", [0.7, 2.0, 1e8])
def test_what_the_price_rounds_off_the_points_is_in_the_interval(penalty: float) -> None:
    """Points are divided by the root of a price that is no power of four, and far from 0."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        x, y = 1e8 + rng.normal(size=(2, 1, 2))
        truth = sum((Fraction(u) - Fraction(v)) ** 2 for u, v in zip(x[0], y[0], strict=True))
        found = solve_conditional_w2(
            x, y, conditions=([0.5], [0.5]), penalty=penalty, strict=False
        )
        assert Fraction(float(found.lower)) ** 2 <= truth <= Fraction(float(found.upper)) ** 2
        assert float(found.relative_width) < 1e-5


@pytest.mark.parametrize("penalty", [4.0**-3, 1.0, 4.0, 4.0**5])
def test_a_price_that_is_a_power_of_four_rounds_nothing(penalty: float) -> None:
    x, y = 1e8 + np.random.default_rng(0).normal(size=(2, 4, 2))
    s, t = np.arange(4.0), np.arange(4.0) + 0.5
    found = solve_conditional_w2(x, y, conditions=(s, t), penalty=penalty)
    assert float(found.relative_width) < 1e-12


@pytest.mark.parametrize("far", [1e300, math.nan])
def test_where_an_atom_without_mass_is_rounds_nothing_either(far: float) -> None:
    x, y = np.random.default_rng(0).normal(size=(2, 4, 2))
    blank = ParticleMeasure(np.concatenate([x, x[:1]]), [0.25] * 4 + [0.0])
    mu = blank.replace(blank.points.clone().index_fill(0, torch.tensor([4]), far))
    s, t = np.arange(5.0), np.arange(4.0) + 0.5
    found, known = (
        solve_conditional_w2(mu, y, conditions=(s, t), penalty=2.0),
        solve_conditional_w2(x, y, conditions=(s[:4], t), penalty=2.0),
    )
    assert float(found.lower) == pytest.approx(float(known.lower), rel=1e-12)
    assert float(found.upper) == pytest.approx(float(known.upper), rel=1e-12)


@pytest.mark.parametrize("swap", [False, True])
def test_a_light_position_says_how_much_is_rounding_beside_a_heavy_one(swap: bool) -> None:
    """1e-3 or 1e-3 + 5e-12 moves by 1: of itself that is a thousand times what others gain."""
    points, positions = torch.tensor([[0.0], [5.0]]).double(), [0.0, 1.0]
    mu = ParticleMeasure(points, [1e-3 + 5e-12, 1 - 1e-3 - 5e-12], positions=positions)
    moved = points + torch.tensor([[1.0], [0.0]])
    nu = ParticleMeasure(moved, [1e-3, 1 - 1e-3], positions=positions)
    found = solve_conditional_w2(*((nu, mu) if swap else (mu, nu)), strict=False)
    assert float(found.lower) ** 2 <= 1e-3
    assert 1e-3 + 5e-12 <= float(found.upper) ** 2 < 1e-3 + 2e-11


@pytest.mark.parametrize("swap", [False, True])
def test_masses_of_positions_that_hardly_differ_are_in_the_interval(swap: bool) -> None:
    """By 4e-9 of mass, which counts as equal, and moves by 1 at the first position only."""
    points = torch.tensor([[0.0], [5.0]], dtype=torch.float64)
    mu = ParticleMeasure(points, [0.5 + 4e-9, 0.5 - 4e-9], positions=[0.0, 1.0])
    nu = ParticleMeasure(points + torch.tensor([[1.0], [0.0]]), [0.5, 0.5], positions=[0.0, 1.0])
    found = solve_conditional_w2(*((nu, mu) if swap else (mu, nu)), strict=False)
    assert float(found.lower) ** 2 <= 0.5
    assert 0.5 + 4e-9 <= float(found.upper) ** 2 < 0.5 + 2e-8


@pytest.mark.parametrize("swap", [False, True])
def test_the_position_whose_mass_differs_most_says_how_much_is_rounding(swap: bool) -> None:
    """Beside one of equal masses: 0.3 or 0.3 + 2e-9 moves by 1, and nothing else does."""
    points, positions = torch.tensor([[0.0], [5.0], [9.0]]).double(), [0.0, 0.5, 1.0]
    mu = ParticleMeasure(points, [0.3 + 2e-9, 0.3 - 2e-9, 0.4], positions=positions)
    moved = points + torch.tensor([[1.0], [0.0], [0.0]])
    nu = ParticleMeasure(moved, [0.3, 0.3, 0.4], positions=positions)
    found = solve_conditional_w2(*((nu, mu) if swap else (mu, nu)), strict=False)
    assert float(found.lower) ** 2 <= 0.3
    assert 0.3 + 2e-9 <= float(found.upper) ** 2 < 0.3 + 1e-8


@pytest.mark.parametrize("apart", [1e-10, -1e-10])
def test_masses_of_a_light_position_agree_relative_to_themselves(apart: float) -> None:
    """1e-3 and 1e-3 ± 1e-10: 1e-7 of it, whichever of both measures has more there."""
    points, positions = torch.tensor([[0.0], [5.0]]).double(), [0.0, 1.0]
    mu = ParticleMeasure(points, [1 - 1e-3, 1e-3], positions=positions)
    nu = ParticleMeasure(points, [1 - 1e-3 - apart, 1e-3 + apart], positions=positions)
    assert float(conditional_w2(mu, nu)) == math.inf


@pytest.mark.parametrize("distance", [conditional_w2, conditional_sinkhorn_divergence])
@pytest.mark.parametrize(("largest", "penalty"), [(1e308, 4.0), (1e200, 1e300)])
def test_prices_that_leave_the_number_range_are_refused(distance, largest, penalty) -> None:
    points, s = [[0.0], [1.0]], [0.0, largest]
    with pytest.raises(ValueError, match="penalty: expected .* range"):
        distance(points, points, conditions=(s, s), penalty=penalty)


@pytest.mark.parametrize("distance", [conditional_w2, conditional_sinkhorn_divergence])
def test_conditions_of_absent_atoms_may_be_anywhere(distance) -> None:
    mu, nu = ParticleMeasure([[0.0], [1.0], [0.0]], [0.5, 0.5, 0.0]), [[1.0], [0.0]]
    far, near = (
        distance(mu, nu, conditions=([0.0, 1.0, z], [0.0, 1.0]), penalty=4.0) for z in (1e308, 0.5)
    )
    assert float(far) == pytest.approx(float(near), rel=1e-12)
