"""Bounds of rounding, against exact arithmetic."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from fractions import Fraction
from functools import partial

import mpmath
import numpy as np
import pytest
import torch

from meanfield.measures import ParticleMeasure
from meanfield.transport import conditional_w2, solve_w2, w1, w2, wp
from meanfield.transport.certificate import (
    Part,
    SparsePlan,
    certified,
    power_mean,
    powers_added,
    powers_less,
    united,
)
from meanfield.transport.certificate import _doubts as doubts
from meanfield.transport.certificate import _dual as dual_of
from meanfield.transport.plans.formulas import solve_one_atom, solve_two_atoms
from meanfield.transport.problem import (
    UNIT,
    Problem,
    costs_between,
    normalised_logs,
    root,
    snapped,
)


def exact_weights(logs: np.ndarray) -> list:
    """exp(lᵢ) / Σ exp(l_j) of the logarithms as stored."""
    masses = [mpmath.exp(mpmath.mpf(float(t))) for t in logs]
    total = mpmath.fsum(masses)
    return [mass / total for mass in masses]


def light_problem(rng: np.random.Generator, n: int, m: int, lightest: float) -> Problem:
    logs = [rng.uniform(lightest, 0, size=k) - 3.7 for k in (n, m)]
    x, y = rng.normal(size=(n, 2)), rng.normal(size=(m, 2))
    return Problem.of(x, y, *logs)


def test_weights_are_right_to_what_is_said_in_doubt() -> None:
    rng = np.random.default_rng(0)
    with mpmath.workdps(40):
        for _ in range(60):
            p = light_problem(rng, 5, 4, -760)
            exact = exact_weights(p.log_a) + exact_weights(p.log_b)
            for truth, weight, room in zip(exact, p.weights, doubts(p), strict=True):
                assert abs(mpmath.mpf(float(weight)) - truth) <= mpmath.mpf(float(room))
                assert room <= 2e-12 * weight + 1e-299


def test_a_dual_value_is_right_to_what_is_said_to_be_lost() -> None:
    """Every atom adds about as much, however light it is: fᵢ is as large as 1/aᵢ."""
    rng = np.random.default_rng(1)
    with mpmath.workdps(40):
        for n, m, lightest in ((40, 30, -1.0), (40, 30, -300.0), (2, 2, -600.0)):
            for _ in range(40):
                p = light_problem(rng, n, m, lightest)
                f, g = rng.normal(size=n) / p.a, rng.normal(size=m) / p.b
                if n == 2:  # the light atoms alone
                    f, g = f * (p.a < 0.5), g * (p.b < 0.5)
                dual, lost = dual_of(p, np.concatenate([f, g]))
                terms = zip(exact_weights(p.log_a) + exact_weights(p.log_b), [*f, *g], strict=True)
                truth = mpmath.fsum(mass * mpmath.mpf(float(t)) for mass, t in terms)
                assert abs(mpmath.mpf(float(dual)) - truth) <= mpmath.mpf(float(lost))
                assert lost < 1e-11 * (np.abs(p.a * f).sum() + np.abs(p.b * g).sum())


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("part", [0.35, 0.65, None])
def test_long_sums_of_squares_are_inside(order: int, part: float | None) -> None:
    """In 400,000 dimensions a sum in order may be off by as many units.

    With squares of a part of a unit each of them is lost, or each is rounded up.
    """
    rng = np.random.default_rng(3)
    for seed in range(2):
        x, y = (rng.integers(0, 2**20, size=(1, 400_000)) / 2.0**20 for _ in range(2))
        if part is not None:
            x, y = np.zeros_like(x), np.full_like(x, math.sqrt(part * 2.0**-52))
            y[0, seed] = 1.0
        truth = math.sqrt(math.fsum(np.square(x - y)[0]))  # the squares are exact, or nearly so
        zero = np.zeros(1)
        p = Problem.of(x, y, zero, zero, order=order)
        unit = 2.0 ** int(p.exponent)
        plan = SparsePlan(np.zeros(1, int), np.zeros(1, int), zero)
        half = p.costs[:, 0] / 2
        answer = certified(p, plan, (half, half), method="m", rtol=1e-9)
        one_sided = certified(p, plan, (2 * half, zero), method="m", rtol=1e-9)
        for found in (answer, one_sided):
            assert float(found.lower) * unit <= truth <= float(found.upper) * unit, seed
            assert float(found.width) < 1e-8


@pytest.mark.parametrize(("move", "slack"), [(1e-4, 1e-6), (1e-145, 1e-288)])
def test_a_one_sided_bound_is_not_taken_of_potentials_with_slack(
    move: float, slack: float
) -> None:
    x = np.array([[0.0, 0.0], [1.0, 0.0]])
    y = x + np.array([0.0, move])
    p = Problem.of(x, y, np.zeros(2), np.zeros(2))
    index, zero = np.arange(2), np.zeros(2)
    plan, high = SparsePlan(index, index, p.logs_a), p.costs[index, index] + slack
    answer = certified(p, plan, (high, zero), method="m", rtol=1e-9, slack=slack)
    assert float(answer.lower) <= move / 2.0 ** int(p.exponent)


def test_parts_of_light_masses_and_of_masses_in_doubt_are_united_with_room() -> None:
    rng, index = np.random.default_rng(4), np.arange(3)[:, None]
    nowhere = Problem.of(*np.zeros((2, 3, 1, 1)), *np.zeros((2, 3, 1)))
    one = solve_one_atom(nowhere, rtol=1e-9)
    with mpmath.workdps(40):
        for _ in range(100):
            logs, ends = rng.uniform(-690, -600, size=3), rng.uniform(0.5, 1, size=3)
            parts = Part(replace(one, value=ends, lower=ends, upper=ends), index, index, logs)
            found, doubted = (united([parts], (3, 3), 2, log_error=t) for t in (0, 1e-3))
            masses = [mpmath.exp(float(t)) for t in logs]
            truth = mpmath.sqrt(mpmath.fdot(masses, [mpmath.mpf(t) ** 2 for t in ends]))
            assert mpmath.mpf(float(found.lower)) <= truth <= mpmath.mpf(float(found.upper))
            assert doubted.lower <= found.lower * math.exp(-0.5e-3)
            assert doubted.upper >= found.upper * math.exp(0.5e-3)


def test_power_means_do_not_underflow() -> None:
    for logs, distance, order in ((-1400.0, 3.0, 2), (0.0, 1e-170, 2), (-700.0, 1e-200, 1)):
        found = float(power_mean(np.array([logs]), np.array([distance]), order))
        with mpmath.workdps(30):
            truth = float(mpmath.exp(mpmath.mpf(logs) / order) * mpmath.mpf(distance))
        assert found == pytest.approx(truth, rel=2000 * UNIT, abs=0)


@pytest.mark.parametrize("order", [1, 1.5, 2, 3, 10])
def test_sums_and_differences_of_powers_are_those_of_high_precision(order: float) -> None:
    rng = np.random.default_rng(0)
    one, part = rng.uniform(0.5, 1, size=500), rng.uniform(0, 1, size=500)
    one *= 10.0 ** rng.choice([-170, 0, 170], size=500)
    added, less = (f(one, part * one, order) for f in (powers_added, powers_less))
    lost = 0 if order in (1, 2) else 8 * (order + 1)  # units of the larger power
    with mpmath.workdps(40):
        for s, t, more, left in zip(one, part * one, added, less, strict=True):
            s, t = (mpmath.mpf(float(k)) ** order for k in (s, t))
            total, rest = (k ** (mpmath.mpf(1) / order) for k in (s + t, s - t))
            assert abs(mpmath.mpf(float(more)) / total - 1) < 4 * UNIT
            least = max(s - t - lost * UNIT * s, 0) ** (mpmath.mpf(1) / order)
            assert least * (1 - 32 * UNIT) <= mpmath.mpf(float(left)) <= rest
    assert powers_less(np.asarray(1.0), np.asarray(2.0), order) == 0
    ends = np.array([[0.0, 0.0], [1.0, math.inf], [math.inf, math.inf], [math.inf, 0.0]]).T
    assert powers_added(*ends, order).tolist() == [0.0, math.inf, math.inf, math.inf]


@pytest.mark.parametrize("order", [1, 1.1, 1.3, 2, 3, 5, 7, 10, 60, 99])
def test_roots_of_0_1_and_infinity_are_these(order: float) -> None:
    assert root(np.array([0.0, 1.0, math.inf]), order).tolist() == [0.0, 1.0, math.inf]


def test_no_pair_is_farther_apart_than_the_diameter() -> None:
    rng = np.random.default_rng(0)
    for d in (1, 2, 3, 64):
        for _ in range(100):
            x, y = rng.normal(size=(2, 1, d))
            p = Problem.of(x, y, np.zeros(1), np.zeros(1))
            unit = Fraction(2) ** int(p.exponent)
            square = sum((Fraction(s) - Fraction(t)) ** 2 for s, t in zip(x[0], y[0], strict=True))
            assert square <= (Fraction(float(p.diameter)) * unit) ** 2
            assert float(p.diameter * unit) ** 2 <= float(square) * (1 + 1e-12)


@pytest.mark.parametrize("unit", [2.0**-1070, 2.0**-1040, 2.0**1020])
def test_a_unit_whose_inverse_is_no_number_is_left(unit: float) -> None:
    x, y = unit * np.array([[[0.0], [4.0]], [[1.0], [2.0]]])
    found = solve_w2(x, y)
    assert float(found.value) == pytest.approx(unit * 2.5**0.5, rel=1e-3)
    assert Fraction(float(found.lower)) ** 2 <= Fraction(unit) ** 2 * 5 / 2
    assert Fraction(float(found.upper)) ** 2 >= Fraction(unit) ** 2 * 5 / 2


@pytest.mark.parametrize("order", [1, 1.5, 2, 3])
@pytest.mark.parametrize("shape", [(2, 3, 2), (1, 4, 2), (2, 40, 2)])
def test_costs_of_a_batch_are_powers_of_lengths(order: float, shape: tuple[int, ...]) -> None:
    x, y = np.random.default_rng(0).normal(size=(2, *shape))
    truth = np.linalg.norm(x[:, :, None] - y[:, None], axis=-1) ** order
    np.testing.assert_allclose(costs_between(x, y, order), truth, rtol=1e-13)


def test_the_order_of_atoms_is_no_matter_to_the_last_bit_of_a_weight() -> None:
    rng = np.random.default_rng(0)
    logs, order = 20 * rng.normal(size=1000), rng.permutation(1000)
    np.testing.assert_array_equal(normalised_logs(logs[order]), normalised_logs(logs)[order])


def test_formulas_have_room_for_the_rounding_of_light_weights() -> None:
    """Normalised, a log-weight of −600 is right to 512 units; so is what crosses, or less."""
    rng = np.random.default_rng(8)
    with mpmath.workdps(40):
        for k in range(60):
            light = rng.uniform(-690, -520)
            near = light - 10 ** rng.uniform(-9, -7)
            offsets = rng.uniform(-9, 9, size=2)
            x = np.array([[0.0, 0.0], [1.0, 0.0]])
            a, b = (np.array([0.0, t]) + s for t, s in zip((light, near), offsets, strict=True))
            (_, mine), (_, theirs) = exact_weights(a), exact_weights(b)
            to_one = Problem.of(x, x[:1], a, np.zeros(1))
            from_one = Problem.of(x[:1], x, np.zeros(1), b)
            both = Problem.of(x, x, a, b)
            for found, truth, unit in (
                (solve_one_atom(to_one, rtol=1e-9), mine, to_one.exponent),
                (solve_one_atom(from_one, rtol=1e-9), theirs, from_one.exponent),
                (solve_two_atoms(both, rtol=1e-9), abs(mine - theirs), both.exponent),
            ):
                true = mpmath.sqrt(truth) / 2 ** int(unit)
                assert mpmath.mpf(float(found.lower)) <= true, k
                assert true <= mpmath.mpf(float(found.upper)), k


def test_rounding_of_either_side_is_in_doubt() -> None:
    """One atom to two and back: what the marginals are known to is paid for on both sides."""
    near, far = np.array([[0.0]]), np.array([[1.0], [-1.0]])
    doubts = []
    for x, y in ((near, far), (far, near)):
        p = Problem.of(x, y, np.zeros(len(x)), np.zeros(len(y)))
        rows, cols = np.zeros((2, 2), int)
        rows, cols = (np.arange(2), cols) if len(x) == 2 else (rows, np.arange(2))
        plan = SparsePlan(rows, cols, np.log([0.5, 0.5]))
        answer = certified(p, plan, np.zeros(p.m), method="m", rtol=1e-9)
        doubts.append(float(answer.plan_doubt) ** 2)
    # P = 4 |· − z|² + 3 · the mean cost: 7 and 3 of the square of the unit, in either order.
    assert doubts[0] == pytest.approx(doubts[1], rel=0.2, abs=0)


def test_a_plan_that_meets_computed_weights_to_the_last_bit_may_miss_those_stored() -> None:
    """Normalised, a log-weight of −500 is right to 256 units, and the plan's is no better."""
    rng = np.random.default_rng(5)
    x, index = np.array([[0.0], [1.0]]), np.arange(2)
    met = 0
    with mpmath.workdps(40):
        for _ in range(60):
            logs = np.array([0.0, rng.uniform(-600, -500)])
            a, b = (logs + offset for offset in rng.uniform(-40, 40, size=2))
            p = Problem.of(x, x, a, b)
            met += int(np.array_equal(p.b, p.a))
            plan = SparsePlan(index, index, p.logs_a)
            answer = certified(p, plan, np.zeros(p.m), method="m", rtol=1e-9)
            truth = mpmath.sqrt(abs(exact_weights(a)[1] - exact_weights(b)[1]))
            assert truth <= mpmath.mpf(float(answer.upper)) * mpmath.mpf(2) ** int(p.exponent)
    assert met > 10


