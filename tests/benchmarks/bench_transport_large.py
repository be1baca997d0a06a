"""Column generation against POT's dense simplex, each in its own process; writes JSON.

    python tests/benchmarks/bench_transport_large.py [n ...] [--dense-up-to N] [--out FILE]

CPU seconds and peak memory include the cost matrix where there is one; importing does not count.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import pathlib
import platform
import resource
import statistics
import time

import numpy as np

KINDS = ("uniform", "dirichlet", "softmax")


def problem(kind: str, n: int, d: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(n, d)), 1.3 * rng.normal(size=(n, d)) + 0.5
    a = b = np.ones(n) / n
    if kind == "dirichlet":
        a, b = rng.dirichlet(np.ones(n)), rng.dirichlet(np.ones(n))
    elif kind == "softmax":
        a, b = np.exp(3 * rng.normal(size=n)), np.exp(3 * rng.normal(size=n))
        a, b = a / a.sum(), b / b.sum()
    return x, y, a, b


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def ours(kind: str, n: int, d: int, time_limit: float | None) -> dict:
    import torch

    from meanfield.measures import ParticleMeasure
    from meanfield.transport import solve_w2

    torch.set_num_threads(1)
    x, y, a, b = (torch.as_tensor(t) for t in problem(kind, n, d))
    solve_w2(x[:40], y[:50])
    before, cpu, wall = peak_megabytes(), time.process_time(), time.perf_counter()
    mu, nu = ParticleMeasure(x, a), ParticleMeasure(y, b)
    result = solve_w2(mu, nu, method="column generation", time_limit=time_limit, strict=False)
    return {
        "value": float(result.value),
        "relative_width": float(result.relative_width),
        "method": result.method,
        "cpu_seconds": time.process_time() - cpu,
        "wall_seconds": time.perf_counter() - wall,
        "extra_megabytes": peak_megabytes() - before,
    }


def pot(kind: str, n: int, d: int, _: float | None) -> dict:
    import ot
    from scipy.spatial.distance import cdist

    x, y, a, b = problem(kind, n, d)
    ot.emd2(a[:50] / a[:50].sum(), b[:50] / b[:50].sum(), cdist(x[:50], y[:50]))
    before, cpu, wall = peak_megabytes(), time.process_time(), time.perf_counter()
    value = ot.emd2(a, b, cdist(x, y, "sqeuclidean"), numItermax=10**12)
    return {
        "value": float(np.sqrt(value)),
        "cpu_seconds": time.process_time() - cpu,
        "wall_seconds": time.perf_counter() - wall,
        "extra_megabytes": peak_megabytes() - before,
    }


def in_own_process(function, *arguments) -> dict:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("sizes", type=int, nargs="*", default=[10_000])
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--dims", default="2,16")
    parser.add_argument("--dense-up-to", type=int, default=10_000)
    parser.add_argument("--time-limit", type=float, default=None)
    here = pathlib.Path(__file__)
    parser.add_argument("--out", type=pathlib.Path, default=here.with_suffix(".json"))
    args = parser.parse_args()
    cases = []
    for n in args.sizes:
        for d in map(int, args.dims.split(",")):
            for kind in args.kinds.split(","):
                case = {"n": n, "d": d, "weights": kind}
                case["ours"] = in_own_process(ours, kind, n, d, args.time_limit)
                if n <= args.dense_up_to:
                    case["pot"] = in_own_process(pot, kind, n, d, None)
                    case["times_faster"] = case["pot"]["cpu_seconds"] / case["ours"]["cpu_seconds"]
                    case["memory_ratio"] = (
                        case["ours"]["extra_megabytes"] / case["pot"]["extra_megabytes"]
                    )
                print(json.dumps(case), flush=True)
                cases.append(case)
                ratios = [c["times_faster"] for c in cases if "times_faster" in c]
                median = statistics.median(ratios) if ratios else None
                report = {
                    "machine": platform.machine(),
                    "median_times_faster": median,
                    "cases": cases,
                }
                args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
