"""
Distances with evidence
=======================

W₂ between weighted clouds: an interval that holds it, a plan that attains its upper end, and a
gradient.
"""

# %%
# One call
# --------
# Points are arrays of shape ``(n, d)``; the value is W₂ in the unit of the points, never its
# square. NumPy in, NumPy out.
import matplotlib.pyplot as plt
import numpy as np
import torch

from meanfield import ParticleMeasure, figures
from meanfield.transport import conditional_w2, solve_w2, w2

rng = np.random.default_rng(0)
x = rng.normal(size=(80, 2))
y = 1.3 * rng.normal(size=(60, 2)) + 1.5
print(f"{w2(x, y):.12f}")

# %%
# Weights go beside the points. They are probabilities: divide by their sum.
a = np.full(80, 1 / 80)
b = rng.dirichlet(np.ones(60))
print(w2((x, a), (y, b)), w2(x, y, weights=(a, b)))

# %%
# The evidence
# ------------
# ``solve_w2`` says more: the ends of the interval, rounding included, and the method.
result = solve_w2(x, y)
result

# %%
# The upper end is the cost of a plan, the lower one the value of a pair of dual potentials.
# Both can be checked without trusting the solver:
plan = result.coupling.to_scipy().tocoo()
cost = ((x[plan.row] - y[plan.col]) ** 2).sum(-1)
print("cost of the plan  ", np.sqrt((plan.data * cost).sum()))
print("marginals         ", abs(plan.sum(1) - 1 / 80).max(), abs(plan.sum(0) - 1 / 60).max())
print("proven width      ", float(result.upper - result.lower))

# %%
# The plan is more than a number: its geodesic, its barycentric map, samples of its pairs.
halfway = result.coupling.interpolate(0.5)
with figures.style():
    ax = plt.subplots()[1]
    for k in range(plan.nnz):
        i, j = plan.row[k], plan.col[k]
        ax.plot(*np.stack([x[i], y[j]]).T, color="0.85", lw=0.5, zorder=0)
    ax.plot(*x.T, "o", ms=3, label="x")
    ax.plot(*np.asarray(halfway.points).T, "x", ms=3, label="halfway")
    ax.plot(*y.T, "s", ms=3, label="y")
    ax.set(aspect="equal", xlabel="first coordinate", ylabel="second coordinate")
    ax.set_title(f"$W_2$ = {float(result):.6f}")
    ax.legend()

# %%
# Light atoms
# -----------
# Weights live as logarithms. A solver in double precision cannot see an atom of weight
# :math:`e^{-900}`; here moving it by 1 is a distance of :math:`e^{-450}`.
logs = torch.tensor([0.0, -900.0], dtype=torch.float64)
light = ParticleMeasure([[0.0], [1.0]], log_weights=logs)
moved = light.replace(torch.tensor([[0.0], [2.0]], dtype=torch.float64))
print(float(w2(light, moved)), np.exp(-450))

# %%
# Gradients
# ---------
# Of W₂², in the points and in the logarithms of the weights. Descending it takes one cloud to the
# other.
target = torch.as_tensor(y)
z = torch.as_tensor(x).clone().requires_grad_()
for step in range(4):
    value = w2(z, target) ** 2
    (gradient,) = torch.autograd.grad(value, z)
    print(step, f"{value.item() ** 0.5:.4f}")
    z = (z - 0.25 * len(z) * gradient).detach().requires_grad_()

# %%
# All pairs of many clouds, by broadcasting: a matrix of distances in one call.
clouds = rng.normal(size=(5, 50, 3)) + np.arange(5)[:, None, None]
print(np.round(w2(clouds[:, None], clouds[None]), 3))

# %%
# Sequences
# ---------
# A sequence is a measure with positions. The same tokens in the opposite order are the same
# measure for W₂; the *conditional* distance, which is that of masked attention, moves mass only
# within a position.
tokens = torch.as_tensor(rng.normal(size=(20, 4)))
forward, backward = (ParticleMeasure.from_sequence(t) for t in (tokens, tokens.flip(0)))
print(f"conditional {conditional_w2(forward, backward).item():.4f}")
print(f"plain       {w2(forward, backward).item():.4f}")

# %%
# When it does not converge
# -------------------------
# Nothing is returned in silence: an answer that is not as close as asked raises
# :class:`~meanfield.errors.ConvergenceError` with the interval that was reached, or comes back
# flagged under ``strict=False``. Coming from another library? See :doc:`/coming-from`.
