"""Figures of anybody's Dataset: growth of a constant, secant ratios, exponents, paths."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from meanfield.checks import choice
from meanfield.errors import NoCases
from meanfield.figures.canvas import FORMULA, figure, in_words, kind, literal, ticks_at
from meanfield.figures.charts import Chart, Curve, Formula, Key, Rows
from meanfield.figures.curves import curve
from meanfield.figures.selection import attribute, fits_of, levels, listed, model_and_text, spelled
from meanfield.results.cases import RESERVED, is_true, unless_nan
from meanfield.results.shapes import parameters_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CURVES = 8  # at most in a figure of any Dataset
_FIGURES = 12
_EVIDENCE = ("_residual", "_error", "_miss", "_lower", "_upper")


@figure("points")
def plot_particle_paths(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Paths of the particles in their first two coordinates, where they start and where they end.

    On the line they are drawn against time.

    Args:
        ds: with ``points`` (time, particle, feature), as `dynamics.flow` returns it; of several
            cases the first is drawn.
        ax: where to draw; a new figure if None.
    """
    if not (along := _time_of(ds.points)) or not ds.points.size:
        raise ValueError(
            f"ds: expected points (time, particle, feature), got {dict(ds.points.sizes)}; select "
            "one of what else there is"
        )
    one = ds.isel(case=0) if "case" in ds.points.dims else ds
    points = one.points.transpose(along, "particle", "feature").values
    if points.shape[-1] == 1:
        times = one["time" if "time" in one.variables else along]
        ax.plot(times, points[..., 0], color="tab:blue", linewidth=0.7, marker="")
        ax.set(xlabel="time t", ylabel="$x$")
    else:
        draw_paths(ax, points)
        ax.set(xlabel="$x_1$", ylabel="$x_2$")
    n_cases = ds.sizes["case"] if "case" in ds.points.dims else 1
    first = f"\nthe first of {n_cases} cases" if n_cases > 1 else ""
    ax.set_title(f"Paths of the particles{projection(points)}{first}")
    return ax


def _time_of(points: xr.DataArray) -> str:
    """The one dimension beside cases, particles and their features; "" of what are no paths."""
    dims = {str(dim) for dim in points.dims} - {"case"}
    time = dims - {"particle", "feature"}
    return time.pop() if len(dims) == 3 and len(time) == 1 else ""


def projection(points: np.ndarray) -> str:
    """What a title says of points (time, particle, feature) of which two coordinates are shown.

    Coordinates at the end that are 0 throughout hide nothing: a plane may be kept in space.
    """
    dim = max(np.flatnonzero(points.any((0, 1))), default=0) + 1
    return "" if dim < 3 else ", seen along $x_3$" if dim == 3 else f", two of {dim} coordinates"


