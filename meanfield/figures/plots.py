"""Figures of anybody's Dataset: growth of a constant, secant ratios, exponents."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from meanfield.checks import choice
from meanfield.errors import NoCases
from meanfield.figures.canvas import FORMULA, colours, figure, kind, short, ticks_at
from meanfield.figures.curves import curve, mark_unconverged
from meanfield.figures.particles import plot_particle_paths
from meanfield.figures.selection import by_level, fits_of, levels, model_and_text
from meanfield.results.shapes import parameters_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CURVES = 8  # at most in a figure of any Dataset
_FIGURES = 12
_EVIDENCE = ("_residual", "_error", "_miss", "_lower", "_upper")


@figure()
def plot_growth(
    ds: xr.Dataset,
    *,
    ax: Axes,
    x: str = "n_tokens",
    y: str = "constant",
    by: str | None = None,
    bounds: Sequence[str] = (),
) -> Axes:
    """A number of each case against a parameter, and bounds of it, dashed.

    An axis is logarithmic if its values are positive and span a factor of 10.

    Args:
        ds: a Dataset along `case`; points whose ``{y}_converged`` is false are marked. Where
            another parameter differs at the same x, there are points without a curve.
        ax: where to draw; a new figure if None.
        x: the parameter on the horizontal axis.
        y: the variable on the vertical one.
        by: a parameter that gives each of its values a curve and a colour; one curve if None.
        bounds: variables that bound y.
    """
    names = [str(name) for name in ds.variables]
    for name in (x, y, *([by] if by else []), *bounds):
        choice(name, "the Dataset's variable", names)
    words = {str(name): ds[name].attrs.get("long_name", str(name)) for name in ds.variables}
    dashes = dict(zip(bounds, itertools.cycle(("--", "-.", ":")), strict=False))
    groups = by_level(ds, by) if by else [(colours(1)[0], None, ds)]
    for colour, level, rows in groups:
        rows = rows.sortby(x)
        label = words[y] if by is None else f"{by} = {short(level)}"
        once = len(np.unique(rows[x])) == rows.sizes["case"]
        curve(ax, rows, x, y, "o-" if once else "o", color=colour, label=label)
        for name, line in dashes.items():
            ax.plot(rows[x], rows[name], line, color=colour, linewidth=0.9)
    for name, line in dashes.items():
        ax.plot([], [], f"k{line}", linewidth=0.9, label=words[name])
    ax.set(xscale=_scale(ds[x]), yscale=_scale(ds[y]), xlabel=words[x], ylabel=words[y])
    ticks_at(ax, ds[x])
    ax.set_title(f"{y} against {x}".replace("_", " "))
    return ax


def _scale(values: xr.DataArray) -> str:
    known = values.values[np.isfinite(values.values)]
    wide = known.size and known.min() > 0 and known.max() >= 10 * known.min()
    return "log" if wide else "linear"


def figures_of(ds: xr.Dataset) -> Mapping[str, Callable[..., Axes]]:
    """Figures of anybody's Dataset: paths of particles, numbers of cases against a parameter.

    On the horizontal axis is the parameter of the most values, and the next has colours.
    """
    made: dict[str, Callable[..., Axes]] = {}
    if set(map(str, ds["points"].dims if "points" in ds else ())) >= {"particle", "feature"}:
        made["paths"] = plot_particle_paths
    several = {name: len(levels(ds, name)) for name in parameters_of(ds)}
    several = {name: n for name, n in several.items() if n > 1}
    axes = [name for name in several if ds[name].dtype.kind in "iuf"]
    if not axes:
        return made
    x = max(axes, key=several.__getitem__)
    colour = [name for name, n in several.items() if name != x and n <= _CURVES]
    by = max(colour, key=several.__getitem__, default=None)
    numbers = [
        str(name)
        for name, column in ds.data_vars.items()
        if column.dims == ("case",) and column.dtype.kind == "f" and column.notnull().any()
    ]
    for y in numbers[:_FIGURES]:
        if not y.endswith(_EVIDENCE):
            bounds = [f"{y}{end}" for end in ("_lower", "_upper") if f"{y}{end}" in numbers]
            made[y] = partial(plot_growth, x=x, y=y, by=by, bounds=bounds)
    return made


@figure("euclidean_secant/euclidean", "wasserstein_secant/euclidean", "euclidean_converged")
def plot_secants(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Secant ratios over the Euclidean constant of n tokens, as the step shrinks.

    Args:
        ds: from `lipschitz.compare_lemma_3_2`, or such Datasets along `case`, of one mask; without
            the dimension `perturbation` the ratios are those along the worst direction.
        ax: where to draw; a new figure if None.
    """
    rows = ds if "case" in ds.dims else ds.expand_dims("case")
    for k, colour in enumerate(colours(rows.sizes["case"])):
        _draw_secants(ax, rows.isel(case=k), colour)
    ax.axhline(1.0, color="black", linestyle=":", gid=FORMULA)
    causal = "causal" in ds and bool(np.all(ds.causal))
    name = "conditional $d_2$" if causal else "$W_2$"
    ax.plot([], [], "k-", label="Euclidean, discrete map")
    ax.plot([], [], "ko", fillstyle="none", label=name)
    ax.plot([], [], "k--", linewidth=0.9, label=f"{name}, worst atom split")
    ax.set(xscale="log", xlabel="step: displacement / R")
    ax.set_ylabel("secant ratio / Euclidean constant")
    ax.invert_xaxis()
    radii = np.unique(rows.radius) if "radius" in rows else np.zeros(0)
    radius = f", R = {radii[0]:g}" if len(radii) == 1 else ""
    lemma = "4.2, masked" if causal else "3.2, plain"
    ax.set_title(f"Lemma {lemma}{radius}: secants over the constant of n tokens")
    return ax


