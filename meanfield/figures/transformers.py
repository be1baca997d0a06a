"""Figures of the experiments on transformers and on the Euclidean constant.

The model and the text that a figure is about stand in its title.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from meanfield.errors import NoCases
from meanfield.figures.canvas import (
    colours,
    figure,
    kind,
    mark_unconverged,
    readable_logs,
    ticks_at,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "plot_adversarial",
    "plot_adversarial_heads",
    "plot_bound_beside_constant",
    "plot_constant_against_n",
    "plot_exponents",
    "plot_head_constants",
    "plot_large_radius",
    "plot_quadratic_growth",
    "plot_radius_against_n",
    "plot_released",
    "plot_released_on_text",
    "plot_scaling_factor",
]


@figure
def plot_constant_against_n(ds: xr.Dataset, *, ax: Axes, causal: bool = False) -> Axes:
    """Local constant against n, one colour per layer: windows as dots, their fits as lines.

    Args:
        ds: a real-text Dataset.
        ax: where to draw; a new figure if None.
        causal: whether to take the masked cases; they are taken, too, if there are no others.
    """
    rows, causal = _masked(ds, causal)
    for k, colour in enumerate(colours(ds.sizes["layer"])):
        layer = int(ds.layer[k])
        y = rows.constant.isel(layer=k).transpose("case", "window").values
        n = np.broadcast_to(rows.n_tokens.values[:, None], y.shape)
        ax.plot(n.ravel(), y.ravel(), "o", color=colour, markersize=3, alpha=0.5)
        good = rows.constant_converged.isel(layer=k).transpose("case", "window").values
        mark_unconverged(ax, n, y, good)
        _draw_law(ax, ds, rows.n_tokens.values, colour, layer=layer, causal=causal)
    ax.set(xscale="log", yscale="log", xlabel="number of tokens n", ylabel=r"$\|Df(X)\|$")
    ticks_at(ax, rows.n_tokens)
    ax.set_title(f"Local constant of attention, {kind(causal)}\n{_source(ds)}")
    readable_logs(ax)
    return ax


@figure
def plot_exponents(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Fitted exponents with their jackknife intervals against the layer, plain and masked.

    Args:
        ds: a real-text Dataset.
        ax: where to draw; a new figure if None.
    """
    styles = (("constant", "o", "norm"), ("released", "x", "published scripts' quantity"))
    offsets = iter(np.linspace(-0.18, 0.18, 4))
    for causal, colour in ((False, "tab:blue"), (True, "tab:orange")):
        for quantity, marker, label in styles:
            fits = _fits(ds, quantity=quantity, causal=causal, law="free")
            shift = next(offsets)
            if not fits.sizes["fit"]:
                continue
            p = fits.fit_exponent.values
            ends = np.stack([p - fits.fit_exponent_lower, fits.fit_exponent_upper - p])
            ax.errorbar(
                fits.fit_layer.values + shift,
                p,
                np.maximum(ends, 0),
                fmt=marker,
                color=colour,
                capsize=2,
                label=f"{label}, {kind(causal)}",
            )
    for exponent in (0.25, 0.5):
        ax.axhline(exponent, color="black", linestyle=":", linewidth=0.9)
    ax.set(xlabel="layer", ylabel=r"exponent p of $C\,n^p$, 95 % interval")
    ax.set_xticks(ds.layer.values)
    ax.set_title(f"Growth exponents (dotted: 1/4 and 1/2)\n{_source(ds)}")
    return ax


@figure
def plot_radius_against_n(ds: xr.Dataset, *, ax: Axes, causal: bool = False) -> Axes:
    """Root mean square token norm against n, mean over windows, one colour per layer.

    Args:
        ds: a real-text Dataset.
        ax: where to draw; a new figure if None.
        causal: whether to take the masked cases; they are taken, too, if there are no others.
    """
    rows, causal = _masked(ds, causal)
    for k, colour in enumerate(colours(ds.sizes["layer"])):
        line = rows.radius.isel(layer=k)
        n, low, high = rows.n_tokens, line.min("window"), line.max("window")
        ax.plot(n, line.mean("window"), "-", color=colour, label=f"layer {int(ds.layer[k])}")
        ax.fill_between(n, low, high, color=colour, alpha=0.15, linewidth=0)
    ax.set(xlabel="number of tokens n", ylabel="root mean square of the token norms")
    # Norms of layers behind a LayerNorm agree to rounding, which is nothing to zoom into.
    ax.set_ylim(0.9 * float(rows.radius.min()), 1.1 * float(rows.radius.max()))
    ticks_at(ax, rows.n_tokens)
    ax.set_title(f"Radius of the tokens, {kind(causal)}\n{_source(ds)}")
    return ax


