"""The true error of estimates
===========================

Sinkhorn, minibatches, slices and low rank, against a known W₂.

::

    python examples/13_estimates.py [--quick] [--n N] [--out DIR]

An estimate is as good as its distance to the truth, and above a few thousand points the truth is
usually not known. Here it is, with an interval. The script also checks the stored values of
data/certified_w2.json, which other libraries may test against, on the smallest case.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from collections.abc import Callable

import numpy as np

from meanfield.transport import sinkhorn_divergence, solve_w2

ROOT = pathlib.Path(__file__).parent.parent


def clouds(n: int, d: int, weights: str = "uniform", seed: int = 1) -> tuple:
    """The clouds of data/certified_w2.json: N(0, 1) against N(0.5, 1.3²), by NumPy's PCG64."""
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(n, d)), 1.3 * rng.normal(size=(n, d)) + 0.5
    a = b = np.full(n, 1 / n)
    if weights == "dirichlet":
        a, b = rng.dirichlet(np.ones(n)), rng.dirichlet(np.ones(n))
    return (x, a), (y, b)


def minibatch(x: np.ndarray, y: np.ndarray, size: int, count: int = 20) -> float:
    """Root mean square of exact distances of random batches, as in minibatch optimal transport."""
    rng = np.random.default_rng(0)
    batches = [t[np.stack([rng.permutation(len(t))[:size] for _ in range(count)])] for t in (x, y)]
    return float(np.sqrt((solve_w2(*batches).value ** 2).mean()))


def sliced(x: np.ndarray, y: np.ndarray, count: int) -> float:
    """Sliced W2 times √d: what it estimates where all directions are alike."""
    directions = np.random.default_rng(0).normal(size=(x.shape[1], count))
    directions /= np.linalg.norm(directions, axis=0)
    moved = np.sort(x @ directions, axis=0) - np.sort(y @ directions, axis=0)
    return float(np.sqrt((moved**2).mean() * x.shape[1]))


def low_rank(x: np.ndarray, y: np.ndarray, rank: int) -> float:
    """The cost of POT's low-rank plan, root of it."""
    import ot

    # Its own value is that of a rescaled cost; the plan's is meant.
    q, r, g, *_ = ot.lowrank_sinkhorn(x, y, rank=rank, numItermax=200, warn=False)
    squares = (x**2).sum(1) @ q.sum(1) + (y**2).sum(1) @ r.sum(1)
    cross = ((x.T @ q) * (y.T @ r) / g).sum()
    return float(np.sqrt(squares - 2 * cross))


def estimates(x: np.ndarray, y: np.ndarray) -> dict[str, Callable[[], float]]:
    """Names and calls."""
    return {
        "minibatch, 64": lambda: minibatch(x, y, 64),
        "minibatch, 256": lambda: minibatch(x, y, 256),
        "sliced, 200": lambda: sliced(x, y, 200),
        "low rank, 20 (POT)": lambda: low_rank(x, y, 20),
        "Sinkhorn, blur 0.5": lambda: float(sinkhorn_divergence(x, y, blur=0.5)) ** 0.5,
        "Sinkhorn, blur 0.05": lambda: (
            float(sinkhorn_divergence(x, y, blur=0.05, scaling=0.7)) ** 0.5
        ),
    }


def check_stored_values() -> None:
    """One of the stored values, made again."""
    stored = json.loads((ROOT / "data" / "certified_w2.json").read_text())
    case = min(stored["cases"], key=lambda case: case["n"])
    found = solve_w2(*clouds(case["n"], case["d"], case["weights"], case["seed"]))
    assert case["lower"] <= float(found.upper)
    assert float(found.lower) <= case["upper"]
    print(f"stored value n = {case['n']}, d = {case['d']}: [{case['lower']}, {case['upper']}]")


def main() -> None:
    parser = argparse.ArgumentParser(description="The true error of estimates")
    parser.add_argument("--quick", action="store_true", help="smaller clouds")
    parser.add_argument("--n", type=int, default=2000, help="points of each cloud")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs"))
    args = parser.parse_args()
    n = 300 if args.quick else args.n
    check_stored_values()

    errors: dict[str, list[float]] = {}
    dimensions = (2, 8, 32)
    for d in dimensions:
        (x, a), (y, b) = clouds(n, d)
        start = time.process_time()
        truth = solve_w2((x, a), (y, b))
        seconds = time.process_time() - start
        width = float(truth.relative_width)
        print(f"\nd = {d}: W2 = {truth.value:.10f}, width {width:.0e}, {seconds:.2f} s")
        for name, estimate in estimates(x, y).items():
            start = time.process_time()
            error = estimate() / truth.value - 1
            errors.setdefault(name, []).append(error)
            print(f"  {name:22} {error:+9.2%}  {time.process_time() - start:7.2f} s")

    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    for marker, (name, values) in zip("osD^v<", errors.items(), strict=True):
        axes.plot(dimensions, np.abs(values), marker=marker, label=name)
    axes.set(xscale="log", yscale="log", xlabel="dimension d", ylabel="|estimate / W2 − 1|")
    axes.set_xticks(dimensions, [str(d) for d in dimensions])
    axes.minorticks_off()
    axes.set_title(f"Errors against certified distances, n = {n}")
    figure.legend(loc="outside right center", fontsize="small")
    args.out.mkdir(parents=True, exist_ok=True)
    for suffix in ("png", "pdf"):
        figure.savefig(args.out / f"estimates.{suffix}", dpi=150)
    print(f"\nfigure in {args.out / 'estimates.png'}")


if __name__ == "__main__":
    main()
