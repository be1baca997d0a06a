"""Labels, files, cubes, fits: written data is read back, and fits recover known laws."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from meanfield import results, sweep
from meanfield.results import Variable
from meanfield.results import provenance as provenance_module
from meanfield.results.labels import dataset
from meanfield.results.provenance import provenance
from meanfield.sweeps import Task

SLOW = pytest.mark.slow
GAIN = Variable("gain", "Lipschitz constant", symbol="L")


def rich_dataset(n: int = 5) -> xr.Dataset:
    """Every type that a result may hold, with NaN, infinities, units that read as a date, text
    beyond ASCII."""
    rng = np.random.default_rng(0)
    value = rng.standard_normal(n)
    value[0], value[1] = np.nan, -np.inf
    return xr.Dataset(
        {
            "gain": ("case", value, GAIN.attrs),
            "single": (("case", "head"), rng.standard_normal((n, 3)).astype(np.float32)),
            "n_steps": ("case", np.arange(n, dtype=np.int64)),
            "huge": ("case", np.arange(n, dtype=np.int64) + 2**40),
            "exact": ("case", np.arange(n, dtype=np.int64) + 2**53 + 1),
            "least": ((), np.int64(-(2**63))),
            "status": ("case", np.arange(n).astype(np.int8)),
            "gain_converged": ("case", np.arange(n) % 2 == 0),
            "message": (
                "case",
                np.array(["", "Γ_μ failed: a, b", "x\ny", "", "ö"] * n, object)[:n],
            ),
            "total": ((), 3.5, {"units": "days since 2000-01-01"}),
        },
        coords={"radius": ("case", np.linspace(0, 1, n)), "head": np.arange(3)},
        attrs={"provenance": provenance({"a": None, "b": True}), "level": 0.5},
    )


@pytest.mark.parametrize("suffix", ["nc", "zarr"])
def test_what_is_written_is_read_back_bit_for_bit(tmp_path, suffix):
    ds = rich_dataset()
    back = results.read_dataset(results.write_dataset(ds, tmp_path / f"result.{suffix}"))
    xr.testing.assert_identical(back, ds)
    assert {n: v.dtype for n, v in back.variables.items()} == {
        n: v.dtype for n, v in ds.variables.items()
    }
    assert [p.name for p in tmp_path.iterdir()] == [f"result.{suffix}"]


def test_a_zarr_folder_reads_in_one_order_whatever_the_file_system_lists(tmp_path):
    names = [f"p{k}" for k in range(9)]
    coords = {name: ("case", [0.0]) for name in names}
    ds = xr.Dataset({name.upper(): ("case", [1.0]) for name in names}, coords)
    again = results.read_dataset(results.write_dataset(ds, tmp_path / "result.zarr"))
    assert [*again.coords, *again.data_vars] == [*names, *map(str.upper, names)]


def test_netcdf_is_read_by_xarray_and_by_scipy_alone(tmp_path):
    from scipy.io import netcdf_file

    path = results.write_dataset(rich_dataset(), tmp_path / "result.nc")
    with xr.open_dataset(path, engine="scipy") as raw:
        assert raw["gain_converged"].dtype == bool
    with netcdf_file(path, mmap=False) as raw:
        assert raw.variables["gain"].long_name == b"Lipschitz constant"
        assert np.array_equal(raw.variables["n_steps"][:], np.arange(5))


def test_what_xarray_has_read_is_written_again(tmp_path):
    ds = xr.Dataset({"y": ("case", [1.0, 2.0])}, attrs={"note": "mine"})
    with xr.open_dataset(results.write_dataset(ds, tmp_path / "a.nc"), engine="scipy") as raw:
        path = results.write_dataset(raw.assign(y=raw.y + 1), tmp_path / "b.zarr")
    assert results.read_dataset(path).identical(ds.assign(y=ds.y + 1))


@pytest.mark.parametrize("name", ["precious.zarr", "notes.nc"])
def test_what_this_library_has_not_written_is_not_replaced(tmp_path, name):
    ds, path = rich_dataset(), tmp_path / name
    if name.endswith("nc"):
        path.write_text("all my work")
    else:
        results.write_dataset(ds, path)
        (path / "thesis.tex").write_text("all my work")
    with pytest.raises(FileExistsError, match="was not written by this library"):
        results.write_dataset(ds, path)
    found = path if path.is_file() else path / "thesis.tex"
    assert found.read_text() == "all my work"


def test_other_files_are_refused_with_what_was_expected(tmp_path):
    with pytest.raises(ValueError, match=r"\.zarr or \.nc, got 'result.h5'"):
        results.write_dataset(rich_dataset(), tmp_path / "result.h5")
    with pytest.raises(FileNotFoundError, match="nothing at"):
        results.read_dataset(tmp_path / "absent.nc")
    with pytest.raises(ValueError, match=r"without zarr.json$"):
        results.read_dataset(tmp_path)
    results.write_dataset(rich_dataset(), tmp_path / "run.nc")
    with pytest.raises(ValueError, match=r"it holds run\.nc: give one of these"):
        results.read_dataset(tmp_path)


def product_grid(sizes: dict[str, int]) -> xr.Dataset:
    """Long form of a product grid, with values that tell where they come from."""
    mesh = np.meshgrid(*(np.arange(k, 0, -1) / 2 for k in sizes.values()), indexing="ij")
    coords = {name: ("case", m.ravel()) for name, m in zip(sizes, mesh, strict=True)}
    value = sum(10.0**i * m.ravel() for i, m in enumerate(mesh))
    extra = np.arange(value.size * 2.0).reshape(-1, 2)
    return xr.Dataset({"y": ("case", value), "z": (("case", "head"), extra)}, coords=coords)


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    seed=st.integers(0, 100),
)
def test_cube_holds_at_each_point_the_case_with_these_parameters(sizes, seed):
    long = product_grid({f"p{i}": size for i, size in enumerate(sizes)})
    shuffled = long.isel(case=np.random.default_rng(seed).permutation(long.sizes["case"]))
    cube = results.to_cube(shuffled)
    for case in range(long.sizes["case"]):
        row = long.isel(case=case)
        here = cube.sel({f"p{i}": float(row[f"p{i}"]) for i in range(len(sizes))})
        assert float(here["y"]) == float(row["y"])
        assert np.array_equal(here["z"], row["z"])


def test_cases_without_a_value_are_one_level_of_a_cube():
    a, b = [1.0, 2.0, 1.0, 2.0], [np.nan, np.nan, 3.0, 3.0]
    long = xr.Dataset({"y": ("case", [1.0, 2.0, 3.0, 4.0])}, {"a": ("case", a), "b": ("case", b)})
    cube = results.to_cube(long)
    assert cube["y"].values.tolist() == [[1.0, 3.0], [2.0, 4.0]]
    np.testing.assert_array_equal(cube["b"], [np.nan, 3.0])


def test_a_cube_is_of_parameters_that_are_there_once():
    ds = sweep(lambda radius: {"y": radius}, {"radius": [1.0, 2.0]})
    assert results.to_cube(ds, parameters="radius").identical(results.to_cube(ds))
    for wrong in (["radius", "radius"], ["y"], []):
        with pytest.raises(ValueError, match=r"different coordinates .* of \['radius'\], got"):
            results.to_cube(ds, parameters=wrong)


def test_numbers_at_repeated_coordinates_are_all_kept():
    ds = xr.Dataset({"y": ("time", [1.0, 2.0])}, {"time": [0.0, 0.0]})
    assert results.numbers(ds) == {"y/time0": 1.0, "y/time1": 2.0}


def test_what_stands_in_for_the_answer_of_a_failed_case_is_no_number():
    def counted(x):
        return {"inverse": 1 / x, "n": 5, "was_converged": False}

    kinds = {"inverse": "float64", "n": "int64", "was_converged": "bool"}
    task = Task(counted, [Variable(name, name, dtype=kind) for name, kind in kinds.items()])
    ds = sweep(task, {"x": [0, 2]})
    found = results.numbers(ds)
    assert found.pop("status/case0") == 3 and found.pop("status/case1") == 2
    assert found == {"inverse/case1": 0.5, "n/case1": 5.0, "was_converged/case1": 0.0}
    cube = results.to_cube(ds).assign(weight=2.0)
    numbers = {"inverse/x2": 0.5, "n/x2": 5.0, "was_converged/x2": 0.0, "weight": 2.0}
    assert results.numbers(cube) == numbers | {"status/x0": 3.0, "status/x2": 2.0}
    assert results.numbers(ds.isel(case=0)) == {"status": 3.0}
    assert results.numbers(ds.isel(case=1))["n"] == 5.0


def test_no_cases_are_an_empty_cube():
    cube = results.to_cube(product_grid({"a": 2, "b": 3}).isel(case=[]))
    assert cube.sizes == {"a": 0, "b": 0, "head": 2}


def test_cube_of_an_incomplete_grid_is_refused():
    long = product_grid({"a": 2, "b": 3})
    with pytest.raises(ValueError, match=r"6 cases, got 5 cases of which 5 are different"):
        results.to_cube(long.isel(case=slice(5)))
    with pytest.raises(ValueError, match=r"3 cases, got 6 cases of which 3 are different"):
        results.to_cube(long, parameters=["b"])
    with pytest.raises(ValueError, match="got \\['c'\\]"):
        results.to_cube(long, parameters=["c"])


@given(
    exponent=st.floats(-3, 3),
    constant=st.floats(1e-6, 1e6),
    known=st.booleans(),
)
def test_an_exact_power_law_is_found_with_no_width(exponent, constant, known):
    x = np.geomspace(0.1, 50, 12)
    y = constant * x**exponent
    fit = results.fit_power(x, y, exponent=exponent if known else None)
    # Least squares on logarithms: errors of rounding, amplified by the size of log y.
    for name in ("exponent", "exponent_lower", "exponent_upper"):
        assert float(fit[name]) == pytest.approx(exponent, abs=1e-10)
    for name in ("constant", "constant_lower", "constant_upper"):
        assert float(fit[name]) == pytest.approx(constant, rel=1e-9)


def test_arrays_of_xarray_are_paired_by_their_dimensions():
    x = xr.DataArray([[1.0, 2.0, 4.0], [1.0, 3.0, 9.0], [2.0, 3.0, 5.0]], dims=("draw", "n"))
    groups = x.draw.broadcast_like(x)
    right = results.fit_power(x, x**0.5 + 0.1 * groups, groups=groups, converged=x < 9)
    y, converged = (x**0.5 + 0.1 * groups).T, (x < 9).T
    turned = results.fit_power(x, y, groups=groups.T, converged=converged)
    xr.testing.assert_identical(turned, right)
    with pytest.raises(ValueError, match=r"same dimensions, got \('draw', 'n'\) and \('n',\)"):
        results.fit_power(x, x[0])


def coverage(count: int, grouped: bool, noise: str, trials: int) -> tuple[float, float]:
    """How often the intervals of p and of C hold the truth."""
    rng = np.random.default_rng(count)
    draw = {"normal": rng.standard_normal, "t": lambda k: rng.standard_t(3, k)}[noise]
    hits = np.zeros(2)
    for _ in range(trials):
        x = np.geomspace(2, 512, 8 if grouped else count)
        if grouped:
            x, groups = np.tile(x, count), np.repeat(np.arange(count), 8)
            shared = draw(count)[groups] + 0.3 * draw(count)[groups] * np.log(x)
            noise_of = shared + 0.3 * draw(len(x))
        else:
            groups, noise_of = None, draw(count)
        fit = results.fit_power(x, 3 * np.sqrt(x) * np.exp(0.3 * noise_of), groups=groups)
        hits += [
            bool(fit.exponent_lower <= 0.5 <= fit.exponent_upper),
            bool(fit.constant_lower <= 3 <= fit.constant_upper),
        ]
    return tuple(hits / trials)


@pytest.mark.parametrize("noise", ["normal", "t"])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    ("count", "trials"),
    [
        (5, 150),
        (10, 150),
        *(pytest.param(k, 2000, marks=SLOW) for k in (3, 4, 5, 6, 8, 12, 20, 40)),
    ],
)
def test_intervals_cover_the_truth_about_as_often_as_they_say(count, trials, grouped, noise):
    found = coverage(count, grouped, noise, trials)
    # Standard deviation at 150 trials and 95 %: 1.8 %.
    assert min(found) > (0.92 if trials == 2000 else 0.9)
    # Wide where there is little, not where there is much.
    assert trials == 150 or max(found) < (0.999 if count < 8 else 0.98)


@pytest.mark.parametrize(("known", "freedom"), [(None, 2), (0.4, 3)])
def test_the_interval_is_that_of_leaving_out_one_group_at_a_time(known, freedom):
    from scipy.stats import t

    rng = np.random.default_rng(2)
    x, groups = np.tile([1.0, 3.0, 10.0], 4), np.repeat(np.arange(4), 3)
    y = 2 * x**0.5 * np.exp(rng.normal(size=12))

    def fitted(keep: np.ndarray) -> np.ndarray:
        log_x, log_y = np.log(x[keep]), np.log(y[keep])
        p = np.polyfit(log_x, log_y, 1)[0] if known is None else known
        return np.array([np.mean(log_y) - p * np.mean(log_x), p])

    whole = fitted(np.ones(12, bool))
    moved = [fitted(groups != k) - whole for k in range(4)]
    half = t.ppf(0.95, freedom) * np.sqrt(3 / 4 * np.square(moved).sum(axis=0))
    names = np.array([None, "a", 2.5, "b"], object)[groups]
    fit = results.fit_power(x, y, exponent=known, groups=names, level=0.9)
    for end, at in (("", whole), ("_lower", whole - half), ("_upper", whole + half)):
        assert float(fit[f"constant{end}"]) == pytest.approx(np.exp(at[0]))
        assert float(fit[f"exponent{end}"]) == pytest.approx(at[1])


def test_two_points_have_no_interval_and_three_a_wide_one():
    two = results.fit_power([1.0, 4.0], [1.0, 3.0])
    assert np.isnan([two.exponent_lower, two.constant_upper]).all()
    known = results.fit_power([1.0, 4.0], [1.0, 3.0], exponent=0.5)
    assert np.isfinite([known.constant_lower, known.constant_upper]).all()
    assert float(known.exponent_lower) == float(known.exponent_upper) == 0.5
    # Without the second group a single x is left.
    alone = results.fit_power([2.0, 2.0, 4.0], [1.0, 1.1, 2.0], groups=[0, 1, 2])
    assert np.isnan(alone.exponent_lower)


def test_points_that_have_not_converged_are_left_out_and_counted():
    x, y = np.array([1.0, 2.0, 4.0, 8.0]), np.array([1.0, 4.0, 16.0, 1e6])
    fit = results.fit_power(x, y, converged=[True, True, True, False])
    assert float(fit.exponent) == pytest.approx(2.0)
    assert (int(fit.n_points), int(fit.n_excluded), int(fit.n_groups)) == (3, 1, 3)
    with pytest.raises(ValueError, match="at least 2 converged points, got 1"):
        results.fit_power(x, y, converged=[True, False, False, False])
    with pytest.raises(ValueError, match="level: expected a number between 0 and 1"):
        results.fit_power(x, y, level=95)


def test_failed_cases_are_left_out_of_a_fit_and_bad_numbers_refused():
    fit = results.fit_power([1.0, 2.0, 4.0, 8.0], [1.0, np.nan, 16.0, 64.0])
    assert int(fit.n_points) == 3
    assert float(fit.exponent) == pytest.approx(2)
    with pytest.raises(ValueError, match="y: expected positive finite numbers, got 1"):
        results.fit_power([1.0, 2.0], [0.0, 1.0])
    with pytest.raises(ValueError, match="at least two different values to fit p, got 2$"):
        results.fit_power([2.0, 2.0], [1.0, 3.0])
    for flags in (["True", "False"], [1.0, np.nan], [0, 2]):
        with pytest.raises(ValueError, match="converged: expected truth values, got"):
            results.fit_power([1.0, 2.0], [1.0, 2.0], converged=flags)
    with pytest.raises(ValueError, match=r"equal shapes, got \(2,\), \(3,\)"):
        results.fit_power([2.0, 2.0], [1.0, 3.0, 4.0])


def test_provenance_is_one_json_string_with_what_is_needed_to_run_again():
    record = json.loads(provenance({"radius": 1.0}, seed=3, dtype="torch.float64"))
    assert record["spec"] == {"radius": 1.0}
    assert (record["seed"], record["dtype"], record["device"]) == (3, "float64", None)
    assert record["versions"]["numpy"] == np.__version__
    assert os.sep + "home" not in record["command"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["/tmp/us er.py", "a b"], ["python", "us er.py", "a b"]),
        (["/bin/meanfield", "--out", "~/h$x", ""], ["meanfield", "--out", "~/h$x", ""]),
        (["meanfield", "--out=~/hbx"], ["meanfield", "--out=~/hbx"]),
        (["/lib/mean/__main__.py", "list"], ["python", "-m", "mean", "list"]),
    ],
)
def test_a_shell_reads_the_command_as_it_was_given(monkeypatch, argv, words):
    home = str(Path.home())
    monkeypatch.setattr(sys, "argv", [one.replace("~", home) for one in argv])
    command = json.loads(provenance())["command"]
    assert home not in command
    printed = subprocess.run(
        ["sh", "-c", f"printf '%s\\n' {command}"], capture_output=True, text=True, check=True
    )
    assert printed.stdout == "".join(one.replace("~", home) + "\n" for one in words)


def test_the_commit_of_the_source_tree_says_whether_files_were_changed(tmp_path, monkeypatch):
    def git(*arguments):
        known = ["-c", "user.name=a", "-c", "user.email=b", "-c", "commit.gpgsign=false"]
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *known, *arguments], capture_output=True, check=True
        )
        return done.stdout.decode().strip()

    (tmp_path / "file").write_text("one")
    git("init")
    git("add", "file")
    git("commit", "-m", "first")
    git("tag", "-m", "a release", "1.0")
    monkeypatch.setattr(provenance_module, "__file__", str(tmp_path / "package/results/file.py"))
    commit = provenance_module._commit.__wrapped__
    head = git("rev-parse", "HEAD")
    (tmp_path / "untracked").write_text("")
    assert commit() == head
    (tmp_path / "file").write_text("two")
    assert commit() == f"{head}-dirty"


def test_undeclared_or_missing_values_are_refused():
    gain = Variable("gain", "Lipschitz constant", dims=("case",))
    with pytest.raises(ValueError, match=r"missing \['gain'\], not declared \['gian'\]"):
        dataset([gain], {"gian": [1.0]})
    with pytest.raises(ValueError, match="name: expected an identifier such as 'gain', got 3"):
        Variable(3, "three")
    with pytest.raises(ValueError, match=r"dtype of y: expected one of \('float64'.* got 'half'"):
        Variable("y", "y", dtype="half")
    with pytest.raises(ValueError, match=r"dims of y: expected different names, got \('p', 'p'\)"):
        Variable("y", "y", dims=("p", "p"))


def test_results_load_neither_torch_nor_matplotlib():
    code = (
        "import sys, meanfield.results; "
        "print(sorted({'torch', 'matplotlib', 'ot', 'zarr'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_points_of_a_fit_go_by_place_and_so_have_the_same_labels():
    x = xr.DataArray([1.0, 2, 4, 8, 16], dims="case", coords={"case": range(5)})
    y = 3 * x**0.5
    assert float(results.fit_power(x, y).exponent) == pytest.approx(0.5)
    good = xr.DataArray([True] * 5, dims="case", coords={"case": range(5)})
    for other in (
        {"y": y[::-1]},
        {"y": y, "converged": good[::-1]},
        {"y": y, "groups": x[::-1]},
    ):
        with pytest.raises(ValueError, match="same coordinates in the same order"):
            results.fit_power(x, **other)


@pytest.mark.parametrize("suffix", [".zarr", ".nc"])
@pytest.mark.parametrize(
    "texts", [np.array([], object), np.array([], "U1"), np.zeros((0, 2), "U")]
)
def test_texts_without_entries_come_back(tmp_path, suffix, texts):
    dims = ("case", "k")[: texts.ndim]
    ds = xr.Dataset({"word": (dims, texts, {"units": "1"})}, {"name": (dims, texts)})
    found = results.read_dataset(results.write_dataset(ds, tmp_path / f"a{suffix}"))
    for one in (found.word, found["name"]):
        assert one.shape == texts.shape and one.dtype == object
    assert found.word.attrs == {"units": "1"} and "name" in found.coords


def test_an_axis_without_places_behind_another_is_refused_where_it_cannot_be_read(tmp_path):
    ds = xr.Dataset({"y": (("case", "step"), np.zeros((2, 0))), "z": ("case", [1.0, 2.0])})
    with pytest.raises(ValueError, match=r"y: expected a dimension of length 0 in front .*\.zarr"):
        results.write_dataset(ds, tmp_path / "a.nc")
    assert not any(tmp_path.iterdir())
    for made, name in ((ds, "a.zarr"), (ds.transpose("step", "case"), "a.nc")):
        path = results.write_dataset(made, tmp_path / name)
        xr.testing.assert_identical(results.read_dataset(path), made)


@pytest.mark.parametrize("suffix", [".zarr", ".nc"])
def test_an_axis_may_have_a_name_with_a_space(tmp_path, suffix):
    ds = xr.Dataset({"y": ("learning rate", [1.0, 2.0])}, {"learning rate": [0.1, 0.2]})
    path = results.write_dataset(ds, tmp_path / f"a{suffix}")
    xr.testing.assert_identical(results.read_dataset(path).drop_attrs(), ds)


@pytest.mark.parametrize("suffix", [".zarr", ".nc"])
def test_what_would_not_come_back_as_it_is_is_refused(tmp_path, suffix):
    ds = xr.Dataset({"y": ("case", [1.0])}, coords={"learning rate": ("case", [0.1])})
    with pytest.raises(ValueError, match=r"coordinates without spaces.*learning rate"):
        results.write_dataset(ds, tmp_path / f"a{suffix}")
    ds = xr.Dataset({"y": ("case", [1], {"_Encoding": "utf-8"})})
    with pytest.raises(ValueError, match="_Encoding"):
        results.write_dataset(ds, tmp_path / f"a{suffix}")


@pytest.mark.parametrize("name", ["y", "groups", "converged"])
def test_rows_of_a_fit_go_by_their_labels(name):
    rows = list("abcd")
    x = pd.Series([1.0, 2.0, 3.0, 4.0], rows)
    given = {"y": x, "groups": x.astype(int), "converged": pd.Series([True] * 4, rows)}
    assert float(results.fit_power(x, **given).exponent) == pytest.approx(1)
    with pytest.raises(
        ValueError, match=f"{name}: expected the row labels of x in the same order"
    ):
        results.fit_power(x, **given | {name: given[name].reindex(rows[::-1])})
    masked = np.ma.array(given[name].to_numpy(), mask=[0, 0, 0, 1])
    with pytest.raises((TypeError, ValueError), match="mask"):
        results.fit_power(
            x.to_numpy(), **{k: v.to_numpy() for k, v in given.items()} | {name: masked}
        )
