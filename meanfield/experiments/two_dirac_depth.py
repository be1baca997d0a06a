"""What does depth do to two unbalanced clusters?

A light atom at Ru and a heavy one at −Ru, A = −γI, V = I on the line: the configuration in which
one layer is most sensitive. Here it flows through depth t. The local constant of the flow map Φ_t
stands beside e^{∫λ}, what the constants λ of the layers on the way allow together (Grönwall's
inequality): how much of the product of the layers' constants is real.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from meanfield import bounds, dynamics, sampling
from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.checks import to_host
from meanfield.experiments.experiment import Experiment
from meanfield.experiments.settings import setting
from meanfield.experiments.two_dirac import two_atom_constants
from meanfield.figures import animate_particles
from meanfield.figures.canvas import figure
from meanfield.figures.curves import curve, formula
from meanfield.figures.selection import attribute, by_level, select
from meanfield.results import Variable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["EXPERIMENT", "Settings"]


_FINER = 5  # times between two that are kept


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over."""

    radii: tuple[float, ...] = setting(
        (0.5, 1.0, 1.5, 2.0), "R of the configuration", quick=(0.5, 1.5)
    )
    offsets: tuple[float, ...] = setting(
        (-6.0, -4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0, 6.0),
        "log-ratios of the weights, relative to the one most sensitive for one layer",
        quick=(-2.0, 0.0, 2.0),
    )
    gamma: float = setting(1.0, "A = −γ")
    last: float = setting(2.0, "largest depth", quick=1.0)
    n_times: int = setting(21, "number of depths", quick=6)
    step: float = setting(0.02, "step of RK4")
    seed: int = setting(0, "not used: nothing is random")


_PARAMETERS = (
    Variable("radius", "radius R", symbol="R"),
    Variable("offset", "log-ratio of the weights over the best one for one layer"),
    Variable("time", "depth t", symbol="t"),
)
_VARIABLES = (
    Variable("log_ratio", "log(light weight / heavy weight)"),
    Variable("constant", "local constant of the flow map", dims=("time",)),
    Variable("constant_upper", "the constant is at most this", dims=("time",)),
    Variable("constant_converged", "whether all of them converged", dtype="bool"),
    Variable("splitting", "its part from splitting atoms", dims=("time",)),
    Variable("layer", "local constant of the layer at this depth", dims=("time",)),
    Variable("grown", "e^{∫ layer constant}", dims=("time",)),
    Variable("gap", "distance of the two atoms", dims=("time",)),
    Variable("points", "the two atoms", dims=("time", "particle", "feature")),
    Variable("mass", "their weights", dims=("particle",)),
    Variable("one_layer_bound", "bound of one layer on the ball of radius R"),
)


def depth(
    radius: float, offset: float, *, gamma: float, last: float, n_times: int, step: float
) -> dict[str, Any]:
    """The constants of one pair through depth."""
    F = SelfAttention(AttentionParameters.from_bilinear([[-gamma]], [[1.0]]))
    log_ratio = float(bounds.two_dirac_best_log_ratio(gamma, radius)) + offset
    mu = sampling.two_diracs(radius, log_ratio, [1.0])
    fine = np.linspace(0, last, _FINER * (n_times - 1) + 1)  # for the integral of λ
    ds = dynamics.stability(F, mu, fine, method="rk4", step=step)
    paths = dynamics.flow(F, mu, fine, method="rk4", step=step).points.values[::_FINER]
    kept = ds.isel(time=slice(None, None, _FINER))
    return {
        "log_ratio": log_ratio,
        "constant": kept.constant.values,
        "constant_upper": kept.constant_upper.values,
        "constant_converged": bool(kept.constant_converged.all()),
        "splitting": kept.constant_splitting.values,
        "layer": kept.velocity_constant.values,
        "grown": kept.growth.values,
        "gap": np.abs(paths[:, 0, 0] - paths[:, 1, 0]),
        "points": paths,
        "mass": to_host(mu.weights),
        "one_layer_bound": bounds.mean_field(gamma, 1.0, radius),
    }


@figure("constant", "constant_converged", "grown")
def against_depth(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Local constant of the flow map of two Diracs against depth, under e^{∫ layer constant}."""
    offset = float(ds.offset.values[np.argmin(np.abs(ds.offset.values))])
    rows = select(ds, offset=offset)
    for colour, radius, cases in by_level(rows, "radius"):
        one = cases.isel(case=0)
        curve(ax, one, "time", "constant", color=colour, label=f"R = {radius:g}")
        curve(ax, one, "time", "grown", "--", color=colour, linewidth=1)
    ax.plot([], [], "k--", linewidth=1, label=r"$e^{\int\lambda}$, layers' constants $\lambda$")
    top = 30 * float(rows.constant.max())
    ax.set(yscale="log", ylim=(0.8, top), xlabel="depth t", ylabel="local constant of the flow")
    ax.set_title("Two Diracs: constant of the flow, and what its layers allow")
    return ax


@figure("constant", "constant_converged")
def against_weight(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Local constant of the flow map at the last depth against the light weight."""
    for colour, radius, rows in by_level(ds, "radius"):
        label = f"R = {radius:g}"
        curve(ax, rows.isel(time=-1), "offset", "constant", color=colour, label=label)
        one_layer = partial(at_the_start, gamma=attribute(ds, "gamma"), radius=radius)
        formula(ax, one_layer, rows.offset, ":", color=colour, linewidth=1)
    ax.plot([], [], "k:", linewidth=1, label="one layer at t = 0")
    ax.set(yscale="log", xlabel="log-ratio of the weights, relative to one layer's worst")
    ax.set_ylabel(f"local constant of the flow to t = {float(ds.time[-1]):g}")
    ax.set_title("Two Diracs: constant of the flow against the light weight")
    return ax


def at_the_start(offset: np.ndarray, *, gamma: float, radius: float) -> np.ndarray:
    """The constant of one layer at the pair, in closed form."""
    log_ratio = float(bounds.two_dirac_best_log_ratio(gamma, radius)) + offset
    return np.maximum(*two_atom_constants(log_ratio, c=gamma * radius**2, dim=1))


EXPERIMENT = Experiment(
    depth,
    Settings(),
    grid=lambda s: {"radius": s.radii, "offset": s.offsets},
    variables=_VARIABLES,
    parameters=_PARAMETERS,
    coords=lambda s: {
        "time": np.linspace(0, s.last, s.n_times),
        "particle": np.arange(2),
        "feature": np.arange(1),
    },
    attrs=lambda s: {"gamma": s.gamma},
    figures={"constant": against_depth, "weights": against_weight},
    animations={"atoms": partial(animate_particles, offset=0.0)},
)
