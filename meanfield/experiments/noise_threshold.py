"""How much noise keeps tokens from clustering?

dX = K P_X ∫ e^{β⟨X,y⟩} y dμ(y) dt + P_X∘dW on the sphere. The uniform measure is stable below
K_# = β^{d/2}/(2^{d/2} Γ(d/2) I_{d/2}(β)) (Mun, Rosenzweig, arXiv 2606.05140); above it the mean
|∫x dμ| is no longer 0. For β below some β_* it leaves 0 continuously, above with a jump.

With n particles the order below K_# is not 0 but about 1/√n, and near K_# the flow slows down: at
the last time the start is still felt there, which the deviation in time does not show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr

from meanfield import dynamics, sampling
from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.attention.normalizations import exponential
from meanfield.dynamics import reduced
from meanfield.experiments.experiment import Experiment
from meanfield.experiments.settings import setting
from meanfield.figures import animate_particles
from meanfield.figures.canvas import FORMULA, figure
from meanfield.figures.curves import formula
from meanfield.figures.selection import by_level
from meanfield.measures import ParticleMeasure
from meanfield.results import Variable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["EXPERIMENT", "Settings"]


_SHOWN = 100  # particles that are kept, for the animation
_TIMES = 81


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over."""

    dims: tuple[int, ...] = setting((2, 3), "dimensions d; the sphere is S^{d−1}", quick=(2,))
    betas: tuple[float, ...] = setting((0.5, 2.0), "inverse temperatures β", quick=(0.5,))
    ratios: tuple[float, ...] = setting(
        (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0),
        "couplings over the critical one, K/K_#",
        quick=(0.5, 1.0, 2.0),
    )
    n_particles: int = setting(400, "number of particles n", quick=300)
    last: float = setting(
        30.0, "the last time; the order is averaged over the second half", quick=20.0
    )
    step: float = setting(0.05, "step of Euler–Maruyama")
    seed: int = setting(0, "seed of start and noise")


_PARAMETERS = (
    Variable("dim", "dimension d; the sphere is S^{d−1}"),
    Variable("beta", "inverse temperature β", symbol="\\beta"),
    Variable("ratio", "coupling over the critical one, K/K_#"),
    Variable("time", "time t", symbol="t"),
)
_VARIABLES = (
    Variable("order", "|∫x dμ|, averaged over the second half of the flow"),
    Variable("order_spread", "standard deviation of it in time"),
    Variable("expected", "|∫x dμ| of the stationary measure that is not uniform; 0 if none"),
    Variable("uniform", "|∫x dμ| of n independent uniform particles: √⟨|∫x dμ|²⟩ = 1/√n"),
    Variable("critical", "critical coupling K_#"),
    Variable("points", "some particles", dims=("time", "particle", "feature")),
)


def order(
    dim: int,
    beta: float,
    ratio: float,
    *,
    n_particles: int,
    last: float,
    step: float,
    most_dim: int,
    generator: torch.Generator,
) -> dict[str, Any]:
    """The order of one noisy flow that starts half aligned."""
    critical = reduced.critical_coupling(dim, beta)
    eye = torch.eye(dim, dtype=torch.float64)
    parameters = AttentionParameters.from_bilinear(beta * eye, ratio * critical * eye)
    F = SelfAttention(parameters, normalization=exponential)
    x = sampling.sphere(n_particles, dim, generator=generator)
    # From an aligned start, so that a jump is seen where the aligned state ceases to exist.
    x = torch.nn.functional.normalize(x + 2 * eye[0], dim=-1)
    ds = dynamics.flow(
        F,
        ParticleMeasure(x),
        np.linspace(0, last, _TIMES),
        method="euler",
        step=step,
        constraint="sphere",
        noise=dynamics.Noise(0.5, generator),
        observe={"order": lambda mu: torch.linalg.vector_norm(mu.mean())},
    )
    late = ds["order"].values[_TIMES // 2 :]
    points = ds.points.values[:, :_SHOWN]
    return {
        "order": late.mean(),
        "order_spread": late.std(),
        "expected": reduced.aligned_order(dim, beta, ratio * critical),
        "uniform": n_particles**-0.5,
        "critical": critical,
        "points": np.pad(points, ((0, 0), (0, 0), (0, most_dim - dim))),
    }


@figure("order")
def order_against_coupling(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Order of noisy flows against the coupling over its critical value."""
    for colour, dim, beta, rows in by_level(ds, "dim", "beta"):
        style: Any = {"fmt": "o", "color": colour, "markersize": 4}
        style["label"] = rf"d = {dim}, $\beta$ = {beta:g}"
        ax.errorbar(rows.ratio, rows.order, yerr=rows.order_spread, **style)
        stationary = _stationary(dim, beta, float(rows.critical[0]))
        formula(ax, stationary, rows.ratio, "-", color=colour, linewidth=1)
    ax.axvline(1.0, color="0.4", linestyle="--", linewidth=1, label=r"$K_\#$", gid=FORMULA)
    ax.plot([], [], "k-", linewidth=1, label="stationary measure, n = ∞")
    n = round(float(ds.uniform[0]) ** -2)
    label = rf"$1/\sqrt{{n}}$: {n} independent uniform particles"
    ax.axhline(
        float(ds.uniform[0]), color="0.4", linestyle=":", linewidth=1, label=label, gid=FORMULA
    )
    ax.set(xlabel=r"coupling $K/K_\#$", ylim=(0, 1))
    ax.set_ylabel(r"order $|\int x\,d\mu|$, mean and deviation in time")
    last = float(ds.time[-1])
    # Near K_# the start is still felt, so that the points are above the lines.
    ax.set_title(f"Order from an aligned start, t = {last / 2:g} to {last:g}")
    return ax


def _stationary(dim: int, beta: float, critical: float) -> Callable[[np.ndarray], list[float]]:
    """The order of the measure that is not uniform, against the coupling over the critical one."""
    return lambda ratios: [reduced.aligned_order(dim, beta, r * critical) for r in ratios]


EXPERIMENT = Experiment(
    order,
    Settings(),
    grid=lambda s: {"dim": s.dims, "beta": s.betas, "ratio": s.ratios},
    variables=_VARIABLES,
    parameters=_PARAMETERS,
    coords=lambda s: {
        "time": np.linspace(0, s.last, _TIMES),
        "particle": np.arange(min(_SHOWN, s.n_particles)),
        "feature": np.arange(max(s.dims)),
    },
    derived=lambda s: {"most_dim": max(s.dims)},
    figures={"order": order_against_coupling},
    animations={
        name: partial(animate_particles, dim=2, ratio=ratio)
        for name, ratio in (("above", 2.0), ("below", 0.5))
    },
)
