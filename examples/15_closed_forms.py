"""Flows beside what is known of them
===================================

Collapse times, rates, phase transitions and covariance equations from the literature, each beside
a simulation. Where a closed form is exact the two agree to the accuracy of the integrator; where
it is about infinitely many particles, to the error of those there are. Noise and the places of the
norm have scripts of their own, ``29_noise_threshold.py`` and ``30_placement.py``.

::

    python examples/15_closed_forms.py [--quick] [--out DIR]
"""

# %%
import argparse
import math
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
import xarray as xr
from scipy.integrate import solve_ivp
from scipy.special import ive

from meanfield import (
    AttentionParameters,
    ParticleMeasure,
    SelfAttention,
    dynamics,
    figures,
    results,
    sampling,
)
from meanfield.attention.normalizations import exponential
from meanfield.layers import Chain, RMSNorm

parser = argparse.ArgumentParser(description="Flows beside what is known of them")
parser.add_argument("--quick", action="store_true")
parser.add_argument("--out", type=Path, default=Path("results/15_closed_forms"))
options = parser.parse_args()
options.out.mkdir(parents=True, exist_ok=True)

precise = dynamics.Adaptive("dop853", rtol=1e-11, atol=1e-13)
rows: list[tuple[str, float, float, float]] = []  # what, value, expected, error that is allowed


def identity(d):
    return torch.eye(d, dtype=torch.float64)


def attention(d, beta, value=1.0, **settings):
    A, V = beta * identity(d), value * identity(d)
    return SelfAttention(AttentionParameters.from_bilinear(A, V), **settings)


def cosine(points):
    x, y = np.asarray(points)[:2]
    return float(x @ y / np.linalg.norm(x) / np.linalg.norm(y))


# %%
# Equiangular tokens
# ------------------
# Orthonormal tokens on the sphere stay at one common angle. The times at which its cosine is
# 0.999 are those of Rigollet's survey (arXiv 2512.01868), with seven digits.
times = {
    "softmax, β = 1": (attention(32, 1.0), 5.270284),
    "softmax, β = 8": (attention(32, 8.0), 73.44568),
    "unnormalised, β = 1": (attention(32, 1.0, normalization=exponential), 2.897049),
}
for name, (F, time) in times.items():
    ds = dynamics.flow(
        F, ParticleMeasure(identity(32)), [0.0, time], method=precise, constraint="sphere"
    )
    rows.append((f"cosine at the collapse time, {name}", cosine(ds.points[-1]), 0.999, 1e-8))

# %%
# The cosine follows a scalar equation.
n, beta = 6, 2.0


def turn(_, rho):
    other = math.exp(beta * (rho[0] - 1))
    return 2 * other * (1 - rho) * ((n - 1) * rho + 1) / (1 + (n - 1) * other)


exact = solve_ivp(turn, (0.0, 3.0), [0.0], rtol=1e-11, atol=1e-13).y[0, -1]
mu = ParticleMeasure(identity(n))
ds = dynamics.flow(attention(n, beta), mu, [0.0, 3.0], method=precise, constraint="sphere")
rows.append(("cosine at t = 3", cosine(ds.points[-1]), float(exact), 1e-9))

# %%
# 1 − cosine ends as :math:`e^{-2t}` after Post-LN and as :math:`1/t^2` after Pre-LN, which
# attends to the directions alone.
G, mu = attention(16, 1.0), ParticleMeasure(identity(16))
on_directions = Chain([RMSNorm(torch.full((16,), 0.25, dtype=torch.float64), 0.0), G])
for placement, F, constraint, early, late, clock in (
    ("post", G, "sphere", 8, 10, lambda t: t),
    ("pre", on_directions, None, 1e3, 4e3, math.log),
):
    ds = dynamics.flow(F, mu, [0, early, late], method=precise, constraint=constraint)
    gaps = [1 - cosine(x) for x in ds.points[1:]]
    slope = math.log(gaps[0] / gaps[1]) / (clock(late) - clock(early))
    # At a finite time the next term of the expansion is left.
    rows.append(
        (f"rate of collapse, {placement}", slope, 2.0, 1e-3 if placement == "post" else 0.04)
    )

# %%
# One layer of n tokens with common cosine ½ and β = γ log n: they meet if γ < 2, stay if γ > 2.
n = 400 if options.quick else 1600
for gamma, limit in ((1.0, 1.0), (2.0, 0.8), (4.0, 0.5)):
    gram = 0.5 + 0.5 * identity(n)
    image = attention(n, gamma * math.log(n))(ParticleMeasure(torch.linalg.cholesky(gram)))
    rows.append(
        (f"cosine after one layer, γ = {gamma:g}", cosine(image.points), limit, 3 / n**0.5)
    )

