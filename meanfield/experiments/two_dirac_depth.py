"""What does depth do to two unbalanced clusters?

A light atom at Ru and a heavy one at −Ru, A = −γI, V = I on the line: the configuration in which
one layer is most sensitive. Here it flows through depth t. The local constant of the flow map Φ_t
stands beside e^{∫λ}, what the constants λ of the layers on the way allow together (Grönwall's
inequality): how much of the product of the layers' constants is real.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from meanfield import bounds, dynamics, sampling
from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.results import Variable
from meanfield.sweeps import Task, sweep

__all__ = ["ANIMATIONS", "FIGURES", "QUICK", "Settings", "depth", "plan", "run"]

# File name of each figure -> function of `meanfield.figures` and its arguments.
FIGURES: dict[str, tuple[str, dict[str, Any]]] = {
    "constant": ("plot_constant_through_depth", {}),
    "weights": ("plot_depth_against_weight", {}),
}
ANIMATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "atoms": ("animate_particles", {"offset": 0.0})
}

_FINER = 5  # times between two that are kept


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over; every field can be set from the command line.

    Attributes:
        radii: R of the configuration.
        offsets: log-ratios of the weights, relative to the one most sensitive for one layer.
        gamma: A = −γ.
        last: largest depth.
        n_times: how many depths.
        step: of RK4.
        seed: not used: nothing is random.
    """

    radii: tuple[float, ...] = (0.5, 1.0, 1.5, 2.0)
    offsets: tuple[float, ...] = (-6.0, -4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0, 6.0)
    gamma: float = 1.0
    last: float = 2.0
    n_times: int = 21
    step: float = 0.02
    seed: int = 0


QUICK = Settings(radii=(0.5, 1.5), offsets=(-2.0, 0.0, 2.0), last=1.0, n_times=6, step=0.02)

_PARAMETERS = (
    Variable("radius", "radius R", symbol="R"),
    Variable("offset", "log-ratio of the weights over the best one for one layer"),
    Variable("time", "depth t", dims=("time",), symbol="t"),
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
    ds = dynamics.stability(F, mu, fine, step=step)
    paths = dynamics.flow(F, mu, fine, step=step).points.values[::_FINER]
    kept = ds.isel(time=slice(None, None, _FINER))
    return {
        "log_ratio": log_ratio,
        "constant": kept.constant.values,
        "constant_upper": kept.upper.values,
        "constant_converged": bool(kept.converged.all()),
        "splitting": kept.splitting.values,
        "layer": kept.velocity_constant.values,
        "grown": kept.growth.values,
        "gap": np.abs(paths[:, 0, 0] - paths[:, 1, 0]),
        "points": paths,
        "mass": mu.weights.numpy(),
        "one_layer_bound": bounds.mean_field(gamma, 1.0, radius),
    }


def plan(settings: Settings) -> dict[str, Any]:
    """The arguments of `meanfield.sweep` that make the experiment."""
    coords = {
        "time": np.linspace(0, settings.last, settings.n_times),
        "particle": np.arange(2),
        "feature": np.arange(1),
    }
    names = ("gamma", "last", "n_times", "step")
    return {
        "fn": Task(depth, _VARIABLES, _PARAMETERS, coords),
        "grid": {"radius": settings.radii, "offset": settings.offsets},
        "fixed": {name: getattr(settings, name) for name in names},
        "seed": settings.seed,
        "attrs": {"experiment": "two-dirac-depth"},
    }


def run(settings: Settings | None = None, **how: Any) -> xr.Dataset:
    """Run the sweep; further arguments (store, executor, …) are those of `meanfield.sweep`."""
    return sweep(**plan(settings or Settings()), **how)
