"""The test set of known distances, and files of answers graded against it."""

from __future__ import annotations

import contextlib
import math
import re
import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
from scipy.spatial.distance import cdist

from meanfield.cli import main
from meanfield.transport import certify, grade, known_problem, solve_wp
from meanfield.transport.checker import check
from meanfield.transport.known import RECIPES, KnownProblem, known_names
from tests.transport.transport_oracles import exact_transport

PROOFS = Path(__file__).parents[2] / "data" / "proofs"
SMALL = [name for name in known_names() if "-60-" in name]
MIDDLE = [name for name in known_names() if "-1000-" in name]


def solved(p: KnownProblem):
    return solve_wp((p.x, p.a), (p.y, p.b), p.order)


def test_the_set_has_every_recipe_from_sixty_atoms_to_a_million():
    kinds, sizes, dims = zip(*(name.rsplit("-", 2) for name in known_names()), strict=True)
    assert {*kinds} == {*RECIPES} == {name.rsplit("-", 2)[0] for name in SMALL}
    assert max(map(int, sizes)) == 10**6 and max(map(int, dims)) == 384 and len(kinds) > 50
    for name in SMALL + MIDDLE:
        p = known_problem(name)
        assert (p.x * 2**20 == np.round(p.x * 2**20)).all(), "the same on every machine"
        assert abs(p.a.sum() - 1) < 1e-12 and abs(p.b.sum() - 1) < 1e-12


LARGE = sorted({*known_names()} - {*SMALL, *MIDDLE})


@pytest.mark.parametrize(
    "name", [*SMALL, *MIDDLE, *(pytest.param(name, marks=pytest.mark.slow) for name in LARGE)]
)
def test_known_distances_are_found_again(name):
    p = known_problem(name)
    found, apart = solved(p), 1e-14 * p.upper  # logarithms of another machine
    assert p.lower <= p.upper <= p.lower * (1 + 1e-9) and found.relative_width < 1e-9
    assert float(found.lower) <= p.upper + apart and p.lower <= float(found.upper) + apart


@pytest.mark.parametrize("name", SMALL)
def test_small_ones_are_proven_in_exact_arithmetic(name):
    p = known_problem(name)
    order, lower, upper = check(str(PROOFS / f"{name}.proof"))
    assert order == p.order and p.lower <= upper and lower <= p.upper
    assert float(upper - lower) <= 1e-9 * p.upper