def test_a_sum_of_many_masses_may_be_less_than_computed() -> None:
    """Each of the small masses is rounded up when it is added: 1e-12 of mass is not there."""
    count = 20_000
    small = np.full(count, 6e-17)
    logs = np.log([0.5, *small, 1.0])
    logs[-1] = math.log(1 - np.cumsum(np.exp(logs[:-1]))[-1])
    with mpmath.workdps(40):
        held = mpmath.fsum(mpmath.exp(mpmath.mpf(float(t))) for t in logs)
        assert 1 - held > 9e-13
    assert np.cumsum(np.exp(logs))[-1] == pytest.approx(1, abs=1e-15)
    x, y = np.array([[0.0]]), np.array([[1.0]])
    p = Problem.of(x, y, np.zeros(1), np.ones(1))  # equal weights would make it a permutation
    none = np.zeros(len(logs), int)
    answer = certified(p, SparsePlan(none, none, logs), np.zeros(p.m), method="m", rtol=1e-9)
    assert float(answer.upper) * 2.0 ** int(p.exponent) >= 1.0


def test_squares_beyond_float32_leave_the_distance_and_no_potentials() -> None:
    x, y = (1e25 * np.random.default_rng(0).normal(size=(2, 6, 2))).astype(np.float32)
    found, truth = solve_w2(x, y), solve_w2(x.astype(float), y.astype(float))
    assert found.value.dtype == np.float32
    assert found.value == pytest.approx(float(truth.value), rel=1e-6)
    assert found.potentials is None
    assert truth.potentials is not None


