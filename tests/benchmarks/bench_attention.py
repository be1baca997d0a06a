"""Memory and time of a local constant as n grows.

    python tests/benchmarks/bench_attention.py [--euclidean N ...] [--wasserstein N ...]
        [--max-steps K] [--device cpu] [--json FILE] [--plot FIGURE.png]

d = 64, one head, float32, uniform weights, standard normal atoms and entries of standard deviation
1/8. Each in a process of its own; peak is its largest resident memory, base what it was before the
measure was made. OMP_NUM_THREADS rules the threads. Results are merged into the JSON file by name.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from tables import in_own_process, machine, peak_megabytes

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention
from meanfield.linalg import Lanczos
from meanfield.lipschitz import local_lipschitz

DIM = 64


def problem(n: int, device: str) -> tuple[SelfAttention, ParticleMeasure]:
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(n, DIM, generator=generator)
    parameters = AttentionParameters.random(DIM, dtype=torch.float32, generator=generator)
    return SelfAttention(parameters.to(device)), ParticleMeasure(points.to(device))


def local(n: int, geometry: str, device: str, max_steps: int) -> dict[str, Any]:
    """One constant."""
    local_lipschitz(*problem(8, device), geometry=geometry)
    base = peak_megabytes()
    F, mu = problem(n, device)
    start = time.perf_counter()
    constant = local_lipschitz(
        F, mu, geometry=geometry, solver=Lanczos(max_steps=max_steps), strict=False
    )
    row = {
        "n": n,
        "geometry": geometry,
        "seconds": time.perf_counter() - start,
        "machine": machine(device),
        "base_mb": base,
        "peak_mb": peak_megabytes(),
        "value": float(constant.value),
        "error": float(constant.error),
        "converged": bool(constant.converged),
        "n_matvecs": constant.n_matvecs,
    }
    if device != "cpu":
        row["device_peak_mb"] = torch.cuda.max_memory_allocated() / 2**20
    return row


def figure(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    fig, axes = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for geometry in ("euclidean", "wasserstein"):
        rows = [r for r in results.values() if r["geometry"] == geometry]
        rows.sort(key=lambda r: r["n"])
        n = [r["n"] for r in rows]
        axes[0].loglog(n, [r["peak_mb"] for r in rows], "o-", label=geometry)
        axes[1].loglog(n, [r["seconds"] for r in rows], "o-", label=geometry)
    sizes = sorted({r["n"] for r in results.values()})
    axes[0].loglog(sizes, [4 * s * s / 2**20 for s in sizes], "k:", label="one n × n matrix")
    axes[0].axhline(1536, color="0.6", lw=1, label="1.5 GiB")
    if sizes:
        last = max(results.values(), key=lambda r: r["n"])
        axes[1].loglog(
            sizes, [last["seconds"] * (s / last["n"]) ** 2 for s in sizes], "k:", label="n²"
        )
    for ax, label in zip(axes, ("peak resident memory [MiB]", "time [s]"), strict=True):
        ax.set(xlabel="particles n", ylabel=label)
        ax.legend()
    fig.savefig(path, dpi=150)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    sizes = [2**k for k in range(10, 17)]
    parser.add_argument("--euclidean", type=int, nargs="*", default=sizes)
    parser.add_argument("--wasserstein", type=int, nargs="*", default=sizes)
    parser.add_argument("--max-steps", type=int, default=300)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, default=Path(__file__).with_name("attention.json"))
    parser.add_argument("--plot", type=Path, help="figure of memory and time against n")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    results = json.loads(args.json.read_text()) if args.json.exists() else {}
    for geometry in ("euclidean", "wasserstein"):
        for n in getattr(args, geometry):
            row = in_own_process(local, n, geometry, args.device, args.max_steps)
            results[f"{geometry} {n}"] = row
            print(row, flush=True)
            args.json.write_text(json.dumps(results, indent=1) + "\n")
    if args.plot:
        figure(results, args.plot)


if __name__ == "__main__":
    main()
