"""The figures of a report, as pictures inside the page, with words for whoever cannot see them."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import xarray as xr

from meanfield import figures as library
from meanfield.figures.canvas import with_room

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Drawing", "Picture", "picture"]

_LARGEST_SVG = 400_000  # bytes; beyond it a figure of very many points is kept as pixels

Drawing = tuple[str, Mapping[str, Any]] | Callable[..., Any]


class Picture(NamedTuple):
    """A figure as a data URL, in words, and its caption; `missing` says why it is not there."""

    source: str
    words: str
    caption: str
    missing: str = ""


def picture(ds: xr.Dataset, figure: Drawing) -> Picture:
    """Draw a figure of the Dataset; one for which it has no cases is missing, with the reason."""
    draw, settings = (figure, {}) if callable(figure) else (_named(figure[0]), figure[1])
    caption = (draw.__doc__ or "").strip().partition("\n")[0].strip()
    if settings:
        caption += " (" + ", ".join(f"{name} = {v}" for name, v in settings.items()) + ")"
    try:
        return Picture(*_drawn(ds, draw, settings), caption)
    except (ValueError, LookupError, AttributeError) as error:  # no such cases or variables
        return Picture("", "", caption, missing=str(error) or type(error).__name__)


def _named(name: str) -> Callable[..., Any]:
    known = sorted(n for n in library.__all__ if n.startswith("plot_"))
    if name not in known:
        raise ValueError(f"figures: expected one of {known} or a function, got {name!r}")
    return getattr(library, name)


def _drawn(
    ds: xr.Dataset, draw: Callable[..., Any], settings: Mapping[str, Any]
) -> tuple[str, str]:
    """The figure as a data URL, and in words."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # A constant salt and no date: the same Dataset gives the same bytes.
    with library.style(), mpl.rc_context({"svg.hashsalt": "meanfield", "svg.fonttype": "path"}):
        canvas = Figure()
        ax = canvas.subplots()
        draw(ds, ax=ax, **settings)
        with_room(canvas)
        data, kind = io.BytesIO(), "svg+xml"
        canvas.savefig(data, format="svg", metadata={"Date": None})
        if data.tell() > _LARGEST_SVG:
            data, kind = io.BytesIO(), "png"
            canvas.savefig(data, format="png")
    encoded = base64.b64encode(data.getvalue()).decode("ascii")
    return f"data:image/{kind};base64,{encoded}", _in_words(ax)


def _in_words(ax: Axes) -> str:
    curves = "; ".join(str(label) for label in ax.get_legend_handles_labels()[1])
    axes = f"Horizontal axis: {ax.get_xlabel()}. Vertical axis: {ax.get_ylabel()}."
    words = f"{ax.get_title()}. {axes}" + (f" Curves: {curves}." if curves else "")
    return words.replace("$", "")