@figure
def plot_released_on_text(ds: xr.Dataset, *, ax: Axes, causal: bool = False) -> Axes:
    """The norm and what the published scripts compute, mean over windows, per layer.

    Args:
        ds: a real-text Dataset.
        ax: where to draw; a new figure if None.
        causal: whether to take the masked cases; they are taken, too, if there are no others.
    """
    rows, causal = _masked(ds, causal)
    for k, colour in enumerate(colours(ds.sizes["layer"])):
        line = rows[["constant", "released"]].isel(layer=k).mean("window")
        label = f"layer {int(ds.layer[k])}"
        ax.plot(rows.n_tokens, line.constant, "-", color=colour, label=label)
        good = rows.constant_converged.isel(layer=k).astype(bool).all("window")
        mark_unconverged(ax, rows.n_tokens, line.constant, good)
        ax.plot(rows.n_tokens, line.released, "--", color=colour)
    ax.plot([], [], "k-", label=r"$\|Df(X)\|$")
    ax.plot([], [], "k--", label=r"$\sqrt{\|Df(X)^\top f(X)\|}$")
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="number of tokens n",
        ylabel=r"$\|Df(X)\|$, or the scripts' quantity",
    )
    ticks_at(ax, rows.n_tokens)
    what = f"The norm and the published scripts' quantity, {kind(causal)}, mean over windows"
    ax.set_title(f"{what}\n{_source(ds)}")
    readable_logs(ax)
    return ax


@figure
def plot_bound_beside_constant(ds: xr.Dataset, *, ax: Axes, causal: bool = False) -> Axes:
    """Largest constant over windows, and two upper bounds at the same tokens, per layer.

    Args:
        ds: a real-text Dataset.
        ax: where to draw; a new figure if None.
        causal: whether to take the masked cases; they are taken, too, if there are no others.
    """
    rows, causal = _masked(ds, causal)
    for k, colour in enumerate(colours(ds.sizes["layer"])):
        line = rows[["constant", "general_bound"]].isel(layer=k).max("window")
        label = f"layer {int(ds.layer[k])}"
        ax.plot(rows.n_tokens, line.constant, "o-", color=colour, label=label)
        good = rows.constant_converged.isel(layer=k).astype(bool).all("window")
        mark_unconverged(ax, rows.n_tokens, line.constant, good)
        ax.plot(rows.n_tokens, rows["local_upper"].isel(layer=k), "-.", color=colour)
        ax.plot(rows.n_tokens, line.general_bound, "--", color=colour)
    ax.plot([], [], "k-.", label="upper bound at the first window")
    ax.plot([], [], "k--", label="upper bound, Thm 3.3, heads summed")
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="number of tokens n",
        ylabel=r"local constant $\|Df(X)\|$",
    )
    ticks_at(ax, rows.n_tokens)
    what = f"Largest constant over windows, and upper bounds, {kind(causal)}"
    ax.set_title(f"{what}\n{_source(ds)}")
    readable_logs(ax)
    return ax


