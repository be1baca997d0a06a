"""Unnormalised attention: the gradient flow of the interaction energy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meanfield.checks import as_float_tensor, check_finite, check_same_kind
from meanfield.measures import ParticleMeasure

__all__ = ["EnergyFlow"]

_BLOCK = 2**22  # entries of a block of scores: 32 MB in float64


@dataclass(frozen=True, eq=False, init=False)
class EnergyFlow:
    """Γ_μ(x) = ∫ e^{⟨Ax, y⟩ − s} V y dμ(y): attention without the softmax's denominator.

    "USA" in Geshkovski, Letrouit, Polyanskiy, Rigollet (arXiv 2312.10794). For symmetric A and
    V = A it is the gradient of the energy ½∬e^{⟨Ax,y⟩ − s}dμdμ.

    Args:
        A: scores, shape (d, d).
        V: values, shape (d, d).
        log_scale: s, subtracted from all scores: on the unit sphere s = β keeps A = βI from
            overflowing, and changes the unit of time.
        causal: whether x sees only atoms at positions up to its own.

    Example:
        >>> F = EnergyFlow([[0.0]], [[1.0]])
        >>> F(ParticleMeasure([[1.0], [3.0]])).points
        tensor([[2.],
                [2.]], dtype=torch.float64)
    """

    A: Tensor
    V: Tensor
    log_scale: float
    causal: bool

    def __init__(
        self, A: object, V: object, *, log_scale: float = 0.0, causal: bool = False
    ) -> None:
        scores = as_float_tensor(A, "A")
        values = as_float_tensor(V, "V", like=scores)
        for matrix, name in ((scores, "A"), (values, "V")):
            if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
                raise ValueError(
                    f"{name}: expected a square matrix, got shape {tuple(matrix.shape)}"
                )
            check_finite(matrix, name)
        if scores.shape != values.shape:
            raise ValueError(
                f"A, V: expected one shape, got {tuple(scores.shape)} and {tuple(values.shape)}"
            )
        store = object.__setattr__
        store(self, "A", scores)
        store(self, "V", values)
        store(self, "log_scale", float(log_scale))
        store(self, "causal", bool(causal))

    def __call__(self, mu: ParticleMeasure, /) -> ParticleMeasure:
        """Atoms move to Γ_μ(xᵢ); O(n) memory.

        Raises:
            ValueError: another dimension than A's, or no positions when causal.
            TypeError: another dtype than A's.
        """
        if mu.dim != self.A.shape[0]:
            raise ValueError(f"expected a measure on R^{self.A.shape[0]}, got one on R^{mu.dim}")
        if self.causal and mu.positions is None:
            raise ValueError("causal: expected a measure with positions, got one without")
        check_same_kind(self.A, "A", mu.points, "the measure")
        queries, values = mu.points @ self.A.mT, mu.points @ self.V.mT
        columns = mu.log_weights[..., None, :] - self.log_scale
        size = max(1, _BLOCK // max(mu.log_weights.numel(), 1))
        parts = []
        for start in range(0, mu.n_particles, size):
            rows = slice(start, start + size)
            scores = queries[..., rows, :] @ mu.points.mT + columns
            if self.causal and mu.positions is not None:
                later = mu.positions[..., None, :] > mu.positions[..., rows, None]
                scores = scores.masked_fill(later, -torch.inf)
            parts.append(scores.exp() @ values)
        return mu.replace(torch.cat(parts, -2))
