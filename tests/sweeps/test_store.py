"""The store: resumed, extended, shared, refused; the answer is that of a sweep in memory."""

from __future__ import annotations

import dataclasses
import datetime
import errno
import itertools
import json
import logging
import os
import subprocess
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from meanfield import results
from meanfield.experiments.settings import override, read_toml
from meanfield.results import Variable, atomic, cases
from meanfield.results import store as storing
from meanfield.results.store import Store
from meanfield.sweeps import Task, run, status, sweep
from meanfield.sweeps.grid import case_keys, cases_of
from tests.sweeps import sweep_functions as functions
from tests.sweeps.test_file_systems import refusing

GRID = {"n": [2, 4, 8], "repetition": range(5)}


def counting(folder):
    """A task that leaves a file per evaluation, so that tests see what was run."""

    def count(x):
        (folder / f"{x}-{time.monotonic_ns()}").touch()
        if x == 3 and (folder / "broken").exists():
            raise ArithmeticError((folder / "broken").read_text())
        return {"y": 2.0 * x}

    folder.mkdir()
    return Task(count, [Variable("y", "twice x")], name="counting")


def evaluated(folder):
    runs = sorted(int(f.name.split("-")[0]) for f in folder.iterdir() if "-" in f.name)
    for file in folder.iterdir():
        file.unlink() if "-" in file.name else None
    return runs


def test_a_store_that_has_grown_says_so_and_has_the_labels_that_were_given_last(tmp_path):
    def run(xs, words, note):
        task = Task(lambda x: {"y": x}, [Variable("y", words)], name="f")
        return sweep(task, {"x": xs}, store=tmp_path / "s", attrs={"note": note})

    first = run([1.0, 2.0], "mass", "old")
    ds, stored = run([2.0, 3.0], "length", "new"), results.read_dataset(tmp_path / "s")
    for found, xs in ((first, [1.0, 2.0]), (ds, [2.0, 3.0]), (stored, [1.0, 2.0, 3.0])):
        spec = results.read_provenance(found)["spec"]
        assert (spec["grid"], spec["n_cases"]) == ({"x": xs}, len(xs))
    assert stored["y"].long_name == "length" and stored.attrs["note"] == "new"
    written = (tmp_path / "s" / "sweep.json").stat()
    assert run([2.0, 3.0], "length", "new").identical(ds)
    assert (tmp_path / "s" / "sweep.json").stat() == written


def test_truth_values_that_some_cases_lack_join_those_of_a_store(tmp_path):
    def run(*grid):
        task = Task(lambda a, flag=False: {"y": type(flag).__name__}, name="f")
        return sweep(task, list(grid), store=tmp_path / "s")

    flagged, bare = {"a": 1, "flag": True}, {"a": 2}
    run(flagged)
    np.testing.assert_array_equal(run(flagged, bare)["flag"], [1, np.nan])
    assert run({"a": 3, "flag": False}, flagged)["y"].values.tolist() == ["bool", "bool"]
    with pytest.raises(ValueError, match="the store holds numbers, got texts"):
        run({"a": 1, "flag": "word"})


