"""
Through depth: dynamics
=======================

A deep network of residual layers is the Euler scheme of a flow. Let tokens flow, and watch them
gather into clusters.
"""

# %%
# A flow on the sphere
# --------------------
# With :math:`V=I` and :math:`A=\beta I` tokens attract each other. A layer norm keeps them on a
# sphere. Time is depth; the clock is logarithmic, for clusters meet late.
import matplotlib.pyplot as plt
import numpy as np
import torch

from meanfield import (
    AttentionParameters,
    ParticleMeasure,
    SelfAttention,
    dynamics,
    figures,
    local_lipschitz,
    sampling,
)
from meanfield.transport import solve_w2

beta = 9.0
eye = torch.eye(2, dtype=torch.float64)
F = SelfAttention(AttentionParameters.from_bilinear(beta * eye, eye))
mu = ParticleMeasure(sampling.sphere(48, 2, generator=torch.Generator().manual_seed(1)))
times = np.append(0, np.geomspace(0.01, 1e3, 60))
ds = dynamics.flow(
    F, mu, times, method="dopri5", constraint="sphere", coalesce=1e-7,
    observe={"clusters": lambda nu: dynamics.cluster_count(nu, 0.05)},
)  # fmt: skip
ds

# %%
# The angle of each token through time: many clusters first, then fewer.
angles = torch.atan2(*torch.as_tensor(ds.points.values)[..., [1, 0]].unbind(-1))
with figures.style():
    top, bottom = plt.subplots(2, sharex=True, height_ratios=[3, 1], layout="constrained")[1]
    top.semilogx(ds.time[1:], angles[1:], ".", ms=1.5, color="C0")
    top.set(ylabel="angle of the token", title=f"{mu.n_particles} tokens on the circle")
    bottom.step(ds.time[1:], ds.clusters[1:], where="post", color="C1")
    bottom.set(xlabel="time (depth)", ylabel="clusters")

# %%
# What happened to the measure
# ----------------------------
# W₂ from the start, with its interval, beside what the tokens' own paths say. Where the two
# agree, the tokens moved along an optimal plan.
for k in (20, 40, 60):
    nu = dynamics.measure_at(ds, k)
    own = float((nu.points - mu.points).square().sum(-1).mean().sqrt())
    found = solve_w2(nu, mu)
    print(f"t = {times[k]:8.3g}: {found.lower:.9f} to {found.upper:.9f}, own paths {own:.9f}")

# %%
# How stable is it?
# -----------------
# The local constant of the flow map from time 0 to t, beside what the one-sided constants of its
# velocities (``rate``) would allow if they all added up.
small = ParticleMeasure(mu.points[:8])
found = dynamics.stability(
    F, small, [0.0, 0.25, 0.5, 1.0], method="rk4", step=0.05, constraint="sphere"
)
found[["constant", "constant_splitting", "rate", "growth"]].to_dataframe().round(3)

# %%
# Held against a closed form
# --------------------------
# Orthonormal tokens stay at one common angle, whose cosine follows a scalar equation: of 32 tokens
# in 32 dimensions it is 0.999 at t = 5.270284. The example ``15_closed_forms.py`` has a table of
# such statements.
tokens = ParticleMeasure(torch.eye(32, dtype=torch.float64))
G = SelfAttention(AttentionParameters.from_bilinear(tokens.points, tokens.points))
end = dynamics.flow(
    G, tokens, [0.0, 5.270284], method="rk4", step=0.05, constraint="sphere"
).points[-1]
print(f"cosine {float(end[0] @ end[1]):.9f}")

# %%
# The measure at one of the times, and the flow as one map with the constant of all its steps:
half = dynamics.measure_at(ds, len(ds.time) // 2)
flowed = dynamics.FlowMap(F, 0.5, method="rk4", step=0.05, constraint="sphere")
print(half, float(local_lipschitz(flowed, small)))

# %%
# A trained network has depth of its own: ``meanfield run through-depth --set models=FOLDER``
# follows a text through the blocks of a checkpoint. Experiments: ``clustering`` and
# ``mean-field-limit``; scripts 27 to 30, 33 and 34 of the gallery are on two clusters, masked
# tokens, noise, the place of the normalisation, metastable stages and Gaussians.
