"""How many tokens make a mean field?

n samples of the uniform measure of S^{d−1} flow beside very many. W₂ between the two starts falls
like n^{−1/d'} with d' = d − 1 (n^{−1/2} for d' = 1), and the flow keeps that slope; linear
functionals, such as the mean, have n^{−1/2} (Chen, Lin, Liu, Rigollet, arXiv 2605.16747).
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
from meanfield.transport import solve_w2

__all__ = ["ANIMATIONS", "FIGURES", "QUICK", "Settings", "distances", "plan", "run"]

# File name of each figure -> function of `meanfield.figures` and its arguments.
FIGURES: dict[str, tuple[str, dict[str, Any]]] = {"slopes": ("plot_mean_field_limit", {})}
ANIMATIONS: dict[str, tuple[str, dict[str, Any]]] = {"samples": ("animate_particles", {})}

_FRAMES = 21  # times at which samples are kept, for the animation


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over; every field can be set from the command line.

    Attributes:
        n_particles: n.
        n_many: number of samples that stand for the limit.
        repetitions: draws for each n.
        dims: d; the sphere is S^{d−1}.
        beta: A = βB with a fixed random B of norm 1, V = I.
        times: depths that are looked at.
        step: of RK4.
        seed: of the draws.
    """

    n_particles: tuple[int, ...] = (16, 32, 64, 128, 256, 512)
    n_many: int = 2048
    repetitions: int = 5
    dims: tuple[int, ...] = (3, 5)
    beta: float = 2.0
    times: tuple[float, ...] = (0.0, 1.0, 2.0)
    step: float = 0.1
    seed: int = 0


QUICK = Settings(n_particles=(16, 64), n_many=256, repetitions=2, dims=(3,), times=(0.0, 1.0))

_PARAMETERS = (
    Variable("dim", "dimension d; the sphere is S^{d−1}", dtype="int64"),
    Variable("n_particles", "number of samples n", dtype="int64"),
    Variable("repetition", "number of the draw", dtype="int64"),
    Variable("time", "time t", dims=("time",), symbol="t"),
    Variable("frame", "time of the samples kept", dims=("frame",), symbol="t"),
)
_VARIABLES = (
    Variable("w2", "W₂ between n samples and many", dims=("time",)),
    Variable("w2_lower", "W₂ is at least this", dims=("time",)),
    Variable("w2_upper", "W₂ is at most this", dims=("time",)),
    Variable("mean_error", "distance of the means", dims=("time",)),
    Variable("points", "some samples", dims=("frame", "particle", "feature")),
)


def distances(
    dim: int,
    n_particles: int,
    repetition: int,
    *,
    n_many: int,
    beta: float,
    times: tuple[float, ...],
    step: float,
    n_shown: int,
    n_features: int,
    generator: torch.Generator,
) -> dict[str, Any]:
    """n samples and many, independent, through the same layers."""
    del repetition  # it is in the generator
    fixed = torch.Generator().manual_seed(dim)
    B = torch.randn(dim, dim, generator=fixed, dtype=torch.float64)
    A = beta * B / torch.linalg.matrix_norm(B, 2)
    eye = torch.eye(dim, dtype=torch.float64)
    F = SelfAttention(AttentionParameters.from_bilinear(A, eye))
    frames = _frames(times)
    every = np.union1d(times, frames)
    few, many = (
        dynamics.flow(
            F,
            ParticleMeasure(sampling.sphere(n, dim, generator=generator)),
            when,
            step=step,
            constraint="sphere",
        )
        for n, when in ((n_particles, every), (n_many, np.array(times)))
    )
    rows = []
    for k in range(len(times)):
        at = int(np.searchsorted(every, times[k]))
        mu, nu = dynamics.measure_at(few, at), dynamics.measure_at(many, k)
        found = solve_w2(mu, nu, rtol=1e-4)
        gap = torch.linalg.vector_norm(mu.mean() - nu.mean())
        rows.append([float(x) for x in (found.value, found.lower, found.upper, gap)])
    columns = np.array(rows).T
    points = few.points.values[np.searchsorted(every, frames), :n_shown, :n_features]
    names = ("w2", "w2_lower", "w2_upper", "mean_error")
    return dict(zip(names, columns, strict=True)) | {"points": points}


def _frames(times: tuple[float, ...]) -> np.ndarray:
    return np.linspace(0, max(times), _FRAMES)


def plan(settings: Settings) -> dict[str, Any]:
    """The arguments of `meanfield.sweep` that make the experiment."""
    n_shown, n_features = min(settings.n_particles), min(3, *settings.dims)
    coords = {
        "time": np.array(settings.times),
        "frame": _frames(settings.times),
        "particle": np.arange(n_shown),
        "feature": np.arange(n_features),
    }
    names = ("n_many", "beta", "times", "step")
    return {
        "fn": Task(distances, _VARIABLES, _PARAMETERS, coords),
        "grid": {
            "dim": settings.dims,
            "n_particles": settings.n_particles,
            "repetition": range(settings.repetitions),
        },
        "fixed": {name: getattr(settings, name) for name in names}
        | {"n_shown": n_shown, "n_features": n_features},
        "seed": settings.seed,
        "attrs": {"experiment": "mean-field-limit"},
    }


def run(settings: Settings | None = None, **how: Any) -> xr.Dataset:
    """Run the sweep; further arguments (store, executor, …) are those of `meanfield.sweep`."""
    return sweep(**plan(settings or Settings()), **how)
