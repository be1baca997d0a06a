"""Conditional W₂: positions are kept, and the parts add up."""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath
import numpy as np
import pandas as pd
import pytest
import torch

from meanfield.measures import ParticleMeasure, mixture
from meanfield.transport import (
    conditional_sinkhorn_divergence,
    conditional_w2,
    solve_conditional_w2,
    w2,
)
from meanfield.transport.certificate import power_mean


def test_unequal_first_marginals_are_infinitely_far() -> None:
    x = torch.zeros(2, 1, dtype=torch.float64)
    here = ParticleMeasure(x, positions=[0.5, 1.0])
    for other in (
        ParticleMeasure(x, positions=[0.25, 1.0]),
        ParticleMeasure(x, [0.4, 0.6], positions=[0.5, 1.0]),
        ParticleMeasure(x[:1], positions=[1.0]),
        ParticleMeasure(x, [0.5 - 2e-8, 0.5 + 2e-8], positions=[0.5, 1.0]),
    ):
        result = solve_conditional_w2(here, other)
        assert float(result.value) == float(result.lower) == float(result.upper) == math.inf
        assert float(conditional_w2(other, here)) == math.inf


@pytest.mark.parametrize("distance", [conditional_w2, conditional_sinkhorn_divergence])
def test_positions_that_differ_in_their_last_digits_alone_are_refused(distance) -> None:
    points, steps = torch.randn(11, 2, dtype=torch.float64), torch.arange(11).double()
    here, there = (ParticleMeasure(points, positions=s) for s in (steps * 0.1, steps / 10))
    assert (here.positions != there.positions).any()
    settings = {} if distance is conditional_w2 else {"blur": 0.1}
    with pytest.raises(ValueError, match="positions: .* in their last digits alone"):
        distance(here, there, **settings)
    # Both in one measure, where the other has one of them.
    with pytest.raises(ValueError, match="last digits"):
        distance(mixture([here, there]), here, **settings)
    # Further apart they are other positions, and those of atoms without mass do not count.
    padded = ParticleMeasure(
        torch.cat([points, points[:1]]),
        [1 / 11] * 11 + [0.0],
        positions=torch.cat([here.positions, steps[:1] + 0.55]),
    )
    with pytest.raises(ValueError, match="last digits"):
        distance(padded, there, **settings)
    apart = ParticleMeasure(points, positions=steps * 0.1 * (1 - 1e-11))
    assert float(distance(here, apart, **settings)) == math.inf
    mass = (here.positions == there.positions).double()
    light = [
        ParticleMeasure(points, mass / mass.sum(), positions=each.positions)
        for each in (here, there)
    ]
    assert float(distance(*light, **settings)) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("distance", [conditional_w2, conditional_sinkhorn_divergence])
def test_positions_in_single_and_in_double_precision_are_not_told_apart(distance) -> None:
    points, steps = torch.randn(11, 2), torch.arange(11, dtype=torch.float32)
    short, other = steps * 0.1, steps / 10
    assert (short != other).any()
    wide = points.double()
    pairs = [
        (ParticleMeasure(points, positions=short), ParticleMeasure(points, positions=other)),
        (
            ParticleMeasure.from_sequence(points).to(torch.float64),
            ParticleMeasure.from_sequence(wide),
        ),
    ]
    for here, there in pairs:
        for mu, nu in ((here, there), (there, here)):
            with pytest.raises(ValueError, match="in single and in double precision"):
                distance(mu, nu, blur=0.1) if distance is not conditional_w2 else distance(mu, nu)
    s = np.linspace(0, 1, 11)
    with pytest.raises(ValueError, match="in single and in double precision"):
        distance(wide, wide, conditions=(s, s.astype(np.float32)))
    assert float(distance(wide, wide, conditions=(s, s * (1 + 1e-9)))) == math.inf
    beyond = 1e39 * (1 + s)  # which single precision does not hold
    assert float(distance(wide, wide, conditions=(beyond, beyond * (1 + 1e-9)))) == math.inf
    whole = 1_700_000_000 + 128 * np.arange(11)
    assert (whole == whole.astype(np.float32)).all()
    assert float(distance(wide, wide, conditions=(whole, whole + 0.5))) == math.inf


