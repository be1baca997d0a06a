"""Where do tokens go when none sees those after it?

Masked attention on the sphere with V = I. The first token never moves, and every token tends to
it; before that, tokens gather around leaders, the first tokens to stand free of all earlier ones
by cβ^{−1/2} (Karagodin, Polyanskiy, Rigollet, arXiv 2411.04990). c is not sharp: what attracts
within a time grows with its logarithm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr

from meanfield import dynamics, sampling
from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.checks import to_host
from meanfield.experiments.experiment import Experiment
from meanfield.experiments.settings import setting
from meanfield.figures import animate_particles
from meanfield.figures.canvas import colours, figure
from meanfield.figures.curves import stairs
from meanfield.figures.selection import by_level, select
from meanfield.measures import ParticleMeasure
from meanfield.results import Variable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["EXPERIMENT", "Settings"]


_FIRST = 0.1  # the second time of the logarithmic clock


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over."""

    betas: tuple[float, ...] = setting(
        (1.0, 9.0, 36.0, 144.0), "inverse temperatures β; A = βI", quick=(1.0, 36.0)
    )
    n_tokens: int = setting(100, "number of tokens n, at random places of the circle", quick=40)
    repetitions: int = setting(2, "starts for each β", quick=1)
    parking: float = setting(4.0, "c of the parking distance cβ^{−1/2}")
    last: float = setting(1e3, "last time", quick=300.0)
    n_times: int = setting(80, "number of times that are kept", quick=40)
    seed: int = setting(0, "seed of the starts")


_PARAMETERS = (
    Variable("beta", "inverse temperature β", symbol="\\beta"),
    Variable("repetition", "number of the start"),
    Variable("time", "time t", symbol="t"),
    Variable("particle", "number of the token"),
)
_VARIABLES = (
    Variable("points", "tokens on the circle", dims=("time", "particle", "feature")),
    Variable("distance", "distance to the first token", dims=("time", "particle")),
    Variable("n_clusters", "number of clusters", dims=("time",)),
    Variable("leaders", "tokens farther than the parking distance from all earlier leaders"),
    Variable("parking_distance", "c β^{−1/2}"),
    Variable("moved", "how far the first token has moved", dims=("time",)),
)


def masked_flow(
    beta: float,
    repetition: int,
    *,
    n_tokens: int,
    parking: float,
    last: float,
    n_times: int,
    generator: torch.Generator,
) -> dict[str, Any]:
    """One masked flow on the circle."""
    del repetition  # the generator of the case depends on it
    eye = torch.eye(2, dtype=torch.float64)
    F = SelfAttention(AttentionParameters.from_bilinear(beta * eye, eye), causal=True)
    x = sampling.sphere(n_tokens, 2, generator=generator)
    ds = dynamics.flow(
        F,
        ParticleMeasure.from_sequence(x),
        dynamics.log_clock(_FIRST, last, n_times - 1),
        method=dynamics.Adaptive("dopri5", 1e-6, 1e-9),
        constraint="sphere",
        observe={"n_clusters": lambda mu: dynamics.cluster_count(mu, 0.02)},
    )
    points = ds.points.values
    return {
        "points": points,
        "distance": np.linalg.norm(points - points[:, :1], axis=-1),
        "n_clusters": ds.n_clusters.values,
        "leaders": float(_parked(to_host(x), parking * beta**-0.5)),
        "parking_distance": parking * beta**-0.5,
        "moved": np.linalg.norm(points[:, 0] - points[0, 0], axis=-1),
    }


def _parked(x: np.ndarray, distance: float) -> int:
    """Rényi's parking: how many points stand farther than this from those parked before."""
    parked: list[np.ndarray] = []
    for point in x:
        if all(np.linalg.norm(point - other) > distance for other in parked):
            parked.append(point)
    return len(parked)


@figure("distance")
def distance_to_first(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Distance of each token to the first against time, masked; early tokens are dark.

    Of the smallest β.
    """
    beta = float(ds.beta.min())
    one = select(ds, beta=beta).isel(case=0)
    n = ds.sizes["particle"]
    for colour, k in zip(colours(n - 1), range(1, n), strict=True):
        ax.plot(ds.time[1:], one.distance[1:, k], color=colour, linewidth=0.7)
    ax.set(xscale="log", yscale="log", ylim=(1e-4, 3), xlabel="time t")
    ax.set_ylabel("distance to the first token")
    ax.set_title(rf"Masked: distance to the first token ($\beta$ = {beta:g}; dark: early)")
    return ax


@figure("n_clusters", "leaders")
def clusters(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Number of clusters of masked flows against time, and the leaders of their starts."""
    for colour, beta, rows in by_level(ds, "beta"):
        label = rf"$\beta$ = {beta:g}"
        stairs(ax, rows, "n_clusters", time=ds.time, color=colour, label=label)
        ax.axhline(float(rows.leaders.mean()), color=colour, linestyle=":", linewidth=1)
    c = float((ds.parking_distance * np.sqrt(ds.beta))[0])
    ax.plot([], [], "k:", label=rf"leaders: free by ${c:g}\,\beta^{{-1/2}}$")
    ax.set(xscale="log", yscale="log", xlabel="time t", ylabel="number of clusters")
    ax.set_title("Masked: number of clusters, and of leaders at the start")
    return ax


EXPERIMENT = Experiment(
    masked_flow,
    Settings(),
    grid=lambda s: {"beta": s.betas, "repetition": range(s.repetitions)},
    variables=_VARIABLES,
    parameters=_PARAMETERS,
    coords=lambda s: {
        "time": dynamics.log_clock(_FIRST, s.last, s.n_times - 1),
        "particle": np.arange(s.n_tokens),
        "feature": np.arange(2),
    },
    figures={"distance": distance_to_first, "leaders": clusters},
    animations={"masked": animate_particles},
)
