"""
Certify any solver
==================

How far off is a transport plan that some other solver has made? An interval that holds the
distance, what makes it wide, and a file that proves it without this library.
"""

# %%
# A plan and potentials
# ---------------------
# Two clouds, and what a Sinkhorn solver says about them: a plan whose marginals are not quite
# right, and potentials that are not quite feasible.
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import ot

from meanfield.transport import certify, checker, grade, known_problem, solve_w2
from meanfield.transport.known import known_names

rng = np.random.default_rng(0)
x = rng.normal(size=(300, 2))
y = 1.3 * rng.normal(size=(300, 2)) + 0.5
weights = np.full(300, 1 / 300)

costs, reg = ot.dist(x, y), 0.05
plan, log = ot.sinkhorn(
    weights, weights, costs, reg, method="sinkhorn_log", numItermax=100, log=True, warn=False
)
f, g = reg * log["log_u"], reg * log["log_v"]
print("columns off by", abs(plan.sum(0) - weights).sum())

# %%
# Its grade: W₂ is in this interval, whatever the solver did. Mass that stood where the marginals
# have no room for it was put elsewhere, and paid for; the potentials became their c-transforms
# :math:`f_i = \min_j \|x_i - y_j\|^2 - g_j`, which are feasible.
found = certify(x, y, plan=plan, potentials=(f, g))
found

# %%
# What makes it wide? The distance itself tells how far a better plan would lower the upper end,
# and better potentials would raise the lower one.
best = solve_w2(x, y)
print("width     ", float(found.upper - found.lower))
print("plan      ", float(found.upper - best.value))
print("potentials", float(best.value - found.lower))

# %%
# Plans of every kind
# -------------------
# A permutation, as of space partitions or of an assignment; a matrix, dense or sparse; the entries
# ``(rows, cols, mass)``; a :class:`~meanfield.transport.Coupling`. Potentials of every precision
# and device; one side is enough. What is missing is replaced by something poor but valid.
_, sigma, _ = ot.compute_bspot_bijection(x, y, n_plans=16)
print("bijection alone          ", certify(x, y, plan=np.asarray(sigma, int)))
print(
    "with Sinkhorn's potential", certify(x, y, plan=np.asarray(sigma, int), potentials=(None, g))
)

# %%
# The conventions of others are not known here. GeomLoss has potentials of half the squared
# distance: taken as they are they give a valid bound, and a bad one.
print("half of g", certify(x, y, plan=plan, potentials=(None, g / 2)))

# %%
# The exact plan meets the exact potentials, and the interval closes to rounding.
certify(x, y, plan=best.plan, potentials=best.potentials)

# %%
# Files of answers
# ----------------
# A solver that writes its plan or its potentials to a file needs no Python here:
# ``meanfield grade FILE`` reads a ``.npy`` or ``.npz`` by the name of a problem of the test set,
# whose distance is proven, or with the points beside, and says how far off each side is. A folder
# of files becomes a table. ``known_names()`` lists the problems.
print(len(known_names()), "problems, such as", known_names()[0])
answers = pathlib.Path(tempfile.mkdtemp())
problem = known_problem("gaussian-1000-2")
_, sigma, _ = ot.compute_bspot_bijection(problem.x, problem.y, n_plans=16)
np.save(answers / "gaussian-1000-2.bsp.npy", np.asarray(sigma, int))
grade(answers / "gaussian-1000-2.bsp.npy")

# %%
# A proof for a referee
# ---------------------
# Points, weights, plan and potentials as integers, in a file; and a script of 60 lines that
# imports nothing but Python's standard library, and proves the interval from the file in exact
# arithmetic. It runs on its own: copy it beside the file; where the library is installed,
# ``python -m meanfield.transport.checker w2.proof`` does the same.
folder = pathlib.Path(tempfile.mkdtemp())
path = best.save(folder / "w2.proof")
print(f"{path.stat().st_size:,} bytes; the answer:", float(best.lower), float(best.upper))
done = subprocess.run(
    [sys.executable, "-I", checker.__file__, str(path)], capture_output=True, text=True, check=True
)
print(done.stdout)

# %%
# What it proves is short enough to read here.
print(pathlib.Path(checker.__file__).read_text(encoding="utf-8"))

# %%
# A file that was damaged, or whose interval does not follow from its plan and potentials, is
# refused.
damaged = bytearray(path.read_bytes())
damaged[1000] ^= 1
path.write_bytes(damaged)
done = subprocess.run([sys.executable, "-I", checker.__file__, str(path)], capture_output=True)
print(done.stderr.decode().splitlines()[-1])

# %%
# The width against the number of Sinkhorn's steps: at first the marginals make it, then the blur.
import matplotlib.pyplot as plt

from meanfield import figures

steps, widths = [10, 30, 100, 300, 1000], []
for count in steps:
    plan, log = ot.sinkhorn(
        weights, weights, costs, reg, method="sinkhorn_log", numItermax=count, log=True, warn=False
    )
    found = certify(x, y, plan=plan, potentials=(reg * log["log_u"], reg * log["log_v"]))
    misplaced = abs(plan.sum(0) - weights).sum() / 2
    widths.append((found.upper - best.value, best.value - found.lower, misplaced))
with figures.style():
    ax = plt.subplots()[1]
    labels = ("the plan's part of the width", "the potentials' part", "misplaced mass")
    for label, line in zip(labels, np.transpose(widths), strict=True):
        ax.loglog(steps, line, "o-", label=label)
    ax.set(xlabel="steps of Sinkhorn", title=f"Grades of Sinkhorn, W₂ = {float(best):.6f}")
    ax.legend()
