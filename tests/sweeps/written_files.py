"""One of every kind of file that this library writes, in several versions.

``python -m tests.sweeps.written_files FOLDER`` writes them and prints a line after each. `check`
looks at what a crash has left: the last version that was acknowledged or the next one, whole.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import xarray as xr

from meanfield import results
from meanfield.figures import save_all
from meanfield.report import write_report
from meanfield.results import Variable
from meanfield.results.atomic import make_folder
from meanfield.sweeps import Task, status, sweep

VERSIONS = 3
KINDS = ("nc", "zarr", "html", "png", "sweep")
TASK = Task(lambda x: {"y": x / 7}, [Variable("y", "a number")], name="seventh")


def dataset(version: int) -> xr.Dataset:
    """One that tells its version."""
    values = version * np.arange(50.0 * version)
    words = np.array([f"word {version}"] * len(values), object)
    return xr.Dataset({"y": ("case", values), "word": ("case", words)})


def draw(ds: xr.Dataset, *, ax) -> None:
    """A line."""
    ax.plot(ds["y"])


def write(kind: str, folder: Path, version: int) -> None:
    """Write a version of a kind below the folder."""
    path = folder / f"a.{kind}"
    if kind in ("nc", "zarr"):
        results.write_dataset(dataset(version), path)
    elif kind == "html":
        write_report(dataset(version), path, title=f"version {version}")
    elif kind == "png":
        make_folder(folder)
        list(save_all(dataset(version), {"a": draw}, folder, formats=("png", "pdf", "svg")))
    else:
        sweep(TASK, {"x": range(version)}, store=path, progress=False)


@cache
def content(kind: str, version: int) -> dict[str, bytes]:
    """The bytes of the files of a version."""
    with tempfile.TemporaryDirectory() as folder:
        write(kind, Path(folder), version)
        return {file.name: undated(file) for file in Path(folder).iterdir()}


def undated(file: Path) -> bytes:
    """The bytes of a file without the time at which a PDF was made."""
    return re.sub(rb"/CreationDate \([^)]*\)", b"", file.read_bytes())


def check(kind: str, folder: Path, version: int) -> None:
    """What is there is whole, and at least the version that was acknowledged last; 0 is none."""
    path, allowed = folder / f"a.{kind}", [version, min(version + 1, VERSIONS)]
    if kind == "sweep":
        if version or (path / "sweep.json").exists():
            done = results.read_dataset(path)
            done = done.isel(case=np.flatnonzero(done["status"] == 1))
            cases = done["x"].values.tolist() if done.sizes["case"] else []
            assert done["y"].values.tolist() == [x / 7 for x in cases]
            assert done.sizes["case"] >= version and status(path).n_ok >= version
        again = sweep(TASK, {"x": range(VERSIONS)}, store=path, progress=False)
        assert again["y"].values.tolist() == [x / 7 for x in range(VERSIONS)]
        assert not [f for f in path.glob(".*") if f".{os.getpid()}." not in f.name]
    elif kind in ("html", "png"):
        names = content(kind, 1)
        found = {name: undated(folder / name) for name in names if (folder / name).exists()}
        assert version == 0 or found.keys() == names.keys()
        for name, data in found.items():
            assert data in [content(kind, one)[name] for one in allowed if one], name
    else:
        try:
            ds = results.read_dataset(path)
            found = ds["y"].values
            assert ds["word"].values[0] == f"word {int(found[1])}"
        except FileNotFoundError:
            assert version == 0
        else:
            assert any(one and np.array_equal(found, dataset(one)["y"]) for one in allowed)
        write(kind, folder, VERSIONS)  # and it can be written again


def main() -> None:
    """Write everything, say so after each."""
    root = Path(sys.argv[1])
    for version in range(1, VERSIONS + 1):
        for kind in KINDS:
            write(kind, root / kind, version)
            sys.stdout.write(f"wrote {kind} {version}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
