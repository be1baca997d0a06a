"""How far certified bounds are above the truth, at an input and over a ball around it.

    python tests/benchmarks/bench_balls.py [--families layernormed adversarial minilm] [--out FILE]

Ratios to the local constant at the input: `local_upper`. Ratios to the largest constant that
ascent finds within ε (relative to the tokens' root mean square norm): `ball_upper`, for tokens of
equal weight. The truth over a ball is a lower bound of the supremum, so these ratios are upper
bounds of what is lost. Large layers are not
factored; beside the certain bound there is the one with the constant that was measured.
Quantiles over the inputs of a family go to JSON. MiniLM needs its package, and MEANFIELD_DATA a
folder with the text.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_certain import Case, adversarial, layers_of_minilm
from torch import Tensor

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention
from meanfield.layers import LayerNorm
from meanfield.linalg import Lanczos
from meanfield.lipschitz import LocalLipschitz, ball_upper, local_lipschitz
from meanfield.measures import MeasureMap

F64 = torch.float64
EPSILONS = (1e-3, 1e-2, 1e-1)


def layernormed() -> Iterator[Case]:
    """Random layers at tokens of length √d, d = 16, two heads, n = 16; half of them masked."""
    for seed in range(24):
        g = torch.Generator().manual_seed(seed)
        par = AttentionParameters.random(16, n_heads=2, biases=True, generator=g)
        norm = LayerNorm(torch.ones(16, dtype=F64))
        X = torch.randn(16, 16, dtype=F64, generator=g)
        F, mu = SelfAttention(par, causal=bool(seed % 2)), ParticleMeasure.from_sequence(X)
        yield f"seed {seed}", F, norm(mu)


def minilm(n: int = 32) -> Iterator[Case]:
    return layers_of_minilm((start, n) for start in (0, 10 * n))


FAMILIES = {
    "layernormed": layernormed,
    "adversarial": partial(adversarial, (2, 5, 12, 40), (0.5, 1.0, 1.5, 2.5)),
    "minilm": minilm,
}


def constant(F: MeasureMap, mu: ParticleMeasure) -> LocalLipschitz:
    return local_lipschitz(F, mu, rtol=1e-3, upper_rtol=math.inf, solver=Lanczos(), strict=False)


def climbed(F: MeasureMap, mu: ParticleMeasure, eps: float, rounds: int = 8) -> float:
    """The largest constant of tokens within ε that ascent along the top direction finds."""
    at, best, place = constant(F, mu), 0.0, mu
    for k in range(rounds):
        best = max(best, float(at.value))
        # For equal weights the weighted direction is the displacement, up to a factor.
        slope = gradient(F, place, at.direction)
        step = eps * 0.7**k * slope / slope.norm(dim=-1, keepdim=True).clamp_min(1e-300)
        moved = place.points + 2 * step - mu.points
        moved = moved * (eps / moved.norm(dim=-1, keepdim=True).clamp_min(eps))
        place = mu.replace(mu.points + moved)
        at = constant(F, place)
    return max(best, float(at.value))


def gradient(F: MeasureMap, mu: ParticleMeasure, along: Tensor) -> Tensor:
    """Of |J(x)v| in x."""

    def size(x: Tensor) -> Tensor:
        return torch.func.jvp(lambda y: F(mu.replace(y)).points, (x,), (along,))[1].norm()

    return torch.func.grad(size)(mu.points).nan_to_num()


def quantiles(values: list[float]) -> dict[str, float]:
    found = np.quantile(values, (0.0, 0.5, 1.0))
    return {
        name: float(f"{x:.5g}") for name, x in zip(("min", "median", "max"), found, strict=True)
    }


def measured(cases: Iterator[Case]) -> dict[str, Any]:
    ratios: dict[str, list[float]] = {}
    count = 0
    for count, (_, F, mu) in enumerate(cases, 1):  # noqa: B007
        truth = float(constant(F, mu).value)
        found = {"local_upper": float(F.local_upper(mu)) / truth}
        size = float(mu.points.square().sum(-1).mean().sqrt())
        radii = size * torch.tensor(EPSILONS, dtype=mu.dtype)
        uppers = ball_upper(F, mu, radii, splitting=False)
        splitting = ball_upper(F, mu, radii)
        likely = ball_upper(F, mu, radii, splitting=False, solver=Lanczos())
        for k, eps in enumerate(EPSILONS):
            largest = climbed(F, mu, float(radii[k]))
            found[f"ball_upper, {eps:g}"] = float(uppers[k]) / largest
            found[f"ball_upper, {eps:g}, constant measured"] = float(likely[k]) / largest
            found[f"ball_upper, {eps:g}, atoms may split"] = float(splitting[k]) / largest
            found[f"truth, {eps:g}, over truth at the input"] = largest / truth
        for name, value in found.items():
            ratios.setdefault(name, []).append(value)
    return {"inputs": count, **{name: quantiles(values) for name, values in ratios.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("balls.json"))
    options = parser.parse_args()
    found = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    for name in options.families:
        found[name] = measured(FAMILIES[name]())
        print(name, json.dumps(found[name], indent=1), flush=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
