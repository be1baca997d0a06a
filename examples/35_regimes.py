"""Which theorem speaks
====================

For how many tokens, and in how large a ball, is which bound the smallest?

::

    python examples/35_regimes.py [--quick] [--out DIR]

Over (n, R): the largest Euclidean constant found on n tokens in B_R (adversarial sequences of both
branches, three clusters and random clouds, at several sizes up to R, V = I) beside [CAP24] Theorem
3.3 (general), Proposition 3.4 (lower), Theorem 3.5 (mean field, no n), the √n of Theorem 3.7
(large radius), and the one bound of this package that covers all of it, whose regimes change at
n = e^{2c}, c = ‖A‖R².
"""

# %%
import argparse
import math
from pathlib import Path

import numpy as np
import torch

from meanfield import (
    AttentionParameters,
    ParticleMeasure,
    SelfAttention,
    bounds,
    figures,
    results,
    sampling,
    sweep,
)
from meanfield.figures.canvas import ticks_at
from meanfield.figures.curves import formula, mark_unconverged
from meanfield.lipschitz import LocalLipschitz, local_lipschitz
from meanfield.results import Variable
from meanfield.sweeps import Task

EIGENVALUES = (-1.0, 0.5)  # of the diagonal A
HEIGHTS = (-0.6, -0.3, 0.0, 0.3)  # of the two tokens of three clusters
SHARES = (1.0, 0.85, 0.7, 0.55, 0.4, 0.25)  # of R


# %%
# Many tokens at −R e₁ that see two others, symmetric about the axis e₁ of the eigenvalue −1.
def three_clusters(n_tokens, radius, height):
    across = math.sqrt(1 - height**2)
    places = [[-1.0, 0.0]] * (n_tokens - 2) + [[height, across], [height, -across]]
    return radius * torch.tensor(places, dtype=torch.float64)


# %%
# A case: sequences that are built to be bad, and random ones.
def worst_found(n_tokens, radius, *, clouds, generator):
    """The largest constant found, and what the theorems say."""
    A, d = torch.diag(torch.tensor(EIGENVALUES, dtype=torch.float64)), len(EIGENVALUES)
    F = SelfAttention(AttentionParameters.from_bilinear(A, torch.eye(d, dtype=torch.float64)))
    built = []
    for branch in ("negative", "positive"):
        try:
            built.append(sampling.adversarial(A, radius, n_tokens, branch=branch).points)
        except ValueError:
            continue
    if n_tokens > 2:
        built += [three_clusters(n_tokens, radius, height) for height in HEIGHTS]
    built = [share * points for share in SHARES for points in built]  # a smaller ball is inside
    shape = {"radius": radius, "batch_shape": (clouds,), "generator": generator}
    random = [sampling.ball(n_tokens, d, **shape), sampling.sphere(n_tokens, d, **shape)]
    points = torch.cat([torch.stack(built), *random]) if built else torch.cat(random)
    found = local_lipschitz(F, ParticleMeasure(points), geometry="euclidean", strict=False)
    k = int(found.value.argmax())
    norm_A, gamma = max(map(abs, EIGENVALUES)), bounds.scaling_factor(A)
    return {
        **{name: column[k] for name, column in found.values("worst").items()},
        "worst_converged": bool(found.converged.all()),
        "adversarial": float(found.value[: len(built)].max()) if built else math.nan,
        "general_bound": bounds.theorem_3_3(norm_A, 1.0, radius, n_tokens),
        "general_lower": bounds.proposition_3_4(gamma, radius, n_tokens),
        "theorem_3_5": bounds.theorem_3_5(norm_A, 1.0, radius),
        "tokens_bound": bounds.tokens(norm_A, 1.0, radius, n_tokens),
        "mean_field_bound": bounds.mean_field(norm_A, 1.0, radius),
        "size": norm_A * radius**2,
        "large_radius_limit": math.sqrt(n_tokens),
    }


PARAMETERS = (
    Variable("n_tokens", "number of tokens n"),
    Variable("radius", "radius R of the ball", symbol="R"),
)
VARIABLES = (
    *LocalLipschitz.columns("worst", words="largest Euclidean constant found"),
    Variable("adversarial", "the same over sequences that are built to be bad"),
    Variable("general_bound", "upper bound, Theorem 3.3"),
    Variable("general_lower", "lower bound of the supremum, Proposition 3.4"),
    Variable("theorem_3_5", "upper bound, Theorem 3.5"),
    Variable("tokens_bound", "upper bound, this package, n tokens"),
    Variable("mean_field_bound", "upper bound, this package, all measures"),
    Variable("size", "c = ‖A‖R²"),
    Variable("large_radius_limit", "√n, the largest limit of Theorem 3.7"),
)


