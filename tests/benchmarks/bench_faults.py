"""How stores of results behave under faults: this library, SQLite, joblib, dask, process pools.

::

    python tests/benchmarks/bench_faults.py [--flips 60] [--out faults.json]

What is not installed is said in the answer, and not measured.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import pickle
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
CASES = range(8)


def value(x: int) -> np.ndarray:
    """What a case returns."""
    return np.random.default_rng(x).standard_normal(50)


def crash_at_five(x: int) -> dict[str, float]:
    """A case that ends its process."""
    import ctypes

    if x == 5:
        ctypes.string_at(0)
    time.sleep(0.3)
    return {"y": float(x)}


# Each store writes all cases into a folder, and reads them: their values, or an error.
def write_meanfield(folder: Path) -> None:
    """As a sweep."""
    from meanfield.results import Variable
    from meanfield.sweeps import Task, sweep

    variable = Variable("y", "values", dims=("place",))
    task = Task(lambda x: {"y": value(x)}, [variable], coords={"place": range(50)}, name="value")
    sweep(task, {"x": CASES}, store=folder / "s", batch_size=2, progress=False)


def read_meanfield(folder: Path) -> dict[int, np.ndarray]:
    """The finished cases; a damaged file is a warning that names it."""
    from meanfield import results

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ds = results.read_dataset(folder / "s")
    found = {int(x): y for x, y, s in zip(ds.x, ds.y.values, ds.status, strict=True) if s == 1}
    if len(found) < len(CASES) and not said:
        raise AssertionError("cases are lost without a word")
    return found


def write_sqlite(folder: Path) -> None:
    """As blobs of a table."""
    with sqlite3.connect(folder / "s.db") as base:
        base.execute("create table cases (x integer primary key, y blob)")
        base.executemany(
            "insert into cases values (?, ?)", [(x, value(x).tobytes()) for x in CASES]
        )
    base.close()


def read_sqlite(folder: Path) -> dict[int, np.ndarray]:
    """All rows."""
    base = sqlite3.connect(folder / "s.db")
    try:
        return {x: np.frombuffer(y) for x, y in base.execute("select x, y from cases")}
    finally:
        base.close()


def memory(folder: Path) -> Callable[[int], np.ndarray]:
    """The function, remembered by joblib."""
    import joblib

    return joblib.Memory(folder / "s", verbose=0).cache(value)


def write_joblib(folder: Path) -> None:
    """Each call."""
    for x in CASES:
        memory(folder)(x)


def read_joblib(folder: Path) -> dict[int, np.ndarray]:
    """Each call again; one whose file cannot be read is computed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {x: memory(folder)(x) for x in CASES}


STORES = {
    "meanfield": (write_meanfield, read_meanfield),
    "SQLite": (write_sqlite, read_sqlite),
    "joblib.Memory": (write_joblib, read_joblib),
}


def one_bit(folder: Path, store: str, flips: int) -> dict[str, int]:
    """Bits turned one at a time, anywhere in the store: what reading gives."""
    write, read = STORES[store]
    (folder / "whole").mkdir()
    write(folder / "whole")
    files = [f for f in sorted((folder / "whole").rglob("*")) if f.is_file() and f.suffix != ".py"]
    sizes, rng = np.array([f.stat().st_size for f in files]), np.random.default_rng(0)
    counts = {"right": 0, "named, or an error": 0, "silently wrong": 0}
    for _ in range(flips):
        shutil.copytree(folder / "whole", folder / "turned", dirs_exist_ok=True)
        file = files[rng.choice(len(files), p=sizes / sizes.sum())]
        turned = folder / "turned" / file.relative_to(folder / "whole")
        data = bytearray(turned.read_bytes())
        data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        turned.write_bytes(data)
        counts[_outcome(read, folder / "turned")] += 1
        shutil.rmtree(folder / "turned")
    return counts