def test_conditions_with_other_batch_axes_than_the_points_are_refused() -> None:
    x, several = torch.randn(3, 2), torch.randn(2, 3, 2)
    for y, s, t in (
        (x, torch.zeros(2, 3), torch.zeros(3)),
        (several, torch.zeros(3), torch.zeros(4, 3)),
    ):
        with pytest.raises(ValueError, match="expected the batch axes of its points"):
            solve_conditional_w2(x, y, conditions=(s, t))
    both = solve_conditional_w2(x, several, conditions=(torch.zeros(2, 3), torch.zeros(3))).value
    torch.testing.assert_close(both, w2(x, several))


@pytest.mark.parametrize("apart", [0.0, 1e-12, 9e-9])
def test_masses_of_positions_that_differ_a_little_are_told_as_rounding(apart: float) -> None:
    generator = torch.Generator().manual_seed(6)
    x, y = (torch.randn(6, 2, dtype=torch.float64, generator=generator) for _ in range(2))
    a = torch.tensor([0.1, 0.2, 0.2, 0.1, 0.2, 0.2], dtype=torch.float64)
    b = torch.tensor([0.2, 0.2, 0.1, 0.1, 0.1, 0.3], dtype=torch.float64)
    b = b + apart / 6 * torch.tensor([1.0, 1, 1, -1, -1, -1])
    s = torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0, 1.0])
    found = solve_conditional_w2((x, a), (y, b), conditions=(s, s))
    assert found.converged
    width = float(found.upper - found.lower)
    assert apart / 10 < width <= 1e-11 + 1.01 * float(found.rounding)


@pytest.mark.parametrize("swap", [False, True])
def test_masses_in_single_precision_are_equal_within_its_rounding(swap: bool) -> None:
    x = torch.tensor([[0.0], [5.0]])
    mu = ParticleMeasure(x, [0.5 + 2e-6, 0.5 - 2e-6], positions=torch.tensor([0.5, 1.0]))
    nu = ParticleMeasure(x + 1, positions=torch.tensor([0.5, 1.0]))
    assert float(conditional_w2(*((nu, mu) if swap else (mu, nu)))) == pytest.approx(1, abs=1e-5)


def test_log_weights_of_single_precision_have_mass_1() -> None:
    """log(1/400) is wrong by 2e-7 there, and so would be the masses of 400 positions."""
    s, x = np.arange(400.0), np.zeros((400, 1), np.float32)
    found = solve_conditional_w2(x, x + 1, conditions=(s, s)).found
    assert found is not None
    assert found[1].lower[0] <= 1 <= found[1].upper[0] < 1 + 1e-12


@pytest.mark.parametrize("distance", [conditional_w2, conditional_sinkhorn_divergence])
def test_conditions_that_are_vectors_are_told_apart_by_any_coordinate(distance) -> None:
    x, y = np.array([[0.0], [1.0]]), np.array([[1.0], [0.0]])
    for s in ([[0.0, 7.0], [1.0, 7.0]], [[7.0, 0.0], [7.0, 1.0]]):
        assert float(distance(x, y, conditions=(s, s))) == 1.0
        assert float(distance(x, y, conditions=(s, np.add(s, 0.25)))) == math.inf
    assert float(distance(x, y, conditions=([[7.0, 0.5]] * 2, [[7.0, 0.75]] * 2))) == math.inf


def test_minus_0_and_0_are_one_condition() -> None:
    x, y = [[0.0], [1.0]], [[3.0], [4.0]]
    for s, t in (([0.0, 1.0], [-0.0, 1.0]), ([[2.0, 0.0]] * 2, [[2.0, -0.0], [2.0, 0.0]])):
        assert float(conditional_w2(x, y, conditions=(s, t))) == 3.0
        assert float(conditional_w2(x, y, conditions=(t, s))) == 3.0


