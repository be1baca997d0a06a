"""Figures of measures: two Diracs, Lemma 3.2, regimes, the masked bound."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from meanfield.errors import NoCases
from meanfield.figures.canvas import (
    colours,
    figure,
    kind,
    mark_unconverged,
    readable_logs,
    ticks_at,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "plot_growth_in_n",
    "plot_growth_in_radius",
    "plot_lemma_3_2",
    "plot_light_weight",
    "plot_masked_bound",
    "plot_regimes",
    "plot_secants",
    "plot_sharpness",
    "plot_splitting",
    "plot_token_sharpness",
]


@figure
def plot_growth_in_n(ds: xr.Dataset, *, ax: Axes, causal: bool = False) -> Axes:
    """Euclidean constant of n tokens against n, beside √n and what is proved from below.

    Args:
        ds: a two-Dirac Dataset, with ``euclidean``, ``particle``, ``general_lower`` along `case`.
        ax: where to draw; a new figure if None.
        causal: whether to take the masked cases.
    """
    rows = _select(ds, crowd=-1.0, causal=causal, sequence=True)
    rows = rows.isel(case=np.flatnonzero(rows.dim.values == rows.dim.values.max()))
    radii = np.unique(rows.radius.values)
    for colour, radius in zip(colours(len(radii)), radii, strict=True):
        line = rows.isel(case=np.flatnonzero(rows.radius.values == radius)).sortby("n_tokens")
        n = line.n_tokens.values
        ax.plot(n, line.euclidean, "o-", color=colour, label=f"R = {radius:g}")
        ax.plot(n, line.particle, "x", color=colour, markersize=7)
        mark_unconverged(ax, n, line.euclidean, line.euclidean_converged)
        ax.plot(n, line.general_lower, ":", color=colour, linewidth=0.9)
    n = np.unique(rows.n_tokens.values)
    ax.plot(n, np.sqrt(n), "-", color="black", linewidth=0.9, label=r"$\sqrt{n}$")
    ax.plot([], [], "kx", markersize=7, label="two weighted atoms")
    ax.plot([], [], "k:", linewidth=0.9, label="lower bound, Prop. 3.4")
    ax.set(xscale="log", yscale="log", xlabel="number of tokens n", ylabel=r"$\|Df(X)\|$")
    ax.set_ylim(bottom=0.5)
    ticks_at(ax, rows.n_tokens)
    ax.set_title(f"Euclidean constant of $n$ tokens in two clusters, {kind(causal)}")
    readable_logs(ax)
    return ax


@figure
def plot_growth_in_radius(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Best two-Dirac constant against R², between its bounds, and Theorem 3.5 far above.

    Args:
        ds: a two-Dirac Dataset, with ``value``, ``two_dirac_lower``, ``mean_field_bound`` and
            ``theorem_3_5``.
        ax: where to draw; a new figure if None.
    """
    rows = _select(ds, crowd=-1.0)
    for causal, colour in ((False, "tab:blue"), (True, "tab:orange")):
        part = rows.isel(case=np.flatnonzero(rows.causal.values.astype(bool) == causal))
        if not part.sizes["case"]:
            continue
        best = part.groupby("radius").map(
            lambda one: one.isel(case=int(np.argmax(one.value.values)))
        )
        square = best.radius**2
        marks: dict[str, Any] = {"marker": "s", "fillstyle": "none", "markersize": 8}
        marks = marks | {"linestyle": "none"} if causal else {"marker": "o"}
        ax.plot(
            square, best.value, color=colour, label=f"best two Diracs, {kind(causal)}", **marks
        )
        ax.plot(square, best.mean_field_bound, "--", color=colour, label=_upper_name(causal))
        if not causal:
            label = "upper bound, [CAP24] Thm 3.5"
            ax.plot(square, best.theorem_3_5, "-.", color="tab:red", label=label)
        mark_unconverged(ax, square, best.value, best.value_converged)
    lower = rows.groupby("radius").max()
    ax.plot(
        lower.radius**2,
        lower.two_dirac_lower,
        "k:",
        label=r"lower bound $\max_t\sqrt{t(1-t)}\,(1+2(1-t)c)\,e^{c}$, $c=\gamma R^2$",
    )
    ax.set(yscale="log", xlabel=r"$R^2$", ylabel="local constant, Wasserstein")
    ax.set_title(r"Two unbalanced Diracs: exponential growth in $R^2$")
    readable_logs(ax)
    return ax


