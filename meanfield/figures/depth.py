"""Figures of a transformer followed through its blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from meanfield.figures.canvas import figure, mark_unconverged, readable_logs

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes

__all__ = ["plot_constants_through_depth", "plot_displacement_through_depth"]


@figure
def plot_constants_through_depth(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Constants of the blocks, of the network up to each, and the products; medians of windows.

    Args:
        ds: a Dataset of the experiment ``through-depth``.
        ax: where to draw; a new figure if None.
    """
    lines = (
        ("constant", "o-", "tab:blue", "block"),
        ("through", "s-", "tab:green", "network up to the block"),
        ("product", "^-", "tab:orange", "product of the blocks"),
        ("product_upper", "--", "tab:red", "product of upper bounds"),
    )
    for name, style, colour, label in lines:
        middle = ds[name].median("case")
        if not np.isfinite(middle).any():
            continue
        ax.plot(ds.layer, middle, style, color=colour, label=label)
        if f"{name}_converged" in ds:
            mark_unconverged(ax, ds.layer, middle, ds[f"{name}_converged"].all("case"))
    ax.set(yscale="log", xlabel="block", ylabel=r"local $W_2$ constant")
    ax.set_xticks(ds.layer.values)
    readable_logs(ax)
    ax.set_title(f"Sensitivity through depth\n{_source(ds)}")
    return ax


@figure
def plot_displacement_through_depth(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """How far the cloud moves in W2, and its tokens one by one, in units of the radius.

    Args:
        ds: a Dataset of the experiment ``through-depth``.
        ax: where to draw; a new figure if None.
    """
    for name, style, label in (
        ("displacement", "o-", "each token to its image"),
        ("moved", "s-", r"$W_2$"),
    ):
        # The two agree where no relabelling of the tokens saves anything.
        size: Any = {"fillstyle": "none", "markersize": 8} if name == "moved" else {}
        ax.plot(ds.layer, (ds[name] / ds.radius).median("case"), style, label=label, **size)
    ax.set(xlabel="block", ylabel="distance / radius after the block", ylim=(0, None))
    ax.set_xticks(ds.layer.values)
    ax.set_title(f"What a block does to the tokens\n{_source(ds)}")
    return ax


def _source(ds: xr.Dataset) -> str:
    return f"{ds.attrs['model']}, {ds.attrs['text']}, {ds.attrs['n_tokens']} tokens"
