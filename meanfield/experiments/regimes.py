"""Which theorem speaks, for how many tokens and in how large a ball?

Over (n, R): the largest Euclidean constant found on n tokens in B_R (adversarial sequences of
both branches and random clouds, V = I) beside [CAP24] Theorem 3.3 (general), Proposition 3.4
(lower), Theorem 3.5 (mean field, no n), the √n of Theorem 3.7 (large radius), and the one bound of
this package that covers all of it, whose regimes change at n = e^{2c}, c = ‖A‖R².
"""

from __future__ import annotations

import math
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

__all__ = ["FIGURES", "QUICK", "Settings", "plan", "run", "worst_found"]

FIGURES: dict[str, tuple[str, dict[str, Any]]] = {"map": ("plot_regimes", {})}


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over.

    Attributes:
        n_tokens: sequence lengths n ≥ 2.
        radii: R.
        eigenvalues: of the diagonal A (V = I).
        clouds: random clouds per case.
        seed: of the clouds.
    """

    n_tokens: tuple[int, ...] = (2, 3, 5, 9, 16, 28, 50, 90, 160, 280, 500)
    radii: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0)
    eigenvalues: tuple[float, ...] = (-1.0, 0.5)
    clouds: int = 20
    seed: int = 0


QUICK = Settings(n_tokens=(2, 9, 50), radii=(0.5, 1.0, 1.5, 2.0, 4.0), clouds=5)

VARIABLES = (
    Variable("worst", "largest Euclidean constant found"),
    Variable("worst_residual", "its relative residual"),
    Variable("worst_converged", "every constant converged", dtype="bool"),
    Variable("adversarial", "the same over the adversarial sequences only"),
    Variable("general_bound", "upper bound, Theorem 3.3"),
    Variable("general_lower", "lower bound of the supremum, Proposition 3.4"),
    Variable("theorem_3_5", "upper bound, Theorem 3.5"),
    Variable("tokens_bound", "upper bound, this package, n tokens"),
    Variable("mean_field_bound", "upper bound, this package, all measures"),
    Variable("size", "c = ‖A‖R²"),
    Variable("large_radius_limit", "√n, the largest limit of Theorem 3.7"),
)
PARAMETERS = (
    Variable("n_tokens", "number of tokens n", dtype="int64"),
    Variable("radius", "radius R of the ball", symbol="R"),
)


def worst_found(
    n_tokens: int,
    radius: float,
    *,
    eigenvalues: tuple[float, ...],
    clouds: int,
    generator: torch.Generator,
) -> dict[str, Any]:
    """The largest constant found, and what the theorems say."""
    d = len(eigenvalues)
    A = torch.diag(torch.tensor(eigenvalues, dtype=torch.float64))
    F = SelfAttention(AttentionParameters.from_bilinear(A, torch.eye(d, dtype=torch.float64)))
    built = []
    for branch in ("negative", "positive"):
        try:
            built.append(sampling.adversarial(A, radius, n_tokens, branch=branch).points)
        except ValueError:
            continue
    shape: dict[str, Any] = {"radius": radius, "batch_shape": (clouds,), "generator": generator}
    random = [sampling.ball(n_tokens, d, **shape), sampling.sphere(n_tokens, d, **shape)]
    points = torch.cat([torch.stack(built), *random]) if built else torch.cat(random)
    found = local_lipschitz(F, ParticleMeasure(points), geometry="euclidean", strict=False)
    k = int(found.value.argmax())
    norm_A, gamma = max(map(abs, eigenvalues)), bounds.scaling_factor(A)
    return {
        "worst": float(found.value[k]),
        "worst_residual": float(found.residual[k]),
        "worst_converged": bool(found.converged.all()),
        "adversarial": float(found.value[: len(built)].max()) if built else math.nan,
        "general_bound": bounds.theorem_3_3(norm_A, 1.0, radius, n_tokens),
        "general_lower": bounds.proposition_3_4(gamma, radius, n_tokens),
        "theorem_3_5": bounds.theorem_3_5(norm_A, 1.0, radius),
        "tokens_bound": bounds.tokens(norm_A, 1.0, radius, n_tokens),
        "mean_field_bound": bounds.mean_field(norm_A, 1.0, radius),
        "size": norm_A * radius**2,
        "large_radius_limit": math.sqrt(n_tokens),
    }


def plan(settings: Settings) -> dict[str, Any]:
    """The arguments of `meanfield.sweep` that make the experiment."""
    grid = {"n_tokens": settings.n_tokens, "radius": settings.radii}
    fixed = {"eigenvalues": settings.eigenvalues, "clouds": settings.clouds}
    task = Task(worst_found, VARIABLES, parameters=PARAMETERS)
    return {
        "fn": task,
        "grid": grid,
        "fixed": fixed,
        "seed": settings.seed,
        "attrs": {"experiment": "regimes"},
    }


def run(settings: Settings | None = None, **how: Any) -> xr.Dataset:
    """Run the sweep; further arguments (store, executor, …) are those of `meanfield.sweep`."""
    return sweep(**plan(settings or Settings()), **how)
