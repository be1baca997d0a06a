"""Particles through depth: their paths."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from meanfield.figures.canvas import figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
        times = one["time" if "time" in one.variables else one.points.dims[0]]
        ax.plot(times, points[..., 0], color="tab:blue", linewidth=0.7, marker="")
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


def draw_paths(ax: Axes, points: np.ndarray) -> None:
    """Draw paths (time, particle, feature) in their first two coordinates."""
    for path in np.moveaxis(points, 1, 0):
        ax.plot(path[:, 0], path[:, 1], color="0.7", linewidth=0.7)
    ax.plot(*points[0, :, :2].T, ".", color="tab:blue", markersize=4, label="start")
    ax.plot(*points[-1, :, :2].T, "o", color="tab:red", markersize=5, label="end")
    ax.set_aspect("equal")
