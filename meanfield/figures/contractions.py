"""Figures of [KPM21]: the tightness of the ∞-norm bound, inverses, language models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from meanfield.errors import NoCases
from meanfield.figures.canvas import colours, figure, readable_logs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "plot_bits_per_character",
    "plot_inverse",
    "plot_inverse_steps",
    "plot_l2_ratio",
    "plot_l2_tightness",
    "plot_layer_constants",
    "plot_training_curves",
]


@figure
def plot_l2_tightness(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """The largest ‖J‖_∞ of one-dimensional L2 attention found, and its bound, against n.

    Args:
        ds: of the experiment ``l2-tightness``.
        ax: where to draw; a new figure if None.
    """
    rows = _select(ds, dim=1, n_heads=1).sortby("n_tokens")
    n = rows.n_tokens.values
    ax.plot(n, rows.bound, "--", color="tab:red", label="bound 1 + 4 φ⁻¹(n−1)")
    ax.plot(n, rows.constructed, "s", fillstyle="none", markersize=8, color="tab:orange",
            label="a token between two groups")  # fmt: skip
    ax.plot(n, rows.closed_form, ":", color="tab:orange", label=r"$1+4\,W_0((n-1)e^{-3/2})$")
    ax.plot(n, rows.best, "o-", color="tab:blue", label="best of the ascent")
    ax.set(xscale="log", xlabel="number of tokens n", ylabel=r"largest $\|J\|_\infty$ found")
    ax.set_title(r"L2 attention, $d = H = 1$: the $\infty$-norm grows as $\log n$")
    return ax


@figure
def plot_l2_ratio(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """The largest row sum found over the bound, against n, for every shape of the layer.

    Args:
        ds: of the experiment ``l2-tightness``.
        ax: where to draw; a new figure if None.
    """
    shapes = sorted(
        {(int(d), int(h)) for d, h in zip(ds.dim.values, ds.n_heads.values, strict=True)}
    )
    for colour, (dim, heads) in zip(colours(len(shapes)), shapes, strict=True):
        rows = _select(ds, dim=dim, n_heads=heads).sortby("n_tokens")
        found = np.fmax(rows.best.values, rows.constructed.values)
        label = f"d = {dim}, H = {heads}"
        ax.plot(rows.n_tokens, found / rows.bound.values, "o-", color=colour, label=label)
    ax.axhline(1.0, linestyle="--", color="black", linewidth=0.9)
    ax.set(xscale="log", xlabel="number of tokens n", ylabel="best found / bound")
    ax.set_ylim(0.0, 1.05)
    ax.set_title(r"How tight the $\infty$-norm bound of L2 attention is")
    return ax


@figure
def plot_inverse(ds: xr.Dataset, *, ax: Axes, spread: float | None = None) -> Axes:
    """The error of the preimage against the number of fixed-point steps.

    Args:
        ds: of the experiment ``inverse``.
        ax: where to draw; a new figure if None.
        spread: of the tokens; the largest there is if None.
    """
    spread = float(ds.spread.max()) if spread is None else spread
    factors = np.unique(ds.factor.values)
    step = ds.step.values
    for colour, factor in zip(colours(len(factors)), factors, strict=True):
        for kernel, line in (("l2", "-"), ("dot product", "-.")):
            rows = _select(ds, kernel=kernel, spread=spread, factor=factor)
            error = np.where(np.isfinite(rows.error.values[0]), rows.error.values[0], np.nan)
            ax.plot(step, error, line, color=colour, label=f"{kernel}, c = {factor:g}")
        ax.plot(step, factor ** step.astype(float), ":", color=colour, linewidth=0.9)
    ax.plot([], [], "k:", linewidth=0.9, label=r"$c^k$")
    ax.set(yscale="log", xlabel="step k", ylabel="largest relative error of the preimage")
    ax.set_title(f"Inverting $x + c\\,f(x)/L$, tokens of spread {spread:g}")
    return ax


@figure
def plot_inverse_steps(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Steps to 1e-12: by the bound, by the constant measured at the input, and as certified.

    Args:
        ds: of the experiment ``inverse``.
        ax: where to draw; a new figure if None.
    """
    names = {
        "steps_bound": ("s--", "predicted by c"),
        "steps_measured": ("o-", "predicted by the measured constant"),
        "steps_taken": ("x", "taken until the residual certifies it"),
    }
    spreads = np.unique(ds.spread.values)
    for colour, spread in zip(colours(len(spreads)), spreads, strict=True):
        rows = _select(ds, kernel="l2", spread=spread).sortby("factor")
        for name, (mark, label) in names.items():
            label = f"{label}, spread {spread:g}"
            ax.plot(rows.factor, rows[name], mark, color=colour, label=label, fillstyle="none")
    ax.set(yscale="log", xlabel="contraction factor c", ylabel="steps to a relative 1e-12")
    ax.set_title("L2 attention: steps that each constant asks for")
    readable_logs(ax)
    return ax


@figure
def plot_bits_per_character(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Validation bits per character against depth: each seed a dot, lines through the means.

    Args:
        ds: of the character language model: ``bits`` along `case`, with ``variant``, ``depth``.
        ax: where to draw; a new figure if None.
    """
    variants = list(dict.fromkeys(str(v) for v in ds.variant.values))
    for colour, variant in zip(colours(len(variants)), variants, strict=True):
        rows = _select(ds, variant=variant)
        means = rows.groupby("depth").mean()
        ax.plot(rows.depth, rows.bits, "o", color=colour, alpha=0.4)
        ax.plot(means.depth, means.bits, "-", color=colour, label=variant)
    ax.set(xlabel="number of blocks", ylabel="validation bits per character")
    ax.set_title("Character language model, a small replica")
    ax.set_xticks(np.unique(ds.depth.values))
    return ax


@figure
def plot_training_curves(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Validation bits per character along the training, means over seeds, of the deepest models.

    Args:
        ds: of the character language model: ``curve`` along `case` and `evaluation`.
        ax: where to draw; a new figure if None.
    """
    depth = int(ds.depth.max())
    variants = list(dict.fromkeys(str(v) for v in ds.variant.values))
    for colour, variant in zip(colours(len(variants)), variants, strict=True):
        rows = _select(ds, variant=variant, depth=depth)
        ax.plot(rows.evaluation, rows.curve.mean("case"), "-", color=colour, label=variant)
        ax.plot(rows.evaluation, rows.curve.T, ".", color=colour, alpha=0.4)
    ax.set(xlabel="training steps", ylabel="validation bits per character")
    ax.set_title(f"Training of {depth} blocks at a fixed rate")
    return ax


@figure
def plot_layer_constants(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """The constant of each trained layer at the text, beside its bound.

    Args:
        ds: with ``measured`` and ``bound`` along `layer`.
        ax: where to draw; a new figure if None.
    """
    layer = ds.layer.values
    ax.plot(layer, ds.bound, "s--", color="tab:red", label="bound")
    ax.plot(layer, ds.measured, "o-", color="tab:blue", label="measured at the text")
    ax.set(yscale="log", xlabel="layer", ylabel="Lipschitz constant")
    ax.set_title("The trained layers, and what is certain of them")
    ax.set_xticks(layer)
    readable_logs(ax)
    return ax


def _select(ds: xr.Dataset, **values: float | str) -> xr.Dataset:
    keep = np.ones(ds.sizes["case"], bool)
    for name, value in values.items():
        keep &= ds[name].values == value
    if not keep.any():
        wanted = ", ".join(f"{name}={value}" for name, value in values.items())
        raise NoCases(f"no case with {wanted}")
    return ds.isel(case=np.flatnonzero(keep))