def _draw_secants(ax: Axes, case: xr.Dataset, colour: Any) -> None:
    several = "perturbation" in case.dims
    top = case.sel(perturbation="top") if several else case
    scale, step = float(case.euclidean), case.step
    marks: Any = {"color": colour, "fillstyle": "none"}
    if "n_tokens" in case:
        marks["label"] = f"n = {int(case.n_tokens)}"
    # Its marker is in the legend alone: on the curve it would hide those of W₂.
    ax.plot(step, top.euclidean_secant / scale, "o-", markevery=[], **marks)
    marks.pop("label", None)
    ax.plot(step, top.wasserstein_secant / scale, "o", **marks)
    if several:
        split = case.sel(perturbation="splitting").wasserstein_secant
        ax.plot(step, split / scale, "--", color=colour, linewidth=0.9)
    # The scale of the whole curve is what has not converged.
    mark_unconverged(ax, step, top.euclidean_secant / scale, case.euclidean_converged)


@figure("fit_exponent", "fit_exponent_lower", "fit_exponent_upper", "fit_holds")
def plot_exponents(
    ds: xr.Dataset, *, ax: Axes, quantities: Mapping[str, str] | None = None
) -> Axes:
    """Fitted exponents with their jackknife intervals against the layer; hollow: no one law.

    Args:
        ds: with power laws fitted layer by layer, as ``real-text`` and ``released-code`` have
            them; in several colours if quantities are several, or some cases are masked.
        ax: where to draw; a new figure if None.
        quantities: which ones, and what they are called; ``constant`` if None.
    """
    quantities = quantities or {"constant": ""}
    free = ds.isel(fit=np.flatnonzero(ds.fit_law == "free"))
    masks = np.unique(ds.fit_causal) if "fit_causal" in ds else [None]
    series = [(name, mask) for name in quantities for mask in masks]
    fitted = [(n, m, fits) for n, m in series if len((fits := _fits(free, n, m)).fit)]
    if not fitted:
        raise NoCases(f"no power law is fitted to {', '.join(quantities)}")
    for k, (name, mask, fits) in enumerate(fitted):
        p, holds = fits.fit_exponent.values, fits.fit_holds.values.astype(bool)
        ends = np.stack([p - fits.fit_exponent_lower, fits.fit_exponent_upper - p])
        told = mask is not None and (len(masks) > 1 or not quantities[name])
        words = [quantities[name], kind(bool(mask)) if told else ""]
        shift = 0.2 * (k - (len(fitted) - 1) / 2) / max(len(fitted) / 2, 1)
        x = np.broadcast_to(fits.fit_layer, p.shape) + shift
        style: Any = {"fmt": "o", "color": f"C{k}", "capsize": 2}
        label = ", ".join(filter(None, words))
        ax.errorbar(x, p, np.maximum(ends, 0), label=label, **style)
        ax.plot(x[~holds], p[~holds], "o", color=f"C{k}", markerfacecolor="white", zorder=3)
    for exponent in (0.25, 0.5):
        ax.axhline(exponent, color="black", linestyle=":", linewidth=0.9, gid=FORMULA)
    ax.set(xlabel="layer", ylabel=r"exponent p of $C\,n^p$, 95 % interval")
    ax.set_xticks(np.unique(ds.fit_layer.values))
    hollow = "" if all(one.fit_holds.all() for *_, one in fitted) else "; hollow: no one law"
    ax.set_title(f"Growth exponents (dotted: 1/4 and 1/2{hollow})\n{model_and_text(ds)}")
    return ax


def _fits(free: xr.Dataset, quantity: str, mask: Any) -> xr.Dataset:
    where = {} if mask is None else {"causal": mask}
    return fits_of(free, quantity=quantity, **where)
