"""Many small problems, the line, perturbations, single pairs; ratios to POT; writes JSON.

    python tests/benchmarks/bench_transport_small.py [--quick] [--out FILE]

CPU seconds of the process (all threads) and wall seconds, best of three.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from meanfield.measures import ParticleMeasure
from meanfield.transport import solve_conditional_w2, solve_w2


def timed(function: Callable[[], Any], repeats: int = 3) -> tuple[Any, float, float]:
    walls, cpus = [], []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        result = function()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return result, min(cpus), min(walls)


def conditional(groups: int, size: int, weighted: bool, rng: np.random.Generator) -> dict:
    import ot
    from scipy.spatial.distance import cdist

    n = groups * size
    positions = np.repeat((np.arange(groups) + 1) / groups, size)
    x, y = rng.normal(size=(2, n, 16))
    shares = np.full((2, groups, size), 1 / size)
    if weighted:
        shares = rng.dirichlet(np.ones(size), size=(2, groups))
    mu, nu = (
        ParticleMeasure(
            torch.as_tensor(p),
            torch.as_tensor(s.ravel() / groups),
            positions=torch.as_tensor(positions),
        )
        for p, s in zip((x, y), shares, strict=True)
    )

    def loop() -> float:
        total = 0.0
        for k in range(groups):
            own = slice(k * size, (k + 1) * size)
            cost = cdist(x[own], y[own], "sqeuclidean")
            total += ot.emd2(shares[0, k], shares[1, k], cost) / groups
        return total**0.5

    ours, cpu, wall = timed(lambda: solve_conditional_w2(mu, nu))
    theirs, pot_cpu, pot_wall = timed(loop, 1)
    return {
        "case": f"conditional, {groups} groups of {size}, {'weighted' if weighted else 'uniform'}",
        "value": float(ours.value),
        "relative_width": float(ours.relative_width),
        "cpu_seconds": cpu,
        "wall_seconds": wall,
        "pot_value": theirs,
        "pot_emd2_loop_cpu_seconds": pot_cpu,
        "times_faster_cpu": pot_cpu / cpu,
        "times_faster_wall": pot_wall / wall,
    }


def single(name: str, mu: ParticleMeasure, nu: ParticleMeasure, **settings: Any) -> dict:
    result, cpu, wall = timed(lambda: solve_w2(mu, nu, **settings))
    widest = float(result.relative_width.max())
    return {
        "case": name,
        "method": result.method,
        "relative_width": widest,
        "cpu_seconds": cpu,
        "wall_seconds": wall,
    }


def beside_pot(name: str, x: np.ndarray, y: np.ndarray) -> dict:
    import ot
    from scipy.spatial.distance import cdist

    weights = np.full(len(x), 1 / len(x))
    found = single(name, *(ParticleMeasure(torch.as_tensor(t)) for t in (x, y)))
    _, cpu, _ = timed(
        lambda: ot.emd2(weights, weights, cdist(x, y, "sqeuclidean"), numItermax=10**12)
    )
    return found | {"pot_cpu_seconds": cpu, "times_faster_cpu": cpu / found["cpu_seconds"]}


def cases(quick: bool) -> list[dict]:
    rng = np.random.default_rng(0)
    part = 10 if quick else 1

    def measure(x: np.ndarray, a: np.ndarray | None = None) -> ParticleMeasure:
        return ParticleMeasure(torch.as_tensor(x), None if a is None else torch.as_tensor(a))

    found = [
        conditional(10_000 // part, 8, False, rng),
        conditional(10_000 // part, 8, True, rng),
        conditional(100 // part, 300, False, rng),
        conditional(100 // part, 300, True, rng),
    ]
    n = 1_000_000 // part
    line = [measure(rng.normal(size=(n, 1)), rng.dirichlet(np.ones(n))) for _ in range(2)]
    found.append(single(f"line, n = {n}, weighted", *line))
    n = 100_000 // part
    x = rng.normal(size=(n, 16))
    for size in (1e-6, 1e-2):
        y = x + size * rng.normal(size=x.shape)
        found.append(single(f"perturbation {size:g}, n = {n}, d = 16", measure(x), measure(y)))
    for law, size, d in (("normal", 100, 8), ("normal", 400, 8), ("t", 3000 // part, 8)):
        x, y = rng.normal(size=(2, size, d))
        if law == "t":  # heavy tails: a few far atoms are all of the distance
            x, y = rng.standard_t(1.5, size=(2, size, d))
        found.append(beside_pot(f"one pair, {law}, n = {size}, d = {d}", x, y))
    pairs = [measure(rng.normal(size=(n, 2, 8))) for _ in range(2)]
    found.append(single(f"{n} pairs of two atoms, d = 8", *pairs))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    here = pathlib.Path(__file__)
    parser.add_argument("--out", type=pathlib.Path, default=here.with_suffix(".json"))
    args = parser.parse_args()
    solve_w2(torch.zeros(3, 2), torch.ones(4, 2))  # imports
    report = {"torch_threads": torch.get_num_threads(), "cases": cases(args.quick)}
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    for case in report["cases"]:
        print(json.dumps(case))


if __name__ == "__main__":
    main()
