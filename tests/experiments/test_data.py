"""The reference run in data/: unchanged, reproducible, and readable without a new run."""

from __future__ import annotations

import hashlib
import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from meanfield import results
from meanfield.experiments import two_dirac
from meanfield.results.shapes import parameters_of

ROOT = Path(__file__).parents[2]
DATA = ROOT / "data"


def test_the_files_are_those_of_the_checksums():
    lines = (DATA / "SHA256SUMS").read_text().splitlines()
    held = {file.name for file in DATA.iterdir()} - {"README.md", "SHA256SUMS"}
    assert {line.split()[1] for line in lines} == held
    for line in lines:
        digest, name = line.split()
        assert hashlib.sha256((DATA / name).read_bytes()).hexdigest() == digest, name
    assert (DATA / "two_dirac.nc").stat().st_size < 500_000


def test_cases_of_the_full_run_are_recomputed():
    stored = results.read_dataset(DATA / "two_dirac.nc")
    assert (stored.status == 1).all() and stored.sizes["case"] == 1974
    some = two_dirac.Settings(
        radii=(0.5, 1.25, 3.0),
        n_tokens=(2, 36),
        dims=(1, 8),
        offsets=(-12.0, -2.0, 0.0, 4.0),
        log_ratios=(-900.0,),
        split_radii=(1.0, 8.0),
        steps=(0.1,),
        secant_tokens=(),
    )
    again = two_dirac.EXPERIMENT.run(some, progress=False)
    names = parameters_of(again)
    places = {case: k for k, case in enumerate(zip(*cases(stored, names), strict=True))}
    same = stored.isel(case=[places[case] for case in zip(*cases(again, names), strict=True)])
    for name in stored.data_vars:
        # Residuals are rounding, and upper ends of the random starts of a case.
        rtol = 1e-2 if str(name).endswith("_upper") else 1e-9
        if stored[name].dtype.kind == "f" and not str(name).endswith("_residual"):
            np.testing.assert_allclose(
                again[name].values, same[name].values, rtol=rtol, atol=1e-13, err_msg=str(name)
            )


def cases(ds, names):
    return [ds[name].values.tolist() for name in names]


def test_the_provenance_says_how_it_was_made():
    record = results.read_provenance(results.read_dataset(DATA / "two_dirac.nc"))
    assert record["seed"] == 0
    assert record["commit"]
    assert {"meanfield", "torch", "POT", "xarray"} <= set(record["versions"])


@pytest.mark.parametrize("name", ["01_two_dirac.py"])
def test_the_example_analyses_the_reference_run_without_running_it(name, tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise AssertionError("the example ran the sweep")

    monkeypatch.setattr("meanfield.experiments.experiment.sweep", refuse)
    arguments = ["--open", str(DATA / "two_dirac.nc"), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    assert (tmp_path / "growth_in_radius.png").stat().st_size > 2000


def certified_cases(largest: int, smallest: int = 1) -> list[dict]:
    stored = json.loads((DATA / "certified_w2.json").read_text())
    return [case for case in stored["cases"] if smallest <= case["n"] <= largest]


def check_certified(case: dict) -> None:
    from meanfield.transport import solve_w2

    clouds = runpy.run_path(str(ROOT / "examples" / "13_estimates.py"))["clouds"]
    found = solve_w2(*clouds(case["n"], case["d"], case["weights"], case["seed"]))
    assert case["lower"] <= case["w2"] <= case["upper"]
    assert case["upper"] - case["lower"] < 1e-9 * case["w2"]
    assert float(found.lower) <= case["upper"]
    assert case["lower"] <= float(found.upper)


@pytest.mark.parametrize("case", certified_cases(1000), ids=str)
def test_certified_values_are_recomputed(case):
    check_certified(case)


@pytest.mark.parametrize("case", certified_cases(300), ids=str)
def test_certified_values_are_those_of_pot(case):
    import ot
    from scipy.spatial.distance import cdist

    clouds = runpy.run_path(str(ROOT / "examples" / "13_estimates.py"))["clouds"]
    (x, a), (y, b) = clouds(case["n"], case["d"], case["weights"], case["seed"])
    theirs = ot.emd2(a, b, cdist(x, y, "sqeuclidean"), numItermax=10**12) ** 0.5
    assert theirs == pytest.approx(case["w2"], rel=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("case", certified_cases(50_000, 3000), ids=str)
def test_large_certified_values_are_recomputed(case):
    check_certified(case)


def test_the_first_example_is_short():
    _, _, code = (ROOT / "examples" / "01_two_dirac.py").read_text().split('"""', 2)
    assert len(code.splitlines()) < 60
