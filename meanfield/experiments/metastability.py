"""How many clusters first, and for how long?

On the circle, V = I, A = βI. Of a nearly uniform start the mode cos kφ grows at the rate
k²I_k(β)/(βI₀(β)); the fastest, k ~ √β, sets the number of clusters of the first metastable stage
(Bruno, Pasqualotto, Agazzi, arXiv 2410.23228). Then clusters meet one pair after the other, at
times that grow exponentially in β: a staircase on a logarithmic clock (Geshkovski, Koubbi,
Polyanskiy, Rigollet, arXiv 2410.06833).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, dynamics
from meanfield.dynamics import reduced
from meanfield.experiments.experiment import Experiment
from meanfield.experiments.settings import along, over, setting
from meanfield.figures import animate_particles
from meanfield.figures.canvas import figure
from meanfield.figures.curves import formula, stairs
from meanfield.figures.selection import by_level
from meanfield.results import Variable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["EXPERIMENT", "Settings"]

_GROWN = 0.3  # amplitude at which a mode counts as the one that won; 1 is a perfect comb


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over."""

    betas: tuple[float, ...] = over(
        "beta",
        (4.0, 9.0, 16.0, 25.0, 49.0),
        "inverse temperature β",
        quick=(4.0, 25.0),
        symbol="\\beta",
    )
    repetitions: int = over("repetition", 3, "number of the start", quick=1)
    n_particles: int = along("particle", 120, "particle, evenly spaced and displaced", quick=80)
    noise: float = setting(1e-3, "standard deviation of the displacement of angles")
    first: float = setting(1e-1, "the second time of the logarithmic clock")
    last: float = setting(1e10, "the last", quick=1e6)
    n_times: int = setting(120, "number of times that are kept", quick=80)
    seed: int = setting(0, "seed of the starts")

    def times(self) -> np.ndarray:
        """The logarithmic clock."""
        return dynamics.log_clock(self.first, self.last, self.n_times - 1)


def measure(
    s: Settings, beta: float, repetition: int, generator: torch.Generator
) -> dict[str, Any]:
    """One flow on the circle from nearly uniform atoms."""
    del repetition  # the generator of the case depends on it
    eye, n = torch.eye(2, dtype=torch.float64), s.n_particles
    F = SelfAttention(AttentionParameters.from_bilinear(beta * eye, eye))
    phi = 2 * torch.pi * torch.arange(n, dtype=torch.float64) / n
    phi = phi + s.noise * torch.randn(n, generator=generator, dtype=torch.float64)
    start = ParticleMeasure(torch.stack([phi.cos(), phi.sin()], -1))
    # Half the spacing of the start, at which every atom is a cluster of its own.
    scale = torch.pi / n
    ds = dynamics.flow(
        F, start, s.times(), method=dynamics.Adaptive("dopri5", 1e-7, 1e-10),
        constraint="sphere", coalesce=1e-6,
        observe={"n_clusters": lambda mu: dynamics.cluster_count(mu, scale)},
    )  # fmt: skip
    kept = {name: ds[name].values for name in ("points", "n_clusters", "evaluations")}
    modes = {"found_mode": dominant_mode(kept["points"]), "first_mode": reduced.first_mode(beta)}
    return kept | modes


def dominant_mode(points: np.ndarray) -> float:
    """The k of the largest |∫e^{ikφ}dμ| at the first time at which one has grown; NaN if never.

    Args:
        points: particles on the circle, (time, particle, 2).
    """
    phi = np.arctan2(points[..., 1], points[..., 0])
    k = np.arange(1, points.shape[1] // 3)
    for angles in phi:
        amplitude = np.abs(np.exp(1j * k[:, None] * angles).mean(-1))
        if amplitude.max() >= _GROWN:
            return float(k[amplitude.argmax()])
    return float("nan")


@figure("n_clusters")
def staircase(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Number of clusters on the circle against time, for each β."""
    for colour, beta, rows in by_level(ds, "beta"):
        label = rf"$\beta$ = {beta:g}"
        stairs(ax, rows, "n_clusters", time=ds.time, color=colour, label=label)
    top = 2 * float(ds.first_mode.max())
    ax.set(xscale="log", xlabel="time t", ylabel="number of clusters", ylim=(0, top))
    ax.locator_params(axis="y", integer=True)
    ax.set_title("Tokens on the circle: number of clusters")
    return ax


@figure("found_mode")
def first_mode(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """How many clusters the first stage has, against √β, beside the fastest growing mode."""
    root = np.sqrt(ds.beta.values)
    ax.plot(root, ds.found_mode, "o", color="tab:blue", fillstyle="none", label="simulated")
    fastest = np.vectorize(lambda x: reduced.first_mode(x**2))
    formula(ax, fastest, root, "k--", linewidth=1.4, label=r"largest $k^2 I_k(\beta)$")
    ax.set(xlabel=r"$\sqrt{\beta}$", ylabel="clusters of the first stage")
    ax.locator_params(axis="y", integer=True)
    ax.set_title("First number of clusters, beside the fastest growing mode")
    return ax


EXPERIMENT = Experiment(
    measure,
    Settings(),
    [
        Variable("points", "particles on the circle", dims=("time", "particle", "feature")),
        Variable("n_clusters", "number of clusters", dims=("time",)),
        Variable("found_mode", "mode that is largest when one has grown"),
        Variable("first_mode", "k with the largest k² I_k(β)"),
        Variable("evaluations", "evaluations of the velocity", dims=("time",), dtype="int64"),
    ],
    coords={
        Variable("time", "time t", symbol="t"): Settings.times,
        Variable("feature", "coordinate"): range(2),
    },
    figures={"staircase": staircase, "first-mode": first_mode},
    animations={"circle": animate_particles},
)
