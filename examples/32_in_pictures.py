"""In pictures
===========

What the library does, in six pictures; the page :doc:`/pictures` says what they show.

::

    python examples/32_in_pictures.py [--quick] [--out DIR]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

from meanfield import (
    AttentionParameters,
    ParticleMeasure,
    SelfAttention,
    bounds,
    dynamics,
    figures,
    linearize,
    local_lipschitz,
    sampling,
    secant_ratio,
    solve_w2,
)

BEFORE, AFTER, OTHER = "tab:blue", "tab:orange", "tab:green"

# %%
# Two prompts in the plane (real models have hundreds of dimensions), and a layer of attention.
# A word that stands in a prompt twice is one atom of twice the weight.
WORDS = ["the", "cat", "sat", "on", "mat"]
CAT = ParticleMeasure(
    [[0.1, -0.5], [1.5, 1.0], [-1.2, 0.9], [-1.0, -0.9], [1.4, -0.6]],
    weights=[2 / 6, 1 / 6, 1 / 6, 1 / 6, 1 / 6],
)
OTHER_WORDS = ["a", "dog", "lay", "on", "the", "rug"]
DOG = ParticleMeasure(
    [[0.7, -1.0], [1.9, 0.6], [-1.5, 0.4], [-1.0, -0.9], [0.1, -0.5], [1.9, -0.9]]
)
F = SelfAttention(
    AttentionParameters.from_bilinear([[0.9, -0.5], [0.5, 0.9]], [[1.0, 0.0], [0.0, 1.0]])
)


def plane(ax, *, ylim=(-1.45, 1.5)):
    ax.set(aspect="equal", xlim=(-1.9, 2.3), ylim=ylim)
    ax.axis("off")
    return ax


def draw_cloud(ax, mu, **style):
    """Each atom with the area of its weight."""
    ax.scatter(*mu.points.T, s=1500 * mu.weights, zorder=3, edgecolor="white", **style)


def name(ax, words, points, *, below=(), colour="black"):
    for word, point in zip(words, points.tolist(), strict=True):
        away = (0, -23 if word in below else 13)
        ax.annotate(
            word, point, away, textcoords="offset points", ha="center", color=colour, zorder=4
        )


def arrows(ax, start, end):
    for x, y in zip(start.tolist(), end.tolist(), strict=True):
        style = {"arrowstyle": "-|>", "shrinkA": 5, "shrinkB": 1, "color": "0.3"}
        ax.annotate("", y, x, arrowprops=style)


def cloud_of_tokens(figure):
    ax = plane(figure.subplots())
    draw_cloud(ax, CAT, color=BEFORE)
    name(ax, ["the (twice)", *WORDS[1:]], CAT.points)


# %%
# What a layer does: each word goes to an average of the words that it attends to.
def layer_moves_it(figure):
    ax = plane(figure.subplots())
    draw_cloud(ax, CAT, color=BEFORE, alpha=0.35)
    draw_cloud(ax, F(CAT), color=AFTER)
    arrows(ax, CAT.points, F(CAT).points)
    name(ax, WORDS, CAT.points, below=("mat", "on", "the"))


# %%
# The cheapest way to make one prompt of the other.
def distance_as_a_plan(figure):
    ax = plane(figure.subplots())
    result = solve_w2(CAT, DOG)
    plan = result.coupling.dense()
    for i, k in plan.nonzero().tolist():
        ends = torch.stack([CAT.points[i], DOG.points[k]])
        ax.plot(*ends.T, color="0.55", lw=30 * float(plan[i, k]), solid_capstyle="round", zorder=2)
    draw_cloud(ax, CAT, color=BEFORE)
    draw_cloud(ax, DOG, color=OTHER, marker="s")
    name(ax, WORDS, CAT.points, colour=BEFORE)
    name(ax, OTHER_WORDS, DOG.points, below=OTHER_WORDS, colour=OTHER)
    ax.set_title(rf"$W_2$ = {float(result):.3f}")


# %%
# Small changes of the prompt that are equally large make a circle, and the layer an ellipse of it.
# Drawn is the plane of the changes that are stretched most and least. The marks are ratios of
# certified distances, for changes that are not small.
STEP = 0.1


def stretched(figure):
    above, below = figure.subplots(2, height_ratios=(4, 3))
    constant = local_lipschitz(F, CAT)
    root = CAT.weights.sqrt().repeat_interleave(2)  # in W2 the way of an atom counts by its weight
    J = root[:, None] * linearize(F, CAT).atoms.to_dense() / root
    _, sizes, right = torch.linalg.svd(J)
    moves = (right[[0, -1]] / root).unflatten(-1, (-1, 2))
    nu = CAT.replace(CAT.points + 2 * STEP * moves[0])
    plane(above, ylim=(-1.3, 1.5))
    draw_cloud(above, CAT, color=BEFORE, alpha=0.35)
    draw_cloud(above, nu, color=BEFORE)
    arrows(above, CAT.points, nu.points)
    name(above, WORDS, CAT.points, below=WORDS)
    angles = torch.linspace(0, 2 * torch.pi, 200, dtype=torch.float64)
    circle = torch.stack([angles.cos(), angles.sin()])
    ellipse = sizes[[0, -1], None] * circle
    below.plot(*circle, color=BEFORE)
    below.plot(*ellipse, color=AFTER)
    for k in range(0, 199, 11):
        nu = CAT.replace(CAT.points + STEP * torch.tensordot(circle[:, k], moves, 1))
        ratio = float(secant_ratio(F, CAT, nu))
        below.plot(*(ratio * ellipse[:, k] / ellipse[:, k].norm()), "x", color="black", ms=5)
    below.annotate("", (float(constant), 0), (0, 0), arrowprops={"arrowstyle": "<->"})
    below.text(1.05, 0.06, rf"$\sigma$ = {float(constant):.2f}", ha="center", fontsize=10)
    below.text(0, -0.9, "before", ha="center", color=BEFORE)
    below.text(1.8, 0.4, "after", color=AFTER)
    below.set(aspect="equal", xlim=(-2.4, 2.4), ylim=(-1.1, 1.1))
    below.axis("off")


# %%
# The worst that any prompt of norm at most R can be: what is proved, what is found, and eight
# words of equal weight, one opposite to seven, where tokens and measures have one constant.
def worst_in_the_ball(figure):
    ax = figure.subplots()
    G = SelfAttention(AttentionParameters.from_bilinear([[-1.0]], [[1.0]]))
    radius = np.linspace(0.4, 3, 14)
    fine = np.linspace(0.4, 3, 200)
    pairs = [
        sampling.two_diracs(R, bounds.two_dirac_best_log_ratio(1.0, R), [1.0]) for R in radius
    ]
    found = [float(local_lipschitz(G, pair)) for pair in pairs]
    eight = [ParticleMeasure(R * np.array([[1.0]] + 7 * [[-1.0]])) for R in radius]
    ax.semilogy(fine**2, bounds.mean_field(1.0, 1.0, fine), "--", color="tab:red")
    ax.semilogy(radius**2, found, "o", color=BEFORE)
    for geometry, mark in (("wasserstein", "-"), ("euclidean", "x")):
        values = [float(local_lipschitz(G, mu, geometry=geometry)) for mu in eight]
        ax.semilogy(radius**2, values, mark, color=OTHER)
    ax.text(5.9, 12000, "no prompt is worse:\nproved", ha="right", color="tab:red")
    ax.text(5.2, 130, "two words of\nunequal weight: found", color=BEFORE)
    ax.text(
        2.9,
        3.9,
        "seven words and one opposite,\nof equal weight:\nline measures, crosses tokens",
        color=OTHER,
    )
    ax.set(xlabel="$R^2$, square of the largest norm", ylabel="how far it is stretched")


# %%
# Layer upon layer words meet; two clusters of different weight are left at the end of the picture.
def through_depth(figure):
    ax = figure.subplots()
    H = SelfAttention(AttentionParameters.from_bilinear([[9.0, 0.0], [0.0, 9.0]], np.eye(2)))
    mu = ParticleMeasure(sampling.sphere(24, 2, generator=3))
    times = np.append(0, np.geomspace(0.05, 5e3, 120))
    ds = dynamics.flow(H, mu, times, constraint="sphere", coalesce=1e-7)
    angle = np.rad2deg(np.arctan2(ds.points[..., 1], ds.points[..., 0]))
    ax.semilogx(ds.time[1:], angle[1:], color=BEFORE, lw=0.8)
    here, many = np.unique(angle[-1].values.round(), return_counts=True)
    for place, count in zip(here, many, strict=True):
        ax.plot(7e3, place, "o", ms=2 * count**0.75, color=AFTER, clip_on=False)
        ax.annotate(f"{count} of 24", (4e3, place), (0, 9), textcoords="offset points", ha="right")
    ax.set(xlabel="depth (time)", ylabel="direction of each word, degrees")
    ax.set(yticks=[-180, -90, 0, 90, 180], xlim=(0.05, 7e3))


PICTURES = {
    "cloud": (cloud_of_tokens, 3.0),
    "layer": (layer_moves_it, 3.0),
    "distance": (distance_as_a_plan, 3.2),
    "stretched": (stretched, 4.9),
    "ball": (worst_in_the_ball, 3.4),
    "depth": (through_depth, 3.4),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="In pictures")
    parser.add_argument("--quick", action="store_true", help="the same: it takes seconds")
    parser.add_argument("--out", type=Path, default=Path("results/32_in_pictures"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with figures.style():
        for title, (draw, height) in PICTURES.items():
            figure = plt.figure(figsize=(4.3, height))
            draw(figure)
            path = options.out / f"pictures-{title}.png"
            figure.savefig(path)
            print("wrote", path.name)


if __name__ == "__main__":
    main()
