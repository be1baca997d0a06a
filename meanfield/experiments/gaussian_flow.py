"""Does a Gaussian stay one, and does its covariance follow its equation?

For μ = N(m, Σ) softmax attention is affine, Γ(x) = V(m + ΣAx), so the flow stays Gaussian with
Σ̇ = VΣAΣ + (VΣAΣ)ᵀ ([SABP22]); so is L2 attention, with (Σ⁻¹ + KᵀK)⁻¹ in place of the first Σ. n
samples follow it with an error of order n^{−1/2}, as long as ‖A‖‖Σ‖ is of order 1: beyond it
e^{⟨Ax,y⟩} is decided by the few largest samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xarray as xr

from meanfield import dynamics
from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.attention.kernels import dot_product, l2
from meanfield.dynamics import reduced
from meanfield.measures import ParticleMeasure
from meanfield.results import Variable
from meanfield.sweeps import Task, sweep

__all__ = ["ANIMATIONS", "FIGURES", "QUICK", "Settings", "covariances", "plan", "run"]

# File name of each figure -> function of `meanfield.figures` and its arguments.
FIGURES: dict[str, tuple[str, dict[str, Any]]] = {
    "covariance": ("plot_covariance", {}),
    "covariance-l2": ("plot_covariance", {"kernel": "l2"}),
    "error": ("plot_covariance_error", {}),
}
ANIMATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("animate_particles", {"kernel": "softmax"}),
    "l2": ("animate_particles", {"kernel": "l2"}),
}

_A = ((0.5, 0.3, 0.0), (-0.3, -0.4, 0.2), (0.1, 0.0, -0.8))
_V = ((0.7, 0.0, 0.3), (0.0, 0.9, -0.2), (-0.3, 0.2, 0.8))


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over; every field can be set from the command line.

    Attributes:
        kernels: "softmax" (weights e^{⟨Ax,y⟩}) and "l2" (e^{−½|Ax−y|²}).
        n_particles: n, the numbers of samples.
        repetitions: draws for each.
        last: the last time.
        n_times: how many times are kept.
        std: σ of the start N(0, σ²I).
        step: of RK4.
        seed: of the draws.
    """

    kernels: tuple[str, ...] = ("softmax", "l2")
    n_particles: tuple[int, ...] = (30, 100, 300, 1000, 3000)
    repetitions: int = 8
    last: float = 2.0
    n_times: int = 21
    std: float = 0.5
    step: float = 0.1
    seed: int = 0


QUICK = Settings(n_particles=(50, 500), repetitions=2, n_times=6)

_PARAMETERS = (
    Variable("kernel", "which attention", dtype="str"),
    Variable("n_particles", "number of samples n", dtype="int64"),
    Variable("repetition", "number of the draw", dtype="int64"),
    Variable("time", "time t", dims=("time",), symbol="t"),
)
_VARIABLES = (
    Variable("eigenvalues", "eigenvalues of the covariance", dims=("time", "feature")),
    Variable("expected", "eigenvalues of the covariance equation", dims=("time", "feature")),
    Variable("points", "some samples", dims=("time", "particle", "feature")),
    Variable("error", "|covariance − its equation|, over the equation's", dims=("time",)),
)


def covariances(
    kernel: str,
    n_particles: int,
    repetition: int,
    *,
    last: float,
    n_times: int,
    std: float,
    step: float,
    n_shown: int,
    generator: torch.Generator,
) -> dict[str, Any]:
    """One cloud of samples of N(0, σ²I) beside the equation."""
    del repetition  # it is in the generator
    A, V = (torch.tensor(matrix, dtype=torch.float64) for matrix in (_A, _V))
    eye = torch.eye(3, dtype=torch.float64)
    parameters = AttentionParameters(A, eye, V, scale=0.5 if kernel == "l2" else 1.0)
    F = SelfAttention(parameters, kernel=l2 if kernel == "l2" else dot_product)
    times = np.linspace(0, last, n_times)
    x = std * torch.randn(n_particles, 3, generator=generator, dtype=torch.float64)
    mu = ParticleMeasure(x)
    ds = dynamics.flow(F, mu, times, step=step)
    found = torch.stack([dynamics.covariance(dynamics.measure_at(ds, k)) for k in range(n_times)])
    _, expected = reduced.gaussian_moments(
        A, V, torch.zeros_like(eye[0]), std**2 * eye, times, key=eye if kernel == "l2" else None
    )
    error = torch.linalg.matrix_norm(found - expected) / torch.linalg.matrix_norm(expected)
    return {
        "eigenvalues": torch.linalg.eigvalsh(found).numpy(),
        "expected": torch.linalg.eigvalsh(expected).numpy(),
        "error": error.numpy(),
        "points": ds.points.values[:, :n_shown],
    }


def plan(settings: Settings) -> dict[str, Any]:
    """The arguments of `meanfield.sweep` that make the experiment."""
    coords = {
        "time": np.linspace(0, settings.last, settings.n_times),
        "particle": np.arange(min(settings.n_particles)),
        "feature": np.arange(3),
    }
    names = ("last", "n_times", "std", "step")
    return {
        "fn": Task(covariances, _VARIABLES, _PARAMETERS, coords),
        "grid": {
            "kernel": settings.kernels,
            "n_particles": settings.n_particles,
            "repetition": range(settings.repetitions),
        },
        "fixed": {name: getattr(settings, name) for name in names}
        | {"n_shown": min(settings.n_particles)},
        "seed": settings.seed,
        "attrs": {"experiment": "gaussian-flow"},
    }


def run(settings: Settings | None = None, **how: Any) -> xr.Dataset:
    """Run the sweep; further arguments (store, executor, …) are those of `meanfield.sweep`."""
    return sweep(**plan(settings or Settings()), **how)
