"""
Certified robustness of a layer
===============================

If every token moves by at most ε, how far can the output move? An answer that holds for *all* such
changes, and not only for those that an attack tried.
"""

# %%
# A layer and a sequence
# ----------------------
import matplotlib.pyplot as plt
import numpy as np
import torch

from meanfield import (
    AttentionParameters,
    ParticleMeasure,
    SelfAttention,
    bounds,
    figures,
    sampling,
)
from meanfield.lipschitz import ball_upper, local_lipschitz
from meanfield.transport import w2

generator = torch.Generator().manual_seed(0)
F = SelfAttention(AttentionParameters.random(8, n_heads=2, generator=generator))
mu = ParticleMeasure(sampling.ball(12, 8, radius=1.5, generator=generator))

# %%
# Three numbers
# -------------
# The constant at ``mu`` is about infinitely small changes. ``ball_upper(F, mu, epsilon)``
# bounds the constants at *every* measure within ε, atoms that split included. The a-priori
# bound knows nothing but norms and the radius of the tokens.
constant = float(local_lipschitz(F, mu).value)
radius = float(mu.points.norm(dim=-1).max())
print(f"constant at mu            {constant:10.3f}")
for epsilon in (0.001, 0.01, 0.1):
    print(f"within {epsilon:<5g} of mu        {float(ball_upper(F, mu, epsilon)):10.3f}")
bounds.table(F, radius, n=12)

# %%
# A certificate
# -------------
# The straight path from ``mu`` to any of these changes stays in the ball. So if token i moves by
# :math:`\delta_i`, none by more than ε, then
#
# .. math:: W_2(F(\nu),F(\mu))\le L_\varepsilon\,\Bigl(\sum_i a_i|\delta_i|^2\Bigr)^{1/2}.
#
# We attack it: first in the worst direction there is at ``mu``, then at random.
epsilon = 0.05
L = float(ball_upper(F, mu, epsilon))
worst = local_lipschitz(F, mu).direction
moves = [worst, *torch.randn(200, *mu.points.shape, dtype=torch.float64, generator=generator)]
ratios = []
for move in moves:
    delta = epsilon * move / move.norm(dim=-1).max()
    size = (mu.weights * delta.square().sum(-1)).sum().sqrt()
    ratios.append(float(w2(F(mu.replace(mu.points + delta)), F(mu)) / size))
print(
    f"largest ratio found {max(ratios):.4f} (worst direction {ratios[0]:.4f}), certified {L:.4f}"
)
assert max(ratios) <= L

# %%
# How the certificate grows with ε:
epsilons = np.logspace(-4, 0, 25)
certified = [float(ball_upper(F, mu, e)) for e in epsilons]
with figures.style():
    ax = plt.subplots()[1]
    ax.loglog(epsilons, certified, label="certified for the ball")
    ax.axhline(constant, color="C1", ls="--", label="constant at the centre")
    a_priori = [bounds.table(F, radius + e).row("mean field").value for e in epsilons]
    ax.loglog(epsilons, a_priori, color="0.5", ls=":", label="a priori, on a ball that holds it")
    ax.set(xlabel="radius ε: how far each token may move", ylabel="Lipschitz constant")
    ax.legend()

# %%
# What it does not say
# --------------------
# It is a bound of one layer. It grows with ε, in the end beyond the a-priori bound on the ball of
# radius R + ε, which the tokens do not leave: take the smaller. The proof is in the section "Over
# a ball round an input" of :doc:`/theory`. Which numbers of this package are certain and which are
# estimates is on the page :doc:`/evidence`.
