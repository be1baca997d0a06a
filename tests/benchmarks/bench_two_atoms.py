"""100,000 two-atom local constants: one call against batched automatic differentiation.

    python tests/benchmarks/bench_two_atoms.py [--cases N] [--out FILE]

The peer is what an expert writes: `vmap(jacrev(...))` over the whole batch and `svdvals`, for both
components and without evidence. Also the latency of one call with two atoms. Writes JSON: medians
of CPU seconds (of the process, all threads), interleaved, and their ratio.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention
from meanfield.lipschitz import local_lipschitz


def problem(cases: int, dim: int) -> tuple[SelfAttention, ParticleMeasure]:
    generator = torch.Generator().manual_seed(0)
    parameters = AttentionParameters.random(dim, generator=generator)
    points = torch.randn(cases, 2, dim, generator=generator, dtype=torch.float64)
    ratio = -50 * torch.rand(cases, generator=generator, dtype=torch.float64)
    logs = torch.nn.functional.logsigmoid(torch.stack([ratio, -ratio], -1))
    return SelfAttention(parameters), ParticleMeasure(points, log_weights=logs)


def by_autodiff(F: SelfAttention, mu: ParticleMeasure) -> Tensor:
    """Both components of every case: a bare layer in torch, its Jacobians, their norms."""
    par = F.parameters
    A, V = par.A[0], par.V[0]

    def field(x: Tensor, points: Tensor, logs: Tensor) -> Tensor:
        return torch.softmax(x @ A.T @ points.T + logs, -1) @ points @ V.T

    def whole(points: Tensor, logs: Tensor) -> Tensor:
        return field(points, points, logs)

    J = torch.func.vmap(torch.func.jacrev(whole))(mu.points, mu.log_weights)
    root = (0.5 * mu.log_weights).exp()
    J = root[:, :, None, None, None] * J / root[:, None, None, :, None]
    n, d = mu.points.shape[-2:]
    particle = torch.linalg.svdvals(J.reshape(-1, n * d, n * d))[:, 0]
    each = torch.func.vmap(torch.func.jacrev(field), in_dims=(0, None, None))
    D = torch.func.vmap(each)(mu.points, mu.points, mu.log_weights)
    return torch.maximum(particle, torch.linalg.svdvals(D)[..., 0].amax(-1))


def one_dimension(cases: int, dim: int, repeats: int) -> dict[str, Any]:
    F, mu = problem(cases, dim)
    runs: dict[str, list[float]] = {"ours": [], "theirs": []}
    answers = {}
    for _ in range(repeats + 1):
        for name, work in (
            ("ours", lambda: local_lipschitz(F, mu).value),
            ("theirs", lambda: by_autodiff(F, mu)),
        ):
            start = time.process_time()
            answers[name] = work()
            runs[name].append(time.process_time() - start)
    ours, theirs = (statistics.median(runs[name][1:]) for name in ("ours", "theirs"))
    # Weights of e^−50: the peer's J holds e^−25 beside e^25, its SVD the rounding of that.
    return {
        "dim": dim,
        "cases": cases,
        "seconds": ours,
        "autodiff_seconds": theirs,
        "autodiff_over_ours": theirs / ours,
        "median_relative_difference": float(
            (answers["ours"] / answers["theirs"] - 1).abs().median()
        ),
    }


def latency(repeats: int) -> float:
    """Milliseconds of one call with two atoms in the plane, median."""
    F, mu = problem(1, 2)
    one, times = mu[0], []
    for _ in range(100 * repeats):
        start = time.perf_counter()
        local_lipschitz(F, one)
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=5)
    default = Path(__file__).with_name("two_atoms.json")
    parser.add_argument("--out", type=Path, default=default)
    options = parser.parse_args()
    record = {
        "what": "local constants of two-atom measures, float64, both components; CPU seconds",
        "rows": [one_dimension(options.cases, dim, options.repeats) for dim in (2, 8)],
        "one_call_milliseconds": latency(options.repeats),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    options.out.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
