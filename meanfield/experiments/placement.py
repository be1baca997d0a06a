"""How fast do tokens collapse, depending on where the network normalises?

Equiangular orthonormal tokens, V = I, A = βI: Post-LN and nGPT collapse like e^{−2t}, Pre-LN like
1/t², for its radius grows and its angles move ever slower (Karagodin, Ge, Polyanskiy, Rigollet,
arXiv 2510.22026). Beside the simulation stands the reduced equation; random starts on a sphere of
high dimension follow it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xarray as xr

from meanfield import dynamics, sampling
from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.dynamics import reduced
from meanfield.measures import ParticleMeasure
from meanfield.results import Variable
from meanfield.sweeps import Task, sweep

__all__ = ["ANIMATIONS", "FIGURES", "QUICK", "Settings", "collapse", "plan", "run"]

# File name of each figure -> function of `meanfield.figures` and its arguments.
FIGURES: dict[str, tuple[str, dict[str, Any]]] = {"collapse": ("plot_placements", {})}
ANIMATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    placement: ("animate_particles", {"placement": placement}) for placement in ("post", "pre")
}


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over; every field can be set from the command line.

    Attributes:
        placements: "post", "pre", "peri", "ngpt".
        betas: β.
        n_tokens: n.
        dim: d of the random start, which is nearly orthonormal.
        last: the last time.
        n_times: how many times are kept.
        seed: of the random start.
    """

    placements: tuple[str, ...] = ("post", "pre", "peri", "ngpt")
    betas: tuple[float, ...] = (1.0, 4.0)
    n_tokens: int = 32
    dim: int = 1024
    last: float = 300.0
    n_times: int = 60
    seed: int = 0


QUICK = Settings(betas=(1.0,), n_tokens=16, dim=256, last=100.0, n_times=30)

_PARAMETERS = (
    Variable("placement", "where the network normalises", dtype="str"),
    Variable("beta", "inverse temperature β", symbol="\\beta"),
    Variable("time", "time t", dims=("time",), symbol="t"),
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
    times = dynamics.log_clock(1e-2, last, n_times - 1)
    exact = torch.eye(n_tokens, dtype=torch.float64)
    drawn = sampling.sphere(n_tokens, dim, generator=generator)
    # The flow stays in the span of its start, so n coordinates hold a start of R^d.
    basis = torch.linalg.qr(drawn.mT)[0]
    gaps = []
    for start in (exact, drawn @ basis):
        eye = torch.eye(n_tokens, dtype=torch.float64)
        F = SelfAttention(AttentionParameters.from_bilinear(beta * eye, eye))
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


def plan(settings: Settings) -> dict[str, Any]:
    """The arguments of `meanfield.sweep` that make the experiment."""
    coords = {
        "time": dynamics.log_clock(1e-2, settings.last, settings.n_times - 1),
        "particle": np.arange(settings.n_tokens),
        "feature": np.arange(2),
    }
    names = ("n_tokens", "dim", "last", "n_times")
    return {
        "fn": Task(collapse, _VARIABLES, _PARAMETERS, coords),
        "grid": {"placement": settings.placements, "beta": settings.betas},
        "fixed": {name: getattr(settings, name) for name in names},
        "seed": settings.seed,
        "attrs": {"experiment": "placement"},
    }


def run(settings: Settings | None = None, **how: Any) -> xr.Dataset:
    """Run the sweep; further arguments (store, executor, …) are those of `meanfield.sweep`."""
    return sweep(**plan(settings or Settings()), **how)
