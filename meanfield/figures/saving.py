"""The figures and animations of an experiment in files: PNG and PDF, GIF and MP4."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import xarray as xr

from meanfield.errors import NoCases
from meanfield.figures.canvas import style
from meanfield.figures.legends import with_room
from meanfield.figures.particles import FPS
from meanfield.results.atomic import check_replaceable, write_whole

__all__ = ["save_all", "save_animations"]

_MARGIN = 0.1  # inches around a figure


def save_all(
    ds: xr.Dataset,
    figures: Mapping[str, Callable[..., Any]],
    folder: str | os.PathLike[str],
    *,
    stem: str = "",
) -> Iterator[Path | str]:
    """Draw figures of a Dataset into ``folder/stem-name.png`` and ``.pdf``.

    Args:
        ds: the Dataset.
        figures: by the name of their file, functions of a Dataset and ``ax=``.
        folder: where to; it exists.
        stem: what the files' names begin with.

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
            yield from _save(figure, _target(folder, stem, name))


def _save(figure: Any, target: Path) -> list[Path]:
    # One layout for both files; "tight" would lay the figure out again for each.
    figure.draw_without_rendering()
    box, made = figure.get_tightbbox().padded(_MARGIN), []
    for suffix, key in ((".png", "Software"), (".pdf", "Creator")):
        path, drawn = target.with_name(target.name + suffix), io.BytesIO()
        figure.savefig(drawn, format=suffix[1:], bbox_inches=box, metadata={key: "meanfield"})
        write_whole(check_replaceable(path), drawn.getbuffer())
        made.append(path)
    return made


def save_animations(
    ds: xr.Dataset,
    animations: Mapping[str, Callable[..., Any]],
    folder: str | os.PathLike[str],
    *,
    stem: str = "",
) -> Iterator[Path | str]:
    """Animate a Dataset into ``folder/stem-name.gif``, and ``.mp4`` if ffmpeg is there.

    Args:
        ds: the Dataset.
        animations: by the name of their file, functions of a Dataset.
        folder: where to; it exists.
        stem: what the files' names begin with.

    Yields:
        The paths, and a sentence in place of an animation for which the Dataset has no cases.
    """
    from matplotlib.animation import FFMpegWriter, PillowWriter

    for name, animate in animations.items():
        target = _target(folder, stem, name)
        with style():
            try:
                made = animate(ds)
            except NoCases as error:
                yield f"no animation {name}: {error}"
                continue
            made.save(target.with_suffix(".gif"), writer=PillowWriter(fps=FPS), dpi=80)
            yield target.with_suffix(".gif")
            if FFMpegWriter.isAvailable():
                made.save(target.with_suffix(".mp4"), writer=FFMpegWriter(fps=FPS), dpi=120)
                yield target.with_suffix(".mp4")


def _target(folder: str | os.PathLike[str], stem: str, name: str) -> Path:
    return Path(folder) / (f"{stem}-{name}" if stem else name)
