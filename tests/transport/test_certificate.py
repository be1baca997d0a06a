"""The certificate of plans and potentials that nobody solved for."""

from __future__ import annotations

import ast
import inspect
import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest
import torch

from meanfield.errors import CertificateError, ConvergenceError
from meanfield.transport import TransportResult, certificate, solve_w2
from meanfield.transport import problem as problems
from meanfield.transport.certificate import (
    SparsePlan,
    centred,
    certified,
    feasible,
    in_unit,
    narrower,
    scaled,
    united,
)
from meanfield.transport.plans import clusters, formulas
from meanfield.transport.plans.exact import solve_dense
from meanfield.transport.plans.formulas import solve_line, solve_one_atom
from meanfield.transport.problem import Problem
from meanfield.transport.result import refuse_unconverged

RNG = np.random.default_rng(5)


def problem(seed: int, n: int = 6, m: int = 7) -> tuple:
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(n, 2)), rng.normal(size=(m, 2)) + 0.3
    a, b = np.log(rng.dirichlet(np.ones(n))), np.log(rng.dirichlet(np.ones(m)))
    return x, y, a, b


# ------------------------------------------------------------------ both ends


def test_ends_the_wrong_way_round_are_an_error_and_not_an_answer() -> None:
    x, y, a, b = problem(13)
    right = solve_dense(Problem.of(x, y, a, b), rtol=1e-9)
    wrong = type(right)(
        **(vars(right) | {"lower": right.upper * 1.01, "upper": right.upper * 1.02})
    )
    with pytest.raises(CertificateError, match="below the upper one"):
        narrower(right, wrong, 1e-9)


def test_the_error_names_the_widest_interval_of_a_batch() -> None:
    value, lower, upper = (
        torch.tensor(t, dtype=torch.float64) for t in ([1.0, 2, 4], [1.0, 1, 4], [1.0, 3, 5])
    )
    batch = TransportResult(value, lower, upper, "wrong", value > 1, 0.0, found=None)
    with pytest.raises(ConvergenceError, match=r"\[1, 3\] of relative width 0\.667"):
        refuse_unconverged(batch, 1e-9)


def test_centring_takes_the_median_by_mass() -> None:
    g, b = np.array([0.0, 5.0, 7.0]), np.array([1e-9, 1 - 2e-9, 1e-9])
    np.testing.assert_array_equal(centred(g, b), [-5.0, 0.0, 2.0])


def test_infeasible_potentials_are_named_in_words_for_many_pairs_and_for_few() -> None:
    for n in (10, 200):
        x, y = RNG.normal(size=(2, n, 3))
        p = Problem.of(x, y, np.zeros(n), np.zeros(n))
        f, g = feasible(p.costs, np.zeros(n), p.b)
        index = np.arange(n)
        plan = SparsePlan(index, index, p.logs_a)
        for high in ((f + 0.01, g), (f, g + 0.01 * (g == g.max()))):
            with pytest.raises(CertificateError, match="for every pair"):
                certified(p, plan, high, method="m", rtol=1e-9)
            certified(p, plan, high, method="m", rtol=1e-9, slack=0.01)  # said so: paid for


def test_weights_that_differ_by_more_than_rounding_are_not_snapped() -> None:
    logs = np.log(RNG.dirichlet(np.ones(60)))
    for units, is_same in ((2, True), (14, False)):
        other = logs + units * problems.UNIT * np.abs(logs) * (-1) ** np.arange(60)
        assert (problems.snapped(logs, other) is not other) == is_same


@pytest.mark.parametrize("module", [certificate, clusters, formulas, problems])
def test_optimised_python_notices_as_well(module: Any) -> None:
    """`python -O` leaves out asserts: none of the guards is one."""
    nodes = ast.walk(ast.parse(inspect.getsource(module)))
    assert not [node.lineno for node in nodes if isinstance(node, ast.Assert)]


# ------------------------------------------------------------------ mass that lies elsewhere


def test_crumbs_beside_a_permutation_cost_nothing() -> None:
    """Of each row the largest entry is meant, wherever it stands."""
    x, sigma = np.random.default_rng(7).normal(size=(4, 2)), np.array([2, 0, 3, 1])
    p = Problem.of(x, x[np.argsort(sigma)], np.zeros(4), np.zeros(4))
    index, crumb = np.arange(4), np.full(4, -40.0)
    for order in (np.arange(8), np.arange(8)[::-1]):
        rows, cols, logs = (
            np.concatenate(t)[order] for t in ((index, index), (sigma, index), (p.logs_a, crumb))
        )
        answer = certified(p, SparsePlan(rows, cols, logs), np.zeros(p.m), method="m", rtol=1e-9)
        assert float(answer.upper) == 0


