"""What all figures share: the house style, Axes, legends, colours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "axes",
    "colours",
    "kind",
    "legend_below",
    "legend_beside",
    "mark_unconverged",
    "readable_logs",
    "style",
]

_STYLE: Any = {
    "figure.figsize": (5.2, 3.6),
    "figure.dpi": 110,
    "savefig.dpi": 200,
    "savefig.bbox": "tight",
    "pdf.fonttype": 42,
    "font.size": 9.5,
    "axes.titlesize": 10,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
}


@contextmanager
def style() -> Iterator[None]:
    """The house style, for as long as the context lasts."""
    import matplotlib as mpl

    with mpl.rc_context(_STYLE):
        yield


def axes(ax: Axes | None) -> Axes:
    """The Axes given, or those of a new figure."""
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt

    return plt.subplots()[1]


def legend_beside(ax: Axes) -> None:
    """The legend to the right of the Axes."""
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))


def legend_below(ax: Axes) -> None:
    """The legend under the Axes."""
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18))


def colours(count: int) -> list[Any]:
    """As many colours, from dark to light."""
    import matplotlib as mpl

    return list(mpl.colormaps["viridis"](np.linspace(0.0, 0.85, max(count, 1))))[:count]


def kind(causal: bool) -> str:
    """What a title calls cases with or without the mask."""
    return "masked" if causal else "plain"


def mark_unconverged(ax: Axes, x: Any, y: Any, converged: Any) -> None:
    """A red cross over every point that has not converged; nothing if all have."""
    x, y, good = np.broadcast_arrays(
        np.asarray(x, float), np.asarray(y, float), np.asarray(converged).astype(bool)
    )
    bad = ~good & np.isfinite(y)
    if bad.any():
        known = any(line.get_label() == "not converged" for line in ax.get_lines())
        label = "_not converged" if known else "not converged"
        ax.plot(x[bad], y[bad], "x", color="red", markersize=9, zorder=5, label=label)


def readable_logs(ax: Axes) -> None:
    """Plain numbers on logarithmic axes of few decades, where powers of ten would be too few.

    Call it after everything is drawn: it goes by the limits.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    for axis in (ax.xaxis, ax.yaxis):
        if axis.get_scale() != "log":
            continue
        low, high = axis.get_view_interval()
        decades = abs(float(np.log10(high / low)))
        axis.set_minor_formatter(NullFormatter())
        if decades < 2.5:
            axis.set_major_locator(MaxNLocator(5) if decades < 0.9 else LogLocator(10, (1, 2, 5)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
