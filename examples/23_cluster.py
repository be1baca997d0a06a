#!/usr/bin/env python
# The comments below are read by SLURM, which wants no space in them, and by nobody else.
# fmt: off
#SBATCH --job-name=constants
#SBATCH --array=0-3
#SBATCH --cpus-per-task=1
#SBATCH --time=00:30:00
# fmt: on
"""A sweep on a cluster, as a job array
====================================

One store, to which each job of an array adds its share.

::

    sbatch examples/23_cluster.py             # the jobs of the array
    python examples/23_cluster.py [--quick]   # afterwards: what is missing, and the figure

Without SLURM the second line runs the shares itself, one after the other, as an array would. A job
that is killed, or runs out of time, loses the case under way: submit the array again, or run the
second line. An experiment of this package needs no script:
``meanfield run two-dirac --shard $SLURM_ARRAY_TASK_ID/16``.

How does the local constant of a random layer grow with the number of tokens?
"""

# %%
import argparse
import os
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt

from meanfield import (
    AttentionParameters,
    ParticleMeasure,
    SelfAttention,
    figures,
    local_lipschitz,
    sampling,
    sweep,
)
from meanfield.results import Variable, to_cube
from meanfield.sweeps import Task, status

SHARES = 4


def constant(n_tokens, cloud, *, dim, generator):
    layer = AttentionParameters.random(dim, n_heads=2, generator=generator)
    mu = ParticleMeasure(sampling.ball(n_tokens, dim, radius=3.0, generator=generator))
    return local_lipschitz(SelfAttention(layer), mu).values("constant", "value", "converged")


# %%
# SLURM runs a copy of the script under another name, so the function is named here: by that name
# the store knows that all jobs compute the same.
def shares(store, grid, shard=None):
    task = Task(constant, name="constant of a random layer", variables=(
        Variable("constant", "local Lipschitz constant"),
        Variable("constant_converged", "whether it converged", dtype="bool"),
    ))  # fmt: skip
    return sweep(task, grid, fixed={"dim": 8}, store=store, shard=shard)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A sweep on a cluster, as a job array")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("results/23_cluster"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    store = options.out / ("cluster-quick.sweep" if options.quick else "cluster.sweep")
    sizes = [8, 16, 32] if options.quick else [8, 16, 32, 64, 128, 256, 512]
    grid = {"n_tokens": sizes, "cloud": range(4 if options.quick else 40)}

    # %% A job of the array: its share, and nothing else.
    if "SLURM_ARRAY_TASK_ID" in os.environ:
        job = int(os.environ["SLURM_ARRAY_TASK_ID"])
        shares(store, grid, shard=(job, int(os.environ["SLURM_ARRAY_TASK_COUNT"])))
        sys.exit()

    # %% Without SLURM, the same jobs one after the other.
    if not store.exists():
        for job in range(SHARES):
            slurm = {"SLURM_ARRAY_TASK_ID": str(job), "SLURM_ARRAY_TASK_COUNT": str(SHARES)}
            command = [sys.executable, *sys.argv]
            subprocess.run(command, env={**os.environ, **slurm}, check=True)
    print(status(store))

    # %% All of it: what no job has finished is computed here.
    cube = to_cube(shares(store, grid))
    print(cube.constant.median("cloud").to_pandas().round(3).to_string())

    # %%
    with figures.style():
        ax = plt.subplots()[1]
        line = cube.constant
        ax.plot(cube.n_tokens, line.median("cloud"), "o-", label="median of the clouds")
        ends = line.min("cloud"), line.max("cloud")
        ax.fill_between(cube.n_tokens, *ends, alpha=0.2, label="all clouds")
        ax.set_xscale("log", base=2)
        ax.set_xticks(cube.n_tokens.values, cube.n_tokens.values)
        ax.set(xlabel="tokens n", ylabel="local constant")
        ax.legend()
        ax.figure.savefig(options.out / "cluster.png")
