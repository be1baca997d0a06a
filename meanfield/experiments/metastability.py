"""How many clusters first, and for how long?

On the circle, V = I, A = βI. Of a nearly uniform start the mode cos kφ grows at the rate
k²I_k(β)/(βI₀(β)); the fastest, k ~ √β, sets the number of clusters of the first metastable stage
(Bruno, Pasqualotto, Agazzi, arXiv 2410.23228). Then clusters meet one pair after the other, at
times that grow exponentially in β: a staircase on a logarithmic clock (Geshkovski, Koubbi,
Polyanskiy, Rigollet, arXiv 2410.06833).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xarray as xr

from meanfield import dynamics
from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.dynamics import reduced
from meanfield.measures import ParticleMeasure
from meanfield.results import Variable
from meanfield.sweeps import Task, sweep

__all__ = ["ANIMATIONS", "FIGURES", "QUICK", "Settings", "dominant_mode", "plan", "run", "stairs"]

# File name of each figure -> function of `meanfield.figures` and its arguments.
FIGURES: dict[str, tuple[str, dict[str, Any]]] = {
    "staircase": ("plot_staircase", {}),
    "first-mode": ("plot_first_mode", {}),
}
ANIMATIONS: dict[str, tuple[str, dict[str, Any]]] = {"circle": ("animate_particles", {})}

_GROWN = 0.3  # amplitude at which a mode counts as the one that won; 1 is a perfect comb


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over; every field can be set from the command line.

    Attributes:
        betas: β.
        repetitions: starts for each β.
        n_particles: n, evenly spaced and then displaced.
        noise: standard deviation of the displacement of angles.
        first: the second time of the logarithmic clock.
        last: the last.
        n_times: how many times are kept.
        seed: of the starts.
    """

    betas: tuple[float, ...] = (4.0, 9.0, 16.0, 25.0, 49.0)
    repetitions: int = 3
    n_particles: int = 120
    noise: float = 1e-3
    first: float = 1e-1
    last: float = 1e10
    n_times: int = 120
    seed: int = 0


QUICK = Settings(betas=(4.0, 25.0), repetitions=1, n_particles=80, last=1e6, n_times=80)

_PARAMETERS = (
    Variable("beta", "inverse temperature β", symbol="\\beta"),
    Variable("repetition", "number of the start", dtype="int64"),
    Variable("time", "time t", dims=("time",), symbol="t"),
)
_VARIABLES = (
    Variable("points", "particles on the circle", dims=("time", "particle", "feature")),
    Variable("n_clusters", "number of clusters", dims=("time",)),
    Variable("found_mode", "mode that is largest when one has grown"),
    Variable("first_mode", "k with the largest k² I_k(β)"),
    Variable("evaluations", "evaluations of the velocity", dims=("time",), dtype="int64"),
)


def stairs(
    beta: float,
    repetition: int,
    *,
    n_particles: int,
    noise: float,
    first: float,
    last: float,
    n_times: int,
    generator: torch.Generator,
) -> dict[str, Any]:
    """One flow on the circle from nearly uniform atoms."""
    del repetition  # it is in the generator
    eye = torch.eye(2, dtype=torch.float64)
    F = SelfAttention(AttentionParameters.from_bilinear(beta * eye, eye))
    phi = 2 * torch.pi * torch.arange(n_particles, dtype=torch.float64) / n_particles
    phi = phi + noise * torch.randn(n_particles, generator=generator, dtype=torch.float64)
    times = dynamics.log_clock(first, last, n_times - 1)
    # Half the spacing of the start, at which every atom is a cluster of its own.
    scale = float(torch.pi) / n_particles
    ds = dynamics.flow(
        F,
        ParticleMeasure(torch.stack([phi.cos(), phi.sin()], -1)),
        times,
        method=dynamics.Adaptive("dopri5", 1e-7, 1e-10),
        constraint="sphere",
        coalesce=1e-6,
        observe={"n_clusters": lambda mu: dynamics.cluster_count(mu, scale)},
    )
    return {
        "points": ds.points.values,
        "n_clusters": ds.n_clusters.values,
        "found_mode": dominant_mode(ds.points.values),
        "first_mode": reduced.first_mode(beta),
        "evaluations": ds.evaluations.values,
    }


def dominant_mode(points: np.ndarray, grown: float = _GROWN) -> float:
    """The k of the largest |∫e^{ikφ}dμ| at the first time at which it is `grown`; NaN if never.

    Args:
        points: particles on the circle, (time, particle, 2).
        grown: amplitude.
    """
    phi = np.arctan2(points[..., 1], points[..., 0])
    k = np.arange(1, points.shape[1] // 3)
    for angles in phi:
        amplitude = np.abs(np.exp(1j * k[:, None] * angles).mean(-1))
        if amplitude.max() >= grown:
            return float(k[amplitude.argmax()])
    return float("nan")


def plan(settings: Settings) -> dict[str, Any]:
    """The arguments of `meanfield.sweep` that make the experiment."""
    coords = {
        "time": dynamics.log_clock(settings.first, settings.last, settings.n_times - 1),
        "particle": np.arange(settings.n_particles),
        "feature": np.arange(2),
    }
    names = ("n_particles", "noise", "first", "last", "n_times")
    return {
        "fn": Task(stairs, _VARIABLES, _PARAMETERS, coords),
        "grid": {"beta": settings.betas, "repetition": range(settings.repetitions)},
        "fixed": {name: getattr(settings, name) for name in names},
        "seed": settings.seed,
        "attrs": {"experiment": "metastability"},
    }


def run(settings: Settings | None = None, **how: Any) -> xr.Dataset:
    """Run the sweep; further arguments (store, executor, …) are those of `meanfield.sweep`."""
    return sweep(**plan(settings or Settings()), **how)
