"""What figures draw: columns of a Dataset with their evidence, and formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from meanfield.figures.canvas import FORMULA
from meanfield.figures.legends import NOT_CONVERGED
from meanfield.results.cases import is_true

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FINE = 200  # points of a formula


def column(rows: xr.Dataset, name: str) -> xr.DataArray:
    """A column, or a quotient of two as ``"a/b"``."""
    over, *under = (rows[one] for one in name.split("/"))
    return over / under[0] if under else over


def curve(
    ax: Axes,
    rows: xr.Dataset,
    x: str,
    y: str,
    fmt: str = "o-",
    *,
    flag: str | None = None,
    along: str = "",
    **style: Any,
) -> None:
    """A column against another, with a red cross where it has not converged.

    Args:
        ax: where to draw.
        rows: the cases, in any order.
        x: name of a variable, with one dimension.
        y: what is drawn, see `column`; if it has more dimensions, there are points above each x.
        fmt: as in `Axes.plot`.
        flag: name of the truth values that say so; ``{y}_converged`` if None and there is one.
        along: a dimension of which medians are drawn, and the range as a band.
        **style: properties of the line.
    """
    rows = rows.sortby(x)
    values, flag = column(rows, y), flag or f"{y}_converged"
    good = rows[flag] if flag in rows else xr.ones_like(values, bool)
    ends = values, values
    if along:
        ends = values.min(along), values.max(along)
        values, good = values.median(along), good.all(along)
    places, flat, converged = (one.values.ravel() for one in xr.broadcast(rows[x], values, good))
    line, *_ = ax.plot(places, flat, fmt, **style)
    if along and values.ndim == 1:
        ax.fill_between(places, *ends, color=line.get_color(), alpha=0.15, linewidth=0)
    mark_unconverged(ax, places, flat, converged)


def formula(
    ax: Axes,
    f: Callable[[np.ndarray], Any],
    x: Any,
    fmt: str = "k:",
    *,
    whole: bool = False,
    **style: Any,
) -> None:
    """A formula over the range of x, where it is finite, on a fine grid of its own.

    A line through its values at the points of a sweep would be another curve.

    Args:
        ax: where to draw; the grid is even on a logarithmic axis if the axis is one by now.
        f: from x to y.
        x: values whose range it is.
        fmt: as in `Axes.plot`.
        whole: whether f is of whole numbers, such as a number of tokens.
        **style: properties of the line.
    """
    grid = np.geomspace if (is_log := ax.get_xscale() == "log") else np.linspace
    x = np.asarray(x, float)
    x = x[x > 0] if is_log else x
    if not x.size:
        return
    low, high = float(np.min(x)), float(np.max(x))
    fine = np.unique(np.clip(grid(low, high, _FINE), low, high))
    fine = np.unique(fine.round()) if whole else fine
    y = np.broadcast_to(np.asarray(f(fine), float), fine.shape)
    there = np.isfinite(y)
    if there.any():
        line: Any = {"gid": FORMULA, "linewidth": 0.9} | style
        ax.plot(fine[there], y[there], fmt, **line)


def power_law(ax: Axes, fits: xr.Dataset, n: Any, **style: Any) -> None:
    """The law C nᵖ of the first of the fits, over the range of n.

    Where none holds, its label goes to what was drawn last in this colour: the points.
    """
    if not fits.sizes["fit"] or not fits.fit_holds[0]:
        from matplotlib.colors import same_color

        same = lambda line: same_color(line.get_color(), style["color"])  # noqa: E731
        for line in [line for line in ax.get_lines() if same(line)][-1:]:
            own = str(line.get_label())
            words = [*([] if own.startswith("_") else [own]), style.get("label", "")]
            line.set_label(", ".join(filter(None, words)) or own)
        return
    C, p = float(fits.fit_constant[0]), float(fits.fit_exponent[0])
    formula(ax, lambda x: C * x**p, n, "-", **{"linewidth": 1.4, **style})


def law(fits: xr.Dataset) -> str:
    """C nᵖ of the first of the fits with the 95 % interval of p, for legends; "" of no fit.

    Where one exponent does not hold for small and large n, those of the two.
    """
    if not fits.sizes["fit"]:
        return ""
    names = ("constant", "exponent", "exponent_lower", "exponent_upper")
    C, p, low, high = (float(fits[f"fit_{name}"][0]) for name in names)
    if not fits.fit_holds[0]:
        small, large = float(fits.fit_exponent_small[0]), float(fits.fit_exponent_large[0])
        return f"$n^{{{small:.2f}}}$ to $n^{{{large:.2f}}}$".replace("-0.00", "0.00")
    interval = "" if np.isnan(low) else f" [{low:.2f}, {high:.2f}]"
    return rf"${C:.3g}\,n^{{{p:.2f}}}${interval}".replace("-0.00", "0.00")


def stairs(ax: Axes, rows: xr.Dataset, y: str, *, time: Any, label: str, **style: Any) -> None:
    """A column of each case against time, as steps; one entry in the legend."""
    for k in range(rows.sizes["case"]):
        values, once = rows[y].isel(case=k)[1:], label if k == 0 else None
        ax.step(time[1:], values, where="post", linewidth=1, label=once, **style)


def mark_unconverged(ax: Axes, x: Any, y: Any, converged: Any) -> None:
    """A red cross over every point that has not converged; nothing if all have."""
    x, y, good = np.broadcast_arrays(
        np.asarray(x, float), np.asarray(y, float), is_true(np.asarray(converged))
    )
    bad = ~good & np.isfinite(y)
    if bad.any():
        known = any(line.get_label() == NOT_CONVERGED for line in ax.get_lines())
        label = f"_{NOT_CONVERGED}" if known else NOT_CONVERGED
        ax.plot(x[bad], y[bad], "x", color="red", markersize=9, zorder=5, label=label)