def draw_paths(ax: Axes, points: np.ndarray) -> None:
    """Draw paths (time, particle, feature) in their first two coordinates."""
    for path in np.moveaxis(points, 1, 0):
        ax.plot(path[:, 0], path[:, 1], color="0.7", linewidth=0.7)
    ax.plot(*points[0, :, :2].T, ".", color="tab:blue", markersize=4, label="start")
    ax.plot(*points[-1, :, :2].T, "o", color="tab:red", markersize=5, label="end")
    ax.set_aspect("equal")


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
    """A number of each case against a parameter, with their units, and bounds of it, dashed.

    An axis is logarithmic if the values of x, or of y, are positive and span a factor of 10; a
    bound is then drawn where it is positive.

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
    bounds = [bounds] if isinstance(bounds, str) else bounds
    for name in (x, y, *([by] if by else []), *bounds):
        choice(name, "the Dataset's variable", names)
        if ds[name].dims != ("case",):
            raise ValueError(
                f"ds: expected a Dataset along 'case', got {name} along {ds[name].dims}; draw "
                "what the sweep returned, and not its cube"
            )
    for name in (x, y, *bounds):
        if ds[name].dtype.kind not in "biuf":
            raise ValueError(
                f"ds: expected numbers to draw, got {name} of {ds[name].dtype}; `by` alone may be "
                "text"
            )
    return growth(ds, x, y, by, bounds).on(ax, ds)


def growth(ds: xr.Dataset, x: str, y: str, by: str | None, bounds: Sequence[str]) -> Chart:
    """The chart of `plot_growth` for this Dataset."""
    told = {str(name): str(ds[name].attrs.get("long_name", name)) for name in (x, y, *bounds)}
    words = {name: in_words(text) for name, text in told.items()}
    units = {name: literal(str(ds[name].attrs.get("units") or "1")) for name in (x, y)}
    axes = {name: f"{words[name]} [{unit}]".removesuffix(" [1]") for name, unit in units.items()}
    columns = (map(unless_nan, listed(ds[name].values)) for name in (x, by) if name)
    places = list(zip(*columns, strict=True))
    values = [] if by is None else levels(ds, by)
    texts = dict(zip(values, spelled(values), strict=True))

    def label(rows: xr.Dataset) -> str:
        if by is None:
            return words[y]
        value = listed(rows[by].values)[0]
        named = literal(by)
        return f"no {named}" if unless_nan(value) in (None, "") else f"{named} = {texts[value]}"

    scales = zip("xy", (_scale(ds[x]), _scale(ds[y])), strict=True)
    dashes = zip(bounds, itertools.cycle(("--", "-.", ":")), strict=False)
    return Chart(
        f"{told[y]} against {told[x]}.",
        x,
        [
            Curve(y, label, "o-" if len(set(places)) == len(places) else "o"),
            *(Curve(name, fmt=dash, key=words[name], linewidth=0.9) for name, dash in dashes),
        ],
        literal(f"{y} against {x}".replace("_", " ")),
        by=by or "",
        log="".join(axis for axis, scale in scales if scale == "log"),
        ticks=True,
        xlabel=axes[x],
        ylabel=axes[y],
    )


@figure("attention", "attention_upper", "attention_converged")
def plot_constants(ds: xr.Dataset, *, ax: Axes, parts: Sequence[str] | None = None) -> Axes:
    """The constants of the layers of a model: marks, probable ends as bars, certain ones dashed.

    Args:
        ds: of `constants` of a `meanfield.pretrained.Transformer`; every text has its curve.
        ax: where to draw; a new figure if None.
        parts: which of "attention" and "block"; those that the Dataset has if None.
    """
    there = [part for part in ("attention", "block") if part in ds]
    parts = there if parts is None else [parts] if isinstance(parts, str) else parts
    if not parts:
        raise ValueError(f"parts: expected some of {there}, got none")
    for k, part in enumerate(parts):
        choice(part, "parts", there)
        texts = ds if "text" in ds.dims else ds.expand_dims("text")
        for t in range(texts.sizes["text"]):
            rows = texts.isel(text=t)
            words = in_words(str(ds[part].attrs.get("long_name", part)))
            style: Any = {"color": f"C{k}", "label": None if t else words}
            curve(ax, rows, "layer", part, "o-", **style)
            ax.vlines(rows.layer, rows[part], rows[f"{part}_upper"], color=f"C{k}", linewidth=3)
            if f"{part}_bound" in rows:
                ax.plot(rows.layer, rows[f"{part}_bound"], "k--", linewidth=0.9)
    ax.plot([], [], "k--", linewidth=0.9, label="certain bound")
    ax.set(yscale=_scale(ds[list(parts)].to_array()), xlabel="layer", ylabel="local constant")
    ticks_at(ax, ds.layer)
    each = "" if "text" not in ds.dims else "a curve for each text; "
    of = literal(f"{attribute(ds, 'model')} at {attribute(ds, 'length')} tokens")
    ax.set_title(f"Constants of {of}\n{each}bars: probable ends")
    return ax


def _scale(values: xr.DataArray) -> str:
    finite = values.values[np.isfinite(values.values)]
    wide = finite.size and finite.min() > 0 and finite.max() >= 10 * finite.min()
    return "log" if wide else "linear"


def figures_of(ds: xr.Dataset) -> Mapping[str, Callable[..., Axes]]:
    """Figures of anybody's Dataset: paths of particles, numbers of cases against a parameter.

    On the horizontal axis is the parameter of the most values, and the next has colours.
    """
    made: dict[str, Callable[..., Axes]] = {}
    if "points" in ds and _time_of(ds["points"]):
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
        if column.dims == ("case",) and column.dtype.kind in "iuf" and column.notnull().any()
    ]
    evidence = {f"{name}{end}" for name in ds.data_vars for end in _EVIDENCE}
    answers = [name for name in numbers if name not in evidence and name not in RESERVED]
    for y in answers[:_FIGURES]:
        bounds = [f"{y}{end}" for end in ("_lower", "_upper") if f"{y}{end}" in numbers]
        made[y] = growth(ds, x, y, by, bounds)
    return made


def secants(causal: bool, rows: Rows, *, split: bool = False) -> Chart:
    """Secant ratios over the Euclidean constant of n tokens, one case for each n.

    Args:
        causal: whether the cases are masked.
        rows: those cases.
        split: whether the ratios are along several directions, as `compare_lemma_3_2` has them.
    """
    name = "conditional $d_2$" if causal else "$W_2$"

    def ratio(of: str, label: str, fmt: str, which: str = "top", **style: Any) -> Curve:
        along = lambda ds: ds.isel(case=0).sel({"perturbation": which} if split else {})  # noqa: E731
        return Curve(f"{of}_secant/euclidean", label, fmt, rows=along, **style)

    return Chart(
        "Secant ratios over the Euclidean constant of n tokens, as the step shrinks, "
        f"{kind(causal)}.",
        "step",
        [
            # Its marker is in the legend alone: on the curve it would hide those of W₂.
            ratio(
                "euclidean",
                "n = {n_tokens}",
                "o-",
                markevery=[],
                flag="euclidean_converged",
                fillstyle="none",
            ),
            ratio("wasserstein", "", "o", fillstyle="none", key=name),
            *[ratio("wasserstein", "", "--", "splitting", key=f"{name}, worst atom split")]
            * split,
            Key("Euclidean, discrete map", "-"),
            Formula(lambda step, at: 1.0, once=True),
        ],
        lambda ds: f"Lemma {'4.2, masked' if causal else '3.2, plain'}, R = {ds.radius[0]:.15g}",
        by="n_tokens",
        rows=rows,
        log="x",
        xlabel=r"step: displacement / $\max_i\|x_i\|$",
        ylabel="secant ratio / Euclidean constant",
    )


def exponents(quantities: Mapping[str, str]) -> Callable[..., Axes]:
    """The figure of the exponents of power laws fitted layer by layer.

    Args:
        quantities: what they are fitted to, and what that is called; in several colours if they
            are several, or some cases are masked.
    """

    @figure("fit_exponent", "fit_exponent_lower", "fit_exponent_upper", "fit_holds")
    def draw(ds: xr.Dataset, *, ax: Axes) -> Axes:
        """Fitted exponents with their jackknife intervals, by layer."""
        masks = levels(ds, "fit_causal") if "fit_causal" in ds else [None]
        series = [
            (
                name,
                mask,
                fits_of(
                    ds, law="free", quantity=name, **({} if mask is None else {"causal": mask})
                ),
            )
            for name in quantities
            for mask in masks
        ]
        fitted = [one for one in series if one[-1].sizes["fit"]]
        if not fitted:
            raise NoCases(f"no power law is fitted to {', '.join(quantities)}")
        for k, (name, mask, fits) in enumerate(fitted):
            p, holds = fits.fit_exponent.values, is_true(fits.fit_holds.values)
            ends = np.stack([p - fits.fit_exponent_lower, fits.fit_exponent_upper - p])
            told = mask is not None and (len(masks) > 1 or not quantities[name])
            label = ", ".join(filter(None, [quantities[name], kind(bool(mask)) if told else ""]))
            shift = 0.2 * (k - (len(fitted) - 1) / 2) / max(len(fitted) / 2, 1)
            x = np.broadcast_to(fits.fit_layer, p.shape) + shift
            ax.errorbar(x, p, np.maximum(ends, 0), fmt="o", color=f"C{k}", capsize=2, label=label)
            ax.plot(x[~holds], p[~holds], "o", color=f"C{k}", markerfacecolor="white", zorder=3)
        for exponent in (0.25, 0.5):
            ax.axhline(exponent, color="black", linestyle=":", linewidth=0.9, gid=FORMULA)
        known = any(bool(one.fit_exponent_lower.notnull().any()) for *_, one in fitted)
        interval = ", 95 % interval" if known else ""
        ax.set(xlabel="layer", ylabel=rf"exponent p of $C\,n^p${interval}")
        ax.set_xticks(np.unique(ds.fit_layer.values))
        hollow = "" if all(one.fit_holds.all() for *_, one in fitted) else "; hollow: no one law"
        bare = "" if known else "; no intervals of fewer than 3 windows"
        ax.set_title(f"Growth exponents (dotted: 1/4 and 1/2{hollow}{bare})\n{model_and_text(ds)}")
        return ax

    draw.__doc__ = (
        f"Exponents fitted to {', '.join(quantities)}, with their jackknife intervals from three "
        "windows on, by layer; hollow: no one law."
    )
    return draw
