"""From scores to attention weights: which share of attention row i pays to column j.

`softmax`, `sigmoid`, `exponential` and `sink` are values of `RowWise`, as is any other positive
function of the scores: what row i pays depends on its own scores alone, so that any block of rows
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
from meanfield.checks import as_bool, count, number

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
@dataclass(frozen=True)
class Sinkhorn(Normalization):
    """Both marginals of the plan (aᵢPᵢⱼ) are μ; made by `sinkhorn`."""

    rtol: float
    max_iterations: int
    strict: bool
    shift_invariant = True
    takes_masks = False


@final
@dataclass(frozen=True, eq=False)
class Custom(Normalization):
    """A user's own function from scores and log-weights to P; made by `custom`."""

    transition: Callable[[Tensor, Tensor], Tensor]
    row_wise: bool

    @property
    def has_field(self) -> bool:  # type: ignore[override]
        """Whether its rows are their own."""
        return self.row_wise


def sinkhorn(*, rtol: float = 1e-12, max_iterations: int = 1000, strict: bool = True) -> Sinkhorn:
    """Doubly stochastic attention [SABP22], for weighted measures.

    Pᵢⱼ = aⱼ e^{sᵢⱼ + fᵢ + gⱼ} with potentials such that Σⱼ Pᵢⱼ = 1 and Σᵢ aᵢPᵢⱼ = aⱼ. Computed in
    the logarithmic domain; `SelfAttention.plan` says how well the marginals are met. The
    softmax is its first half-iteration: ``max_iterations=0, strict=False``. With a mask the only
    plan is the identity, so masked layers are refused.

    Args:
        rtol: largest relative error of a column's marginal, maxⱼ |Σᵢ aᵢPᵢⱼ/aⱼ − 1|.
        max_iterations: most iterations.
        strict: whether a plan that has not converged raises `ConvergenceError`.
    """
    return Sinkhorn(
        number(rtol, "rtol", above=0, below=1),
        count(max_iterations, "max_iterations", least=0),
        as_bool(strict, "strict"),
    )


def custom(transition: Callable[[Tensor, Tensor], Tensor], *, row_wise: bool = False) -> Custom:
    """A normalisation of the whole matrix; its derivative is by automatic differentiation.

    The function gets the scores ``(*batch, H, m, n)``, −∞ where row i does not see column j, and
    the log-weights of the columns ``(*batch, 1, 1, n)``, and returns P ``(*batch, H, m, n)``. It
    always sees the whole matrix, in O(H n²) memory, whatever n is. A function ψ of each score has
    exact derivatives in O(n) memory as ``RowWise(log_psi)``.

    Args:
        transition: differentiable, in torch operations.
        row_wise: whether each row of P depends on that row of scores alone. Only then has the
            map a field Γ_μ(x) away from its atoms.
    """
    if not callable(transition):
        raise TypeError(f"transition: expected a function, got {type(transition).__name__}")
    return Custom(transition, as_bool(row_wise, "row_wise"))
