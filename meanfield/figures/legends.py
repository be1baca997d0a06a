"""Where the legend of a figure stands, and the room that it takes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def place_legend(ax: Axes, legend: bool | str | Mapping[str, Any]) -> None:
    """The legend where it is wanted, see the option of `canvas.figure`."""
    if legend is False:
        return
    if legend is True or legend == "below":
        _below(ax)
    elif legend == "beside":
        ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    else:
        settings: Any = legend if isinstance(legend, Mapping) else {"loc": legend}
        ax.legend(**settings)


def _below(ax: Axes) -> None:
    """The legend under the Axes and its label, in as many columns as their width holds."""
    import matplotlib as mpl
    from matplotlib.font_manager import FontProperties
    from matplotlib.transforms import ScaledTranslation

    handles, labels = ax.get_legend_handles_labels()
    if not handles:
        return
    figure: Any = ax.figure
    size = FontProperties(size=mpl.rcParams["legend.fontsize"]).get_size_in_points()
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
    ax.legend(ncols=columns, bbox_transform=ax.transAxes + shift, **where)


def with_room(figure: Any) -> None:
    """Grow the figure by the height of its legend."""
    legends = [legend for ax in figure.axes if (legend := ax.get_legend()) is not None]
    inches = max((one.get_window_extent().height / figure.dpi for one in legends), default=0.0)
    figure.set_figheight(figure.get_figheight() + inches)
