"""Certified distances
===================

W₂ between weighted clouds, without the rest of the library.

::

    python examples/02_distances.py [--quick] [--out DIR]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

from meanfield import figures
from meanfield.measures import ParticleMeasure
from meanfield.transport import (
    conditional_w2,
    sinkhorn_divergence,
    solve_w2,
    w1,
    w2,
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Certified distances")
    parser.add_argument("--quick", action="store_true", help="smaller clouds")
    parser.add_argument("--out", type=Path, default=Path("results/02_distances"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    n = 200 if args.quick else 2000
    generator = torch.Generator().manual_seed(0)

    # Two points at distance 3: W2 is 3, not 9 (POT's emd2) and not 4.5 (GeomLoss).
    here, there = torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 0.0]])
    print(f"w2 = {w2(here, there):g}, its square = {w2(here, there) ** 2:g}")

    # Clouds of any two sizes; plain tensors are uniform measures.
    x = torch.randn(n, 2, dtype=torch.float64, generator=generator)
    y = torch.randn(n // 2, 2, dtype=torch.float64, generator=generator) * 1.3 + 0.5
    result = solve_w2(x, y)
    print(result)
    print(f"certified to a relative width of {float(result.relative_width):.1e}")
    print(f"w1 = {float(w1(x[:200], y[:200])):.6f}")
    print(f"sinkhorn divergence = {float(sinkhorn_divergence(x[:200], y[:200])):.4f} (of squares)")

    # As one comes from POT or pandas: (points, weights) pairs, NumPy in and NumPy out.
    a, b = np.full(len(x), 1 / len(x)), np.full(len(y), 1 / len(y))
    print(f"the same from NumPy: {w2((x.numpy(), a), (y.numpy(), b)):.6f}")

    # The plan: marginals, the barycentric map, the geodesic between the two measures.
    plan = result.coupling
    halfway = plan.interpolate(0.5)
    pairs = plan.sample(1000, generator=generator)  # what flow matching trains on
    cost = float((pairs.source - pairs.target).square().sum(-1).mean() ** 0.5)
    print(f"1000 pairs of the plan are {cost:.3f} apart, {plan.to_scipy().nnz} entries in all")
    print(f"W2 to the midpoint over W2 = {float(w2(x, halfway) / result.value):.12f}")
    print(f"largest displacement {float((plan.barycentric_map() - x).norm(dim=-1).max()):.3f}")

    # Weights are logarithms: an atom of weight e^-900 that moves by 1 is seen.
    logs = torch.tensor([0.0, -900.0], dtype=torch.float64)
    light = ParticleMeasure([[0.0], [1.0]], log_weights=logs)
    print(f"a light atom moved: {float(w2(light, light.replace(light.points * 2))):.6e}")

    # A gradient flow of the distance takes one cloud to the other.
    z = x.clone().requires_grad_()
    for _ in range(3):
        (gradient,) = torch.autograd.grad(w2(z, y) ** 2, z)
        z = (z - 0.25 * n * gradient).detach().requires_grad_()
    print(f"after three steps: {float(w2(z.detach(), y)):.4f} from {float(result.value):.4f}")

    # With positions, mass moves only inside a position (masked attention).
    tokens = torch.randn(50, 8, dtype=torch.float64, generator=generator)
    mu, nu = (ParticleMeasure.from_sequence(t) for t in (tokens, tokens.flip(0)))
    print(f"conditional {float(conditional_w2(mu, nu)):.4f} >= plain {float(w2(mu, nu)):.4f}")

    # The plan as a picture: pairs of it, each with a line and its point of the cloud halfway.
    with figures.style():
        ax = plt.subplots()[1]
        pairs = plan.sample(150, generator=generator)
        for start, end in zip(pairs.source, pairs.target, strict=True):
            ax.plot(*torch.stack([start, end]).T, color="0.8", lw=0.6, zorder=0)
        middles = (pairs.source + pairs.target) / 2
        for cloud, marker, label in (
            (pairs.source, "o", "x"),
            (middles, "x", "halfway"),
            (pairs.target, "s", "y"),
        ):
            ax.plot(*cloud.T, marker, ms=3, label=label)
        ax.set(xlabel="$x_1$", ylabel="$x_2$", aspect="equal")
        ax.set_title(f"An optimal plan and its midpoint, $W_2$ = {float(result):.4f}")
        ax.legend()
        ax.figure.savefig(args.out / "plan.png")


if __name__ == "__main__":
    main()
