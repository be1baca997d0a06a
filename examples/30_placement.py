"""Where a transformer normalises
==============================

How fast do tokens collapse with Pre-, Post-, Peri-LN and nGPT?

::

    python examples/30_placement.py [--quick] [--out DIR]

Equiangular orthonormal tokens, V = I, A = βI: Post-LN and nGPT collapse like e^{−2t}, Pre-LN like
1/t², for its radius grows and its angles move ever slower (Karagodin, Ge, Polyanskiy, Rigollet,
arXiv 2510.22026). Beside the simulation stands the reduced equation; random starts on a sphere of
high dimension follow it too.
"""

# %%
import argparse
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
    sampling,
    sweep,
)
from meanfield.figures.curves import curve, formula
from meanfield.figures.selection import by_level, select
from meanfield.layers import Chain, RMSNorm
from meanfield.results import Variable
from meanfield.sweeps import Task

FIRST = 0.01  # the second time of the logarithmic clock


def clock(last, n_times):
    return np.append(0, np.geomspace(FIRST, last, n_times - 1))


# %%
# The flows
# ---------
# With θ = N(x) = ``x/|x|``: Post-LN, N(x + F(x)), flows as θ̇ = P_θ F(θ); Pre-LN, x + F(N(x)),
# as ẋ = F(θ); Peri-LN, x + N(F(N(x))), as ẋ = N(F(θ)); nGPT as θ̇ = P_θ N(F(θ)).
def placed(F, dim, placement):
    """The velocity, and the constraint of its flow."""
    N = RMSNorm(torch.full((dim,), dim**-0.5, dtype=torch.float64), 0.0)
    maps = {"post": [F], "ngpt": [F, N], "pre": [N, F], "peri": [N, F, N]}[placement]
    return Chain(maps), "sphere" if placement in ("post", "ngpt") else None


# %%
# Equiangular tokens stay equiangular. With p = e^β/(e^β + (n−1)e^{βρ}) the attention that a token
# pays to itself, Γ = pθᵢ + (1−p)/(n−1) Σ_{j≠i} θⱼ, and
# ρ̇ = 2e^{βρ}(1−ρ)((n−1)ρ+1)/(e^β + (n−1)e^{βρ}) on the sphere. Pre-LN divides it by r, with
# ṙ = ⟨θ, Γ⟩; Peri-LN divides both by ``|Γ|``; nGPT divides the first by ``|Γ|``.
def equiangular(beta, n, times, placement):
    """The common cosine ρ from 0, and the common norm r from 1, at the times."""
    free = placement in ("pre", "peri")

    def rate(_, y):
        rho, r = y
        other = np.exp(beta * (rho - 1))
        own = 1 / (1 + (n - 1) * other)
        q = other * own
        turn = 2 * (1 - rho) * ((n - 1) * rho + 1) * q
        outward = own + (n - 1) * q * rho
        square = own**2 + 2 * own * q * (n - 1) * rho + q**2 * (n - 1) * (1 + (n - 2) * rho)
        speed = 1 / np.sqrt(square) if placement in ("peri", "ngpt") else 1.0
        return [turn * speed / (r if free else 1.0), outward * speed if free else 0.0]

    ends, how = (times[0], times[-1]), {"method": "DOP853", "rtol": 1e-11, "atol": 1e-13}
    return solve_ivp(rate, ends, [0.0, 1.0], t_eval=times, **how).y


# %%
# A case: the same network on an orthonormal and on a random start.
def collapse(placement, beta, *, n_tokens, dim, last, n_times, generator):
    times = clock(last, n_times)
    exact = torch.eye(n_tokens, dtype=torch.float64)
    F = SelfAttention(AttentionParameters.from_bilinear(beta * exact, exact))
    drawn = sampling.sphere(n_tokens, dim, generator=generator)
    # The flow stays in the span of its start, so n coordinates hold a start of R^d.
    starts = {"": exact, "_random": drawn @ torch.linalg.qr(drawn.mT)[0]}
    found = {}
    for name, start in starts.items():
        velocity, constraint = placed(F, n_tokens, placement)
        x = dynamics.flow(
            velocity,
            ParticleMeasure(start),
            times,
            method=dynamics.Adaptive("dopri5", 1e-8, 1e-11),
            constraint=constraint,
        ).points.values
        radius = np.linalg.norm(x, axis=-1)
        directions = x / radius[..., None]
        found[f"gap{name}"] = mean_gap(directions)
        if start is exact:  # seen in a plane where they stand evenly on a circle
            phi = 2 * np.pi * np.arange(n_tokens) / n_tokens
            found["points"] = directions @ np.stack([np.cos(phi), np.sin(phi)], -1)
            found["radius"] = radius.mean(-1)
    expected, norms = equiangular(beta, n_tokens, times, placement)
    return found | {"gap_reduced": 1 - expected, "radius_reduced": norms}


