"""Flows on the sphere: time and memory against n, and compared with plain loops.

    python tests/benchmarks/bench_flow.py [--sizes N ...] [--steps K] [--json FILE]

d = 3, V = A = I, uniform weights, RK4 with h = 0.05, float64. Each size runs in a process of its
own; peak is its largest resident memory, base what it was before the flow. Times are CPU seconds.
The ratios are CPU seconds of a loop over those of `dynamics.flow`, medians of interleaved runs:
`torch` is a vectorised loop at n = 2,000 that keeps the n × n matrix; `numpy` a script with a loop
over particles at n = 64.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, dynamics, sampling

STEP = 0.05


def start(n: int) -> torch.Tensor:
    return sampling.sphere(n, 3, generator=torch.Generator().manual_seed(0))


def ours(x: torch.Tensor, steps: int) -> torch.Tensor:
    eye = torch.eye(3, dtype=x.dtype)
    F = SelfAttention(AttentionParameters.from_bilinear(eye, eye))
    ds = dynamics.flow(
        F, ParticleMeasure(x), [0.0, steps * STEP], method="rk4", step=STEP, constraint="sphere"
    )
    return torch.as_tensor(ds.points.values[-1])


def vectorised(x: torch.Tensor, steps: int) -> torch.Tensor:
    """What a person writes in torch."""

    def velocity(y: torch.Tensor) -> torch.Tensor:
        y = y / y.norm(dim=-1, keepdim=True)
        v = (y @ y.T).softmax(-1) @ y
        return v - (v * y).sum(-1, keepdim=True) * y

    for _ in range(steps):
        k1 = velocity(x)
        k2 = velocity(x + STEP / 2 * k1)
        k3 = velocity(x + STEP / 2 * k2)
        k4 = velocity(x + STEP * k3)
        x = x + STEP / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        x = x / x.norm(dim=-1, keepdim=True)
    return x


def by_particle(x: torch.Tensor, steps: int) -> torch.Tensor:
    """The published figure scripts' way: NumPy, one particle after the other."""

    def velocity(y: np.ndarray) -> np.ndarray:
        y = y / np.linalg.norm(y, axis=1)[:, None]
        out = np.zeros_like(y)
        for i in range(len(y)):
            weights = np.exp(y @ y[i])
            v = weights @ y / weights.sum()
            out[i] = v - (v @ y[i]) * y[i]
        return out

    y = x.numpy()
    for _ in range(steps):
        k1 = velocity(y)
        k2 = velocity(y + STEP / 2 * k1)
        k3 = velocity(y + STEP / 2 * k2)
        k4 = velocity(y + STEP * k3)
        y = y + STEP / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        y = y / np.linalg.norm(y, axis=1)[:, None]
    return torch.as_tensor(y)


def seconds(function: Callable[[torch.Tensor, int], torch.Tensor], n: int, steps: int) -> float:
    x = start(n)
    before = time.process_time()
    function(x, steps)
    return time.process_time() - before


def beside(function: Callable[[torch.Tensor, int], torch.Tensor], n: int, steps: int) -> dict:
    """The ratio of CPU seconds, and how far the two ends are apart."""
    gap = float((function(start(n), 2) - ours(start(n), 2)).abs().max())  # also the warm-up
    ratios = [seconds(function, n, steps) / seconds(ours, n, steps) for _ in range(3)]
    return {"n": n, "steps": steps, "ratio": statistics.median(ratios), "gap_after_2": gap}


def memory(name: str) -> float:
    """MiB; VmRSS is now, VmHWM the largest."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(x for x in lines if x.startswith(name)).split()[1]) / 1024


def one(n: int, steps: int) -> dict:
    ours(start(64), 2)
    base = memory("VmRSS")
    spent = seconds(ours, n, steps)
    threads = torch.get_num_threads()
    row = {"n": n, "steps": steps, "cpu_s": spent, "cpu_s_per_step": spent / steps}
    return row | {"base_mb": base, "peak_mb": memory("VmHWM"), "threads": threads}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="*", default=[1000, 2000, 5000, 10000])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one, options.steps)))
        return
    results: dict = {"machine": f"{platform.machine()}, torch {torch.__version__}"}
    for n in options.sizes:
        command = [sys.executable, __file__, "--one", str(n), "--steps", str(options.steps)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        results[f"flow-{n}"] = json.loads(done.stdout)
        print(results[f"flow-{n}"])
    results["torch"] = beside(vectorised, 2000, 10)
    results["numpy"] = beside(by_particle, 64, 100)
    print(results["torch"], results["numpy"])
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
