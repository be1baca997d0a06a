"""One pair beside POT and SciPy: the table of ratios of the page of performance, and its JSON.

    python tests/benchmarks/bench_transport_ratios.py [--quick]

A ratio is the CPU time of the best of POT's `emd2` and SciPy's assignment (uniform weights), each
with its matrix of costs, over that of `solve_w2` with its evidence: above 1 ours is faster. All
take turns in one process, and the least of their times counts, so that a busy machine moves them
alike: 60 turns up to n = 100, then fewer as n grows, and one from 6,000 on. There POT takes up to
minutes and gigabytes, so that each cell has one case, and all kinds of clouds occur. The whole
takes about a quarter of an hour.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist
from tables import least, machine, main

from meanfield.transport import solve_w2

SIZES = (10, 100, 400, 1000, 3000, 10_000)
DIMS, KINDS = (2, 16, 64), ("gauss", "tails", "clusters", "attention")
LARGE = 6_000  # from here on each case is timed once, and these kinds only
LARGE_KINDS = {
    (2, "uniform"): "gauss",
    (2, "Dirichlet"): "clusters",
    (16, "uniform"): "attention",
    (16, "Dirichlet"): "gauss",
    (64, "uniform"): "clusters",
    (64, "Dirichlet"): "tails",
}


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


def case(n: int, d: int, kind: str, weights: str, turns: int) -> dict:
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
    ours, *others = (1e3 * t for t in least(functions, turns=turns))
    return {
        "n": n,
        "d": d,
        "clouds": kind,
        "weights": weights,
        "turns": turns,
        "method": found.method,
        "relative_width": float(found.relative_width),
        "ours_ms": ours,
        "pot_ms": others[0],
        "assignment_ms": others[1] if len(others) > 1 else None,
        "ratio": min(others) / ours,
        "machine": machine(),
    }


def rows(quick: bool, device: str) -> Iterator[dict]:
    solve_w2(np.zeros((3, 2)), np.ones((4, 2)))  # imports
    sizes, repeats = ((10, 100), 10) if quick else (SIZES, 60)
    for n, d, kind, weights in itertools.product(sizes, DIMS, KINDS, ("uniform", "Dirichlet")):
        if n < LARGE or LARGE_KINDS[d, weights] == kind:
            turns = 1 if n >= LARGE else max(2, repeats * 100 // max(n, 100))
            yield case(n, d, kind, weights, turns)


def table(found: list[dict]) -> str:
    """Ranges over the kinds of clouds, by size, dimension and weights; of the last machine."""
    found = [c for c in found if c["machine"] == found[-1]["machine"]]
    heads = [f"d = {d}, {w}" for d in DIMS for w in ("uniform", "Dirichlet")]
    lines = ["| n | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for n in dict.fromkeys(c["n"] for c in found):
        cells = []
        for d in DIMS:
            for w in ("uniform", "Dirichlet"):
                same = [c for c in found if (c["n"], c["d"], c["weights"]) == (n, d, w)]
                ratios = [c["ratio"] for c in same]
                one = f"{ratios[0]:.2g} ({same[0]['clouds']})"
                cells.append(one if len(same) == 1 else f"{min(ratios):.2g} – {max(ratios):.2g}")
        name = f"{n:,}" if n < LARGE else f"{n:,}, once each"
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", f"On {found[-1]['machine']}."])


if __name__ == "__main__":
    main(__file__, rows, table=table)
