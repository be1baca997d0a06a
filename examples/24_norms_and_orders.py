"""Norms of derivatives, and constants in W₁ and W_∞
==================================================

What stands behind a local constant: the largest singular value of a linear map that is never
stored, with a vector that attains it and an end that it does not exceed; and the constants of
other orders p of the distance.

::

    python examples/24_norms_and_orders.py [--quick] [--out DIR]
"""

# %%
import argparse
import math
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from meanfield import (
    AttentionParameters,
    ParticleMeasure,
    SelfAttention,
    figures,
    linearize,
    local_lipschitz,
    sampling,
)
from meanfield.linalg import Certified, Dense, Lanczos, operator_norm
from meanfield.lipschitz import local_order

parser = argparse.ArgumentParser(description="Norms of derivatives, and constants of other orders")
parser.add_argument("--quick", action="store_true")
parser.add_argument("--out", type=Path, default=Path("results/24_norms_and_orders"))
options = parser.parse_args()
options.out.mkdir(parents=True, exist_ok=True)

generator = torch.Generator().manual_seed(0)
n, dim = (40, 8) if options.quick else (200, 16)
F = SelfAttention(AttentionParameters.random(dim, n_heads=2, generator=generator))
mu = ParticleMeasure(sampling.ball(n, dim, radius=2.0, generator=generator))

# %%
# A derivative as a map
# ---------------------
# ``linearize`` gives products with J and its transpose, and their sums and compositions. It is
# never stored: at n tokens of dimension d it would have (nd)² entries.
J = linearize(F, mu, geometry="euclidean").atoms
v = torch.randn(J.in_shape, dtype=torch.float64, generator=generator)
print(J)
print("⟨Jv, Jv⟩ - ⟨JᵀJv, v⟩:", float(((J @ v) ** 2).sum() - ((J.T @ (J @ v)) * v).sum()))

# %%
# Its norm
# --------
# ``value`` is ‖Jv‖ of the unit vector ``direction``. ``upper`` is an end that the norm exceeds
# with probability ``miss`` at most; ``Dense`` factors the matrix, ``Certified`` needs no luck at
# any size.
norm = operator_norm(J)
norm

# %%
for solver in (Lanczos(), Dense(), Certified()):
    found = operator_norm(J, solver=solver, strict=False)
    print(
        f"{type(solver).__name__:10} {float(found.value):.9f} <= norm <= {float(found.upper):.9f}"
        f"   miss {float(found.miss):.0e}, {int(found.n_matvecs)} products"
    )

# %%
# Sums, multiples and products of maps are maps: here the parts of J that turn and that stretch.
for name, part in (("(J − Jᵀ)/2", 0.5 * (J - J.T)), ("(J + Jᵀ)/2", 0.5 * (J + J.T))):
    print(f"‖{name}‖ = {float(operator_norm(part).value):.6f}")

# %%
# Other orders of the distance
# ----------------------------
# In W₁ each displacement counts by its mass, in W_∞ only the largest counts. The constants are
# suprema of sums of norms, known between two ends; on the line these agree.
few = ParticleMeasure(mu.points[:12])
for p in (1, 2, math.inf):
    found = local_order(F, few, p=p)
    print(f"p = {p:<4}: {float(found.lower):.4f} to {float(found.upper):.4f}")
assert math.isclose(float(local_order(F, few, p=2).lower), float(local_lipschitz(F, few)))

# %%
# Two clusters, a light and a heavy one: the lighter, the more an order near 1 sees of it. In W₁
# the constant tends to (1 + 2c)e^{2c} with c = R² as the light weight falls, in W_∞ it tends to
# that of the heavy atom alone.
pair = SelfAttention(AttentionParameters.from_bilinear([[-1.0]], [[1.0]]))
logs = torch.linspace(-14, 0, 57)
with figures.style():
    ax = plt.subplots()[1]
    for p, line in ((1, "-"), (2, "--"), (math.inf, ":")):
        values = [
            float(local_order(pair, sampling.two_diracs(1.5, z, [1.0]), p=p).upper)
            for z in logs.tolist()
        ]
        ax.semilogy(logs, values, line, label=f"p = {p}".replace("inf", "∞"))
    ax.axhline((1 + 4.5) * math.exp(4.5), color="0.5", lw=0.8, label=r"$(1+2c)e^{2c}$")
    ax.set(xlabel="log(light weight / heavy weight)", ylabel="local constant in $W_p$")
    ax.set_title("Two Diracs at ±1.5: constants of three orders")
    ax.legend()
    ax.figure.savefig(options.out / "orders.png")
print(options.out / "orders.png")
