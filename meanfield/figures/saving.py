"""Figures in files: PNG, PDF or SVG."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import xarray as xr

from meanfield.checks import as_path, choice
from meanfield.errors import NoCases
from meanfield.figures.canvas import style
from meanfield.figures.legends import with_room
from meanfield.habits import with_hints
from meanfield.results.atomic import check_replaceable, make_folder, write_whole

# What each kind of file says of who made it; an SVG without its date is the same each time.
_SIGNED: dict[str, dict[str, Any]] = {
    "png": {"Software": "meanfield"},
    "pdf": {"Creator": "meanfield"},
    "svg": {"Creator": "meanfield", "Date": None},
}
_MARGIN = 0.1  # inches around a figure


@with_hints
def save_all(
    ds: xr.Dataset,
    figures: Mapping[str, Callable[..., Any]],
    folder: str | os.PathLike[str],
    *,
    stem: str = "",
    formats: Sequence[str] = ("png",),
) -> list[Path | str]:
    """Draw figures of a Dataset into ``folder/stem-name.png``.

    Args:
        ds: the Dataset.
        figures: by the name of their file, functions of a Dataset and ``ax=``.
        folder: where to; it is made if it is not there.
        stem: what the files' names begin with.
        formats: the files of each, of "png", "pdf" and "svg".

    Returns:
        The paths, and a sentence in place of a figure for which the Dataset has no cases.
    """
    formats = [formats] if isinstance(formats, str) else formats
    formats = [choice(one, "formats", _SIGNED) for one in dict.fromkeys(formats)]
    folder = as_path(folder, "folder")
    if not isinstance(figures, Mapping) or not all(map(callable, figures.values())):
        raise TypeError(
            "figures: expected functions by the names of their files, such as "
            f"{{'growth': plot_growth}}, got {figures!r:.80}"
        )
    made: list[Path | str] = []
    for name, draw in figures.items():
        try:
            drawn = render(ds, draw, formats)
        except NoCases as error:
            made.append(f"no figure {name}: {error}")
            for suffix in formats:  # it would be of an earlier run
                old = folder / f"{stem}{'-' * bool(stem)}{name}.{suffix}"
                with contextlib.suppress(FileExistsError):  # somebody's own file stays
                    check_replaceable(old).unlink(missing_ok=True)
            continue
        for suffix, data in drawn.items():
            path = folder / f"{stem}{'-' * bool(stem)}{name}.{suffix}"
            make_folder(path.parent)
            write_whole(check_replaceable(path), data)
            made.append(path)
    return made


def render(ds: xr.Dataset, draw: Callable[..., Any], formats: Sequence[str]) -> dict[str, bytes]:
    """A figure as files of these formats, keys of `_SIGNED`; the same bytes each time."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    files = {}
    with style(), mpl.rc_context({"savefig.bbox": None}):
        figure = Figure()
        draw(ds, ax=figure.subplots())
        with_room(figure)
        # One layout for all: "tight", or an engine left on, lays the figure out for each file.
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        box: Any = figure.get_tightbbox().padded(_MARGIN)
        for suffix in formats:
            drawn = io.BytesIO()
            figure.savefig(drawn, format=suffix, bbox_inches=box, metadata=_SIGNED[suffix])
            files[suffix] = drawn.getvalue()
    return files