@pytest.mark.parametrize("atoms", [1, 3])
def test_a_position_of_mass_e_to_the_minus_900_is_seen(atoms: int) -> None:
    generator = torch.Generator().manual_seed(4)
    light = torch.randn(atoms, 2, dtype=torch.float64, generator=generator)
    moved = light + 0.01 * torch.randn(atoms, 2, dtype=torch.float64, generator=generator)
    anchor = torch.tensor([[5.0, 5.0]], dtype=torch.float64)
    logs = torch.tensor([0.0] + [-900.0 - math.log(atoms)] * atoms, dtype=torch.float64)
    positions = torch.tensor([1.0] + [0.5] * atoms, dtype=torch.float64)
    mu, nu = (
        ParticleMeasure(torch.cat([anchor, t]), log_weights=logs, positions=positions)
        for t in (light, moved)
    )
    result = solve_conditional_w2(mu, nu)
    truth = float(mpmath.exp(-450)) * float(w2(light, moved))
    assert float(result.value) == pytest.approx(truth, rel=1e-12)
    assert float(result.lower) <= truth <= float(result.upper)


def test_measures_without_positions_are_refused() -> None:
    x = torch.zeros(2, 1, dtype=torch.float64)
    with pytest.raises(ValueError, match="positions"):
        conditional_w2(ParticleMeasure(x), ParticleMeasure(x, positions=[0.5, 1.0]))


def test_potentials_hold_at_atoms_without_mass_that_one_measure_alone_has() -> None:
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(n, 2, dtype=torch.float64, generator=generator) for n in (5, 4))
    s, t = torch.tensor([0.5, 0.5, 1.0, 1.0, 1.0]).double(), torch.tensor([0.5, 0.5, 1.0, 1.0])
    mu = ParticleMeasure(x, [0.25, 0.25, 0.25, 0.25, 0.0], positions=s)
    nu = ParticleMeasure(y, positions=t.double())
    for one, other in ((mu, nu), (nu, mu)):
        found = solve_conditional_w2(one, other)
        assert found.potentials is not None
        f, g = found.potentials
        cost = (one.points[:, None] - other.points).square().sum(-1)
        same = one.positions[:, None] == other.positions
        slack = (cost - f[:, None] - g)[same]
        assert float(slack.min()) >= -1e-12
        absent = f[-1] if one is mu else g[-1]
        tight = (cost - f[:, None] - g).where(same, math.inf).min(1 if one is mu else 0).values
        assert abs(float(tight[-1])) < 1e-12 and math.isfinite(float(absent))


@pytest.mark.parametrize("penalty", [None, 0.5])
@pytest.mark.parametrize("batch", [2, 3])
def test_a_batch_has_conditions_of_its_own_however_many_atoms_there_are(batch, penalty) -> None:
    """Of two measures of two atoms, (2, 2) is a number for each and no vector."""
    x = torch.tensor([[[0.0], [1.0]], [[0.0], [5.0]], [[0.0], [1.0]]]).double()[:batch]
    s = torch.tensor([[0.0, 1.0], [2.0, 2.0], [0.0, 1.0]])[:batch]
    y, settings = x.flip(1), {"penalty": penalty}
    found = solve_conditional_w2(x, y, conditions=(s, s), **settings).value
    for k in range(batch):
        alone = solve_conditional_w2(x[k], y[k], conditions=(s[k], s[k]), **settings)
        torch.testing.assert_close(found[k], alone.value)


def test_conditions_are_told_apart_in_double_precision_beside_points_in_single() -> None:
    points = np.array([[0.0], [1.0]], np.float32)
    given = [np.array([20_000_000, 20_000_001]), np.array([1.0, 1.0 + 1e-9]), [1.0, 1.0 + 1e-9]]
    for ids in given:
        assert float(conditional_w2(points, points[::-1].copy(), conditions=(ids, ids))) == 1.0
    large = np.array([2**53, 2**53 + 1])
    for ids in (large, torch.as_tensor(large)):
        with pytest.raises(ValueError, match="integers up to 2⁵³.*return_inverse"):
            conditional_w2(points, points, conditions=(ids, ids))


@pytest.mark.parametrize("as_what", [list, tuple, pd.Series, lambda t: pd.DataFrame({"id": t})])
def test_integers_that_double_precision_merges_are_refused_in_lists_and_frames_too(
    as_what,
) -> None:
    ids = as_what([2**60, 2**60 + 1])
    with pytest.raises(ValueError, match="integers up to 2⁵³"):
        conditional_w2([[0.0], [1.0]], [[1.0], [0.0]], conditions=(ids, ids))
    small = as_what([2**53 - 1, 2**53])
    assert float(conditional_w2([[0.0], [1.0]], [[1.0], [0.0]], conditions=(small, small))) == 1.0


