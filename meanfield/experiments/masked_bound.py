"""Can the mean-field bound of plain attention hold for masked attention?

No: at A = 0 masked attention is a running mean, whose norm tends to Hardy's 2 and not to 1. Over
n and the size c = ‖A‖R² this sweep has the largest local constant found on masked sequences and
weighted masked clouds, beside the bounds of plain attention, ‖V‖(1+3c)e^{2c} ([CAP24] Theorem
3.5) and this package's, and the masked bounds (this package): for all measures, and for n uniform
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, bounds, sampling
from meanfield.experiments.experiment import Experiment
from meanfield.experiments.settings import over, setting
from meanfield.figures.charts import Chart, Curve, Formula
from meanfield.figures.selection import best
from meanfield.lipschitz import LocalLipschitz, local_lipschitz
from meanfield.results import Variable

__all__ = ["EXPERIMENT", "Settings"]


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over."""

    n_tokens: tuple[int, ...] = over(
        "n_tokens",
        (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
        "number of atoms n",
        quick=(2, 8, 32, 128),
    )
    sizes: tuple[float, ...] = over(
        "size", (0.0, 0.01, 0.05, 0.1, 0.2, 0.5), "c = ‖A‖R²", quick=(0.0, 0.05, 0.2)
    )
    clouds: int = setting(10, "random weighted clouds per case", quick=3)
    dim: int = setting(2, "dimension d; R = 1 and V = I")
    seed: int = setting(0, "seed of the clouds")


def largest_masked(
    s: Settings, n_tokens: int, size: float, generator: torch.Generator
) -> dict[str, Any]:
    """The largest local constant of masked attention found at n atoms in the unit ball."""
    draw = torch.randn(s.dim, s.dim, generator=generator, dtype=torch.float64)
    A = size * draw / torch.linalg.matrix_norm(draw, 2)
    parameters = AttentionParameters.from_bilinear(A, torch.eye(s.dim, dtype=torch.float64))
    F = SelfAttention(parameters, causal=True)
    points = sampling.ball(n_tokens, s.dim, batch_shape=(s.clouds + 1,), generator=generator)
    logs = torch.randn(s.clouds + 1, n_tokens, generator=generator, dtype=torch.float64)
    logs[0] = 0.0  # the uniform sequence, which tends to Hardy's constant at A = 0
    positions = torch.arange(1, n_tokens + 1, dtype=torch.float64) / n_tokens
    mu = ParticleMeasure(points, log_weights=logs.log_softmax(-1), positions=positions)
    found = local_lipschitz(F, mu, rtol=1e-3, strict=False)
    k = int(found.value.argmax())
    return {
        **{name: column[k] for name, column in found.values("largest").items()},
        "largest_converged": bool(found.converged.all()),
        "unmasked_bound": bounds.theorem_3_5(size, 1.0, 1.0),
        "unmasked_sharp": bounds.mean_field(size, 1.0, 1.0),
        "hardy_bound": bounds.masked_mean_field(size, 1.0, 1.0),
        "tokens_bound": bounds.tokens(size, 1.0, 1.0, n_tokens, causal=True),
    }


HARDY = Chart(
    "Largest masked constants found against ‖A‖R²: above the bound of plain attention where that "
    "is small, below the masked one.",
    "size",
    [
        # That for n uniform tokens would not hold for the weighted clouds.
        Formula(lambda c, at: bounds.masked_mean_field(c, 1.0, 1.0), "at most", "--"),
        Curve("largest", "found", rows=lambda ds: best(ds, "largest", over="size")),
        Formula(lambda c, at: bounds.theorem_3_5(c, 1.0, 1.0), "plain, Thm 3.5", "k-."),
    ],
    "Masked attention beside the bound of plain attention",
    legend="ends",
    xlabel=r"$\|A\|R^2$",
    ylabel="local constant, masked",
)

EXPERIMENT = Experiment(
    largest_masked,
    Settings(),
    [
        *LocalLipschitz.columns("largest", words="largest local constant found, masked"),
        Variable("unmasked_bound", "the constant of Theorem 3.5, plain attention"),
        Variable("unmasked_sharp", "upper bound, plain attention, all measures"),
        Variable("hardy_bound", "upper bound, masked, all measures"),
        Variable("tokens_bound", "upper bound, masked, n uniform tokens"),
    ],
    figures={"hardy": HARDY},
)
