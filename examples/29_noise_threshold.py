"""Noise against clustering
========================

How much noise keeps tokens from clustering?

::

    python examples/29_noise_threshold.py [--quick] [--out DIR]

dX = K P_X ∫ e^{β⟨X,y⟩} y dμ(y) dt + P_X∘dW on the sphere. The uniform measure is stable below
K_# = β^{d/2}/(2^{d/2} Γ(d/2) I_{d/2}(β)) (Mun, Rosenzweig, arXiv 2606.05140); above it the mean
``|∫x dμ|`` is no longer 0. For β below some β_* it leaves 0 continuously, above with a jump.

With n particles the order below K_# is not 0 but about 1/√n, and near K_# the flow slows down: at
the last time the start is still felt there, which the deviation in time does not show.
"""

# %%
import argparse
import math
from pathlib import Path

import numpy as np
import torch
from scipy.special import gammaln, ive, roots_gegenbauer, roots_jacobi

from meanfield import (
    AttentionParameters,
    ParticleMeasure,
    SelfAttention,
    figures,
    results,
    sampling,
    sweep,
)
from meanfield.attention.normalizations import exponential
from meanfield.figures.curves import formula
from meanfield.figures.selection import by_level
from meanfield.results import Variable
from meanfield.sweeps import Task

SHOWN = 100  # particles that are kept
TIMES = 81


# %%
# What is known
# -------------
# The critical coupling of noise √(2τ) dW: e^{β⟨x,y⟩} has the Funk–Hecke coefficient
# Γ(d/2) (2/β)^{d/2−1} I_{d/2}(β) at degree 1, and the smallest harmonics decide.
def critical_coupling(dim, beta, *, temperature=0.5):
    """2τ β^{d/2} / (2^{d/2} Γ(d/2) I_{d/2}(β)); τ = ½ is standard Brownian motion."""
    half = dim / 2
    log = half * math.log(beta / 2) - float(gammaln(half)) - math.log(ive(half, beta)) - beta
    return 2 * temperature * math.exp(log)


# %%
# Stationary measures have the density ∝ exp((K/(βτ)) ∫e^{β⟨x,y⟩}dμ(y)); the one that is
# symmetric about a pole is the fixed point of this map that iteration from a point mass reaches.
def aligned_order(dim, beta, coupling, *, temperature=0.5, nodes=80):
    """|∫x dμ| of the most aligned stationary measure; 0 if that is uniform.

    Up to 0.015 too large at the critical coupling itself, where the iteration takes for ever.
    """
    # The uniform measure of S^{d−1} has the density (1 − u²)^{(d−3)/2} in u = ⟨x, pole⟩.
    rule = roots_jacobi(nodes, -0.5, -0.5) if dim == 2 else roots_gegenbauer(nodes, dim / 2 - 1)
    u, uniform = rule[0], rule[1] / rule[1].sum()
    # e^{β⟨x,y⟩} averaged over rotations of y about the pole; scaled by e^{−β} to stay finite.
    z = beta * np.sqrt((1 - u[:, None] ** 2) * (1 - u**2))
    half = (dim - 3) / 2
    bessel = np.exp(gammaln(half + 1)) * (2 / z) ** half * ive(half, z)
    kernel = bessel * np.exp(z + beta * u[:, None] * u - beta)
    strength = coupling / (beta * temperature) * math.exp(beta)
    density, found = np.where(u == u.max(), 1.0, 0.0), 1.0
    for _ in range(20_000):
        potential = strength * kernel @ density
        density = uniform * np.exp(potential - potential.max())
        density /= density.sum()
        before, found = found, float(density @ u)
        if abs(found - before) < 1e-12:
            break
    return found if found > 1e-3 else 0.0


# %%
# A simulation
# ------------
# dX = P_X Γ dt + √(2τ) P_X∘dW on the unit sphere by Euler–Maruyama: a step along the tangent
# space, and back to the sphere.
def noisy_flow(F, points, times, *, step, temperature, generator):
    """The particles at the times, (time, particle, feature)."""
    kept = [points]
    for length in np.diff(times):
        n_steps = math.ceil(length / step * (1 - 1e-12))
        h = length / n_steps
        for _ in range(n_steps):
            normal = torch.randn(points.shape, generator=generator, dtype=points.dtype)
            along = h * F(ParticleMeasure(points)).points
            along = along + math.sqrt(2 * temperature * h) * normal
            tangent = along - (along * points).sum(-1, keepdim=True) * points
            points = torch.nn.functional.normalize(points + tangent, dim=-1)
        kept.append(points)
    return torch.stack(kept)


