"""How many clusters first, and for how long
=========================================

How many clusters do tokens on the circle form first, and when do those meet?

::

    python examples/33_metastability.py [--quick] [--out DIR]

V = I, A = βI. Of a nearly uniform start the mode cos kφ grows at the rate k²I_k(β)/(βI₀(β)); the
fastest, k ~ √β, sets the number of clusters of the first metastable stage (Bruno, Pasqualotto,
Agazzi, arXiv 2410.23228). Then clusters meet one pair after the other, at times that grow
exponentially in β: a staircase on a logarithmic clock (Geshkovski, Koubbi, Polyanskiy, Rigollet,
arXiv 2410.06833).
"""

# %%
import argparse
from pathlib import Path

import numpy as np
import torch
from scipy.special import ive

from meanfield import (
    AttentionParameters,
    ParticleMeasure,
    SelfAttention,
    dynamics,
    figures,
    results,
    sweep,
)
from meanfield.figures.curves import formula, stairs
from meanfield.figures.selection import by_level
from meanfield.results import Variable
from meanfield.sweeps import Task

GROWN = 0.3  # amplitude at which a mode counts as the one that won; 1 is a perfect comb
FIRST = 0.1  # the second time of the logarithmic clock


def clock(last, n_times):
    return np.append(0, np.geomspace(FIRST, last, n_times - 1))


# %%
# What is known: the k of the fastest mode of the uniform measure.
def first_mode(beta):
    k = np.arange(1, 10 + int(4 * max(beta, 1.0) ** 0.5))
    return int(k[np.argmax(k**2 * ive(k, beta))])


# %%
# A case: one flow from evenly spaced atoms that are displaced a little.
def meeting(beta, repetition, *, n_particles, noise, last, n_times, generator):
    del repetition  # the generator of the case depends on it
    eye = torch.eye(2, dtype=torch.float64)
    F = SelfAttention(AttentionParameters.from_bilinear(beta * eye, eye))
    phi = 2 * torch.pi * torch.arange(n_particles, dtype=torch.float64) / n_particles
    phi = phi + noise * torch.randn(n_particles, generator=generator, dtype=torch.float64)
    # Half the spacing of the start, at which every atom is a cluster of its own.
    scale = torch.pi / n_particles
    ds = dynamics.flow(
        F,
        ParticleMeasure(torch.stack([phi.cos(), phi.sin()], -1)),
        clock(last, n_times),
        method=dynamics.Adaptive("dopri5", 1e-7, 1e-10),
        constraint="sphere",
        coalesce=1e-6,
        observe={"n_clusters": lambda mu: dynamics.cluster_count(mu, scale)},
    )
    kept = {name: ds[name].values for name in ("points", "n_clusters", "evaluations")}
    return kept | {"found_mode": dominant_mode(kept["points"]), "first_mode": first_mode(beta)}


def dominant_mode(points):
    """The k of the largest |∫e^{ikφ}dμ| at the first time at which one has grown; NaN if never."""
    k = np.arange(1, points.shape[1] // 3)
    for angles in np.arctan2(points[..., 1], points[..., 0]):
        amplitude = np.abs(np.exp(1j * k[:, None] * angles).mean(-1))
        if amplitude.max() >= GROWN:
            return float(k[amplitude.argmax()])
    return float("nan")


PARAMETERS = (
    Variable("beta", "inverse temperature β", symbol="\\beta"),
    Variable("repetition", "number of the start"),
    Variable("time", "time t", symbol="t"),
)
VARIABLES = (
    Variable("points", "particles on the circle", dims=("time", "particle", "feature")),
    Variable("n_clusters", "number of clusters", dims=("time",)),
    Variable("found_mode", "mode that is largest when one has grown"),
    Variable("first_mode", "k with the largest k² I_k(β)"),
    Variable("evaluations", "evaluations of the velocity", dims=("time",), dtype="int64"),
)


def run(grid, fixed, **how):
    """The sweep; arrays have these coordinates."""
    coords = {
        "time": clock(fixed["last"], fixed["n_times"]),
        "particle": np.arange(fixed["n_particles"]),
        "feature": np.arange(2),
    }
    return sweep(Task(meeting, VARIABLES, PARAMETERS, coords), grid, fixed=fixed, **how)


# %%
# The staircase: every step is a meeting.
@figures.figure("n_clusters")
def staircase(ds, *, ax):
    """Number of clusters on the circle against time, for each β."""
    for colour, beta, rows in by_level(ds, "beta"):
        label = rf"$\beta$ = {beta:g}"
        stairs(ax, rows, "n_clusters", time=ds.time, color=colour, label=label)
    top = 2 * float(ds.first_mode.max())
    ax.set(xscale="log", xlabel="time t", ylabel="number of clusters", ylim=(0, top))
    ax.locator_params(axis="y", integer=True)
    ax.set_title("Tokens on the circle: number of clusters")


# %%
# Its first stage is that of the mode that grows fastest.
@figures.figure("found_mode")
def stage(ds, *, ax):
    """The largest mode when one reaches 0.3, against √β, beside the fastest growing one."""
    root = np.sqrt(ds.beta.values)
    ax.plot(root, ds.found_mode, "o", color="tab:blue", fillstyle="none", label="simulated")
    fastest = np.vectorize(lambda x: first_mode(x**2))
    formula(ax, fastest, root, "k--", linewidth=1.4, label=r"largest $k^2 I_k(\beta)$")
    ax.set(xlabel=r"$\sqrt{\beta}$", ylabel="mode that has grown first")
    ax.locator_params(axis="y", integer=True)
    ax.set_title("The mode that reaches 0.3 first, beside the fastest growing one")


if __name__ == "__main__":  # worker processes import this file
    parser = argparse.ArgumentParser(description="How many clusters first, and for how long")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--out", type=Path, default=Path("results/33_metastability"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    # %%
    # The sweep.
    fixed = {"n_particles": 120, "noise": 1e-3, "last": 1e10, "n_times": 120}
    grid = {"beta": [4.0, 9.0, 16.0, 25.0, 49.0], "repetition": range(3)}
    if options.quick:
        fixed |= {"n_particles": 80, "last": 1e6, "n_times": 80}
        grid = {"beta": [4.0, 25.0], "repetition": range(1)}
    ds = run(grid, fixed, executor=options.workers)
    results.write_dataset(ds, options.out / "metastability.zarr")
    print(ds[["found_mode", "first_mode"]].to_dataframe())

    # %%
    with figures.style():
        for name, draw in {"staircase": staircase, "first-mode": stage}.items():
            draw(ds).figure.savefig(options.out / f"{name}.png")