@pytest.mark.parametrize("order", [1, 2, 3])
def test_mass_that_a_column_holds_too_much_is_paid_for_where_it_has_to_go(order: int) -> None:
    """The light atom at 2 goes to −1, and the plan says to 1; the others stay, far to both sides.

    By 2^{p−1} (C + ‖y − z‖^p) for what leaves its column the upper end would be 6^½ of 9^½.
    """
    x, y, light = (np.array([[-1e3, 0.0, 2.0, 1e3]]), np.array([[-1e3, -1.0, 1.0, 1e3]]), 1e-3)
    logs = np.log([[0.5, 1e-12, light, 0.5], [0.5, light, 1e-12, 0.5]])
    p = Problem(x.T, y.T, *logs, order=order)
    index = np.arange(4)
    found = certified(p, SparsePlan(index, index, p.logs_a), np.zeros(p.m), method="m", rtol=1e-9)
    assert float(found.upper) ** order >= light / (1 + light) * 3**order * (1 - 1e-6)


# ------------------------------------------------------------------ units, parts, and two answers


def answer_of(
    lower: float, value: float, upper: float, tag: float, *, converged: bool, doubt: float = 0.0
) -> Any:
    """An answer whose plan costs its upper end and whose potentials give its lower one."""
    nowhere, one = np.zeros((1, 1)), np.zeros(1)
    ends = (np.asarray(t) for t in (lower, value, upper, converged, doubt, 0.0))
    names = ("lower", "value", "upper", "converged", "plan_doubt", "dual_doubt")
    return replace(
        solve_one_atom(Problem.of(nowhere, nowhere, one, one), rtol=1e-9),
        **dict(zip(names, ends, strict=True)),
        log_mass=np.full(1, -tag), f=np.full(1, tag), g=np.full(1, -tag), method=str(tag),
    )  # fmt: skip


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
    # Or a reader of `rounding` would find that it explains nothing.
    assert float(found.dual_doubt) == pytest.approx(doubt)
    unsaid = answer_of(2.5, 3.5, 4.0, 2.0, converged=False, doubt=doubt)
    assert not narrower(*((unsaid, plan) if swap else (plan, unsaid)), 1e-9).converged


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
    third = replace(third, dual_doubt=np.asarray(0.75), order=order)
    for exponent in (-1073, -1060, -1030, 7, 1020):
        found = in_unit(third, np.asarray(exponent))
        with mpmath.workdps(30):
            truth = mpmath.mpf(1 / 3) * mpmath.mpf(2) ** exponent
            assert mpmath.mpf(float(found.lower)) <= truth <= mpmath.mpf(float(found.upper))
        assert found.lower <= found.value <= found.upper
        assert found.plan_doubt == math.ldexp(0.5, exponent)
        assert found.dual_doubt == math.ldexp(0.75, exponent)
        if order * exponent < 1022 and (order == 1 or order * exponent > -1022):
            truths = (math.ldexp(t, order * exponent) for t in (3.0, -3.0))
            assert (found.f[0], found.g[0]) == tuple(truths)
        else:
            assert np.isnan([*found.f, *found.g]).all()


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


@pytest.mark.parametrize("order", [1, 2])
def test_parts_keep_what_rounding_left_open(order: int) -> None:
    """θ of one with a share of another: as the powers add."""
    p = Problem.of(*RNG.normal(size=(2, 5, 2)), np.zeros(5), np.zeros(5), order=order)
    one = solve_dense(p, rtol=1e-9)[None]
    one = replace(one, plan_doubt=np.array([0.2]))  # a permutation has none
    other = replace(one, plan_doubt=3 * one.plan_doubt, dual_doubt=0 * one.dual_doubt + 0.5)
    index = np.arange(5)[None]
    logs = np.log([[0.25], [0.75]])
    parts = [
        clusters.Part(t, index + 5 * k, index + 5 * k, logs[k]) for k, t in enumerate((one, other))
    ]
    whole = united(parts, (10, 10), order)
    truth = (0.25 + 0.75 * 3**order) * one.plan_doubt**order
    assert float(whole.plan_doubt**order) == pytest.approx(truth.item(), rel=1e-12)
    assert float(whole.dual_doubt**order) == pytest.approx(0.75 * 0.5**order, rel=1e-6)
    assert whole.converged
    is_open = parts[1]._replace(answer=replace(one, converged=~one.converged))
    for mixed in ([parts[0], is_open], [is_open, parts[0]]):
        assert not united(mixed, (10, 10), order).converged


def test_a_distance_beyond_the_number_range_has_a_finite_lower_end() -> None:
    found = solve_w2([[-1.7e308]], [[1.7e308]], strict=False)
    assert float(found.lower) == np.finfo(float).max and float(found.upper) == np.inf
