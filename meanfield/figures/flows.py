"""Figures of flows: clusters, staircases, collapse, Gaussians, limits, noise, depth."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from meanfield.errors import NoCases
from meanfield.figures.canvas import colours, figure, readable_logs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "plot_cluster_count",
    "plot_constant_through_depth",
    "plot_covariance",
    "plot_covariance_error",
    "plot_depth_against_weight",
    "plot_distance_to_first",
    "plot_first_mode",
    "plot_masked_clusters",
    "plot_mean_field_limit",
    "plot_noise_threshold",
    "plot_particle_paths",
    "plot_placements",
    "plot_staircase",
    "rows_where",
]


def rows_where(ds: xr.Dataset, **wanted: Any) -> xr.Dataset:
    """The cases whose parameters have these values.

    Raises:
        ValueError: there are none.
    """
    keep = np.ones(ds.sizes["case"], bool)
    for name, value in wanted.items():
        keep &= ds[name].values == value
    if not keep.any():
        raise NoCases(f"ds: no case with {', '.join(f'{k}={v}' for k, v in wanted.items())}")
    return ds.isel(case=np.flatnonzero(keep))


def _levels(ds: xr.Dataset, name: str) -> np.ndarray:
    return np.unique(ds[name].values)


def _by_level(ds: xr.Dataset, name: str) -> Iterator[tuple[Any, Any, xr.Dataset]]:
    """The cases with each value of a parameter: (colour, value, cases)."""
    levels = _levels(ds, name)
    for colour, level in zip(colours(len(levels)), levels, strict=True):
        yield colour, level, rows_where(ds, **{name: level})


def _stairs(ax: Axes, time: xr.DataArray, rows: xr.Dataset, colour: Any, label: str) -> None:
    """The number of clusters of each case against time."""
    for k in range(rows.sizes["case"]):
        count, once = rows.n_clusters.isel(case=k)[1:], label if k == 0 else None
        ax.step(time[1:], count, where="post", color=colour, linewidth=1, label=once)


# --- clusters ---


@figure
def plot_cluster_count(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Number of clusters on the sphere against time: it falls to 1, the later the larger β.

    Args:
        ds: of the experiment `clustering`.
        ax: where to draw; a new figure if None.
    """
    for colour, beta, rows in _by_level(rows_where(ds, space="sphere"), "beta"):
        _stairs(ax, rows.time.isel(case=0), rows, colour, rf"$\beta$ = {beta:g}")
    ax.set(xscale="log", yscale="log", xlabel="time t", ylabel="number of clusters")
    ax.set_title("On the sphere all tokens end in one point, later for larger β")
    readable_logs(ax)
    return ax


@figure
def plot_particle_paths(
    ds: xr.Dataset, *, ax: Axes, space: str = "plane", beta: float | None = None
) -> Axes:
    """Paths of the particles in the first two coordinates, and where they end.

    Args:
        ds: of the experiment `clustering`.
        ax: where to draw; a new figure if None.
        space: "sphere" or "plane".
        beta: which; the largest if None.
    """
    rows = rows_where(ds, space=space)
    beta = float(rows.beta.max()) if beta is None else beta
    points = rows_where(rows, beta=beta).isel(case=0).points.values
    for path in np.moveaxis(points, 1, 0):
        ax.plot(path[:, 0], path[:, 1], color="0.7", linewidth=0.7)
    ax.plot(*points[0, :, :2].T, ".", color="tab:blue", markersize=4, label="start")
    ax.plot(*points[-1, :, :2].T, "o", color="tab:red", markersize=5, label="end")
    ax.set_aspect("equal")
    if space == "sphere":
        ax.add_patch(_circle())
    name = "e^{-t}x" if space == "plane" else "x"
    ax.set(xlabel=rf"${name}_1$", ylabel=rf"${name}_2$")
    what = "in the plane, rescaled, gather on a polygon" if space == "plane" else "on the sphere"
    ax.set_title(rf"Tokens {what} ($\beta$ = {beta:g})")
    return ax


