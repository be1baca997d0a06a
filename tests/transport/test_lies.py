"""What closed forms, nearest neighbours and clusters take for granted, handed over wrong.

Every lie must be noticed: the right answer all the same, a flagged interval that holds, or a
`CertificateError` in words. Also what may be called rounding, and what may not.
"""

from __future__ import annotations

import ast
import inspect
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from meanfield.errors import CertificateError
from meanfield.transport import certificate, solve_w2, w2
from meanfield.transport import problem as problems
from meanfield.transport import solve as dispatch
from meanfield.transport.certificate import SparsePlan, certified, feasible, united
from meanfield.transport.plans import clusters, columns, exact, formulas
from meanfield.transport.plans.c_transform import CTransform
from meanfield.transport.problem import Problem
from tests.transport.transport_oracles import exact_transport, solve_w1

RNG = np.random.default_rng(5)
LINE = RNG.normal(size=(30, 1)), RNG.normal(size=(30, 1)) + 0.3
PLANE = RNG.normal(size=(60, 2)), RNG.normal(size=(60, 2)) + 0.3
NEAR = PLANE[0], PLANE[0] + 0.02 * RNG.normal(size=(60, 2))
MOVED = PLANE[0], PLANE[0][::-1] + 1.0  # the same cloud elsewhere, numbered otherwise
TWO = np.array([[0.0, 0.0], [1.0, 0.2]]), np.array([[1.3, 0.1], [0.1, 0.0]])
HOMES = np.repeat([[0.0, 0.0], [50.0, 0.0]], 30, axis=0)
COLLAPSED = tuple(HOMES + 1e-7 * RNG.normal(size=(2, 60, 2)))
WEIGHTS = RNG.dirichlet(np.ones(60))
LARGE = RNG.normal(size=(500, 2)), RNG.normal(size=(500, 2)) + 0.3
SHAKEN = LARGE[0], LARGE[0] + 1e-3 * RNG.standard_t(2, size=(500, 2))


def changed(name: str, place: Any, make: Callable[[Any], Any]) -> Callable[[Any], None]:
    """A lie: what stands under this name there answers otherwise."""

    def install(monkeypatch: pytest.MonkeyPatch) -> None:
        right = getattr(place, name)
        monkeypatch.setattr(place, name, make(right))

    return install


