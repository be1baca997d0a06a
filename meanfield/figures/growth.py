"""Figures of constants that grow with the radius, kernel by kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from meanfield.figures.canvas import colours, figure, mark_unconverged

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes

__all__ = ["plot_kernel_growth"]


@figure
def plot_kernel_growth(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """The largest constant found in the ball of radius R for each kernel, and its upper bound.

    Args:
        ds: a Dataset of the experiment ``kernel-growth``, with ``constant`` and ``bound``.
        ax: where to draw; a new figure if None.
    """
    names = list(dict.fromkeys(ds.kernel.values.tolist()))
    for name, colour, marker in zip(names, colours(len(names)), "osD^v", strict=False):
        part = ds.isel(case=np.flatnonzero(ds.kernel.values == name))
        best = part.groupby("radius").map(
            lambda one: one.isel(case=int(np.nanargmax(one.constant.values)))
        )
        ax.plot(best.radius, best.constant, marker + "-", color=colour, label=f"{name}, found")
        mark_unconverged(ax, best.radius, best.constant, best.constant_converged)
        if np.isfinite(best.bound).all():
            ax.plot(best.radius, best.bound, "--", color=colour, label=f"{name}, upper bound")
    ax.plot(best.radius, 2 * best.radius**2, ":", color="black", label=r"$2R^2$")
    ax.set(yscale="log", xlabel="radius R", ylabel=r"local $W_2$ constant, $Q=K=V=I$, $d=2$")
    ax.set_title("Dot products explode, L2 attention grows as the square")
    return ax
