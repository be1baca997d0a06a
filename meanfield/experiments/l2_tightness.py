"""How close to its bound does the ∞-norm of L2 attention come?

[KPM21] Section 5.1. The row sum Σ|∂f(X)_{ia}/∂x_{jb}| of one token is climbed from random tokens,
with one head of dimension one as in the paper, and with more; a row sum anywhere is a lower bound
of the constant. Beside it stands an input that is written down (this package): a token in the
middle of two groups of (n−1)/2 at distance t. Its row sum is 1 + p(4t² − 2), p the attention on
the groups, and the best t gives 1 + 4 W₀((n−1)e^{−3/2}), less than 2 below the bound
1 + 4 W₀((n−1)e^{−1}): the bound is asymptotically tight, and both grow as log n.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, bounds, linearize
from meanfield.attention import kernels
from meanfield.experiments.experiment import Experiment
from meanfield.experiments.settings import over, setting
from meanfield.figures.charts import Chart, Curve, Formula
from meanfield.figures.selection import select
from meanfield.lipschitz import infinity_norm
from meanfield.results import Variable

__all__ = ["EXPERIMENT", "Settings"]

_RATE = 0.1  # of Adam, as in the paper
_WIDEST = 10.0  # starts are uniform on [−w, w], w uniform on [0, 10], as in the paper
# Up to this many rows the whole norm is computed at the tokens found.
_ROWS = 512


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over."""

    shapes: tuple[tuple[int, int], ...] = over(
        "",
        ((1, 1), (4, 1), (4, 4)),
        "(d, H) of the layers; d/H is the dimension of a head",
        quick=((1, 1), (4, 4)),
    )
    n_tokens: tuple[int, ...] = over(
        "n_tokens",
        (2, 5, 10, 20, 50, 100, 200, 500, 1000),
        "number of tokens n",
        quick=(2, 10, 100),
    )
    starts: int = setting(32, "random starts per case", quick=8)
    steps: int = setting(300, "steps of Adam", quick=60)
    seed: int = setting(0, "seed of the starts, and of the layers with d > 1")


def cases(s: Settings) -> list[dict[str, Any]]:
    """The configurations.

    Raises:
        ValueError: shapes that are no pairs, or heads that do not divide the dimension.
    """
    pairs = [shape for shape in s.shapes if np.shape(shape) == (2,) and min(shape) > 0]
    if len(pairs) < len(s.shapes) or any(dim % heads for dim, heads in pairs):
        raise ValueError(
            "shapes: expected pairs [d, H] of a dimension and a number of heads that divides it, "
            f"such as [[1, 1], [4, 2]], got {list(s.shapes)}"
        )
    return [
        {"dim": dim, "n_heads": heads, "n_tokens": n} for dim, heads in pairs for n in s.n_tokens
    ]


