"""Kuramoto and Wasserstein gradient flows
=======================================

Three flows on the circle that are attention: coupled oscillators, a gradient flow of the
interaction energy, and the softmax, which follows the same energy at a speed of its own [GLPR23].

::

    python examples/22_gradient_flows.py [--quick] [--out DIR]
"""

# %%
import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, dynamics, figures
from meanfield.attention import normalizations

parser = argparse.ArgumentParser(description="Kuramoto and Wasserstein gradient flows")
parser.add_argument("--quick", action="store_true")
parser.add_argument("--out", type=Path, default=Path("results/22_gradient_flows"))
options = parser.parse_args()
options.out.mkdir(parents=True, exist_ok=True)

n = 24 if options.quick else 100
angles = np.random.default_rng(0).uniform(0, 2 * np.pi, n)
mu = ParticleMeasure(np.stack([np.cos(angles), np.sin(angles)], -1))
eye = torch.eye(2, dtype=torch.float64)
precise = dynamics.Adaptive(rtol=1e-10)


def attention(beta, normalization):
    parameters = AttentionParameters.from_bilinear(beta * eye, eye)
    return SelfAttention(parameters, normalization=normalization)


# %%
# Kuramoto's oscillators
# ----------------------
# At β = 0 every token sees the mean of all, and on the circle that is
#
# .. math:: \dot\theta_i = \frac1n \sum_j \sin(\theta_j - \theta_i),
#
# Kuramoto's model of identical oscillators. A Runge-Kutta loop for it ends at the same angles.
times = np.linspace(0, 6, 25)
oscillators = dynamics.flow(
    attention(0.0, normalizations.softmax), mu, times, method=precise, constraint="sphere"
)


def kuramoto(theta):
    return np.sin(theta - theta[:, None]).mean(1)


theta, step = angles.copy(), 1e-2
for _ in range(round(times[-1] / step)):
    a = kuramoto(theta)
    b = kuramoto(theta + step / 2 * a)
    c = kuramoto(theta + step / 2 * b)
    theta = theta + step / 6 * (a + 2 * b + 2 * c + kuramoto(theta + step * c))
by_hand = np.stack([np.cos(theta), np.sin(theta)], -1)
furthest = np.abs(oscillators.points[-1] - by_hand).max().item()
print(f"largest difference from Kuramoto: {furthest:.1e}")

# %%
# A Wasserstein gradient flow
# ---------------------------
# Without the division by its row sums, attention with A = βI and V = I is the gradient of
#
# .. math:: E_\beta(\mu) = \frac{1}{2\beta} \iint e^{\beta\langle x, y\rangle}\,d\mu(x)\,d\mu(y)
#
# in W₂: the energy grows exactly as fast as the mean square of the speeds,
# :math:`\dot E = \int |\dot x|^2 d\mu`. The softmax divides each speed by a number, so that the
# energy grows too, but not at that rate.
beta = 4.0
fine = np.linspace(0, 1.5, 301)
flows = {
    "exponential": dynamics.flow(
        attention(beta, normalizations.exponential), mu, fine, method=precise, constraint="sphere"
    ),
    "softmax": dynamics.flow(
        attention(beta, normalizations.softmax), mu, fine, method=precise, constraint="sphere"
    ),
}


def energy(points):
    cloud = ParticleMeasure(points)
    return float(dynamics.log_energy(cloud, beta * eye).exp()) / (2 * beta)


def rates(flow):
    """dE/dt and the mean squared speed, both from differences in time."""
    E = np.array([energy(points) for points in flow.points.values])
    speed = np.gradient(flow.points.values, fine, axis=0)
    return np.gradient(E, fine), np.square(speed).sum(-1).mean(-1)


for name, flow in flows.items():
    growth, speed = rates(flow)
    ratio = (growth / speed)[5:-5]
    print(f"{name:12} dE/dt over the mean squared speed: {ratio.min():.4f} to {ratio.max():.4f}")

# %%
# Left, where the softmax has come by the last of these times; right, how fast the energies grow.
# No energy is larger than that of one point, :math:`e^\beta/2\beta`, where all clusters end.
with figures.style():
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
    figures.plot_particle_paths(flows["softmax"], ax=left, title=rf"softmax, $\beta$ = {beta:g}")
    for name, flow in flows.items():
        growth, speed = rates(flow)
        right.semilogy(fine[5:-5], growth[5:-5], label=f"{name}: dE/dt")
        right.semilogy(fine[5:-5], speed[5:-5], "k:", lw=1)
    right.plot([], [], "k:", lw=1, label="mean squared speed")
    right.set(xlabel="time t", title="Growth of the energy")
    right.legend()
    fig.savefig(options.out / "gradient_flows.png")
print(options.out / "gradient_flows.png")