def test_single_precision_rounds_ends_outward_and_0_not_at_all() -> None:
    rng = np.random.default_rng(1)
    for _ in range(40):
        x, y = rng.normal(size=(2, 4, 2)).astype(np.float32)
        found = solve_w2(x, y)
        assert found.found is not None
        known = found.found[1]
        assert float(found.lower) <= known.lower[0] <= known.value[0] <= known.upper[0]
        assert known.upper[0] <= float(found.upper) and known.rounding[0] <= found.rounding
        assert found.lower <= found.value <= found.upper
        assert found.upper <= found.lower * (1 + 2.0**-22)
    same = solve_w2(x, x)
    assert float(same.lower) == float(same.upper) == float(same.rounding) == 0
    far = np.full((1, 1), 3e38, np.float32)
    found = solve_w2(far, -far)
    assert found.lower == np.finfo(np.float32).max and found.value == found.upper == np.inf


@pytest.mark.parametrize("move", [1.6e-162, 2e-162, 3e-160, 1e-155, 1e-150])
def test_squares_that_are_denormal_prove_nothing(move: float) -> None:
    """(1.6e-162)² is stored as 5e-324, twice what it is: the root would be 1.4 times W₂."""
    x = np.array([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]])
    y = x + np.array([0.0, move]) * (x[:, 1:] == 0)
    p = Problem.of(x, y, np.zeros(3), np.zeros(3))
    index, zero = np.arange(3), np.zeros(3)
    plan = SparsePlan(index, index, p.logs_a)
    answer = certified(p, plan, (p.costs[index, index], zero), method="m", rtol=1e-9)
    unit, truth = 2.0 ** int(p.exponent), math.sqrt(2 / 3) * move
    assert float(answer.lower) * unit <= truth <= float(answer.upper) * unit
    found = solve_w2(np.stack([x, x]), np.stack([y, y]))
    assert (found.lower <= truth).all()
    assert (found.upper >= truth).all()


