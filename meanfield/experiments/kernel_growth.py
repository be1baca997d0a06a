"""How does the Wasserstein constant of attention grow with the radius, kernel by kernel?

With Q = K = V = I and d = 2: the largest local constant that a search over two or more atoms and
their weights finds in the ball of radius R, for dot products (with the sign of A that is worst),
L2 attention, scaled cosines and capped scores. Dot products grow as e^{R²}, L2 attention as R²
(this package), capped scores no faster than a multiple of 1 + R². Cosines are 5⟨x, y⟩ over
√(‖x‖² + 1)√(‖y‖² + 1): without the ones their slope is without bound near the origin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, bounds, sampling
from meanfield.attention import kernels
from meanfield.checks import choice
from meanfield.experiments.experiment import Experiment
from meanfield.experiments.settings import over, setting
from meanfield.figures.charts import Chart, Curve, Formula
from meanfield.figures.selection import best
from meanfield.lipschitz import LocalLipschitz, worst_case
from meanfield.results import Variable

__all__ = ["EXPERIMENT", "Settings"]

_DIM, _TAU = 2, 2.0
# Each with its upper bound on the ball of radius R.
_KERNELS: dict[str, tuple[kernels.Kernel, Callable[[float], float]]] = {
    "dot product": (kernels.dot_product, lambda R: bounds.mean_field(1.0, 1.0, R)),
    "L2": (kernels.l2, lambda R: bounds.l2_mean_field(1.0, 1.0, R, _DIM)),
    "cosine": (kernels.cosine(5.0, eps=1.0), lambda R: float("inf")),
    "soft cap": (kernels.soft_cap(_TAU), lambda R: bounds.capped_mean_field(1.0, 1.0, R, _TAU)),
}


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over."""

    kernels: tuple[str, ...] = over("kernel", tuple(_KERNELS), "kernel")
    radii: tuple[float, ...] = over(
        "radius",
        (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0),
        "radius R of the ball",
        quick=(0.5, 1.0, 2.0),
        units="length",
    )
    n_atoms: tuple[int, ...] = over("n_atoms", (2, 3), "atoms of the search", quick=(2,))
    starts: int = setting(32, "random starts of each search", quick=8)
    steps: int = setting(200, "steps of ascent", quick=40)
    seed: int = setting(0, "seed of the starts")


def _layers(kernel: str) -> list[SelfAttention]:
    """The layers of a kernel to search; of dot products both signs of A."""
    eye = torch.eye(_DIM, dtype=torch.float64)
    signs = (-1.0, 1.0) if kernel == "dot product" else (1.0,)
    score, _ = _KERNELS[choice(kernel, "kernel", _KERNELS)]
    layers = [AttentionParameters.from_bilinear(sign * eye, eye) for sign in signs]
    return [SelfAttention(parameters, kernel=score) for parameters in layers]


def _light_in_the_middle(radius: float) -> ParticleMeasure:
    """A light atom at 0 between two halves: L2 attention has slope 2R² there."""
    points = torch.zeros(3, _DIM, dtype=torch.float64)
    points[1, 0], points[2, 0] = radius, -radius
    logs = torch.tensor([-20.0, 0.0, 0.0], dtype=torch.float64).log_softmax(-1)
    return ParticleMeasure(points * (1 - 1e-12), log_weights=logs)


def largest_constant(
    s: Settings, kernel: str, radius: float, n_atoms: int, generator: torch.Generator
) -> dict[str, Any]:
    """The largest local constant found for one kernel in one ball."""
    candidates = [_light_in_the_middle(radius)] if n_atoms >= 3 else []
    candidates += [sampling.two_diracs(radius, -(radius**2) * k, [1.0, 0.0]) for k in (0.5, 2.0)]
    search: Any = {"n_atoms": n_atoms, "starts": s.starts, "steps": s.steps}
    search |= {"candidates": candidates, "generator": generator}
    found = [worst_case(F, radius, **search)[1] for F in _layers(kernel)]
    return max(found, key=float).values("constant") | {"bound": _KERNELS[kernel][1](radius)}


GROWTH = Chart(
    "The largest constant found in the ball of radius R for each kernel, and its upper bound.",
    "radius",
    [
        Curve(
            "constant", "{kernel}, found", "o", rows=lambda ds: best(ds, "constant", over="radius")
        ),
        Formula(
            lambda radius, at: [_KERNELS[at["kernel"]][1](R) for R in radius],
            fmt="--",
            key="upper bound, where one is known",
            linewidth=1.4,
        ),
        Formula(lambda R, at: 2 * R**2, r"$2R^2$: L2, light atom between two halves", once=True),
    ],
    "Largest constant found in the ball, kernel by kernel",
    by="kernel",
    log="y",
    xlabel="radius R",
    ylabel=r"local $W_2$ constant, $Q=K=V=I$, $d=2$",
    ylim=(0.8, None),  # for small R the constants are near 1,
)

EXPERIMENT = Experiment(
    largest_constant,
    Settings(),
    [
        *LocalLipschitz.columns("constant", words="largest local W₂ constant found"),
        Variable("bound", "upper bound on the ball; infinite where none is known"),
    ],
    figures={"growth": GROWTH},
)
