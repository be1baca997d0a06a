"""Do discrete Euclidean and Wasserstein estimates of a Lipschitz constant agree?

[CAP24] Lemma 3.2 (4.2 for masked attention) says that on uniform measures of n tokens the two
constants are equal. At random token clouds this sweep follows both secant ratios as the step
shrinks, along the worst direction, along a random one, and for a measure whose worst atom is
split in two, which no displacement of n tokens does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import xarray as xr

from meanfield import sampling
from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.lipschitz import compare_lemma_3_2
from meanfield.results import Variable
from meanfield.sweeps import Task, sweep

__all__ = ["FIGURES", "QUICK", "Settings", "compare", "plan", "run"]

FIGURES: dict[str, tuple[str, dict[str, Any]]] = {
    "secants": ("plot_secants", {}),
    "secants-masked": ("plot_secants", {"causal": True}),
}


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over.

    Attributes:
        n_tokens: sequence lengths n.
        radii: R; tokens are uniform in the ball.
        masks: plain (False), masked (True) or both.
        draws: clouds for each n, R and mask.
        dim: d.
        heads: heads of the layer.
        std: standard deviation of its entries times √d.
        steps: root-mean-square displacements over R, decreasing.
        seed: of the layer and the clouds.
    """

    n_tokens: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
    radii: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    masks: tuple[bool, ...] = (False, True)
    draws: int = 3
    dim: int = 4
    heads: int = 2
    std: float = 1.5
    steps: tuple[float, ...] = (1.0, 0.3, 0.1, 0.03, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
    seed: int = 0


QUICK = Settings(
    n_tokens=(2, 8, 32), radii=(1.0, 4.0), draws=1, steps=(1.0, 0.1, 1e-2, 1e-4, 1e-6)
)

_NAMES = (
    *("euclidean_secant", "wasserstein_secant"),
    *("wasserstein_secant_lower", "wasserstein_secant_upper"),
    *("euclidean", "euclidean_residual", "euclidean_upper", "euclidean_converged"),
    *("wasserstein", "wasserstein_residual", "wasserstein_upper", "wasserstein_converged"),
    *("particle", "splitting"),
)
_WORDS = {
    "euclidean_secant": "Euclidean secant ratio of the discrete map",
    "wasserstein_secant": "Wasserstein secant ratio of the map of measures",
    "wasserstein_secant_lower": "certified lower end of that ratio",
    "wasserstein_secant_upper": "certified upper end of that ratio",
    "euclidean": "Euclidean constant of the discrete map",
    "euclidean_residual": "its relative residual",
    "euclidean_upper": "it is at most this, with probability 0.999",
    "euclidean_converged": "it has converged",
    "wasserstein": "local Wasserstein constant",
    "wasserstein_residual": "its relative residual",
    "wasserstein_upper": "it is at most this, with probability 0.999",
    "wasserstein_converged": "it has converged",
    "particle": "its component with atoms moved as a whole",
    "splitting": "its component with one atom split",
}
VARIABLES = tuple(
    Variable(
        name,
        _WORDS[name],
        dims=("perturbation", "step") if "secant" in name else (),
        dtype="bool" if name.endswith("converged") else "float64",
    )
    for name in _NAMES
)
PARAMETERS = (
    Variable("n_tokens", "number of tokens n", dtype="int64"),
    Variable("radius", "radius R of the ball", symbol="R"),
    Variable("causal", "masked attention", dtype="bool"),
    Variable("draw", "number of the cloud", dtype="int64"),
    Variable("step", "root-mean-square displacement over R"),
    Variable("perturbation", "direction of the step", dtype="str"),
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
    # One layer for all; the draw decides the cloud, through the generator of the case.
    layer_generator = torch.Generator().manual_seed(draw)
    parameters = AttentionParameters.random(
        dim, n_heads=heads, head_dim=dim, std=std * dim**-0.5, generator=layer_generator
    )
    F = SelfAttention(parameters, causal=causal)
    X = sampling.ball(n_tokens, dim, radius=radius, generator=generator)
    found = compare_lemma_3_2(F, X, steps=steps, generator=generator)
    return {name: found[name].values for name in _NAMES}


def plan(settings: Settings) -> dict[str, Any]:
    """The arguments of `meanfield.sweep` that make the experiment."""
    coords = {"perturbation": ["top", "random", "splitting"], "step": settings.steps}
    task = Task(compare, VARIABLES, parameters=PARAMETERS, coords=coords)
    grid = {
        "n_tokens": settings.n_tokens,
        "radius": settings.radii,
        "causal": settings.masks,
        "draw": range(settings.draws),
    }
    names = ("dim", "heads", "std", "steps")
    fixed = {name: getattr(settings, name) for name in names}
    return {
        "fn": task,
        "grid": grid,
        "fixed": fixed,
        "seed": settings.seed,
        "attrs": {"experiment": "lemma-3-2"},
    }


def run(settings: Settings | None = None, **how: Any) -> xr.Dataset:
    """Run the sweep; further arguments (store, executor, …) are those of `meanfield.sweep`."""
    return sweep(**plan(settings or Settings()), **how)