def test_who_asks_for_the_value_alone_is_told_that_rounding_leaves_it_open() -> None:
    """The same points, weights changed by 1e-14: one digit is left."""
    x, a = np.array([[0.0, 0], [1, 0], [0, 3]]), np.array([0.2, 0.3, 0.5])
    b = a + 1e-14 * np.array([1, -1, 0])
    found = solve_w2((x, a), (x, b))
    assert found.rounding > 0.01 * found.upper
    with pytest.warns(UserWarning, match=r"W2 lies in \[\d.*left open by rounding") as told:
        w2((x, a), (x, b))
    pair = (np.stack([x, x]), np.stack([a, a])), (np.stack([x, x + 1]), np.stack([b, b]))
    with pytest.warns(UserWarning, match="W2 lies in") as of_both:  # one is open, not the other
        w2(*pair)
    assert str(of_both[0].message) == str(told[0].message)
    with pytest.warns(UserWarning, match="of order 60 is small .*; solve_wp gives"):
        wp(([[-1.0], [1.0]], [0.875, 0.125]), ([[-0.875], [0.25]], [0.75, 0.25]), 60)
    given = (ParticleMeasure(x, w, positions=[0.0] * 3) for w in (a, b))
    with pytest.warns(UserWarning, match="solve_conditional_w2 gives"):
        conditional_w2(*given)
    given = [ParticleMeasure(x, w, positions=[0.0] * 3) for w in (a, b)]
    for call in (w2, w1, partial(wp, p=3), conditional_w2):
        with pytest.warns(UserWarning, match=r"lies in") as met:
            call(*given)
        assert {each.filename for each in met} == {__file__}
    assert solve_w2(x, x + 1).rounding < 1e-9
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        w2(x, x + 1)
        w2(torch.zeros(0, 3, 2), torch.zeros(0, 3, 2))


