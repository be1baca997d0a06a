"""Damaged files of a store: every case has the right numbers or is pending, named and repaired.

Each file deleted, cut, emptied, zeroed, or with one bit turned, and what stands in its place. As
everywhere in the tests a warning is an error where none is expected.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from meanfield import results
from meanfield.results import Variable, cases
from meanfield.results import store as storing
from meanfield.results.atomic import DIGEST
from meanfield.results.cases import unpack
from meanfield.results.store import DamagedError, Store
from meanfield.sweeps import Task, status, sweep
from tests.sweeps.test_store import change_description

N = 12
SLOW = pytest.mark.slow


def everything(x):
    """A number, an integer, a text, a flag and a vector; one case fails."""
    if x == 5:
        raise ArithmeticError("five is refused")
    return {"y": x / 7, "k": x + 2**60, "word": f"é{x}", "y_converged": x != 2,
            "vector": np.arange(3.0) * x}  # fmt: skip


TASK = Task(
    everything,
    [
        Variable("y", "a number"),
        Variable("k", "an integer", dtype="int64"),
        Variable("word", "a text", dtype="str"),
        Variable("y_converged", "a flag", dtype="bool"),
        Variable("vector", "three numbers", dims=("place",)),
    ],
    coords={"place": [1, 2, 3]},
)


def run(store, n_cases=N, **more):
    return sweep(TASK, {"x": range(n_cases)}, store=store, batch_size=3, progress=False, **more)


@pytest.fixture(scope="module")
def right():
    return sweep(TASK, {"x": range(N)}, progress=False).drop_attrs(deep=False)


def check_read(store, right, *, at_least=()):
    """What is read is right or pending; the cases of `at_least` are not pending."""
    found = results.read_dataset(store)
    done = found.isel(case=np.flatnonzero(found["status"] != 0)).drop_attrs(deep=False)
    if not done.sizes["case"]:
        assert not at_least
        return
    cases = done["x"].values  # which are their places in the whole grid
    xr.testing.assert_equal(done, right.isel(case=cases))
    assert set(at_least) <= set(cases.tolist())


def damages(data, n_bits):
    """One file, damaged in every way; of the bits a sample over the whole length."""
    yield "deleted", None
    yield "emptied", b""
    yield "cut", data[: len(data) // 2]
    yield "shorter by one", data[:-1]
    yield "zeroed", bytes(len(data))
    yield "longer", data + b"\0"
    for bit in np.linspace(0, 8 * len(data) - 1, n_bits).astype(int):
        turned = bytearray(data)
        turned[bit // 8] ^= 1 << (bit % 8)
        yield f"bit {bit} turned", bytes(turned)


@pytest.mark.parametrize(("n_batches", "n_bits"), [(1, 2), pytest.param(N // 3, 60, marks=SLOW)])
def test_every_damage_of_every_file_is_named_and_repaired(tmp_path, right, n_batches, n_bits):
    """Of the batches, which are all written alike, the first ones."""
    whole = tmp_path / "whole"
    run(whole)
    names = sorted(file.name for file in whole.iterdir())
    assert len(names) == 1 + 1 + N // 3 + 1  # description, grid, batches, list of files
    batches = [name for name in names if name.startswith("batch")]
    names = [name for name in names if name not in batches[n_batches:]]
    n_tried = 0
    for name in names:
        for how, data in damages((whole / name).read_bytes(), n_bits):
            store = tmp_path / "damaged"
            shutil.copytree(whole, store)
            (store / name).unlink() if data is None else (store / name).write_bytes(data)
            check_damaged(store, name, right, f"{name} {how}")
            shutil.rmtree(store)
            n_tried += 1
    assert n_tried == len(names) * (6 + n_bits)


def check_damaged(store, name, right, what):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if name == "sweep.json":  # what the store computes is lost; the same sweep knows it
            with contextlib.suppress(DamagedError):
                check_read(store, right)
        else:
            check_read(store, right)
        if name.startswith("batch") and not said:  # bytes of the archive that hold nothing
            check_read(store, right, at_least=range(N))
        elif name.startswith("batch"):
            assert len(said) == 1 and name in str(said[0].message), what
            found = status(store)
            assert name in (*found.damaged, *found.missing) and found.n_done == N - 3, what
        repaired = run(store)
    assert repaired.drop_attrs(deep=False).identical(right), what
    check_read(store, right, at_least=range(N))
    assert run(store).drop_attrs(deep=False).identical(right), what


@pytest.mark.parametrize("with_digest", [True, False])
def test_members_that_an_archive_loses_by_one_bit_are_found_by_the_digest_alone(
    tmp_path, monkeypatch, with_digest
):
    """It has checksums of members, not of its list, where a long comment hides those behind it."""
    run(tmp_path / "s")
    file, labels = min((tmp_path / "s").glob("batch-*")), Store.at(tmp_path / "s").labels
    columns, data = unpack(file, labels)[0], bytearray(file.read_bytes())
    if not with_digest:
        own = str(np.load(file)[DIGEST])
        monkeypatch.setattr(cases, "digest_of", lambda _: own)
    n_refused = n_wrong = 0
    members = [member.start() for member in re.finditer(rb"PK\x01\x02", data)]
    for member, bit in itertools.product(members, range(8)):
        data[member + 33] ^= 1 << bit  # the higher byte of the length of the comment
        file.write_bytes(data)
        data[member + 33] ^= 1 << bit
        try:
            found = unpack(file, labels)[0]
        except (ValueError, LookupError):
            n_refused += 1
        else:
            n_wrong += found.keys() != columns.keys()
    assert n_refused and (n_wrong == 0) == with_digest


def scaled(k, seed=0):
    task = Task(lambda x: {"y": k * x}, [Variable("y", "y")], name="scaled")
    return {"fn": task, "grid": {"x": range(4)}, "seed": seed, "batch_size": 2}


@pytest.mark.parametrize("other", [scaled(2, seed=1), scaled(3)])
def test_files_of_another_sweep_or_function_do_not_count(tmp_path, other):
    one, begun = scaled(2), sweep(**scaled(2), store=tmp_path / "a")
    sweep(**other, store=tmp_path / "b")
    for stranger in (tmp_path / "b").glob("batch-*.npz"):
        shutil.copy(stranger, tmp_path / "a")
    with pytest.warns(UserWarning, match="of another configuration or function"):
        assert results.read_dataset(tmp_path / "a")["y"].equals(begun["y"])
    (tmp_path / "b" / "sweep.json").unlink()
    with (
        pytest.warns(UserWarning, match=r"sweep\.json is damaged or missing"),
        pytest.raises(ValueError, match="files of another configuration or function"),
    ):
        sweep(**one, store=tmp_path / "b")


def test_files_are_merged_before_they_are_many_and_nothing_is_lost(tmp_path, right, monkeypatch):
    monkeypatch.setattr(storing, "_MOST_FILES", 4)
    store = tmp_path / "s"
    for n_cases in range(1, N + 1):
        run(store, n_cases)
    assert len(list(store.glob("*.npz"))) <= 5
    check_read(store, right, at_least=range(N))
    assert run(store).drop_attrs(deep=False).identical(right)
    again = run(store, retry_failed=True)
    assert again.drop_attrs(deep=False).identical(right)


class Death(BaseException):
    """Of the process."""


def test_a_merge_that_dies_half_way_takes_nothing_for_lost(tmp_path, right, monkeypatch):
    def die(self, **_):
        os.unlink(self)
        raise Death

    store = tmp_path / "s"
    with monkeypatch.context() as patch:
        patch.setattr(storing, "_MOST_FILES", 1)
        patch.setattr(Path, "unlink", die)
        with pytest.raises(Death):
            run(store, shard=(0, 2))  # what is pending makes a missing file worth a warning
    check_read(store, right, at_least=range(0, N, 2))
    assert run(store).drop_attrs(deep=False).identical(right)


def test_a_lost_grid_file_is_missing_and_the_store_is_not_complete(tmp_path, right):
    """Nothing else tells that cases were asked for which no file holds."""
    store = tmp_path / "s"
    run(store, shard=(0, 2))
    next(store.glob("grid-*")).unlink()
    with pytest.warns(UserWarning, match=r"grid-.*\(missing\)"):
        assert results.read_dataset(store).sizes["case"] == N // 2
    assert status(store).missing and not status(store).complete
    with pytest.warns(UserWarning, match=r"grid-.*\(missing\)"):
        assert run(store).drop_attrs(deep=False).identical(right)
    assert status(store).complete and not status(store).missing


def test_the_only_file_of_a_merged_store_is_missed(tmp_path, right, monkeypatch):
    monkeypatch.setattr(storing, "_MOST_FILES", 1)
    run(tmp_path / "s")
    (merged,) = (tmp_path / "s").glob("*.npz")
    merged.unlink()
    with pytest.warns(UserWarning, match=rf"{merged.name} \(missing\)"):
        assert results.read_dataset(tmp_path / "s").sizes["case"] == 0
    assert not status(tmp_path / "s").complete


@pytest.mark.parametrize("name", ["sweep.json", "written.txt", "grid", "batch"])
@pytest.mark.parametrize("what", ["folder", "dangling link", "pipe", "device"])
def test_what_stands_in_the_place_of_a_file_is_named_and_put_aside(tmp_path, right, name, what):
    store = tmp_path / "s"
    run(store)
    file = next(store.glob(f"{name}*"))
    file.unlink()
    if what in ("folder", "pipe"):
        file.mkdir() if what == "folder" else os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero" if what == "device" else tmp_path / "nowhere")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with contextlib.suppress(DamagedError):
            check_read(store, right)
        assert run(store).drop_attrs(deep=False).identical(right)
    if name != "written.txt":  # it only serves to name other files
        assert file.name in str(said[0].message)
    check_read(store, right, at_least=range(N))


def without(*names):
    def change(entries):
        for name in names[:-1]:
            entries = entries[name]
        del entries[names[-1]]

    return change


@pytest.mark.parametrize(
    "change",
    [
        None,
        without("schema"),
        without("configuration"),
        without("source"),
        without("provenance"),
        without("variables", 0, "dims"),
        lambda entries: entries["variables"][0].update(dims=["nowhere"]),
        lambda entries: entries["variables"][0].update(dtype="M8[s]"),
        lambda entries: entries["coords"]["place"].update(dtype="strange"),
    ],
)
def test_a_damaged_description_is_written_anew_by_the_same_sweep(tmp_path, right, change):
    """Also one whose checksum is right."""
    store = tmp_path / "s"
    run(store)
    if change is None:
        (store / "sweep.json").write_text('{"checksum": ' + "[" * 10**6)
    else:
        change_description(store, change)
    with pytest.raises(DamagedError, match=r"sweep\.json is damaged or missing"):
        results.read_dataset(store)
    with pytest.warns(UserWarning, match=r"sweep\.json is damaged or missing"):
        assert run(store).drop_attrs(deep=False).identical(right)
    assert [f.name for f in store.glob("*.damaged")] == ["sweep.json.damaged"]


def test_compressed_members_are_damage_because_they_may_become_any_size(tmp_path, right):
    run(tmp_path / "s")
    file = min((tmp_path / "s").glob("batch-*"))
    with np.load(file) as stored:
        np.savez_compressed(file, **stored)
    with pytest.warns(UserWarning, match=rf"{file.name} \(damaged\)"):
        check_read(tmp_path / "s", right)


def test_files_from_the_end_of_all_years_do_not_hide_those_that_are_written_now(tmp_path, right):
    store = tmp_path / "s"
    run(store, 3)
    grid = next(store.glob("grid-*"))
    shutil.copy(grid, store / "grid-99999999T999999999999-00000000.npz")
    assert run(store).drop_attrs(deep=False).identical(right)
    check_read(store, right, at_least=range(N))


def test_a_path_that_would_command_the_terminal_is_escaped(tmp_path):
    store = tmp_path / "a\x1b[31m\nb"
    run(store)
    next(store.glob("batch-*")).unlink()
    with pytest.warns(UserWarning, match=r"a\\x1b\[31m\\nb: .*missing") as said:
        results.read_dataset(store)
    with pytest.raises(ValueError, match=r"seed: stored 0, now 1") as refused:
        run(store, seed=1)
    assert all(str(one).isprintable() for one in (said[0].message, refused.value))


def test_large_files_are_not_written_again_by_a_merge(tmp_path, right, monkeypatch):
    store = tmp_path / "s"
    run(store)
    large = max(store.glob("*.npz"), key=lambda file: file.stat().st_size)
    monkeypatch.setattr(storing, "_MOST_FILES", 2)
    monkeypatch.setattr(storing, "_SMALL", large.stat().st_size)
    assert run(store).drop_attrs(deep=False).identical(right)
    files = list(store.glob("*.npz"))
    assert large in files and len(files) < 2 + N // 3
    check_read(store, right, at_least=range(N))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_finished_sweep_does_not_fail_at_its_merge(tmp_path, right, monkeypatch, code):
    def refuse(*_, **__):
        raise OSError(code, os.strerror(code))

    store = tmp_path / "s"
    run(store)
    monkeypatch.setattr(storing, "_MOST_FILES", 1)
    with monkeypatch.context() as patch:
        patch.setattr(storing, "write_whole", refuse)
        with pytest.warns(UserWarning, match=f"are not merged .*{os.strerror(code)}"):
            assert run(store).drop_attrs(deep=False).identical(right)
    assert run(store).drop_attrs(deep=False).identical(right)
    assert len(list(store.glob("*.npz"))) == 1


@pytest.mark.parametrize("n_merges", [1, 2])
def test_a_name_that_is_written_after_its_file_was_merged_is_not_missed(
    tmp_path, right, monkeypatch, n_merges
):
    """As by a process that was slower than the one that merged its file."""
    store = tmp_path / "s"
    run(store, shard=(0, 2))
    names = [file.name for file in store.glob("*.npz")]
    monkeypatch.setattr(storing, "_MOST_FILES", 1)
    run(store, shard=(0, 2))
    assert not {file.name for file in store.glob("*.npz")} & {*names}
    with (store / "written.txt").open("a") as journal:
        journal.writelines(f"{name}\n" for name in names)
    if n_merges == 2:
        run(store, shard=(0, 3))  # more cases, so that there is something to merge
        assert len(list(store.glob("*.npz"))) == 1
    check_read(store, right, at_least=range(0, N, 2))
    assert not status(store).missing
