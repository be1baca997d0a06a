"""Animations: particles through depth, as GIF, and as MP4 where a writer is installed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from meanfield.figures.canvas import style
from meanfield.figures.flows import rows_where

if TYPE_CHECKING:
    from matplotlib.animation import FuncAnimation

__all__ = ["animate_particles", "save_animations"]

_FPS = 12
_SYMBOLS = {"beta": r"$\beta$", "radius": "R", "dim": "d", "ratio": r"$K/K_\#$"}


def animate_particles(ds: xr.Dataset, **wanted: Any) -> FuncAnimation:
    """Particles in their first two coordinates, one frame for each time.

    Args:
        ds: with `points` (case, time, particle, feature), the second axis with a coordinate or a
            variable `time`; areas of the dots follow `mass`, if there is one.
        wanted: values of parameters, such as ``space="sphere"``; the first case of those, and of
            the largest β and radius R where none is given.
    """
    from matplotlib.animation import FuncAnimation
    from matplotlib.figure import Figure

    rows = rows_where(ds, **wanted) if wanted else ds
    for name in ("beta", "radius"):
        if name in rows.coords and name not in wanted:
            wanted[name] = float(rows[name].max())
            rows = rows_where(rows, **{name: wanted[name]})
    one = rows.isel(case=0)
    points = one.points.values
    clock = one.points.dims[0]
    times = one[clock if clock != "step" else "time"].values
    figure = Figure(figsize=(4.2, 4.4), layout="constrained")
    ax = figure.subplots()
    on_a_line = points.shape[-1] == 1
    if on_a_line:
        points = np.concatenate([points, np.zeros_like(points)], -1)
    size = 1.08 * np.abs(points[..., :2]).max()
    ax.set(xlim=(-size, size), ylim=(-size, size), aspect="equal", xlabel="$x_1$", ylabel="$x_2$")
    if on_a_line:
        ax.set(yticks=[], ylabel="", xlabel="$x$")
    depth = points[..., 2] if points.shape[-1] > 2 else np.zeros(points.shape[:2])
    # The far side of a sphere is drawn lighter; colours tell the particles apart.
    colour = np.arange(points.shape[1])
    area = 22 * (1 + 20 * one.mass.values) if "mass" in one else 22
    start = points[0]
    dots = ax.scatter(start[:, 0], start[:, 1], c=colour, cmap="viridis", s=area)
    what = ", ".join(f"{_SYMBOLS.get(name, name)} = {_short(x)}" for name, x in wanted.items())

    def frame(k: int) -> list[Any]:
        dots.set_offsets(points[k, :, :2])
        dots.set_alpha(np.where(depth[k] < -1e-9, 0.35, 1.0).tolist())
        ax.set_title(f"{what}\nt = {times[k]:.3g}")
        return [dots]

    return FuncAnimation(figure, frame, frames=len(points), interval=1000 / _FPS)


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


_ANIMATIONS = {"animate_particles": animate_particles}


def save_animations(
    ds: xr.Dataset,
    names: Mapping[str, tuple[str, Mapping[str, Any]]],
    folder: str | os.PathLike[str],
    *,
    stem: str = "",
) -> Iterator[Path | str]:
    """Animate a Dataset into ``folder/stem-name.gif``, and ``.mp4`` if ffmpeg is there.

    Args:
        ds: the Dataset.
        names: name of a file -> name of a function of this module and its arguments.
        folder: where to; it exists.
        stem: what the files' names begin with.

    Yields:
        The paths, and a sentence in place of an animation for which the Dataset has no cases.
    """
    from matplotlib.animation import FFMpegWriter, PillowWriter

    for name, (function, arguments) in names.items():
        target = Path(folder) / (f"{stem}-{name}" if stem else name)
        with style():
            try:
                made = _ANIMATIONS[function](ds, **arguments)
            except ValueError as error:  # cases that the settings leave out
                yield f"no animation {name}: {error}"
                continue
            made.save(target.with_suffix(".gif"), writer=PillowWriter(fps=_FPS), dpi=80)
            yield target.with_suffix(".gif")
            if FFMpegWriter.isAvailable():
                made.save(target.with_suffix(".mp4"), writer=FFMpegWriter(fps=_FPS), dpi=120)
                yield target.with_suffix(".mp4")