@figure
def plot_light_weight(ds: xr.Dataset, *, ax: Axes, causal: bool = False) -> Axes:
    """Both components of the two-Dirac constant against the light weight.

    Args:
        ds: a two-Dirac Dataset, with ``particle``, ``splitting``, ``two_dirac_entry``.
        ax: where to draw; a new figure if None.
        causal: whether to take the masked cases.
    """
    rows = _select(ds, crowd=-1.0, causal=causal, sequence=False)
    rows = rows.isel(case=np.flatnonzero(rows.dim.values == rows.dim.values.max()))
    radii = np.unique(rows.radius.values)
    for colour, radius in zip(colours(len(radii)), radii, strict=True):
        line = rows.isel(case=np.flatnonzero(rows.radius.values == radius)).sortby("log_ratio")
        line = line.isel(case=np.flatnonzero(line.log_ratio.values > -80))
        # One marker, at the best weight.
        best: Any = {"marker": "o", "markersize": 7}
        best["markevery"] = [int(np.argmax(line.particle.values))]
        ax.plot(line.log_ratio, line.particle, color=colour, label=f"R = {radius:g}", **best)
        ax.plot(line.log_ratio, line.splitting, "--", color=colour, linewidth=0.9)
        mark_unconverged(ax, line.log_ratio, line.particle, line.value_converged)
    ax.plot([], [], "k-", label="particle")
    ax.plot([], [], "k--", linewidth=0.9, label="splitting")
    ax.plot([], [], "ko", markersize=7, label=r"best, near $e^{-2\gamma R^2}/3$")
    ax.set(yscale="log", xlabel="log(light weight / heavy weight)", ylabel="local constant")
    ax.set_ylim(bottom=1e-2)
    ax.set_title("The most sensitive cluster is extremely unbalanced")
    readable_logs(ax)
    return ax


@figure
def plot_lemma_3_2(ds: xr.Dataset, *, ax: Axes, causal: bool = False, radius: float = 1.5) -> Axes:
    """Discrete Euclidean and Wasserstein secants meet as the step shrinks.

    Args:
        ds: a two-Dirac Dataset, with ``euclidean_secant``, ``wasserstein_secant`` along
            (`case`, `step`) and the local constant ``euclidean``.
        ax: where to draw; a new figure if None.
        causal: whether to take the masked cases (conditional distance).
        radius: which R; the nearest that the Dataset has.
    """
    rows = _select(ds, causal=causal, crowd=-1.0, sequence=True)
    rows = rows.isel(case=np.flatnonzero(np.isfinite(rows.euclidean_secant).all("step").values))
    rows = rows.isel(case=np.flatnonzero(rows.dim.values == rows.dim.values.max()))
    radius = rows.radius.values[np.argmin(np.abs(rows.radius.values - radius))]
    rows = rows.isel(case=np.flatnonzero(rows.radius.values == radius)).sortby("n_tokens")
    for k, colour in enumerate(colours(rows.sizes["case"])):
        case = rows.isel(case=k)
        marks: Any = {"color": colour, "fillstyle": "none", "markersize": 6}
        # Its marker is in the legend alone: on the curve it would hide those of W₂.
        label = f"n = {int(case.n_tokens)}"
        ax.plot(ds.step, case.euclidean_secant, "o-", markevery=[], label=label, **marks)
        ax.plot(ds.step, case.wasserstein_secant, "o", **marks)
        ax.axhline(float(case.euclidean), color=colour, linestyle=":", linewidth=0.9)
    ax.plot([], [], "k-", label=r"$\frac{\|f(X)-f(Y)\|}{\|X-Y\|}$")
    name = "d_2" if causal else "W_2"
    label = rf"$\frac{{{name}(F\mu,F\nu)}}{{{name}(\mu,\nu)}}$"
    ax.plot([], [], "ko", fillstyle="none", label=label)
    ax.plot([], [], "k:", label="local constant")
    ax.set(xscale="log", yscale="log", xlabel="step: displacement / R", ylabel="secant ratio")
    ax.invert_xaxis()
    lemma = "4.2 (masked" if causal else "3.2 (plain"
    ax.set_title(f"Lemma {lemma}, R = {radius:g}): secants meet as the step shrinks")
    readable_logs(ax)
    return ax