def mean_gap(u):
    """Mean of 1 − ⟨uᵢ, uⱼ⟩ over pairs, from differences: 1 − cosine would lose its digits."""
    squares = ((u - u.mean(-2, keepdims=True)) ** 2).sum((-2, -1))
    return squares / (u.shape[-2] - 1)


PARAMETERS = (
    Variable("placement", "where the network normalises"),
    Variable("beta", "inverse temperature β", symbol="\\beta"),
    Variable("time", "time t", symbol="t"),
)
VARIABLES = (
    Variable("gap", "1 − cosine of two orthonormal tokens", dims=("time",)),
    Variable("gap_random", "1 − mean cosine of random tokens", dims=("time",)),
    Variable("gap_reduced", "1 − ρ of the reduced equation", dims=("time",)),
    Variable(
        "points",
        "orthonormal tokens over their norms, seen in a plane",
        dims=("time", "particle", "feature"),
    ),
    Variable("radius", "norm of the orthonormal tokens", dims=("time",)),
    Variable("radius_reduced", "norm in the reduced equation", dims=("time",)),
)


def run(grid, fixed, **how):
    """The sweep; arrays have these coordinates."""
    coords = {
        "time": clock(fixed["last"], fixed["n_times"]),
        "particle": np.arange(fixed["n_tokens"]),
        "feature": np.arange(2),
    }
    return sweep(Task(collapse, VARIABLES, PARAMETERS, coords), grid, fixed=fixed, **how)


# %%
# On logarithmic axes a power of t is a line, and an exponential falls off it.
@figures.figure("gap_reduced", "gap", "gap_random")
def rates(ds, *, ax):
    """1 − cosine against time, for each place of the norm, beside 1/t².

    Of the smallest β.
    """
    for colour, name, cases in by_level(select(ds, beta=float(ds.beta.min())), "placement"):
        one = cases.isel(case=0)
        curve(ax, one, "time", "gap_reduced", "-", color=colour, label=name)
        curve(ax, one, "time", "gap", "o", color=colour, markersize=3)
        curve(ax, one, "time", "gap_random", "x", color=colour, markersize=4)
    ax.plot([], [], "ko", markersize=3, label="marks: orthonormal start")
    ax.plot([], [], "kx", markersize=4, label="crosses: random start")
    ax.plot([], [], "k-", label="reduced equation")
    ax.set(xscale="log", yscale="log", ylim=(1e-8, 2), xlabel="time t", ylabel="1 − cosine")
    late = (10, max(10, float(ds.time[-1])))
    formula(ax, lambda t: 5 / t**2, late, linewidth=1.4, label=r"$\propto t^{-2}$")
    ax.set_title("Collapse of the tokens, by the place of the norm")


if __name__ == "__main__":  # worker processes import this file
    parser = argparse.ArgumentParser(description="Where a transformer normalises")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--out", type=Path, default=Path("results/30_placement"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    # %%
    # The sweep. A random start of dimension d is orthonormal up to 1/√d.
    fixed = {"n_tokens": 32, "dim": 1024, "last": 300.0, "n_times": 60}
    if options.quick:
        fixed = {"n_tokens": 16, "dim": 256, "last": 100.0, "n_times": 30}
    betas = [1.0] if options.quick else [1.0, 4.0]
    grid = {"placement": ["post", "pre", "peri", "ngpt"], "beta": betas}
    ds = run(grid, fixed, executor=options.workers)
    results.write_dataset(ds, options.out / "placement.zarr")
    # The reduced equation is solved to 1e-12 or so: a gap below that is the solver's.
    shown = ["placement", "beta", "time", "gap", "gap_reduced", "radius"]
    early = ds[shown[3:]].sel(time=10, method="nearest")
    print(early.to_dataframe()[shown].to_string(index=False))

    # %%
    with figures.style():
        rates(ds).figure.savefig(options.out / "collapse.png")
