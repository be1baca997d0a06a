"""How fast do tokens collapse, depending on where the network normalises?

Equiangular orthonormal tokens, V = I, A = βI: Post-LN and nGPT collapse like e^{−2t}, Pre-LN like
1/t², for its radius grows and its angles move ever slower (Karagodin, Ge, Polyanskiy, Rigollet,
arXiv 2510.22026). Beside the simulation stands the reduced equation; random starts on a sphere of
high dimension follow it too.
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
from meanfield.dynamics import reduced
from meanfield.experiments.experiment import Experiment
from meanfield.experiments.settings import setting
from meanfield.figures import animate_particles
from meanfield.figures.canvas import figure
from meanfield.figures.curves import curve, formula
from meanfield.figures.selection import by_level, select
from meanfield.measures import ParticleMeasure
from meanfield.results import Variable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["EXPERIMENT", "Settings"]


_FIRST = 0.01  # the second time of the logarithmic clock


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over."""

    placements: tuple[str, ...] = setting(
        ("post", "pre", "peri", "ngpt"),
        "where the network normalises: 'post', 'pre', 'peri' or 'ngpt'",
    )
    betas: tuple[float, ...] = setting((1.0, 4.0), "inverse temperatures β", quick=(1.0,))
    n_tokens: int = setting(32, "number of tokens n", quick=16)
    dim: int = setting(
        1024, "dimension of the random start, which is nearly orthonormal", quick=256
    )
    last: float = setting(300.0, "last time", quick=100.0)
    n_times: int = setting(60, "number of times that are kept", quick=30)
    seed: int = setting(0, "seed of the random start")


_PARAMETERS = (
    Variable("placement", "where the network normalises"),
    Variable("beta", "inverse temperature β", symbol="\\beta"),
    Variable("time", "time t", symbol="t"),
)
_VARIABLES = (
    Variable("gap", "1 − cosine of two orthonormal tokens", dims=("time",)),
    Variable("gap_random", "1 − mean cosine of random tokens", dims=("time",)),
    Variable("gap_reduced", "1 − ρ of the reduced equation", dims=("time",)),
    Variable(
        "points",
        "orthonormal tokens over their norms, seen in a plane",
        dims=("time", "particle", "feature"),
    ),
    Variable("radius", "norm of the orthonormal tokens", dims=("time",)),
    Variable("radius_reduced", "norm in the reduced equation", dims=("time",)),
)


def collapse(
    placement: str,
    beta: float,
    *,
    n_tokens: int,
    dim: int,
    last: float,
    n_times: int,
    generator: torch.Generator,
) -> dict[str, Any]:
    """The same network on an orthonormal and on a random start."""
    times = dynamics.log_clock(_FIRST, last, n_times - 1)
    exact = torch.eye(n_tokens, dtype=torch.float64)
    F = SelfAttention(AttentionParameters.from_bilinear(beta * exact, exact))
    drawn = sampling.sphere(n_tokens, dim, generator=generator)
    # The flow stays in the span of its start, so n coordinates hold a start of R^d.
    basis = torch.linalg.qr(drawn.mT)[0]
    gaps = []
    for start in (exact, drawn @ basis):
        velocity, mu, constraint = dynamics.placed(F, ParticleMeasure(start), placement)
        ds = dynamics.flow(
            velocity,
            mu,
            times,
            method=dynamics.Adaptive("dopri5", 1e-8, 1e-11),
            constraint=constraint,
        )
        x = ds.points.values
        r = np.linalg.norm(x, axis=-1)
        gaps.append(_mean_gap(x / r[..., None]))
        if start is exact:
            radius, seen = r.mean(-1), x / r[..., None] @ _ring(n_tokens)
    expected = reduced.equiangular(beta, n_tokens, times, placement=placement)
    return {
        "gap": gaps[0],
        "gap_random": gaps[1],
        "gap_reduced": 1 - expected.cosine,
        "points": seen,
        "radius": radius,
        "radius_reduced": expected.radius,
    }


def _ring(n: int) -> np.ndarray:
    """The plane in which orthonormal tokens stand evenly on a circle, (n, 2)."""
    phi = 2 * np.pi * np.arange(n) / n
    return np.stack([np.cos(phi), np.sin(phi)], -1)


def _mean_gap(u: np.ndarray) -> np.ndarray:
    """Mean of 1 − ⟨uᵢ, uⱼ⟩ over pairs, from differences: 1 − cosine would lose its digits."""
    n = u.shape[-2]
    squares = ((u - u.mean(-2, keepdims=True)) ** 2).sum((-2, -1))
    return squares / (n - 1)


@figure("gap_reduced", "gap", "gap_random")
def rates(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """1 − cosine against time, for each place of the norm, beside 1/t².

    Of the smallest β.
    """
    rows = select(ds, beta=float(ds.beta.min()))
    for colour, name, cases in by_level(rows, "placement"):
        one = cases.isel(case=0)
        curve(ax, one, "time", "gap_reduced", "-", color=colour, label=name)
        curve(ax, one, "time", "gap", "o", color=colour, markersize=3)
        curve(ax, one, "time", "gap_random", "x", color=colour, markersize=4)
    ax.plot([], [], "ko", markersize=3, label="marks: orthonormal start")
    ax.plot([], [], "kx", markersize=4, label="crosses: random start")
    ax.plot([], [], "k-", label="reduced equation")
    ax.set(xscale="log", yscale="log", ylim=(1e-8, 2), xlabel="time t", ylabel="1 − cosine")
    late = (10, max(10, float(ds.time[-1])))
    formula(ax, lambda t: 5 / t**2, late, linewidth=1.4, label=r"$\propto t^{-2}$")
    ax.set_title("Collapse of the tokens, by the place of the norm")
    return ax


EXPERIMENT = Experiment(
    collapse,
    Settings(),
    grid=lambda s: {"placement": s.placements, "beta": s.betas},
    variables=_VARIABLES,
    parameters=_PARAMETERS,
    coords=lambda s: {
        "time": dynamics.log_clock(_FIRST, s.last, s.n_times - 1),
        "particle": np.arange(s.n_tokens),
        "feature": np.arange(2),
    },
    figures={"collapse": rates},
    animations={
        placement: partial(animate_particles, placement=placement) for placement in ("post", "pre")
    },
)
