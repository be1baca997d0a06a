"""Masked tokens and their leaders
===============================

Where do tokens go when none sees those after it?

::

    python examples/28_causal_flow.py [--quick] [--out DIR]

Masked attention on the sphere with V = I. The first token never moves, and every token tends to
it; before that, tokens gather around leaders, the first tokens to stand free of all earlier ones
by cβ^{−1/2} (Karagodin, Polyanskiy, Rigollet, arXiv 2411.04990). c is not sharp: what attracts
within a time grows with its logarithm.
"""

# %%
import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.animation import FuncAnimation

from meanfield import (
    AttentionParameters,
    ParticleMeasure,
    SelfAttention,
    dynamics,
    figures,
    results,
    sampling,
    sweep,
)
from meanfield.figures.canvas import colours
from meanfield.figures.curves import stairs
from meanfield.figures.selection import by_level, select
from meanfield.results import Variable
from meanfield.sweeps import Task

PARKING = 4.0  # c
FIRST = 0.1  # the second time of the logarithmic clock


def clock(last, n_times):
    return np.append(0, np.geomspace(FIRST, last, n_times - 1))


# %%
# A case: one flow on the circle from random places.
def masked_flow(beta, repetition, *, n_tokens, last, n_times, generator):
    del repetition  # the generator of the case depends on it
    eye = torch.eye(2, dtype=torch.float64)
    F = SelfAttention(AttentionParameters.from_bilinear(beta * eye, eye), causal=True)
    x = sampling.sphere(n_tokens, 2, generator=generator)
    ds = dynamics.flow(
        F,
        ParticleMeasure.from_sequence(x),
        clock(last, n_times),
        constraint="sphere",
        observe={"n_clusters": lambda mu: dynamics.cluster_count(mu, 0.02)},
    )
    points, distance = ds.points.values, PARKING * beta**-0.5
    return {
        "points": points,
        "distance": np.linalg.norm(points - points[:, :1], axis=-1),
        "n_clusters": ds.n_clusters.values,
        "leaders": float(parked(x.numpy(), distance)),
        "parking_distance": distance,
        "moved": np.linalg.norm(points[:, 0] - points[0, 0], axis=-1),
    }


def parked(x, distance):
    """Rényi's parking: how many points stand farther than this from those parked before."""
    found = []
    for point in x:
        if all(np.linalg.norm(point - other) > distance for other in found):
            found.append(point)
    return len(found)


PARAMETERS = (
    Variable("beta", "inverse temperature β", symbol="\\beta"),
    Variable("repetition", "number of the start"),
    Variable("time", "time t", symbol="t"),
    Variable("particle", "number of the token"),
)
VARIABLES = (
    Variable("points", "tokens on the circle", dims=("time", "particle", "feature")),
    Variable("distance", "distance to the first token", dims=("time", "particle")),
    Variable("n_clusters", "number of clusters", dims=("time",)),
    Variable("leaders", "tokens farther than the parking distance from all earlier leaders"),
    Variable("parking_distance", "c β^{−1/2}"),
    Variable("moved", "how far the first token has moved", dims=("time",)),
)


def run(grid, fixed, **how):
    """The sweep; arrays have these coordinates."""
    coords = {
        "time": clock(fixed["last"], fixed["n_times"]),
        "particle": np.arange(fixed["n_tokens"]),
        "feature": np.arange(2),
    }
    return sweep(Task(masked_flow, VARIABLES, PARAMETERS, coords), grid, fixed=fixed, **how)


# %%
# All tokens go to the first, those that come early first.
@figures.figure("distance")
def distance_to_first(ds, *, ax):
    """Distance of each token to the first against time, masked; early tokens are dark.

    Of the smallest β.
    """
    beta, n = float(ds.beta.min()), ds.sizes["particle"]
    one = select(ds, beta=beta).isel(case=0)
    for colour, k in zip(colours(n - 1), range(1, n), strict=True):
        ax.plot(ds.time[1:], one.distance[1:, k], color=colour, linewidth=0.7)
    ax.set(xscale="log", yscale="log", ylim=(1e-4, 3), xlabel="time t")
    ax.set_ylabel("distance to the first token")
    ax.set_title(rf"Masked: distance to the first token ($\beta$ = {beta:g}; dark: early)")


# %%
# On the way there are clusters, about as many as leaders.
@figures.figure("n_clusters", "leaders")
def clusters(ds, *, ax):
    """Number of clusters of masked flows against time, and the leaders of their starts."""
    for colour, beta, rows in by_level(ds, "beta"):
        label = rf"$\beta$ = {beta:g}"
        stairs(ax, rows, "n_clusters", time=ds.time, color=colour, label=label)
        ax.axhline(float(rows.leaders.mean()), color=colour, linestyle=":", linewidth=1)
    ax.plot([], [], "k:", label=rf"leaders: free by ${PARKING:g}\,\beta^{{-1/2}}$")
    ax.set(xscale="log", yscale="log", xlabel="time t", ylabel="number of clusters")
    ax.set_title("Masked: number of clusters, and of leaders at the start")


# %%
# The flow itself, of the first case.
def animation(ds):
    """The tokens on the circle, a frame for each time."""
    fig, ax = plt.subplots(figsize=(4, 4))
    dots = ax.scatter(*ds.points.values[0, 0].T, c=np.arange(ds.sizes["particle"]))
    ax.set(xlim=(-1.1, 1.1), ylim=(-1.1, 1.1), aspect="equal", xlabel="$x_1$", ylabel="$x_2$")

    def frame(k):
        dots.set_offsets(ds.points.values[0, k])
        ax.set_title(f"t = {float(ds.time[k]):.3g}")
        return [dots]

    return FuncAnimation(fig, frame, frames=ds.sizes["time"])


if __name__ == "__main__":  # worker processes import this file
    parser = argparse.ArgumentParser(description="Masked tokens and their leaders")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--out", type=Path, default=Path("results/28_causal_flow"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    # %%
    # The sweep.
    fixed = {"n_tokens": 100, "last": 1e3, "n_times": 80}
    grid = {"beta": [1.0, 9.0, 36.0, 144.0], "repetition": range(2)}
    if options.quick:
        fixed = {"n_tokens": 40, "last": 300.0, "n_times": 40}
        grid = {"beta": [1.0, 36.0], "repetition": range(1)}
    ds = run(grid, fixed, executor=options.workers)
    results.write_dataset(ds, options.out / "causal-flow.zarr")
    shown = ["beta", "repetition", "leaders", "n_clusters", "moved"]
    print(ds[shown[2:]].isel(time=-1).to_dataframe()[shown].to_string(index=False))

    # %%
    with figures.style():
        for name, draw in {"distance": distance_to_first, "leaders": clusters}.items():
            draw(ds).figure.savefig(options.out / f"{name}.png")
    if not options.quick:  # half a minute
        animation(ds).save(options.out / "masked.gif", fps=12)