def layer(dim: int, n_heads: int, seed: int) -> AttentionParameters:
    """One head of weight one for d = 1; else orthonormal W^Q, W^V per head and W^O = I."""
    eye = torch.eye(dim, dtype=torch.float64)
    if dim == 1:
        return AttentionParameters.tied_l2(eye, eye, eye)
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randn(2, dim, dim, generator=generator, dtype=torch.float64)
    queries, values = (torch.linalg.qr(draw)[0] for draw in draws)
    heads = (n_heads, dim // n_heads)
    query, value, output = (W.mT.unflatten(0, heads) for W in (queries, values, eye))
    return AttentionParameters.tied_l2(query, value, output.mT)


def two_groups(n: int) -> Tensor:
    """A token at 0 and n − 1 at ±t, one more on the right if n is even, (n, 1)."""
    distance = math.sqrt(1.5 + _spread_of_groups(n))  # t² − 3/2 = s with s eˢ = (n−1) e^{−3/2}
    left, right = (n - 1) // 2, n - 1 - (n - 1) // 2
    places = [0.0, *[-distance] * left, *[distance] * right]
    return torch.tensor(places, dtype=torch.float64)[:, None]


def measure(
    s: Settings, dim: int, n_heads: int, n_tokens: int, generator: torch.Generator
) -> dict[str, Any]:
    """The best row sum found, that of the construction, and the bound."""
    F = SelfAttention(layer(dim, n_heads, s.seed), kernel=kernels.l2)
    widths = _WIDEST * torch.rand(s.starts, 1, 1, generator=generator, dtype=torch.float64)
    uniform = torch.rand(s.starts, n_tokens, dim, generator=generator, dtype=torch.float64)
    X, feature = _climb(F, widths * (2 * uniform - 1), s.steps)
    best, norm = _row_sum(F, X, feature), math.nan
    if n_tokens * dim <= _ROWS:
        norm = float(infinity_norm(F, ParticleMeasure(X)).value)
    constructed, closed_form = math.nan, math.nan
    if dim == 1:
        constructed = _row_sum(F, two_groups(n_tokens), 0)
        closed_form = 1 + 4 * _spread_of_groups(n_tokens)
    return {
        "best": best,
        "best_norm": norm,
        "constructed": constructed,
        "closed_form": closed_form,
        "bound": bounds.l2_attention_inf(F, n_tokens),
        "spread": bounds.l2_spread(n_tokens),
    }


def _spread_of_groups(n: float) -> float:
    """φ⁻¹((n−1)/√e): `bounds.l2_spread` of a token between two equal groups."""
    return bounds.l2_spread(1 + (n - 1) / math.sqrt(math.e))


def _climb(F: SelfAttention, starts: Tensor, steps: int) -> tuple[Tensor, int]:
    """Adam on the row sum of the first token, coordinate s mod d in start s; the best (X, a)."""
    X = starts.clone().requires_grad_()
    features = torch.arange(len(X)) % X.shape[-1]
    optimiser = torch.optim.Adam([X], lr=_RATE)
    best, where = torch.full((len(X),), -math.inf, dtype=X.dtype), starts.clone()
    for _ in range(steps + 1):
        image = F.field(ParticleMeasure(X))(X[:, :1])[:, 0]
        chosen = image.gather(-1, features[:, None]).sum()
        (row,) = torch.autograd.grad(chosen, X, create_graph=True)
        sums = row.abs().sum((-2, -1))
        better = sums.detach() > best
        best = torch.where(better, sums.detach(), best)
        where = torch.where(better[:, None, None], X.detach(), where)
        optimiser.zero_grad()
        (-sums.sum()).backward()
        optimiser.step()
    top = int(best.argmax())
    return where[top], int(features[top])


def _row_sum(F: SelfAttention, X: Tensor, feature: int) -> float:
    """Σ|J| of the row (first token, feature), by the layer's own linearisation."""
    J = linearize(F, ParticleMeasure(X)).atoms
    unit = torch.zeros(J.out_shape, dtype=X.dtype)
    unit[0, feature] = 1.0
    return float((J.T @ unit).abs().sum())


TIGHTNESS = Chart(
    "The largest ‖J‖_∞ of one-dimensional L2 attention found, and its bound, against n.",
    "n_tokens",
    [
        Curve(
            "constructed",
            "a token between two groups",
            "s",
            fillstyle="none",
            markersize=8,
            color="tab:orange",
        ),
        Curve("best", "best of the ascent", color="tab:blue"),
        Formula(
            lambda n, at: [1 + 4 * bounds.l2_spread(one) for one in n],
            r"upper bound $1+4\,\varphi^{-1}(n-1)$",
            "--",
            color="tab:red",
            linewidth=1.4,
        ),
        Formula(
            lambda n, at: [1 + 4 * _spread_of_groups(one) if one >= 3 else np.nan for one in n],
            r"equal groups, reached at odd $n\geq 3$: $1+4\,W_0((n-1)e^{-3/2})$",
            ":",
            color="tab:orange",
            linewidth=1.4,
        ),
    ],
    r"Largest $\infty$-norm of L2 attention, $d = H = 1$",
    rows=lambda ds: select(ds, dim=1, n_heads=1),
    log="x",
    ylabel=r"largest $\|J\|_\infty$ found",
)
EXPERIMENT = Experiment(
    measure,
    Settings(),
    [
        Variable("best", "largest row sum of |J| found by ascent"),
        Variable("best_norm", "‖J‖_∞ at the tokens found (NaN where n·d is large)"),
        Variable("constructed", "row sum at a token between two groups (d = 1)"),
        Variable(
            "closed_form", "1 + 4 W₀((n−1)e^{−3/2}), its value with two equal groups (d = 1)"
        ),
        Variable("bound", "upper bound of the ∞-norm anywhere"),
        Variable("spread", "c = φ⁻¹(n−1)"),
    ],
    grid=cases,
    parameters=[Variable("dim", "dimension d"), Variable("n_heads", "heads H")],
    figures={"tightness": TIGHTNESS},
)
