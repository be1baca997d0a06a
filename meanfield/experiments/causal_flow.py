"""Where do tokens go when none sees those after it?

Masked attention on the sphere with V = I. The first token never moves, and every token tends to
it; before that, tokens gather around leaders, the first tokens to stand free of all earlier ones
by about β^{−1/2} (Karagodin, Polyanskiy, Rigollet, arXiv 2411.04990).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xarray as xr

from meanfield import dynamics, sampling
from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.measures import ParticleMeasure
from meanfield.results import Variable
from meanfield.sweeps import Task, sweep

__all__ = ["ANIMATIONS", "FIGURES", "QUICK", "Settings", "masked_flow", "plan", "run"]

# File name of each figure -> function of `meanfield.figures` and its arguments.
FIGURES: dict[str, tuple[str, dict[str, Any]]] = {
    "distance": ("plot_distance_to_first", {}),
    "leaders": ("plot_masked_clusters", {}),
}
ANIMATIONS: dict[str, tuple[str, dict[str, Any]]] = {"masked": ("animate_particles", {})}


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over; every field can be set from the command line.

    Attributes:
        betas: β, with A = βI.
        n_tokens: n, at random places of the circle.
        repetitions: starts for each β.
        last: the last time.
        n_times: how many times are kept.
        seed: of the starts.
    """

    betas: tuple[float, ...] = (1.0, 9.0, 36.0, 144.0)
    n_tokens: int = 100
    repetitions: int = 3
    last: float = 1e4
    n_times: int = 100
    seed: int = 0


QUICK = Settings(betas=(1.0, 36.0), n_tokens=40, repetitions=1, last=300.0, n_times=40)

_PARAMETERS = (
    Variable("beta", "inverse temperature β", symbol="\\beta"),
    Variable("repetition", "number of the start", dtype="int64"),
    Variable("time", "time t", dims=("time",), symbol="t"),
    Variable("particle", "number of the token", dims=("particle",), dtype="int64"),
)
_VARIABLES = (
    Variable("points", "tokens on the circle", dims=("time", "particle", "feature")),
    Variable("distance", "distance to the first token", dims=("time", "particle")),
    Variable("n_clusters", "number of clusters", dims=("time",)),
    Variable("leaders", "tokens farther than β^{−1/2} from all earlier leaders"),
    Variable("moved", "how far the first token has moved", dims=("time",)),
)


def masked_flow(
    beta: float,
    repetition: int,
    *,
    n_tokens: int,
    last: float,
    n_times: int,
    generator: torch.Generator,
) -> dict[str, Any]:
    """One masked flow on the circle."""
    del repetition  # it is in the generator
    eye = torch.eye(2, dtype=torch.float64)
    F = SelfAttention(AttentionParameters.from_bilinear(beta * eye, eye), causal=True)
    x = sampling.sphere(n_tokens, 2, generator=generator)
    ds = dynamics.flow(
        F,
        ParticleMeasure.from_sequence(x),
        dynamics.log_clock(1e-1, last, n_times - 1),
        method=dynamics.Adaptive("dopri5", 1e-6, 1e-9),
        constraint="sphere",
        observe={"n_clusters": lambda mu: dynamics.cluster_count(mu, 0.02)},
    )
    points = ds.points.values
    return {
        "points": points,
        "distance": np.linalg.norm(points - points[:, :1], axis=-1),
        "n_clusters": ds.n_clusters.values,
        "leaders": float(_parked(x.numpy(), beta**-0.5)),
        "moved": np.linalg.norm(points[:, 0] - points[0, 0], axis=-1),
    }


def _parked(x: np.ndarray, distance: float) -> int:
    """Rényi's parking: how many points stand farther than this from those parked before."""
    parked: list[np.ndarray] = []
    for point in x:
        if all(np.linalg.norm(point - other) > distance for other in parked):
            parked.append(point)
    return len(parked)


def plan(settings: Settings) -> dict[str, Any]:
    """The arguments of `meanfield.sweep` that make the experiment."""
    coords = {
        "time": dynamics.log_clock(1e-1, settings.last, settings.n_times - 1),
        "particle": np.arange(settings.n_tokens),
        "feature": np.arange(2),
    }
    names = ("n_tokens", "last", "n_times")
    return {
        "fn": Task(masked_flow, _VARIABLES, _PARAMETERS, coords),
        "grid": {"beta": settings.betas, "repetition": range(settings.repetitions)},
        "fixed": {name: getattr(settings, name) for name in names},
        "seed": settings.seed,
        "attrs": {"experiment": "causal-flow"},
    }


def run(settings: Settings | None = None, **how: Any) -> xr.Dataset:
    """Run the sweep; further arguments (store, executor, …) are those of `meanfield.sweep`."""
    return sweep(**plan(settings or Settings()), **how)
