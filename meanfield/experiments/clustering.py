"""Do tokens cluster as they pass through layers?

V = I and A = βI. On the sphere all tokens end in one point, after stages with several clusters
that last the longer the larger β is (Geshkovski, Letrouit, Polyanskiy, Rigollet, arXiv
2312.10794). In the plane they run away like eᵗ; rescaled, e^{−t}x, they gather at the boundary of
a convex polygon (arXiv 2305.05465).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, dynamics, sampling
from meanfield.checks import choice
from meanfield.experiments.experiment import Experiment
from meanfield.experiments.settings import along, over, setting
from meanfield.figures.canvas import figure
from meanfield.figures.curves import stairs
from meanfield.figures.plots import draw_paths, projection
from meanfield.figures.selection import by_level, levels, select, spelled
from meanfield.results import Variable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["EXPERIMENT", "Settings"]


@dataclass(frozen=True)
class Settings:
    """On the sphere S² the flow is projected; the plane R² is drawn as e^{−t}x."""

    spaces: tuple[str, ...] = over("space", ("sphere", "plane"), "where the particles live")
    betas: tuple[float, ...] = over(
        "beta", (1.0, 4.0, 9.0, 25.0), "inverse temperature β", quick=(1.0, 9.0), symbol="\\beta"
    )
    n_particles: int = along("particle", 100, "particle, uniform or Gaussian at first", quick=40)
    last: float = setting(1e4, "the time at which the sphere's flow ends", quick=300.0)
    last_plane: float = setting(12.0, "that of the plane, where x grows like eᵗ", quick=8.0)
    n_times: int = along("step", 80, "number of the time, on a logarithmic clock", quick=40)
    scale: float = setting(0.02, "atoms joined by steps of this length are a cluster")
    seed: int = setting(0, "seed of the start")


def measure(s: Settings, space: str, beta: float, generator: torch.Generator) -> dict[str, Any]:
    """One flow, looked at on a logarithmic clock."""
    eye = torch.eye(3, dtype=torch.float64)
    F = SelfAttention(AttentionParameters.from_bilinear(beta * eye, eye))
    on_sphere = choice(space, "space", ("sphere", "plane")) == "sphere"
    x = sampling.sphere(s.n_particles, 3, generator=generator)
    if not on_sphere:
        x = torch.randn(s.n_particles, 3, generator=generator, dtype=torch.float64)
        x[:, 2] = 0.0  # attention with A = βI keeps the plane
    last = s.last if on_sphere else s.last_plane
    times = np.append(0, np.geomspace(1e-2, last, s.n_times - 1))
    ds = dynamics.flow(
        F, ParticleMeasure(x), times, method=dynamics.Adaptive("dopri5", 1e-7, 1e-9),
        constraint="sphere" if on_sphere else None, coalesce=1e-7 if on_sphere else 0.0,
        observe={"log_energy": lambda mu: dynamics.log_energy(mu, beta * eye)},
    )  # fmt: skip
    shrink = np.ones_like(times) if on_sphere else np.exp(-times)
    points = ds.points.values * shrink[:, None, None]
    counts = [dynamics.cluster_count(ParticleMeasure(p), s.scale) for p in points]
    kept = {name: ds[name].values for name in ("log_energy", "evaluations")}
    return {"time": times, "points": points, "n_clusters": np.array(counts, float), **kept}


@figure("n_clusters")
def count(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Number of clusters on the sphere against time, for each β."""
    cases = select(ds, space="sphere")
    texts = spelled(levels(cases, "beta"))
    for text, (colour, _, rows) in zip(texts, by_level(cases, "beta"), strict=True):
        label = rf"$\beta$ = {text}"
        stairs(ax, rows, "n_clusters", time=rows.time.isel(case=0), color=colour, label=label)
    ax.set(xscale="log", yscale="log", xlabel="time t", ylabel="number of clusters")
    ax.set_title("Tokens on the sphere: number of clusters")
    return ax


@figure("points")
def paths(ds: xr.Dataset, *, ax: Axes, space: str = "plane") -> Axes:
    """Paths of the particles in two coordinates, and where they end, of the largest β."""
    rows = select(ds, space=space, beta=float(ds.beta.max()))
    points = rows.isel(case=0).points.values
    draw_paths(ax, points)
    x = "e^{-t}x" if space == "plane" else "x"
    ax.set(xlabel=rf"${x}_1$", ylabel=rf"${x}_2$")
    where = rf"$\beta$ = {float(rows.beta[0]):.15g}{projection(points)}"
    ax.set_title(f"Tokens on the {space}: {where}")
    return ax


EXPERIMENT = Experiment(
    measure,
    Settings(),
    [
        Variable("time", "time t", dims=("step",), symbol="t"),
        Variable(
            "points", "particles; in the plane e^{−t}x", dims=("step", "particle", "feature")
        ),
        Variable("n_clusters", "number of clusters", dims=("step",)),
        Variable("log_energy", "log ∬ e^{β⟨x,y⟩} dμ dμ", dims=("step",)),
        Variable("evaluations", "evaluations of the velocity", dims=("step",), dtype="int64"),
    ],
    coords={Variable("feature", "coordinate"): range(3)},
    figures={"count": count} | {one: partial(paths, space=one) for one in ("sphere", "plane")},
)
