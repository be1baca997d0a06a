"""Column generation up to a million points, and answers that are known there; JSON and a table.

    python tests/benchmarks/bench_transport_million.py [--sizes N ...] [--dims 2 3]
        [--cases NAME ...] [--known-n N] [--no-page]

Samples (normal, one shifted by 0.5) are solved by column generation at each size: time, width,
memory, and the power of n with which time grows. Known answers are images under gradients of
convex functions whose atoms are shuffled. Each case runs in a process of its own; the rounds are
logged on stderr.

Cases that were measured before stay in the JSON, and in the table between two comments of
`.docs/performance.md`, until they are measured again. The default takes some minutes; a million
samples (`--sizes 1000000 --dims 2 --cases samples`) take about an hour.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import pathlib
import resource
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
from tables import machine, show

Clouds = tuple[np.ndarray, np.ndarray]
KNOWN: dict[str, Callable[[np.ndarray, np.random.Generator], np.ndarray]] = {}


def known(function: Callable) -> Callable:
    """Images of x under a gradient of a convex function."""
    KNOWN[function.__name__] = function
    return function


@known
def shift(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return x + 0.5


@known
def linear(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    half = rng.normal(size=(x.shape[1],) * 2)
    return x @ (np.eye(x.shape[1]) + 0.3 * half @ half.T)


@known
def separable(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return x + 0.4 * np.tanh(2 * x)


@known
def pairing_broken(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Moves below half the distance of neighbours."""
    from scipy.spatial import cKDTree

    apart = cKDTree(x).query(x, k=2)[0][:, 1]
    way = rng.normal(size=x.shape)
    return x + 0.24 * apart[:, None] * way / np.linalg.norm(way, axis=1, keepdims=True)


def clouds(name: str, n: int, d: int) -> tuple[Clouds, float | None]:
    """Two clouds, and their distance where it is known."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(n, d))
    if name not in KNOWN:
        return (x, rng.normal(size=(n, d)) + 0.5), None
    y = KNOWN[name](x, rng)
    truth = float(np.sqrt(np.square(y - x).sum(-1).mean()))
    return (x, y[rng.permutation(n)]), truth


def solve(name: str, n: int, d: int) -> dict:
    import torch

    from meanfield.transport import solve_w2

    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    (x, y), truth = clouds(name, n, d)
    solve_w2(x[:40], y[:50])
    cpu, wall = time.process_time(), time.perf_counter()
    found = solve_w2(x, y, method="column generation", strict=False)
    contains = truth is None or (found.lower <= truth * (1 + 1e-14) and truth <= found.upper)
    return {
        "method": found.method,
        "value": float(found.value),
        "relative_width": float(found.relative_width),
        "converged": bool(found.converged),
        "truth": truth,
        "contains_truth": bool(contains),
        "cpu_seconds": time.process_time() - cpu,
        "wall_seconds": time.perf_counter() - wall,
        "peak_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def in_own_process(*arguments: object) -> dict:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(solve, arguments)


def cases(args: argparse.Namespace) -> Iterator[dict]:
    for d in args.dims:
        for name in args.cases:
            for n in [args.known_n] if name in KNOWN else args.sizes:
                row = {"case": name, "n": n, "d": d, "machine": machine()}
                yield row | in_own_process(name, n, d)


def key(row: dict) -> tuple:
    return row["d"], row["case"] != "samples", row["case"], row["n"], row["method"]


def seconds_of(row: dict) -> float:
    """Of both processes, where the first was killed and a second one went on."""
    return float(row["cpu_seconds"] + row.get("cpu_seconds_before_the_kill", 0))


def table(rows: list[dict]) -> str:
    """A line for each case, and beside samples the power of n since the size before."""
    lines = ["| clouds | d | n | by | CPU s | growth | relative width | MB | truth inside |"]
    lines.append("|---" * 9 + "|")
    before: dict[int, dict] = {}
    for row in rows:
        growth, inside = "", "" if row["truth"] is None else str(row["contains_truth"]).lower()
        if row["case"] == "samples":
            less = before.get(row["d"])
            if less is not None:
                ratio = seconds_of(row) / seconds_of(less)
                growth = f"n^{np.log(ratio) / np.log(row['n'] / less['n']):.2f}"
            before[row["d"]] = row
        cells = (
            row["case"].replace("_", " "), row["d"], f"{row['n']:,}", row["method"],
            f"{seconds_of(row):,.3g}" if seconds_of(row) < 1000 else
            f"{seconds_of(row):,.0f}", growth, f"{row['relative_width']:.0e}",
            f"{row['peak_megabytes']:,.0f}", inside,
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    machines = "; ".join(dict.fromkeys(row["machine"] for row in rows))
    return "\n".join([*lines, "", f"On {machines}."])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 32_768, 100_000])
    parser.add_argument("--known-n", type=int, default=100_000, help="of known answers")
    parser.add_argument("--dims", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--cases", nargs="+", default=["samples", "pairing_broken"])
    parser.add_argument("--quick", action="store_true", help="small sizes, nothing written")
    parser.add_argument("--no-page", action="store_true")
    file = pathlib.Path(__file__).with_suffix(".json")
    args = parser.parse_args()
    if args.quick:
        args.sizes, args.known_n = [2_000, 4_000], 20_000
    held = (
        {}
        if args.quick or not file.exists()
        else {key(t): t for t in json.loads(file.read_text())}
    )
    for row in cases(args):
        print(json.dumps(row), flush=True)
        held[key(row)] = row
        rows = [held[k] for k in sorted(held)]
        if not args.quick:
            file.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))
    if not (args.quick or args.no_page):
        show(__file__, table(rows))


if __name__ == "__main__":
    main()
