"""From scores to transition probabilities: which share of attention row i pays to column j.

`softmax`, `sink` and `sigmoid` are row by row: what row i pays depends on its own scores alone, so
that any block of rows can be computed by itself. `sinkhorn` is softmax with a potential added to
the log-weights, fixed before the rows (see `balancing`). `custom` is a function of the whole
matrix, or of rows if it says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor

from meanfield.checks import as_float_tensor
from meanfield.options import count, flag, number

__all__ = [
    "Custom",
    "RowWise",
    "Sigmoid",
    "Sink",
    "Sinkhorn",
    "Softmax",
    "custom",
    "sigmoid",
    "sink",
    "sinkhorn",
    "softmax",
]


class RowWise(Protocol):
    """A normalisation that the engine linearises.

    Attributes:
        sums_to_one: whether each row does; then a shift of a row's scores changes nothing.
        divides: whether a row is divided by a sum over its columns, so that raising one
            score lowers the other weights.
    """

    sums_to_one: bool
    divides: bool

    def log_transition(self, scores: Tensor, log_weights: Tensor, blind: Tensor | None) -> Tensor:
        """log P (..., H, m, n) of scores and log-weights, −∞ where i does not see j.

        Args:
            scores: (..., H, m, n).
            log_weights: of the columns, broadcastable to that; −∞ where i does not see j.
            blind: rows that see no mass, (..., 1, m, 1), or None; their log P is −∞.
        """

    def gain(self, scores: Tensor) -> Tensor | None:
        """∂ log Pᵢⱼ / ∂ sᵢⱼ without the part of the normaliser; None stands for 1."""


@final
@dataclass(frozen=True)
class Softmax:
    """Pᵢⱼ = aⱼ e^{sᵢⱼ} / Σ_l a_l e^{s_il}."""

    sums_to_one = True
    divides = True

    def log_transition(self, scores: Tensor, log_weights: Tensor, blind: Tensor | None) -> Tensor:
        """The logarithm, safe for rows without mass."""
        logits = scores + log_weights
        if blind is None:
            return logits.log_softmax(-1)
        return logits.masked_fill(blind, 0.0).log_softmax(-1).masked_fill(blind, -math.inf)

    def gain(self, scores: Tensor) -> None:
        """1."""


@final
@dataclass(frozen=True, eq=False)
class Sink:
    """Softmax with one more column of value 0 and fixed logits; made by `sink`."""

    logits: Tensor
    sums_to_one = False
    divides = True

    def head(self, index: int) -> Sink:
        """With the logit of that head."""
        return Sink(self.logits[index]) if self.logits.ndim else self

    def log_transition(self, scores: Tensor, log_weights: Tensor, blind: Tensor | None) -> Tensor:
        """The softmax over all columns and the sink, without the sink's column."""
        logits = scores + log_weights
        at = self.logits.to(logits)[..., None, None].expand(*logits.shape[:-1], 1)
        return torch.cat([logits, at], -1).log_softmax(-1)[..., :-1]

    def gain(self, scores: Tensor) -> None:
        """1."""


@final
@dataclass(frozen=True)
class Sigmoid:
    """Pᵢⱼ = aⱼ σ(sᵢⱼ + shift): no competition between columns; rows do not sum to one."""

    shift: float = 0.0
    sums_to_one = False
    divides = False

    def log_transition(self, scores: Tensor, log_weights: Tensor, blind: Tensor | None) -> Tensor:
        """log aⱼ + log σ."""
        return torch.nn.functional.logsigmoid(scores + self.shift) + log_weights

    def gain(self, scores: Tensor) -> Tensor:
        """1 − σ."""
        return torch.sigmoid(-(scores + self.shift))


@final
@dataclass(frozen=True)
class Sinkhorn:
    """Both marginals of the plan (aᵢPᵢⱼ) are μ; made by `sinkhorn`."""

    rtol: float
    max_iterations: int
    strict: bool


@final
@dataclass(frozen=True, eq=False)
class Custom:
    """A user's own function from scores and log-weights to P; made by `custom`."""

    transition: Callable[[Tensor, Tensor], Tensor]
    row_wise: bool


softmax = Softmax()
sigmoid = Sigmoid()


def sink(logits: Any) -> Sink:
    """Softmax with an attention sink: Pᵢⱼ = aⱼ e^{sᵢⱼ} / (e^{logit} + Σ_l a_l e^{s_il}).

    Part of the attention goes to one more column, of value 0, that belongs to no particle.

    Args:
        logits: the sink's logit, a number or one per head (H,).
    """
    tensor = as_float_tensor(logits, "logits")
    if tensor.ndim > 1 or not tensor.numel() or not bool(torch.isfinite(tensor).all()):
        raise ValueError(
            f"logits: expected a finite number or one per head, got {tensor.tolist()}"
        )
    return Sink(tensor)


def sinkhorn(*, rtol: float = 1e-12, max_iterations: int = 1000, strict: bool = True) -> Sinkhorn:
    """Doubly stochastic attention [SABP22], for weighted measures.

    Pᵢⱼ = aⱼ e^{sᵢⱼ + fᵢ + gⱼ} with potentials such that Σⱼ Pᵢⱼ = 1 and Σᵢ aᵢPᵢⱼ = aⱼ. Computed in
    the logarithmic domain; `SelfAttention.plan` says how well the marginals are met. The
    softmax is its first half-iteration: ``max_iterations=0, strict=False``. With a
    mask the identity is the only such plan (the first position sees itself alone and fills its
    column, then the second, and so on), so masked layers are refused.

    Args:
        rtol: largest relative error of a column's marginal, maxⱼ |Σᵢ aᵢPᵢⱼ/aⱼ − 1|.
        max_iterations: most iterations.
        strict: whether a plan that has not converged raises `ConvergenceError`.
    """
    return Sinkhorn(
        number(rtol, "rtol", above=0, below=1),
        count(max_iterations, "max_iterations", least=0),
        flag(strict, "strict"),
    )


def custom(transition: Callable[[Tensor, Tensor], Tensor], *, row_wise: bool = False) -> Custom:
    """A normalisation of your own; its derivative is by automatic differentiation.

    The function gets the scores ``(*batch, H, m, n)``, −∞ where row i does not see column j, and
    the log-weights of the columns ``(*batch, 1, 1, n)``, and returns P ``(*batch, H, m, n)``. It
    always sees the whole matrix, in O(H n²) memory, whatever n is.

    Args:
        transition: differentiable, in torch operations.
        row_wise: whether each row of P depends on that row of scores alone. Only then has the
            map a field Γ_μ(x) away from its atoms.
    """
    if not callable(transition):
        raise TypeError(f"transition: expected a function, got {type(transition).__name__}")
    return Custom(transition, flag(row_wise, "row_wise"))