@figure
def plot_released(ds: xr.Dataset, *, ax: Axes, kind: str = "head") -> Axes:
    """The norm and what the published scripts compute at the same inputs, with their fits.

    Args:
        ds: a released-code Dataset.
        ax: where to draw; a new figure if None.
        kind: which inputs: "head", "rows" or "tokens".

    Raises:
        ValueError: the Dataset has no such inputs.
    """
    kinds = list(dict.fromkeys(ds.input_kind.values))
    if kind not in kinds:
        raise NoCases(f"kind: expected one of the Dataset's inputs {kinds}, got {kind!r}")
    rows = ds.isel(case=np.flatnonzero(ds.input_kind.values == kind)).sortby("n_tokens")
    n = rows.n_tokens.values
    names = (
        ("constant", "tab:blue", r"norm $\|Df(X)\|$"),
        ("released", "tab:red", r"scripts: $\sqrt{\|Df(X)^\top f(X)\|}$"),
    )
    for quantity, colour, label in names:
        ax.plot(n, rows[quantity], "o", color=colour)
        if quantity == "constant":
            mark_unconverged(ax, n, rows.constant, rows.constant_converged)
        fits = _fits(ds, quantity=quantity, input_kind=kind, law="free")
        C, p = float(fits.fit_constant[0]), float(fits.fit_exponent[0])
        ax.plot(n, C * n**p, "-", color=colour, label=f"{label}: ${C:.2f}\\,n^{{{p:.2f}}}$")
    what = {
        "head": f"Norm and scripts' quantity: worst case of head {ds.attrs.get('head')}",
        "rows": "Norm and scripts' quantity: their slice in place of a head",
        "tokens": "Norm and scripts' quantity: random token ids",
    }
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="number of tokens n",
        ylabel=r"$\|Df(X)\|$, or the scripts' quantity",
    )
    ticks_at(ax, n)
    ax.set_title(f"{what[kind]}\n{ds.attrs.get('model')}, layer {ds.attrs.get('layer')}")
    readable_logs(ax)
    return ax


