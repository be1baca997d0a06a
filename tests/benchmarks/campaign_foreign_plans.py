"""Grade plans and potentials of every kind and wrongness; save, prove and damage files of them.

    python -m tests.benchmarks.campaign_foreign_plans --count 5000 --seed 0 --files 200

It says how many intervals miss the optimum of the integer simplex, and how many damaged files the
checker believes. Nothing random but by the seed.
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import tempfile
import time
import warnings
from fractions import Fraction

import numpy as np

from meanfield.transport import certify
from meanfield.transport.checker import check
from tests.transport.damaged import damaged_files
from tests.transport.laws import check_grade, claim, refusal
from tests.transport.lies import LIES
from tests.transport.problems import PROBLEMS, problem


def main() -> None:
    parser = argparse.ArgumentParser(description="Grade foreign plans and potentials")
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", type=int, default=0, help="answers to save, prove and damage")
    args = parser.parse_args()
    warnings.simplefilter("error")
    start, wrong, kinds = time.process_time(), [], collections.Counter()
    converged = proven = refused = 0
    folder = pathlib.Path(tempfile.mkdtemp())
    for seed in range(args.seed, args.seed + args.count):
        rng = np.random.default_rng([seed, 77])
        kind, lie, order = (
            str(rng.choice(list(PROBLEMS))),
            str(rng.choice(list(LIES))),
            1 + seed % 2,
        )
        p = problem(kind, seed)
        plan, f, g = claim(p, lie, order)
        if refusal(plan, f, g, p):
            continue
        found = certify(p.mu, p.nu, plan=plan, potentials=(f, g), p=order)
        kinds.update((kind, lie))
        converged += bool(found.converged)
        try:
            check_grade(p, found, order)
        except AssertionError as trouble:
            wrong.append(seed)
            print(f"  {seed}: {kind}, {lie}: {trouble}", flush=True)
        if proven < args.files:
            path = found.save(folder / f"{seed}.proof")
            told, lower, upper = check(str(path))
            exact = p.truth(order, meant=True)
            assert told == order and lower**order <= exact * (1 + Fraction(1, 2**140))
            assert exact * (1 - Fraction(1, 2**140)) <= upper**order
            proven += 1
            rng = np.random.default_rng([seed, 78])
            path.write_bytes(damaged_files(rng, path.read_bytes()))
            try:
                check(str(path))
                print(f"  {seed}: a damaged file is believed", flush=True)
            except Exception:
                refused += 1
    print(dict(sorted(kinds.items())))
    print(
        f"{sum(kinds.values()) // 2} graded, {len(wrong)} wrong, {converged} converged; "
        f"{proven} files proven, "
        f"{refused} damaged ones refused; {time.process_time() - start:.0f} CPU s"
    )


if __name__ == "__main__":
    main()