def run(grid, fixed, **how):
    return sweep(Task(worst_found, VARIABLES, PARAMETERS), grid, fixed=fixed, **how)


# %%
# The map: colours are what is found, lines where another bound becomes the smaller.
@figures.figure("worst", "worst_converged")
def regime_map(ds, *, ax):
    """Largest constant found, over √n, for each (n, R), and where another bound is the smaller."""
    cube = ds.set_index(case=["n_tokens", "radius"]).unstack("case").sortby(["n_tokens", "radius"])
    n, radius = cube.n_tokens.values, cube.radius.values
    share = np.log10((cube.worst / np.sqrt(cube.n_tokens)).transpose("radius", "n_tokens").values)
    limit = np.nanmax(np.abs(share))
    edges = cells(n), cells(radius)
    mesh = ax.pcolormesh(*edges, share, cmap="RdBu_r", vmin=-limit, vmax=limit)
    ax.figure.colorbar(mesh, ax=ax, label=r"$\log_{10}$(largest constant found / $\sqrt{n}$)")
    ax.set(xscale="log", yscale="log", xlabel="number of tokens n", ylabel="radius R")
    ax.set(xlim=edges[0][[0, -1]], ylim=edges[1][[0, -1]])
    draw_borders(ax, edges, norm_A=float((ds["size"] / ds.radius**2).mean()))
    ticks_at(ax, n)
    good = cube.worst_converged.transpose("radius", "n_tokens")
    mark_unconverged(ax, n, radius[:, None], good)
    gain = cube.general_bound / cube.tokens_bound
    gained = f"gain over Thm 3.3: {float(gain.min()):.2g} to {float(gain.max()):.2g}"
    ax.set_title(f"Largest constant found, beside where the bounds change\n{gained}")


def draw_borders(ax, edges, *, norm_A):
    """Lines between the regimes of the bounds; ‖A‖ is that of every case."""

    def exact(n):
        return np.sqrt(np.log(n) / (2 * norm_A))

    ends = max(edges[0][0], 1.01), edges[0][-1]
    label = r"$n = e^{2c}$: the regimes of the bound for $n$ tokens"
    formula(ax, exact, ends, "k-", linewidth=1.4, label=label)
    label = "Thm 3.3 = Thm 3.5: below the line the second is smaller"
    crossing = np.vectorize(lambda n: crossing_at(n, norm_A))
    formula(ax, crossing, ends, "k--", linewidth=1.4, label=label)
    # Above the first line the bound is √n (1 + c) or so, below it that of all measures.
    middle = float(np.sqrt(np.prod(edges[0][[0, -1]])))
    words = {"va": "center", "ha": "center", "bbox": {"fc": "white", "alpha": 0.7, "lw": 0}}
    for end, text in ((edges[1][0], "mean field"), (edges[1][-1], r"$\sqrt{n}$")):
        ax.text(middle, float((end * exact(middle)) ** 0.5), text, **words)


def cells(centres):
    """Edges of cells on a logarithmic axis: geometric means, and as far outside."""
    logs = np.log(centres)
    inner = (logs[1:] + logs[:-1]) / 2
    ends = (
        (2 * logs[0] - inner[0], 2 * logs[-1] - inner[-1])
        if len(logs) > 1
        else (logs[0] - 1, logs[0] + 1)
    )
    return np.exp([ends[0], *inner, ends[1]])


def crossing_at(n, norm_A):
    """The R at which Theorems 3.3 and 3.5 agree, by bisection in c; V cancels."""
    low, high = 0.0, 50.0
    for _ in range(60):
        c = 0.5 * (low + high)
        general = 0.5 * np.log(3 * (c * c * (4 * n + 1) + n))
        low, high = (c, high) if np.log1p(3 * c) + 2 * c < general else (low, c)
    return float(np.sqrt(low / norm_A))


if __name__ == "__main__":  # worker processes import this file
    parser = argparse.ArgumentParser(description="Which theorem speaks")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--out", type=Path, default=Path("results/35_regimes"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    # %%
    # The sweep.
    grid = {
        "n_tokens": [2, 3, 5, 9, 16, 28, 50, 90, 160, 280, 500],
        "radius": [0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0],
    }
    if options.quick:
        grid = {"n_tokens": [2, 9, 50], "radius": [0.5, 1.0, 1.5, 2.0, 4.0]}
    ds = run(grid, {"clouds": 5 if options.quick else 20}, executor=options.workers)
    results.write_dataset(ds, options.out / "regimes.zarr")
    print(ds[["worst", "tokens_bound", "general_bound", "theorem_3_5"]].to_dataframe().round(3))

    # %%
    with figures.style():
        regime_map(ds).figure.savefig(options.out / "map.png")