def _circle() -> Any:
    from matplotlib.patches import Circle

    return Circle((0, 0), 1, fill=False, color="0.4", linewidth=0.8)


@figure
def plot_staircase(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Number of clusters on the circle against time: stages that last exponentially long.

    Args:
        ds: of the experiment `metastability`.
        ax: where to draw; a new figure if None.
    """
    for colour, beta, rows in _by_level(ds, "beta"):
        _stairs(ax, ds.time, rows, colour, rf"$\beta$ = {beta:g}")
    top = 2 * float(ds.first_mode.max())
    ax.set(xscale="log", xlabel="time t", ylabel="number of clusters", ylim=(0, top))
    ax.locator_params(axis="y", integer=True)
    ax.set_title("Clusters meet pair after pair, at times exponential in β")
    return ax


@figure
def plot_first_mode(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """How many clusters the first stage has, against √β, beside the fastest growing mode.

    Args:
        ds: of the experiment `metastability`.
        ax: where to draw; a new figure if None.
    """
    root = np.sqrt(ds.beta.values)
    ax.plot(root, ds.found_mode, "o", color="tab:blue", fillstyle="none", label="simulated")
    mean = ds.groupby("beta").mean()
    expected = r"largest $k^2 I_k(\beta)$"
    ax.plot(np.sqrt(mean.beta), mean.first_mode, "k--", drawstyle="default", label=expected)
    ax.set(xlabel=r"$\sqrt{\beta}$", ylabel="clusters of the first stage")
    ax.locator_params(axis="y", integer=True)
    ax.set_title("The fastest growing mode sets the first number of clusters")
    return ax


# --- placement and masks ---


@figure
def plot_placements(ds: xr.Dataset, *, ax: Axes, beta: float | None = None) -> Axes:
    """1 − cosine against time: e^{−2t} with Post-LN, 1/t² with Pre-LN.

    Args:
        ds: of the experiment `placement`.
        ax: where to draw; a new figure if None.
        beta: which; the smallest if None.
    """
    rows = rows_where(ds, beta=float(ds.beta.min()) if beta is None else beta)
    names = list(dict.fromkeys(rows.placement.values))
    for colour, name in zip(colours(len(names)), names, strict=True):
        one = rows_where(rows, placement=name).isel(case=0)
        ax.plot(ds.time, one.gap_reduced, "-", color=colour, label=name)
        ax.plot(ds.time, one.gap, "o", color=colour, markersize=3)
        ax.plot(ds.time, one.gap_random, "x", color=colour, markersize=4)
    ax.plot([], [], "ko", markersize=3, label="orthonormal start")
    ax.plot([], [], "kx", markersize=4, label="random start")
    ax.plot([], [], "k-", label="reduced equation")
    t = ds.time.values[ds.time.values > 10]
    ax.plot(t, 5 / t**2, "k:", label=r"$\propto t^{-2}$")
    ax.set(xscale="log", yscale="log", ylim=(1e-8, 2), xlabel="time t", ylabel="1 − cosine")
    ax.set_title("Collapse: exponential with Post-LN, algebraic with Pre-LN")
    return ax


@figure
def plot_distance_to_first(ds: xr.Dataset, *, ax: Axes, beta: float | None = None) -> Axes:
    """Distance of each token to the first against time, masked: all come, later tokens later.

    Args:
        ds: of the experiment `causal-flow`.
        ax: where to draw; a new figure if None.
        beta: which; the smallest if None.
    """
    beta = float(ds.beta.min()) if beta is None else beta
    one = rows_where(ds, beta=beta).isel(case=0)
    n = ds.sizes["particle"]
    for colour, k in zip(colours(n - 1), range(1, n), strict=True):
        ax.plot(ds.time[1:], one.distance[1:, k], color=colour, linewidth=0.7)
    ax.set(xscale="log", yscale="log", ylim=(1e-4, 3), xlabel="time t")
    ax.set_ylabel("distance to the first token")
    ax.set_title(rf"Masked: every token goes to the first ($\beta$ = {beta:g}; dark: early)")
    return ax


@figure
def plot_masked_clusters(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Number of clusters of masked flows against time, and the leaders of their starts.

    Args:
        ds: of the experiment `causal-flow`.
        ax: where to draw; a new figure if None.
    """
    for colour, beta, rows in _by_level(ds, "beta"):
        _stairs(ax, ds.time, rows, colour, rf"$\beta$ = {beta:g}")
        ax.axhline(float(rows.leaders.mean()), color=colour, linestyle=":", linewidth=1)
    c = float((ds.parking_distance * np.sqrt(ds.beta))[0])
    ax.plot([], [], "k:", label=rf"leaders: free by ${c:g}\,\beta^{{-1/2}}$")
    ax.set(xscale="log", yscale="log", xlabel="time t", ylabel="number of clusters")
    ax.set_title("Masked: clusters gather around leaders, the more the larger β")
    readable_logs(ax)
    return ax


# --- Gaussians and limits ---


@figure
def plot_covariance(ds: xr.Dataset, *, ax: Axes, kernel: str = "softmax") -> Axes:
    """Eigenvalues of the covariance against time, samples beside the equation.

    Args:
        ds: of the experiment `gaussian-flow`.
        ax: where to draw; a new figure if None.
        kernel: "softmax" or "l2".
    """
    ds = rows_where(ds, kernel=kernel)
    levels = _levels(ds, "n_particles")
    marks = [levels[0], levels[-1]] if len(levels) > 1 else levels
    for k in range(ds.sizes["feature"]):
        label = "covariance equation" if k == 0 else None
        ax.plot(ds.time, ds.expected.isel(case=0, feature=k), "k-", label=label)
    for colour, n in zip(("tab:orange", "tab:blue"), marks, strict=False):
        rows = rows_where(ds, n_particles=n)
        for k in range(ds.sizes["feature"]):
            label = f"{n} samples" if k == 0 else None
            values = rows.eigenvalues.isel(feature=k)
            ax.plot(ds.time, values.mean("case"), "o", color=colour, markersize=3, label=label)
            low, high = values.min("case"), values.max("case")
            ax.fill_between(ds.time, low, high, color=colour, alpha=0.2, linewidth=0)
    ax.set(yscale="log", xlabel="time t", ylabel="eigenvalues of the covariance")
    ax.set_title(f"A Gaussian stays one: {kernel} (band: smallest to largest draw)")
    readable_logs(ax)
    return ax


@figure
def plot_covariance_error(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Error of the covariance against the number of samples: n^{−1/2}.

    Args:
        ds: of the experiment `gaussian-flow`.
        ax: where to draw; a new figure if None.
    """
    steps = [0, ds.sizes["time"] // 2, ds.sizes["time"] - 1]
    for kernel, line in (("softmax", "o-"), ("l2", "s--")):
        if kernel not in ds.kernel.values:
            continue
        rows = rows_where(ds, kernel=kernel)[["error"]].drop_vars("kernel")
        mean = rows.groupby("n_particles").median()
        for colour, k in zip(colours(3), steps, strict=True):
            label = f"{kernel}, t = {float(ds.time[k]):g}"
            ax.plot(mean.n_particles, mean.error.isel(time=k), line, color=colour, label=label)
    n = _levels(ds, "n_particles")
    ax.plot(n, 2 / np.sqrt(n), "k:", label=r"$\propto n^{-1/2}$")
    ax.set(xscale="log", yscale="log", xlabel="samples n", ylabel="relative error, median")
    ax.set_title("Samples follow the covariance equation")
    readable_logs(ax)
    return ax


@figure
def plot_mean_field_limit(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """W₂ and the gap of the means between n samples and many, against n.

    Args:
        ds: of the experiment `mean-field-limit`.
        ax: where to draw; a new figure if None.
    """
    for colour, dim, rows in _by_level(ds, "dim"):
        mean = rows.groupby("n_particles").mean()
        n = mean.n_particles.values
        for k, mark in ((0, "o"), (-1, "s")):
            w2, gap = mean.w2.isel(time=k).values, mean.mean_error.isel(time=k).values
            when = f"d = {dim}, t = {float(ds.time[k]):g}"
            ax.plot(n, w2, f"{mark}-", color=colour, label=f"W₂, {when}: {_slope(n, w2)}")
            style = {"color": colour, "fillstyle": "none"}
            ax.plot(n, gap, f"{mark}--", **style, label=f"means, {when}: {_slope(n, gap)}")
    ax.set(xscale="log", yscale="log", xlabel="samples n", ylabel="distance to many samples")
    ax.set_title("Depth keeps the rate at which samples reach the mean field")
    readable_logs(ax)
    return ax


def _slope(n: np.ndarray, y: np.ndarray) -> str:
    if len(n) < 2:
        return "one n"
    return rf"$n^{{{np.polyfit(np.log(n), np.log(y), 1)[0]:.2f}}}$"


@figure
def plot_noise_threshold(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Order of noisy flows against the coupling over its critical value.

    Args:
        ds: of the experiment `noise-threshold`.
        ax: where to draw; a new figure if None.
    """
    pairs = sorted(set(zip(ds.dim.values.tolist(), ds.beta.values.tolist(), strict=True)))
    for colour, (dim, beta) in zip(colours(len(pairs)), pairs, strict=True):
        rows = rows_where(ds, dim=dim, beta=beta).sortby("ratio")
        label = rf"d = {dim}, $\beta$ = {beta:g}"
        spread = rows.order_spread
        ax.errorbar(
            rows.ratio, rows.order, yerr=spread, fmt="o", color=colour, markersize=4, label=label
        )
        ax.plot(rows.ratio, rows.expected, "-", color=colour, linewidth=1)
    ax.axvline(1.0, color="0.4", linestyle="--", linewidth=1, label=r"$K_\#$")
    ax.plot([], [], "k-", linewidth=1, label="stationary measure")
    ax.set(xlabel=r"coupling $K/K_\#$", ylabel=r"order $|\int x\,d\mu|$", ylim=(0, 1))
    ax.set_title("Tokens align where the coupling passes its critical value")
    return ax


# --- two Diracs through depth ---


@figure
def plot_constant_through_depth(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Local constant of the flow map of two Diracs against depth, under e^{∫ layer constant}.

    Args:
        ds: of the experiment `two-dirac-depth`.
        ax: where to draw; a new figure if None.
    """
    rows = rows_where(ds, offset=float(ds.offset.values[np.argmin(np.abs(ds.offset.values))]))
    rows = rows.sortby("radius")
    for colour, k in zip(colours(rows.sizes["case"]), range(rows.sizes["case"]), strict=True):
        one = rows.isel(case=k)
        label = f"R = {float(one.radius):g}"
        ax.plot(ds.time, one.constant, "o-", color=colour, label=label)
        ax.plot(ds.time, one.grown, "--", color=colour, linewidth=1)
    ax.plot([], [], "k--", linewidth=1, label=r"$e^{\int\lambda}$, layers' constants $\lambda$")
    top = 30 * float(rows.constant.max())
    ax.set(yscale="log", ylim=(0.8, top), xlabel="depth t", ylabel="local constant of the flow")
    ax.set_title("Two unbalanced clusters: what depth amplifies, and what layers allow")
    return ax


@figure
def plot_depth_against_weight(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Local constant of the flow map at the last depth against the light weight.

    Args:
        ds: of the experiment `two-dirac-depth`.
        ax: where to draw; a new figure if None.
    """
    for colour, radius, unsorted in _by_level(ds, "radius"):
        rows = unsorted.sortby("log_ratio")
        label = f"R = {radius:g}"
        ax.plot(rows.offset, rows.constant.isel(time=-1), "o-", color=colour, label=label)
        first = rows.layer.isel(time=0)
        ax.plot(rows.offset, first, ":", color=colour, linewidth=1)
    ax.plot([], [], "k:", linewidth=1, label="one layer at t = 0")
    ax.set(yscale="log", xlabel="log-ratio of the weights, relative to one layer's worst")
    ax.set_ylabel(f"local constant of the flow to t = {float(ds.time[-1]):g}")
    ax.set_title("Depth moves the most sensitive weight")
    return ax
