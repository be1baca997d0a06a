"""Is the R² of the general bound ever reached? A configuration whose constant grows as R².

[CAP24] Figure 3. Theorem 3.3 bounds the constant by a multiple of R²√n. The tokens
X = (R u, −R u, 0) reach R²: the query at 0 sees all three with weight 1/3, whatever A, and the
covariance of what it sees is (2/3)R² uuᵀ. When it moves, with its own key, its output moves by
V(1/3 + (2/3)R² uuᵀA), so that

    ‖Df(X)‖ ≥ (2/3) R² ‖V u‖ ‖Aᵀ u‖ − ‖V‖/3.

It stands last, so that the same holds masked. (The choice of tokens is ours.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import xarray as xr

from meanfield import bounds
from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.lipschitz import local_lipschitz
from meanfield.measures import ParticleMeasure
from meanfield.results import Variable
from meanfield.sweeps import Task, sweep

__all__ = ["FIGURES", "QUICK", "Settings", "layer", "measure", "plan", "run"]

# File name of each figure -> function of `meanfield.figures` and its arguments.
FIGURES: dict[str, tuple[str, dict[str, Any]]] = {"growth": ("plot_quadratic_growth", {})}


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over; every field can be set from the command line.

    Attributes:
        dim: d.
        radii: R.
        masks: plain (False), masked (True) or both.
        seed: of A and V.
    """

    dim: int = 16
    radii: tuple[float, ...] = tuple(round(2.0**k, 4) for k in range(-3, 8))
    masks: tuple[bool, ...] = (False, True)
    seed: int = 0


QUICK = Settings(dim=4, radii=(0.5, 2.0, 8.0, 32.0))

_VARIABLES = (
    Variable("constant", "local Lipschitz constant ‖Df(X)‖"),
    Variable("constant_residual", "relative residual of the constant"),
    Variable("constant_upper", "the constant is at most this, with probability 0.999"),
    Variable("constant_converged", "whether the constant converged", dtype="bool"),
    Variable("quadratic_lower", "lower bound (2/3) R² ‖V u‖ ‖Aᵀ u‖ − ‖V‖/3"),
    Variable("general_bound", "upper bound, Theorem 3.3"),
)
_PARAMETERS = (
    Variable("radius", "radius R of the configuration"),
    Variable("causal", "whether attention is masked"),
)


def layer(dim: int, seed: int) -> AttentionParameters:
    """A random head with ‖A‖ and ‖V‖ of order one."""
    generator = torch.Generator().manual_seed(seed)
    A, V = torch.randn(2, dim, dim, generator=generator, dtype=torch.float64) / math.sqrt(dim)
    return AttentionParameters.from_bilinear(A, V)


def measure(radius: float, causal: bool, *, dim: int, layer_seed: int) -> dict[str, Any]:
    """The constant at (R u, −R u, 0), between its bounds; u maximises ‖Aᵀu‖."""
    parameters = layer(dim, layer_seed)
    A, V = parameters.A[0], parameters.V[0]
    u = torch.linalg.svd(A)[0][:, 0]
    X = torch.stack([radius * u, -radius * u, torch.zeros_like(u)])
    F = SelfAttention(parameters, causal=causal)
    mu = ParticleMeasure.from_sequence(X)
    constant = local_lipschitz(F, mu, geometry="euclidean", strict=False)
    norm_A, norm_V = (float(torch.linalg.matrix_norm(matrix, 2)) for matrix in (A, V))
    reached = torch.linalg.vector_norm(V @ u) * torch.linalg.vector_norm(A.mT @ u)
    return {
        "constant": float(constant.value),
        "constant_residual": float(constant.residual),
        "constant_upper": float(constant.upper),
        "constant_converged": bool(constant.converged),
        "quadratic_lower": max(2 / 3 * radius**2 * float(reached) - norm_V / 3, 0.0),
        "general_bound": bounds.theorem_3_3(norm_A, norm_V, radius, 3),
    }


def plan(settings: Settings) -> dict[str, Any]:
    """The arguments of `meanfield.sweep` that make the experiment."""
    return {
        "fn": Task(measure, _VARIABLES, _PARAMETERS),
        "grid": {"causal": settings.masks, "radius": settings.radii},
        "fixed": {"dim": settings.dim, "layer_seed": settings.seed},
        "seed": settings.seed,
        "attrs": {"experiment": "quadratic-growth"},
    }


def run(settings: Settings | None = None, **how: Any) -> xr.Dataset:
    """Run the sweep over radii.

    Args:
        settings: what to run over; the whole experiment if None.
        how: as in `meanfield.sweep`: store, executor, …
    """
    return sweep(**plan(settings or Settings()), **how)
