"""What is left of the constant when tokens move out to infinity?

[CAP24] Theorems 3.7 and 4.5. If each query has one key of largest score, attention at λX turns
into a choice as λ → ∞, and ‖Df(λX)‖ → ‖V‖ √(largest number of queries that choose one key). On
the way the constant may be much larger: where a query is torn between two keys at distance λδ,
the covariance of what it sees grows like λ²δ². `gap` sets how nearly tied the last query is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import xarray as xr
from torch import Tensor

from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.experiments.experiment import Experiment
from meanfield.experiments.settings import setting
from meanfield.figures.canvas import figure, kind
from meanfield.figures.curves import curve
from meanfield.figures.selection import by_level, select
from meanfield.lipschitz import LocalLipschitz, local_lipschitz
from meanfield.measures import ParticleMeasure
from meanfield.results import Variable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["EXPERIMENT", "Settings"]


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over."""

    dim: int = setting(8, "dimension d", quick=4)
    n_tokens: int = setting(20, "number of tokens n", quick=8)
    scales: tuple[float, ...] = setting(
        tuple(round(10 ** (k / 4), 5) for k in range(-4, 17)),
        "factors λ of the tokens",
        quick=(0.1, 1.0, 10.0, 100.0, 1000.0),
    )
    gaps: tuple[float, ...] = setting(
        (1.0, 1e-2, 1e-4),
        "how far the two best scores of the last query are apart at λ = 1",
        quick=(1.0, 1e-2),
    )
    masks: tuple[bool, ...] = setting((False, True), "plain (False), masked (True) or both")
    seed: int = setting(0, "seed of A, V and X")


_VARIABLES = (
    *LocalLipschitz.columns("constant", words="local Lipschitz constant ‖Df(λX)‖"),
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
        **constant.values("constant"),
        "limit": math.sqrt(sharing),
        "ceiling": math.sqrt(n_tokens),
        "smallest_gap": scale**2 * float(gaps.min()),
    }


@figure("constant", "constant_converged", "limit", "ceiling")
def far_out(ds: xr.Dataset, *, ax: Axes, causal: bool = False) -> Axes:
    """Constant at λX against λ and its limit, for queries that are more or less nearly tied.

    Args:
        ds: of this experiment.
        ax: where to draw; a new figure if None.
        causal: whether to take the masked cases.
    """
    for colour, gap, line in by_level(select(ds, causal=causal), "gap"):
        curve(ax, line, "scale", "constant", color=colour, label=f"gap {gap:g}")
        curve(ax, line, "scale", "limit", "--", color=colour, linewidth=0.9)
    ax.plot([], [], "k--", linewidth=0.9, label="limit, Thm 4.5" if causal else "limit, Thm 3.7")
    curve(ax, line, "scale", "ceiling", "k:", label=r"$\|V\|\sqrt{n}$, the largest limit")
    ax.set(xscale="log", yscale="log", xlabel=r"factor $\lambda$", ylabel=r"$\|Df(\lambda X)\|$")
    ax.set_title(f"Constant at $\\lambda X$, {kind(causal)}, beside its limit")
    return ax


EXPERIMENT = Experiment(
    measure,
    Settings(),
    grid=lambda s: {"causal": s.masks, "gap": s.gaps, "scale": s.scales},
    variables=_VARIABLES,
    parameters=_PARAMETERS,
    derived=lambda s: {"layer_seed": s.seed},
    figures={
        "limit": partial(far_out, causal=False),
        "limit-masked": partial(far_out, causal=True),
    },
)