@figure
def plot_splitting(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Where splitting an atom beats moving it: a crowd at the origin, one light atom at R.

    Args:
        ds: a two-Dirac Dataset, with ``particle``, ``splitting``, ``splitting_secant``.
        ax: where to draw; a new figure if None.
    """
    rows = _select(ds, crowd=0.0, causal=False, sequence=False)
    rows = rows.isel(case=np.flatnonzero(rows.dim.values == rows.dim.values.min()))
    rows = rows.sortby("radius")
    ax.plot(rows.radius, rows.splitting, "o-", label=r"splitting: $\max_i\|D_x\Gamma_\mu(x_i)\|$")
    ax.plot(rows.radius, rows.particle, "s-", label=r"particle: $\|D^{1/2}JD^{-1/2}\|$")
    mark_unconverged(ax, rows.radius, rows.value, rows.value_converged)
    last = rows.splitting_secant.isel(step=-1)
    smallest = float(ds.step[-1])
    label = f"$W_2$ secant, atom split (step {smallest:.0e})"
    ax.plot(rows.radius, last, "kx", markersize=7, label=label)
    ax.set(xscale="log", yscale="log", xlabel="radius R", ylabel="local constant, Wasserstein")
    ax.xaxis.minorticks_off()
    ax.set_title("Splitting wins: crowd at the origin, light atom at R (d = 1)")
    readable_logs(ax)
    return ax


@figure
def plot_secants(
    ds: xr.Dataset, *, ax: Axes, causal: bool = False, radius: float | None = None
) -> Axes:
    """Secant ratios over the Euclidean constant of n tokens, as the step shrinks.

    Args:
        ds: a Lemma 3.2 Dataset, with ``euclidean_secant``, ``wasserstein_secant`` along
            (`case`, `perturbation`, `step`) and ``euclidean``.
        ax: where to draw; a new figure if None.
        causal: whether to take the masked cases (conditional distance).
        radius: which R; the largest by default.
    """
    rows = ds.isel(case=np.flatnonzero(ds.causal.values.astype(bool) == causal))
    radius = rows.radius.values.max() if radius is None else radius
    rows = rows.isel(case=np.flatnonzero((rows.radius == radius) & (rows.draw == 0)))
    rows = rows.sortby("n_tokens")
    for k, colour in enumerate(colours(rows.sizes["case"])):
        case = rows.isel(case=k)
        top, split = case.sel(perturbation="top"), case.sel(perturbation="splitting")
        scale = float(case.euclidean)
        marks: Any = {"color": colour, "fillstyle": "none"}
        # Its marker is in the legend alone: on the curve it would hide those of W₂.
        label = f"n = {int(case.n_tokens)}"
        ax.plot(ds.step, top.euclidean_secant / scale, "o-", markevery=[], label=label, **marks)
        ax.plot(ds.step, top.wasserstein_secant / scale, "o", **marks)
        ax.plot(ds.step, split.wasserstein_secant / scale, "--", color=colour, linewidth=0.9)
        # The scale of the whole curve is what has not converged.
        good = case.euclidean_converged
        mark_unconverged(ax, ds.step, top.euclidean_secant / scale, good)
    ax.axhline(1.0, color="black", linestyle=":")
    ax.plot([], [], "k-", label="Euclidean, discrete map")
    name = "conditional $d_2$" if causal else "$W_2$"
    ax.plot([], [], "ko", fillstyle="none", label=name)
    ax.plot([], [], "k--", linewidth=0.9, label=f"{name}, worst atom split")
    ax.set(xscale="log", xlabel="step: displacement / R")
    ax.set_ylabel("secant ratio / Euclidean constant of n tokens")
    ax.invert_xaxis()
    lemma = "4.2 (masked" if causal else "3.2 (plain"
    ax.set_title(f"Lemma {lemma}, R = {radius:g})")
    readable_logs(ax)
    return ax


@figure
def plot_regimes(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Largest constant found over √n, over (n, R), and the lines where one bound hands over.

    Args:
        ds: a regimes Dataset, with ``worst``, ``tokens_bound``, ``general_bound``,
            ``theorem_3_5`` and ``size``, c = ‖A‖R².
        ax: where to draw; a new figure if None.
    """
    cube = ds.set_index(case=["n_tokens", "radius"]).unstack("case").sortby(["n_tokens", "radius"])
    n, radius = cube.n_tokens.values, cube.radius.values
    share = np.log10((cube.worst / np.sqrt(cube.n_tokens)).transpose("radius", "n_tokens").values)
    limit = np.abs(share).max()
    edges = _edges(n), _edges(radius)
    mesh = ax.pcolormesh(*edges, share, cmap="RdBu_r", vmin=-limit, vmax=limit)
    ax.figure.colorbar(mesh, ax=ax, label=r"$\log_{10}$(largest constant found / $\sqrt{n}$)")
    # c/R² is ‖A‖ in every case, so that the lines are formulas and not contours of cells.
    norm_A = float((ds["size"] / ds.radius**2).mean())
    along = np.geomspace(max(edges[0][0], 1.01), edges[0][-1], 400)
    exact = np.sqrt(np.log(along) / (2 * norm_A))
    ax.plot(along, exact, "k-", label=r"$n = e^{2c}$: the regimes of the bound for $n$ tokens")
    papers = [_crossing(float(one), norm_A) for one in along]
    ax.plot(along, papers, "k--", label="Thm 3.3 = Thm 3.5: below the line the second is smaller")
    gain = cube.general_bound / cube.tokens_bound
    gained = f"gain over Thm 3.3: {float(gain.min()):.2g} to {float(gain.max()):.2g}"
    ax.set(xscale="log", yscale="log", xlabel="number of tokens n", ylabel="radius R")
    ax.set(xlim=edges[0][[0, -1]], ylim=edges[1][[0, -1]])
    ticks_at(ax, n)
    # Above the first line the bound is √n (1 + c) or so, below it that of all measures.
    middle = float(np.sqrt(np.prod(edges[0][[0, -1]])))
    turn = float(np.sqrt(np.log(middle) / (2 * norm_A)))
    words: Any = {"va": "center", "ha": "center", "bbox": {"fc": "white", "alpha": 0.7, "lw": 0}}
    for height, text in (
        ((edges[1][0] * turn) ** 0.5, "mean field"),
        ((edges[1][-1] * turn) ** 0.5, r"$\sqrt{n}$"),
    ):
        ax.text(middle, height, text, **words)
    unknown = ~cube.worst_converged.astype(bool).transpose("radius", "n_tokens").values
    places = np.argwhere(unknown)
    mark_unconverged(ax, n[places[:, 1]], radius[places[:, 0]], np.zeros(len(places), bool))
    ax.set_title(f"Largest constant found, beside where the bounds change\n{gained}")
    readable_logs(ax)
    return ax


def _edges(centres: np.ndarray) -> np.ndarray:
    """Edges of cells on a logarithmic axis: geometric means, and as far outside."""
    logs = np.log(centres)
    inner = (logs[1:] + logs[:-1]) / 2
    ends = (
        (2 * logs[0] - inner[0], 2 * logs[-1] - inner[-1])
        if len(logs) > 1
        else (logs[0] - 1, logs[0] + 1)
    )
    return np.exp([ends[0], *inner, ends[1]])


def _crossing(n: float, norm_A: float) -> float:
    """The R at which Theorems 3.3 and 3.5 agree, by bisection in c; V cancels."""
    low, high = 0.0, 50.0
    for _ in range(60):
        c = 0.5 * (low + high)
        general = 0.5 * np.log(3 * (c * c * (4 * n + 1) + n))
        low, high = (c, high) if np.log1p(3 * c) + 2 * c < general else (low, c)
    return float(np.sqrt(low / norm_A))


@figure
def plot_masked_bound(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Masked constants against n: above the unmasked bound, below the masked one.

    Args:
        ds: a masked-bound Dataset, with ``largest``, ``unmasked_bound``, ``tokens_bound``.
        ax: where to draw; a new figure if None.
    """
    sizes = np.unique(ds["size"].values)
    for colour, size in zip(colours(len(sizes)), sizes, strict=True):
        rows = ds.isel(case=np.flatnonzero(ds["size"].values == size)).sortby("n_tokens")
        ax.plot(rows.n_tokens, rows.largest, "o-", color=colour, label=rf"$\|A\|R^2$ = {size:g}")
        ax.plot(rows.n_tokens, rows.unmasked_bound, "-.", color=colour)
        ax.plot(rows.n_tokens, rows.tokens_bound, "--", color=colour, linewidth=0.9)
        mark_unconverged(ax, rows.n_tokens, rows.largest, rows.largest_converged)
    ax.plot([], [], "k-.", label="upper bound of plain attention, Thm 3.5")
    ax.plot([], [], "k--", linewidth=0.9, label="upper bound, masked: this package")
    ax.set(xscale="log", yscale="log", xlabel="number of atoms n", ylabel="local constant, masked")
    ticks_at(ax, ds.n_tokens)
    ax.set_title("Masked attention beside the bound of plain attention")
    readable_logs(ax)
    return ax


@figure
def plot_sharpness(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Upper bounds over the largest constant found, against c = R²: 1 would be sharp.

    Args:
        ds: a sharpness Dataset, with ``found``, ``upper``, ``two_dirac_lower``, ``theorem_3_5``.
        ax: where to draw; a new figure if None.
    """
    for causal, colour in ((False, "tab:blue"), (True, "tab:orange")):
        part = ds.isel(case=np.flatnonzero(ds.causal.values.astype(bool) == causal))
        if not part.sizes["case"]:
            continue
        best = part.groupby("radius").map(
            lambda one: one.isel(case=int(np.argmax(one.found.values)))
        )
        c, name = best.radius**2, kind(causal)
        # The measure behind the lower bound exists, whether the search found it or not.
        known = np.maximum(best.found, best.two_dirac_lower)
        ax.plot(c, best.upper / known, "o-", color=colour, label=f"{name}: this package")
        mark_unconverged(ax, c, best.upper / known, best.found_converged)
        if causal:
            label = "masked: the same over what the search found"
            ax.plot(c, best.upper / best.found, "s:", color=colour, fillstyle="none", label=label)
        else:
            ax.plot(c, best.theorem_3_5 / known, "-.", color="tab:red", label="[CAP24] Thm 3.5")
    ax.axhline(1.0, color="black", linewidth=0.8)
    ax.set(yscale="log", xlabel=r"$c = \|A\|R^2$", ylabel="upper bound / largest known")
    ax.set_title("How far the bounds are from measures that exist")
    readable_logs(ax)
    return ax


@figure
def plot_token_sharpness(ds: xr.Dataset, *, ax: Axes, causal: bool = False) -> Axes:
    """Upper bounds for n uniform tokens over the largest constant found, against c = R².

    Args:
        ds: a sharpness Dataset, with ``tokens_found``, ``tokens_upper``, ``theorem_3_3``.
        ax: where to draw; a new figure if None.
        causal: whether to take the masked cases.
    """
    part = ds.isel(case=np.flatnonzero(ds.causal.values.astype(bool) == causal))
    lengths = np.unique(part.n_atoms.values)
    for colour, n in zip(colours(len(lengths)), lengths, strict=True):
        rows = part.isel(case=np.flatnonzero(part.n_atoms.values == n))
        best = rows.groupby("radius").map(
            lambda one: one.isel(case=int(np.argmax(one.tokens_found.values)))
        )
        c = best.radius**2
        ax.plot(c, best.tokens_upper / best.tokens_found, "o-", color=colour, label=f"n = {n}")
        ax.plot(c, best.theorem_3_3 / best.tokens_found, "--", color=colour, linewidth=0.9)
        mark_unconverged(ax, c, best.tokens_upper / best.tokens_found, best.tokens_converged)
    ax.plot([], [], "k-", label="this package")
    ax.plot([], [], "k--", linewidth=0.9, label="[CAP24] Thm 3.3")
    ax.axhline(1.0, color="black", linewidth=0.8)
    ax.set(yscale="log", xlabel=r"$c = \|A\|R^2$", ylabel="upper bound / largest found")
    ax.set_title(f"Bounds for n uniform tokens ({kind(causal)})")
    readable_logs(ax)
    return ax


def _upper_name(causal: bool) -> str:
    return f"upper bound, {kind(causal)}: this package"


def _select(
    ds: xr.Dataset,
    *,
    causal: bool | None = None,
    crowd: float | None = None,
    sequence: bool | None = None,
) -> xr.Dataset:
    keep = np.ones(ds.sizes["case"], dtype=bool)
    if causal is not None:
        keep &= ds.causal.values.astype(bool) == causal
    if crowd is not None:
        keep &= ds.crowd.values == crowd
    if sequence is not None:
        keep &= (ds.n_tokens.values > 0) == sequence
    if not keep.any():
        raise NoCases(
            f"the Dataset has no case with causal={causal}, crowd={crowd}, sequence={sequence}"
        )
    return ds.isel(case=np.flatnonzero(keep))
