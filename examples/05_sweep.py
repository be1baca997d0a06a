"""A sweep of one's own
====================

Resumable, in parallel, analysed with xarray.

::

    python examples/05_sweep.py [--quick] [--workers N] [--out DIR]

How does the local constant of a random layer grow with the radius of the cloud, and does the
number of heads matter? Stop it at any time and start it again: what is finished is kept.
"""

# %%
import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from meanfield import (
    AttentionParameters,
    ParticleMeasure,
    SelfAttention,
    figures,
    results,
    sampling,
    sweep,
)
from meanfield.lipschitz import local_lipschitz
from meanfield.results import Variable
from meanfield.sweeps import Task


# %%
# A case: plain arguments in, named values out. Randomness comes from the generator of the case.
def constant(radius, heads, cloud, *, dim, n_tokens, generator):
    layer = AttentionParameters.random(dim, n_heads=heads, generator=generator)
    mu = ParticleMeasure(sampling.ball(n_tokens, dim, radius=radius, generator=generator))
    found = local_lipschitz(SelfAttention(layer), mu)
    return {
        "constant": float(found.value),
        "constant_residual": float(found.residual),
        "constant_converged": bool(found.converged),
    }


if __name__ == "__main__":  # worker processes import this file
    parser = argparse.ArgumentParser(description="A sweep of one's own")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--out", type=Path, default=Path("results/05_sweep"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    # %% The grid, and labels for the Dataset.
    task = Task(
        constant,
        (
            Variable("constant", "local Lipschitz constant"),
            Variable("constant_residual", "relative residual"),
            Variable("constant_converged", "whether it converged", dtype="bool"),
        ),
        parameters=(Variable("radius", "radius R of the ball", symbol="R"),),
    )
    radii = [1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0, 11.3]
    grid = {"radius": radii, "heads": [1, 4], "cloud": range(4 if options.quick else 20)}
    store = options.out / ("sweep-quick.sweep" if options.quick else "sweep.sweep")
    fixed = {"dim": 8, "n_tokens": 32}
    ds = sweep(task, grid, fixed=fixed, seed=0, store=store, executor=options.workers)
    results.write_dataset(ds, options.out / "sweep.nc")

    # %% One dimension per parameter, and a power law per number of heads. In small balls the
    # constant hardly grows: a fit to all radii would have an exponent that is true of none.
    cube = results.to_cube(ds)
    print(cube.constant.mean("cloud").to_pandas().round(2).to_string())
    fits = {
        int(heads): results.fit_power(rows.radius.values, rows.constant.values)
        for heads, rows in ds.isel(case=np.flatnonzero(ds.radius >= 2.8)).groupby("heads")
    }
    for heads, fit in fits.items():
        p, low, high = (float(fit[f"exponent{end}"]) for end in ("", "_lower", "_upper"))
        print(
            f"heads: {heads}, R^{p:.2f} [{low:.2f}, {high:.2f}], over all clouds from R = 2.8 on"
        )

    # %%
    with figures.style():
        ax = plt.subplots()[1]
        for heads in cube.heads.values:
            line = cube.constant.sel(heads=heads)
            ax.plot(cube.radius, line.max("cloud"), "o-", label=f"heads: {heads}, worst cloud")
        ax.set(xscale="log", yscale="log", xlabel="radius R", ylabel="local constant")
        ax.set_xticks(cube.radius.values, [f"{radius:g}" for radius in cube.radius.values])
        ax.xaxis.set_minor_locator(plt.NullLocator())
        ax.legend()
        ax.figure.savefig(options.out / "sweep.png")
