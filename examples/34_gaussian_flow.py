"""A Gaussian through depth
========================

Does a Gaussian stay one, and does its covariance follow its equation?

::

    python examples/34_gaussian_flow.py [--quick] [--out DIR]

For μ = N(m, Σ) softmax attention is affine, Γ(x) = V(m + ΣAx), so the flow stays Gaussian with
Σ̇ = VΣAΣ + (VΣAΣ)ᵀ; so is L2 attention, of weights e^{⟨Ax,y⟩ − ½‖Ky‖²}, with (Σ⁻¹ + KᵀK)⁻¹ in
place of the first Σ (Castin, Ablin, Carrillo, Peyré, A Unified Perspective on the Dynamics of Deep
Transformers, arXiv 2501.18322). n samples follow it with an error of order n^{−1/2}, as
long as ‖A‖‖Σ‖ is of order 1: beyond it e^{⟨Ax,y⟩} is decided by the few largest samples.
"""

# %%
import argparse
from functools import partial
from pathlib import Path

import numpy as np
import torch
from scipy.integrate import solve_ivp

from meanfield import (
    AttentionParameters,
    ParticleMeasure,
    SelfAttention,
    dynamics,
    figures,
    results,
    sweep,
)
from meanfield.attention.kernels import dot_product, l2
from meanfield.figures.canvas import colours
from meanfield.figures.curves import curve, formula
from meanfield.figures.selection import levels, select
from meanfield.results import Variable
from meanfield.sweeps import Task

A = np.array([[0.5, 0.3, 0.0], [-0.3, -0.4, 0.2], [0.1, 0.0, -0.8]])
V = np.array([[0.7, 0.0, 0.3], [0.0, 0.9, -0.2], [-0.3, 0.2, 0.8]])
KEY = {"softmax": np.zeros((3, 3)), "l2": np.eye(3)}  # K: the weights are e^{⟨Ax,y⟩ − ½|Ky|²}


# %%
# The equation
# ------------
# Tilted by e^{−½|Ky|²} a centred Gaussian has the covariance C = Σ(I + KᵀKΣ)⁻¹, so Γ(x) = VCAx.
def covariance_equation(sigma, times, key):
    def rate(_, y):
        sigma = y.reshape(3, 3)
        drift = V @ sigma @ np.linalg.inv(np.eye(3) + key.T @ key @ sigma) @ A @ sigma
        return (drift + drift.T).ravel()

    ends, how = (times[0], times[-1]), {"method": "DOP853", "rtol": 1e-11, "atol": 1e-13}
    found = solve_ivp(rate, ends, sigma.ravel(), t_eval=times, **how)
    return found.y.T.reshape(-1, 3, 3)


# %%
# A case: one cloud of samples of N(0, σ²I) beside it.
def cloud(kernel, n_particles, repetition, *, std, last, n_times, step, n_shown, generator):
    del repetition  # the generator of the case depends on it
    times = np.linspace(0, last, n_times)
    parameters = AttentionParameters(A, np.eye(3), V, scale=0.5 if kernel == "l2" else 1.0)
    F = SelfAttention(parameters, kernel=l2 if kernel == "l2" else dot_product)
    x = std * torch.randn(n_particles, 3, generator=generator, dtype=torch.float64)
    points = dynamics.flow(F, ParticleMeasure(x), times, method="rk4", step=step).points.values
    found = np.stack([np.cov(x.T, bias=True) for x in points])
    expected = covariance_equation(std**2 * np.eye(3), times, KEY[kernel])
    size = partial(np.linalg.norm, axis=(-2, -1))
    return {
        "eigenvalues": np.linalg.eigvalsh(found),
        "expected": np.linalg.eigvalsh(expected),
        "error": size(found - expected) / size(expected),
        "points": points[:, :n_shown],
    }


