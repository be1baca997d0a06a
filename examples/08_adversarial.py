"""The worst inputs of a GPT-2 layer
=================================

How fast does the constant grow with n at the inputs built to be the worst?

::

    python examples/08_adversarial.py [--quick] [--out DIR]

[CAP24] Figure 1, second row, for every head. For a head with bilinear form A_h, Proposition 3.4
puts one token at R u and n − 1 at −R u or R u/2, for a real eigenpair (γ, u) of A_h; with V = I
the constant grows like √n. Here the same inputs enter the whole layer; the head alone is beside
it, because what grows may be other heads, for which the inputs were not built. Ascent over the
tokens in B_R starts from there and finds worse ones. ``meanfield run released-code`` has the
panels of the paper.
"""

# %%
import argparse
import functools
import math
from pathlib import Path

import numpy as np

from meanfield import bounds, figures, pretrained, results, sampling, sweep
from meanfield.bounds.layer import Layer
from meanfield.experiments.sharpness import climb
from meanfield.figures.canvas import ticks_at
from meanfield.figures.curves import curve, formula, law, mark_unconverged
from meanfield.figures.selection import fits_of, select
from meanfield.lipschitz import LocalLipschitz, local_lipschitz
from meanfield.results import Variable
from meanfield.results.cases import answered
from meanfield.results.fits import with_laws
from meanfield.sweeps import Task

KEPT = ("value", "residual")  # of what the ascent finds


# %%
# The layer, and the inputs of each of its heads; drawn once for all lengths.
@functools.cache
def layer(number, depth):
    return pretrained.load("random:gpt2", seed=320, config={"n_layer": depth}).attention(number)


@functools.cache
def pair(number, depth, head):
    return sampling.critical_pair(layer(number, depth).parameters.head(head).A[0])


# %%
# A case: the layer and the head alone at the configuration of the head.
def worst(head, radius, n_tokens, *, number, depth, search_tokens, search_steps):
    F, built = layer(number, depth), pair(number, depth, head)
    mu = built.tokens(radius, n_tokens)
    alone = type(F)(F.parameters.head(head), causal=F.causal)
    whole, single = (
        local_lipschitz(each, mu, geometry="euclidean", strict=False) for each in (F, alone)
    )
    searched = {"searched": math.nan, "searched_residual": math.nan}
    if n_tokens in search_tokens:
        searched = climb(F, mu, radius, steps=search_steps)[1].values("searched", *KEPT)
    return {
        **whole.values("constant"),
        **single.values("head_constant"),
        **searched,
        "gamma": built.scaling,
        "general_lower": bounds.proposition_3_4(built.scaling, radius, n_tokens),
        "general_bound": Layer.of(F).theorem_3_3(radius, n_tokens),
    }


PARAMETERS = (
    Variable("head", "head whose configuration it is"),
    Variable("radius", "radius R of the configuration"),
    Variable("n_tokens", "number of tokens n"),
)
VARIABLES = (
    *LocalLipschitz.columns("constant", words="local Lipschitz constant ‖Df(X)‖ of the layer"),
    *LocalLipschitz.columns("head_constant", words="the same of the head alone"),
    *LocalLipschitz.columns("searched", *KEPT, words="largest that ascent in B_R found"),
    Variable("gamma", "scaling factor γ of the head"),
    Variable("general_lower", "what the head would reach with V = I, Proposition 3.4"),
    Variable("general_bound", "upper bound, Theorem 3.3 summed over heads"),
)


def run(grid, fixed, **how):
    """The sweep, with its power laws and the head that is worst far out."""
    ds = sweep(Task(worst, VARIABLES, PARAMETERS), grid, fixed=fixed, **how)
    known = answered(ds)  # the constant of a failed case is NaN, which sorts last
    best = np.lexsort((known.constant, known.radius, known.n_tokens))[-1]
    ds = with_laws(ds, ("constant", "head_constant"), by=("head", "radius"))
    return ds.assign_attrs(best_head=int(known["head"][best]), layer=fixed["number"])


