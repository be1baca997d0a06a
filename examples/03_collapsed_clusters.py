"""Collapsed clusters
==================

POT's network simplex against a certified interval.

::

    python examples/03_collapsed_clusters.py [--quick] [--out DIR]

Attention collapses tokens into clusters. Two clusters 4 apart whose points move by s inside
them are at W2 of about s, whatever else is in the picture; the cost matrix holds 16 beside s².
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from meanfield.transport import solve_w2


def clusters(n: int, spread: float) -> tuple[np.ndarray, np.ndarray, float]:
    """Two clouds of two clusters, and their W2 cluster by cluster at order one."""
    rng = np.random.default_rng(0)
    home = np.repeat([[0.0, 0.0], [4.0, 0.0]], n // 2, axis=0)
    x, y = home + spread * rng.normal(size=(2, n, 2))
    total = 0.0
    for half in (slice(0, n // 2), slice(n // 2, n)):
        # x − home is exact, so this is the truth for the points as they are stored.
        inner = ((t[half] - home[half]) / spread for t in (x, y))
        total += float(solve_w2(*map(torch.as_tensor, inner)).value) ** 2 / 2
    return x, y, spread * total**0.5


def pot_w2(x: np.ndarray, y: np.ndarray) -> float:
    import ot
    from scipy.spatial.distance import cdist

    uniform = np.full(len(x), 1 / len(x))
    cost = cdist(x, y, "sqeuclidean")  # direct differences: ot.dist would cancel as well
    return float(np.sqrt(ot.emd2(uniform, uniform, cost, numItermax=10**12)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Collapsed clusters")
    parser.add_argument("--quick", action="store_true", help="fewer, smaller clouds")
    parser.add_argument("--out", type=Path, default=Path("results/03_collapsed_clusters"))
    args = parser.parse_args()
    n = 100 if args.quick else 400
    spreads = 10.0 ** np.linspace(-1, -10, 10 if args.quick else 28)

    errors: dict[str, list[float]] = {"POT emd2": [], "meanfield": []}
    widths = []
    print(f"{'s':>8} {'truth':>12} {'POT':>12} {'meanfield':>12} {'width':>8}  method")
    for spread in spreads:
        x, y, truth = clusters(n, spread)
        theirs, ours = pot_w2(x, y), solve_w2(torch.as_tensor(x), torch.as_tensor(y))
        errors["POT emd2"].append(abs(theirs / truth - 1))
        errors["meanfield"].append(abs(float(ours.value) / truth - 1))
        widths.append(float(ours.relative_width))
        numbers = f"{spread:8.1e} {truth:12.5e} {theirs:12.5e} {float(ours.value):12.5e}"
        print(f"{numbers} {widths[-1]:8.1e}  {ours.method}")

    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    floor = 1e-17
    axes.loglog(spreads, np.maximum(errors["POT emd2"], floor), "o-", label="POT emd2, error")
    axes.loglog(
        spreads,
        np.maximum(errors["meanfield"], floor),
        "s-",
        label="meanfield, error of the value",
    )
    axes.loglog(spreads, widths, "--", color="0.4", label="meanfield, width of the interval")
    axes.axhline(1, color="0.8", lw=0.8)
    axes.set_xlabel("spread s of each cluster (clusters 4 apart)")
    axes.set_ylabel("relative error of W2 (none: drawn at $10^{-17}$)")
    axes.set_title(f"Two collapsed clusters, n = {n}, uniform weights")
    axes.invert_xaxis()
    axes.legend(loc="center right")
    args.out.mkdir(parents=True, exist_ok=True)
    for suffix in ("png", "pdf"):
        figure.savefig(args.out / f"collapsed_clusters.{suffix}", dpi=150)
    print(f"figure in {args.out / 'collapsed_clusters.png'}")


if __name__ == "__main__":
    main()
