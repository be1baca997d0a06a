"""The one writer: whose files it replaces, and that what is read is what was written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from meanfield import results
from meanfield.report import write_report
from meanfield.results import atomic, encoding, files
from meanfield.results.atomic import DIGEST, check_replaceable, digest_of
from tests.sweeps.test_damage import Death, damages
from tests.sweeps.test_results import rich_dataset


@pytest.mark.parametrize("deadly", range(5))
def test_a_folder_is_the_old_or_the_new_one_whenever_its_writer_dies(
    tmp_path, monkeypatch, deadly
):
    """The process dies at its `deadly`-th rename or flush of the folder; another one comes."""
    old, new, path = rich_dataset(5), rich_dataset(3), tmp_path / "a.zarr"
    results.write_dataset(old, path)
    left = iter(range(deadly))

    def deadly_call(usual):
        def call(*arguments):
            if next(left, None) is None:
                raise Death
            return usual(*arguments)

        return call

    died = False
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", deadly_call(Path.rename))
        patch.setattr(atomic, "_place_folder", deadly_call(atomic._place_folder))
        patch.setattr(atomic, "_remove", lambda path: None)  # the dead clean nothing up
        try:
            results.write_dataset(new, path)
        except Death:
            died = True
    assert died == (deadly < 4)
    monkeypatch.setattr(atomic, "_is_dead", lambda *_: True)
    found = results.read_dataset(path)
    assert found.sizes["case"] in ((3, 5) if died else (3,))
    results.write_dataset(new, path)
    assert [*tmp_path.iterdir()] == [path] and results.read_dataset(path).sizes["case"] == 3


@pytest.mark.skipif(shutil.which("unshare") is None, reason="no unshare")
def test_what_a_process_of_another_namespace_writes_is_left_alone(tmp_path):
    """Two containers of one name count processes on their own."""
    code = "from meanfield.results import atomic; print(atomic._machine())"
    command = ["unshare", "--pid", "--fork", "--mount-proc", "python", "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip("namespaces are not permitted here")
    machine = found.stdout.strip()
    assert machine != atomic._machine()
    living = tmp_path / f".a.{machine}.4000000.0123ab.tmp"
    living.write_bytes(b"half")
    atomic.remove_litter(tmp_path)
    assert living.exists()
    os.utime(living, (time.time() - 100_000,) * 2)
    atomic.remove_litter(tmp_path)
    assert not living.exists()


FOREIGN = "made in ~/projects/meanfield-thesis: meanfield_digest, generator meanfield"


def foreign(path):
    """A file of somebody who writes about this library."""
    if path.suffix == ".nc":
        xr.Dataset({"y": 1.0}, attrs={"history": FOREIGN, "source": "meanfield"}).to_netcdf(path)
    elif path.suffix == ".zarr":
        xr.Dataset({"y": 1.0}, attrs={"history": FOREIGN}).to_zarr(path, zarr_format=3)
    elif path.suffix == ".html":
        path.write_text(f"<html><head><title>{FOREIGN}</title></head></html>")
    else:
        path.write_bytes(FOREIGN.encode())


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
@pytest.mark.parametrize("suffix", ["nc", "zarr", "html", "png", "pdf", "svg"])
def test_a_file_in_which_the_word_stands_is_somebody_elses(tmp_path, suffix):
    path = tmp_path / f"mine.{suffix}"
    foreign(path)
    with pytest.raises(FileExistsError, match="was not written by this library"):
        check_replaceable(path)


def test_what_this_library_writes_it_may_replace(tmp_path):
    from meanfield.figures import save_all

    ds = rich_dataset()
    made = [results.write_dataset(ds, tmp_path / f"a{suffix}") for suffix in (".nc", ".zarr")]
    made.append(write_report(ds, tmp_path / "a.html"))
    made += save_all(
        ds, {"gain": lambda ds, ax: ax.plot(ds["gain"])}, tmp_path, formats=("png", "pdf", "svg")
    )
    assert {path.suffix for path in made} == {".nc", ".zarr", ".html", ".png", ".pdf", ".svg"}
    for path in made:
        assert check_replaceable(path) == path.resolve()


def test_the_settings_of_another_program_are_no_store(tmp_path):
    (tmp_path / "sweep.json").write_text('{"learning_rate": 1}')
    results.write_dataset(rich_dataset(), tmp_path / "a.nc")
    with pytest.raises(ValueError, match="without zarr.json"):
        results.read_dataset(tmp_path)


def read_wrongly(tmp_path, suffix, n_bits):
    """Damages of a result, one at a time, that reading does not name and that change it."""
    ds, whole = rich_dataset()[["gain", "message"]], tmp_path / f"whole.{suffix}"
    results.write_dataset(ds, whole)
    inside = [Path()] if whole.is_file() else [f.relative_to(whole) for f in whole.rglob("*")]
    wrong = []
    for name in inside:
        folder = (whole / name).is_dir()
        for _, data in [("", None)] if folder else damages((whole / name).read_bytes(), n_bits):
            broken = tmp_path / f"broken.{suffix}"
            shutil.copytree(whole, broken) if whole.is_dir() else shutil.copy(whole, broken)
            if data is not None:
                (broken / name).write_bytes(data)
            else:
                shutil.rmtree(broken / name) if folder else (broken / name).unlink()
            try:
                if not results.read_dataset(broken).identical(ds):
                    wrong.append(name)
            except (ValueError, FileNotFoundError) as error:
                if "broken" not in str(error):
                    wrong.append(name)
            shutil.rmtree(broken) if broken.is_dir() else broken.unlink(missing_ok=True)
    return wrong


@pytest.mark.parametrize("suffix", ["nc", "zarr"])
@pytest.mark.parametrize("n_bits", [1, pytest.param(400, marks=pytest.mark.slow)])
def test_no_damaged_result_is_read_as_another_number(tmp_path, suffix, n_bits):
    assert read_wrongly(tmp_path, suffix, n_bits) == []


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["nc", "zarr"])
def test_without_the_digests_damaged_results_are_read_as_other_numbers(
    tmp_path, suffix, monkeypatch
):
    def unchecked(ds, path):
        ds.attrs.pop(DIGEST, None)
        return ds

    monkeypatch.setattr(files, "check_digests", unchecked)
    assert read_wrongly(tmp_path, suffix, 40)


def test_lost_chunks_and_variables_and_those_that_were_added_by_hand_are_named(tmp_path):
    path = results.write_dataset(rich_dataset(), tmp_path / "a.zarr")
    shutil.copytree(path / "gain", path / "more")
    shutil.rmtree(path / "gain" / "c")
    shutil.rmtree(path / "single")
    named = r"gain \(not what was written\), single \(lost\), more \(was not written\)"
    with pytest.raises(ValueError, match=named):
        results.read_dataset(path)


@pytest.mark.parametrize(
    ("change", "suffix", "error", "text"),
    [
        (lambda ds: ds.rename(gain="g/relative"), "zarr", ValueError, "without '/', got 'g/r"),
        (
            lambda ds: ds.rename(gain="σ"),
            "nc",
            ValueError,
            "ASCII characters without '/'",
        ),
        (lambda ds: ds.assign_attrs(n=2**40), "nc", ValueError, "an integer of 32 bits"),
        (lambda ds: ds.assign(t=("case", np.array(["a\0"] * 5, object))), "nc", ValueError, "NUL"),
        (lambda ds: ds.assign(z=("case", np.ones(5) * 1j)), "nc", TypeError, "two real variables"),
        (lambda ds: ds.assign(z=("case", np.ones(5, "g"))), "zarr", TypeError, "z: expected real"),
        (
            lambda ds: ds.assign(t=("case", np.array(["a", np.nan, "", "", ""], object))),
            "nc",
            TypeError,
            r"t: .*got nan among objects.*fillna\(''",
        ),
        (
            lambda ds: xr.Dataset(
                {"y": ("case", range(2))}, {"a": ("case", [0, 1]), "b": ("case", [2, 3])}
            ).set_index(case=["a", "b"]),
            "zarr",
            TypeError,
            r"case: .*got \(0, 2\) among objects.*reset_index",
        ),
        (lambda ds: ds.assign_attrs(z=np.complex128(1j)), "zarr", TypeError, "attribute 'z' of d"),
        (lambda ds: ds.assign_attrs(strict=True), "nc", TypeError, "attribute 'strict' of ds"),
        (lambda ds: ds.assign_attrs(spec={"a": 1}), "zarr", TypeError, "provenance"),
        (
            lambda ds: ds.assign_attrs(coordinates="x"),
            "zarr",
            ValueError,
            "of ds: .*'coordinates'",
        ),
        *[
            (
                lambda ds, name=name: ds.assign(y=((), 1.0, {name: "x"})),
                "nc",
                ValueError,
                f"attributes of y: expected .* got '{name}'",
            )
            for name in (
                *("coordinates", "dtype", "_FillValue", "missing_value", "stored_from"),
                *("scale_factor", "add_offset", "_Unsigned"),
            )
        ],
    ],
)
def test_what_a_format_would_lose_is_refused_and_the_old_file_stays(
    tmp_path, change, suffix, error, text
):
    path = results.write_dataset(rich_dataset(), tmp_path / f"a.{suffix}")
    before = results.read_dataset(path)
    with pytest.raises(error, match=text):
        results.write_dataset(change(rich_dataset()), path)
    assert results.read_dataset(path).identical(before) and [*tmp_path.iterdir()] == [path]


def test_a_file_that_xarray_has_opened_is_sent_to_its_own_reader(tmp_path):
    ds = xr.Dataset({"k": ("case", [1, 2])})
    path = results.write_dataset(ds, tmp_path / "a.nc")
    opened = xr.load_dataset(path, engine="scipy")
    with pytest.raises(ValueError, match="read_dataset, not xarray"):
        results.write_dataset(opened, tmp_path / "b.nc")
    results.write_dataset(results.read_dataset(path), tmp_path / "b.nc")


def test_what_netcdf_3_does_not_hold_is_refused_with_what_holds_it(tmp_path, monkeypatch):
    """A limit of 60 bytes stands for 2 GiB."""
    monkeypatch.setattr(encoding, "_MOST_BYTES", 60)
    with pytest.raises(ValueError, match="at most 2 GiB .* got 320 bytes; .*zarr takes more"):
        results.write_dataset(rich_dataset(40), tmp_path / "a.nc")
    assert not [*tmp_path.iterdir()]
    (tmp_path / "a.nc").write_bytes(b"\x89HDF\r\n\x1a\n")
    with pytest.raises(ValueError, match=r"a\.nc: it is netCDF 4, which xarray\.open"):
        results.read_dataset(tmp_path / "a.nc")


def test_a_digest_is_of_names_types_shapes_and_values():
    bits = np.arange(6, dtype=np.int64)
    others = {"b": bits}, {"a": bits.view(float)}, {"a": bits.reshape(2, 3)}, {"a": bits[::-1]}
    assert len({digest_of(arrays) for arrays in ({"a": bits}, *others)}) == 5


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="no waitid")
def test_what_a_killed_process_left_is_removed_before_anybody_has_waited_for_it(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    name = atomic.hidden_name(tmp_path / "a.nc").name
    (tmp_path / name.replace(f".{os.getpid()}.", f".{child.pid}.")).touch()
    (tmp_path / name).touch()
    atomic.remove_litter(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [name]
    child.wait()