# %%
# The circle
# ----------
# Of a nearly uniform measure the mode :math:`\cos k\varphi` grows at the rate
# :math:`k^2 I_k(\beta)/(\beta I_0(\beta))` (arXiv 2410.23228).
phi = 2 * math.pi * torch.arange(256, dtype=torch.float64) / 256
for beta, k in ((1.0, 1), (4.0, 2), (30.0, 5)):
    weights = (1 + 1e-6 * torch.cos(k * phi)) / 256
    mu = ParticleMeasure(torch.stack([phi.cos(), phi.sin()], -1), weights)
    h = 1e-3
    ds = dynamics.flow(attention(2, beta), mu, [0.0, h], method="rk4", step=h, constraint="sphere")
    sizes = [np.cos(k * np.arctan2(*x.T[::-1])) @ weights.numpy() for x in ds.points.values]
    rate = math.log(sizes[1] / sizes[0]) / h
    exact = k**2 * ive(k, beta) / (beta * ive(0, beta))
    rows.append((f"growth of mode {k}, β = {beta:g}", rate, exact, 1e-3))

# %%
# Gaussians and means
# -------------------
# A Gaussian stays one: its covariance follows :math:`\dot\Sigma = V\Sigma A\Sigma + (\cdot)^\top`.
# A quadrature of the start is exact; a sample is off by the error of a sample.
A = torch.tensor([[0.4, 0.3], [-0.2, 0.1]], dtype=torch.float64)
V = torch.tensor([[0.6, -0.5], [0.3, -0.8]], dtype=torch.float64)
mean = torch.tensor([0.3, -0.1], dtype=torch.float64)
sigma = torch.tensor([[0.8, 0.2], [0.2, 0.5]], dtype=torch.float64)
root = torch.linalg.cholesky(sigma)


def rate_of_sigma(_, y):
    drift = V.numpy() @ y.reshape(2, 2) @ A.numpy() @ y.reshape(2, 2)
    return (drift + drift.T).ravel()


end = solve_ivp(rate_of_sigma, (0.0, 1.0), sigma.ravel(), rtol=1e-11, atol=1e-13).y[:, -1]
exact = np.linalg.norm(end)

nodes, weights = (torch.as_tensor(a) for a in np.polynomial.hermite_e.hermegauss(26))
keep = weights > 1e-30
z = torch.cartesian_prod(nodes[keep], nodes[keep])
product = weights[keep][:, None] * weights[keep]
quadrature = ParticleMeasure(mean + z @ root.T, product.reshape(-1) / product.sum())
n = 500 if options.quick else 4000
sample = torch.randn(n, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
starts = {
    "quadrature": (quadrature, 1e-7),
    f"{n} samples": (ParticleMeasure(mean + sample @ root.T), 6 / n**0.5),
}
F = SelfAttention(AttentionParameters.from_bilinear(A, V))
for name, (mu, allowed) in starts.items():
    ds = dynamics.flow(F, mu, [0.0, 1.0], method="rk4", step=0.02)
    found = np.cov(ds.points.values[-1].T, aweights=mu.weights, bias=True)
    rows.append((f"|Σ| at t = 1, {name}", float(np.linalg.norm(found)), float(exact), allowed))

# %%
# Masked attention: the first token never moves, and all others come to it.
F = SelfAttention(AttentionParameters.from_bilinear(A, identity(2)), causal=True)
mu = ParticleMeasure.from_sequence(
    sampling.sphere(6, 2, generator=torch.Generator().manual_seed(3))
)
ds = dynamics.flow(F, mu, [0.0, 1.0, 300.0], method="dopri5", constraint="sphere")
gap = np.linalg.norm(ds.points.values - mu.points[0].numpy(), axis=-1)
rows.append(("way of the first token", float(gap[:, 0].max()), 0.0, 1e-12))
rows.append(("distance of the last token from it", float(gap[-1, -1]), 0.0, 0.02))

# %%
# The table
# ---------
columns = ("statement", "value", "expected", "allowed")
what, *numbers = (np.array(column) for column in zip(*rows, strict=True))
value, expected, allowed = numbers
meanings = {
    "value": ("simulated", value),
    "expected": ("closed form", expected),
    "error": ("|simulated - closed form|", abs(value - expected)),
    "allowed": ("error of the integrator, of the sample or of the limit", allowed),
}
table = xr.Dataset(
    {n: ("statement", column, {"long_name": text}) for n, (text, column) in meanings.items()},
    coords={"statement": ("statement", what, {"long_name": "what is known"})},
)
results.write_dataset(table, options.out / "closed_forms.nc")
print(table.to_dataframe().to_string(float_format="{:.6g}".format))
assert (table.error <= table.allowed).all()

# %%
# Each error beside what is allowed.
with figures.style():
    fig, ax = plt.subplots(figsize=(8, 6), layout="constrained")
    rank = np.arange(len(rows))[::-1]
    ax.semilogx(np.maximum(table.error, 1e-16), rank, "o", label="found")
    ax.semilogx(table.allowed, rank, "k|", ms=9, label="allowed")
    ax.set_yticks(rank, what)
    ax.set(xlabel="|simulated − closed form|", title="Flows beside what is known of them")
    ax.legend()
    fig.savefig(options.out / "closed_forms.png")
print(options.out / "closed_forms.png")
