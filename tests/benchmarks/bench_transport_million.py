"""Column generation up to a million points, and answers that are known there; JSON and a table.

    python tests/benchmarks/bench_transport_million.py [--sizes N ...] [--dims 2 3]
        [--cases NAME ...] [--pot-up-to N] [--no-page]

Samples (normal, one shifted by 0.5) are solved by column generation at each size: time, width,
memory, and the power of n with which time grows. *Pairing broken* is a known answer: an image
under the gradient of a convex function, its atoms shuffled. The cases by weights (uniform,
dirichlet, softmax; another shift and scale) are held against POT's dense simplex with its matrix
of costs, in time and in memory. Each case runs in a process of its own; importing does not count.
The rounds are logged on stderr.

Cases that were measured before stay in the JSON, and in the table between two comments of
`.docs/performance.md`, until they are measured again. The default takes some minutes; a million
samples (`--sizes 1000000 --dims 2 --cases samples`) take about an hour.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import pathlib
import sys
import time

import numpy as np
from tables import in_own_process, machine, peak_megabytes, show

CASES, WEIGHTED = ("samples", "pairing_broken"), ("uniform", "dirichlet", "softmax")
Cloud = tuple[np.ndarray, np.ndarray]


def pairing_broken(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Moves below half the distance of neighbours."""
    from scipy.spatial import cKDTree

    apart = cKDTree(x).query(x, k=2)[0][:, 1]
    way = rng.normal(size=x.shape)
    return x + 0.24 * apart[:, None] * way / np.linalg.norm(way, axis=1, keepdims=True)


def clouds(case: str, n: int, d: int) -> tuple[Cloud, Cloud, float | None]:
    """Two clouds with weights, and their distance where it is known."""
    rng = np.random.default_rng(1)
    x, a = rng.normal(size=(n, d)), np.full((2, n), 1 / n)
    if case == "pairing_broken":
        y = pairing_broken(x, rng)
        truth = float(np.sqrt(np.square(y - x).sum(-1).mean()))
        return (x, a[0]), (y[rng.permutation(n)], a[1]), truth
    if case == "samples":
        return (x, a[0]), (rng.normal(size=(n, d)) + 0.5, a[1]), None
    y = 1.3 * rng.normal(size=(n, d)) + 0.5
    if case == "dirichlet":
        a = rng.dirichlet(np.ones(n), size=2)
    elif case == "softmax":
        a = np.exp(3 * rng.normal(size=(2, n)))
        a /= a.sum(1, keepdims=True)
    return (x, a[0]), (y, a[1]), None


def ours(case: str, n: int, d: int) -> dict:
    import torch

    from meanfield.transport import solve_w2

    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    mu, nu, truth = clouds(case, n, d)
    solve_w2(mu[0][:40], nu[0][:50])
    before, cpu, wall = peak_megabytes(), time.process_time(), time.perf_counter()
    found = solve_w2(mu, nu, method="column generation", strict=False)
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
        "peak_megabytes": peak_megabytes(),
        "extra_megabytes": peak_megabytes() - before,
    }


def pot(case: str, n: int, d: int) -> dict:
    import ot
    from scipy.spatial.distance import cdist

    (x, a), (y, b), _ = clouds(case, n, d)
    ot.emd2(a[:50] / a[:50].sum(), b[:50] / b[:50].sum(), cdist(x[:50], y[:50]))
    before, cpu, wall = peak_megabytes(), time.process_time(), time.perf_counter()
    value = ot.emd2(a, b, cdist(x, y, "sqeuclidean"), numItermax=10**12)
    return {
        "value": float(np.sqrt(value)),
        "cpu_seconds": time.process_time() - cpu,
        "wall_seconds": time.perf_counter() - wall,
        "extra_megabytes": peak_megabytes() - before,
    }


def measured(case: str, n: int, d: int, pot_up_to: int) -> dict:
    found = {"case": case, "n": n, "d": d, "machine": machine()}
    found |= in_own_process(ours, case, n, d)
    if case in WEIGHTED and n <= pot_up_to:
        peer = in_own_process(pot, case, n, d)
        found |= {
            "pot": peer,
            "times_faster": peer["cpu_seconds"] / found["cpu_seconds"],
            "memory_ratio": found["extra_megabytes"] / peer["extra_megabytes"],
        }
    return found


def key(row: dict) -> tuple:
    return row["d"], row["case"] != "samples", row["case"], row["n"], row["method"]


def seconds_of(row: dict) -> float:
    """Of both processes, where the first was killed and a second one went on."""
    return float(row["cpu_seconds"] + row.get("cpu_seconds_before_the_kill", 0))


def table(rows: list[dict]) -> str:
    """A line for each case without POT; beside samples the power of n since the size before."""
    lines = ["| clouds | d | n | by | CPU s | growth | relative width | MB | truth inside |"]
    lines.append("|---" * 9 + "|")
    before: dict[int, dict] = {}
    rows = [row for row in rows if row["case"] not in WEIGHTED]
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
    parser.add_argument("--dims", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--cases", nargs="+", default=CASES, choices=(*CASES, *WEIGHTED))
    parser.add_argument("--pot-up-to", type=int, default=10_000, help="atoms")
    parser.add_argument("--quick", action="store_true", help="small sizes, nothing written")
    parser.add_argument("--no-page", action="store_true")
    file = pathlib.Path(__file__).with_suffix(".json")
    args = parser.parse_args()
    if args.quick:
        args.sizes, args.dims, args.cases = [2_000], [2], [*CASES, "softmax"]
    held = (
        {}
        if args.quick or not file.exists()
        else {key(t): t for t in json.loads(file.read_text())}
    )
    for d, case, n in itertools.product(args.dims, args.cases, args.sizes):
        row = measured(case, n, d, args.pot_up_to)
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
