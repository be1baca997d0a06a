"""A store records what it holds: another function, setting or model is refused or reported."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import xarray as xr
from zarr import open_group

from meanfield import results
from meanfield.results import Variable
from meanfield.sweeps import Task, sweep

GRID = {"x": [1.0, 2.0, 3.0]}


class Done(NamedTuple):
    """How a script has ended and what it has printed."""

    code: int
    out: str
    err: str


@pytest.fixture
def script(start, tmp_path):
    """Write and run a script that sweeps a function `f` into main.sweep."""

    def script(name, body, **sweep_arguments):
        path = tmp_path / name
        arguments = ", ".join(f"{name}={value!r}" for name, value in sweep_arguments.items())
        path.write_text(
            f"from meanfield import sweep\n\n{textwrap.dedent(body)}\n"
            f"if __name__ == '__main__':\n"
            f"    ds = sweep(f, {{'x': [1.0, 2.0, 3.0]}}, store='main.sweep', {arguments})\n"
            f"    print(ds['y'].values.tolist())\n"
        )
        code = start("script", path).wait()
        return Done(code, *(Path(f"{path}.{kind}").read_text() for kind in ("out", "err")))

    return script


def test_functions_of_two_scripts_are_not_the_same_function(script):
    first = script("a.py", "def f(x):\n    return {'y': x}\n")
    assert first.out == "[1.0, 2.0, 3.0]\n"
    second = script("b.py", "def f(x):\n    return {'y': 1000 * x}\n")
    assert second.code == 1
    assert 'function: stored "a:f", now "b:f"' in second.err


def test_a_changed_body_is_named_and_kept_cases_stay(script):
    script("a.py", "def f(x):\n    return {'y': x}\n")
    commented = "def f(x):\n    # in words\n    return {'y': x}\n"
    assert "source" not in script("a.py", commented).err
    changed = "def f(x, scale=7.0):\n    return {'y': scale * x}\n"
    again = script("a.py", changed)
    assert "the source of a:f is not what the store was begun with" in again.err
    assert again.out == "[1.0, 2.0, 3.0]\n"
    accepted = script("a.py", changed, accept_changed_code=True)
    assert accepted.code == 0 and "source" not in accepted.err


def test_a_script_that_python_runs_itself_has_the_same_identity(script, tmp_path):
    script("a.py", "def f(x):\n    return {'y': x}\n")
    command = [sys.executable, "a.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "[1.0, 2.0, 3.0]\n"
    assert done.stderr == ""


def test_a_plain_function_is_not_evaluated_for_a_store_that_is_complete(tmp_path):
    n_calls = 0

    def count(x):
        nonlocal n_calls
        n_calls += 1
        return {"y": x}

    for _ in range(3):
        sweep(Task(count, name="count"), GRID, store=tmp_path / "s")
    assert n_calls == 3


def test_what_a_store_does_not_take_is_said_before_the_first_case(tmp_path):
    def never(x, f):
        raise AssertionError

    with pytest.raises(TypeError, match="f: expected numbers"):
        sweep(Task(never, name="never"), GRID, fixed={"f": abs}, store=tmp_path / "s")
    with pytest.raises(TypeError, match="expected a named function"):
        sweep(lambda x: {"y": 1 / 0}, GRID, store=tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_a_store_of_version_0_1_is_refused_by_name_and_stays(tmp_path):
    """Made as that version made it: a group with a mask of the batches that are done."""
    path = tmp_path / "old.zarr"
    ds = xr.Dataset({"y": ("case", [1.0, 9.0])}).assign(done=("batch", [True, False]))
    ds.to_zarr(path, zarr_format=3, consolidated=False)
    open_group(path, mode="r+").attrs.update({"sweep_schema": 1, "provenance": "meanfield"})
    with pytest.raises(ValueError, match=r"version 0\.1, which is no longer read; xarray\.open_z"):
        results.read_dataset(path)
    with pytest.raises(ValueError, match="which is something else"):
        sweep(Task(lambda x: {"y": x}, [Variable("y", "y")], name="old"), GRID, store=path)
    with pytest.raises(FileExistsError, match="not written by this library"):
        results.write_dataset(ds, path)
    assert xr.open_zarr(path, consolidated=False)["done"].values.tolist() == [True, False]


def test_links_and_detours_lead_to_the_same_store(tmp_path):
    task = Task(lambda x: {"y": x}, [Variable("y", "y")], name="f")
    (tmp_path / "link").symlink_to(tmp_path / "real" / "s")
    ds = sweep(task, GRID, store=tmp_path / "link")
    assert results.read_dataset(tmp_path / "real" / "s").identical(ds)
    (tmp_path / "a").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sweep(task, GRID, store=tmp_path / "a" / ".." / "link").identical(ds)
    results.write_dataset(ds, tmp_path / "one.nc")
    (tmp_path / "alias.nc").symlink_to(tmp_path / "one.nc")
    results.write_dataset(ds.isel(case=[0]), tmp_path / "alias.nc")
    assert (tmp_path / "alias.nc").is_symlink()
    assert results.read_dataset(tmp_path / "one.nc").sizes["case"] == 1