def test_no_pair_of_grids_falls_between_two_roundings() -> None:
    found = 0
    for n in range(2, 400):
        s, t = np.linspace(0, 1, n), np.arange(n) / (n - 1)
        if (s != t).any():
            found += 1
            with pytest.raises(ValueError, match="last digits"):
                conditional_w2(np.zeros((n, 1)), np.zeros((n, 1)), conditions=(s, t))
    assert found > 100


def test_whole_numbers_have_no_last_digits() -> None:
    start = 1_700_000_000_000_000  # microseconds
    s, t = (np.array([[start, 0.5], [start + k, 0.5]]) for k in (2, 3))
    assert float(conditional_w2(np.eye(2), np.eye(2), conditions=(s, t))) == math.inf


@pytest.mark.parametrize("scale", [1e17, 1e20])
def test_large_conditions_have_last_digits_too(scale: float) -> None:
    s, t = np.arange(1, 8) * 0.1 * scale, np.arange(1, 8) / 10 * scale
    assert (s != t).any()
    with pytest.raises(ValueError, match="last digits"):
        conditional_w2(np.zeros((7, 1)), np.zeros((7, 1)), conditions=(s, t))


@pytest.mark.parametrize(
    "ids",
    [
        [[2**60, 0.5], [2**60 + 1, 0.5]],
        pd.DataFrame({"id": [2**60, 2**60 + 1], "x": [0.5, 0.5]}),
        [torch.tensor(2**60), torch.tensor(2**60 + 1)],
        [-(2**60), 0.5],
        np.array([-(2**60), 5]),
        np.array([2**63 + 5, 2**63 + 6], np.uint64),
    ],
)
def test_integers_beside_other_numbers_are_looked_at(ids) -> None:
    with pytest.raises(ValueError, match="integers up to 2⁵³"):
        conditional_w2([[0.0], [1.0]], [[1.0], [0.0]], conditions=(ids, ids))


def test_clouds_of_other_sizes_that_differ_in_last_digits_are_refused() -> None:
    s, t = np.array([0.1, 0.3, 0.3]), np.array([0.1, 3 * 0.1])
    with pytest.raises(ValueError, match="last digits"):
        conditional_w2(np.zeros((3, 1)), np.zeros((2, 1)), conditions=(s, t))


@pytest.mark.parametrize("kind", [np.timedelta64(1, "D"), np.timedelta64("NaT"), "a", None, True])
def test_conditions_of_no_numbers_are_refused_as_such(kind) -> None:
    with pytest.raises(TypeError, match="conditions of mu: expected an array or tensor of real"):
        conditional_w2([[0.0], [1.0]], [[1.0], [0.0]], conditions=([kind, kind], [0, 1]))


def test_distances_whose_squares_leave_the_number_range_are_finite() -> None:
    y, s = [[0.0], [0.0]], [0, 1]
    for far, near in ((1e155, 1.0), (1e300, 1e299), (1e300, 0.0)):
        found = solve_conditional_w2([[far], [near]], y, conditions=(s, s))
        truth = Fraction(far) ** 2 / 2 + Fraction(near) ** 2 / 2
        assert Fraction(float(found.lower)) ** 2 <= truth <= Fraction(float(found.upper)) ** 2
        assert float(found.upper) < 1.001 * far


@pytest.mark.parametrize(
    ("moved", "weights"),
    [((1e200, 1.0), (0.5, 0.5)), ((1.6e-152, 1.48e-154), (1e-4, 1 - 1e-4))],
    ids=["beyond", "all tiny"],
)
def test_potentials_of_a_part_beyond_the_number_range_are_not_zero(moved, weights) -> None:
    s, x = [0.0, 1.0], (np.array(moved)[:, None], np.array(weights))
    found = solve_conditional_w2(x, (np.zeros((2, 1)), x[1]), conditions=(s, s))
    assert found.potentials is None and found.lower > 0


def test_a_power_mean_of_an_infinite_length_is_infinite() -> None:
    logs = np.log([0.5, 0.5])
    assert power_mean(logs, np.array([math.inf, 1.0]), 2) == math.inf
    assert power_mean(logs, np.array([1e200, 1e200]), 2) == pytest.approx(1e200)
