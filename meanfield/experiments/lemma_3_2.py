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

from meanfield import AttentionParameters, SelfAttention, sampling
from meanfield.experiments.experiment import Experiment
from meanfield.experiments.settings import along, over, setting
from meanfield.figures.charts import Chart
from meanfield.figures.plots import secants
from meanfield.figures.selection import select
from meanfield.lipschitz import compare_lemma_3_2
from meanfield.lipschitz.comparison import VARIABLES
from meanfield.results import Variable

__all__ = ["EXPERIMENT", "Settings"]


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over."""

    n_tokens: tuple[int, ...] = over(
        "n_tokens", (2, 4, 8, 16, 32, 64), "number of tokens n", quick=(2, 8, 32)
    )
    radii: tuple[float, ...] = over(
        "radius", (0.5, 1.0, 2.0, 4.0), "radius R of the ball", quick=(1.0, 4.0), symbol="R"
    )
    masks: tuple[bool, ...] = over("causal", (False, True), "masked attention")
    draws: int = over("draw", 3, "number of the cloud", quick=1)
    dim: int = setting(4, "dimension d")
    heads: int = setting(2, "heads of the layer")
    std: float = setting(1.5, "standard deviation of the layer's entries, times √d")
    steps: tuple[float, ...] = along(
        "step",
        (1.0, 0.3, 0.1, 0.03, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6),
        "root-mean-square displacement over max ‖xᵢ‖ (an atom split: of its halves)",
        quick=(1.0, 0.1, 1e-2, 1e-4, 1e-6),
    )
    seed: int = setting(0, "seed of the clouds")


def compare(
    s: Settings, n_tokens: int, radius: float, causal: bool, draw: int, generator: torch.Generator
) -> dict[str, Any]:
    """Both estimates at one cloud."""
    of_layer = torch.Generator().manual_seed(draw)  # one for all n, R and masks
    parameters = AttentionParameters.random(
        s.dim, n_heads=s.heads, head_dim=s.dim, std=s.std * s.dim**-0.5, generator=of_layer
    )
    F = SelfAttention(parameters, causal=causal)
    X = sampling.ball(n_tokens, s.dim, radius=radius, generator=generator)
    found = compare_lemma_3_2(F, X, steps=s.steps, generator=generator)
    return {variable.name: found[variable.name].values for variable in VARIABLES}


def _of_largest(causal: bool) -> Chart:
    rows = lambda ds: select(ds, causal=causal, draw=0, radius=float(ds.radius.max()))  # noqa: E731
    return secants(causal, rows, split=True)


EXPERIMENT = Experiment(
    compare,
    Settings(),
    VARIABLES,
    coords={Variable("perturbation", "direction of the step"): ["top", "random", "splitting"]},
    figures={"secants": _of_largest(False), "secants-masked": _of_largest(True)},
)
