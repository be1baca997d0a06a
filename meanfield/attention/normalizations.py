"""From scores to attention weights: Pᵢⱼ, the attention that row i pays to column j.

`softmax`, `sigmoid`, `exponential` and `sink` are values of `RowWise`, as is any other positive
function of the scores: row i of P depends on row i of the scores alone, so that any block of rows
can be computed by itself. `sinkhorn` is the softmax with a potential added to the log-weights,
fixed before the rows. `custom` is a function of the whole matrix, or of rows if it says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from torch import Tensor

from meanfield.attention.rows import (
    Normalization,
    RowWise,
    exponential,
    sigmoid,
    sink,
    softmax,
)
from meanfield.attention.sinkhorn import sinkhorn
from meanfield.checks import as_bool, describe
from meanfield.maps import Map

__all__ = [
    "Normalization",
    "RowWise",
    "custom",
    "exponential",
    "sigmoid",
    "sink",
    "sinkhorn",
    "softmax",
]


@final
@dataclass(frozen=True, eq=False)
class Custom(Normalization):
    """A user's own function from scores and log-weights to P; made by `custom`."""

    weights: Callable[[Tensor, Tensor], Tensor]
    row_wise: bool

    def whole(self, scores: Tensor, log_weights: Tensor) -> Tensor:
        """P, checked."""
        p = self.weights(scores, log_weights)
        if p.shape != scores.shape:
            raise ValueError(
                f"custom normalization: expected attention weights of shape "
                f"{tuple(scores.shape)}, got {tuple(p.shape)}"
            )
        return p

    @property
    def has_field(self) -> bool:  # type: ignore[override]
        """Whether each row of P depends on that row of scores alone."""
        return self.row_wise


def custom(weights: Callable[[Tensor, Tensor], Tensor], *, row_wise: bool = False) -> Custom:
    """A normalisation of the whole matrix; its derivative is by automatic differentiation.

    The function gets the scores ``(*batch, H, m, n)``, −∞ where row i does not see column j, and
    the log-weights of the columns ``(*batch, 1, 1, n)``, and returns P ``(*batch, H, m, n)``. It
    always sees the whole matrix, in O(H n²) memory, whatever n is. A function ψ of each score has
    exact derivatives in O(n) memory as ``RowWise(log_psi)``.

    Args:
        weights: differentiable, in torch operations.
        row_wise: whether each row of P depends on that row of scores alone. Only then has the
            map a field Γ_μ(x) away from its atoms.
    """
    if not callable(weights) or isinstance(weights, Map):
        raise TypeError(
            "weights: expected a function of scores and log-weights, got " + describe(weights)
        )
    return Custom(weights, as_bool(row_wise, "row_wise"))