def test_the_users_own_folder_is_meant_by_its_sign(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    sweep(functions.square, {"x": [1]}, store="~/s")
    assert status(tmp_path / "s").n_ok == 1
    monkeypatch.chdir(tmp_path)
    sweep(functions.square, {"x": [1]}, store="~nobody of this name")
    assert status(tmp_path / "~nobody of this name").n_ok == 1


def test_a_number_is_no_truth_value_where_some_cases_lack_it(tmp_path):
    """As 1.0 and NaN both look alike in a column."""

    task = Task(lambda x, flag=None: {"y": x + 10.0 * (flag is True)}, name="f")
    for flag, wanted in ((True, 11.0), (1, 1.0), (True, 11.0), (1.0, 1.0)):
        ds = sweep(task, [{"x": 1, "flag": flag}, {"x": 2}], store=tmp_path / "s")
        assert ds["y"].values.tolist() == [wanted, 2.0]


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_sweep_in_a_store_equals_the_one_in_memory(tmp_path, batch_size):
    memory = sweep(functions.NOISE, GRID, seed=3)
    stored = sweep(functions.NOISE, GRID, seed=3, store=tmp_path / "s.zarr", batch_size=batch_size)
    xr.testing.assert_identical(stored.drop_attrs(deep=False), memory.drop_attrs(deep=False))


def test_the_last_message_counts_though_the_clock_was_set_back(tmp_path, monkeypatch):
    task, again = counting(tmp_path / "c"), {"progress": False, "store": tmp_path / "s"}
    (tmp_path / "c" / "broken").write_text("older")
    sweep(task, {"x": range(5)}, **again)

    class AnHourAgo(storing.datetime):
        @classmethod
        def now(cls, zone):
            return super().now(zone) - datetime.timedelta(hours=1)

    monkeypatch.setattr(storing, "datetime", AnHourAgo)
    (tmp_path / "c" / "broken").write_text("newer")
    sweep(task, {"x": range(5)}, retry_failed=True, **again)
    assert results.read_dataset(tmp_path / "s")["message"].values[3] == "ArithmeticError: newer"


def test_store_is_read_as_the_dataset_by_us_and_its_files_by_numpy_alone(tmp_path):
    ds = sweep(functions.NOISE, GRID, store=tmp_path / "s.zarr", batch_size=4)
    xr.testing.assert_identical(results.read_dataset(tmp_path / "s.zarr"), ds)
    batches = [np.load(file) for file in sorted((tmp_path / "s.zarr").glob("batch-*.npz"))]
    assert [len(batch["numbers mean"]) for batch in batches] == [4, 4, 4, 3]
    for name in ("profile", "n"):
        raw = np.concatenate([batch[f"numbers {name}"] for batch in batches])
        np.testing.assert_array_equal(raw, ds[name])


def test_a_store_can_be_written_to_one_file_with_the_same_content(tmp_path):
    ds = sweep(functions.PICKY, {"x": range(7)}, store=tmp_path / "s.zarr", batch_size=2)
    for name in ("out.nc", "out.zarr"):
        path = results.write_dataset(results.read_dataset(tmp_path / "s.zarr"), tmp_path / name)
        xr.testing.assert_identical(results.read_dataset(path), ds)
    for inside in (".", "ds.nc", "figures/of today/ds.zarr"):
        with pytest.raises(FileExistsError, match="outside the store of a sweep"):
            results.write_dataset(ds, tmp_path / "s.zarr" / inside)
    with pytest.raises(FileExistsError, match="outside a Zarr folder"):
        results.write_dataset(ds, tmp_path / "out.zarr" / "figures" / "ds.nc")


def test_extension_of_a_grid_runs_the_new_cases_only_and_a_part_of_it_runs_nothing(tmp_path):
    task, store = counting(tmp_path / "log"), tmp_path / "s.zarr"
    for expected in ([1, 2, 3], []):
        sweep(task, {"x": [1, 2, 3]}, store=store, batch_size=2)
        assert evaluated(tmp_path / "log") == expected
    ds = sweep(task, {"x": [5, 3, 4, 1]}, store=store, batch_size=2)
    assert evaluated(tmp_path / "log") == [4, 5]
    assert ds["y"].values.tolist() == [10.0, 6.0, 8.0, 2.0]
    assert sweep(task, {"x": [4, 2]}, store=store)["y"].values.tolist() == [8.0, 4.0]
    assert evaluated(tmp_path / "log") == []
    everything = results.read_dataset(store)
    assert sorted(everything["x"].values.tolist()) == [1, 2, 3, 4, 5]
    assert np.array_equal(everything["y"], 2.0 * everything["x"])


def test_extension_with_a_parameter_that_old_cases_do_not_have(tmp_path):
    store = tmp_path / "s.zarr"
    task = Task(functions.square, [Variable("y", "square")])
    sweep(task, [{"x": 1}, {"x": 2}], store=store)
    ds = sweep(task, [{"x": 2}, {"x": 3, "offset": 0.5}], store=store)
    assert ds["y"].values.tolist() == [4.0, 9.5]
    np.testing.assert_array_equal(results.read_dataset(store)["offset"], [np.nan, np.nan, 0.5])


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        ([True], [1.0], "the store holds truth values, got numbers"),
        ([1], [False], "the store holds numbers, got truth values"),
        (["a"], [1], "the store holds texts, got numbers"),
        ([2**60 + 1, 2**60 + 3], [0.5], "integers that doubles hold.*, got 1152921504606846977"),
        ([0.5], [-(2**60) - 1], "integers that doubles hold.*, got -1152921504606846977"),
        ([2**60 + 1], None, "integers that doubles hold.*, got 1152921504606846977"),
        ([2**60 + 1], [2**60 + 3], None),
        ([2**60], [0.5], None),
        ([2.0**53], [2**53], None),
    ],
)
def test_the_cases_of_several_calls_are_columns_like_those_of_one(tmp_path, first, then, message):
    task, store = Task(lambda **case: {"y": 1.0}, [Variable("y", "y")], name="any"), tmp_path / "s"
    sweep(task, {"x": first}, store=store)
    second = {"z": [1]} if then is None else {"x": then}
    if message:
        with pytest.raises(ValueError, match=f"parameter 'x': .*{message}"):
            sweep(task, second, store=store)
    else:
        sweep(task, second, store=store)
    expected = first if message else [*dict.fromkeys(first + then)]
    assert results.read_dataset(store)["x"].values.tolist() == expected


