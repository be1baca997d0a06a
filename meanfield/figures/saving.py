"""The figures of an experiment in files, PNG and PDF."""

from __future__ import annotations

import io
import multiprocessing
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import xarray as xr

from meanfield.figures import constants, contractions, depth, flows, growth, transformers
from meanfield.figures.canvas import style, with_room
from meanfield.results.atomic import check_replaceable, write_whole

__all__ = ["save_all"]

_MODULES = (constants, contractions, depth, flows, growth, transformers)
_MARGIN = 0.1  # inches around a figure
_FEW = 4  # a second process takes as long to start as two figures to draw

Names = Mapping[str, tuple[str, Mapping[str, Any]]]


def save_all(
    ds: xr.Dataset, names: Names, folder: str | os.PathLike[str], *, stem: str = ""
) -> Iterator[Path | str]:
    """Draw figures of a Dataset into ``folder/stem-name.png`` and ``.pdf``.

    Subsetting the fonts of a PDF takes longer than all the rest: beyond a few figures a second
    process draws half of them.

    Args:
        ds: the Dataset.
        names: name of a file -> name of a function of `meanfield.figures` and its arguments.
        folder: where to; it exists.
        stem: what the files' names begin with.

    Yields:
        The paths, and a sentence in place of a figure for which the Dataset has no cases.
    """
    items = list(names.items())
    target = str(Path(folder) / f"{stem}-") if stem else str(Path(folder)) + os.sep
    if len(items) <= _FEW or (os.cpu_count() or 1) < 2:
        yield from _save(ds, items, target)
        return
    half = (len(items) + 2) // 2  # the other one has to import first
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        rest = pool.submit(_save, ds, items[half:], target)
        yield from _save(ds, items[:half], target)
        yield from rest.result()


def _save(
    ds: xr.Dataset, items: list[tuple[str, tuple[str, Mapping[str, Any]]]], target: str
) -> list[Path | str]:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    made: list[Path | str] = []
    for name, (function, arguments) in items:
        (draw,) = (getattr(m, function) for m in _MODULES if function in m.__all__)
        with style(), mpl.rc_context({"savefig.bbox": None}):
            figure = Figure()
            try:
                draw(ds, ax=figure.subplots(), **arguments)
            except ValueError as error:  # cases that the settings leave out
                made.append(f"no figure {name}: {error}")
                continue
            with_room(figure)
            # One layout for both files; "tight" would lay the figure out again for each.
            figure.draw_without_rendering()
            box = figure.get_tightbbox().padded(_MARGIN)
            for suffix in (".png", ".pdf"):
                path = Path(f"{target}{name}{suffix}")
                drawn, key = io.BytesIO(), "Software" if suffix == ".png" else "Creator"
                figure.savefig(
                    drawn, format=suffix[1:], bbox_inches=box, metadata={key: "meanfield"}
                )
                write_whole(check_replaceable(path), drawn.getbuffer())
                made.append(path)
    return made
