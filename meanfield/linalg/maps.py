"""Linear maps given by their products."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["LinearMap"]


@dataclass(frozen=True, eq=False)
class LinearMap:
    """A batch of linear maps J: (n, d) → (m, e) given by products with J and Jᵀ.

    Args:
        matvec: ε (*batch, n, d) ↦ Jε (*batch, m, e).
        rmatvec: ζ (*batch, m, e) ↦ Jᵀζ (*batch, n, d).
        in_shape: (n, d).
        out_shape: (m, e).
        batch_shape: leading axes.
        dtype: of the tensors.
        device: of the tensors.
        dense: returns the matrices of a slice of the flattened batch, shape (b, m·e, n·d);
            without it they are assembled column by column.
        hints: displacements (*batch, n, d) that may have a large image; a norm estimate
            starts from them as well as from a random one.
    """

    matvec: Callable[[Tensor], Tensor]
    rmatvec: Callable[[Tensor], Tensor]
    in_shape: tuple[int, int]
    out_shape: tuple[int, int]
    batch_shape: torch.Size = field(default_factory=torch.Size)
    dtype: torch.dtype = torch.float64
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dense: Callable[[slice], Tensor] | None = None
    hints: Callable[[], Tensor] | None = None

    @property
    def rows(self) -> int:
        """m·e."""
        return math.prod(self.out_shape)

    @property
    def columns(self) -> int:
        """n·d."""
        return math.prod(self.in_shape)

    def to_dense(self) -> Tensor:
        """The matrices, shape (*batch, m·e, n·d), particles before features."""
        batch = math.prod(self.batch_shape)
        if self.dense is not None:
            flat = self.dense(slice(0, batch))
        else:
            flat = torch.stack([self._column(j) for j in range(self.columns)], -1)
        return flat.reshape(*self.batch_shape, self.rows, self.columns)

    def _column(self, index: int) -> Tensor:
        unit = torch.zeros(self.columns, dtype=self.dtype, device=self.device)
        unit[index] = 1.0
        image = self.matvec(unit.reshape(self.in_shape).expand(*self.batch_shape, *self.in_shape))
        return image.reshape(-1, self.rows)
