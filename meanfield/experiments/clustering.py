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

from meanfield import dynamics, sampling
from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.experiments.experiment import Experiment
from meanfield.experiments.settings import setting
from meanfield.figures import animate_particles
from meanfield.figures.canvas import figure
from meanfield.figures.curves import stairs
from meanfield.figures.particles import draw_paths, projection
from meanfield.figures.selection import by_level, select
from meanfield.measures import ParticleMeasure
from meanfield.results import Variable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["EXPERIMENT", "Settings"]


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over."""

    spaces: tuple[str, ...] = setting(
        ("sphere", "plane"),
        "'sphere' (S², the tangent projection) and 'plane' (R², drawn as e^{−t}x)",
    )
    betas: tuple[float, ...] = setting(
        (1.0, 4.0, 9.0, 25.0), "inverse temperatures β", quick=(1.0, 9.0)
    )
    n_particles: int = setting(
        100, "number of particles n, uniform on the sphere, or Gaussian in the plane", quick=40
    )
    last: float = setting(
        1e4,
        "the time at which the sphere's flow ends; the plane's ends at `last_plane`",
        quick=300.0,
    )
    last_plane: float = setting(
        12.0, "the time at which the plane's flow ends; there x grows like eᵗ", quick=8.0
    )
    n_times: int = setting(80, "number of times that are kept, on a logarithmic clock", quick=40)
    scale: float = setting(0.02, "atoms joined by steps of this length are a cluster")
    seed: int = setting(0, "seed of the start")


_PARAMETERS = (
    Variable("space", "where the particles live"),
    Variable("beta", "inverse temperature β", symbol="\\beta"),
    Variable("step", "number of the time"),
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


@figure("n_clusters")
def cluster_count(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Number of clusters on the sphere against time, for each β."""
    for colour, beta, rows in by_level(select(ds, space="sphere"), "beta"):
        label = rf"$\beta$ = {beta:g}"
        stairs(ax, rows, "n_clusters", time=rows.time.isel(case=0), color=colour, label=label)
    ax.set(xscale="log", yscale="log", xlabel="time t", ylabel="number of clusters")
    ax.set_title("Tokens on the sphere: number of clusters")
    return ax


@figure("points")
def paths(ds: xr.Dataset, *, ax: Axes, space: str = "plane") -> Axes:
    """Paths of the particles in the first two coordinates, and where they end.

    Of the largest β.

    Args:
        ds: of this experiment.
        ax: where to draw; a new figure if None.
        space: "sphere" or "plane".
    """
    from matplotlib.patches import Circle

    rows = select(ds, space=space)
    beta = float(rows.beta.max())
    points = select(rows, beta=beta).isel(case=0).points.values
    draw_paths(ax, points)
    if space == "sphere":
        ax.add_patch(Circle((0, 0), 1, fill=False, color="0.4", linewidth=0.8))
    name = "e^{-t}x" if space == "plane" else "x"
    ax.set(xlabel=rf"${name}_1$", ylabel=rf"${name}_2$")
    what = "in the plane, rescaled" if space == "plane" else "on the sphere"
    ax.set_title(rf"Tokens {what}{projection(points)} ($\beta$ = {beta:g})")
    return ax


_SPACES = ("sphere", "plane")
EXPERIMENT = Experiment(
    through_depth,
    Settings(),
    grid=lambda s: {"space": s.spaces, "beta": s.betas},
    variables=_VARIABLES,
    parameters=_PARAMETERS,
    coords=lambda s: {
        "step": np.arange(s.n_times),
        "particle": np.arange(s.n_particles),
        "feature": np.arange(3),
    },
    figures={"count": cluster_count} | {space: partial(paths, space=space) for space in _SPACES},
    animations={space: partial(animate_particles, space=space) for space in _SPACES},
)
