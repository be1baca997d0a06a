"""Particles through depth: their paths, and as an animation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from meanfield.figures.canvas import drawable, figure, short
from meanfield.figures.selection import select

if TYPE_CHECKING:
    from matplotlib.animation import FuncAnimation
    from matplotlib.axes import Axes

FPS = 12
_SYMBOLS = {"beta": r"$\beta$", "radius": "R", "dim": "d", "ratio": r"$K/K_\#$"}


@figure("points")
def plot_particle_paths(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Paths of the particles in their first two coordinates, where they start and where they end.

    On the line they are drawn against time.

    Args:
        ds: with ``points`` (time, particle, feature), as `dynamics.flow` returns it; of several
            cases the first is drawn.
        ax: where to draw; a new figure if None.
    """
    one = ds.isel(case=0) if "case" in ds.points.dims else ds
    points = one.points.values
    if points.shape[-1] == 1:
        ax.plot(_times(one), points[..., 0], color="tab:blue", linewidth=0.7, marker="")
        ax.set(xlabel="time t", ylabel="$x$")
    else:
        draw_paths(ax, points)
        ax.set(xlabel="$x_1$", ylabel="$x_2$")
    ax.set_title(f"Paths of the particles{projection(points)}")
    return ax


def projection(points: np.ndarray) -> str:
    """What a title says of points (time, particle, feature) of which two coordinates are shown.

    Coordinates at the end that are 0 throughout hide nothing: a plane may be kept in space.
    """
    dim = max(np.flatnonzero(points.any((0, 1))), default=0) + 1
    return "" if dim < 3 else ", seen along $x_3$" if dim == 3 else f", two of {dim} coordinates"


def _times(one: xr.Dataset) -> np.ndarray:
    """The time of each frame of the points; others of the Dataset may have times of their own."""
    frame = one.points.dims[0]
    of_frames = "time" in one.variables and one["time"].dims == (frame,)
    return one["time" if of_frames else frame].values


def draw_paths(ax: Axes, points: np.ndarray) -> None:
    """Draw paths (time, particle, feature) in their first two coordinates."""
    for path in np.moveaxis(points, 1, 0):
        ax.plot(path[:, 0], path[:, 1], color="0.7", linewidth=0.7)
    ax.plot(*points[0, :, :2].T, ".", color="tab:blue", markersize=4, label="start")
    ax.plot(*points[-1, :, :2].T, "o", color="tab:red", markersize=5, label="end")
    ax.set_aspect("equal")


def animate_particles(ds: xr.Dataset, **wanted: Any) -> FuncAnimation:
    """Particles in their first two coordinates, one frame for each time.

    ``animate_particles(flow).save("flow.gif")`` writes it; ``.mp4`` needs the program ffmpeg.

    Args:
        ds: with `points` (time, particle, feature), or that for each case, the axis of times with
            a coordinate or a variable `time`; areas of the dots follow `mass`, if there is one.
        **wanted: values of parameters, such as ``space="sphere"``; the first case of those, and
            of the largest β and radius R where none is given.

    Raises:
        NoCases: there is no such case.
    """
    from matplotlib.animation import FuncAnimation
    from matplotlib.figure import Figure

    one, wanted = _case(drawable("animate_particles", ds, ["points"]), wanted)
    points, times = one.points.values, _times(one)
    on_a_line = points.shape[-1] == 1
    if on_a_line:
        points = np.concatenate([points, np.zeros_like(points)], -1)
    figure = Figure(figsize=(4.2, 4.4), layout="constrained")
    ax = figure.subplots()
    _frame_of(ax, points, on_a_line)
    depth = points[..., 2] if points.shape[-1] > 2 else np.zeros(points.shape[:2])
    area = 22 * (1 + 20 * one.mass.values) if "mass" in one else 22
    # Colours tell the particles apart.
    start = points[0]
    colour = np.arange(len(start))
    dots = ax.scatter(start[:, 0], start[:, 1], c=colour, cmap="viridis", s=area)
    words = [
        x if isinstance(x, str) else f"{_SYMBOLS.get(name, name)} = {short(x)}"
        for name, x in wanted.items()
    ]
    what = ", ".join(words) + projection(points)

    def frame(k: int) -> list[Any]:
        dots.set_offsets(points[k, :, :2])
        # The far side of a sphere is drawn lighter.
        dots.set_alpha(np.where(depth[k] < -1e-9, 0.35, 1.0).tolist())
        ax.set_title(f"{what.removeprefix(', ')}\nt = {times[k]:.3g}")
        return [dots]

    return FuncAnimation(figure, frame, frames=len(points), interval=1000 / FPS)


def _case(ds: xr.Dataset, wanted: dict[str, Any]) -> tuple[xr.Dataset, dict[str, Any]]:
    if "case" not in ds.points.dims:
        if wanted:
            raise ValueError(
                f"animate_particles: expected a Dataset with cases, from which {sorted(wanted)} "
                "choose one, got particles through time alone"
            )
        return ds, wanted
    rows = select(ds, **wanted)
    for name in ("beta", "radius"):
        if name in rows.coords and name not in wanted:
            wanted = {**wanted, name: float(rows[name].max())}
            rows = select(rows, **{name: wanted[name]})
    return rows.isel(case=0), wanted


def _frame_of(ax: Axes, points: np.ndarray, on_a_line: bool) -> None:
    size = 1.08 * np.abs(points[..., :2]).max()
    ax.set(xlim=(-size, size), ylim=(-size, size), aspect="equal", xlabel="$x_1$", ylabel="$x_2$")
    if on_a_line:
        ax.set(yticks=[], ylabel="", xlabel="$x$")
