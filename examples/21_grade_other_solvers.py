"""Grades for other solvers
========================

Plans and potentials of POT and GeomLoss, graded to proven intervals.

::

    python examples/21_grade_other_solvers.py [--quick] [--n N] [--dims D ...] [--out DIR]

No solver of large problems says how far off its answer is. `certify` does, for anybody's plan and
anybody's potentials: the cost of a plan, put right, is an upper bound of W₂; potentials, put
right, give a lower one. Neither needs to be good for the interval to hold.
"""

from __future__ import annotations

import argparse
import pathlib
import time
from collections.abc import Callable

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from meanfield.transport import TransportResult, certify, solve_w2


def clouds(n: int, d: int) -> tuple[np.ndarray, np.ndarray]:
    """N(0, 1) against N(0.5, 1.3²)."""
    rng = np.random.default_rng(1)
    return rng.normal(size=(n, d)), 1.3 * rng.normal(size=(n, d)) + 0.5


def bijection(x: np.ndarray, y: np.ndarray) -> dict:
    """Binary space partitions, as POT has them: a permutation."""
    import ot

    found = ot.compute_bspot_bijection(x, y, n_plans=16)
    return {"plan": np.asarray(found[1] if isinstance(found, tuple) else found, int)}


def sinkhorn(x: np.ndarray, y: np.ndarray, blur: float) -> dict:
    """POT's Sinkhorn: its plan, and the logarithms of its scalings as potentials."""
    import ot

    costs = ot.dist(x, y)
    reg = blur * float(np.median(costs))
    a = np.full(len(x), 1 / len(x))
    plan, log = ot.sinkhorn(
        a, a, costs, reg, method="sinkhorn_log", numItermax=200, log=True, warn=False
    )
    f, g = (reg * np.asarray(log[name]) for name in ("log_u", "log_v"))
    return {"plan": plan, "potentials": (f, g)}


def low_rank(x: np.ndarray, y: np.ndarray) -> dict:
    """POT's low-rank plan Q diag(1/g) Rᵀ: no potentials."""
    import ot

    q, r, g, *_ = ot.lowrank_sinkhorn(x, y, rank=20, numItermax=200, warn=False)
    return {"plan": (q / g) @ r.T}


def minibatches(x: np.ndarray, y: np.ndarray) -> dict:
    """The mean of exact plans of random batches of 64."""
    from scipy.optimize import linear_sum_assignment
    from scipy.spatial.distance import cdist

    rng, size, rounds = np.random.default_rng(0), 64, 8
    plan = np.zeros((len(x), len(y)))
    for _ in range(rounds):
        rows, cols = (rng.permutation(len(t)) for t in (x, y))
        for start in range(0, len(x), size):
            i, j = rows[start : start + size], cols[start : start + size]
            pair = linear_sum_assignment(cdist(x[i], y[j], "sqeuclidean"))
            plan[i[pair[0]], j[pair[1]]] += 1 / (rounds * len(x))
    return {"plan": plan}


def geomloss(x: np.ndarray, y: np.ndarray) -> dict:
    """GeomLoss, single precision: potentials of half the squared distance, so times 2."""
    import torch
    from geomloss import SamplesLoss

    loss = SamplesLoss("sinkhorn", p=2, blur=0.05, scaling=0.8, debias=False, potentials=True,
                       backend="tensorized")  # fmt: skip
    f, g = loss(*(torch.as_tensor(t, dtype=torch.float32) for t in (x, y)))
    return {"potentials": (2 * f.reshape(-1), 2 * g.reshape(-1))}


