"""How does the Wasserstein constant of attention grow with the radius, kernel by kernel?

With Q = K = V = I and d = 2: the largest local constant that a search over two or more atoms and
their weights finds in the ball of radius R, for dot products (with the sign of A that is worst),
L2 attention, scaled cosines and capped scores. Dot products grow as e^{R²}, L2 attention as R²
(this package), capped scores no faster than a multiple of 1 + R²; cosines see directions alone,
and their slope is without bound near the origin.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr

from meanfield import bounds, sampling
from meanfield.attention import AttentionParameters, SelfAttention, kernels
from meanfield.experiments.experiment import Experiment
from meanfield.experiments.settings import setting
from meanfield.figures.canvas import figure
from meanfield.figures.curves import curve, formula
from meanfield.figures.selection import best, by_level
from meanfield.lipschitz import LocalLipschitz, worst_case
from meanfield.measures import ParticleMeasure
from meanfield.results import Variable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["EXPERIMENT", "Settings"]


_DIM, _TEMPERATURE, _TAU, _EPS = 2, 5.0, 2.0, 1.0


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over."""

    kernels: tuple[str, ...] = setting(
        ("dot product", "L2", "cosine", "soft cap"),
        "names of kernels, of 'dot product', 'L2', 'cosine' and 'soft cap'",
    )
    radii: tuple[float, ...] = setting(
        (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0), "radii R", quick=(0.5, 1.0, 2.0)
    )
    n_atoms: tuple[int, ...] = setting((2, 3), "numbers of atoms of the searches", quick=(2,))
    starts: int = setting(32, "random starts of each search", quick=8)
    steps: int = setting(200, "steps of ascent", quick=40)
    seed: int = setting(0, "seed of the starts")


_VARIABLES = (
    *LocalLipschitz.columns("constant", words="largest local W₂ constant found"),
    Variable("bound", "upper bound on the ball; infinite where none is known"),
)
_PARAMETERS = (
    Variable("kernel", "kernel"),
    Variable("radius", "R", units="length"),
    Variable("n_atoms", "atoms of the search"),
)


def _layers(kernel: str) -> list[SelfAttention]:
    """The layers of a kernel to search; of dot products both signs of A."""
    eye = torch.eye(_DIM, dtype=torch.float64)
    plain = AttentionParameters.from_bilinear(eye, eye)
    if kernel == "dot product":
        return [SelfAttention(AttentionParameters.from_bilinear(-eye, eye)), SelfAttention(plain)]
    chosen = {
        "L2": kernels.l2,
        "cosine": kernels.cosine(_TEMPERATURE, eps=_EPS),
        "soft cap": kernels.soft_cap(_TAU),
    }
    if kernel not in chosen:
        known = ["dot product", *chosen]
        raise ValueError(f"kernel: expected one of {known}, got {kernel!r}")
    return [SelfAttention(plain, kernel=chosen[kernel])]


def _bound(kernel: str, radius: float) -> float:
    if kernel == "dot product":
        return float(bounds.mean_field(1.0, 1.0, radius))
    if kernel == "L2":
        return float(bounds.l2_mean_field(1.0, 1.0, radius, _DIM))
    if kernel == "soft cap":
        return float(bounds.capped_mean_field(1.0, 1.0, radius, _TAU))
    return float("inf")


def _light_in_the_middle(radius: float) -> ParticleMeasure:
    """A light atom at 0 between two halves: L2 attention has slope 2R² there."""
    points = torch.zeros(3, _DIM, dtype=torch.float64)
    points[1, 0], points[2, 0] = radius, -radius
    logs = torch.tensor([-20.0, 0.0, 0.0], dtype=torch.float64).log_softmax(-1)
    return ParticleMeasure(points * (1 - 1e-12), log_weights=logs)


def largest_constant(
    kernel: str,
    radius: float,
    n_atoms: int,
    *,
    starts: int,
    steps: int,
    generator: torch.Generator,
) -> dict[str, Any]:
    """The largest local constant found for one kernel in one ball."""
    candidates = [_light_in_the_middle(radius)] if n_atoms >= 3 else []
    candidates += [sampling.two_diracs(radius, -(radius**2) * k, [1.0, 0.0]) for k in (0.5, 2.0)]
    found = [
        worst_case(
            F,
            radius,
            n_atoms=n_atoms,
            starts=starts,
            steps=steps,
            candidates=candidates,
            generator=generator,
        )[1]
        for F in _layers(kernel)
    ]
    return max(found, key=float).values("constant") | {"bound": _bound(kernel, radius)}


@figure("constant", "constant_converged")
def growth(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """The largest constant found in the ball of radius R for each kernel, and its upper bound."""
    for colour, name, cases in by_level(ds, "kernel"):
        rows = best(cases, "constant", over="radius")
        curve(ax, rows, "radius", "constant", color=colour, label=f"{name}, found")
        above = np.vectorize(partial(_bound, name))
        formula(ax, above, ds.radius, "--", color=colour, linewidth=1.4)
    ax.plot([], [], "k--", label="upper bound, where one is known")
    label = r"$2R^2$: L2, light atom between two halves"
    formula(ax, lambda R: 2 * R**2, ds.radius, linewidth=1.4, label=label)
    ax.set(yscale="log", xlabel="radius R", ylabel=r"local $W_2$ constant, $Q=K=V=I$, $d=2$")
    ax.set_ylim(bottom=0.8)  # for small R the constants are near 1
    ax.set_title("Largest constant found in the ball, kernel by kernel")
    return ax


EXPERIMENT = Experiment(
    largest_constant,
    Settings(),
    grid=lambda s: {"kernel": s.kernels, "radius": s.radii, "n_atoms": s.n_atoms},
    variables=_VARIABLES,
    parameters=_PARAMETERS,
    figures={"growth": growth},
)
