"""Files that prove an interval by themselves."""

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

from meanfield.errors import CertificateError
from meanfield.measures import ParticleMeasure
from meanfield.transport import (
    certify,
    checker,
    solve_conditional_w2,
    solve_w2,
    solve_wp,
)
from tests.transport.laws import claim, refusal
from tests.transport.lies import LIES
from tests.transport.problems import PROBLEMS, measure, problem

RNG = np.random.default_rng(3)
X, Y = RNG.normal(size=(30, 2)), RNG.normal(size=(30, 2)) + 0.5
A, B = RNG.dirichlet(np.ones(30)), RNG.dirichlet(np.ones(30))
BEST = solve_w2((X, A), (Y, B))


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
    module = [sys.executable, "-W", "error", "-m", checker.__name__, str(path)]  # as in README
    done = subprocess.run(module, capture_output=True, text=True, check=True)
    assert repr(float(BEST.upper)) in done.stdout and not done.stderr
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
        solve_wp((X[:, :1], A), (Y[:, :1], B), 1),
        solve_w2(*collapsed),
        solve_wp(*collapsed, 1),
        solve_wp((X, A), (Y, B), 1),
        solve_w2(X, X + 1e-6 * Y),
        solve_w2(X.astype(np.float32), Y.astype(np.float32)),
        solve_w2(X, X),
        solve_w2(1e150 * X, 1e150 * Y),
        solve_w2([[1e-200]], [[1.0]]),
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


def damaged(rng: np.random.Generator, content: bytes) -> bytes:
    """A file to which something has happened."""
    at, bit = int(rng.integers(len(content))), 1 << int(rng.integers(8))
    changed = content[:at], bytes([content[at] ^ bit]), content[at + 1 :]
    ways = content[:at], b"".join(changed), changed[0] + changed[2], content + b"\n"
    return ways[rng.integers(len(ways))]


@pytest.mark.parametrize("seed", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 2))])
@pytest.mark.parametrize("kind", PROBLEMS)
def test_grades_of_others_are_proven_and_damaged_files_refused(
    tmp_path, kind: str, seed: int
) -> None:
    first, p = list(PROBLEMS).index(kind) + seed, problem(kind, seed)
    path = tmp_path / "it.proof"
    for k, lie in enumerate(list(LIES)[first % 5 :: 5]):
        order = 1 + (k + first) % 2
        plan, f, g = claim(p, lie, order)
        if refusal(plan, f, g, p):
            continue
        certify(p.mu, p.nu, plan=plan, potentials=(f, g), p=order).save(path)
        told, lower, upper = checker.check(str(path))
        truth, tiny = p.truth(order, meant=True), Fraction(1, 2**140)
        assert told == order
        assert lower**order <= truth * (1 + tiny)
        assert upper**order >= truth * (1 - tiny)
    right = path.read_bytes()
    for k in range(4):
        wrong = damaged(np.random.default_rng([first, k]), right)
        assert wrong != right
        path.write_bytes(wrong)
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
        "a column too far": {"cols": [*right["cols"][:-1], len(right["b"])]},
        "no mass": {"a": [0] * 30, "b": [0] * 30, "mass": [0] * len(right["mass"])},
        "no dimension": {
            "x": [[]] * 30, "y": [[]] * 30, "a": [0] * 30, "b": [0] * 30, "mass": [],
            "rows": [], "cols": [],
        },
        "negative weights": {"a": [-t for t in right["a"]], "b": [-t for t in right["b"]]},
        "a weight of 1 below": {"a": [*right["a"][:-1], -right["a"][-1]]},
        "fewer weights": {"a": right["a"][:-1], "f": right["f"][:-1]},
        "more weights": {"a": [*right["a"], 1], "f": [*right["f"], 0]},
        "more potentials": {"f": [*right["f"], 1 << 3 * right["s"]], "lower": right["upper"]},
        "other points": {"x": right["y"]},
        "a coordinate more": {"y": [[*right["y"][0], 1], *right["y"][1:]]},
        "one coordinate": {"x": [t[:1] for t in right["x"]]},
        "a negative weight": {"a": [*right["a"][:-1], -1], **wide},
        "a negative mass": {"mass": [*right["mass"][:-1], -1], **wide},
        "masses that are floats": {"mass": [float(t) for t in right["mass"]], **wide},
        "a float": {"s": 1.5},
        "an end that is a float": wide | {"lower": 0.0},
        "NaN": {"lower": math.nan},
        "texts": {"mass": [str(t) for t in right["mass"]]},
        "order 1": {"p": 1},
        "order 0": {"p": 0},
        "order 100": {
            "p": 100, "f": [0] * 30, "g": [0] * 30,
            "lower": 0, "upper": 1 << right["s"] - right["e"] + 9,
        },
        "a unit of 2^10000": {"e": 10_000, **wide},
        "a unit of 2^-10000": {"e": -10_000, **wide},
        "a shift of 10^9": {"s": 10**9},
        "roots of too many bits": {"s": 99_999, **wide},  # 19 minutes for 8 kB
        "points of too many bits": {"x": [[t << 14_000 for t in z] for z in right["x"]], **wide},
    }  # fmt: skip
    path.write_bytes(signed(right | wide))
    checker.check(str(path))
    files = {name: right | change for name, change in lies.items()}
    files |= {f"without {name}": {k: right[k] for k in right if k != name} for name in right}
    for name, data in files.items():
        path.write_bytes(signed(data))
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
    path = solve_wp([[0.0, 0.0]], [[1.0, 1.0]], 1).save(tmp_path / "w1.proof")
    data = json.loads(path.read_bytes().partition(b"\n")[2])
    below = math.isqrt(2 << 2 * (data["s"] - data["e"]))  # √2, and a little less
    path.write_bytes(signed(data | {"lower": 0, "upper": below + 1}))
    checker.check(str(path))
    path.write_bytes(signed(data | {"lower": 0, "upper": below}))
    with pytest.raises(ValueError, match="do not prove"):
        checker.check(str(path))


