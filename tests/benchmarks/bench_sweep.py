"""The overhead of a sweep, and its speed-up by several processes.

    python tests/benchmarks/bench_sweep.py [--quick] [--only NAME] [--out FILE]

Writes JSON: overhead per case of 10 ms with a store; seconds to write, resume and read 100,000 and
a million cases; 200 extensions by one case; how soon a second sweep in processes begins; speed of
2 worker processes and of a dask LocalCluster of 2 (if dask is installed) against one process, on
local Lipschitz constants. Run it on an idle machine with OMP_NUM_THREADS=1, which is what the
workers have; on a busy one the seconds of the processor (cpu_s) say more.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from meanfield import results
from meanfield.results import Variable
from meanfield.sweeps import Task, status, sweep


def ten_milliseconds(case_number: int) -> dict[str, float]:
    """Ten milliseconds of work by the processor's clock, and how long it really took."""
    start, cpu = time.perf_counter(), time.process_time()
    while time.process_time() - cpu < 0.01:
        pass
    values = {f"y{i}": float(case_number + i) for i in range(6)}
    cpu = time.process_time() - cpu
    return values | {"seconds": time.perf_counter() - start, "cpu": cpu}


TEN_MILLISECONDS = Task(
    ten_milliseconds,
    [
        *(Variable(f"y{i}", f"number {i}") for i in range(6)),
        Variable("seconds", "time on the wall", "s"),
        Variable("cpu", "time of the processor", "s"),
    ],
    name="ten milliseconds",
)


def arithmetic(a: np.ndarray, b: np.ndarray) -> dict[str, np.ndarray]:
    """Six numbers and a vector per case."""
    numbers = {f"y{i}": a * b + i for i in range(6)}
    return numbers | {"vector": np.multiply.outer(a + b, np.arange(8.0))}


ARITHMETIC = Task(
    arithmetic,
    [
        *(Variable(f"y{i}", f"number {i}") for i in range(6)),
        Variable("vector", "eight numbers", dims=("place",)),
    ],
    coords={"place": range(8)},
    batched=True,
    name="arithmetic",
)


def product(a: float, b: float) -> dict[str, float]:
    """Two numbers of a case."""
    return {"product": a * b, "sum": a + b}


ONE_BY_ONE = Task(product, [Variable("product", "a b"), Variable("sum", "a + b")], name="product")


def constant(n: int, repetition: int, seed: int) -> dict[str, float]:
    """The local Lipschitz constant of attention at n random particles in d = 32."""
    import torch

    from meanfield import AttentionParameters, ParticleMeasure, SelfAttention
    from meanfield.lipschitz import local_lipschitz

    generator = torch.Generator().manual_seed(seed)
    parameters = AttentionParameters.random(32, generator=generator)
    points = torch.randn(n, 32, generator=generator, dtype=torch.float64)
    found = local_lipschitz(SelfAttention(parameters), ParticleMeasure(points))
    return {"gain": float(found.value)}


