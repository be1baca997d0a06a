"""Kernels that change the scores of another one: caps, linear biases and windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from meanfield.attention.kernels.bilinear import dot_product
from meanfield.attention.kernels.kernel import (
    FeatureSizes,
    Kernel,
    ModifiedKernel,
    Score,
    checked_inner,
)
from meanfield.attention.parameters import AttentionParameters
from meanfield.checks import as_float_tensor, check_finite, number
from meanfield.habits import with_hints


@final
@dataclass(frozen=True)
class SoftCap(ModifiedKernel):
    """τ · tanh(s/τ) of the inner kernel's scores s; made by `soft_cap`.

    Position biases (`alibi`, `window`) are added after every cap, in whatever order kernels nest.
    """

    tau: float
    inner: Kernel = dot_product

    @property
    def score(self) -> Score:  # type: ignore[override]
        """τ tanh(⟨Ax, y⟩/τ) where the inner score is ⟨Ax, y⟩."""
        of_dot_product = self.inner.score.kind == "dot product"
        return Score("soft cap", self.tau) if of_dot_product else Score("other")

    def feature_sizes(self, parameters: AttentionParameters, radius: float) -> FeatureSizes | None:
        """The inner kernel's: the slope of τ·tanh(s/τ) is at most 1."""
        return self.inner.feature_sizes(parameters, radius)

    @property
    def curvature(self) -> float:
        """4/(3√3 τ), and as much more as the inner kernel has: all slopes are at most 1."""
        return 4 / (3 * math.sqrt(3) * self.tau) + self.inner.curvature

    @property
    def activation(self) -> Callable[[Tensor], Tensor]:
        """s ↦ τ · tanh(s/τ), after the inner kernel's own."""
        before, tau = self.inner.activation, self.tau
        if before is None:
            return lambda s: tau * torch.tanh(s / tau)
        return lambda s: tau * torch.tanh(before(s) / tau)


@final
@dataclass(frozen=True)
class Alibi(ModifiedKernel):
    """−slope_h · length · |s − t| added to the scores of head h; made by `alibi`."""

    slopes: tuple[float, ...]
    length: float
    inner: Kernel = dot_product
    needs_positions = True

    def head(self, index: int) -> Alibi:
        """With the slope of that head."""
        slope = self.slopes[index if len(self.slopes) > 1 else 0]
        return replace(self, slopes=(slope,), inner=self.inner.head(index))

    def feature_sizes(self, parameters: AttentionParameters, radius: float) -> FeatureSizes | None:
        """The inner kernel's; biases of positions in [0, 1] are within |slope| · length."""
        inner = self.inner.feature_sizes(parameters, radius)
        if inner is None:
            return None
        slopes = torch.as_tensor(self.slopes, dtype=inner.bias.dtype, device=inner.bias.device)
        return inner._replace(bias=inner.bias + self.length * slopes.abs())

    def position_bias(
        self, parameters: AttentionParameters, rows: Tensor, columns: Tensor
    ) -> Tensor:
        """On top of the inner kernel's."""
        if len(self.slopes) not in (1, parameters.n_heads):
            raise ValueError(
                f"slopes: expected one or one per head ({parameters.n_heads}), "
                f"got {len(self.slopes)}"
            )
        slopes = torch.as_tensor(self.slopes, dtype=rows.dtype, device=rows.device)
        apart = (rows[..., None, :, None] - columns[..., None, None, :]).abs()
        bias = -self.length * slopes[:, None, None] * apart
        before = self.inner.position_bias(parameters, rows, columns)
        return bias if before is None else bias + before


@final
@dataclass(frozen=True)
class Window(ModifiedKernel):
    """Rows see only columns at a distance below `width` in position; made by `window`."""

    width: float
    inner: Kernel = dot_product
    needs_positions = True

    @property
    def reach(self) -> float:  # type: ignore[override]
        """The width, or that of a window inside."""
        return min(self.width, self.inner.reach)


@with_hints
def soft_cap(tau: float, *, inner: Kernel = dot_product) -> SoftCap:
    """τ · tanh(scale · ⟨q, k⟩ / τ): scores that cannot leave (−τ, τ).

    Position biases are added after the cap, in whatever order kernels nest: ``soft_cap(τ,
    inner=alibi(...))`` is ``alibi(..., inner=soft_cap(τ))``.

    Args:
        tau: τ > 0.
        inner: the kernel whose scores are capped.
    """
    return SoftCap(number(tau, "tau", above=0), checked_inner(inner))


@with_hints
def alibi(slopes: Sequence[float], *, length: float = 1.0, inner: Kernel = dot_product) -> Alibi:
    """Scores less slope_h · length · |s − t|: attention with linear biases.

    Args:
        slopes: one per head, or one for all.
        length: of the sequence that the positions in [0, 1] stand for.
        inner: the kernel whose scores are biased.
    """
    each = as_float_tensor(slopes, "slopes")
    if each.ndim != 1 or not len(each):
        raise ValueError(f"slopes: expected one per head, got shape {tuple(each.shape)}")
    check_finite(each, "slopes")
    length = number(length, "length", above=0)
    slopes = tuple(number(slope, "slopes") for slope in each)
    return Alibi(slopes, length, checked_inner(inner))


@with_hints
def window(width: float, *, inner: Kernel = dot_product) -> Window:
    """Attention within a window: i sees j only if |sᵢ − sⱼ| < width.

    For n tokens at i/n and a window of w tokens (the query's own included), give
    (w − ½)/n: half a step keeps clear of rounding.

    Args:
        width: in units of position, > 0. A whole number above 1 is refused as one of tokens.
        inner: the kernel that is limited to the window.
    """
    width = number(width, "width", above=0, finite=False)
    if width > 1 and width.is_integer():
        raise ValueError(
            f"width: expected one in units of position, which are in [0, 1], got {width:g}; for "
            "w of n tokens give (w - 0.5) / n"
        )
    return Window(width, checked_inner(inner))
