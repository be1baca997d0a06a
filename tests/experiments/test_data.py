"""The reference run in data/: unchanged, reproducible, and readable without a new run."""

from __future__ import annotations

import hashlib
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
    files = (str(file.relative_to(DATA)) for file in DATA.rglob("*") if file.is_file())
    held = {*files} - {"README.md", "SHA256SUMS"}
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
    expected = again.drop_vars(["step", *(name for name in again if "secant" in str(name))])
    told = [
        {name: ds[name].attrs["long_name"] for name in ds.variables} for ds in (same, expected)
    ]
    assert told[0] == told[1]
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


def test_the_first_example_is_short():
    _, _, code = (ROOT / "examples" / "01_two_dirac.py").read_text().split('"""', 2)
    assert len(code.splitlines()) < 60
