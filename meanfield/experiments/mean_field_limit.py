"""How many tokens make a mean field?

n samples of the uniform measure of S^{d−1} flow beside very many. W₂ between the two starts falls
like n^{−1/d'} with d' = d − 1 (n^{−1/2} for d' = 1), and the flow keeps that slope; linear
functionals, such as the mean, have n^{−1/2} (Chen, Lin, Liu, Rigollet, arXiv 2605.16747).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr

from meanfield import dynamics, sampling
from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.experiments.experiment import Experiment
from meanfield.experiments.settings import setting
from meanfield.figures import animate_particles
from meanfield.figures.canvas import figure
from meanfield.figures.curves import curve
from meanfield.figures.selection import by_level
from meanfield.measures import ParticleMeasure
from meanfield.results import Variable
from meanfield.transport import solve_w2

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["EXPERIMENT", "Settings"]


_FRAMES = 21  # times at which samples are kept, for the animation


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over."""

    n_particles: tuple[int, ...] = setting(
        (16, 32, 64, 128, 256, 512), "numbers of samples n", quick=(16, 64)
    )
    n_many: int = setting(2048, "number of samples that stand for the limit", quick=256)
    repetitions: int = setting(5, "draws for each n", quick=2)
    dims: tuple[int, ...] = setting((3, 5), "dimensions d; the sphere is S^{d−1}", quick=(3,))
    beta: float = setting(2.0, "A = βB with a fixed random B of norm 1, V = I")
    times: tuple[float, ...] = setting(
        (0.0, 1.0, 2.0), "depths that are looked at", quick=(0.0, 1.0)
    )
    step: float = setting(0.1, "step of RK4")
    seed: int = setting(0, "seed of the draws")


_PARAMETERS = (
    Variable("dim", "dimension d; the sphere is S^{d−1}"),
    Variable("n_particles", "number of samples n"),
    Variable("repetition", "number of the draw"),
    Variable("time", "time t", symbol="t"),
    Variable("frame", "time of the samples kept", symbol="t"),
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
    del repetition  # the generator of the case depends on it
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
            method="rk4",
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


@figure("w2", "mean_error")
def slopes(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """W₂ and the gap of the means between n samples and many, against n."""
    for colour, dim, rows in by_level(ds, "dim"):
        mean = rows.groupby("n_particles").mean()
        # Not round: those follow the colours.
        for k, mark in ((0, "v"), (-1, "s")):
            at, when = mean.isel(time=k), f"d = {dim}, t = {float(ds.time[k]):g}"
            label = f"W₂, {when}: {_slope(at, 'w2')}"
            curve(ax, at, "n_particles", "w2", f"{mark}-", color=colour, label=label)
            hollow: Any = {"color": colour, "fillstyle": "none"}
            hollow["label"] = f"means, {when}: {_slope(at, 'mean_error')}"
            curve(ax, at, "n_particles", "mean_error", f"{mark}--", **hollow)
    ax.set(xscale="log", yscale="log", xlabel="samples n", ylabel="distance to many samples")
    ax.set_title("Distance of n samples to many, at the start and in depth")
    return ax


def _slope(rows: xr.Dataset, name: str) -> str:
    n, y = rows.n_particles.values, rows[name].values
    if len(n) < 2:
        return "one n"
    return rf"$n^{{{np.polyfit(np.log(n), np.log(y), 1)[0]:.2f}}}$"


def _shown(s: Settings) -> dict[str, int]:
    """How much of the samples is kept for the animation."""
    return {"n_shown": min(s.n_particles), "n_features": min(3, *s.dims)}


EXPERIMENT = Experiment(
    distances,
    Settings(),
    grid=lambda s: {
        "dim": s.dims,
        "n_particles": s.n_particles,
        "repetition": range(s.repetitions),
    },
    variables=_VARIABLES,
    parameters=_PARAMETERS,
    coords=lambda s: {
        "time": np.array(s.times),
        "frame": _frames(s.times),
        "particle": np.arange(_shown(s)["n_shown"]),
        "feature": np.arange(_shown(s)["n_features"]),
    },
    derived=_shown,
    figures={"slopes": slopes},
    animations={"samples": animate_particles},
)
