"""
Two unbalanced Diracs
=====================

How sensitive is self-attention? The answer begins with two tokens of very different weight.

Self-attention is read here as a map of probability measures. A cloud of tokens is a measure
:math:`\\mu=\\sum_i a_i\\delta_{x_i}`, and attention moves each of its atoms:

.. math::
   F(\\mu) = (\\Gamma_\\mu)_\\#\\mu,\\qquad
   \\Gamma_\\mu(x)=V\\,\\frac{\\int e^{\\langle Ax,y\\rangle}\\,y\\,d\\mu(y)}
   {\\int e^{\\langle Ax,y\\rangle}\\,d\\mu(y)} .

"""

# %%
# A layer and a measure
# ---------------------
# With :math:`A=K^\top Q/\sqrt k` as one matrix, a layer in dimension 1 is two numbers. The
# measure has a light atom at 1 and a heavy one at −1.
import matplotlib.pyplot as plt
import numpy as np

from meanfield import (
    AttentionParameters,
    ParticleMeasure,
    SelfAttention,
    bounds,
    figures,
    sampling,
)
from meanfield.lipschitz import local_lipschitz, localize, secant_ratio

F = SelfAttention(AttentionParameters.from_bilinear([[-1.0]], [[1.0]]))  # A, V
mu = ParticleMeasure([[1.0], [-1.0]], weights=[0.1, 0.9])
F(mu).points

# %%
# The local constant
# ------------------
# By how much does a small displacement of ``mu`` grow? Distances are W₂, and the answer is the
# largest singular value of a derivative, with the evidence for it.
constant = local_lipschitz(F, mu)
constant

# %%
# It has two parts. Atoms may move as a whole (``particle``), and one atom may split about its
# place (``splitting``), which W₂ allows. Which atom carries the worst displacement?
localize(constant, F, mu).particles

# %%
# The constant is a limit of ratios of distances. A small step in the worst direction nearly
# attains it, and the distances are intervals, so that the ratio is proven. (The direction comes
# weighted, as :math:`\sqrt{a_i}\,\varepsilon_i`.)
step = 1e-4 * constant.direction / mu.weights.sqrt()[:, None]
secant_ratio(F, mu, mu.replace(mu.points + step))

# %%
# The worst weight
# ----------------
# The lighter the atom that moves, the smaller the distance it moves by, but the less attention it
# gets. In between is the worst weight, and the constant there grows like :math:`R^2e^{R^2}` with
# the radius R. Weights are logarithms, so :math:`e^{-900}` is an ordinary number.
log_ratios = np.linspace(-30, 5, 80)
with figures.style():
    ax = plt.subplots()[1]
    for R in (1.0, 2.0, 3.0):
        pairs = [sampling.two_diracs(R, x, direction=[1.0]) for x in log_ratios]
        values = [float(local_lipschitz(F, pair).value) for pair in pairs]
        ax.semilogy(log_ratios, values, label=f"R = {R:g}")
    ax.set(xlabel="logarithm of the light weight over the heavy one", ylabel="local constant")
    ax.legend()

# %%
# Held against the theorems
# -------------------------
# For each radius: the best pair, the bound of :cite:p:`CAP24` Theorem 3.5, and that of this
# package, which comes within 0.02 % of the pair at R = 3.
print("  R        pair   this package  Theorem 3.5")
for R in (0.5, 1.0, 2.0, 3.0):
    worst = sampling.two_diracs(R, bounds.two_dirac_best_log_ratio(1.0, R), direction=[1.0])
    found = float(local_lipschitz(F, worst).value)
    ours, theirs = bounds.mean_field(1, 1, R), bounds.theorem_3_5(1, 1, R)
    print(f"{R:3g} {found:11.4f} {ours:14.4f} {theirs:12.4g}")

# %%
# And at a radius at which the constant has 198 digits:
far = sampling.two_diracs(radius=450**0.5, log_ratio=-900.0, direction=[1.0])
print(f"{float(local_lipschitz(F, far).value):.4e}")

# %%
# The same as one command, with masking, n tokens and the figures: ``meanfield run two-dirac``.
# Proofs are on the page :doc:`/theory`.
