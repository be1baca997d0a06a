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
from tests.transport.foreign_cases import check_grade, damaged_files, foreign_case, truth_of


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
        case = foreign_case(seed)
        found = certify(case.mu, case.nu, plan=case.plan, potentials=case.potentials, p=case.order)
        trouble = check_grade(case, found, truth_of(case))
        kinds.update(case.kind.split(" · "))
        converged += bool(found.converged)
        if trouble:
            wrong.append((seed, case.kind, trouble))
            print(f"  {seed}: {case.kind}: {trouble}", flush=True)
        if proven < args.files:
            path = found.save(folder / f"{seed}.proof")
            order, lower, upper = check(str(path))
            exact = truth_of(case)
            assert order == case.order and lower**order <= exact * (1 + Fraction(1, 2**140))
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
        f"{args.count} graded, {len(wrong)} wrong, {converged} converged; {proven} files proven, "
        f"{refused} damaged ones refused; {time.process_time() - start:.0f} CPU s"
    )


if __name__ == "__main__":
    main()