# %%
# A case: the order of one noisy flow that starts half aligned, so that a jump is seen where the
# aligned state ceases to exist.
def order(dim, beta, ratio, *, n_particles, last, step, most_dim, generator):
    critical = critical_coupling(dim, beta)
    eye = torch.eye(dim, dtype=torch.float64)
    parameters = AttentionParameters.from_bilinear(beta * eye, ratio * critical * eye)
    x = sampling.sphere(n_particles, dim, generator=generator)
    path = noisy_flow(
        SelfAttention(parameters, normalization=exponential),
        torch.nn.functional.normalize(x + 2 * eye[0], dim=-1),
        np.linspace(0, last, TIMES),
        step=step,
        temperature=0.5,
        generator=generator,
    )
    late, points = path.mean(-2).norm(dim=-1)[TIMES // 2 :].numpy(), path[:, :SHOWN].numpy()
    return {
        "order": late.mean(),
        "order_spread": late.std(),
        "expected": aligned_order(dim, beta, ratio * critical),
        "uniform": n_particles**-0.5,
        "critical": critical,
        "points": np.pad(points, ((0, 0), (0, 0), (0, most_dim - dim))),
    }


PARAMETERS = (
    Variable("dim", "dimension d; the sphere is S^{d−1}"),
    Variable("beta", "inverse temperature β", symbol="\\beta"),
    Variable("ratio", "coupling over the critical one, K/K_#"),
    Variable("time", "time t", symbol="t"),
)
VARIABLES = (
    Variable("order", "|∫x dμ|, averaged over the second half of the flow"),
    Variable("order_spread", "standard deviation of it in time"),
    Variable("expected", "|∫x dμ| of the stationary measure that is not uniform; 0 if none"),
    Variable("uniform", "|∫x dμ| of n independent uniform particles: √⟨|∫x dμ|²⟩ = 1/√n"),
    Variable("critical", "critical coupling K_#"),
    Variable("points", "some particles", dims=("time", "particle", "feature")),
)


def run(grid, fixed, **how):
    """The sweep; arrays have these coordinates."""
    coords = {
        "time": np.linspace(0, fixed["last"], TIMES),
        "particle": np.arange(SHOWN),
        "feature": np.arange(fixed["most_dim"]),
    }
    return sweep(Task(order, VARIABLES, PARAMETERS, coords), grid, fixed=fixed, **how)


@figures.figure("order")
def order_against_coupling(ds, *, ax):
    """Order of noisy flows against the coupling over its critical value."""
    for colour, dim, beta, rows in by_level(ds, "dim", "beta"):
        label = rf"d = {dim}, $\beta$ = {beta:g}"
        ax.errorbar(
            rows.ratio, rows.order, rows.order_spread, fmt="o", color=colour, ms=4, label=label
        )
        critical = critical_coupling(dim, beta)
        formula(
            ax,
            np.vectorize(lambda r, d=dim, b=beta, k=critical: aligned_order(d, b, r * k)),
            rows.ratio,
            "-",
            color=colour,
            linewidth=1,
        )
    ax.axvline(1.0, color="0.4", linestyle="--", linewidth=1, label=r"$K_\#$")
    ax.plot([], [], "k-", linewidth=1, label="stationary measure, n = ∞")
    uniform = float(ds.uniform[0])
    label = rf"$1/\sqrt{{n}}$: {round(uniform**-2)} independent uniform particles"
    ax.axhline(uniform, color="0.4", linestyle=":", linewidth=1, label=label)
    ax.set(xlabel=r"coupling $K/K_\#$", ylim=(0, 1))
    ax.set_ylabel(r"order $|\int x\,d\mu|$, mean and deviation in time")
    last = float(ds.time[-1])
    # Near K_# the start is still felt, so that the points are above the lines.
    ax.set_title(f"Order from an aligned start, t = {last / 2:g} to {last:g}")


if __name__ == "__main__":  # worker processes import this file
    parser = argparse.ArgumentParser(description="Noise against clustering")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--out", type=Path, default=Path("results/29_noise_threshold"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    # %%
    # The sweep.
    ratios = [0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0]
    grid = {"dim": [2, 3], "beta": [0.5, 2.0], "ratio": ratios}
    fixed = {"n_particles": 400, "last": 30.0, "step": 0.05}
    if options.quick:
        grid = {"dim": [2], "beta": [0.5], "ratio": [0.5, 1.0, 2.0]}
        fixed |= {"n_particles": 300, "last": 20.0}
    fixed["most_dim"] = max(grid["dim"])
    ds = run(grid, fixed, executor=options.workers)
    results.write_dataset(ds, options.out / "noise-threshold.zarr")
    print(ds[["order", "order_spread", "expected"]].to_dataframe().iloc[:, -6:])

    # %%
    with figures.style():
        order_against_coupling(ds).figure.savefig(options.out / "order.png")
