"""`certify`: what other solvers say, graded: what it takes, and what it says of the width."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment

from meanfield.transport import certify, grading, solve_w2
from meanfield.transport.coupling import Coupling
from meanfield.transport.problem import Problem

RNG = np.random.default_rng(3)
X, Y = RNG.normal(size=(30, 2)), RNG.normal(size=(30, 2)) + 0.5
A, B = RNG.dirichlet(np.ones(30)), RNG.dirichlet(np.ones(30))
BEST = solve_w2((X, A), (Y, B))
COSTS = ((X[:, None] - Y) ** 2).sum(-1)
SIGMA = linear_sum_assignment(COSTS)[1]


def test_of_two_potentials_the_better_one_counts() -> None:
    f, g = BEST.potentials
    for pair in ((f, np.zeros(30)), (np.zeros(30), g)):
        found = certify((X, A), (Y, B), potentials=pair)
        assert float(found.lower) == pytest.approx(float(BEST.lower), rel=1e-9)


def test_assignments_come_as_permutations_maps_and_pairs_of_scipy() -> None:
    best = solve_w2(X, Y)
    for plan in (SIGMA, SIGMA.tolist(), SIGMA.astype(np.uint8), linear_sum_assignment(COSTS)):
        found = certify(X, Y, plan=plan, potentials=best.potentials)
        assert found.converged and found.coupling.rows.shape == (30,)
        assert found.coupling.cols.dtype == np.int64
    to_one = certify(X, Y, plan=np.zeros(30, int), potentials=best.potentials)
    assert float(to_one.upper) > float(best.upper)


@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize("direct", [100, 10**9], ids=["products", "differences"])
def test_potentials_in_blocks_and_by_products_are_those_of_all_pairs(
    monkeypatch, direct, mirror
) -> None:
    monkeypatch.setattr(grading, "_BLOCK", 100)
    monkeypatch.setattr(grading, "_DIRECT", direct)
    waves = np.sin(np.arange(30))
    # Of atoms that hardly move costs are far below what products round.
    for y, known, room in ((Y, waves, 1e-15), (X + 1e-6 * Y, 0 * waves, 1e-25)):
        p = Problem.of(X, y, np.zeros(30), np.zeros(30))
        truth = (p.costs - (known[:, None] if mirror else known)).min(0 if mirror else 1)
        found = grading.priced(p, known, mirror=mirror)
        np.testing.assert_allclose(found, truth, rtol=0, atol=room)


BAD = {
    "a matrix of ones": (lambda: {"plan": np.eye(20, 30)}, "sum to 1, got 20"),
    "a transposed plan": (lambda: {"plan": np.ones((30, 20)) / 600}, "is it transposed"),
    "another shape": (lambda: {"plan": np.ones((3, 4)) / 12}, r"shape \(20, 30\), got \(3, 4\)$"),
    "negative masses": (lambda: {"plan": np.full((20, 30), 1 / 600) - np.eye(20, 30)}, "≥ 0"),
    "a mass that is a little negative": (
        lambda: {"plan": np.full((20, 30), 1 / 600) - 1.002 / 600 * np.eye(20, 30)}, "≥ 0"),
    "less than half of the mass": (lambda: {"plan": np.full((20, 30), 0.49 / 600)}, "sum to 1"),
    "more than one and a half": (lambda: {"plan": np.full((20, 30), 1.51 / 600)}, "sum to 1"),
    "a NaN": (lambda: {"plan": np.full((20, 30), np.nan)}, "finite"),
    "a short assignment": (lambda: {"plan": np.arange(19)}, "one for each atom"),
    "columns out of range": (lambda: {"plan": np.arange(20) + 20}, "from 0 to 29"),
    "negative columns": (lambda: {"plan": np.arange(20) - 1}, "from 0 to 29"),
    "a column too far": (lambda: {"plan": np.arange(20) + 11}, "from 0 to 29"),
    "rows that are floats": (
        lambda: {"plan": (np.arange(20.0), np.arange(20), np.full(20, 0.05))}, "rows from 0"),
    "masses of another length": (
        lambda: {"plan": (np.arange(20), np.arange(20), np.full(19, 1 / 19))}, "got"),
    "columns of another length": (
        lambda: {"plan": (np.arange(20), np.arange(19), np.full(20, 0.05))}, "arrays of shapes"),
    "three potentials": (
        lambda: {"potentials": (np.zeros(20), np.zeros(30), np.zeros(20))}, "expected a pair"),
    "a coupling of a batch": (
        lambda: {"plan": solve_w2(np.stack([X[:20]] * 2), np.stack([Y] * 2)).coupling},
        r"got \(2, 20, 30\)"),
    "a coupling with masses of another length": (
        lambda: {"plan": replace(solve_w2(X[:20], Y).coupling, log_mass=np.full(3, -4.0))},
        "a mass for each"),
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


def test_masses_that_rounding_has_made_negative_are_none() -> None:
    plan, off = BEST.plan.copy(), BEST.plan == 0
    plan[off] = -1e-8 * plan.max()
    found = certify((X, A), (Y, B), plan=plan, potentials=BEST.potentials)
    assert found.converged and not found.plan[off].any()
    assert float(found.upper) == pytest.approx(float(BEST.upper), rel=1e-12)


def test_a_batch_is_told_to_go_one_by_one() -> None:
    with pytest.raises(ValueError, match="each pair by itself"):
        certify(np.stack([X, X]), np.stack([Y, Y]), plan=SIGMA)


def test_answers_in_other_precisions_are_those_numbers_in_double() -> None:
    coupling, (f, g) = BEST.coupling, BEST.potentials
    light = coupling.log_mass.astype(np.float32)
    half = torch.as_tensor(f).bfloat16(), torch.as_tensor(g).half()
    for plan, potentials in (
        (replace(coupling, log_mass=light), (f.astype(np.float32), None)),
        (BEST.plan.astype(np.float32), (None, g.astype(np.float32))),
        (torch.as_tensor(BEST.plan).float(), half),
    ):
        found = certify((X, A), (Y, B), plan=plan, potentials=potentials)
        if isinstance(plan, Coupling):
            plan = replace(plan, log_mass=light.astype(float))
        else:
            plan = np.asarray(plan, float)
        wide = tuple(None if t is None else np.array(t.tolist()) for t in potentials)
        same = certify((X, A), (Y, B), plan=plan, potentials=wide)
        assert (float(found.lower), float(found.upper)) == (float(same.lower), float(same.upper))


def test_entries_of_a_sparse_tensor_that_come_twice_add_up() -> None:
    half = torch.as_tensor(BEST.plan / 2).to_sparse()
    twice = torch.sparse_coo_tensor(
        torch.cat([half.indices()] * 2, 1),
        torch.cat([half.values()] * 2),
        half.shape,
        check_invariants=True,
    )
    found = certify((X, A), (Y, B), plan=twice, potentials=BEST.potentials)
    assert found.converged
    assert float(found.upper) == pytest.approx(float(BEST.upper), rel=1e-14)
