"""
Your own map, your own attention kernel
=======================================

Nothing in this package is tied to softmax attention. Distances and constants take any map of
measures: a Python function from a measure to a measure.
"""

# %%
# A map of measures
# -----------------
# Keep the atoms and their weights, and move the points with torch operations:
# ``mu.replace(points)``. A residual layer is one line.
import matplotlib.pyplot as plt
import torch
from torch import nn

from meanfield import (
    AttentionParameters,
    ParticleMeasure,
    SelfAttention,
    figures,
    layers,
    linearize,
    pushforward,
    sampling,
)
from meanfield.attention import kernels
from meanfield.lipschitz import ball_upper, local_lipschitz, worst_case
from meanfield.maps import BallBounds, expanded_radii

generator = torch.Generator().manual_seed(0)
parameters = AttentionParameters.random(4, n_heads=2, generator=generator)
attention = SelfAttention(parameters)
mu = ParticleMeasure(sampling.ball(16, 4, radius=2.0, generator=generator))


def block(nu):
    return nu.replace(nu.points + 0.5 * attention(nu).points)


local_lipschitz(block, mu)

# %%
# The derivative is taken automatically and checked once, against a difference quotient. A map
# that leaves torch (``.detach()``, ``.numpy()``) or changes weights is refused with a sentence.
# The derivative itself is a linear map; ask for its matrix where it is small.
linearize(block, mu).atoms.to_dense().shape

# %%
# A map of points
# ---------------
# A network that acts on each token alone is not yet a map of measures: push the measure forward.
# Maps compose like functions.
torch.manual_seed(0)
mlp = nn.Sequential(nn.Linear(4, 32), nn.GELU(), nn.Linear(32, 4)).double().requires_grad_(False)
print(local_lipschitz(lambda nu: pushforward(mlp, block(nu)), mu))

# %%
# A layer that knows more
# -----------------------
# A function declares nothing. What you know of a map goes into a subclass of ``meanfield.Map``:
# whether it is masked, its derivative, bounds that you have proved. A layer that moves every
# token by itself gives two products, and its exact derivative and constant follow; a third
# method bounds what happens as tokens move.


class Linear(layers.Particlewise):
    """x ↦ Wx + b."""

    def __init__(self, weight, bias):
        self.weight, self.bias = weight, bias
        self.norm = torch.linalg.matrix_norm(weight, 2)

    def __call__(self, mu):
        return mu.replace(mu.points @ self.weight.mT + self.bias)

    def products(self, mu):
        return lambda eps: eps @ self.weight.mT, lambda zeta: zeta @ self.weight

    def ball_bounds(self, mu, radii, *, splitting=True):
        moved = self.norm * expanded_radii(mu, radii)
        return BallBounds.of(self.norm, torch.zeros_like(self.norm), self.norm, moved)


linear = Linear(torch.randn(4, 4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64))
network = layers.Chain([layers.Residual(attention), linear])
print(local_lipschitz(network, mu))

# %%
# The networks that it is part of have such bounds too. No local constant is above this one while
# every token moves by at most 0.01:
ball_upper(network, mu, 0.01)

# %%
# Your own kernel
# ---------------
# A kernel says what two particles make of each other: queries, keys and values of each point.
# Give ``features``; softmax, masks, weights, blocks and derivatives are there already. This one
# takes the hyperbolic tangent of the usual queries and keys, so that scores are bounded.


class TanhKernel(kernels.Kernel):
    """The score of query x and key y is ⟨tanh(scale · Qx), tanh(Ky)⟩."""

    def features(self, parameters, points, positions):
        q, k, v = parameters.project(points)  # of every head: (H, n, k), (H, n, k), (H, n, v)
        scale = parameters.scale[:, None, None]
        return kernels.Features((scale * q).tanh(), k.tanh(), v)


mine = SelfAttention(parameters, kernel=TanhKernel())
local_lipschitz(mine, mu)

# %%
# Is that right? The same layer written by hand gives the same constant.


def by_hand(nu):
    q, k, v = parameters.project(nu.points)
    scores = (parameters.scale[:, None, None] * q).tanh() @ k.tanh().mT
    return nu.replace(parameters.join(torch.softmax(scores + nu.log_weights, -1) @ v))


print(float(local_lipschitz(mine, mu)), float(local_lipschitz(by_hand, mu)))

# %%
# What comes with it
# ------------------
# The kernels of the literature are there: ``l2``, ``cosine``, ``qk_norm``, ``soft_cap``,
# ``rotary``, ``alibi``, ``window``, and they combine. How do constants grow with the radius of
# the cloud?
kinds = {
    "dot product": SelfAttention(parameters),
    "L2": SelfAttention(parameters, kernel=kernels.l2),
    "soft cap at 2": SelfAttention(parameters, kernel=kernels.soft_cap(2.0)),
    "tanh (mine)": mine,
}
radii = [0.5, 1, 2, 4, 8, 16]
shape = sampling.ball(16, 4, generator=generator)
with figures.style():
    ax = plt.subplots()[1]
    for marker, (name, layer) in zip("osx^", kinds.items(), strict=True):
        values = [float(local_lipschitz(layer, ParticleMeasure(R * shape))) for R in radii]
        ax.semilogy(radii, values, marker + "-", label=name)
    ax.set_xscale("log", base=2)
    ax.set_xticks(radii, radii)
    ax.set(xlabel="radius R of the cloud", ylabel="local constant")
    ax.legend()

# %%
# A map of single points, the same for each, is a ``layers.Pointwise``; attention from one measure
# to another is the pushforward of the second by the field of the first.
wave = layers.Pointwise(torch.sin, lipschitz=1.0, curvature=1.0)
context = ParticleMeasure(torch.randn(5, 4, dtype=torch.float64, generator=generator))
gamma = attention.field(context)
print(float(local_lipschitz(wave, mu)))
print(float(local_lipschitz(lambda queries: pushforward(gamma, queries), mu)))

# %%
# Over a whole ball
# -----------------
# The constant at one measure is not the constant of the map. A search over atoms and weights
# climbs to measures at which it is large: each is a lower bound of the constant on the ball.
worst, largest = worst_case(mine, 2.0, dim=4, starts=8, steps=50, generator=generator)
largest
