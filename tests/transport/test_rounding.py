"""The certificate's bounds of rounding, against exact arithmetic."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch

from meanfield.measures import ParticleMeasure
from meanfield.transport import solve_conditional_w2, solve_w2, solve_wp
from meanfield.transport.certificate import (
    Interval,
    SparsePlan,
    certified,
    combined,
    in_unit,
    narrower,
    power_mean,
    powers_added,
    powers_less,
    scaled,
)
from meanfield.transport.certificate import _doubts as doubts
from meanfield.transport.certificate import _dual as dual_of
from meanfield.transport.plans.exact import solve_dense
from meanfield.transport.plans.formulas import solve_line, solve_one_atom, solve_two_atoms
from meanfield.transport.problem import UNIT, Problem
from tests.transport.transport_oracles import solve_w1


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
def test_a_light_atom_that_is_all_of_the_distance_has_an_interval_around_the_truth(
    order: int,
) -> None:
    """exp(l) is right to |l| u: of weights of e^−600 that is hundreds of units."""
    rng = np.random.default_rng(2)
    solve = solve_w1 if order == 1 else solve_w2
    with mpmath.workdps(40):
        for k in range(60):
            light = rng.uniform(-700, -1)
            logs = np.array([light, math.log(0.3), math.log(0.7)])
            logs -= np.logaddexp.reduce(logs)
            x = np.array([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0]])
            y = x.copy()
            y[0] += rng.uniform(0.001, 0.4, size=2)
            step = mpmath.sqrt(sum((mpmath.mpf(float(t))) ** 2 for t in y[0] - x[0]))
            shifted = logs + rng.uniform(-5, 5)  # to be normalised, which rounds them
            truth = exact_weights(shifted)[0] ** (mpmath.mpf(1) / order) * step
            p = Problem.of(x, y, shifted, shifted, order=order)
            index, zero = np.arange(3), np.zeros(3)
            plan = SparsePlan(index, index, p.logs_a)
            answer = certified(p, plan, (p.costs[index, index], zero), method="m", rtol=1e-9)
            unit = mpmath.mpf(2) ** int(p.exponent)
            assert mpmath.mpf(float(answer.lower)) * unit <= truth, k
            assert truth <= mpmath.mpf(float(answer.upper)) * unit, k
            weights = torch.as_tensor(logs)
            mu, nu = (ParticleMeasure(torch.as_tensor(t), log_weights=weights) for t in (x, y))
            found = solve(mu, nu)
            assert found.relative_width < 1e-11
            # A measure normalises its weights once more.
            stored = exact_weights(mu.log_weights.numpy())[0] ** (mpmath.mpf(1) / order) * step
            assert mpmath.mpf(float(found.lower)) <= stored <= mpmath.mpf(float(found.upper))


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


def test_a_doubtful_mass_of_a_stated_plan_is_paid_for_at_the_diameter() -> None:
    x, y = np.array([[0.0], [1.0]]), np.array([[0.0], [1.0]])
    p = Problem.of(x, y, np.zeros(2), np.zeros(2))
    index = np.arange(2)
    plan = SparsePlan(index, index, p.logs_a, math.log(1e-6))
    answer = certified(p, plan, None, method="m", rtol=1e-9, is_optimal=True)
    assert float(answer.lower) == 0
    assert 1e-3 <= float(answer.upper) / float(p.diameter) < 1.01e-3


def test_parts_of_light_masses_and_of_masses_in_doubt_are_combined_with_room() -> None:
    rng = np.random.default_rng(4)
    with mpmath.workdps(40):
        for _ in range(100):
            logs = rng.uniform(-690, -600, size=3)
            ends = rng.uniform(0.5, 1, size=3)
            _, lower, upper = combined(logs, np.stack([ends] * 3), 2)
            terms = zip(logs, ends, strict=True)
            truth = mpmath.sqrt(
                mpmath.fsum(
                    mpmath.exp(mpmath.mpf(float(t))) * mpmath.mpf(float(s)) ** 2 for t, s in terms
                )
            )
            assert mpmath.mpf(float(lower)) <= truth <= mpmath.mpf(float(upper))
    _, lower, upper = combined(np.zeros(1), np.ones((3, 1)), 2, log_error=1e-3)
    assert lower <= math.exp(-0.5e-3)
    assert upper >= math.exp(0.5e-3)


def test_power_means_do_not_underflow() -> None:
    for logs, distance, order in ((-1400.0, 3.0, 2), (0.0, 1e-170, 2), (-700.0, 1e-200, 1)):
        found = float(power_mean(np.array([logs]), np.array([distance]), order))
        with mpmath.workdps(30):
            truth = float(mpmath.exp(mpmath.mpf(logs) / order) * mpmath.mpf(distance))
        assert found == pytest.approx(truth, rel=2000 * UNIT, abs=0)


@pytest.mark.parametrize("unit", [1e-200, 1.0, 1e150])
@pytest.mark.parametrize(("order", "light"), [(1, -735.0), (1, -900.0), (2, -1470.0), (2, -1.8e3)])
def test_distances_that_underflow_are_in_their_interval(order, light, unit) -> None:
    """In the caller's unit or in the problem's: the upper end is 0 only where nothing moves."""
    mu = ParticleMeasure([[0.0], [unit]], log_weights=[0.0, light], positions=[0.0, 1.0])
    nu = mu.replace(2 * mu.points)
    truth = mpmath.mpf(unit) * mpmath.exp(mpmath.mpf(light) / order)
    found = [solve_wp(mu, nu, order), solve_conditional_w2(mu, nu)][:order]
    for answer in found:
        assert float(answer.lower) <= truth <= float(answer.upper)
    assert float(solve_wp(mu, mu, order).upper) == 0


@pytest.mark.parametrize("order", [1, 2])
def test_sums_and_differences_of_powers_are_those_of_high_precision(order: int) -> None:
    rng = np.random.default_rng(order)
    one, part = rng.uniform(0.5, 1, size=500), rng.uniform(0, 1, size=500)
    unit = 10.0 ** rng.choice([-170, 0], size=500)
    added, less = (f(one * unit, part * one * unit, order) for f in (powers_added, powers_less))
    with mpmath.workdps(40):
        for s, t, more, left in zip(one * unit, part * one * unit, added, less, strict=True):
            s, t = (mpmath.mpf(float(k)) ** order for k in (s, t))
            total, rest = (k ** (mpmath.mpf(1) / order) for k in (s + t, s - t))
            assert abs(mpmath.mpf(float(more)) / total - 1) < 4 * UNIT
            assert rest * (1 - 32 * UNIT) <= mpmath.mpf(float(left)) <= rest
    assert powers_less(np.asarray(1.0), np.asarray(2.0), order) == 0


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
                (solve_two_atoms(both[None], rtol=1e-9)[0], abs(mine - theirs), both.exponent),
            ):
                true = mpmath.sqrt(truth) / 2 ** int(unit)
                assert mpmath.mpf(float(found.lower)) <= true, k
                assert true <= mpmath.mpf(float(found.upper)), k


# ------------------------------------------------------------------ mass that lies elsewhere


@pytest.mark.parametrize("order", [1, 2])
def test_what_is_missing_from_a_plan_is_paid_for_in_full(order: int) -> None:
    """One light cell is left out, from one side of the centre to the other."""
    x, y = np.array([[0.0], [-1.0]]), np.array([[0.0], [1.0]])
    logs = np.log([1 - 1e-6, 1e-6])
    p = Problem.of(x, y, logs, logs, order=order)
    plan = SparsePlan(np.zeros(1, int), np.zeros(1, int), p.logs_a[:1])
    answer = certified(p, plan, None, method="m", rtol=1e-9)
    assert float(answer.upper) ** order >= 1e-6 * 2**order / 2.0 ** (order * int(p.exponent))


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("target", [0.0, -0.5, -1.0])
def test_mass_taken_off_a_column_that_holds_too_much_has_a_way_to_go(
    target: float, order: int
) -> None:
    """A quarter of the mass stands at 1 and belongs at the target; its row was at 2."""
    x, y = np.array([[2.0], [-2.0]]), np.array([[1.0], [-2.0], [target]])
    p = Problem.of(x, y, np.zeros(2), np.log([0.25, 0.5, 0.25]), order=order)
    index = np.arange(2)
    found = certified(p, SparsePlan(index, index, p.logs_a), None, method="m", rtol=1e-9)
    truth = (1 + (2 - target) ** order) / 4
    assert float(found.upper) ** order >= truth / 2.0 ** (order * int(p.exponent))


def test_rounding_of_either_side_is_in_doubt() -> None:
    """One atom to two and back: what the marginals are known to is paid for on both sides."""
    near, far = np.array([[0.0]]), np.array([[1.0], [-1.0]])
    doubts = []
    for x, y in ((near, far), (far, near)):
        p = Problem.of(x, y, np.zeros(len(x)), np.zeros(len(y)))
        rows, cols = np.zeros((2, 2), int)
        rows, cols = (np.arange(2), cols) if len(x) == 2 else (rows, np.arange(2))
        plan = SparsePlan(rows, cols, np.log([0.5, 0.5]))
        doubts.append(float(certified(p, plan, None, method="m", rtol=1e-9).plan_doubt) ** 2)
    # P = 4 |· − z|² + 3 · the mean cost: 7 and 3 of the square of the unit, in either order.
    assert doubts[0] == pytest.approx(doubts[1], rel=0.2, abs=0)


def test_a_stated_doubt_is_paid_for_beside_problems_whose_plans_are_measured() -> None:
    points = np.array([[0.0], [1.0]])
    one = Problem.of(points, points, np.zeros(2), np.zeros(2))
    two = Problem(*(np.stack([t] * 2) for t in (one.x, one.y, one.log_a, one.log_b)),
                  np.zeros(2, int))  # fmt: skip
    two.log_b[:, 0] = 1e-3, 0.1  # no permutations, or they would be exact; only one is measured
    index = np.stack([np.arange(2)] * 2)
    doubt = np.array([math.log(1e-6), math.inf])
    answer = certified(
        two, SparsePlan(index, index, two.logs_a, doubt), None, method="m", rtol=1e-9
    )
    assert 1e-3 <= answer.upper[0] / one.diameter < 1.01e-3
    assert answer.upper[1] > 1e-2


def test_what_is_no_number_is_no_mass_and_no_potential() -> None:
    rng = np.random.default_rng(6)
    p = light_problem(rng, 3, 3, -1.0)
    right = solve_dense(p[None], rtol=1e-9)[0]
    assert right.f is not None
    assert right.g is not None
    for wrong in (math.nan, math.inf, 750.0):
        logs = np.append(right.log_mass, wrong)
        plan = SparsePlan(np.append(right.rows, 2), np.append(right.cols, 0), logs)
        answer = certified(p, plan, (right.f, right.g), method="m", rtol=1e-9)
        assert (answer.lower, answer.upper) == (right.lower, right.upper)
    plan = SparsePlan(right.rows, right.cols, right.log_mass)
    for side in (0, 1):
        for wrong in (math.nan, math.inf, -math.inf):
            potentials = right.f.copy(), right.g.copy()
            potentials[side][1] = wrong
            answer = certified(p, plan, potentials, method="m", rtol=1e-9)
            assert (answer.lower, answer.upper) == (0, right.upper)
            assert not answer.converged


def test_crumbs_beside_a_permutation_cost_nothing() -> None:
    """Of each row the largest entry is meant, wherever it stands."""
    x, sigma = np.random.default_rng(7).normal(size=(4, 2)), np.array([2, 0, 3, 1])
    p = Problem.of(x, x[np.argsort(sigma)], np.zeros(4), np.zeros(4))
    index, crumb = np.arange(4), np.full(4, -40.0)
    for order in (np.arange(8), np.arange(8)[::-1]):
        rows, cols, logs = (
            np.concatenate(t)[order] for t in ((index, index), (sigma, index), (p.logs_a, crumb))
        )
        answer = certified(p, SparsePlan(rows, cols, logs), None, method="m", rtol=1e-9)
        assert float(answer.upper) == 0


def test_rows_that_share_a_column_are_no_permutation_nor_are_those_beside_one() -> None:
    """Both atoms to the near one: the far one, of the same weight, is left without mass."""
    x, y = np.array([[0.0], [1.0]]), np.array([[0.5], [9.0]])
    p, index = Problem.of(x, y, np.zeros(2), np.zeros(2)), np.arange(2)
    truth = float(solve_line(p, rtol=1e-9).value)
    alone = certified(p, SparsePlan(index, 0 * index, p.logs_a), None, method="m", rtol=1e-9)
    two = Problem(*(np.stack([t] * 2) for t in (p.x, p.y, p.log_a, p.log_b, p.exponent)))
    cols = np.stack([index, 0 * index])
    plan = SparsePlan(np.stack([index] * 2), cols, two.logs_a)
    beside = certified(two, plan, None, method="m", rtol=1e-9)
    for upper in (alone.upper, *beside.upper):
        assert float(upper) >= truth


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
            answer = certified(p, plan, None, method="m", rtol=1e-9)
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
    answer = certified(p, SparsePlan(none, none, logs), None, method="m", rtol=1e-9)
    assert float(answer.upper) * 2.0 ** int(p.exponent) >= 1.0


def test_what_rounding_leaves_open_on_either_side_is_no_fault_of_the_solver() -> None:
    """W₂ = 1e-9: an offset of the potentials, or weights that were normalised, hide its digits."""
    x, index, zero = np.array([[0.0], [1.0], [3.0]]), np.arange(3), np.zeros(3)
    logs = np.log([0.2, 0.3, 0.5])
    same, other = (Problem.of(x, x + 1e-9, logs, logs + t) for t in (0.0, 1.0))
    for p, offset, is_exact in ((same, 1e-6, True), (other, 0.0, False)):
        cost = p.costs[index, index]
        plan = SparsePlan(index, index, p.logs_a)
        found = certified(p, plan, (cost + offset, zero - offset), method="m", rtol=1e-9)
        assert (found.plan_doubt == 0) == is_exact
        assert found.width > 1e-4
        assert found.converged


# ------------------------------------------------------------------ units, and two answers


def answer_of(
    lower: float, value: float, upper: float, tag: float, *, converged: bool, doubt: float = 0.0
) -> Interval:
    """An answer whose plan costs its upper end and whose potentials give its lower one."""
    place = np.zeros(1, int)
    return Interval(
        value=np.asarray(value),
        lower=np.asarray(lower),
        upper=np.asarray(upper),
        rows=place,
        cols=place,
        log_mass=np.full(1, -tag),
        f=np.full(1, tag),
        g=np.full(1, -tag),
        method=str(tag),
        converged=np.asarray(converged),
        plan_doubt=np.asarray(doubt),
        dual_doubt=np.asarray(0.0),
        order=2,
    )


@pytest.mark.parametrize("swap", [False, True])
def test_the_better_plan_is_joined_to_the_better_potentials(swap: bool) -> None:
    plan = answer_of(1.0, 2.0, 3.0, 1.0, converged=False)
    dual = answer_of(2.5, 3.5, 4.0, 2.0, converged=False)
    both = (dual, plan) if swap else (plan, dual)
    found = narrower(*both, 1e-9)
    assert (float(found.lower), float(found.value), float(found.upper)) == (2.5, 2.5, 3.0)
    assert found.f is not None
    assert (found.log_mass[0], found.method, found.f[0]) == (-1.0, "1.0", 2.0)
    assert not found.converged
    assert narrower(*both, 0.2).converged  # 0.5 of 3


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(("doubt", "is_right"), [(1.2, True), (1.1, False)])
def test_a_flag_is_kept_only_where_rounding_explains_the_interval_that_is_left(
    swap: bool, doubt: float, is_right: bool
) -> None:
    """3² − 2.5² = 2.75 are left: less than 2 · 1.2², more than 2 · 1.1²."""
    plan = answer_of(1.0, 2.0, 3.0, 1.0, converged=False)
    said = answer_of(2.5, 3.5, 4.0, 2.0, converged=True, doubt=doubt)
    found = narrower(*((said, plan) if swap else (plan, said)), 1e-9)
    assert bool(found.converged) is is_right
    unsaid = answer_of(2.5, 3.5, 4.0, 2.0, converged=False, doubt=doubt)
    assert not narrower(*((unsaid, plan) if swap else (plan, unsaid)), 1e-9).converged


def test_the_plan_kept_is_held_against_the_potentials_kept() -> None:
    """Each of the two met its own; the doubts that count are those of what is kept."""
    plan = answer_of(1.0, 2.0, 3.0, 1.0, converged=False, doubt=1.2)
    dual = answer_of(2.5, 3.5, 4.0, 2.0, converged=False)
    assert narrower(plan, dual, 1e-9).converged  # 2.75 of 2 · 1.2² = 2.88
    assert not narrower(replace(plan, plan_doubt=np.asarray(1.1)), dual, 1e-9).converged


@pytest.mark.parametrize("swap", [False, True])
def test_each_end_keeps_its_own_doubt(swap: bool) -> None:
    """That of the plan from the answer with the better plan, that of the potentials likewise."""
    zero = answer_of(1.0, 2.0, 3.0, 1.0, converged=False)
    plan = replace(zero, plan_doubt=np.asarray(0.2), dual_doubt=np.asarray(0.3))
    dual = replace(
        answer_of(2.5, 3.5, 4.0, 2.0, converged=False),
        plan_doubt=np.asarray(0.4),
        dual_doubt=np.asarray(0.5),
    )
    found = narrower(*((dual, plan) if swap else (plan, dual)), 1e-9)
    assert (float(found.plan_doubt), float(found.dual_doubt)) == (0.2, 0.5)
    assert found.g is not None
    assert found.g[0] == -2.0
    # 2.75 are left, and 2 · 1.2² is more: whichever of the two ends it is that has the doubt.
    dual = replace(dual, dual_doubt=np.asarray(1.2))
    assert narrower(*((dual, zero) if swap else (zero, dual)), 1e-9).converged


@pytest.mark.parametrize(
    ("lower", "doubts", "upper", "truth"),
    [
        (0.0, (1.8, 2.4), 5.0, 1.0),  # 5² − 3² = 4²
        (0.0, (3.0, 0.0), 5.0, 1.0),
        (0.0, (0.0, 3.0), 5.0, 1.0),
        (4.5, (1.8, 2.4), 5.0, 0.5),  # no more than there is to explain
        (1.0, (0.0, 50.0), 5.0, 4.0),
        (1.0, (0.0, math.inf), 5.0, 4.0),
        (1.0, (1.8, 2.4), math.inf, 0.0),
        (math.inf, (0.0, 0.0), math.inf, 0.0),
    ],
)
def test_rounding_explains_both_doubts_and_no_more_than_the_width(
    lower: float, doubts: tuple[float, float], upper: float, truth: float
) -> None:
    answer = answer_of(lower, lower, upper, 1.0, converged=False, doubt=doubts[0])
    found = replace(answer, dual_doubt=np.asarray(doubts[1])).rounding
    assert float(found) == pytest.approx(truth, rel=1e-12)


def test_the_doubt_of_the_lower_end_is_that_of_the_theorem_or_of_the_potentials() -> None:
    """Whichever of the two gives it. A theorem knows its plan up to the doubt that is stated."""
    x = np.linspace(0, 1, 5)[:, None]
    p = Problem.of(x, x + 2, np.zeros(5), np.linspace(0, 0.1, 5))
    right = solve_line(p, rtol=1e-9)
    assert right.f is not None
    assert right.g is not None
    for doubt, slack, by_theorem in ((1e-9, 1e-6, True), (1e-3, 0.0, False)):
        plan = SparsePlan(right.rows, right.cols, right.log_mass, math.log(doubt))
        pair = right.f, right.g
        found = certified(
            p, plan, pair, method="m", rtol=1e-4, slack=slack + 1e-14, is_optimal=True
        )
        stated = doubt * float(p.diameter) ** 2
        assert float(found.plan_doubt) ** 2 == pytest.approx(stated)
        assert (float(found.dual_doubt) ** 2 == pytest.approx(stated)) is by_theorem
        assert float(found.dual_doubt) ** 2 > (0 if by_theorem else 1e-17)
        assert float(found.dual_doubt) ** 2 < (2 * stated if by_theorem else 1e-12)
        # Both ends move by what is stated; the lower one only where potentials give less.
        truth = float(right.value) ** 2
        assert float(found.upper) ** 2 == pytest.approx(truth + stated, rel=1e-12)
        lost = stated if by_theorem else 0.0
        assert float(found.lower) ** 2 == pytest.approx(truth - lost, abs=1e-12)


@pytest.mark.parametrize("order", [1, 2])
def test_a_change_of_unit_moves_no_end_inward_and_scales_potentials_by_its_power(
    order: int,
) -> None:
    third = answer_of(1 / 3, 1 / 3, 1 / 3, 3.0, converged=True, doubt=0.5)
    third = replace(third, dual_doubt=np.asarray(0.75))
    for exponent in (-1073, -1060, -1030, 7, 1020):
        found = in_unit(third, np.asarray(exponent), order)
        with mpmath.workdps(30):
            truth = mpmath.mpf(1 / 3) * mpmath.mpf(2) ** exponent
            assert mpmath.mpf(float(found.lower)) <= truth <= mpmath.mpf(float(found.upper))
        assert found.lower <= found.value <= found.upper
        assert found.plan_doubt == math.ldexp(0.5, exponent)
        assert found.dual_doubt == math.ldexp(0.75, exponent)
        if order * exponent < 1022:
            assert found.f is not None
            assert found.g is not None
            truths = (math.ldexp(t, order * exponent) for t in (3.0, -3.0))
            assert (found.f[0], found.g[0]) == tuple(truths)
        else:
            assert found.f is None
            assert found.g is None


def test_repaired_plans_are_never_cheaper_than_the_optimum() -> None:
    """Any masses at all: scaled, lost and doubled, between light and heavy atoms of all scales."""
    rng = np.random.default_rng(0)
    for _ in range(150):
        n, m = rng.integers(2, 4, size=2)
        x, y = (10 ** rng.uniform(-2, 2, (k, 1)) * rng.choice([-1, 1], (k, 1)) for k in (n, m))
        a, b = (np.log(rng.dirichlet(np.full(k, 0.3)) + 1e-12) for k in (n, m))
        p = Problem.of(x, y, a, b)
        mass = rng.dirichlet(np.full(n * m, 0.3)).reshape(n, m)
        if rng.random() < 0.5:
            mass *= (p.b / mass.sum(0)) * np.exp(rng.normal(size=m) * rng.choice([0, 0.3, 2]))
        else:
            mass *= (p.a / mass.sum(1))[:, None]
        rows, cols = np.nonzero(mass > 0)
        plan = SparsePlan(rows, cols, np.log(mass[rows, cols]))
        upper = certified(p, plan, None, method="m", rtol=1e-9).upper
        assert float(upper) >= float(solve_line(p, rtol=1e-9).lower)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_a_factor_moves_both_ends_outward_and_rounding_explains_how_far(order: int) -> None:
    p = Problem.of(np.zeros((1, 1)), np.full((1, 1), 0.7), np.zeros(1), np.zeros(1), order=order)
    answer, factor, doubt = solve_one_atom(p, rtol=1e-9), 1.3, np.asarray(1e-9)
    found = scaled(answer, factor, doubt)
    exact = [Fraction(float(t)) * Fraction(factor) for t in (answer.lower, answer.upper)]
    lower, upper = exact[0] - Fraction(1e-9), exact[1] + Fraction(1e-9)
    assert Fraction(float(found.lower)) <= lower <= upper <= Fraction(float(found.upper))
    assert float(found.width) < 1e-8
    assert float(found.rounding) >= float(found.upper - found.lower) * (1 - 1e-4)
    np.testing.assert_allclose(found.f, answer.f * factor**order, rtol=1e-15)


def test_squares_beyond_float32_leave_the_distance_and_no_potentials() -> None:
    x, y = (1e25 * np.random.default_rng(0).normal(size=(2, 6, 2))).astype(np.float32)
    found, truth = solve_w2(x, y), solve_w2(x.astype(float), y.astype(float))
    assert found.value.dtype == np.float32
    assert found.value == pytest.approx(float(truth.value), rel=1e-6)
    assert found.potentials is None
    assert truth.potentials is not None