CONSTANT = Task(constant, [Variable("gain", "local Lipschitz constant")], name="constant")


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what came out."""
    start = time.perf_counter()
    answer = run()
    return time.perf_counter() - start, answer


def overheads(folder: Path, cases: int) -> dict[str, Any]:
    """Of a short and a long sweep, and per case: what each further case adds."""
    sweep(TEN_MILLISECONDS, {"case_number": range(4)}, store=folder / "imports.zarr")
    short, long = (overhead(folder / f"{n}.zarr", n) for n in (cases // 6, cases))
    extra = long["outside_s"] - short["outside_s"]
    return {
        "short": short,
        "long": long,
        "per_case_of_10_ms": extra / (long["inside_s"] - short["inside_s"]),
    }


def overhead(store: Path, cases: int) -> dict[str, float]:
    """Everything that is not inside the function, relative to what is."""
    cpu = time.process_time()
    wall, ds = timed(lambda: sweep(TEN_MILLISECONDS, {"case_number": range(cases)}, store=store))
    cpu = time.process_time() - cpu
    inside = float(ds["seconds"].sum())
    return {
        "cases": cases,
        "files": status(store).n_files,
        "inside_s": inside,
        "outside_s": wall - inside,
        "overhead_wall": wall / inside - 1,
        "overhead_cpu": cpu / float(ds["cpu"].sum()) - 1,
        "load_average": os.getloadavg()[0],
    }


def many(folder: Path, cases: int, task: Task) -> dict[str, Any]:
    """Write many small cases, ask for them again, read them back."""
    grid = {"a": np.arange(cases // 100, dtype=float), "b": np.arange(100.0)}
    store = folder / f"{task.name} {cases}.sweep"
    cpu = time.process_time()
    written, ds = timed(lambda: sweep(task, grid, store=store))
    cpu = time.process_time() - cpu
    again, _ = timed(lambda: sweep(task, grid, store=store))
    read, back = timed(lambda: results.read_dataset(store))
    if not back.identical(ds):
        raise RuntimeError("what was read is not what was written")
    files = len(list(store.iterdir()))
    return {
        "cases": cases, "sweep_s": written, "cpu_s": cpu, "again_s": again, "read_s": read,
        "files": files,
    }  # fmt: skip


def extensions(folder: Path, count: int) -> dict[str, float]:
    """A grid that grows by one case at each call."""
    store, flushes, flush = folder / "extended.sweep", [], os.fsync
    cpu = time.process_time()

    def timed_flush(descriptor: int) -> None:
        flushes.append(timed(lambda: flush(descriptor))[0])

    def extend() -> None:
        for n in range(1, count + 1):
            sweep(ONE_BY_ONE, {"a": range(n), "b": [1]}, store=store, progress=False)

    os.fsync = timed_flush
    try:
        wall, _ = timed(extend)
    finally:
        os.fsync = flush
    return {
        "extensions": count,
        "seconds": wall,
        "cpu_s": time.process_time() - cpu,
        "flushes": len(flushes),
        "flushes_s": sum(flushes),
        "files": len(list(store.iterdir())),
    }


def second_start() -> dict[str, float]:
    """Seconds of a sweep of two cases in two processes: the first time, and after that."""
    import torch  # noqa: F401  the workers have it too

    def start() -> float:
        return timed(lambda: sweep(ONE_BY_ONE, {"a": [1, 2], "b": [1]}, executor=2))[0]

    return {"first_s": start(), "second_s": start(), "third_s": start()}


def processes(cases: int, repeats: int) -> dict[str, Any]:
    """One process, two worker processes, a dask cluster of two: interleaved, medians."""
    import torch

    torch.set_num_threads(1)
    grid = {"n": [256], "repetition": range(cases)}

    def run(executor: Any) -> float:
        settings = {"executor": executor, "batch_size": max(1, cases // 16)}
        return timed(lambda: sweep(CONSTANT, grid, **settings, progress=False))[0]

    runners: dict[str, Any] = {"one": None, "two_processes_with_their_start": 2}
    cluster = dask_client()
    if cluster is not None:
        runners["dask_of_two"] = cluster
    sweep(CONSTANT, {"n": [16], "repetition": range(8)}, executor=cluster, batch_size=1)
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(repeats):
        for name, executor in runners.items():
            seconds[name].append(run(executor))
    if cluster is not None:
        cluster.shutdown()
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    gains = [
        [a / b for a, b in zip(seconds["one"], times, strict=True)] for times in seconds.values()
    ]
    return {
        "cases": cases,
        "seconds": medians,
        "speedup": dict(zip(seconds, map(statistics.median, gains), strict=True)),
        "load_average": os.getloadavg()[0],
    }


def dask_client() -> Any:
    """A cluster of two processes with one thread each; None without dask."""
    try:
        from distributed import Client, LocalCluster
    except ImportError:
        return None
    cluster = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None)
    client = Client(cluster)
    client.run(__import__, "meanfield.lipschitz")
    return client


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("sweep.json"))
    parser.add_argument("--only", default="", help="part of the name of a measurement")
    options = parser.parse_args()
    small = 10 if options.quick else 1
    record: dict[str, Any] = {}
    if options.only and options.out.exists():  # the other parts stay
        record = json.loads(options.out.read_text())
    record["machine"] = f"{platform.machine()}, {os.cpu_count()} cores"
    with tempfile.TemporaryDirectory() as name:
        parts: dict[str, Callable[[], Any]] = {
            "overhead_of_10_ms_cases": lambda: overheads(Path(name), 3000 // small),
            "many_cases": lambda: many(Path(name), 100_000 // small, ONE_BY_ONE),
            "a_million_cases": lambda: many(Path(name), 1_000_000 // small, ONE_BY_ONE),
            "a_million_vectorised": lambda: many(Path(name), 1_000_000 // small, ARITHMETIC),
            "extensions": lambda: extensions(Path(name), 200 // small),
            "second_start": second_start,
            "processes": lambda: processes(256 // small, options.repeats),
        }
        for part, measure in parts.items():
            if options.only in part:
                record[part] = measure()
                options.out.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
