"""Do tokens cluster as they pass through layers?

V = I and A = βI. On the sphere all tokens end in one point, after stages with several clusters
that last the longer the larger β is (Geshkovski, Letrouit, Polyanskiy, Rigollet, arXiv
2312.10794). In the plane they run away like eᵗ; rescaled, e^{−t}x, they gather at the boundary of
a convex polygon (arXiv 2305.05465).
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

__all__ = ["ANIMATIONS", "FIGURES", "QUICK", "Settings", "plan", "run", "through_depth"]

# File name of each figure -> function of `meanfield.figures` and its arguments.
FIGURES: dict[str, tuple[str, dict[str, Any]]] = {
    "count": ("plot_cluster_count", {}),
    "sphere": ("plot_particle_paths", {"space": "sphere"}),
    "plane": ("plot_particle_paths", {"space": "plane"}),
}
ANIMATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "sphere": ("animate_particles", {"space": "sphere"}),
    "plane": ("animate_particles", {"space": "plane"}),
}


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over; every field can be set from the command line.

    Attributes:
        spaces: "sphere" (S², the tangent projection) and "plane" (R², drawn as e^{−t}x).
        betas: β.
        n_particles: n, uniform on the sphere, or Gaussian in the plane.
        last: the time at which the sphere's flow ends; the plane's ends at `last_plane`.
        last_plane: the same in the plane, where x grows like eᵗ.
        n_times: how many times are kept, on a logarithmic clock.
        scale: atoms joined by steps of this length are a cluster.
        seed: of the start.
    """

    spaces: tuple[str, ...] = ("sphere", "plane")
    betas: tuple[float, ...] = (1.0, 4.0, 9.0, 25.0)
    n_particles: int = 100
    last: float = 1e4
    last_plane: float = 12.0
    n_times: int = 80
    scale: float = 0.02
    seed: int = 0


QUICK = Settings(betas=(1.0, 9.0), n_particles=40, last=300.0, last_plane=8.0, n_times=40)

_PARAMETERS = (
    Variable("space", "where the particles live", dtype="str"),
    Variable("beta", "inverse temperature β", symbol="\\beta"),
    Variable("step", "number of the time", dims=("step",), dtype="int64"),
)
_VARIABLES = (
    Variable("time", "time t", dims=("step",), symbol="t"),
    Variable("points", "particles; in the plane e^{−t}x", dims=("step", "particle", "feature")),
    Variable("n_clusters", "number of clusters", dims=("step",)),
    Variable("log_energy", "log ∬ e^{β⟨x,y⟩} dμ dμ", dims=("step",)),
    Variable("evaluations", "evaluations of the velocity", dims=("step",), dtype="int64"),
)


def through_depth(
    space: str,
    beta: float,
    *,
    n_particles: int,
    last: float,
    last_plane: float,
    n_times: int,
    scale: float,
    generator: torch.Generator,
) -> dict[str, Any]:
    """One flow, looked at on a logarithmic clock."""
    eye = torch.eye(3, dtype=torch.float64)
    F = SelfAttention(AttentionParameters.from_bilinear(beta * eye, eye))
    on_sphere = space == "sphere"
    x = sampling.sphere(n_particles, 3, generator=generator)
    if not on_sphere:
        x = torch.randn(n_particles, 3, generator=generator, dtype=torch.float64)
        x[:, 2] = 0.0  # attention with A = βI keeps the plane
    times = dynamics.log_clock(1e-2, last if on_sphere else last_plane, n_times - 1)
    ds = dynamics.flow(
        F,
        ParticleMeasure(x),
        times,
        method=dynamics.Adaptive("dopri5", 1e-7, 1e-9),
        constraint="sphere" if on_sphere else None,
        coalesce=1e-7 if on_sphere else 0.0,
        observe={"log_energy": lambda mu: dynamics.log_energy(mu, beta * eye)},
    )
    shrink = np.ones_like(times) if on_sphere else np.exp(-times)
    points = ds.points.values * shrink[:, None, None]
    counts = [dynamics.cluster_count(ParticleMeasure(p), scale) for p in points]
    return {
        "time": times,
        "points": points,
        "n_clusters": np.array(counts, float),
        "log_energy": ds.log_energy.values,
        "evaluations": ds.evaluations.values,
    }


def plan(settings: Settings) -> dict[str, Any]:
    """The arguments of `meanfield.sweep` that make the experiment."""
    coords = {
        "step": np.arange(settings.n_times),
        "particle": np.arange(settings.n_particles),
        "feature": np.arange(3),
    }
    names = ("n_particles", "last", "last_plane", "n_times", "scale")
    return {
        "fn": Task(through_depth, _VARIABLES, _PARAMETERS, coords),
        "grid": {"space": settings.spaces, "beta": settings.betas},
        "fixed": {name: getattr(settings, name) for name in names},
        "seed": settings.seed,
        "attrs": {"experiment": "clustering"},
    }


def run(settings: Settings | None = None, **how: Any) -> xr.Dataset:
    """Run the sweep; further arguments (store, executor, …) are those of `meanfield.sweep`."""
    return sweep(**plan(settings or Settings()), **how)
