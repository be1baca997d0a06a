"""
A sweep and its analysis
========================

Many cases, kept as they finish, on as many processes or machines as there are; one labelled
Dataset at the end.
"""

# %%
# A case
# ------
# A function of plain arguments that returns named numbers. An argument called ``generator`` is
# the case's own source of randomness: the same for the same parameters, wherever the case runs.
import tempfile
from concurrent.futures import ThreadPoolExecutor
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
    sweeps,
)
from meanfield.lipschitz import local_lipschitz


def case(radius, heads, cloud, *, generator):
    layer = AttentionParameters.random(8, n_heads=heads, generator=generator)
    mu = ParticleMeasure(sampling.ball(16, 8, radius=radius, generator=generator))
    found = local_lipschitz(SelfAttention(layer), mu)
    return {"constant": float(found), "splitting": float(found.splitting)}


# %%
# A grid
# ------
# All combinations. With ``store=`` a finished case survives the death of the process; the same
# call again computes nothing that is there.
store = Path(tempfile.mkdtemp()) / "growth.sweep"
grid = {"radius": [1.0, 2.0, 4.0, 8.0], "heads": [1, 4], "cloud": range(6)}
ds = sweep(case, grid, seed=0, store=store, progress=False)
ds

# %%
# More cases are added to what is there: only those are run.
grid["radius"] = [1.0, 2.0, 4.0, 8.0, 16.0]
ds = sweep(case, grid, seed=0, store=store, progress=False)
print(sweeps.status(store))

# %%
# In parallel
# -----------
# ``executor=`` takes a number of processes, any executor of ``concurrent.futures``, or a client
# of dask. Processes of one's own are the usual choice; a case that kills its process then fails
# alone::
#
#    ds = sweep(case, grid, store=store, executor=4)
#
# On a cluster with dask, whose workers see the folder of the store::
#
#    from dask.distributed import Client
#    ds = sweep(case, grid, store=store, executor=Client("tcp://scheduler:8786"))
#
# As an array job without any scheduler of ours, each job takes every k-th case::
#
#    ds = sweep(case, grid, store=store, shard=(int(os.environ["SLURM_ARRAY_TASK_ID"]), 16))
#
# Each job gets a Dataset of all cases, in which those of the others may still be pending. When
# ``meanfield status growth.sweep`` says that all are done, ``results.read_dataset(store)`` has
# them.
#
# A script that starts processes begins its work under ``if __name__ == "__main__":``. The answer
# is the same, bit by bit, whatever runs it:
threads = sweep(case, grid, seed=0, executor=ThreadPoolExecutor(2), progress=False)
print("the same:", bool((threads.constant == ds.constant).all()))

# %%
# In xarray
# ---------
# The Dataset is in long form, one row per case. ``to_cube`` gives each parameter its own
# dimension.
cube = results.to_cube(ds)
cube.constant.mean("cloud").to_pandas().round(2)

# %%
# Everything that xarray and pandas do works from here: the median and spread over clouds.
with figures.style():
    ax = plt.subplots()[1]
    for marker, heads in zip("os", cube.heads.values, strict=True):
        line = cube.constant.sel(heads=heads)
        low, middle, high = line.quantile([0, 0.5, 1], "cloud").values
        ax.fill_between(cube.radius, low, high, alpha=0.2)
        ax.semilogy(cube.radius, middle, marker + "-", label=f"heads: {heads}")
    ax.set_xscale("log", base=2)
    ax.set_xticks(cube.radius.values, [f"{radius:g}" for radius in cube.radius.values])
    ax.set(xlabel="radius R", ylabel="local constant, median and range")
    ax.legend()

# %%
# A power law with its interval. In the smallest balls the constant hardly grows, and a fit to all
# radii would have an exponent that is true of none:
far = ds.isel(case=np.flatnonzero(ds.radius >= 2))
for heads, rows in far.groupby("heads"):
    fit = results.fit_power(rows.radius.values, rows.constant.values)
    ends = float(fit.exponent_lower), float(fit.exponent_upper)
    print(f"heads: {heads}, R^{float(fit.exponent):.2f} [{ends[0]:.2f}, {ends[1]:.2f}]")

# %%
# Failures
# --------
# A case that raises does not end the sweep. It holds NaN, and its message is kept.


def fragile(x):
    return {"inverse": 1 / x}


broken = sweep(fragile, {"x": [1, 0, 2]}, progress=False)
print(broken.inverse.values, list(broken.message.values))
print("finished:", int(np.sum(broken.status == 1)), "of", broken.sizes["case"])

# %%
# Files: ``results.write_dataset(ds, "growth.nc")`` and ``results.read_dataset``; any program that
# reads netCDF reads them, ``results.read_provenance`` says how they were made, and
# ``report.write_report(ds, "growth.html")`` makes a page that draws each number by
# ``figures.plot_growth``. The experiments of the package are such sweeps: ``meanfield list``.
