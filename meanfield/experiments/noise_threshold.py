"""How much noise keeps tokens from clustering?

dX = K P_X ∫ e^{β⟨X,y⟩} y dμ(y) dt + P_X∘dW on the sphere. The uniform measure is stable below
K_# = β^{d/2}/(2^{d/2} Γ(d/2) I_{d/2}(β)) (Mun, Rosenzweig, arXiv 2606.05140); above it the mean
|∫x dμ| is no longer 0. For β below some β_* it leaves 0 continuously, above with a jump.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xarray as xr

from meanfield import dynamics, sampling
from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.attention.normalizations import exponential
from meanfield.dynamics import reduced
from meanfield.measures import ParticleMeasure
from meanfield.results import Variable
from meanfield.sweeps import Task, sweep

__all__ = ["ANIMATIONS", "FIGURES", "QUICK", "Settings", "order", "plan", "run"]

# File name of each figure -> function of `meanfield.figures` and its arguments.
FIGURES: dict[str, tuple[str, dict[str, Any]]] = {"order": ("plot_noise_threshold", {})}
ANIMATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "above": ("animate_particles", {"dim": 2, "ratio": 2.0}),
    "below": ("animate_particles", {"dim": 2, "ratio": 0.5}),
}

_SHOWN = 100  # particles that are kept, for the animation
_TIMES = 81


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over; every field can be set from the command line.

    Attributes:
        dims: d; the sphere is S^{d−1}.
        betas: β.
        ratios: K/K_#.
        n_particles: n.
        last: the last time; the order is averaged over the second half.
        step: of Euler–Maruyama.
        seed: of start and noise.
    """

    dims: tuple[int, ...] = (2, 3)
    betas: tuple[float, ...] = (0.5, 2.0)
    ratios: tuple[float, ...] = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)
    n_particles: int = 400
    last: float = 30.0
    step: float = 0.05
    seed: int = 0


QUICK = Settings(dims=(2,), betas=(0.5,), ratios=(0.5, 1.0, 2.0), n_particles=300, last=20.0)

_PARAMETERS = (
    Variable("dim", "dimension d; the sphere is S^{d−1}", dtype="int64"),
    Variable("beta", "inverse temperature β", symbol="\\beta"),
    Variable("ratio", "coupling over the critical one, K/K_#"),
    Variable("time", "time t", dims=("time",), symbol="t"),
)
_VARIABLES = (
    Variable("order", "|∫x dμ|, averaged over the second half of the flow"),
    Variable("order_spread", "standard deviation of it in time"),
    Variable("expected", "|∫x dμ| of the stationary measure that is not uniform; 0 if none"),
    Variable("critical", "critical coupling K_#"),
    Variable("points", "some particles", dims=("time", "particle", "feature")),
)


def order(
    dim: int,
    beta: float,
    ratio: float,
    *,
    n_particles: int,
    last: float,
    step: float,
    most_dim: int,
    generator: torch.Generator,
) -> dict[str, Any]:
    """The order of one noisy flow that starts half aligned."""
    critical = reduced.critical_coupling(dim, beta)
    eye = torch.eye(dim, dtype=torch.float64)
    parameters = AttentionParameters.from_bilinear(beta * eye, ratio * critical * eye)
    F = SelfAttention(parameters, normalization=exponential)
    x = sampling.sphere(n_particles, dim, generator=generator)
    # From an aligned start: a jump of the order is then found where it ceases to exist.
    x = torch.nn.functional.normalize(x + 2 * eye[0], dim=-1)
    ds = dynamics.flow(
        F,
        ParticleMeasure(x),
        np.linspace(0, last, _TIMES),
        method="euler",
        step=step,
        constraint="sphere",
        noise=dynamics.Noise(0.5, generator),
        observe={"order": lambda mu: torch.linalg.vector_norm(mu.mean())},
    )
    late = ds["order"].values[_TIMES // 2 :]
    points = ds.points.values[:, :_SHOWN]
    return {
        "order": late.mean(),
        "order_spread": late.std(),
        "expected": reduced.aligned_order(dim, beta, ratio * critical),
        "critical": critical,
        "points": np.pad(points, ((0, 0), (0, 0), (0, most_dim - dim))),
    }


def plan(settings: Settings) -> dict[str, Any]:
    """The arguments of `meanfield.sweep` that make the experiment."""
    coords = {
        "time": np.linspace(0, settings.last, _TIMES),
        "particle": np.arange(min(_SHOWN, settings.n_particles)),
        "feature": np.arange(max(settings.dims)),
    }
    names = ("n_particles", "last", "step")
    return {
        "fn": Task(order, _VARIABLES, _PARAMETERS, coords),
        "grid": {"dim": settings.dims, "beta": settings.betas, "ratio": settings.ratios},
        "fixed": {name: getattr(settings, name) for name in names}
        | {"most_dim": max(settings.dims)},
        "seed": settings.seed,
        "attrs": {"experiment": "noise-threshold"},
    }


def run(settings: Settings | None = None, **how: Any) -> xr.Dataset:
    """Run the sweep; further arguments (store, executor, …) are those of `meanfield.sweep`."""
    return sweep(**plan(settings or Settings()), **how)
