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
from meanfield.lipschitz import compare_lemma_3_2, local_lipschitz, localize, secant_ratio

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
# The constant is a limit of ratios of distances. A small step in the worst direction has nearly
# that ratio, here a little more: a step ends where the constant is another. The distances are
# intervals, so that it is proven of the Lipschitz constant that it is no less. (The direction
# comes weighted, as :math:`\sqrt{a_i}\,\varepsilon_i`.)
step = 1e-4 * constant.direction / mu.weights.sqrt()[:, None]
secant_ratio(F, mu, mu.replace(mu.points + step))

# %%
# Discrete tokens beside measures
# -------------------------------
# A program holds n tokens :math:`X=(x_1,\ldots,x_n)` and a map :math:`X\mapsto f(X)` of
# :math:`\mathbb R^{n\times d}`; its constant is Euclidean. :cite:p:`CAP24` Lemma 3.2 says that
# among measures of n atoms of equal weight it is the constant in :math:`W_2`, too. So are the
# ratios along small steps, since the identity is then the optimal coupling. Among all measures an
# atom may split besides: the constant is the larger of this number and the splitting component.
tokens = [[1.0], [-1.0], [0.5]]
both = compare_lemma_3_2(F, tokens)
print(f"Euclidean {float(both.euclidean):.6f}, Wasserstein {float(both.wasserstein):.6f}")

# %%
# Along the worst direction the ratios tend to that constant as the step shrinks. Beyond half the
# distance between tokens they may differ: mass that takes a shorter way than its token makes
# :math:`W_2` smaller than the Euclidean distance.
along = both.sel(perturbation="top")
lengths = np.geomspace(0.02, 20, 60)
long = compare_lemma_3_2(F, tokens, steps=lengths).sel(perturbation="random")
with figures.style():
    ax = plt.subplots()[1]
    ax.semilogx(lengths, long.euclidean_secant, label="Euclidean ratio, random direction")
    ax.semilogx(lengths, long.wasserstein_secant, "--", label="Wasserstein ratio")
    ax.axhline(float(both.euclidean), color="black", lw=0.8, label="local constant of both")
    ax.set(xlabel="length of the step over the radius", ylabel="ratio of distances")
    ax.legend(loc="lower right")
along.euclidean_secant.values, along.wasserstein_secant.values

# %%
# On weights that differ the two geometries part: a light atom that moves far is a small step in
# :math:`W_2` and a large one for the program.
euclidean = local_lipschitz(F, mu, geometry="euclidean")
print(f"Euclidean {float(euclidean):.4f}, Wasserstein {float(constant):.4f}")

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
# For each radius: a pair that is the worst from about R = 1.5 on, the bound of :cite:p:`CAP24`
# Theorem 3.5, and that of this package, which comes within 7e-8 of the pair at R = 3.
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
