"""Do discrete Euclidean and Wasserstein estimates of a Lipschitz constant agree?

[CAP24] Lemma 3.2 (4.2 for masked attention) says that on uniform measures of n tokens the two
constants are equal. At random token clouds this sweep follows both secant ratios as the step
shrinks, along the worst direction, along a random one, and for a measure whose worst atom is
split in two, which no displacement of n tokens does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import xarray as xr

from meanfield import sampling
from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.experiments.experiment import Experiment
from meanfield.experiments.settings import setting
from meanfield.figures.canvas import figure
from meanfield.figures.plots import plot_secants
from meanfield.figures.selection import select
from meanfield.lipschitz import compare_lemma_3_2
from meanfield.lipschitz.comparison import VARIABLES
from meanfield.results import Variable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["EXPERIMENT", "Settings"]


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over."""

    n_tokens: tuple[int, ...] = setting(
        (2, 4, 8, 16, 32, 64), "sequence lengths n", quick=(2, 8, 32)
    )
    radii: tuple[float, ...] = setting(
        (0.5, 1.0, 2.0, 4.0), "R; tokens are uniform in the ball", quick=(1.0, 4.0)
    )
    masks: tuple[bool, ...] = setting((False, True), "plain (False), masked (True) or both")
    draws: int = setting(3, "layers, each with a cloud for each n, R and mask", quick=1)
    dim: int = setting(4, "dimension d")
    heads: int = setting(2, "heads of the layer")
    std: float = setting(1.5, "standard deviation of the layer's entries, times √d")
    steps: tuple[float, ...] = setting(
        (1.0, 0.3, 0.1, 0.03, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6),
        "root-mean-square displacements over R, decreasing",
        quick=(1.0, 0.1, 1e-2, 1e-4, 1e-6),
    )
    seed: int = setting(0, "seed of the clouds")


_PARAMETERS = (
    Variable("n_tokens", "number of tokens n"),
    Variable("radius", "radius R of the ball", symbol="R"),
    Variable("causal", "masked attention"),
    Variable("draw", "number of the cloud"),
    Variable("step", "root-mean-square displacement over R"),
    Variable("perturbation", "direction of the step"),
)


def compare(
    n_tokens: int,
    radius: float,
    causal: bool,
    draw: int,
    *,
    dim: int,
    heads: int,
    std: float,
    steps: tuple[float, ...],
    generator: torch.Generator,
) -> dict[str, Any]:
    """Both estimates at one cloud."""
    of_layer = torch.Generator().manual_seed(draw)  # one for all n, R and masks
    parameters = AttentionParameters.random(
        dim, n_heads=heads, head_dim=dim, std=std * dim**-0.5, generator=of_layer
    )
    F = SelfAttention(parameters, causal=causal)
    X = sampling.ball(n_tokens, dim, radius=radius, generator=generator)
    found = compare_lemma_3_2(F, X, steps=steps, generator=generator)
    return {variable.name: found[variable.name].values for variable in VARIABLES}


@figure("euclidean_secant/euclidean", "wasserstein_secant/euclidean", "euclidean_converged")
def secants(ds: xr.Dataset, *, ax: Axes, causal: bool = False) -> Axes:
    """Secant ratios over the Euclidean constant of n tokens, as the step shrinks; largest R."""
    radius = float(ds.radius.max())
    rows = select(ds, causal=causal, draw=0, radius=radius)
    return plot_secants(rows.sortby("n_tokens"), ax=ax)


EXPERIMENT = Experiment(
    compare,
    Settings(),
    grid=lambda s: {
        "n_tokens": s.n_tokens,
        "radius": s.radii,
        "causal": s.masks,
        "draw": range(s.draws),
    },
    variables=VARIABLES,
    parameters=_PARAMETERS,
    coords=lambda s: {"perturbation": ["top", "random", "splitting"], "step": s.steps},
    figures={"secants": secants, "secants-masked": partial(secants, causal=True)},
)
