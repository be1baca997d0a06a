"""Can the mean-field bound of plain attention hold for masked attention?

No: at A = 0 masked attention is a running mean, whose norm tends to Hardy's 2 and not to 1. Over
n and the size c = ‖A‖R² this sweep has the largest local constant found on masked sequences and
weighted masked clouds, beside the unmasked constants, ‖V‖(1+3c)e^{2c} ([CAP24] Theorem 3.5) and
the sharp one, and the masked bounds (this package): for all measures, and for n uniform tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import xarray as xr

from meanfield import bounds, sampling
from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.lipschitz import local_lipschitz
from meanfield.measures import ParticleMeasure
from meanfield.results import Variable
from meanfield.sweeps import Task, sweep

__all__ = ["FIGURES", "QUICK", "Settings", "largest_masked", "plan", "run"]

FIGURES: dict[str, tuple[str, dict[str, Any]]] = {"hardy": ("plot_masked_bound", {})}


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over.

    Attributes:
        n_tokens: numbers of atoms.
        sizes: c = ‖A‖R², with R = 1 and V = I.
        clouds: random weighted clouds per case.
        dim: d.
        seed: of the clouds.
    """

    n_tokens: tuple[int, ...] = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    sizes: tuple[float, ...] = (0.0, 0.01, 0.05, 0.1, 0.2, 0.5)
    clouds: int = 10
    dim: int = 2
    seed: int = 0


QUICK = Settings(n_tokens=(2, 8, 32, 128), sizes=(0.0, 0.05, 0.2), clouds=3)

VARIABLES = (
    Variable("largest", "largest local constant found, masked"),
    Variable("largest_residual", "its relative residual"),
    Variable("largest_converged", "every constant converged", dtype="bool"),
    Variable("unmasked_bound", "the constant of Theorem 3.5, plain attention"),
    Variable("unmasked_sharp", "the sharp constant of plain attention"),
    Variable("hardy_bound", "upper bound, masked, all measures"),
    Variable("tokens_bound", "upper bound, masked, n uniform tokens"),
)
PARAMETERS = (
    Variable("n_tokens", "number of atoms n", dtype="int64"),
    Variable("size", "c = ‖A‖R²"),
)


def largest_masked(
    n_tokens: int, size: float, *, clouds: int, dim: int, generator: torch.Generator
) -> dict[str, Any]:
    """The largest local constant of masked attention found at n atoms in the unit ball."""
    draw = torch.randn(dim, dim, generator=generator, dtype=torch.float64)
    A = size * draw / torch.linalg.matrix_norm(draw, 2)
    parameters = AttentionParameters.from_bilinear(A, torch.eye(dim, dtype=torch.float64))
    F = SelfAttention(parameters, causal=True)
    points = sampling.ball(n_tokens, dim, batch_shape=(clouds + 1,), generator=generator)
    logs = torch.randn(clouds + 1, n_tokens, generator=generator, dtype=torch.float64)
    logs[0] = 0.0  # the uniform sequence, which tends to Hardy's constant at A = 0
    positions = torch.arange(1, n_tokens + 1, dtype=torch.float64) / n_tokens
    mu = ParticleMeasure(points, log_weights=logs.log_softmax(-1), positions=positions)
    found = local_lipschitz(F, mu, rtol=1e-3, strict=False)
    k = int(found.value.argmax())
    return {
        "largest": float(found.value[k]),
        "largest_residual": float(found.residual[k]),
        "largest_converged": bool(found.converged.all()),
        "unmasked_bound": bounds.theorem_3_5(size, 1.0, 1.0),
        "unmasked_sharp": bounds.mean_field(size, 1.0, 1.0),
        "hardy_bound": bounds.masked_mean_field(size, 1.0, 1.0),
        "tokens_bound": bounds.tokens(size, 1.0, 1.0, n_tokens, causal=True),
    }


def plan(settings: Settings) -> dict[str, Any]:
    """The arguments of `meanfield.sweep` that make the experiment."""
    grid = {"n_tokens": settings.n_tokens, "size": settings.sizes}
    fixed = {"clouds": settings.clouds, "dim": settings.dim}
    task = Task(largest_masked, VARIABLES, parameters=PARAMETERS)
    return {
        "fn": task,
        "grid": grid,
        "fixed": fixed,
        "seed": settings.seed,
        "attrs": {"experiment": "masked-bound"},
    }


def run(settings: Settings | None = None, **how: Any) -> xr.Dataset:
    """Run the sweep; further arguments (store, executor, …) are those of `meanfield.sweep`."""
    return sweep(**plan(settings or Settings()), **how)