PARAMETERS = (
    Variable("kernel", "which attention: e^{⟨Ax,y⟩} or e^{−½|Ax−y|²}"),
    Variable("n_particles", "number of samples n"),
    Variable("repetition", "number of the draw"),
    Variable("time", "time t", symbol="t"),
)
VARIABLES = (
    Variable("eigenvalues", "eigenvalues of the covariance", dims=("time", "feature")),
    Variable("expected", "eigenvalues of the covariance equation", dims=("time", "feature")),
    Variable("points", "some samples", dims=("time", "particle", "feature")),
    Variable("error", "|covariance − its equation|, over the equation's", dims=("time",)),
)


def run(grid, fixed, **how):
    """The sweep; arrays have these coordinates."""
    coords = {
        "time": np.linspace(0, fixed["last"], fixed["n_times"]),
        "particle": np.arange(fixed["n_shown"]),
        "feature": np.arange(3),
    }
    return sweep(Task(cloud, VARIABLES, PARAMETERS, coords), grid, fixed=fixed, **how)


# %%
# The samples beside the equation.
@figures.figure("eigenvalues", "expected")
def covariance(ds, *, ax, kernel="softmax"):
    """Eigenvalues of the covariance against time, samples beside the equation."""
    ds = select(ds, kernel=kernel)
    numbers = levels(ds, "n_particles")
    for k in range(ds.sizes["feature"]):
        label = "covariance equation" if k == 0 else None
        ax.plot(ds.time, ds.expected.isel(case=0, feature=k), "k-", label=label)
    for colour, n in (("tab:orange", numbers[0]), ("tab:blue", numbers[-1])):
        for k in range(ds.sizes["feature"]):
            label = f"{n} samples" if k == 0 else None
            values = select(ds, n_particles=n).eigenvalues.isel(feature=k)
            ax.plot(ds.time, values.mean("case"), "o", color=colour, markersize=3, label=label)
            low, high = values.min("case"), values.max("case")
            ax.fill_between(ds.time, low, high, color=colour, alpha=0.2, linewidth=0)
    ax.set(yscale="log", xlabel="time t", ylabel="eigenvalues of the covariance")
    ax.set_title(f"Covariance of a Gaussian: {kernel} (band: smallest to largest draw)")


# %%
# The error is that of sampling.
@figures.figure("error")
def covariance_error(ds, *, ax):
    """Error of the covariance against the number of samples, beside n^{−1/2}."""
    for kernel, line in (("softmax", "o-"), ("l2", "v--")):
        rows = select(ds, kernel=kernel)[["error"]].drop_vars("kernel")
        middle = rows.groupby("n_particles").median()
        steps = [0, ds.sizes["time"] // 2, ds.sizes["time"] - 1]
        for colour, k in zip(colours(3), steps, strict=True):
            label = f"{kernel}, t = {float(ds.time[k]):g}"
            at = middle.isel(time=k)
            curve(ax, at, "n_particles", "error", line, color=colour, label=label)
    ax.set(xscale="log", yscale="log", xlabel="samples n", ylabel="relative error, median")
    n = ds.n_particles
    formula(ax, lambda x: 2 / np.sqrt(x), n, linewidth=1.4, label=r"$\propto n^{-1/2}$")
    ax.set_title("Distance of samples from the covariance equation")


if __name__ == "__main__":  # worker processes import this file
    parser = argparse.ArgumentParser(description="A Gaussian through depth")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--out", type=Path, default=Path("results/34_gaussian_flow"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    # %%
    # The sweep.
    fixed = {"std": 0.5, "last": 2.0, "n_times": 21, "step": 0.1, "n_shown": 30}
    numbers, draws = [30, 100, 300, 1000, 3000], 8
    if options.quick:
        fixed |= {"n_times": 6, "n_shown": 50}
        numbers, draws = [50, 500], 2
    grid = {"kernel": ["softmax", "l2"], "n_particles": numbers, "repetition": range(draws)}
    ds = run(grid, fixed, executor=options.workers)
    results.write_dataset(ds, options.out / "gaussian-flow.zarr")
    print(ds.error.isel(time=-1).to_dataframe())

    # %%
    drawn = {"covariance": covariance, "error": covariance_error}
    with figures.style():
        for name, draw in (drawn | {"covariance-l2": partial(covariance, kernel="l2")}).items():
            draw(ds).figure.savefig(options.out / f"{name}.png")
