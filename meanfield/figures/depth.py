"""Figures of a transformer followed through its blocks."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from meanfield.checks import choice
from meanfield.figures.canvas import figure, mark_unconverged, readable_logs

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes

__all__ = ["plot_constants_through_depth", "plot_displacement_through_depth", "plot_families"]


@figure
def plot_constants_through_depth(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Constants of the blocks, of the network up to each, and the products; medians of windows.

    Beside them what the network's constant is at most while every token moves by ε, relative to
    its size. Such bounds leave the picture, which ends with the products, where radii have grown.

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
    _balls(ax, ds)
    ax.set(yscale="log", xlabel="block", ylabel=r"local $W_2$ constant")
    ax.set_xticks(ds.layer.values)
    readable_logs(ax)
    ax.set_title(f"Sensitivity through depth\n{_source(ds)}")
    return ax


def _balls(ax: Axes, ds: xr.Dataset) -> None:
    if "ball_999" not in ds:
        return
    _, top = ax.get_ylim()
    shades = np.linspace(0.75, 0.25, ds.sizes["epsilon"])
    for shade, epsilon in zip(shades, ds.epsilon.values, strict=True):
        middle = ds.ball_999.sel(epsilon=epsilon).median("case")
        seen = np.isfinite(middle) & (middle <= top)
        if seen.any():
            label = f"up to the block, tokens within {epsilon:g}"
            ax.plot(ds.layer[seen], middle[seen], ":", marker=".", color=str(shade), label=label)


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


_QUANTITIES = {
    "constant": "local $W_2$ constant of the block",
    "through": "local $W_2$ constant up to the block",
    "product": "product of the blocks' constants",
    "effective_rank": "effective rank of the tokens",
    "radius": "root mean square of the token norms",
}


@figure
def plot_families(ds: xr.Dataset, *, ax: Axes, quantity: str = "constant") -> Axes:
    """A quantity of every model over relative depth; medians, and the range over windows.

    Args:
        ds: a Dataset of the experiment ``families``.
        ax: where to draw; a new figure if None.
        quantity: "constant", "through", "product", "effective_rank" or "radius".
    """
    quantity = choice(quantity, "quantity", _QUANTITIES)
    for model, marker in zip(np.unique(ds.model), itertools.cycle("os^Dv*"), strict=False):
        rows = ds[quantity].where(ds.model == model, drop=True)
        n_layers = int(ds.n_layers.where(ds.model == model).max())
        rows = rows.isel(layer=slice(n_layers))
        depth = (np.arange(n_layers) + 1) / n_layers
        (line,) = ax.plot(depth, rows.median("case"), f"{marker}-", label=str(model), markersize=4)
        low, high = rows.min("case"), rows.max("case")
        ax.fill_between(depth, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    ax.set(yscale="log", xlabel="block / number of blocks", ylabel=_QUANTITIES[quantity])
    text = {"random": "random token ids"}.get(ds.attrs["text"], ds.attrs["text"])
    ax.set_title(f"Families through depth: {text}, n = {ds.attrs['n_tokens']}")
    readable_logs(ax)
    return ax


def _source(ds: xr.Dataset) -> str:
    return f"{ds.attrs['model']}, {ds.attrs['text']}, {ds.attrs['n_tokens']} tokens"
