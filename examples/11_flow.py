"""Measures through depth
======================

A flow, what it does to a measure, and how stable it is.

::

    python examples/11_flow.py [--quick] [--out DIR]
"""

# %%
import argparse
from pathlib import Path

import numpy as np
import torch

from meanfield import (
    AttentionParameters,
    ParticleMeasure,
    SelfAttention,
    dynamics,
    experiments,
    figures,
    results,
    sampling,
    transport,
)

parser = argparse.ArgumentParser(description="Measures through depth")
parser.add_argument("--quick", action="store_true")
parser.add_argument("--out", type=Path, default=Path("results/11_flow"))
options = parser.parse_args()
options.out.mkdir(parents=True, exist_ok=True)

# %%
# Tokens on the sphere, attention with V = I and A = βI, on a logarithmic clock.
n, beta = (60, 9.0) if options.quick else (300, 9.0)
eye = torch.eye(3, dtype=torch.float64)
F = SelfAttention(AttentionParameters.from_bilinear(beta * eye, eye))
mu = ParticleMeasure(sampling.sphere(n, 3, generator=torch.Generator().manual_seed(0)))
ds = dynamics.flow(
    F,
    mu,
    np.append(0, np.geomspace(0.01, 1e4, 40)),
    method="dopri5",
    constraint="sphere",
    coalesce=1e-7,
    observe={
        "clusters": lambda mu: dynamics.cluster_count(mu, 0.05),
        "log_energy": lambda mu: dynamics.log_energy(mu, beta * eye),
        "diameter": lambda mu: torch.cdist(mu.points, mu.points).max(),
    },
)
results.write_dataset(ds, options.out / "flow.nc")
print(ds[["clusters", "log_energy", "diameter"]].isel(time=slice(None, None, 8)).to_dataframe())

# %%
# What the whole flow did: W2 to the start with its interval, and the particles' own way.
for k in (20, 40):
    nu = dynamics.measure_at(ds, k)
    own = float((nu.points - mu.points).square().sum(-1).mean().sqrt())
    print(f"t = {float(ds.time[k]):.3g}: {transport.solve_w2(nu, mu)}, own way {own:.9f}")

# %%
# Stability: the local constant of the flow map, beside what its layers would allow.
small = ParticleMeasure(mu.points[:8])
found = dynamics.stability(
    F, small, [0.0, 0.25, 0.5, 1.0], method="rk4", step=0.05, constraint="sphere"
)
print(found[["constant", "constant_splitting", "rate", "growth"]].to_dataframe().round(3))

# %%
# A residual network is the Euler scheme. Orthonormal tokens stay at one angle: at this time its
# cosine is 0.999 (Rigollet, arXiv 2512.01868).
tokens = ParticleMeasure(torch.eye(32, dtype=torch.float64))
G = SelfAttention(AttentionParameters.from_bilinear(tokens.points, tokens.points))
end = dynamics.flow(
    G, tokens, [0.0, 5.270284], method="rk4", step=0.05, constraint="sphere"
).points[-1]
print(f"cosine {float(end[0] @ end[1]):.9f}")

# %%
# The paths of the first flow; figures of an experiment.
with figures.style():
    ax = figures.plot_particle_paths(ds, title=rf"Tokens on the sphere, $\beta$ = {beta:g}")
    ax.figure.savefig(options.out / "paths.png")
clustering = experiments.get("clustering")
made = clustering.run(clustering.quick)
print(*figures.save_all(made, clustering.figures, options.out, stem="clustering"), sep="\n")