SOLVERS: dict[str, Callable[[np.ndarray, np.ndarray], dict]] = {
    "BSP, 16 plans (POT)": bijection,
    "Sinkhorn, 5 % (POT)": lambda x, y: sinkhorn(x, y, 0.05),
    "Sinkhorn, 0.5 % (POT)": lambda x, y: sinkhorn(x, y, 0.005),
    "low rank, 20 (POT)": low_rank,
    "minibatches of 64": minibatches,
    "GeomLoss, float32": geomloss,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Grades for other solvers")
    parser.add_argument("--quick", action="store_true", help="smaller clouds")
    parser.add_argument("--n", type=int, default=2000, help="points of each cloud")
    parser.add_argument("--dims", type=int, nargs="+", default=[2, 16], help="dimensions")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs"))
    args = parser.parse_args()
    n = 300 if args.quick else args.n
    panels: dict[int, dict[str, TransportResult]] = {}
    truths: dict[int, float] = {}
    for d in args.dims:
        x, y = clouds(n, d)
        truth = truths[d] = float(solve_w2(x, y).value)
        print(f"\nd = {d}, n = {n}: proven interval of W2, and what makes it wide")
        panels[d], given = {}, {}
        for name, solver in SOLVERS.items():
            start = time.process_time()
            given[name] = solver(x, y)
            spent, start = time.process_time() - start, time.process_time()
            panels[d][name] = report(name, certify(x, y, **given[name]), truth, spent, start)
        # The plan of one, the potentials of another: what none of them knows alone.
        best = {
            "plan": given["BSP, 16 plans (POT)"]["plan"],
            "potentials": given["GeomLoss, float32"]["potentials"],
        }
        start = time.process_time()
        joined = certify(x, y, **best)
        panels[d]["BSP and GeomLoss"] = report("BSP and GeomLoss", joined, truth, 0.0, start)
    args.out.mkdir(parents=True, exist_ok=True)
    path = joined.save(args.out / "bsp_and_geomloss.proof", check=args.quick)
    print(f"\n{path}: exact numbers; meanfield/transport/checker.py proves it on its own")
    figure = draw(panels, truths, n)
    for suffix in ("png", "pdf"):
        figure.savefig(args.out / f"grades.{suffix}", dpi=120)
    print(f"figure in {args.out / 'grades.png'}")


def report(
    name: str, found: TransportResult, truth: float, spent: float, start: float
) -> TransportResult:
    """One line: the interval, how far W₂ is from its ends, and the times."""
    print(
        f"  {name:22} [{found.lower:.5f}, {found.upper:.5f}]  "
        f"plan off by {found.upper - truth:.0e}, potentials by {truth - found.lower:.0e}   "
        f"solver {spent:5.2f} s, grade {time.process_time() - start:5.2f} s"
    )
    return found


def draw(
    panels: dict[int, dict[str, TransportResult]], truths: dict[int, float], n: int
) -> Figure:
    """Intervals, a panel for each dimension; the potentials' part and the plan's, about W₂."""
    figure, grid = plt.subplots(
        1, len(panels), figsize=(8, 3.2), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, (d, answers) in zip(grid[0], panels.items(), strict=True):
        low = max(float(found.lower) for found in answers.values())
        high = min(float(found.upper) for found in answers.values())
        for k, found in enumerate(answers.values()):
            lower, upper, truth = (float(t) for t in (found.lower, found.upper, truths[d]))
            for start, end, color in ((lower, truth, "C0"), (truth, upper, "C1")):
                axes.plot([start, end], [k, k], color=color, linewidth=7, solid_capstyle="butt")
        axes.axvspan(low, high, color="k", alpha=0.25, linewidth=0)
        axes.axvline((low + high) / 2, color="k", linewidth=1)
        axes.set(title=f"d = {d}", xlabel="W₂")
        axes.grid(alpha=0.3, axis="x")
    grid[0][0].set_yticks(range(len(answers)), list(answers))
    grid[0][0].invert_yaxis()
    handles = [
        plt.Line2D([], [], color=color, linewidth=7, label=label)
        for color, label in (
            ("C0", "the potentials' part"), ("C1", "the plan's"),
            ("k", "what all intervals share"),
        )
    ]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize="small")
    figure.suptitle(
        f"Proven intervals of W₂ from other solvers' answers, n = {n:,}", fontsize="medium"
    )
    return figure


if __name__ == "__main__":
    main()
