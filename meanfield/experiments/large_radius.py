"""What is left of the constant when tokens move out to infinity?

[CAP24] Theorems 3.7 and 4.5. If each query has one key of largest score, attention at λX turns
into a choice as λ → ∞, and ‖Df(λX)‖ → ‖V‖ √(largest number of queries that choose one key). On
the way the constant may be much larger: where a query is torn between two keys at distance λδ,
the covariance of what it sees grows like λ²δ². `gap` sets how nearly tied the last query is; at a
tie, gap 0, there is no limit and it grows for ever.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention
from meanfield.experiments.experiment import Experiment
from meanfield.experiments.settings import over, setting
from meanfield.figures.canvas import kind
from meanfield.figures.charts import Chart, Curve
from meanfield.figures.selection import select
from meanfield.lipschitz import LocalLipschitz, local_lipschitz
from meanfield.results import Variable

__all__ = ["EXPERIMENT", "Settings"]


_DRAWS = 100  # of tokens; of 60 seeds 17 need a second one


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over."""

    masks: tuple[bool, ...] = over("causal", (False, True), "whether attention is masked")
    gaps: tuple[float, ...] = over(
        "gap",
        (1.0, 1e-2, 1e-4),
        "gap of the last query's two best scores at λ = 1",
        quick=(1.0, 1e-2),
    )
    scales: tuple[float, ...] = over(
        "scale",
        tuple(round(10 ** (k / 12), 5) for k in range(-12, 49)),
        "factor λ of the tokens",
        quick=(0.1, 1.0, 10.0, 100.0, 1000.0),
    )
    dim: int = setting(8, "dimension d", quick=4)
    n_tokens: int = setting(20, "number of tokens n", quick=8)
    seed: int = setting(0, "seed of A, V and X")


def configuration(s: Settings, gap: float) -> tuple[AttentionParameters, Tensor]:
    """A random head with ‖V‖ = 1 and tokens whose last query has its two best scores `gap` apart.

    The last token is moved along A⁻¹(y₁ − y₂), with y₁ and y₂ the keys of others that it likes
    best. Where its own key, which moves with it, is among its two best, other tokens are drawn.

    Raises:
        ValueError: fewer than three tokens, or such tokens were not found.
    """
    if s.n_tokens < 3:
        raise ValueError(f"n_tokens: expected at least 3, a query and two keys, got {s.n_tokens}")
    generator = torch.Generator().manual_seed(s.seed)
    A, V = torch.randn(2, s.dim, s.dim, generator=generator, dtype=torch.float64) / s.dim**0.5
    V = V / torch.linalg.matrix_norm(V, 2)
    for _ in range(_DRAWS):
        X = torch.randn(s.n_tokens, s.dim, generator=generator, dtype=torch.float64)
        _move_last(X, A, gap)
        first, second = (X @ (A @ X[-1])).topk(2).values.tolist()
        if math.isclose(first - second, gap, rel_tol=1e-6, abs_tol=1e-12):
            return AttentionParameters.from_bilinear(A, V), X
    raise ValueError(f"gap: found no tokens of which it is {gap}; take another one, or a seed")


def _move_last(X: Tensor, A: Tensor, gap: float) -> None:
    """Move the last token, in place."""
    for _ in range(50):  # moving it may change which keys are best
        scores = X[:-1] @ (A @ X[-1])
        best = scores.topk(2).indices
        between = X[best[0]] - X[best[1]]
        wanted = torch.as_tensor(gap, dtype=X.dtype) - between @ (A @ X[-1])
        if abs(float(wanted)) < 1e-13:
            break
        along = torch.linalg.solve(A, between)
        X[-1] += wanted / (between @ between) * along


def measure(s: Settings, scale: float, gap: float, causal: bool) -> dict[str, Any]:
    """The constant at λX beside its limit."""
    parameters, X = configuration(s, gap)
    F = SelfAttention(parameters, causal=causal)
    mu = ParticleMeasure.from_sequence(scale * X)
    constant = local_lipschitz(F, mu, geometry="euclidean", strict=False)
    scores = (X @ parameters.A[0].mT) @ X.mT
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -math.inf)
    best, chosen = scores.topk(2)
    return {
        **constant.values("constant"),
        "limit": math.sqrt(int(torch.bincount(chosen[:, 0]).max())) if gap else math.nan,
        "ceiling": math.sqrt(s.n_tokens),
        "smallest_gap": scale**2 * float((best[:, 0] - best[:, 1]).min()),
    }


def far_out(causal: bool, theorem: str) -> Chart:
    """Constants of the plain or the masked cases."""
    return Chart(
        f"Constant at λX against λ, its limit, queries more or less nearly tied ({kind(causal)}).",
        "scale",
        [
            Curve("constant", "gap {gap}"),
            Curve("limit", fmt="--", key=f"limit, {theorem}", linewidth=0.9),
            Curve("ceiling", r"$\|V\|\sqrt{n}$, the largest limit", "k:", once=True),
        ],
        f"Constant at $\\lambda X$, {kind(causal)}, beside its limit",
        by="gap",
        rows=lambda ds: select(ds, causal=causal),
        log="xy",
        xlabel=r"factor $\lambda$",
        ylabel=r"$\|Df(\lambda X)\|$",
    )


EXPERIMENT = Experiment(
    measure,
    Settings(),
    [
        *LocalLipschitz.columns("constant", words="local Lipschitz constant ‖Df(λX)‖"),
        Variable("limit", "‖V‖ √(largest number of queries that share a key) (NaN: a tie)"),
        Variable("ceiling", "‖V‖ √n"),
        Variable("smallest_gap", "smallest gap between the two best scores of a query at λ"),
    ],
    figures={"limit": far_out(False, "Thm 3.7"), "limit-masked": far_out(True, "Thm 4.5")},
)