@pytest.mark.parametrize(
    "grid",
    [{"x": [1, 2, 3]}, {"x": [2, 1]}, {"x": [1, 2], "z": [1]}, [{"x": 1}, {"x": 3, "z": 2.0}]],
)
def test_what_identifies_cases_is_that_of_a_fresh_store_whatever_is_kept(tmp_path, grid):
    task = Task(lambda **case: {"y": 1.0}, [Variable("y", "y")], name="any")
    sweep(task, {"x": [1, 2]}, store=tmp_path / "s")
    sweep(task, grid, store=tmp_path / "s")
    keys = Store.at(tmp_path / "s").rows()["case_key"].tolist()
    asked = case_keys([*cases_of({"x": [1, 2]}), *cases_of(grid)]).tolist()
    assert keys == [*dict.fromkeys(asked)]


@pytest.mark.parametrize("kind", [int, float])
def test_numbers_are_not_given_what_truth_values_beside_absences_had(kind, tmp_path):
    def kind_of(x=None, z=None):
        return {"kind": type(x).__name__}

    task = Task(kind_of, [Variable("kind", "type of x", dtype="str")], name="kind")
    sweep(task, [{"x": False, "z": 1}, {"x": True, "z": 1}, {"z": 1}], store=tmp_path / "s")
    ds = sweep(task, {"x": [kind(0), kind(1)], "z": [1]}, store=tmp_path / "s")
    assert ds["kind"].values.tolist() == [kind.__name__] * 2


def test_truth_values_beside_absences_are_not_given_what_numbers_had(tmp_path):
    def kind_of(x=None, z=None):
        return {"kind": type(x).__name__}

    task = Task(kind_of, [Variable("kind", "type of x", dtype="str")], name="kind")
    sweep(task, [{"x": 0.0, "z": 1}, {"z": 1}, {"x": 2.0, "z": 1}], store=tmp_path / "s")
    ds = sweep(task, [{"x": False, "z": 1}, {"z": 1}], store=tmp_path / "s")
    assert ds["kind"].values.tolist() == ["bool", "NoneType"]


def test_failed_cases_are_kept_with_their_message_and_retried_when_asked(tmp_path):
    task, store, log = counting(tmp_path / "log"), tmp_path / "s.zarr", tmp_path / "log"
    (log / "broken").write_text("broken")
    ds = sweep(task, {"x": range(6)}, store=store, batch_size=2)
    assert ds["message"].values.tolist() == ["", "", "", "ArithmeticError: broken", "", ""]
    (log / "broken").write_text("still broken")
    sweep(task, {"x": range(6)}, store=store, retry_failed=True)
    assert str(results.read_dataset(store)["message"][3].values) == "ArithmeticError: still broken"
    (log / "broken").unlink()
    evaluated(log)
    assert int(sweep(task, {"x": range(6)}, store=store)["status"][3]) == 3
    assert evaluated(log) == []
    ds = sweep(task, {"x": range(6)}, store=store, retry_failed=True)
    assert evaluated(log) == [3]
    assert ds["y"].values.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert set(ds["message"].values) == {""}
    assert results.read_dataset(store).drop_attrs(deep=False).identical(ds.drop_attrs(deep=False))


def test_another_configuration_is_refused_naming_all_that_differs(tmp_path):
    task, store = Task(functions.square, [Variable("y", "y")]), tmp_path / "s.zarr"
    before = sweep(task, {"x": [1, 2]}, store=store, fixed={"offset": 1.0})
    other = Task(functions.square, [Variable("y", "y", dtype="float32")])
    with pytest.raises(ValueError, match="another configuration") as caught:
        sweep(other, {"x": [1, 2]}, store=store, seed=1)
    for field in (
        "seed: stored 0, now 1",
        'fixed.offset: stored "1.0", now nothing',
        "variable.y",
    ):
        assert field in str(caught.value)
    xr.testing.assert_identical(results.read_dataset(store), before)


