"""Column generation at a million points: known answers, time, memory, killed and resumed; JSON.

    python tests/benchmarks/bench_transport_million.py [--n N] [--dims 2 3] [--known-n N]
        [--cases NAME ...] [--kill] [--out FILE]

Each case runs in a process of its own; the rounds are logged on stderr. Known answers are clouds
whose plan is the identity before their atoms are shuffled, so that every formula is out of reach
of `method="column_generation"`. With `--kill` the first process is killed as soon as it has
written a checkpoint, and a second one goes on from it; the seconds of both are given.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import pathlib
import resource
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np

Clouds = tuple[np.ndarray, np.ndarray]
KNOWN: dict[str, Callable[[np.ndarray, np.random.Generator], np.ndarray]] = {}


def known(function: Callable) -> Callable:
    """Images of x under a gradient of a convex function."""
    KNOWN[function.__name__] = function
    return function


@known
def shift(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return x + 0.5


@known
def linear(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    half = rng.normal(size=(x.shape[1],) * 2)
    return x @ (np.eye(x.shape[1]) + 0.3 * half @ half.T)


@known
def separable(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return x + 0.4 * np.tanh(2 * x)


@known
def pairing_broken(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Moves below half the distance of neighbours, of which the order says nothing."""
    from scipy.spatial import cKDTree

    apart = cKDTree(x).query(x, k=2)[0][:, 1]
    way = rng.normal(size=x.shape)
    return x + 0.24 * apart[:, None] * way / np.linalg.norm(way, axis=1, keepdims=True)


def clouds(name: str, n: int, d: int) -> tuple[Clouds, float | None]:
    """Two clouds, and their distance where it is known."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(n, d))
    if name not in KNOWN:
        return (x, rng.normal(size=(n, d)) + 0.5), None
    y = KNOWN[name](x, rng)
    truth = float(np.sqrt(np.square(y - x).sum(-1).mean()))
    return (x, y[rng.permutation(n)]), truth


def solve(name: str, n: int, d: int, checkpoint: str | None) -> dict:
    import torch

    from meanfield.transport import solve_w2

    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    (x, y), truth = clouds(name, n, d)
    solve_w2(x[:40], y[:50])
    cpu, wall = time.process_time(), time.perf_counter()
    found = solve_w2(x, y, method="column_generation", checkpoint=checkpoint, strict=False)
    contains = truth is None or (found.lower <= truth * (1 + 1e-14) and truth <= found.upper)
    return {
        "value": float(found.value),
        "relative_width": float(found.relative_width),
        "converged": bool(found.converged),
        "truth": truth,
        "contains_truth": bool(contains),
        "cpu_seconds": time.process_time() - cpu,
        "wall_seconds": time.perf_counter() - wall,
        "peak_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def in_own_process(*arguments: object) -> dict:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(solve, arguments)


def killed_and_resumed(name: str, n: int, d: int, folder: str) -> dict:
    path = pathlib.Path(folder) / "state.npz"
    first = multiprocessing.get_context("spawn").Process(
        target=solve, args=(name, n, d, str(path))
    )
    first.start()
    while first.is_alive() and not path.exists():
        time.sleep(0.2)
    was_alive = first.is_alive()
    first.kill()
    first.join()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    before = {"cpu_seconds_before_the_kill": used.ru_utime + used.ru_stime, "killed": was_alive}
    return in_own_process(name, n, d, str(path)) | before


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--n", type=int, default=1_000_000)
    parser.add_argument("--known-n", type=int, default=1_000_000, help="of known answers")
    parser.add_argument("--dims", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--cases", nargs="+", default=["samples", *KNOWN])
    parser.add_argument("--kill", action="store_true", help="kill and resume the samples")
    here = pathlib.Path(__file__)
    parser.add_argument("--out", type=pathlib.Path, default=here.with_suffix(".json"))
    args = parser.parse_args()
    cases = []
    for d in args.dims:
        for name in args.cases:
            n = args.known_n if name in KNOWN else args.n
            if args.kill and name == "samples":
                with tempfile.TemporaryDirectory() as folder:
                    found = killed_and_resumed(name, n, d, folder)
            else:
                found = in_own_process(name, n, d, None)
            cases.append({"case": name, "n": n, "d": d} | found)
            print(json.dumps(cases[-1]), flush=True)
            args.out.write_text(json.dumps(cases, indent=1) + "\n")


if __name__ == "__main__":
    main()
