"""Conditional distances
=====================

Two sequences are near if tokens at the same position are: W₂ inside each position, and what a
price on changing the position makes of it.

::

    python examples/25_conditional_distance.py [--quick] [--out DIR]
"""

# %%
import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from meanfield import ParticleMeasure, figures, solve_w2
from meanfield.transport import solve_conditional_w2

parser = argparse.ArgumentParser(description="Conditional distances")
parser.add_argument("--quick", action="store_true")
parser.add_argument("--out", type=Path, default=Path("results/25_conditional_distance"))
options = parser.parse_args()
options.out.mkdir(parents=True, exist_ok=True)

# %%
# A sequence, and the same tokens in reverse
# ------------------------------------------
# As clouds they are equal, as sequences they are not. This is the distance in which masked
# attention has a constant [CAP24].
n = 12
angle = np.linspace(0, np.pi, n)
X = np.stack([np.cos(angle), np.sin(angle)], -1)
forward, backward = ParticleMeasure.from_sequence(X), ParticleMeasure.from_sequence(X[::-1].copy())
print("W2           ", float(solve_w2(X, X[::-1].copy())))
print("conditional  ", float(solve_conditional_w2(forward, backward)))
print("by hand      ", float(np.sqrt(np.square(X - X[::-1]).sum(1).mean())))

# %%
# Between them: a price λ on changing the position,
#
# .. math:: d_{2,\lambda}^2 = \min_\pi \sum_{ij} \pi_{ij}
#           \bigl(\|x_i - y_j\|^2 + \lambda (s_i - t_j)^2\bigr).
#
# It is W₂ at λ = 0 and tends to the conditional distance. Every value is a certified interval.
prices = np.concatenate([[0.0], 4.0 ** np.arange(-2, 6)])
found = [solve_conditional_w2(forward, backward, penalty=price) for price in prices]
for price, one in zip(prices, found, strict=True):
    print(f"λ = {price:<8g} {float(one.lower):.12f} to {float(one.upper):.12f}")

# %%
# Conditions of any kind
# ----------------------
# A condition is a number or a vector: here a class, coded as a unit vector, of clouds that have
# several points per class. Without a penalty mass stays in its class.
rng = np.random.default_rng(0)
size = 60 if options.quick else 600
classes = rng.integers(0, 3, size)
centres = np.array([[0.0, 0.0], [3.0, 0.0], [0.0, 3.0]])
x = centres[classes] + 0.5 * rng.normal(size=(size, 2))
y = centres[(classes + 1) % 3] + 0.5 * rng.normal(size=(size, 2))  # classes have moved round
labels = np.eye(3)[classes]
inside = solve_conditional_w2(x, y, conditions=(labels, labels))
print("W2, whatever the class", float(solve_w2(x, y)), " class by class", float(inside))
inside

# %%
# The plan as arrows: class by class, and with a small price on leaving the class.
cheap = solve_conditional_w2(x, y, conditions=(labels, labels), penalty=1.0)
with figures.style():
    fig, axes = plt.subplots(1, 2, figsize=(9, 4), sharey=True)
    for ax, result, title in (
        (axes[0], inside, "no mass leaves its class"),
        (axes[1], cheap, "a price of 1 on leaving it"),
    ):
        plan = result.coupling
        for i, j in zip(plan.rows.tolist(), plan.cols.tolist(), strict=True):
            ax.plot(*np.stack([x[i], y[j]]).T, color=f"C{classes[i]}", lw=0.5, alpha=0.6)
        ax.plot(*x.T, "k.", ms=2)
        ax.set(xlabel="$x_1$", title=f"{title}: {float(result):.3f}", aspect="equal")
    axes[0].set(ylabel="$x_2$")
    fig.savefig(options.out / "conditional.png")
print(options.out / "conditional.png")