def test_roots_that_are_whole_are_not_rounded(tmp_path) -> None:
    path = solve_wp([[0.0, 0.0]], [[3.0, 4.0]], 1).save(tmp_path / "w1.proof")
    data = json.loads(path.read_bytes().partition(b"\n")[2])
    five = {"lower": 0, "upper": 5 << data["s"] - data["e"]}
    path.write_bytes(signed(data | five))
    assert checker.check(str(path))[2] == 5


def test_of_a_pair_whose_potentials_are_too_high_the_lighter_atom_pays(tmp_path) -> None:
    weights = np.array([1 / 1024, 1023 / 1024])
    for turned in (False, True):
        pair = (np.array([[0.0], [10.0]]), weights), (np.array([[10.0]]), np.ones(1))
        path = solve_wp(*pair[:: -1 if turned else 1], 1).save(tmp_path / "w1.proof")
        data = json.loads(path.read_bytes().partition(b"\n")[2])
        high, zero = [12 << data["s"] - data["e"], 0], [0]
        data |= {"f": zero, "g": high} if turned else {"f": high, "g": zero}
        path.write_bytes(signed(data))
        assert float(checker.check(str(path))[1]) == pytest.approx(10 / 1024, rel=1e-14)


def test_an_atom_of_no_mass_proves_as_much(tmp_path) -> None:
    path = BEST.save(tmp_path / "w2.proof")
    data = json.loads(path.read_bytes().partition(b"\n")[2])
    more = {"x": data["x"][0], "a": 0, "f": 0, "rows": 30, "cols": 0, "mass": 0}
    path.write_bytes(signed(data | {name: [*data[name], t] for name, t in more.items()}))
    assert checker.check(str(path))[1:] == (Fraction(BEST.lower), Fraction(BEST.upper))


def test_what_cannot_be_saved_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"\.proof"):
        BEST.save(tmp_path / "w2.json")
    batch = solve_w2(np.stack([X, X]), np.stack([Y, Y]))
    with pytest.raises(ValueError, match="one pair.*batch of shape"):
        batch.save(tmp_path / "w2.proof")
    s = torch.arange(30, dtype=torch.float64) % 2
    first, second = (ParticleMeasure(torch.as_tensor(t), positions=s) for t in (X, Y))
    for penalty in (None, 1.0):
        with pytest.raises(ValueError, match="without conditions"):
            solve_conditional_w2(first, second, penalty=penalty).save(tmp_path / "w2.proof")
    huge = solve_w2([[0.0], [1.0]], [[3e200], [1e200]])
    with pytest.raises(ValueError, match="a plan and potentials"):
        huge.save(tmp_path / "w2.proof")
    weights = np.array([0.0, -20_000.0])
    light = solve_w2(measure(X[:2], weights), Y[:2])
    with pytest.raises(ValueError, match="log-weights within 10000"):
        light.save(tmp_path / "w2.proof")
    with pytest.raises(ValueError, match="whole order below 100, got 100"):
        solve_wp(X, Y, 100).save(tmp_path / "w100.proof")
    long = solve_w2(measure(X[:2], weights / 2.01), Y[:2])
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