def _outcome(read: Callable[[Path], dict[int, np.ndarray]], folder: Path) -> str:
    try:
        found = read(folder)
    except (ValueError, sqlite3.Error, OSError, EOFError, pickle.UnpicklingError):
        return "named, or an error"
    if not all(x in CASES and np.array_equal(y, value(x)) for x, y in found.items()):
        return "silently wrong"
    return "right" if len(found) == len(CASES) else "named, or an error"


def flushes(folder: Path, store: str) -> str | int:
    """Calls of fsync and fdatasync while cases are written; 0: a loss of power may lose them."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    code = f"from bench_faults import *; STORES[{store!r}][0](Path({str(folder)!r}))"
    paths = os.pathsep.join([str(Path(__file__).parent), str(ROOT)])
    command = ["strace", "-f", "-qq", "-e", "trace=fsync,fdatasync", sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return sum("sync(" in line for line in done.stderr.splitlines())


def segfaults() -> dict[str, str]:
    """Eight cases in two processes, of which one crashes: how many of the others are done."""
    from concurrent.futures import ProcessPoolExecutor

    from meanfield.sweeps import sweep

    def finished(futures: list[Any]) -> str:
        return f"{sum(f.exception() is None for f in futures)} of 7"

    ds = sweep(crash_at_five, {"x": CASES}, executor=2, progress=False)
    found = {"meanfield": f"{int((ds.status == 1).sum())} of 7"}
    with ProcessPoolExecutor(2) as pool:
        found["ProcessPoolExecutor"] = finished([pool.submit(crash_at_five, x) for x in CASES])
    if installed("joblib"):
        from joblib.externals.loky import get_reusable_executor

        with get_reusable_executor(2) as pool:
            found["loky"] = finished([pool.submit(crash_at_five, x) for x in CASES])
    if installed("distributed"):
        from distributed import Client, LocalCluster

        workers = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
        with LocalCluster(**workers) as cluster, Client(cluster) as client:
            found["dask"] = finished(client.map(crash_at_five, CASES, pure=False))
    return found


CHANGED = """
import sys, warnings
SCALE = {scale}
def helper(x):
    return {helper} * x
def f(x):
    return {{"y": {body} * SCALE * helper(x)}}
if __name__ == "__main__":
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            if sys.argv[1] == "meanfield":
                from meanfield.sweeps import sweep
                y = float(sweep(f, {{"x": [1.0]}}, store="s", progress=False)["y"][0])
            else:
                import joblib
                y = joblib.Memory("j", verbose=0).cache(f)(1.0)["y"]
        except ValueError:
            print("refused")
        else:
            print("computed again" if y == 2 else "warns" if said else "silently the old number")
"""


def changed_source(folder: Path, store: str) -> dict[str, str]:
    """What an engine does about numbers that were computed before a part of the source changed."""
    found = {}
    for part in ("body", "helper", "scale"):
        (folder / part).mkdir()
        for number in (1, 2):
            text = CHANGED.format(**({"body": 1, "helper": 1, "scale": 1} | {part: number}))
            (folder / part / "script.py").write_text(text)
            done = subprocess.run(
                [sys.executable, "script.py", store], cwd=folder / part, capture_output=True,
                text=True, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
            found[part] = done.stdout.strip()
    return found


def installed(name: str) -> str | None:
    """The version of a package."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flips", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("faults.json"))
    options = parser.parse_args()
    packages = ("joblib", "xyzpy", "dask", "ray")
    record: dict[str, Any] = {
        "versions": {name: installed(name) or "not installed" for name in packages},
        "flips": options.flips,
    }
    with tempfile.TemporaryDirectory() as name:
        for store in STORES:
            if store.startswith("joblib") and not installed("joblib"):
                continue
            folders = [Path(name) / f"{store} {i}" for i in range(2)]
            for folder in folders:
                folder.mkdir()
            record[store] = {
                "one bit turned": one_bit(folders[0], store, options.flips),
                "flushes of 8 cases": flushes(folders[1], store),
            }
        record["a part of the source changed"] = {
            store: changed_source(Path(tempfile.mkdtemp(dir=name)), store)
            for store in ("meanfield", "joblib")
            if store == "meanfield" or installed(store)
        }
    record["a case that crashes"] = segfaults()
    options.out.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