def test_weights_between_the_least_and_the_largest_are_told_apart() -> None:
    """By 1e-14, hundreds of roundings, with the extremes of both the same."""
    x, a = np.array([[0.0], [1.0], [2.0], [4.0]]), np.array([0.1, 0.2, 0.3, 0.4])
    b = a + 1e-14 * np.array([0, 1, -1, 0])
    found = solve_w2((x, a), (x, b), strict=False)
    gap = float(Fraction(b[1]) - Fraction(a[1]))
    assert float(found.lower) <= math.sqrt(gap) <= float(found.upper)


@pytest.mark.parametrize("offset", [-900.0, 0.3, 700.0])
def test_weights_of_any_total_are_normalised_to_the_last_place(offset: float) -> None:
    rows = np.stack([np.zeros(7), np.log(np.arange(1.0, 8.0))]) + offset
    found = normalised_logs(rows)
    with mpmath.workdps(40):
        for row, each in zip(rows, found, strict=True):
            total = mpmath.log(mpmath.fsum(mpmath.exp(mpmath.mpf(float(t))) for t in row))
            off = [
                abs(mpmath.mpf(float(t)) - (float(u) - total))
                for t, u in zip(each, row, strict=True)
            ]
            assert max(off) < 1e-15
            np.testing.assert_array_equal(normalised_logs(row), each)


def test_what_two_light_atoms_differ_by_is_known_beside_weights_that_are_stored_as_one() -> None:
    points = torch.tensor([[0.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    mu, nu = (ParticleMeasure(points, log_weights=[light, 0.0]) for light in (-900.0, -901.0))
    found = solve_w2(mu, nu)
    truth = math.exp(-450) * math.sqrt(-math.expm1(-1))
    assert float(found.lower) <= truth <= float(found.upper)
    assert float(found.value) == pytest.approx(truth, rel=1e-9)


def test_a_last_place_of_a_large_logarithm_is_rounding_too() -> None:
    log_a = np.log([0.1, 0.2, 0.3, 0.4, math.exp(-700.0)])
    log_b = log_a[::-1].copy()
    log_b[0] = np.nextafter(log_b[0], 0.0)  # by 1e-13
    assert (snapped(log_a, log_b) == log_a[::-1]).all()
    log_b[0] += 1e-9
    assert snapped(log_a, log_b) is log_b
