"""Two unbalanced clusters through depth
=====================================

How much of what layers allow together does a flow really do?

::

    python examples/27_two_dirac_depth.py [--quick] [--out DIR]

A light atom at Ru and a heavy one at −Ru, A = −γI, V = I on the line: the configuration in which
one layer is most sensitive. Here it flows through depth t. The local constant of the flow map Φ_t
stands beside e^{∫ω}, what the one-sided constants ω of the layers on the way allow together
(Grönwall's inequality).
"""

# %%
import argparse
from functools import partial
from pathlib import Path

import numpy as np

from meanfield import (
    AttentionParameters,
    SelfAttention,
    bounds,
    dynamics,
    figures,
    results,
    sampling,
    sweep,
)
from meanfield.figures.curves import curve, formula
from meanfield.figures.selection import by_level, select
from meanfield.lipschitz import local_lipschitz
from meanfield.results import Variable
from meanfield.sweeps import Task

GAMMA = 1.0  # A = −γ
FINER = 5  # times between two that are kept
F = SelfAttention(AttentionParameters.from_bilinear([[-GAMMA]], [[1.0]]))


# %%
# A case: the constants of one pair through depth. Weights are said by the logarithm of their
# ratio, relative to `two_dirac_best_log_ratio`: from about R = 1.5 on the worst for one layer.
def pair(radius, offset):
    log_ratio = float(bounds.two_dirac_best_log_ratio(GAMMA, radius)) + offset
    return sampling.two_diracs(radius, log_ratio, [1.0]), log_ratio


def depth(radius, offset, *, last, n_times, step):
    mu, log_ratio = pair(radius, offset)
    fine = np.linspace(0, last, FINER * (n_times - 1) + 1)  # for the integral of ω
    ds = dynamics.stability(F, mu, fine, method="rk4", step=step)
    paths = dynamics.flow(F, mu, fine, method="rk4", step=step).points.values[::FINER]
    kept = ds.isel(time=slice(None, None, FINER))
    return {
        "log_ratio": log_ratio,
        "constant": kept.constant.values,
        "constant_upper": kept.constant_upper.values,
        "constant_converged": bool(kept.constant_converged.all()),
        "splitting": kept.constant_splitting.values,
        "layer": kept.rate.values,
        "grown": kept.growth.values,
        "gap": np.abs(paths[:, 0, 0] - paths[:, 1, 0]),
        "points": paths,
        "mass": mu.weights.numpy(),
        "one_layer_bound": bounds.mean_field(GAMMA, 1.0, radius),
    }


PARAMETERS = (
    Variable("radius", "radius R", symbol="R"),
    Variable("offset", "log-ratio of the weights over the best one for one layer"),
    Variable("time", "depth t", symbol="t"),
)
VARIABLES = (
    Variable("log_ratio", "log(light weight / heavy weight)"),
    Variable("constant", "local constant of the flow map", dims=("time",)),
    Variable("constant_upper", "the constant is at most this", dims=("time",)),
    Variable("constant_converged", "whether all of them converged", dtype="bool"),
    Variable("splitting", "its part from splitting atoms", dims=("time",)),
    Variable("layer", "one-sided constant of the layer at this depth", dims=("time",)),
    Variable("grown", "e^{∫ one-sided constant}", dims=("time",)),
    Variable("gap", "distance of the two atoms", dims=("time",)),
    Variable("points", "the two atoms", dims=("time", "particle", "feature")),
    Variable("mass", "their weights", dims=("particle",)),
    Variable("one_layer_bound", "bound of one layer on the ball of radius R"),
)


def run(grid, fixed, **how):
    """The sweep; arrays have these coordinates."""
    coords = {
        "time": np.linspace(0, fixed["last"], fixed["n_times"]),
        "particle": np.arange(2),
        "feature": np.arange(1),
    }
    return sweep(Task(depth, VARIABLES, PARAMETERS, coords), grid, fixed=fixed, **how)


# %%
# The constant of the flow, and what its layers allow.
@figures.figure("constant", "constant_converged", "grown")
def against_depth(ds, *, ax):
    """Local constant of the flow map of two Diracs against depth, under e^{∫ω}."""
    rows = select(ds, offset=float(ds.offset.values[np.argmin(np.abs(ds.offset.values))]))
    for colour, radius, cases in by_level(rows, "radius"):
        one = cases.isel(case=0)
        curve(ax, one, "time", "constant", color=colour, label=f"R = {radius:g}")
        curve(ax, one, "time", "grown", "--", color=colour, linewidth=1)
    ax.plot([], [], "k--", linewidth=1, label=r"$e^{\int\omega}$, layers' one-sided constants")
    top = 30 * float(rows.constant.max())
    ax.set(yscale="log", ylim=(0.8, top), xlabel="depth t", ylabel="local constant of the flow")
    ax.set_title("Two Diracs: constant of the flow, and what its layers allow")


# %%
# Depth moves the worst weights: after it other pairs are more sensitive than the one that one
# layer likes least.
def one_layer(offsets, radius):
    """The constant of one layer at the pairs of these weights."""
    return local_lipschitz(F, pair(radius, offsets)[0]).value


@figures.figure("constant", "constant_converged")
def against_weight(ds, *, ax):
    """Local constant of the flow map at the last depth against the light weight."""
    for colour, radius, rows in by_level(ds, "radius"):
        label = f"R = {radius:g}"
        curve(ax, rows.isel(time=-1), "offset", "constant", color=colour, label=label)
        start = partial(one_layer, radius=radius)
        formula(ax, start, rows.offset, ":", color=colour, linewidth=1)
    ax.plot([], [], "k:", linewidth=1, label="one layer at t = 0")
    ax.set(yscale="log", xlabel="log-ratio of the weights, relative to the best of one layer")
    ax.set_ylabel(f"local constant of the flow to t = {float(ds.time[-1]):g}")
    ax.set_title("Two Diracs: constant of the flow against the light weight")


if __name__ == "__main__":  # worker processes import this file
    parser = argparse.ArgumentParser(description="Two unbalanced clusters through depth")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--out", type=Path, default=Path("results/27_two_dirac_depth"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    # %%
    # The sweep.
    fixed = {"last": 2.0, "n_times": 21, "step": 0.02}
    grid = {"radius": [0.5, 1.0, 1.5, 2.0], "offset": [-6.0, -4, -2, -1, 0, 1, 2, 4, 6]}
    if options.quick:
        fixed |= {"last": 1.0, "n_times": 6}
        grid = {"radius": [0.5, 1.5], "offset": [-2.0, 0.0, 2.0]}
    ds = run(grid, fixed, executor=options.workers)
    results.write_dataset(ds, options.out / "two-dirac-depth.zarr")
    shown = ["radius", "offset", "constant", "grown", "one_layer_bound"]
    print(ds[shown[2:]].isel(time=-1).to_dataframe()[shown].to_string(index=False))

    # %%
    with figures.style():
        for name, draw in {"constant": against_depth, "weights": against_weight}.items():
            draw(ds).figure.savefig(options.out / f"{name}.png")