@figure
def plot_adversarial(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Constant of the layer against n at the worst case of the best head, at every radius.

    Args:
        ds: an adversarial Dataset.
        ax: where to draw; a new figure if None.
    """
    best = ds.attrs["best_head"]
    rows = ds.isel(case=np.flatnonzero(ds["head"].values == best))
    radii = np.unique(rows.radius.values)
    for colour, radius in zip(colours(len(radii)), radii, strict=True):
        line = rows.isel(case=np.flatnonzero(rows.radius.values == radius)).sortby("n_tokens")
        n = line.n_tokens.values
        fits = _fits(ds, quantity="constant", head=best, radius=radius, law="free")
        p = f", $n^{{{float(fits.fit_exponent[0]):.2f}}}$" if fits.sizes["fit"] else ""
        ax.plot(n, line.constant, "o-", color=colour, label=f"layer, R = {radius:g}{p}")
        mark_unconverged(ax, n, line.constant, line.constant_converged)
        mark_unconverged(ax, n, line.head_constant, line.head_constant_converged)
        alone = _fits(ds, quantity="head_constant", head=best, radius=radius, law="free")
        p = f", $n^{{{float(alone.fit_exponent[0]):.2f}}}$" if alone.sizes["fit"] else ""
        label = f"head alone{p}"
        ax.plot(n, line.head_constant, "s--", color=colour, fillstyle="none", label=label)
        ax.plot(n, line.released, "x:", color=colour, label="published scripts' quantity")
        found = line.isel(case=np.flatnonzero(np.isfinite(line.searched.values)))
        ax.plot(found.n_tokens, found.searched, "^", color="tab:red", label="searched in $B_R$")
    n = np.unique(rows.n_tokens.values)
    ax.plot(n, np.sqrt(n), "k:", label=r"$\sqrt{n}$")
    ax.set(xscale="log", yscale="log", xlabel="number of tokens n", ylabel="local constant")
    ticks_at(ax, n)
    ax.set_title(f"Worst case of head {best}\n{ds.attrs['model']}, layer {ds.attrs['layer']}")
    readable_logs(ax)
    return ax


@figure
def plot_adversarial_heads(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Constant of the layer at the worst case of each head, at the largest n and R.

    Args:
        ds: an adversarial Dataset.
        ax: where to draw; a new figure if None.
    """
    far = (ds.n_tokens == ds.n_tokens.max()) & (ds.radius == ds.radius.max())
    rows = ds.isel(case=np.flatnonzero(far.values)).sortby("head")
    heads = rows["head"].values
    ax.bar(heads - 0.2, rows.constant, 0.4, label="layer")
    ax.bar(heads + 0.2, rows.head_constant, 0.4, label="head alone")
    mark_unconverged(ax, heads - 0.2, rows.constant, rows.constant_converged)
    mark_unconverged(ax, heads + 0.2, rows.head_constant, rows.head_constant_converged)
    n = int(ds.n_tokens.max())
    ax.axhline(n**0.5, color="black", linestyle=":", label=rf"$\sqrt{{n}}$, n = {n}")
    ax.set(xlabel="head whose worst case it is", ylabel="local constant")
    ax.set_xticks(heads)
    ax.set_title(f"Choice of head\n{ds.attrs['model']}, layer {ds.attrs['layer']}")
    ax.grid(visible=False, axis="x")
    return ax


@figure
def plot_scaling_factor(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """γR² of every head, at the real radius of its tokens, per layer.

    Args:
        ds: a scaling-factor Dataset.
        ax: where to draw; a new figure if None.
    """
    exponent = ds.exponent.mean("window").transpose("case", "head").values
    layer = np.broadcast_to(ds.layer.values[:, None], exponent.shape)
    ax.plot(layer.ravel(), exponent.ravel(), "o", color="tab:blue", alpha=0.6, label="a head")
    n = ds.attrs["n_tokens"]
    needed = np.log(n) / 2
    label = rf"$\log(n)/2$, n = {n}: above, $e^{{-2\gamma R^2}} < 1/n$"
    ax.axhline(needed, color="black", linestyle=":", label=label)
    # Linear up to the smallest decade that holds a tenth of the heads, so that none are crushed.
    small = float(np.quantile(exponent[exponent > 0], 0.1)) if (exponent > 0).any() else 1.0
    linear = 10.0 ** np.floor(np.log10(small))
    ax.set(xlabel="layer", ylabel=r"$\gamma R^2$")
    ax.set_yscale("symlog", linthresh=linear, subs=(2, 5))
    ax.set_ylim(0, 1.5 * max(float(np.nanmax(exponent)), needed))
    tops = 10.0 ** np.arange(np.log10(linear), np.log10(ax.get_ylim()[1]) + 1e-9)
    ax.set_yticks([0.0, *tops], ["0", *(f"{top:g}" for top in tops)])
    ax.set_xticks(np.unique(ds.layer.values))
    ax.set_title(f"Scaling factor at the real radius\n{_source(ds)}")
    return ax


@figure
def plot_head_constants(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Constant of every head alone, mean over windows, per layer.

    Args:
        ds: a scaling-factor Dataset.
        ax: where to draw; a new figure if None.
    """
    constant = ds.head_constant.mean("window").transpose("case", "head").values
    layer = np.broadcast_to(ds.layer.values[:, None], constant.shape)
    ax.plot(layer.ravel(), constant.ravel(), "o", color="tab:blue", alpha=0.6)
    good = ds.head_constant_converged.astype(bool).all("window").transpose("case", "head").values
    mark_unconverged(ax, layer, constant, good)
    ax.plot(ds.layer, constant.max(1), "-", color="tab:blue", linewidth=0.9, label="largest")
    ax.set(yscale="log", xlabel="layer", ylabel="local constant of the head alone")
    ax.set_xticks(np.unique(ds.layer.values))
    ax.set_title(f"Heads through depth, n = {ds.attrs['n_tokens']}\n{_source(ds)}")
    readable_logs(ax)
    return ax


@figure
def plot_quadratic_growth(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Constant against R at (R u, −R u, 0), between R² from below and Theorem 3.3.

    Args:
        ds: a quadratic-growth Dataset.
        ax: where to draw; a new figure if None.
    """
    for causal, colour, marker in ((False, "tab:blue", "o"), (True, "tab:orange", "x")):
        rows = ds.isel(case=np.flatnonzero(ds.causal.values.astype(bool) == causal))
        if rows.sizes["case"]:
            label = f"local constant, {kind(causal)}"
            ax.plot(rows.radius, rows.constant, marker, color=colour, label=label)
            mark_unconverged(ax, rows.radius, rows.constant, rows.constant_converged)
    lower = rows.isel(case=np.flatnonzero(rows.quadratic_lower.values > 0))
    ax.plot(lower.radius, lower.quadratic_lower, "k:", linewidth=0.9, label=r"lower bound, $R^2$")
    ax.plot(rows.radius, rows.general_bound, "k--", label="upper bound, Thm 3.3")
    ax.set(xscale="log", yscale="log", xlabel="radius R", ylabel="local constant")
    ax.set_title("Three tokens $(Ru, -Ru, 0)$ grow as $R^2$")
    readable_logs(ax)
    return ax


@figure
def plot_large_radius(ds: xr.Dataset, *, ax: Axes, causal: bool = False) -> Axes:
    """Constant at λX against λ and its limit, for queries that are more or less nearly tied.

    Args:
        ds: a large-radius Dataset.
        ax: where to draw; a new figure if None.
        causal: whether to take the masked cases; they are taken, too, if there are no others.
    """
    rows, causal = _masked(ds, causal)
    gaps = np.unique(rows.gap.values)
    for colour, gap in zip(colours(len(gaps)), gaps, strict=True):
        line = rows.isel(case=np.flatnonzero(rows.gap.values == gap)).sortby("scale")
        ax.plot(line.scale, line.constant, "o-", color=colour, label=f"gap {gap:g}")
        mark_unconverged(ax, line.scale, line.constant, line.constant_converged)
        ax.plot(line.scale, line.limit, "--", color=colour, linewidth=0.9)
    ax.plot([], [], "k--", linewidth=0.9, label="limit, Thm 4.5" if causal else "limit, Thm 3.7")
    ax.plot(line.scale, line.ceiling, "k:", label=r"$\|V\|\sqrt{n}$")
    ax.set(xscale="log", yscale="log", xlabel=r"factor $\lambda$", ylabel=r"$\|Df(\lambda X)\|$")
    ax.set_title(f"Far out, {kind(causal)}: a limit, and a hump near ties")
    readable_logs(ax)
    return ax


def _draw_law(
    ax: Axes, ds: xr.Dataset, n: np.ndarray, colour: Any, *, layer: int, causal: bool
) -> None:
    fits = _fits(ds, quantity="constant", layer=layer, causal=causal, law="free")
    if not fits.sizes["fit"]:
        ax.plot([], [], "-", color=colour, label=f"layer {layer}")
        return
    C, p = float(fits.fit_constant[0]), float(fits.fit_exponent[0])
    low, high = float(fits.fit_exponent_lower[0]), float(fits.fit_exponent_upper[0])
    interval = "" if np.isnan(low) else f" [{low + 0.0:.2f}, {high + 0.0:.2f}]"
    p_text = f"{p:.2f}".replace("-0.00", "0.00")
    interval = interval.replace("-0.00", "0.00")
    label = f"layer {layer}: ${C:.2g}\\,n^{{{p_text}}}${interval}"
    ends = np.array([n.min(), n.max()], float)
    ax.plot(ends, C * ends**p, "-", color=colour, label=label)


def _fits(ds: xr.Dataset, **labels: Any) -> xr.Dataset:
    """The fits with these labels; none if the Dataset has no fits."""
    if "fit" not in ds.sizes:
        return xr.Dataset(coords={"fit": np.arange(0)})
    keep = np.ones(ds.sizes["fit"], dtype=bool)
    for name, value in labels.items():
        keep &= ds[f"fit_{name}"].values == value
    return ds.isel(fit=np.flatnonzero(keep))


def _masked(ds: xr.Dataset, causal: bool) -> tuple[xr.Dataset, bool]:
    """The cases with this mask, and which mask it is; decoders have no plain ones."""
    kinds = np.unique(ds.causal.values.astype(bool))
    if causal and True not in kinds:
        raise NoCases(
            "causal: expected a Dataset with masked cases, got plain ones only; run it with "
            "masks=(False, True), or leave causal=True out"
        )
    causal = causal or False not in kinds
    return ds.isel(case=np.flatnonzero(ds.causal.values.astype(bool) == causal)), causal


def _source(ds: xr.Dataset) -> str:
    return f"model {ds.attrs.get('model')}, text {ds.attrs.get('text')}"