@pytest.mark.parametrize("name", SMALL)
def test_small_ones_are_those_of_an_exact_flow(name):
    p = known_problem(name)
    power = exact_transport(p.x, p.y, np.log(p.a), np.log(p.b), p.order)
    assert p.lower * (1 - 1e-14) <= float(power) ** (1 / p.order) <= p.upper * (1 + 1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("name", MIDDLE)
def test_others_are_those_of_pot(name):
    import ot

    p = known_problem(name)
    costs = cdist(p.x, p.y) ** p.order
    theirs = ot.emd2(p.a, p.b * (p.a.sum() / p.b.sum()), costs, numItermax=10**12)
    assert theirs ** (1 / p.order) == pytest.approx(p.upper, rel=1e-9)


# ------------------------------------------------------------------ files

NAME = "gaussian-60-2"
NO_F_G = "potentials, none given"


@pytest.fixture(scope="module")
def right() -> dict:
    """The best answer to one problem: a permutation, the plan, f and g."""
    found = solved(known_problem(NAME))
    f, g = found.potentials
    return {"sigma": found.plan.argmax(1), "plan": found.plan, "f": f, "g": g}


def saved(path: Path, **arrays) -> Path:
    np.savez(path, **arrays)
    return path


def own(right: dict, **others) -> dict:
    """Points of the file in the place of a name."""
    p = known_problem(NAME)
    return {"x": p.x, "y": p.y, "plan": right["sigma"]} | others


# File, what is written into it, and what is to blame.
FILES: dict[str, tuple[str, Callable[[Path, dict], object], str]] = {
    "permutation": (f"{NAME}.npy", lambda to, r: np.save(to, r["sigma"]), NO_F_G),
    "plan": (f"{NAME}.mine.npy", lambda to, r: np.save(to, r["plan"]), NO_F_G),
    "single precision": (
        f"{NAME}.npz", lambda to, r: saved(to, plan=r["plan"].astype("f4"), f=r["f"], g=r["g"]),
        "nothing"),
    "half precision": (
        f"{NAME}.npz", lambda to, r: saved(to, plan=r["sigma"], f=r["f"].astype("f2")),
        "potentials"),
    "sparse": (
        f"{NAME}.npz", lambda to, r: scipy.sparse.save_npz(to, scipy.sparse.csr_array(r["plan"])),
        NO_F_G),
    "entries": (
        "mine.npz", lambda to, r: saved(
            to, rows=range(60), cols=r["sigma"], problem=NAME, g=r["g"]), "nothing"),
    "entries with mass": (
        f"{NAME}.npz", lambda to, r: saved(
            to, rows=range(60), cols=r["sigma"][::-1], mass=[1 / 60] * 60, g=r["g"]), "plan"),
    "potentials alone": (
        f"{NAME}.npz", lambda to, r: saved(to, f=r["f"], g=r["g"]), "plan, none given"),
    "half of the potentials": (
        f"{NAME}.npz", lambda to, r: saved(to, f=r["f"] / 2, g=r["g"] / 2, plan=r["plan"]),
        "potentials"),
    "its own points": ("mine.npz", lambda to, r: saved(to, **own(r, g=r["g"])), "nothing"),
    "its own points and weights": (
        "mine.npz", lambda to, r: saved(to, **own(r, a=np.full(60, 1 / 60), p=1, g=r["g"])),
        "potentials"),
    "one place": ("mine.npz", lambda to, r: saved(
        to, x=np.ones((2, 1)), y=np.ones((2, 1)), plan=[1, 0]), "nothing"),
    "a way where there is none to go": ("mine.npz", lambda to, r: saved(
        to, x=[[0.0], [1.0]], y=[[0.0], [1.0]], plan=[1, 0], f=[0.0, 0.0]), "plan"),
}  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
def test_a_file_is_worth_what_certify_says_and_the_right_side_is_to_blame(kind, tmp_path, right):
    name, write, blame = FILES[kind]
    write(tmp_path / name, right)
    found = grade(tmp_path / name)
    assert found.blame == blame and found.file == name
    if found.problem:
        p = known_problem(NAME)
        assert found.problem == NAME and found.lower <= p.upper and p.lower <= found.upper
        assert found.plan_error == pytest.approx(found.upper / p.upper - 1, abs=1e-12)
        assert found.potentials_error == pytest.approx(1 - found.lower / p.lower, abs=1e-12)


def test_points_too_many_to_solve_are_graded_without_blame(tmp_path, monkeypatch, right):
    monkeypatch.setattr("meanfield.transport.submissions._SOLVED", 100)
    found = grade(saved(tmp_path / "mine.npz", **own(right)))
    p = known_problem(NAME)
    same = certify(p.x, p.y, plan=right["sigma"])
    assert (found.lower, found.upper, found.blame) == (same.lower, same.upper, "")
    assert math.isnan(found.plan_error) and math.isnan(found.potentials_error)


REFUSED = {
    "no name of a problem": (
        "mine-60-2.npy",
        {"plan": range(60)},
        "that of a problem of the test",
    ),
    "another suffix": (f"{NAME}.txt", {"plan": range(60)}, "a file that ends in .npy or .npz"),
    "a name of an array": (f"{NAME}.npz", {"u": range(60)}, "expected arrays named .* got u"),
    "nothing": (f"{NAME}.npz", {}, "expected any of plan.*got nothing"),
    "two plans": (f"{NAME}.npz", {"plan": range(60), "rows": [0]}, "got plan, rows"),
    "a plan and all entries": (
        f"{NAME}.npz",
        {"plan": range(60), "rows": range(60), "cols": range(60)},
        "got plan, rows, cols",
    ),
    "another size": (f"{NAME}.npz", {"plan": range(59)}, "expected 60 columns"),
    "half of the entries": (f"{NAME}.npz", {"rows": [0]}, "rows and cols .* got rows"),
    "points of one cloud": ("m.npz", {"x": [[0.0]], "plan": [0]}, "y: expected points of shape"),
    "no points": (
        "m.npz",
        {"x": np.zeros((0, 2)), "y": np.zeros((0, 2)), "plan": np.zeros((0, 0))},
        "x: expected points of shape",
    ),
    "an order of its own": (f"{NAME}.npz", {"plan": range(60), "p": 1}, "p: expected either"),
    "weights of its own": (f"{NAME}.npz", {"plan": range(60), "a": [1.0]}, "a: expected either"),
    "points and a name": (
        f"{NAME}.npz",
        {"x": [[0.0]], "y": [[0.0]], "plan": [0], "problem": NAME},
        "problem: expected either",
    ),
    "two orders": (
        "m.npz",
        {"x": [[0.0]], "y": [[0.0]], "plan": [0], "p": [1, 2]},
        r"p: expected one number, got an array of shape \(2,\)",
    ),
    "a row twice": (
        f"{NAME}.npz",
        {"rows": [*range(60), 0], "cols": [*range(60), 1]},
        "each row once where no masses",
    ),
    "truth values": (f"{NAME}.npz", {"plan": np.eye(60) > 0}, r"got bool of shape \(60, 60\)"),
    "an object": (f"{NAME}.npz", {"plan": np.array([None])}, "damaged or another one"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_answer_is_refused_by_the_name_of_its_file(kind, tmp_path):
    name, arrays, words = REFUSED[kind]
    saved(tmp_path / "any.npz", **arrays)
    shutil.move(tmp_path / "any.npz", tmp_path / name)
    if name.endswith(".npy"):
        np.save(tmp_path / name, arrays["plan"])
    with pytest.raises(ValueError, match=f"{name}: .*{words}"):
        grade(tmp_path / name)


def test_a_folder_is_no_file(tmp_path):
    (tmp_path / f"{NAME}.npy").mkdir()
    with pytest.raises(FileNotFoundError, match="it is no file"):
        grade(tmp_path / f"{NAME}.npy")


def test_no_damaged_file_gets_a_wrong_grade(tmp_path, right):
    p, rng, graded = known_problem(NAME), np.random.default_rng(0), 0
    for k in range(120):
        name, write, _ = list(FILES.values())[k % 9]
        write(tmp_path / name, right)
        raw = bytearray((tmp_path / name).read_bytes())
        for at in rng.integers(len(raw) if k % 2 else 200, size=3):
            raw[at] = rng.integers(256)
        broken = tmp_path / f"{NAME}.broken{Path(name).suffix}"
        broken.write_bytes(raw[: rng.integers(len(raw))] if k % 3 == 0 else raw)
        with contextlib.suppress(ValueError):  # nothing else
            found = grade(broken)
            assert found.lower <= p.upper and p.lower <= found.upper
            graded += 1
    assert graded > 5


def test_the_command_prints_a_table_and_says_how_it_went(tmp_path, right, capsys):
    np.save(tmp_path / f"{NAME}.npy", right["sigma"])
    saved(tmp_path / f"{NAME}.all.npz", plan=right["sigma"], f=right["f"])
    assert main(["grade", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[1].endswith("nothing") and "none given" in lines[2]
    # The ends that are printed are ends.
    for name, line in zip((f"{NAME}.all.npz", f"{NAME}.npy"), lines[1:], strict=True):
        found, (low, high) = grade(tmp_path / name), map(Fraction, line.split()[1:3])
        assert low <= found.lower <= found.upper <= high
    assert main(["grade", str(tmp_path / f"{NAME}.npy")]) == 0
    (tmp_path / f"{NAME}.bad.npz").write_bytes(b"PK")
    assert main(["grade", str(tmp_path)]) == 3
    said = capsys.readouterr()
    assert f"{NAME}.bad.npz" in said.err and said.out.count("none given") == 2
    assert main(["grade", str(tmp_path / f"{NAME}.bad.npz")]) == 1
    assert main(["grade", str(tmp_path / "absent.npy")]) == 1
    (tmp_path / "empty").mkdir()
    assert main(["grade", str(tmp_path / "empty")]) == 1


def test_the_table_lines_up_where_names_are_long(tmp_path, right, capsys):
    for of in ("mine", "by-a-solver-of-a-long-name"):
        np.save(tmp_path / f"{NAME}.{of}.npy", right["sigma"])
    assert main(["grade", str(tmp_path)]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    end = head.index("upper") + len("upper")
    assert len(rows) == 2
    assert all(re.search(r"\d$", row[:end]) and row[end] == " " for row in rows)


@pytest.mark.parametrize(
    ("order", "blame"), [(2, "potentials, none given"), (40, "plan"), (60, ""), (100, "")]
)
def test_nobody_is_blamed_where_the_distance_itself_is_hardly_known(order, blame, tmp_path):
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(5, 2)), rng.normal(size=(4, 2))
    plan = solve_wp(x, y, 2).plan
    found = grade(saved(tmp_path / "own.npz", x=x, y=y, p=order, plan=plan))
    known = solve_wp(x, y, order, strict=False)
    assert found.blame == blame
    assert math.isnan(found.plan_error) == (order >= 60)
    if blame == "plan":  # known to a hundredth of itself
        least, most = found.upper / known.upper - 1, found.upper / known.lower - 1
        assert least == pytest.approx(found.plan_error) and most < 1.02 * least
        assert math.isnan(found.potentials_error)
        poor = grade(saved(tmp_path / "own.npz", x=x, y=y, p=order, f=-1e30 * np.arange(5)))
        assert (poor.lower, poor.potentials_error) == (0, 1)


@pytest.mark.parametrize("kinds", [("f4", "f4"), ("f2", "f2"), ("f4", "f8"), ("f8", "i4")])
def test_points_of_any_precision_are_graded_in_double_precision(kinds, tmp_path):
    x, y = (np.random.default_rng(0).integers(-9, 9, size=(2, 7, 2)) + 0.0).astype("f8")
    x, y = (t.astype(kind) for t, kind in zip((x, y), kinds, strict=True))
    both = x.astype("f8"), y.astype("f8")
    best = solve_wp(*both, 2)
    np.savez(tmp_path / "own.npz", x=x, y=y, plan=best.plan, f=best.potentials[0])
    found = grade(tmp_path / "own.npz")
    same = certify(*both, plan=best.plan, potentials=(best.potentials[0], None))
    assert (found.lower, found.upper) == (float(same.lower), float(same.upper))
    assert found.blame == "nothing" and max(found.plan_error, found.potentials_error) < 1e-12
    np.savez(tmp_path / "own.npz", x=x, y=y, plan=np.roll(best.plan, 1, 1))
    assert grade(tmp_path / "own.npz").plan_error > 1e-3


def test_the_content_of_a_file_counts_and_not_how_its_name_ends(tmp_path):
    np.save(tmp_path / "any.npy", np.arange(60))
    shutil.move(tmp_path / "any.npy", tmp_path / f"{SMALL[0]}.npz")
    assert grade(tmp_path / f"{SMALL[0]}.npz").blame == "plan"


def test_a_sparse_plan_beside_other_arrays_is_refused(tmp_path):
    scipy.sparse.save_npz(tmp_path / "plan.npz", scipy.sparse.csr_array(np.eye(60) / 60))
    with np.load(tmp_path / "plan.npz") as held:
        path = saved(tmp_path / f"{SMALL[0]}.npz", **held, f=np.zeros(60))
    with pytest.raises(ValueError, match="expected arrays named plan"):
        grade(path)
