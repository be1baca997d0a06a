"""Normalisations: from the scores of a row to its attention weights.

`RowWise` normalises each row by itself: any positive function ψ of the scores, divided by its sum
or not, with a sink or without. `softmax`, `sigmoid` and `exponential` are values of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from meanfield.checks import as_float_tensor
from meanfield.copies import own_copy
from meanfield.habits import NoFunction, with_hints
from meanfield.linalg import LinearMap

if TYPE_CHECKING:
    from meanfield.attention.sinkhorn import Plan
    from meanfield.attention.tangent import AttentionTangent
    from meanfield.attention.weights import Weights


class Normalization(NoFunction):
    """What turns the scores of a layer into its attention weights P, a row at a time.

    A `RowWise`, or Sinkhorn's: it first finds potentials of the columns (`plan`) and then
    normalises the rows by `rows`.

    Attributes:
        rows: how rows are normalised, with the potentials added to the log-weights.
        is_softmax: whether it is the softmax of each row.
        takes_masks: whether P is defined for a masked layer.
    """

    _instead = "give it to a layer: SelfAttention(parameters, normalization=...)"
    rows: RowWise
    is_softmax: bool = False
    takes_masks: bool = True

    def head(self, index: int) -> Normalization:
        """The normalisation of one head; `self` unless it holds numbers per head."""
        return self

    def plan(self, weights: Weights) -> Plan | None:
        """A plan of the whole matrix, from weights without potentials; None if there is none."""
        return None

    def linear_map(self, tangent: AttentionTangent) -> LinearMap:
        """The derivative of the atoms, given that at fixed potentials."""
        return tangent.as_linear_map()


@with_hints
@final
@dataclass(frozen=True, eq=False)
class RowWise(Normalization):
    """Pᵢⱼ = aⱼ ψ(sᵢⱼ) / (Σ_l a_l ψ(s_il) + e^sink), or aⱼ ψ(sᵢⱼ) if rows are not divided.

    Args:
        log_psi: log ψ, entry by entry, in differentiable torch operations, with ψ > 0, in a form
            that keeps its digits where ψ is small: log(elu + 1) has none below −36. None is
            ψ = exp.
        divides: whether a row is divided by its sum.
        sink: logit of one more column of value 0, a number or one per head (H,); None is none.
        name: for messages.

    Raises:
        ValueError: where the layer is evaluated, a row whose ψ are all 0.

    Example:
        >>> def log_psi(s):  # of ψ = elu + 1: 1 + s above 0, e^s below
        ...     return torch.where(s > 0, s.clamp_min(0).log1p(), s)
        >>> linear_attention = RowWise(log_psi, name="elu + 1")
        >>> linear_attention
        elu + 1
    """

    log_psi: Callable[[Tensor], Tensor] | None = None
    divides: bool = True
    sink: Tensor | None = None
    name: str = "row-wise"

    def __post_init__(self) -> None:
        if self.log_psi is not None and not callable(self.log_psi):
            raise TypeError(f"log_psi: expected a function of scores, got {self.log_psi!r}")
        if self.sink is None:
            return
        if not self.divides:
            raise ValueError("sink: expected none where rows are not divided by their sum")
        logits = own_copy(as_float_tensor(self.sink, "sink"), "sink")
        if logits.ndim > 1 or not logits.numel() or not bool(torch.isfinite(logits).all()):
            raise ValueError(
                f"sink: expected a finite number or one per head, got {logits.tolist()}"
            )
        object.__setattr__(self, "sink", logits)

    def __repr__(self) -> str:
        return self.name

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Those of this module go by name: a copy of a layer equals it."""
        known = globals().get(self.name) is self
        return self.name if known else super().__reduce_ex__(protocol)

    @property
    def rows(self) -> RowWise:  # type: ignore[override]
        """Itself."""
        return self

    @property
    def is_softmax(self) -> bool:  # type: ignore[override]
        """Whether ψ = exp and rows sum to one."""
        return self.log_psi is None and self.divides and self.sink is None

    def head(self, index: int) -> RowWise:
        """With the sink of that head."""
        if self.sink is None or not self.sink.ndim:
            return self
        return replace(self, sink=self.sink[index])

    def log_sums(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """log (Σ_l a_l ψ(s_il) + e^sink) of logits log aⱼψ(sᵢⱼ), (..., m, 1); 0 if undivided.

        In two parts, the largest logit and the rest: beside large scores their sum would lose
        the digits of the rest. A row that sees nothing has −∞ as its rest.
        """
        if not self.divides:
            nothing = torch.zeros_like(logits[..., :1])
            return nothing, nothing
        tops = logits.amax(-1, keepdim=True)
        if self.sink is not None:
            tops = torch.maximum(tops, self._sink_column(logits))
        tops = tops.clamp_min_(torch.finfo(tops.dtype).min)  # of a row that sees nothing
        sums = (logits - tops).exp_().sum(-1, keepdim=True)
        if self.sink is not None:
            sums = sums + (self._sink_column(logits) - tops).exp()
        return tops, sums.log_()

    def log_p(self, logits: Tensor, blind: Tensor | None) -> Tensor:
        """log P of logits log aⱼψ(sᵢⱼ), (..., H, m, n).

        Args:
            logits: −∞ where i does not see j.
            blind: rows that see no mass, (..., m, 1), or None if there are none; their log P is
                −∞.
        """
        if not self.divides:
            return logits
        if self.sink is not None:
            return self.log_p_and_sink(logits)[..., :-1]
        if blind is None:
            return logits.log_softmax(-1)
        return logits.masked_fill(blind, 0.0).log_softmax(-1).masked_fill(blind, -math.inf)

    def log_p_and_sink(self, logits: Tensor) -> Tensor:
        """log P with one column more, what goes to the sink."""
        return torch.cat([logits, self._sink_column(logits)], -1).log_softmax(-1)

    def p(self, logits: Tensor, blind: Tensor | None) -> Tensor:
        """P itself; for the softmax in one pass."""
        if not self.is_softmax:
            return self.log_p(logits, blind).exp()
        if blind is None:
            return logits.softmax(-1)
        return logits.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)

    def _sink_column(self, logits: Tensor) -> Tensor:
        assert self.sink is not None
        heads = logits.shape[-3]
        if self.sink.ndim and len(self.sink) != heads:
            raise ValueError(f"sink: expected one or one per head ({heads}), got {len(self.sink)}")
        return self.sink.to(logits)[..., None, None].expand(*logits.shape[:-1], 1)


softmax = RowWise(name="softmax")
sigmoid = RowWise(torch.nn.functional.logsigmoid, divides=False, name="sigmoid")
exponential = RowWise(divides=False, name="exponential")


@with_hints
def sink(logits: Any) -> RowWise:
    """Softmax with an attention sink: Pᵢⱼ = aⱼ e^{sᵢⱼ} / (e^{logit} + Σ_l a_l e^{s_il}).

    Part of the attention goes to one more column, of value 0, that belongs to no particle.

    Args:
        logits: the sink's logit, a number or one per head (H,).
    """
    return RowWise(sink=as_float_tensor(logits, "logits"), name="sink")
