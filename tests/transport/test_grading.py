"""`certify`: what other solvers say, graded; and files that prove an interval by themselves."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import sparse
from scipy.optimize import linear_sum_assignment

from meanfield.errors import CertificateError
from meanfield.measures import ParticleMeasure
from meanfield.transport import (
    certify,
    checker,
    solve_conditional_w2,
    solve_w2,
    solve_wp,
)
from meanfield.transport.plans import pricing
from meanfield.transport.plans.c_transform import CTransform
from tests.transport.foreign_cases import (
    check_grade,
    damaged_files,
    foreign_case,
    measure_of,
    truth_of,
)
from tests.transport.transport_oracles import solve_w1

RNG = np.random.default_rng(3)
X, Y = RNG.normal(size=(30, 2)), RNG.normal(size=(30, 2)) + 0.5
A, B = RNG.dirichlet(np.ones(30)), RNG.dirichlet(np.ones(30))
COSTS = ((X[:, None] - Y) ** 2).sum(-1)
BEST = solve_w2((X, A), (Y, B))
SIGMA = linear_sum_assignment(COSTS)[1]


@pytest.mark.parametrize("block", range(5))
def test_every_interval_holds_the_optimum_of_integers(block: int) -> None:
    for seed in range(20 * block, 20 * block + 20):
        case = foreign_case(seed)
        found = certify(case.mu, case.nu, plan=case.plan, potentials=case.potentials, p=case.order)
        assert not check_grade(case, found, truth_of(case)), (seed, case.kind)


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


def test_optimal_pairs_close_the_interval_whatever_they_come_as() -> None:
    plan, (f, g) = BEST.plan, BEST.potentials
    rows, cols = np.nonzero(plan)
    plans = {
        "dense": plan,
        "float tensor": torch.as_tensor(plan),
        "csr": sparse.csr_matrix(plan),
        "coo": sparse.coo_array(plan),
        "sparse tensor": torch.as_tensor(plan).to_sparse(),
        "csr tensor": torch.as_tensor(plan).to_sparse_coo(),
        "entries": (rows, cols, plan[rows, cols]),
        "coupling": BEST.coupling,
        "nested list": plan.tolist(),
        "fortran": np.asfortranarray(plan),
    }
    pairs = {
        "both": (f, g),
        "f": (f, None),
        "g": (None, g),
        "shifted": (f + 3.0, g - 3.0),
        "list of tensors": [torch.as_tensor(f), torch.as_tensor(g)],
    }
    for name, pair in pairs.items():
        found = certify((X, A), (Y, B), plan=plan, potentials=pair)
        assert found.converged and found.relative_width < 1e-12, name
    for name, some in plans.items():
        found = certify((X, A), (Y, B), plan=some, potentials=(f, g))
        assert found.converged, name
        assert float(found.value) == pytest.approx(float(BEST.value), rel=1e-13)
        np.testing.assert_allclose(found.plan.sum(1), A, atol=1e-15)


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
    nearest = math.sqrt(max(A @ COSTS.min(1), B @ COSTS.min(0)))
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


def test_a_plan_with_wrong_marginals_is_put_right_and_paid_for() -> None:
    f, g = BEST.potentials
    for size in (1e-16, 1e-12, 1e-6, 1e-2, 0.3):
        off = BEST.plan * (1 + size * RNG.uniform(-1, 1, (30, 1)))
        found = certify((X, A), (Y, B), plan=off, potentials=(f, g))
        assert float(found.upper) >= float(BEST.lower)
        np.testing.assert_allclose(found.plan.sum(1), A, atol=1e-13)
        np.testing.assert_allclose(found.plan.sum(0), B, atol=1e-13)
        assert float(found.upper) <= float(BEST.value) + 10 * size + 1e-6


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


def test_weights_that_agree_to_their_last_place_are_read_as_equal(tmp_path) -> None:
    """As in `solve_w2`: 1e-17 of mass, moved across the cloud, would be more than all the rest."""
    order = RNG.permutation(30)
    near = X[order] + 1e-10 * RNG.normal(size=(30, 2))
    mu = measure_of(X, np.log(A))
    nu = measure_of(near, np.nextafter(np.log(A), 0)[order])
    found = certify(mu, nu, plan=np.argsort(order), potentials=(None, np.zeros(30)))
    assert float(found.upper) < 1e-9
    assert found.converged and found.relative_width < 1e-6
    checker.check(str(found.save(tmp_path / "it.proof")))  # with the weights that were read


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


def test_the_centre_through_which_a_file_sends_the_rest_is_not_on_the_grid(tmp_path) -> None:
    """Points at 1 and 2, almost all mass at 2: rounded to 1, it would make the rest too dear."""
    mu = measure_of(np.array([[1.0], [2.0]]), np.log([1.77e-6, 1 - 1.77e-6]))
    nu = measure_of(np.array([[2.0], [2.0]]), np.log([0.0966, 0.9034]))
    found = certify(mu, nu, potentials=([1.0, 0.0], [0.0, 0.0]), p=1)
    assert checker.check(str(found.save(tmp_path / "it.proof")))[2] == float(found.upper)


def test_atoms_without_mass_may_be_anywhere_and_have_any_potential() -> None:
    x, a = np.vstack([X, [[np.nan, np.inf]]]), np.append(A, 0.0)
    plan = np.vstack([BEST.plan, np.zeros(30)])
    f, g = BEST.potentials
    mu = ParticleMeasure(torch.as_tensor(X), torch.as_tensor(A))
    mu = ParticleMeasure(
        torch.as_tensor(np.vstack([X, [[0.0, 0.0]]])), torch.as_tensor(a)
    ).replace(torch.as_tensor(x))
    nu = ParticleMeasure(torch.as_tensor(Y), torch.as_tensor(B))
    found = certify(mu, nu, plan=plan, potentials=(np.append(f, -np.inf), g))
    assert found.converged and found.coupling.shape == (31, 30)
    assert len(found.potentials[0]) == 31
    astray = plan.copy()
    astray[30, 0] = 0.2
    assert float(certify(mu, nu, plan=astray, potentials=(None, g)).upper) >= float(BEST.value)


def test_float32_clouds_have_ends_rounded_outward() -> None:
    x, y = torch.as_tensor(X).float(), torch.as_tensor(Y).float()
    truth = solve_w2(x.double(), y.double())
    found = certify(x, y, plan=SIGMA, potentials=truth.potentials)
    assert found.value.dtype == torch.float32
    assert float(found.lower) <= float(truth.lower) <= float(truth.upper) <= float(found.upper)


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


# ------------------------------------------------------------------ files that prove themselves


def test_saved_answers_prove_their_own_interval_without_the_library(tmp_path) -> None:
    path = BEST.save(tmp_path / "folder" / "w2.proof")
    order, lower, upper = checker.check(str(path))
    assert (order, float(lower), float(upper)) == (2, float(BEST.lower), float(BEST.upper))
    done = subprocess.run(
        [sys.executable, "-I", "-S", checker.__file__, str(path)],
        capture_output=True, text=True, check=True, env={"PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip
    assert repr(float(BEST.upper)) in done.stdout
    assert BEST.save(path) == path  # replaces its own
    lines = Path(checker.__file__).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 60
    imported = [line for line in lines if line.startswith(("import", "from"))]
    assert all(line.split()[1] in sys.stdlib_module_names for line in imported)


def hard_answers() -> list:
    """Closed forms, clusters and light atoms: their intervals are narrower than sums of floats."""
    light = torch.tensor([0.0, -900.0], dtype=torch.float64)
    mu = ParticleMeasure([[0.0], [1.0]], log_weights=light)
    homes = np.repeat([[0.0, 0.0], [8.0, 0.0]], 15, axis=0)
    collapsed = homes + 1e-9 * RNG.normal(size=(2, 30, 2))
    return [
        solve_w2(mu, mu.replace(torch.tensor([[0.0], [2.0]], dtype=torch.float64))),
        solve_w2((X[:, :1], A), (Y[:, :1], B)),
        solve_w1((X[:, :1], A), (Y[:, :1], B)),
        solve_w2(*collapsed),
        solve_w1(*collapsed),
        solve_w1((X, A), (Y, B)),
        solve_w2(X, X + 1e-6 * Y),
        solve_w2(X.astype(np.float32), Y.astype(np.float32)),
        solve_w2(X, X),
        solve_w2(1e150 * X, 1e150 * Y),
        certify((X, A), (Y, B)),
        certify((X, A), (Y, B), plan=np.outer(A, B), potentials=(np.zeros(30), None)),
    ]


def test_narrow_intervals_are_proven_in_exact_arithmetic(tmp_path) -> None:
    for k, answer in enumerate(hard_answers()):
        order, lower, upper = checker.check(str(answer.save(tmp_path / f"{k}.proof")))
        assert order == answer.order
        if np.asarray(answer.value).dtype == np.float64:
            assert (float(lower), float(upper)) == (float(answer.lower), float(answer.upper))
        else:
            assert float(answer.lower) <= lower <= upper <= float(answer.upper)


def test_foreign_grades_are_proven_and_damaged_files_refused(tmp_path) -> None:
    for seed in (*range(20), 76):  # the last one needs the lighter of two potentials lowered
        path = tmp_path / f"{seed}.proof"
        case = foreign_case(seed)
        found = certify(case.mu, case.nu, plan=case.plan, potentials=case.potentials, p=case.order)
        found.save(path)
        order, lower, upper = checker.check(str(path))
        truth = truth_of(case)
        tiny = Fraction(1, 2**140)
        assert lower**order <= truth * (1 + tiny)
        assert upper**order >= truth * (1 - tiny)
        right = path.read_bytes()
        for k in range(4):
            damaged = damaged_files(np.random.default_rng([seed, k]), right)
            assert damaged != right
            path.write_bytes(damaged)
            with pytest.raises(Exception):  # noqa: B017, PT011  whatever it is, it is refused
                checker.check(str(path))


def signed(data: dict) -> bytes:
    body = json.dumps(data).encode()
    return (checker.HEAD + hashlib.sha256(body).hexdigest()).encode() + b"\n" + body


def test_the_checker_believes_nothing_that_is_signed(tmp_path) -> None:
    """A claim a little narrower, a potential a little higher, a mass of nothing, no weights."""
    path = BEST.save(tmp_path / "w2.proof")
    right = json.loads(path.read_bytes().partition(b"\n")[2])
    wide = {"lower": 0, "upper": 4 * right["upper"]}  # an interval that anything would prove
    lies = {
        "lower end": {"lower": right["upper"]},
        "upper end": {"upper": right["lower"]},
        "ends": {"lower": right["upper"], "upper": right["lower"]},
        "below 0": {"lower": -1},
        "potentials": {"g": [t + (1 << right["s"]) for t in right["g"]], "lower": right["upper"]},
        "no plan": {"rows": [], "cols": [], "mass": []},
        "half the plan": {"mass": [t // 2 for t in right["mass"]]},
        "negative row": {"rows": [t - len(right["a"]) for t in right["rows"]]},
        "negative column": {"cols": [t - len(right["b"]) for t in right["cols"]]},
        "no mass": {"a": [0] * 30, "b": [0] * 30, "mass": [0] * len(right["mass"])},
        "no dimension": {
            "x": [[]] * 30, "y": [[]] * 30, "a": [0] * 30, "b": [0] * 30, "mass": [],
            "rows": [], "cols": [],
        },
        "negative weights": {"a": [-t for t in right["a"]], "b": [-t for t in right["b"]]},
        "a weight of 1 below": {"a": [*right["a"][:-1], -right["a"][-1]]},
        "fewer weights": {"a": right["a"][:-1], "f": right["f"][:-1]},
        "more weights": {"a": [*right["a"], 1], "f": [*right["f"], 0]},
        "other points": {"x": right["y"]},
        "one coordinate": {"x": [t[:1] for t in right["x"]]},
        "a negative weight": {"a": [*right["a"][:-1], -1], **wide},
        "a negative mass": {"mass": [*right["mass"][:-1], -1], **wide},
        "masses that are floats": {"mass": [float(t) for t in right["mass"]], **wide},
        "a float": {"s": 1.5},
        "NaN": {"lower": math.nan},
        "texts": {"mass": [str(t) for t in right["mass"]]},
        "order 1": {"p": 1},
        "order 0": {"p": 0},
        "a shift of 10^9": {"s": 10**9},
    }  # fmt: skip
    path.write_bytes(signed(right | wide))
    checker.check(str(path))
    for name, change in lies.items():
        path.write_bytes(signed(right | change))
        with pytest.raises(Exception):  # noqa: B017, PT011
            pytest.fail(f"{name}: {checker.check(str(path))}")


@pytest.mark.parametrize(
    ("x", "b", "rows", "shares", "upper"),
    [
        ([0.0, 10.0], [0.9, 0.1], [0, 1], [1.0, 1.0], 1e-3),  # column 2 holds 0.4 too much
        ([-1.0, 1.0], [0.4, 0.6], [0, 1], [0.8, 1.0], 0.55),  # 0.1 is left, and has 2 to go: 0.4
        ([0.0, 10.0], [0.9, 0.1], [0, 0], [1.8, 0.2], 3.5),  # row 1 holds 0.5 too much: 40 in all
    ],
)
def test_a_plan_that_misses_its_marginals_proves_no_less_than_its_repair(
    tmp_path, x: list, b: list, rows: list, shares: list, upper: float
) -> None:
    points, a = np.array(x)[:, None], np.array([0.5, 0.5])
    path = solve_w2((points, a), (points, np.array(b))).save(tmp_path / "w2.proof")
    data = json.loads(path.read_bytes().partition(b"\n")[2])
    mass = [round(share * 1024) * t >> 10 for share, t in zip(shares, data["a"], strict=True)]
    claim = {"rows": rows, "cols": [0, 1], "mass": mass, "lower": 0}
    for end, is_proven in ((upper, False), (20.0, True)):
        claim["upper"] = int(Fraction(end) * 2 ** (data["s"] - data["e"]))
        path.write_bytes(signed(data | claim))
        if is_proven:
            assert checker.check(str(path))[2] == Fraction(end)
            continue
        with pytest.raises(ValueError, match="do not prove"):
            checker.check(str(path))


def test_roots_are_rounded_outward(tmp_path) -> None:
    path = solve_w1([[0.0, 0.0]], [[1.0, 1.0]]).save(tmp_path / "w1.proof")
    data = json.loads(path.read_bytes().partition(b"\n")[2])
    below = math.isqrt(2 << 2 * (data["s"] - data["e"]))  # √2, and a little less
    path.write_bytes(signed(data | {"lower": 0, "upper": below + 1}))
    checker.check(str(path))
    path.write_bytes(signed(data | {"lower": 0, "upper": below}))
    with pytest.raises(ValueError, match="do not prove"):
        checker.check(str(path))


def test_what_cannot_be_saved_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"\.proof"):
        BEST.save(tmp_path / "w2.json")
    batch = solve_w2(np.stack([X, X]), np.stack([Y, Y]))
    with pytest.raises(ValueError, match="one pair"):
        batch.save(tmp_path / "w2.proof")
    s = torch.zeros(30, dtype=torch.float64)
    far = (
        ParticleMeasure(torch.as_tensor(X), positions=s),
        ParticleMeasure(torch.as_tensor(Y), positions=s + 1),
    )
    with pytest.raises(ValueError, match="one pair"):
        solve_conditional_w2(*far).save(tmp_path / "w2.proof")
    weights = np.array([0.0, -20_000.0])
    light = solve_w2(measure_of(X[:2], weights), Y[:2])
    with pytest.raises(ValueError, match="log-weights within 10000"):
        light.save(tmp_path / "w2.proof")
    with pytest.raises(ValueError, match="whole order below 100, got 100"):
        solve_wp(X, Y, 100).save(tmp_path / "w100.proof")
    long = solve_w2(measure_of(X[:2], weights / 2.01), Y[:2])
    with pytest.raises(ValueError, match="integers of at most 4300 digits"):
        long.save(tmp_path / "w2.proof")
    mine = tmp_path / "mine.proof"
    mine.write_text("my proof of something else")
    with pytest.raises(FileExistsError):
        BEST.save(mine)
    assert mine.read_text() == "my proof of something else"


def test_an_answer_that_its_evidence_does_not_prove_leaves_no_file(tmp_path) -> None:
    pair, answer = BEST.found
    high = replace(answer, lower=answer.upper, upper=answer.upper * (1 + 1e-9))
    wrong = replace(BEST, found=(pair, high))
    with pytest.raises(CertificateError, match="in exact arithmetic"):
        wrong.save(tmp_path / "w2.proof")
    assert not list(tmp_path.iterdir())
    proven = BEST.save(tmp_path / "w2.proof").read_bytes()
    with pytest.raises(CertificateError, match="in exact arithmetic"):
        wrong.save(tmp_path / "w2.proof")
    assert [(t.name, t.read_bytes()) for t in tmp_path.iterdir()] == [("w2.proof", proven)]
    wrong.save(tmp_path / "w2.proof", check=False)
    with pytest.raises(ValueError, match="do not prove"):
        checker.check(str(tmp_path / "w2.proof"))


def test_the_plan_of_a_result_is_the_matrix() -> None:
    np.testing.assert_array_equal(BEST.plan, BEST.coupling.dense())
    assert BEST.plan.shape == (30, 30)
