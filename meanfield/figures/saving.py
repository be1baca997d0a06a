"""The figures and animations of an experiment in files: PNG, PDF or SVG, GIF and MP4."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import xarray as xr

from meanfield.checks import choice
from meanfield.errors import NoCases
from meanfield.figures.canvas import style
from meanfield.figures.legends import with_room
from meanfield.figures.particles import FPS
from meanfield.results.atomic import write_whole
from meanfield.results.marks import check_replaceable

# What each kind of file says of who made it; an SVG without its date is the same each time.
_SIGNED: dict[str, dict[str, Any]] = {
    "png": {"Software": "meanfield"},
    "pdf": {"Creator": "meanfield"},
    "svg": {"Creator": "meanfield", "Date": None},
}
_MARGIN = 0.1  # inches around a figure
_GIF_MARK = b"!\xfe\x09meanfield\0;"  # a comment and the end of the file


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
            yield from _save(figure, _target(folder, stem, name), formats)


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
            yield _save_animation(made, PillowWriter(fps=FPS), 80, target, ".gif")
            if FFMpegWriter.isAvailable():
                signed = FFMpegWriter(fps=FPS, metadata={"comment": "meanfield"})
                yield _save_animation(made, signed, 120, target, ".mp4")


def _save_animation(made: Any, writer: Any, dpi: int, target: Path, suffix: str) -> Path:
    path = check_replaceable(target.with_name(target.name + suffix))
    with tempfile.TemporaryDirectory() as folder:
        drawn = Path(folder) / path.name  # writers know the format by the suffix
        made.save(drawn, writer=writer, dpi=dpi)
        data = drawn.read_bytes()
    write_whole(path, data[:-1] + _GIF_MARK if suffix == ".gif" else data)
    return target.with_name(target.name + suffix)


def _target(folder: str | os.PathLike[str], stem: str, name: str) -> Path:
    return Path(folder) / (f"{stem}-{name}" if stem else name)