def test_the_centre_through_which_a_file_sends_the_rest_is_not_on_the_grid(tmp_path) -> None:
    """Points at 1 and 2, almost all mass at 2: rounded to 1, it would make the rest too dear."""
    mu = measure(np.array([[1.0], [2.0]]), np.log([1.77e-6, 1 - 1.77e-6]))
    nu = measure(np.array([[2.0], [2.0]]), np.log([0.0966, 0.9034]))
    found = certify(mu, nu, potentials=([1.0, 0.0], [0.0, 0.0]), p=1)
    assert checker.check(str(found.save(tmp_path / "it.proof")))[2] == float(found.upper)


def test_what_is_left_of_a_plan_goes_no_nearer_than_it_has_to(tmp_path) -> None:
    path = solve_wp([[0.0, 0.0]], [[1.0, 1.0]], 1).save(tmp_path / "w1.proof")
    data = json.loads(path.read_bytes().partition(b"\n")[2])
    none = {"rows": [], "cols": [], "mass": [], "lower": 0}
    below = math.isqrt(2 << 2 * (data["s"] - data["e"]))
    path.write_bytes(signed(data | none | {"upper": below + 1}))
    checker.check(str(path))
    path.write_bytes(signed(data | none | {"upper": below}))
    with pytest.raises(ValueError, match="do not prove"):
        checker.check(str(path))


@pytest.mark.parametrize("p", [20, 40])
def test_weighted_answers_of_large_orders_prove_their_interval(tmp_path, p: int) -> None:
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(5, 1)), rng.normal(size=(7, 1))
    a, b = rng.dirichlet(np.ones(5)), rng.dirichlet(np.ones(7))
    checker.check(str(solve_wp((x, a), (y, b), p).save(tmp_path / "wp.proof")))


def test_an_entry_that_moves_all_of_a_column_moves_just_that(tmp_path) -> None:
    """A last place of its mass, sent through the centre, costs 2^9 times what the interval has."""
    x = [[0.0029296875, -0.0029296875]]
    y = [[2000.0009765625, 2000.0029296875], [-0.001953125, 0.0029296875]]
    path = solve_wp(np.array(x), (np.array(y), np.array([0.25, 0.75])), 10)
    checker.check(str(path.save(tmp_path / "w10.proof")))


@pytest.mark.parametrize("parts", [2, 3, 7])
@pytest.mark.parametrize("order", [1, 2, 10])
def test_nothing_moves_where_atoms_are_stored_in_equal_parts(tmp_path, order, parts) -> None:
    """What is left of a third of a third in units of 2^−160 would have a way to go."""
    x = np.array([[0.0, 0.0], [1.0, 3.0], [5.0, 1.0]])
    for pair in ((x, np.repeat(x, parts, 0)), (np.repeat(x, parts, 0), x)):
        found = solve_wp(*pair, order)
        assert found.upper == 0
        assert checker.check(str(found.save(tmp_path / "w.proof"))) == (order, 0, 0)


@pytest.mark.parametrize(("far", "order"), [(8e-14, 30), (1e-160, 2), (1e-110, 3), (1e-33, 10)])
def test_potentials_that_leave_the_number_range_are_none_and_nothing_is_saved(
    far, order, tmp_path
):
    found = solve_wp([[0.0]], [[far]], order)
    assert found.lower <= far <= found.upper and found.potentials is None
    with pytest.raises(ValueError, match=f"powers of order {order} of lengths beyond"):
        found.save(tmp_path / "w.proof")
    assert not (tmp_path / "w.proof").exists()


def test_answers_in_single_precision_are_saved_from_double(tmp_path):
    found = solve_w2(np.zeros((1, 1), np.float32), np.full((1, 1), 1e-25, np.float32))
    assert found.potentials is None  # 1e-50 is 0 there
    _, lower, upper = checker.check(str(found.save(tmp_path / "w2.proof")))
    assert lower <= Fraction(float(np.float32(1e-25))) <= upper
