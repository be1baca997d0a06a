"""The most sensitive measures
===========================

Search, both components, bounds, and where the worst direction is.

::

    python examples/04_worst_case.py [--quick] [--out DIR]
"""

# %%
import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from meanfield import AttentionParameters, SelfAttention, bounds, figures
from meanfield.lipschitz import localize, secant_ratio, worst_case

parser = argparse.ArgumentParser(description="The most sensitive measures")
parser.add_argument("--quick", action="store_true")
parser.add_argument("--out", type=Path, default=Path("results/04_worst_case"))
options = parser.parse_args()
options.out.mkdir(parents=True, exist_ok=True)

# %%
# A layer with one real and negative eigenvalue direction, and the worst measures in its balls.
A, V = torch.diag(torch.tensor([-1.0, -0.5], dtype=torch.float64)), torch.eye(2).double()
F = SelfAttention(AttentionParameters.from_bilinear(A, V))
radii = [0.5, 1.0, 1.5] if options.quick else [0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0]
# Fewer starts and steps find the same here: the constructions of the proofs are among the starts.
effort = {"starts": 4, "steps": 30} if options.quick else {}
found = {}
for n_atoms in (2, 3):
    generator = torch.Generator().manual_seed(0)
    found[n_atoms] = [
        worst_case(F, R, n_atoms=n_atoms, generator=generator, **effort) for R in radii
    ]
    for R, (mu, constant) in zip(radii, found[n_atoms], strict=True):
        print(
            f"R = {R:<4g} {n_atoms} atoms: {float(constant.value):10.4f} "
            f"(moving {float(constant.particle):.4f}, splitting {float(constant.splitting):.4f}), "
            f"lightest weight {float(mu.weights.min()):.2e}, "
            f"Theorem 3.5 {bounds.theorem_3_5(1.0, 1.0, R):.4g}"
        )

# %%
# It is a supremum of secants: a small step along the worst direction shows it.
mu, constant = found[2][1]
step = 1e-6 * constant.direction / mu.weights.sqrt()[:, None]
ratio = secant_ratio(F, mu, mu.replace(mu.points + step))
print(f"secant in [{float(ratio.lower):.6f}, {float(ratio.upper):.6f}]")
print("share of each atom in the worst direction:", localize(constant, F, mu).particles.numpy())

# %%
with figures.style():
    ax = plt.subplots()[1]
    for n_atoms, marker in ((2, "o-"), (3, "x")):
        ax.plot(
            radii, [float(c.value) for _, c in found[n_atoms]], marker, label=f"{n_atoms} atoms"
        )
    ax.plot(radii, [bounds.mean_field(1.0, 1.0, R) for R in radii], "k:", label="bound here")
    ax.plot(radii, [bounds.theorem_3_5(1.0, 1.0, R) for R in radii], "k--", label="Theorem 3.5")
    ax.set(yscale="log", xlabel="radius R", ylabel="largest local constant found")
    ax.legend()
    ax.figure.savefig(options.out / "worst_case.png")
