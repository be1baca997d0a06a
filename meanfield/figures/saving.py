"""Figures in files: PNG, PDF or SVG."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import xarray as xr

from meanfield.checks import choice
from meanfield.errors import NoCases
from meanfield.figures.canvas import style
from meanfield.figures.legends import with_room
from meanfield.results.atomic import write_whole
from meanfield.results.marks import check_replaceable

# What each kind of file says of who made it; an SVG without its date is the same each time.
_SIGNED: dict[str, dict[str, Any]] = {
    "png": {"Software": "meanfield"},
    "pdf": {"Creator": "meanfield"},
    "svg": {"Creator": "meanfield", "Date": None},
}
_MARGIN = 0.1  # inches around a figure


def save_all(
    ds: xr.Dataset,
    figures: Mapping[str, Callable[..., Any]],
    folder: str | os.PathLike[str],
    *,
    stem: str = "",
    formats: Sequence[str] = ("png",),
) -> Iterator[Path | str]:
    """Draw figures of a Dataset into ``folder/stem-name.png``.

    Args:
        ds: the Dataset.
        figures: by the name of their file, functions of a Dataset and ``ax=``.
        folder: where to; it exists.
        stem: what the files' names begin with.
        formats: the files of each, of "png", "pdf" and "svg".

    Yields:
        The paths, and a sentence in place of a figure for which the Dataset has no cases.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    for name, draw in figures.items():
        with style(), mpl.rc_context({"savefig.bbox": None}):
            figure = Figure()
            try:
                draw(ds, ax=figure.subplots())
            except NoCases as error:
                yield f"no figure {name}: {error}"
                continue
            with_room(figure)
            target = Path(folder) / (f"{stem}-{name}" if stem else name)
            yield from _save(figure, target, formats)


def _save(figure: Any, target: Path, formats: Sequence[str]) -> list[Path]:
    # One layout for all: "tight", or an engine that is left on, lays the figure out for each file.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    box, made = figure.get_tightbbox().padded(_MARGIN), []
    for suffix in dict.fromkeys(choice(one, "formats", _SIGNED) for one in formats):
        path, drawn = target.with_name(f"{target.name}.{suffix}"), io.BytesIO()
        figure.savefig(drawn, format=suffix, bbox_inches=box, metadata=_SIGNED[suffix])
        write_whole(check_replaceable(path), drawn.getbuffer())
        made.append(path)
    return made
