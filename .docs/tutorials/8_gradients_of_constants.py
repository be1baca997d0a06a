"""
Gradients of constants
======================

A constant of a layer as a term of a loss: where its gradient comes from, how to check it, what it
costs, and where there is none.
"""

# %%
# A gradient
# ----------
# The parameters of a layer ask for gradients as in any other torch code, and so may the points and
# the log-weights of the measure.
import matplotlib.pyplot as plt
import torch

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, figures, sampling
from meanfield.lipschitz import local_lipschitz

generator = torch.Generator().manual_seed(0)


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=generator) / 2


query, key, value = (draw(4, 4).requires_grad_() for _ in range(3))
points = sampling.ball(8, 4, radius=2.0, generator=generator).requires_grad_()


def constant(query):
    F = SelfAttention(AttentionParameters(query, key, value))
    return local_lipschitz(F, ParticleMeasure(points)).value


sigma = constant(query)
sigma.backward()
print(f"constant {float(sigma.detach()):.4f}")
print(f"|gradient in the queries| {float(query.grad.norm()):.4f}")
print(f"|gradient in the points|  {float(points.grad.norm()):.4f}")

# %%
# The constant is :math:`\sigma=\|Jv\|` for the worst displacement :math:`v`, and it is stationary
# in :math:`v`. So :math:`d\sigma=\langle u,(dJ)v\rangle` with :math:`u=Jv/\sigma`: one derivative
# of the layer along a fixed direction, recorded. A difference quotient agrees:
along, step = draw(4, 4), 1e-5
with torch.no_grad():
    quotient = (constant(query + step * along) - constant(query - step * along)) / (2 * step)
print(f"by the gradient   {float((query.grad * along).sum()):.9f}")
print(f"by a difference   {float(quotient):.9f}")

# %%
# As a penalty
# ------------
# Here a layer learns to send its tokens to given places, and pays for log σ. ``strict=False``
# suits a training loop: where two singular values meet, the gradient is one of the generalised
# gradients, and nothing stops.
target = draw(8, 4)


def train(price):
    w = [t.detach().clone().requires_grad_() for t in (query, key, value)]
    mu, adam, curve = ParticleMeasure(points.detach()), torch.optim.Adam(w, lr=0.02), []
    for _ in range(60):
        F = SelfAttention(AttentionParameters(*w))
        loss = (F(mu).points - target).square().mean()
        sigma = local_lipschitz(F, mu, strict=False).value
        adam.zero_grad()
        (loss + price * sigma.log()).backward()
        adam.step()
        curve.append((float(loss.detach()), float(sigma.detach())))
    return curve


with figures.style():
    ax = plt.subplots()[1]
    for price in (0.0, 0.01, 0.05):
        losses, constants = zip(*train(price), strict=True)
        ax.plot(constants, losses, ".-", label=f"price {price:g}")
        print(f"price {price:<5g} loss {losses[-1]:.4f}  constant {constants[-1]:.3f}")
    ax.set(xscale="log", xlabel="local constant", ylabel="mean squared error")
    ax.legend()

# %%
# Each point is one step: the price moves the path to the left, at some cost in the loss.
# ``examples/18_penalised_training.py`` does this for a character model.

# %%
# Where there is none
# -------------------
# Where the largest singular value is double there is in general no derivative, and the backward
# pass says so. Of the mean all singular values that are not 0 are 1:
mean = SelfAttention(
    AttentionParameters(torch.zeros_like(query), key.detach(), torch.eye(4).double())
)
try:
    local_lipschitz(mean, ParticleMeasure(points)).value.backward()
except ValueError as error:
    print(error)
