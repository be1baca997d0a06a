"""One pair beside POT and SciPy: the table of ratios of the page of performance, and its JSON.

    python tests/benchmarks/bench_transport_ratios.py [--sizes N ...] [--quick] [--no-page]

A ratio is the CPU time of the best of POT's `emd2` and SciPy's assignment (uniform weights), each
with its matrix of costs, over that of `solve_w2` with its evidence: above 1 ours is faster. All
take turns in one process, and the least of their times counts, so that a busy machine moves them
alike. The table stands between two comments of `.docs/performance.md`, and is written there.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist
from tables import machine, show

from meanfield.transport import solve_w2

DIMS, KINDS = (2, 16, 64), ("gauss", "tails", "clusters", "attention")


def clouds(kind: str, n: int, d: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, n, d))
    if kind == "tails":
        x, y = rng.standard_t(1.5, size=(2, n, d))
    elif kind == "clusters":
        centres = 3 * rng.normal(size=(10, d))
        x, y = (centres[rng.integers(10, size=n)] + 0.3 * t for t in (x, y))
    elif kind == "attention":  # x and what one layer of attention makes of it
        scores = x @ (rng.normal(size=(d, d)) / d) @ x.T
        weights = np.exp(scores - scores.max(1, keepdims=True))
        y = x + weights / weights.sum(1, keepdims=True) @ x
    return x, y


def least(functions: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """The least CPU time of each, taking turns for so long, or once if that takes seconds."""
    found, start = [np.inf] * len(functions), time.process_time()
    for turn in range(200):
        for k, function in enumerate(functions):
            before = time.process_time()
            function()
            found[k] = min(found[k], time.process_time() - before)
        spent = time.process_time() - start
        if spent > 2 or (turn >= 2 and spent > seconds):
            break
    return found


def case(n: int, d: int, kind: str, weights: str, seconds: float) -> dict:
    import ot

    x, y = clouds(kind, n, d)
    a = b = np.full(n, 1 / n)
    if weights == "Dirichlet":
        a, b = np.random.default_rng(1).dirichlet(np.ones(n), size=2)
        b = a if kind == "attention" else b
    both = (x, y) if weights == "uniform" else ((x, a), (y, b))

    def assignment() -> float:
        costs = cdist(x, y, "sqeuclidean")
        return costs[linear_sum_assignment(costs)].mean()

    functions = [
        lambda: solve_w2(*both),
        lambda: ot.emd2(a, b, cdist(x, y, "sqeuclidean"), numItermax=10**12),
    ]
    functions += [assignment] * (weights == "uniform")
    found = solve_w2(*both)
    ours, *others = (1e3 * t for t in least(functions, seconds))
    return {
        "n": n,
        "d": d,
        "clouds": kind,
        "weights": weights,
        "method": found.method,
        "relative_width": float(found.relative_width),
        "ours_ms": ours,
        "pot_ms": others[0],
        "assignment_ms": others[1] if len(others) > 1 else None,
        "ratio": min(others) / ours,
    }


def cases(sizes: Sequence[int], seconds: float) -> Iterator[dict]:
    for n in sizes:
        for d in DIMS:
            for kind in KINDS:
                for weights in ("uniform", "Dirichlet"):
                    yield case(n, d, kind, weights, seconds)


def table(found: list[dict]) -> str:
    """Ranges over the kinds of clouds, by size, dimension and weights."""
    heads = [f"d = {d}, {w}" for d in DIMS for w in ("uniform", "Dirichlet")]
    lines = ["| n | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for n in dict.fromkeys(c["n"] for c in found):
        cells = []
        for d in DIMS:
            for w in ("uniform", "Dirichlet"):
                same = [c for c in found if (c["n"], c["d"], c["weights"]) == (n, d, w)]
                ratios = [c["ratio"] for c in same]
                cells.append(f"{min(ratios):.2g} – {max(ratios):.2g}")
        lines.append(f"| {n:,} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", f"On {machine()}."])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 100, 400, 1000, 3000])
    parser.add_argument("--quick", action="store_true", help="n = 10 and 100, and no files")
    parser.add_argument("--no-page", action="store_true")
    here = pathlib.Path(__file__)
    parser.add_argument("--out", type=pathlib.Path, default=here.with_suffix(".json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    solve_w2(np.zeros((3, 2)), np.ones((4, 2)))  # imports
    found = []
    for each in cases([10, 100] if args.quick else args.sizes, 0.1 if args.quick else 0.4):
        print(json.dumps(each), flush=True)
        found.append(each)
    print(table(found))
    if args.quick:
        return
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    if not args.no_page:
        show(__file__, table(found))


if __name__ == "__main__":
    main()
