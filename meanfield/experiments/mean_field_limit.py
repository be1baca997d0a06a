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

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, dynamics, sampling
from meanfield.experiments.experiment import Experiment
from meanfield.experiments.settings import along, over, setting
from meanfield.figures.canvas import figure
from meanfield.figures.curves import curve
from meanfield.figures.selection import by_level, levels, spelled
from meanfield.results import Variable
from meanfield.results.fits import FEWEST
from meanfield.transport import TransportResult, solve_w2

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["EXPERIMENT", "Settings"]

_ENDS = ("value", "lower", "upper")


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over."""

    dims: tuple[int, ...] = over("dim", (3, 5), "dimension d; the sphere is S^{d−1}", quick=(3,))
    n_particles: tuple[int, ...] = over(
        "n_particles", (16, 32, 64, 128, 256, 512), "number of samples n", quick=(16, 64)
    )
    repetitions: int = over("repetition", 5, "number of the draw", quick=2)
    n_many: int = setting(2048, "number of samples that stand for the limit", quick=256)
    beta: float = setting(2.0, "A = βB with a fixed random B of norm 1, V = I")
    times: tuple[float, ...] = along(
        "time", (0.0, 1.0, 2.0), "depth t", quick=(0.0, 1.0), symbol="t"
    )
    step: float = setting(0.1, "step of RK4")
    seed: int = setting(0, "seed of the draws")


def resolve(s: Settings) -> Settings:
    """The same settings.

    Raises:
        ValueError: no time, or one before the start.
    """
    if not s.times or s.times[0] < 0:
        raise ValueError(f"times: expected increasing numbers from 0 on, got {list(s.times)}")
    return s


def measure(
    s: Settings, dim: int, n_particles: int, repetition: int, generator: torch.Generator
) -> dict[str, Any]:
    """n samples and many, independent, through the same layers."""
    del repetition  # the generator of the case depends on it
    B = torch.randn(dim, dim, generator=torch.Generator().manual_seed(dim), dtype=torch.float64)
    A, V = s.beta * B / torch.linalg.matrix_norm(B, 2), torch.eye(dim, dtype=torch.float64)
    F = SelfAttention(AttentionParameters.from_bilinear(A, V))
    how: Any = {"method": "rk4", "step": s.step, "constraint": "sphere"}
    starts = (sampling.sphere(n, dim, generator=generator) for n in (n_particles, s.n_many))
    ahead = [0.0] * (s.times[0] > 0)  # a flow starts at the first of its times
    few, many = (dynamics.flow(F, ParticleMeasure(x), [*ahead, *s.times], **how) for x in starts)
    rows = []
    for k in range(len(ahead), len(ahead) + len(s.times)):
        mu, nu = dynamics.measure_at(few, k), dynamics.measure_at(many, k)
        gap = float(torch.linalg.vector_norm(mu.mean() - nu.mean()))
        rows.append(solve_w2(mu, nu, rtol=1e-4).values("w2", *_ENDS) | {"mean_error": gap})
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


@figure("w2", "mean_error")
def slopes(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """W₂ and the gap of the means between n samples and many, averages over draws, against n."""
    for colour, dim, rows in by_level(ds, "dim"):
        mean = rows.groupby("n_particles").mean()
        # Not round: those follow the colours.
        for k, mark in ((0, "v"), (-1, "s"))[: ds.sizes["time"]]:
            at, when = mean.isel(time=k), f"d = {dim}, t = {spelled(levels(ds, 'time'))[k]}"
            label = f"W₂, {when}{_slope(at, 'w2')}"
            curve(ax, at, "n_particles", "w2", f"{mark}-", color=colour, label=label)
            hollow: Any = {"color": colour, "fillstyle": "none"}
            hollow["label"] = f"means, {when}{_slope(at, 'mean_error')}"
            curve(ax, at, "n_particles", "mean_error", f"{mark}--", **hollow)
    ax.set(xscale="log", yscale="log", xlabel="samples n", ylabel="distance to many samples")
    ax.set_title("Distance of n samples to many, at the start and in depth\naverages over draws")
    return ax


def _slope(rows: xr.Dataset, name: str) -> str:
    """The power of n, where there are enough values to fit one."""
    n, y = rows.n_particles.values, rows[name].values
    if len(n) < FEWEST:
        return ""
    return rf": $n^{{{np.polyfit(np.log(n), np.log(y), 1)[0]:.2f}}}$"


EXPERIMENT = Experiment(
    measure,
    Settings(),
    [
        *TransportResult.columns(
            "w2", *_ENDS, words="W₂ between n samples and many", dims=("time",)
        ),
        Variable("mean_error", "distance of the means", dims=("time",)),
    ],
    resolve=resolve,
    figures={"slopes": slopes},
)
