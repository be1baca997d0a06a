"""What all figures share: the house style, Axes, colours, the options that they take."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np

from meanfield.checks import choice, describe
from meanfield.errors import NoCases
from meanfield.figures.legends import place_legend, with_room
from meanfield.habits import with_hints
from meanfield.results.cases import answered
from meanfield.results.labels import told_apart
from meanfield.results.shapes import as_dataset

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes

FORMULA = "formula"  # the group id of lines that are no column of the Dataset

_MARKERS = "osD^vPX*<>"
_STYLES = ("house", "paper")
_FEW = 6  # markers along a curve of many points
_CHARACTER = 0.018  # of a name of a tick, over the width of the Axes
_DECADES = 200  # of an axis, from which on its limits are set by hand
_NOTHING = {"None", None, "", " "}  # for a line or a marker that is none

_STYLE: Any = {
    "figure.figsize": (4.6, 3.4),
    "figure.dpi": 110,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 200,
    "savefig.bbox": "tight",
    "pdf.fonttype": 42,
    "svg.hashsalt": "meanfield",
    "font.size": 9.5,
    "axes.titlesize": 10,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "axes.formatter.min_exponent": 4,  # 2 and 5 on logarithmic axes, not 2×10⁰
}


# What a journal prints: one column, captions for titles, letters that stay letters.
_PAPER: Any = _STYLE | {
    "figure.figsize": (3.35, 2.5),
    "savefig.format": "svg",
    "svg.fonttype": "none",
    "font.size": 8,
    "legend.fontsize": 7,
    "axes.titlecolor": "none",
}


@with_hints
def style(name: str = "house") -> AbstractContextManager[None]:
    """A style, for as long as the context lasts.

    Args:
        name: "house", or "paper": one column wide, without titles, saved as SVG by default.
    """
    import matplotlib as mpl

    return mpl.rc_context({"house": _STYLE, "paper": _PAPER}[choice(name, "name", _STYLES)])


def axes(ax: Axes | None) -> Axes:
    """The Axes given, or those of a new figure."""
    from matplotlib.axes import Axes as Drawable

    if ax is not None:
        if not isinstance(ax, Drawable):
            raise TypeError(f"ax: expected the Axes of matplotlib or None, got {describe(ax)}")
        return ax
    import matplotlib.pyplot as plt

    return plt.subplots(layout="constrained")[1]  # a legend under the Axes has room


Draw = Callable[..., "Axes"]


def figure(*columns: str) -> Callable[[Draw], Draw]:
    """Decorate a figure, a function of a Dataset and ``ax=``, so that it takes three options.

    ``ax``: where to draw; a new figure if None. ``legend``: under the Axes if True; "ends" names
    curves at their ends; False for none. ``title``: in place of the figure's own; "" for none.

    Gives each colour its own marker, in place of "o" or of none; other markers stay.

    Args:
        *columns: the variables of the Dataset that are drawn, a quotient of two as ``"a/b"``, and
            the flags ``..._converged`` by which points are marked. The figure refuses a Dataset
            that lacks one, and has them as its attribute `columns`. It is handed the cases that
            have an answer.
    """

    def decorate(draw: Draw) -> Draw:
        own = inspect.signature(draw)

        @functools.wraps(draw)
        def drawn(
            ds: Any,
            *,
            ax: Axes | None = None,
            legend: bool | str = True,
            title: str | None = None,
            **settings: Any,
        ) -> Axes:
            from matplotlib import rcParams

            ds = drawable(draw.__name__, ds, columns)
            canvas = axes(ax)
            known = set(canvas.get_lines())
            draw(ds, ax=canvas, **settings)
            new = [line for line in canvas.get_lines() if line not in known]
            _leave_out_what_is_not_drawn(new)
            _mark(new)
            _dash(new)
            _far_logs(canvas)
            _readable_logs(canvas)
            if title is not None or rcParams["axes.titlecolor"] == "none":
                canvas.set_title(title or "")
            place_legend(canvas, legend)
            if ax is None:
                with_room(canvas.figure)
            return canvas

        common = inspect.signature(drawn, follow_wrapped=False).parameters
        mine = {name: common.get(name, p) for name, p in own.parameters.items() if name != "ds"}
        mine |= {name: common[name] for name in ("legend", "title")}
        mine["ax"] = common["ax"].replace(annotation="Axes | None")
        documented: Any = drawn
        documented.columns = columns
        documented.__signature__ = own.replace(parameters=[own.parameters["ds"], *mine.values()])
        return with_hints(drawn)

    return decorate


def _leave_out_what_is_not_drawn(lines: Sequence[Any]) -> None:
    """No entry in the legend for a line without a point, nor for a key to no line."""
    keys = [line for line in lines if not len(line.get_xdata())]
    drawn = [line for line in lines if _has_a_place(line).any()]
    looks = [{line.get_linestyle(), line.get_marker()} - _NOTHING for line in drawn]
    for line in lines:
        own = {line.get_linestyle(), line.get_marker()} - _NOTHING
        if line not in drawn and not (line in keys and any(own <= look for look in looks)):
            line.set_label("_not drawn")


def _has_a_place(line: Any) -> np.ndarray:
    """Which points of a line the Axes can show: finite ones, on logarithmic axes positive ones."""
    points = np.asarray(line.get_xydata(), float)
    logs = [line.axes.get_xscale() == "log", line.axes.get_yscale() == "log"]
    return (np.isfinite(points) & ((points > 0) | ~np.array(logs))).all(-1)


def drawable(name: str, ds: Any, columns: Sequence[str]) -> xr.Dataset:
    """The cases that the figure of this name can draw: those that have an answer.

    Raises:
        TypeError: it is no Dataset.
        NoCases: it lacks variables that the figure draws, or no case has an answer.
    """
    known = answered(as_dataset(ds))
    needed = [one for column in columns for one in column.split("/")]
    if lacking := [one for one in needed if one not in known.variables]:
        fits = [one for one in lacking if one.startswith("fit_")]
        hint = "; power laws are fitted to five values of n_tokens or more" if fits else ""
        raise NoCases(f"{name}: expected a Dataset with {needed}, got one without {lacking}{hint}")
    if known.sizes.get("case") == 0:
        raise NoCases("no case of the Dataset has an answer")
    return known


def _mark(lines: Sequence[Any]) -> None:
    """One marker for each colour; a few along a curve that has none."""
    from matplotlib.colors import to_hex

    marker_of: dict[str, str] = {}
    for line in lines:
        colour, plain = to_hex(line.get_color()), line.get_marker() in ("None", None, "")
        if line.get_gid() == FORMULA or colour == "#000000":
            continue
        if not plain and line.get_marker() not in ("o", "."):
            continue
        if plain and (line.get_linestyle() != "-" or str(line.get_label()).startswith("_")):
            continue
        marker = marker_of.setdefault(colour, _MARKERS[len(marker_of) % len(_MARKERS)])
        line.set_marker(marker)
        if plain and len(line.get_xdata()) > 2 * _FEW:
            first = len(marker_of) * len(line.get_xdata()) // (_FEW * _FEW)
            line.set_markevery((first, len(line.get_xdata()) // _FEW))


def _dash(lines: Sequence[Any]) -> None:
    """A short dash where a line has a single place, of which there would be nothing to see."""
    for line in lines:
        shown = np.flatnonzero(_has_a_place(line))
        places = line.get_xydata()[shown]
        unseen = line.get_marker() in _NOTHING or line.get_markevery() == []
        if unseen and len(places) and (places == places[0]).all():
            line.set(marker="_", markersize=12, markeredgewidth=1.4, markevery=[int(shown[0])])


def ticks_at(ax: Axes, x: Any) -> None:
    """Ticks where the data are, if they are few, and most have room for their names."""
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullFormatter

    values = np.unique(np.asarray(x, float))
    values = values[np.isfinite(values)]
    if not 0 < len(values) <= _FEW + 2:
        return
    places = ax.xaxis.get_transform().transform(values)
    places = (places - places[0]) / (places[-1] - places[0] or 1.0)
    names, free = told_apart(values), -np.inf
    for k, place in enumerate(places):
        half = _CHARACTER * (len(names[k]) + 1) / 2
        names[k], free = (names[k], place + half) if place - half >= free else ("", free)
    if 2 * names.count("") <= len(names):
        ax.xaxis.set_major_locator(FixedLocator(values.tolist()))
        ax.xaxis.set_major_formatter(FixedFormatter(names))
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.xaxis.set_minor_locator(FixedLocator([]))


def colours(count: int) -> list[Any]:
    """As many colours, from dark to light."""
    import matplotlib as mpl

    return list(mpl.colormaps["viridis"](np.linspace(0.0, 0.85, max(count, 1))))[:count]


def kind(causal: bool) -> str:
    """What a title calls cases with or without the mask."""
    return "masked" if causal else "plain"


def literal(text: str) -> str:
    """Text of a Dataset, in which "$" is no sign of a formula."""
    return text.replace("$", r"\$")


def in_words(text: str) -> str:
    """A long name: with its formulas if they are some, and otherwise `literal`."""
    from matplotlib.mathtext import MathTextParser

    try:
        MathTextParser("path").parse(text)
    except ValueError:
        return literal(text)
    return text


def _far_logs(ax: Axes) -> None:
    """Limits and ticks of logarithmic axes whose own would leave the range of numbers."""
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    far = {}
    for name, axis, most in (("x", ax.xaxis, ax.dataLim.x1), ("y", ax.yaxis, ax.dataLim.y1)):
        if axis.get_scale() == "log" and 0 < axis.get_minpos() < most < np.inf:
            low, high = np.log10([axis.get_minpos(), most])
            if high - low > _DECADES:
                far[name] = axis, low, high
    ax.set(**{f"autoscale{name}_on": False for name in far})  # both, before either is looked at
    for name, (axis, low, high) in far.items():
        margin = 0.05 * (high - low)
        ends = 10 ** max(low - margin, -323.0), 10 ** min(high + margin, 308.25)
        ax.set(**{f"{name}lim": ends})
        if not isinstance(axis.get_major_locator(), FixedLocator):
            powers = np.linspace(np.ceil(low), np.floor(high), 6).round()
            axis.set_major_locator(FixedLocator((10.0**powers).tolist()))
            axis.set_major_formatter(FixedFormatter([f"$10^{{{k:.0f}}}$" for k in powers]))
        axis.set_minor_locator(NullLocator())


def _readable_logs(ax: Axes) -> None:
    """Plain numbers on logarithmic axes, powers of ten only beyond 0.001 and 10,000.

    On axes of few decades there are ticks between the powers.
    """
    from matplotlib.ticker import (
        FixedLocator,
        FuncFormatter,
        LogLocator,
        MaxNLocator,
        NullFormatter,
    )

    for axis in (ax.xaxis, ax.yaxis):
        if axis.get_scale() != "log" or isinstance(axis.get_major_locator(), FixedLocator):
            continue
        low, high = axis.get_view_interval()
        decades = abs(float(np.log10(high / low)))
        axis.set_minor_formatter(NullFormatter())
        plain = min(low, high) >= 1e-3 and max(low, high) < 5e4
        axis.set_major_formatter(FuncFormatter(_as_number if plain else _as_power))
        if decades < 2.5:
            subs = (1, 2, 5) if decades >= 1 else (1, 1.5, 2, 3, 4, 5, 6, 8)
            few = MaxNLocator(5) if decades < 0.3 else LogLocator(10, subs, numticks=12)
            axis.set_major_locator(few)
            axis.set_major_formatter(FuncFormatter(_as_number))


def _as_number(value: float, _: int | None = None) -> str:
    return f"{value:g}"


def _as_power(value: float, _: int | None = None) -> str:
    return f"$10^{{{np.log10(value):.0f}}}$"