# %%
# Growth in n, with the interval of the exponent where a power law holds.
@figures.figure("constant", "head_constant", "searched")
def growth(ds, *, ax):
    """Constant of the layer against n at the worst case of the best head."""
    rows = select(ds, head=ds.attrs["best_head"], radius=float(ds.radius.max()))
    for name, words, fmt in (("constant", "layer", "o-"), ("head_constant", "head alone", "s--")):
        place = {"head": ds.attrs["best_head"], "radius": float(ds.radius.max())}
        known = law(fits_of(ds, law="free", quantity=name, **place))
        curve(ax, rows, "n_tokens", name, fmt, label=f"{words}: {known}")
    found = rows.isel(case=np.flatnonzero(np.isfinite(rows.searched)))
    curve(ax, found, "n_tokens", "searched", "x", label="found by ascent in $B_R$", markersize=8)
    formula(ax, np.sqrt, rows.n_tokens, label=r"$\sqrt{n}$", linewidth=1.4)
    ax.set(xscale="log", yscale="log", xlabel="number of tokens n", ylabel=r"$\|Df(X)\|$")
    ticks_at(ax, rows.n_tokens)
    ax.set_title(f"Worst case of head {ds.attrs['best_head']}, layer {ds.attrs['layer']}")


# %%
# Which head's inputs are worst, for the layer and for the head.
@figures.figure("constant", "head_constant")
def heads(ds, *, ax):
    """Constant of the layer at the worst case of each head, at the largest n and R."""
    n, radius = int(ds.n_tokens.max()), float(ds.radius.max())
    rows = select(ds, n_tokens=n, radius=radius)
    of = rows["head"].values
    for shift, name, label in ((-0.2, "constant", "layer"), (0.2, "head_constant", "head alone")):
        ax.bar(of + shift, rows[name], 0.4, label=label)
        mark_unconverged(ax, of + shift, rows[name], rows[f"{name}_converged"])
    ax.axhline(n**0.5, color="black", linestyle=":", label=r"$\sqrt{n}$")
    ax.set(xlabel="head whose worst case it is", ylabel=r"local constant $\|Df(X)\|$", xticks=of)
    ax.set_title(f"Layer and head at the worst case of each head, n = {n}, R = {radius:g}")
    ax.grid(visible=False, axis="x")


if __name__ == "__main__":  # worker processes import this file
    parser = argparse.ArgumentParser(description="The worst inputs of a GPT-2 layer")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--out", type=Path, default=Path("results/08_adversarial"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    # %%
    # The sweep, of the middle layer of GPT-2.
    fixed = {"number": 6, "depth": 12, "search_tokens": (2, 8, 32), "search_steps": 20}
    grid = {"head": range(12), "radius": [100.0], "n_tokens": [2, 4, 8, 16, 32, 64, 97]}
    if options.quick:
        fixed = {"number": 1, "depth": 2, "search_tokens": (6,), "search_steps": 5}
        grid = {"head": [0, 1], "radius": [100.0], "n_tokens": [2, 4, 6, 10, 18]}
    ds = run(grid, fixed, executor=options.workers)
    results.write_dataset(ds, options.out / "adversarial.nc")
    far = ds.isel(case=np.flatnonzero(ds.n_tokens == ds.n_tokens.max()))
    columns = ["constant", "head_constant", "gamma", "general_bound"]
    print(far[columns].to_dataframe().round(3).to_string())
    print(f"best head: {ds.attrs['best_head']}")
    free = ds.isel(fit=np.flatnonzero(ds.fit_law == "free"))
    print(free.fit_exponent.to_dataframe().round(3).to_string())

    # %%
    with figures.style():
        for name, draw in {"growth": growth, "heads": heads}.items():
            draw(ds).figure.savefig(options.out / f"{name}.png")
