"""Many small problems, the line, perturbations: CPU seconds, some beside POT's; writes JSON.

    python tests/benchmarks/bench_transport_small.py [--quick] [--out FILE]

Of the process, all threads, the least of three. Single pairs: `bench_transport_ratios.py`.
"""

from __future__ import annotations

import argparse
import json
import pathlib

import numpy as np
import torch
from tables import least

from meanfield.measures import ParticleMeasure
from meanfield.transport import solve_conditional_w2, solve_w2


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

    ours, theirs = solve_conditional_w2(mu, nu), loop()
    cpu, pot_cpu = least((lambda: solve_conditional_w2(mu, nu), loop), lasting=0)
    return {
        "case": f"conditional, {groups} groups of {size}, {'weighted' if weighted else 'uniform'}",
        "value": float(ours.value),
        "relative_width": float(ours.relative_width),
        "cpu_seconds": cpu,
        "pot_value": theirs,
        "pot_emd2_loop_cpu_seconds": pot_cpu,
        "times_faster_cpu": pot_cpu / cpu,
    }


def single(name: str, mu: ParticleMeasure, nu: ParticleMeasure) -> dict:
    result, (cpu,) = solve_w2(mu, nu), least([lambda: solve_w2(mu, nu)], lasting=0)
    return {
        "case": name,
        "method": result.method,
        "relative_width": float(result.relative_width.max()),
        "cpu_seconds": cpu,
    }


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
