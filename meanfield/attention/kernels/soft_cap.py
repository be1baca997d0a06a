"""Scores bounded by τ·tanh(score/τ)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
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
from meanfield.checks import number


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


def soft_cap(tau: float, *, inner: Kernel = dot_product) -> SoftCap:
    """τ · tanh(scale · ⟨q, k⟩ / τ): scores that cannot leave (−τ, τ).

    Position biases are added after the cap, in whatever order kernels nest: ``soft_cap(τ,
    inner=alibi(...))`` is ``alibi(..., inner=soft_cap(τ))``.

    Args:
        tau: τ > 0.
        inner: the kernel whose scores are capped.
    """
    return SoftCap(number(tau, "tau", above=0), checked_inner(inner))