def then(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda right: lambda *args, **kwargs: change(right(*args, **kwargs))


def reversed_match(found: tuple) -> tuple:
    plan, steps = found
    return plan._replace(cols=plan.cols[::-1]), steps


def raised_minima(found: Any) -> Any:
    return found._replace(minima=found.minima + 0.2)


def heavier(found: Any) -> Any:
    return found._replace(log_common=found.log_common + math.log(1.1))


def tilted(logs: np.ndarray) -> np.ndarray:
    return logs + np.log(1 + 0.1 * (np.arange(len(logs)) % 2))


# what is told, to whom, and the clouds and the method that hear it
LIES: dict[str, tuple] = {
    "a matched plan on the line reversed": (
        changed("_on_line", formulas, then(reversed_match)), LINE, {}),
    "the line sorted the other way": (
        changed("_on_line", formulas, lambda right: lambda p, orders, *rest: right(
            p, (orders[0], orders[1][::-1]), *rest)), LINE, {}),
    "potentials of the staircase too high": (
        changed("_staircase_potentials", formulas, then(lambda t: (t[0] + 0.3, t[1], t[2]))),
        LINE, {}),
    "one potential of the staircase too high": (
        changed("_staircase_potentials", formulas,
                then(lambda t: (t[0] + 0.3 * (t[0] == t[0].max()), t[1], t[2]))),
        LINE, {}),
    "every atom has its own partner nearest": (
        changed("_nearest", formulas, lambda right: lambda points, queries, moved, device: moved),
        PLANE, {"method": "identity"}),
    "nearest points twice as far": (
        changed("_nearest", formulas, lambda right: lambda *args: 2 * right(*args)),
        NEAR, {"method": "identity"}),
    "parts of clusters too heavy": (
        changed("_masses", clusters, then(heavier)), COLLAPSED, {}),
    "clusters without one of their parts": (
        changed("_masses", clusters, then(lambda m: m._replace(
            log_common=m.log_common - np.array([0.0, 0.7])))), COLLAPSED, {}),
    "labels of clusters mixed": (
        changed("_separated", clusters, then(lambda t: None if t is None else t[::-1].copy())),
        COLLAPSED, {}),
    "clusters farther apart than they are": (
        changed("_clusters", clusters, then(lambda t: t._replace(nearest=3 * t.nearest))),
        COLLAPSED, {}),
    "snapped weights of another measure": (
        changed("snapped", dispatch, lambda right: lambda a, b: tilted(b)), PLANE, {}),
    "minima of pricing too high": (
        changed("__call__", CTransform, then(raised_minima)), LARGE, {}),
    "precise minima of pricing too high": (
        changed("precise", CTransform, then(raised_minima)), SHAKEN,
        {"method": "column_generation"}),
    "pricing finds no arcs": (
        changed("_few_arcs", columns, then(lambda arcs: arcs[:0])), LARGE,
        {"method": "column_generation"}),
    "potentials sharpened the wrong way": (
        changed("_sharpened", columns,
                lambda right: lambda p, told, arcs: (told.f + 0.5, 2 * told.g)),
        LARGE, {"method": "column_generation"}),
    "an assignment shifted": (
        changed("assignment", exact, then(lambda sigma: np.roll(sigma, 1, axis=-1))), PLANE,
        {"method": "assignment"}),
}  # fmt: skip


def swap_partners(monkeypatch: pytest.MonkeyPatch) -> None:
    """`solve_two_atoms` asks np.where which end of the range is the better one."""
    right = formulas.certified

    def wrong(problem: Problem, plan: SparsePlan, *rest: Any, **kwargs: Any) -> Any:
        return right(problem, plan._replace(cols=1 - plan.cols), *rest, **kwargs)

    monkeypatch.setattr(formulas, "certified", wrong)


LIES["partners of two atoms swapped"] = (swap_partners, TWO, {})


def noticed(solve: Callable[[], Any], truth: float, *, tight: float = 1e-7) -> str:
    """How the lie ended; an answer that does not hold, or that is believed though wide, fails."""
    try:
        found = solve()
    except CertificateError:
        return "refused"
    assert float(found.lower) <= truth * (1 + 1e-12), (found, truth)
    assert float(found.upper) >= truth * (1 - 1e-12), (found, truth)
    if not found.converged:
        return "flagged"
    assert float(found.relative_width) <= tight, (found, truth)
    return "healed"


@pytest.mark.parametrize("name", LIES)
@pytest.mark.parametrize("weighted", [False, True], ids=["uniform", "weighted"])
def test_a_lie_is_noticed(monkeypatch: pytest.MonkeyPatch, name: str, weighted: bool) -> None:
    install, (x, y), settings = LIES[name]
    a = np.resize(WEIGHTS, len(x)) if weighted and len(x) < 100 else np.full(len(x), 1.0)
    a = a / a.sum()
    if weighted and settings.get("method") == "assignment":
        return
    truth = float(solve_w2((x, a), (y, a)).value)
    install(monkeypatch)
    noticed(lambda: solve_w2((x, a), (y, a), strict=False, **settings), truth)


@pytest.mark.parametrize("order", [1, 2])
def test_a_theorem_is_not_believed_against_its_own_potentials(order: int) -> None:
    """A wrong coupling with the right marginals, said to be optimal."""
    x, y = LINE
    p = Problem.of(x, y, np.zeros(30), np.zeros(30), order=order)
    right = formulas.solve_line(p, rtol=1e-9)
    assert right.converged and right.f is not None and right.g is not None
    wrong = SparsePlan(right.rows, right.cols[::-1], right.log_mass, -math.inf)
    answer = certified(
        p, wrong, (right.f, right.g), method="m", rtol=1e-9, slack=1e-12, is_optimal=True
    )
    assert not answer.converged
    assert float(answer.lower) == pytest.approx(float(right.value), rel=1e-9)
    alone = certified(p, wrong, None, method="m", rtol=1e-9, is_optimal=True)
    assert not alone.converged and float(alone.lower) == 0


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


def test_parts_of_another_mass_are_refused() -> None:
    with pytest.raises(CertificateError, match="mass 1"):
        clusters._refuse_masses(*heavy_part(0.4))
    with pytest.raises(CertificateError, match="at most"):
        clusters._refuse_masses(*heavy_part(1.1))
    clusters._refuse_masses(*heavy_part(1.0))


def heavy_part(mass: float) -> tuple:
    p = Problem.of(*PLANE, np.zeros(60), np.zeros(60))
    answer = exact.solve_dense(p[None], rtol=1e-9)
    everyone = np.arange(60)[None]
    return p, [clusters.Part(answer, everyone, everyone, np.array([math.log(mass)]))]


def test_snapped_weights_are_the_given_ones_up_to_rounding() -> None:
    logs = np.log(WEIGHTS)
    assert problems.same_weights(logs, np.nextafter(logs, 0)) is not logs
    with pytest.raises(CertificateError, match="up to rounding"):
        problems.same_weights(logs, tilted(logs))


@pytest.mark.parametrize("module", [certificate, clusters, formulas, problems])
def test_optimised_python_notices_as_well(module: Any) -> None:
    """`python -O` leaves out asserts: none of the guards is one."""
    nodes = ast.walk(ast.parse(inspect.getsource(module)))
    assert not [node.lineno for node in nodes if isinstance(node, ast.Assert)]


# ------------------------------------------------------------------ what rounding may explain


def core_and_far(n: int, radius: float, weight: float) -> tuple:
    """A collapsed core, and one atom of small weight at distance 1 that has to come home."""
    rng = np.random.default_rng(0)
    x, y = radius * rng.normal(size=(2, n, 2))
    x[0] = [1, 0]
    a, b = rng.dirichlet(np.ones(n), size=2)
    a[0] = weight
    return (x, a / a.sum()), (y, b)


@pytest.mark.parametrize(("weight", "truth"), [(1e-18, 1.0e-9), (1e-15, 3.16228e-8)])
def test_what_pricing_leaves_open_is_no_rounding(weight: float, truth: float) -> None:
    """The empty plan costs less than the error of the products with which pairs are priced."""
    found = solve_w2(*core_and_far(450, 1e-12, weight), strict=False)
    assert float(found.lower) <= truth * (1 + 1e-4)
    assert float(found.upper) >= truth * (1 - 1e-4)
    assert not found.converged or float(found.relative_width) < 1e-6
    assert float(found.value) == pytest.approx(truth, rel=1e-3)


@pytest.mark.parametrize("d", [2, 5])
def test_nested_scales_are_solved_or_flagged(d: int) -> None:
    rng = np.random.default_rng(0)
    n = 450
    radii = 10 ** rng.uniform(-10, 0, size=(2, n, 1))
    x, y = radii * rng.normal(size=(2, n, d)) / math.sqrt(d)
    a, b = radii[..., 0] ** -3 / (radii[..., 0] ** -3).sum(1, keepdims=True)
    found = solve_w2((x, a), (y, b), strict=False)
    assert not found.converged or found.relative_width < 1e-6 or found.rounding > 0
    finer = solve_w2((x, a), (y, b), method="simplex", strict=False)
    assert float(found.lower) <= float(finer.upper)
    assert float(finer.lower) <= float(found.upper)
    assert float(found.value) <= 1.01 * float(finer.upper)


def test_slack_keeps_plan_and_potentials_apart() -> None:
    """They meet in value, but the potentials may be too high by all of the cost."""
    x, y = 1e-6 * RNG.normal(size=(2, 5, 2))
    p = Problem.of(x, y, np.zeros(5), np.zeros(5))
    right = exact.solve_dense(p[None], rtol=1e-9)[0]
    plan = SparsePlan(right.rows, right.cols, right.log_mass)
    for slack, met in ((0.0, True), (1.0, False)):
        answer = certified(p, plan, (right.f, right.g), method="m", rtol=1e-9, slack=slack)
        assert bool(answer.converged) is met
        nothing = SparsePlan(plan.rows[:0], plan.cols[:0], plan.log_mass[:0])
        empty = certified(p, nothing, (right.f, right.g), method="m", rtol=1e-9, slack=slack)
        assert not empty.converged
    assert float(answer.rounding) < 1e-9


@pytest.mark.parametrize("order", [1, 2])
def test_parts_keep_what_rounding_left_open(order: int) -> None:
    """θ of one with a share of another: as the powers add."""
    p = Problem.of(*(t[:5] for t in PLANE), np.zeros(5), np.zeros(5), order=order)
    one = exact.solve_dense(p[None], rtol=1e-9)
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
    assert not united([parts[0], is_open], (10, 10), order).converged


def test_who_asks_for_the_value_alone_is_told_that_rounding_leaves_it_open() -> None:
    """The same points in another order, weights changed by 1e-11: few digits are left.

    How much of the width is rounding depends on the processor: which road is taken does.
    """
    rng = np.random.default_rng(0)
    x, a = rng.normal(size=(450, 2)), rng.dirichlet(np.ones(450))
    order = rng.permutation(450)
    b = a * (1 + 1e-11 * rng.normal(size=450))
    there = (x, a / a.sum()), (x[order], b[order] / b.sum())
    found = solve_w2(*there, strict=False)
    assert found.relative_width > 0.01
    assert 0.01 * found.upper < found.rounding
    with pytest.warns(UserWarning, match=r"W2 lies in \[\d.*left open by rounding"):
        w2(*there)
    with pytest.warns(UserWarning, match="W2 lies in"):
        w2(*(tuple(np.stack([t] * 2) for t in side) for side in there))
    beside = tuple((np.stack([t, t + k]), np.stack([w] * 2)) for k, (t, w) in enumerate(there))
    with pytest.warns(UserWarning, match="W2 lies in"):  # one is open, the other is not
        w2(*beside)
    assert solve_w2(x, x[order] + 1).rounding < 1e-9
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        w2(x, x[order] + 1)
        w2(torch.zeros(0, 3, 2), torch.zeros(0, 3, 2))


def test_plans_of_the_simplex_lose_the_lightest_atoms_and_the_interval_does_not() -> None:
    x = np.array([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]])
    y = np.array([[0.5, 0.5], [1.0, 0.0], [2.0, 1.0]])
    a, b = np.array([1e-40, 0.5, 0.5]), np.array([2e-40, 0.4, 0.6])
    found = solve_w2((x, a), (y, b))
    truth = exact_transport(x, y, np.log(a), np.log(b))
    assert float(found.lower) ** 2 <= truth * (1 + 1e-15) and truth <= float(found.upper) ** 2
    assert found.coupling.marginals()[0][0] == 0  # as the docstring of Coupling says
    line = solve_w2((x[:2], np.array([1e-40, 1.0])), (y[:1], np.ones(1)))
    assert line.coupling.marginals()[0][0] == pytest.approx(1e-40)


def test_a_level_that_is_denormal_makes_no_warning() -> None:
    """Reduced costs whose mean underflows: 1 / level is infinite."""
    a = np.full(150, 1 / 150)
    costs = np.zeros((150, 150))
    costs[0, 0] = 5e-310
    plans, _ = exact.simplexes(a[None], a[None], costs[None])
    assert plans.sum() == pytest.approx(1)


def test_the_truth_of_these_clouds_is_that_of_integers() -> None:
    """The oracle of this file is the package's own answer: here it is held against another."""
    for x, y in ((LINE[0][:7], LINE[1][:6]), (PLANE[0][:6], PLANE[1][:7]), TWO):
        a, b = np.zeros(len(x)), np.zeros(len(y))
        for order, solve in ((1, solve_w1), (2, solve_w2)):
            truth = float(exact_transport(x, y, a, b, order)) ** (1 / order)
            assert float(solve(x, y).value) == pytest.approx(truth, rel=1e-12)