def test_other_folders_and_files_are_refused_and_stay(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="which is something else"):
        sweep(functions.square, {"x": [1]}, store=tmp_path)
    with pytest.raises(ValueError, match="which is something else"):
        sweep(functions.square, {"x": [1]}, store=tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(FileNotFoundError, match="nothing at"):
        status(tmp_path / "absent")


def test_unwritable_folder_is_an_error_that_says_what_to_do(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(OSError, match=r"cannot be made: .*run the same sweep again"):
        sweep(functions.square, {"x": [1]}, store=tmp_path / "file" / "s.zarr")


def test_full_disk_stops_the_sweep_and_loses_nothing_finished(tmp_path, monkeypatch):
    task, n_writes = Task(functions.square, [Variable("y", "y")]), itertools.count(1)
    run = {"fn": task, "grid": {"x": range(8)}, "store": tmp_path / "s", "batch_size": 2}
    with monkeypatch.context() as patch:  # after the description, the grid and two batches
        refusing(patch, "write", errno.ENOSPC, lambda *_: next(n_writes) > 4)
        with pytest.raises(OSError, match=r"does not take a batch of 2 cases: .*batches are kept"):
            sweep(**run)
    assert results.read_dataset(tmp_path / "s")["status"].values.tolist() == [1] * 4 + [0] * 4
    assert not list((tmp_path / "s").glob(".*"))
    assert sweep(**run)["y"].values.tolist() == [x**2 for x in range(8)]


def test_status_counts_what_is_there(tmp_path):
    store = tmp_path / "s.zarr"
    sweep(functions.PICKY, {"x": range(8)}, store=store, batch_size=2, shard=(0, 2))
    state = status(store)
    assert (state.n_cases, state.n_done, state.n_files) == (8, 4, 3)
    assert not state.complete
    sweep(functions.PICKY, {"x": range(8)}, store=store)
    state = status(store)
    assert (state.n_ok, state.n_not_converged, state.n_failed) == (6, 1, 1)
    assert state.complete
    assert "8 of 8 cases done (4 files): 6 ok, 1 not converged, 1 failed" in str(state)
    assert "1 × ArithmeticError: three is refused" in str(state)


def test_what_dead_processes_left_is_removed_and_what_living_ones_write_is_not(tmp_path):
    store = tmp_path / "s[a].zarr"
    sweep(functions.NOISE, GRID, store=store, batch_size=4)
    dead = subprocess.Popen(["true"])
    dead.wait()
    machine = atomic._machine()
    old = store / f".batch.nc.{machine}.{dead.pid}.aaaaaa.tmp"
    young = store / f".batch.nc.{machine}.{os.getpid()}.aaaaaa.tmp"
    elsewhere = store / f".batch.nc.00000000.{dead.pid}.aaaaaa.tmp"
    for file in (old, young, elsewhere):
        file.write_text("torn")
    sweep(functions.NOISE, GRID, store=store)
    assert not old.exists() and young.exists() and elsewhere.exists()
    os.utime(elsewhere, (time.time() - 100_000,) * 2)
    sweep(functions.NOISE, GRID, store=store)
    assert not elsewhere.exists()


def change_description(store, change):
    """The description of a store changed, with a checksum that fits."""
    description = json.loads((store / "sweep.json").read_text())
    del description["checksum"]
    change(description)
    (store / "sweep.json").write_bytes(storing._pack_description(description))


def test_store_begun_with_other_versions_goes_on_with_a_warning(tmp_path, caplog):
    store = tmp_path / "s.zarr"
    sweep(functions.NOISE, GRID, store=store)

    def older(description):
        record = json.loads(description["provenance"])
        record["versions"]["numpy"] = "1.0"
        description["provenance"] = json.dumps(record)

    change_description(store, older)
    with caplog.at_level(logging.WARNING, logger="meanfield"):
        sweep(functions.NOISE, GRID, store=store)
    assert f"numpy 1.0 -> {np.__version__}" in caplog.text


def test_shards_split_the_batches_and_meet_in_the_store(tmp_path):
    task, store, log = counting(tmp_path / "log"), tmp_path / "s.zarr", tmp_path / "log"
    for i in range(3):
        sweep(task, {"x": range(10)}, store=store, batch_size=2, shard=(i, 3))
    assert evaluated(log) == list(range(10))
    assert results.read_dataset(store)["y"].values.tolist() == [2.0 * x for x in range(10)]
    with pytest.raises(ValueError, match=r"0 ≤ i < k, got \(3, 3\)"):
        sweep(task, {"x": [1]}, store=store, shard=(3, 3))
    with pytest.raises(ValueError, match="expected a store"):
        sweep(task, {"x": [1]}, shard=(0, 3))


def test_every_shard_of_a_vectorised_sweep_has_cases(tmp_path):
    """Its cases are fewer than one call takes: the first shard had all of them."""
    task = Task(lambda x: {"y": 2.0 * x}, [Variable("y", "y")], batched=True, name="twice")
    done = [
        sweep(task, {"x": range(10)}, store=tmp_path / "s", shard=(i, 3))["status"].sum()
        for i in range(3)
    ]
    assert done == [4, 8, 10]


def test_shards_and_what_is_done_do_not_cut_vectorised_calls(tmp_path):
    """The last digits of linear algebra depend on the cases of a call."""
    calls = []

    def note(x):
        calls.append(x.tolist())
        return {"y": 2.0 * x}

    task, run = Task(note, [Variable("y", "y")], batched=True, name="note"), {"batch_size": 4}
    run["accept_changed_code"] = True  # `calls` grows
    grid, store = {"x": range(10)}, tmp_path / "s"
    sweep(task, grid, store=store, shard=(0, 2), **run)
    assert calls == [[0, 1, 2, 3], [8, 9]]
    sweep(task, grid, store=store, shard=(1, 2), **run)
    assert calls[2:] == [[4, 5, 6, 7]]


@pytest.mark.parametrize("at", ["before the folder is made", "before the description is written"])
def test_of_two_sweeps_that_begin_one_store_at_once_the_other_configuration_is_refused(
    tmp_path, monkeypatch, at
):
    module, name = (run, "open_store") if "folder" in at else (storing, "write_whole")
    store, usual = tmp_path / "s", getattr(module, name)

    def overtaken(*given, **how):
        monkeypatch.undo()
        sweep(functions.NOISE, GRID, seed=2, store=store)
        return usual(*given, **how)

    monkeypatch.setattr(module, name, overtaken)
    with pytest.raises(ValueError, match="another configuration.*seed: stored 2, now 1"):
        sweep(functions.NOISE, GRID, seed=1, store=store)
    xr.testing.assert_equal(results.read_dataset(store), sweep(functions.NOISE, GRID, seed=2))


def test_two_processes_begin_one_store_at_once_and_nothing_is_lost(tmp_path, script):
    code = """if True:
        import os
        from tests.sweeps import sweep_functions as f
        from meanfield.sweeps import sweep
        grid = {"n": [2, 4], "repetition": range(50)}
        other = os.fork()
        sweep(f.NOISE, grid, seed=1, store="s", batch_size=3, shard=(int(other > 0), 2))
        assert other == 0 or os.waitpid(other, 0)[1] == 0
    """
    assert script("run.py", code).code == 0
    memory = sweep(functions.NOISE, {"n": [2, 4], "repetition": range(50)}, seed=1)
    xr.testing.assert_equal(results.read_dataset(tmp_path / "s"), memory)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("n_cases", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_many_cases_come_back_as_they_were_written(tmp_path, n_cases):
    task = Task(
        lambda a, b: {"product": a * b, "sum": a + b},
        [Variable("product", "a b"), Variable("sum", "a + b")],
        batched=True,
        name="arithmetic",
    )
    grid = {"a": np.arange(n_cases / 100), "b": np.arange(100.0)}
    ds = sweep(task, grid, store=tmp_path / "s.zarr")
    np.testing.assert_array_equal(ds["product"], np.outer(grid["a"], grid["b"]).ravel())
    xr.testing.assert_identical(results.read_dataset(tmp_path / "s.zarr"), ds)


@dataclasses.dataclass(frozen=True)
class Few:
    n: tuple[int, ...] = (2,)
    kinds: tuple[str, ...] = ("plain",)
    rtol: float = 1e-3
    masks: tuple[bool, ...] = (False, True)
    seed: int = 0


def test_configuration_files_are_read_and_overridden_by_text(tmp_path):
    (tmp_path / "c.toml").write_text('seed = 1\nn = [2, 4]\nkinds = ["plain"]\n')
    configuration, settings = read_toml(tmp_path / "c.toml"), Few()
    changed = override(settings, configuration, ["n=[8]", "kinds=masked", "rtol=1"])
    assert changed == Few(n=(8,), kinds=("masked",), rtol=1.0, seed=1)
    assert settings == Few() and configuration["n"] == [2, 4]
    for text, value in (("true", True), ("True", True), ("False", False)):
        assert override(settings, {}, [f"masks={text}"]).masks == (value,)
    for mistake in ({"sead": 3}, {}), ({}, ["sead=3"]):
        with pytest.raises(ValueError, match="setting: expected .* did you mean 'seed'"):
            override(settings, *mistake)
    with pytest.raises(ValueError, match="expected key=value, got 'seed'"):
        override(settings, {}, ["seed"])
    (tmp_path / "bad.toml").write_text("seed = \n")
    with pytest.raises(ValueError, match="line 1"):
        read_toml(tmp_path / "bad.toml")


@given(st.lists(st.tuples(st.integers(-4, 4), st.integers(0, 3)), min_size=1, max_size=30))
def test_of_the_rows_of_a_case_the_best_is_taken_and_of_equals_the_last(pairs):
    """Against a loop: rank by status, then by place; cases in the order they first appear."""
    rank, chosen = (0, 2, 2, 1), {}
    for place, (key, ended) in enumerate(pairs):
        if key not in chosen or rank[ended] >= rank[pairs[chosen[key]][1]]:
            chosen[key] = place
    keys, statuses = (np.array(column) for column in zip(*pairs, strict=True))
    assert cases._chosen(keys, statuses).tolist() == [*chosen.values()]


@pytest.mark.parametrize("executor", [None, "threads"])
def test_a_batch_whose_storing_is_interrupted_is_stored_all_the_same(
    tmp_path, monkeypatch, executor
):
    write, signals = Store.write, iter([KeyboardInterrupt()])

    def interrupted(self, columns, **kind):
        if "y" in columns:
            for signal in signals:
                raise signal
        write(self, columns, **kind)

    monkeypatch.setattr(Store, "write", interrupted)
    task = Task(functions.square, [Variable("y", "y")])
    with ThreadPoolExecutor(1) as threads, pytest.raises(KeyboardInterrupt) as caught:
        sweep(task, {"x": range(4)}, store=tmp_path / "s", executor=executor and threads)
    n_kept = status(tmp_path / "s").n_done
    assert n_kept >= (4 if executor is None else 1)
    assert caught.value.__notes__[0].startswith(f"{n_kept} of 4 cases are kept")


def test_looking_cases_up_takes_the_memory_of_their_values_once(tmp_path):
    places = {"place": np.zeros(20_000)}
    variables = [Variable("y", "noise", dims=("place",))]
    task = Task(lambda x: {"y": np.full(20_000, x)}, variables, coords=places, name="wide")
    ds = sweep(task, {"x": np.arange(40.0)}, store=tmp_path / "s", shard=(0, 2), batch_size=8)
    store = Store.at(tmp_path / "s")
    keys = case_keys([{"x": float(x)} for x in range(40)])
    tracemalloc.start()
    try:
        rows = store.rows_of(keys)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(rows["y"], ds["y"])
    assert peak < 1.5 * ds["y"].nbytes


def test_every_case_runs_once_those_too_that_teach_the_variables(tmp_path):
    calls, broken = [], {0, 1}

    def case(x):
        calls.append(x)
        if x in broken:
            raise ValueError("not yet")
        return {"y": float(x)}

    run = {"store": tmp_path / "store", "progress": False, "accept_changed_code": True}
    case = Task(case, name="case")
    assert sweep(case, {"x": range(5)}, **run).status.values.tolist() == [3, 3, 1, 1, 1]
    assert sorted(calls) == [0, 1, 2, 3, 4]
    broken.clear()
    calls.clear()
    assert sweep(case, {"x": range(7)}, retry_failed=True, **run).status.values.tolist() == [1] * 7
    assert sorted(calls) == [0, 1, 5, 6]
    calls.clear()
    sweep(case, {"x": range(7)}, retry_failed=True, **run)
    assert not calls
