"""What is left of the constant when tokens move out to infinity?

[CAP24] Theorems 3.7 and 4.5. If each query has one key of largest score, attention at λX turns
into a choice as λ → ∞, and ‖Df(λX)‖ → ‖V‖ √(largest number of queries that choose one key). On
the way the constant may be much larger: where a query is torn between two keys at distance λδ,
the covariance of what it sees grows like λ²δ². `gap` sets how nearly tied the last query is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import xarray as xr
from torch import Tensor

from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.lipschitz import local_lipschitz
from meanfield.measures import ParticleMeasure
from meanfield.results import Variable
from meanfield.sweeps import Task, sweep

__all__ = ["FIGURES", "QUICK", "Settings", "configuration", "measure", "plan", "run"]

# File name of each figure -> function of `meanfield.figures` and its arguments.
FIGURES: dict[str, tuple[str, dict[str, Any]]] = {
    "limit": ("plot_large_radius", {}),
    "limit-masked": ("plot_large_radius", {"causal": True}),
}


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over; every field can be set from the command line.

    Attributes:
        dim: d.
        n_tokens: n.
        scales: λ.
        gaps: how far the two best scores of the last query are apart at λ = 1.
        masks: plain (False), masked (True) or both.
        seed: of A, V and X.
    """

    dim: int = 8
    n_tokens: int = 20
    scales: tuple[float, ...] = tuple(round(10 ** (k / 4), 5) for k in range(-4, 17))
    gaps: tuple[float, ...] = (1.0, 1e-2, 1e-4)
    masks: tuple[bool, ...] = (False, True)
    seed: int = 0


QUICK = Settings(dim=4, n_tokens=8, scales=(0.1, 1.0, 10.0, 100.0, 1000.0), gaps=(1.0, 1e-2))

_VARIABLES = (
    Variable("constant", "local Lipschitz constant ‖Df(λX)‖"),
    Variable("constant_residual", "relative residual of the constant"),
    Variable("constant_upper", "the constant is at most this, with probability 0.999"),
    Variable("constant_converged", "whether the constant converged", dtype="bool"),
    Variable("limit", "‖V‖ √(largest number of queries that share a key)"),
    Variable("ceiling", "‖V‖ √n"),
    Variable("smallest_gap", "smallest gap between the two best scores of a query at λ"),
)
_PARAMETERS = (
    Variable("scale", "factor λ of the tokens"),
    Variable("gap", "gap of the last query's two best scores at λ = 1"),
    Variable("causal", "whether attention is masked"),
)


def configuration(
    dim: int, n_tokens: int, gap: float, seed: int
) -> tuple[AttentionParameters, Tensor]:
    """A random head with ‖V‖ = 1 and tokens whose last query has its two best scores `gap` apart.

    The last token is moved along A⁻¹(y₁ − y₂), with y₁ and y₂ the keys it likes best.
    """
    generator = torch.Generator().manual_seed(seed)
    A, V = torch.randn(2, dim, dim, generator=generator, dtype=torch.float64) / math.sqrt(dim)
    V = V / torch.linalg.matrix_norm(V, 2)
    X = torch.randn(n_tokens, dim, generator=generator, dtype=torch.float64)
    for _ in range(50):  # moving the last token may change which keys are best
        scores = X[:-1] @ (A @ X[-1])
        best = scores.topk(2).indices
        between = X[best[0]] - X[best[1]]
        wanted = torch.as_tensor(gap, dtype=X.dtype) - between @ (A @ X[-1])
        if abs(float(wanted)) < 1e-13:
            break
        along = torch.linalg.solve(A, between)
        X[-1] += wanted / (between @ between) * along
    return AttentionParameters.from_bilinear(A, V), X


def measure(
    scale: float,
    gap: float,
    causal: bool,
    *,
    dim: int,
    n_tokens: int,
    layer_seed: int,
) -> dict[str, Any]:
    """The constant at λX beside its limit."""
    parameters, X = configuration(dim, n_tokens, gap, layer_seed)
    F = SelfAttention(parameters, causal=causal)
    mu = ParticleMeasure.from_sequence(scale * X)
    constant = local_lipschitz(F, mu, geometry="euclidean", strict=False)
    scores = (X @ parameters.A[0].mT) @ X.mT
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -math.inf)
    best, chosen = scores.topk(2)
    gaps = best[:, 0] - best[:, 1]
    sharing = int(torch.bincount(chosen[:, 0]).max())
    return {
        "constant": float(constant.value),
        "constant_residual": float(constant.residual),
        "constant_upper": float(constant.upper),
        "constant_converged": bool(constant.converged),
        "limit": math.sqrt(sharing),
        "ceiling": math.sqrt(n_tokens),
        "smallest_gap": scale**2 * float(gaps.min()),
    }


def plan(settings: Settings) -> dict[str, Any]:
    """The arguments of `meanfield.sweep` that make the experiment."""
    return {
        "fn": Task(measure, _VARIABLES, _PARAMETERS),
        "grid": {"causal": settings.masks, "gap": settings.gaps, "scale": settings.scales},
        "fixed": {
            "dim": settings.dim,
            "n_tokens": settings.n_tokens,
            "layer_seed": settings.seed,
        },
        "seed": settings.seed,
        "attrs": {"experiment": "large-radius"},
    }


def run(settings: Settings | None = None, **how: Any) -> xr.Dataset:
    """Run the sweep over scales.

    Args:
        settings: what to run over; the whole experiment if None.
        how: as in `meanfield.sweep`: store, executor, …
    """
    return sweep(**plan(settings or Settings()), **how)
