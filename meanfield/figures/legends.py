"""Where the legend of a figure stands, and the room that it takes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from meanfield.checks import choice

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NOT_CONVERGED = "not converged"  # the name of crosses over points of any curve


def place_legend(ax: Axes, legend: bool | str) -> None:
    """The legend where it is wanted, see the option of `canvas.figure`."""
    if isinstance(legend, str):
        choice(legend, "legend", ["ends"])
        _at_ends(ax)
    elif legend:
        _below(ax, ax.get_legend_handles_labels()[0])


def _at_ends(ax: Axes) -> None:
    """Each curve's name behind its last point, in its colour; what is no curve under the Axes."""
    from matplotlib.lines import Line2D

    handles: list[Any] = ax.get_legend_handles_labels()[0]
    lines: list[Any] = [one for one in handles if isinstance(one, Line2D)]
    curves = [one for one in lines if len(one.get_xdata()) and one.get_label() != NOT_CONVERGED]
    inside = ax.transData + ax.transAxes.inverted()
    ax.autoscale_view()
    named = []
    for line in curves:
        points = np.column_stack([np.asarray(one, float) for one in line.get_data()])
        points = points[np.isfinite(points).all(-1)]
        x, y = inside.transform(points[points[:, 0].argmax()])
        named.append(_annotated(ax, line, x, y))
    _below(ax, [one for one in handles if one not in curves])
    figure: Any = ax.figure
    figure.canvas.figure.draw_without_rendering()  # how high are the Axes beside names and legend?
    named.sort(key=lambda text: text.xyann[1])
    height = 1.35 * _points("axes.labelsize") / 72 * figure.dpi / ax.get_window_extent().height
    below_title = 1 - height * (np.arange(len(named))[::-1] + 0.5)
    places = np.minimum(_apart([text.xyann[1] for text in named], height), below_title)
    for text, y in zip(named, places, strict=True):
        text.xyann = (text.xyann[0], y)


def _annotated(ax: Axes, line: Any, x: float, y: float) -> Any:
    """The name of a curve that ends at this fraction of the Axes, joined to its end by a line."""
    color = line.get_color()
    joined: Any = {"arrowstyle": "-", "color": color, "lw": 0.7, "alpha": 0.7}
    joined |= {"relpos": (0, 0.5), "shrinkA": 1, "shrinkB": 3}
    where: Any = {"xycoords": "axes fraction", "textcoords": "axes fraction"}
    where |= {"va": "center", "color": color, "arrowprops": joined}
    return ax.annotate(str(line.get_label()), (x, y), xytext=(x + 0.045, y), **where)


def _apart(places: list[float], gap: float) -> np.ndarray:
    """Ascending places moved as little as it takes (in least squares) to be a gap apart."""
    steps = gap * np.arange(len(places))
    free = np.asarray(places, float) - steps
    mean = lambda i, j: free[i : j + 1].mean()  # noqa: E731
    every = range(len(places))
    return steps + [max(min(mean(i, j) for j in every[k:]) for i in every[: k + 1]) for k in every]


def _points(size: str) -> float:
    import matplotlib as mpl
    from matplotlib.font_manager import FontProperties

    return float(FontProperties(size=mpl.rcParams[cast(Any, size)]).get_size_in_points())


def _below(ax: Axes, handles: list[Any]) -> None:
    """The legend under the Axes and its label, in as many columns as their width holds."""
    from matplotlib.transforms import ScaledTranslation

    if not handles:
        return
    labels = [str(handle.get_label()) for handle in handles]
    figure: Any = ax.figure
    size = _points("legend.fontsize")
    # A character is half as wide as high; the handle and the gaps take five heights.
    widest = size * (
        5 + 0.5 * max(len(re.sub(r"[${}\\_^]|mathrm|left|right", "", t)) for t in labels)
    )
    width = ax.get_window_extent().width / figure.dpi * 72
    columns = max(1, min(4, int(1.45 * width / widest), len(labels)))
    box = ax.xaxis.get_tightbbox()  # of the axis with its label
    below = 0.0 if box is None else ax.get_window_extent().y0 - box.y0
    shift = ScaledTranslation(0, -below / figure.dpi - 0.04, figure.dpi_scale_trans)
    where: Any = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.0)}
    ax.legend(handles=handles, ncols=columns, bbox_transform=ax.transAxes + shift, **where)


def with_room(figure: Any) -> None:
    """Grow the figure by the height of its legend."""
    legends = [legend for ax in figure.axes if (legend := ax.get_legend()) is not None]
    inches = max((one.get_window_extent().height / figure.dpi for one in legends), default=0.0)
    figure.set_figheight(figure.get_figheight() + inches)
