"""`certify`: what other solvers say, graded: what it takes, and what it says of the width."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment

from meanfield.transport import certify, solve_w2
from meanfield.transport.plans import pricing
from meanfield.transport.plans.c_transform import CTransform
from tests.transport.transport_oracles import solve_w1

RNG = np.random.default_rng(3)
X, Y = RNG.normal(size=(30, 2)), RNG.normal(size=(30, 2)) + 0.5
A, B = RNG.dirichlet(np.ones(30)), RNG.dirichlet(np.ones(30))
BEST = solve_w2((X, A), (Y, B))
COSTS = ((X[:, None] - Y) ** 2).sum(-1)
SIGMA = linear_sum_assignment(COSTS)[1]


@pytest.mark.parametrize("size", [None, 100])
def test_products_and_direct_costs_price_alike(monkeypatch, size) -> None:
    """Above a number of differences pricing goes by products, with a slack, or precisely."""
    if size is not None:
        monkeypatch.setattr(pricing, "_DIRECT", size)
    for eps in (1.0, 1e-6):
        y = X + eps * RNG.normal(size=X.shape)
        truth = float(solve_w2(X, y).value)
        sigma = linear_sum_assignment(((X[:, None] - y) ** 2).sum(-1))[1]
        found = certify(X, y, plan=sigma, potentials=(None, np.zeros(30)))
        assert float(found.lower) <= truth * (1 + 1e-14)
        assert float(found.upper) == pytest.approx(truth, rel=1e-12)
        exact = solve_w2(X, y).potentials
        found = certify(X, y, plan=sigma, potentials=exact)
        assert found.converged and found.relative_width < 1e-9


def test_assignments_come_as_permutations_maps_and_pairs_of_scipy() -> None:
    best = solve_w2(X, Y)
    for plan in (SIGMA, SIGMA.tolist(), SIGMA.astype(np.uint8), linear_sum_assignment(COSTS)):
        found = certify(X, Y, plan=plan, potentials=best.potentials)
        assert found.converged and found.coupling.rows.shape == (30,)
    to_one = certify(X, Y, plan=np.zeros(30, int), potentials=best.potentials)
    assert float(to_one.upper) > float(best.upper)


def test_what_is_not_given_is_bounded_all_the_same() -> None:
    nothing = certify((X, A), (Y, B))
    assert float(nothing.lower) <= float(BEST.value) <= float(nothing.upper)
    assert nothing.method == "given nothing" and not nothing.converged
    nearest = np.sqrt(max(A @ COSTS.min(1), B @ COSTS.min(0)))
    assert float(nothing.lower) >= nearest * (1 - 1e-12)
    no_plan = certify((X, A), (Y, B), potentials=BEST.potentials)
    assert float(no_plan.lower) == pytest.approx(float(BEST.value), rel=1e-9)
    no_potentials = certify((X, A), (Y, B), plan=BEST.coupling)
    assert float(no_potentials.upper) == pytest.approx(float(BEST.value), rel=1e-9)
    assert no_potentials.method == "given plan"


def test_half_precision_of_torch_is_read() -> None:
    halves = [torch.as_tensor(t, dtype=torch.bfloat16) for t in BEST.potentials]
    plan = torch.as_tensor(BEST.plan, dtype=torch.bfloat16)
    found = certify((X, A), (Y, B), plan=plan, potentials=halves)
    assert float(found.lower) <= float(BEST.value) <= float(found.upper)
    assert found.relative_width < 0.1


def test_single_precision_and_infeasible_potentials_cost_a_little_and_never_the_bound() -> None:
    f, g = BEST.potentials
    truth = float(BEST.value)
    for pair, loss in (
        ((f.astype(np.float32), g.astype(np.float32)), 1e-6),
        ((f + 0.5, g + 0.5), 1e-9),
        ((f + 0.05, g), 1e-9),
        ((f.astype(np.float16), None), 1e-2),
    ):
        found = certify((X, A), (Y, B), plan=BEST.plan, potentials=pair)
        assert truth * (1 - loss) <= float(found.lower) <= truth * (1 + 1e-14)


def test_the_better_one_of_two_potentials_is_enough() -> None:
    """Their c-transforms are taken from each side, and those that give more are kept."""
    (f, g), noise = BEST.potentials, 0.5 * RNG.normal(size=30)
    for pair in ((f, noise), (noise, g)):
        found = certify((X, A), (Y, B), plan=BEST.plan, potentials=pair)
        assert found.converged and found.relative_width < 1e-12


def test_a_common_offset_of_a_potential_means_nothing() -> None:
    found = certify((X, A), (Y, B), plan=BEST.plan, potentials=(None, BEST.potentials[1] + 1e6))
    assert found.relative_width < 1e-8


def test_what_pricing_says_it_may_be_wrong_by_is_taken_off(monkeypatch) -> None:
    """Minima that are 1e-4 too high, and say so."""
    right = CTransform.__call__

    def high(self, g, count, ceiling=None):
        found = right(self, g, count, ceiling)
        return found._replace(minima=found.minima + 1e-4, slack=found.slack + 1e-4)

    monkeypatch.setattr(CTransform, "__call__", high)
    monkeypatch.setattr(pricing, "_DIRECT", 100)
    truth = float(BEST.value)
    found = certify((X, A), (Y, B), plan=BEST.plan, potentials=BEST.potentials, rtol=0.5)
    assert truth - 1e-3 < float(found.lower) <= truth * (1 + 1e-12)


@pytest.mark.parametrize("order", [1, 2])
def test_the_order_says_which_cost_is_meant(order: int) -> None:
    best = (solve_w1 if order == 1 else solve_w2)((X, A), (Y, B))
    found = certify((X, A), (Y, B), plan=best.coupling, potentials=best.potentials, p=order)
    assert found.converged and found.order == order
    settings = {"plan": best.coupling, "potentials": best.potentials, "p": 3 - order}
    assert not certify((X, A), (Y, B), **settings).converged


BAD = {
    "a matrix of ones": (lambda: {"plan": np.eye(20, 30)}, "sum to 1, got 20"),
    "a transposed plan": (lambda: {"plan": np.ones((30, 20)) / 600}, "is it transposed"),
    "another shape": (lambda: {"plan": np.ones((3, 4)) / 12}, r"shape \(20, 30\)"),
    "negative masses": (lambda: {"plan": np.full((20, 30), 1 / 600) - np.eye(20, 30)}, "≥ 0"),
    "a NaN": (lambda: {"plan": np.full((20, 30), np.nan)}, "finite"),
    "a short assignment": (lambda: {"plan": np.arange(19)}, "one for each atom"),
    "columns out of range": (lambda: {"plan": np.arange(20) + 20}, "from 0 to 29"),
    "negative columns": (lambda: {"plan": np.arange(20) - 1}, "from 0 to 29"),
    "a column too far": (lambda: {"plan": np.arange(20) + 11}, "from 0 to 29"),
    "rows that are floats": (
        lambda: {"plan": (np.arange(20.0), np.arange(20), np.full(20, 0.05))}, "rows from 0"),
    "masses of another length": (
        lambda: {"plan": (np.arange(20), np.arange(20), np.full(19, 1 / 19))}, "got"),
    "one array of potentials": (lambda: {"potentials": np.zeros(20)}, "write"),
    "swapped potentials": (lambda: {"potentials": (np.zeros(30), np.zeros(20))}, "expected 20"),
    "potentials in a column": (lambda: {"potentials": (np.zeros((20, 1)), None)}, "expected 20"),
    "infinite potentials": (
        lambda: {"potentials": (None, np.full(30, np.inf))}, "finite ones at atoms"),
    "a coupling without masses": (
        lambda: {"plan": replace(solve_w2(X[:20], Y).coupling, log_mass=np.full(49, np.nan))},
        "a mass for each"),
    "a text": (lambda: {"plan": "identity"}, "an assignment"),
    "an order below 1": (lambda: {"p": 0.5}, "p: expected"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_plan_and_no_potential_is_refused_in_words(name: str) -> None:
    make, words = BAD[name]
    with pytest.raises((TypeError, ValueError), match=words):
        certify(X[:20], Y, **make())


def test_a_batch_is_told_to_go_one_by_one() -> None:
    with pytest.raises(ValueError, match="each pair by itself"):
        certify(np.stack([X, X]), np.stack([Y, Y]), plan=SIGMA)


def test_a_plan_with_wrong_marginals_is_put_right_and_paid_for() -> None:
    f, g = BEST.potentials
    for size in (1e-16, 1e-12, 1e-6, 1e-2, 0.3):
        off = BEST.plan * (1 + size * RNG.uniform(-1, 1, (30, 1)))
        found = certify((X, A), (Y, B), plan=off, potentials=(f, g))
        assert float(found.upper) >= float(BEST.lower)
        np.testing.assert_allclose(found.plan.sum(1), A, atol=1e-13)
        np.testing.assert_allclose(found.plan.sum(0), B, atol=1e-13)
        assert float(found.upper) <= float(BEST.value) + 10 * size + 1e-6
