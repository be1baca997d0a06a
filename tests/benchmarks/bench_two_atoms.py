"""100,000 two-atom local constants in d = 8: one call against a loop of autodiff + SVD.

    python tests/benchmarks/bench_two_atoms.py [--cases N] [--out FILE]

Writes JSON: cases per second of both, interleaved, median of the repeats, and their ratio.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention
from meanfield.lipschitz import local_lipschitz


def problem(cases: int, dim: int) -> tuple[SelfAttention, ParticleMeasure]:
    generator = torch.Generator().manual_seed(0)
    parameters = AttentionParameters.random(dim, generator=generator)
    points = torch.randn(cases, 2, dim, generator=generator, dtype=torch.float64)
    ratio = -50 * torch.rand(cases, generator=generator, dtype=torch.float64)
    logs = torch.nn.functional.logsigmoid(torch.stack([ratio, -ratio], -1))
    return SelfAttention(parameters), ParticleMeasure(points, log_weights=logs)


def by_autodiff(F: SelfAttention, mu: ParticleMeasure) -> float:
    """One case as anybody would write it: jacrev, D^½JD^−½, SVD; and the field's Jacobian."""
    root = mu.weights.sqrt()
    J = torch.func.jacrev(lambda x: F(mu.replace(x)).points)(mu.points)
    J = root[:, None, None, None] * J / root[None, None, :, None]
    n, d = mu.points.shape
    particle = torch.linalg.matrix_norm(J.reshape(n * d, n * d), 2)
    gamma = F.field(mu)
    D = torch.func.vmap(torch.func.jacrev(lambda x: gamma(x[None])[0]))(mu.points)
    return float(torch.maximum(particle, torch.linalg.matrix_norm(D, 2).max()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--sample", type=int, default=200, help="cases of the loop")
    parser.add_argument("--repeats", type=int, default=5)
    default = Path(__file__).with_name("two_atoms.json")
    parser.add_argument("--out", type=Path, default=default)
    options = parser.parse_args()

    F, mu = problem(options.cases, dim=8)
    local_lipschitz(F, mu[:1000])
    by_autodiff(F, mu[0])
    ours, theirs, worst = [], [], 0.0
    for _ in range(options.repeats):
        start = time.perf_counter()
        found = local_lipschitz(F, mu)
        ours.append(options.cases / (time.perf_counter() - start))
        start = time.perf_counter()
        loop = [by_autodiff(F, mu[i]) for i in range(options.sample)]
        theirs.append(options.sample / (time.perf_counter() - start))
        ratio = found.value[: options.sample] / torch.tensor(loop, dtype=torch.float64)
        worst = max(worst, float((ratio - 1).abs().max()))
    record = {
        "what": "local constants of two-atom measures, d = 8, float64, both components",
        "cases": options.cases,
        "cases_per_second": statistics.median(ours),
        "loop_cases_per_second": statistics.median(theirs),
        "ratio": statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
        "largest_relative_difference": worst,
        "all_converged": bool(found.converged.all()),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    options.out.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
