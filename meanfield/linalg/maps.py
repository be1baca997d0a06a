"""Linear maps given by their products."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["CoarseSpace", "LinearMap"]


@dataclass(frozen=True, eq=False)
class CoarseSpace:
    """Displacements in which few shapes over the particles move, and a model of J between them.

    A norm estimate starts from the model's top singular vector, and corrects by the model what a
    Krylov iteration is slow at. Nothing that it claims rests on how good the model is.

    Attributes:
        shapes: Φ (*batch, n, p) with orthonormal columns: the space is all Φy, y (p, d).
        matvec: the model ZᵀJΦ, Z (m, q) with orthonormal columns, of k vectors at once:
            (k, *batch, p, d) ↦ (k, *batch, q, e). It should cost little beside a product with J.
        rmatvec: its transpose, (k, *batch, q, e) ↦ (k, *batch, p, d).
        in_shape: (p, d).
        out_shape: (q, e).
        start: unit vectors (k, *batch, p, d) near the model's top, if any are known; all batch
            axes may be of size 1.
    """

    shapes: Tensor
    matvec: Callable[[Tensor], Tensor]
    rmatvec: Callable[[Tensor], Tensor]
    in_shape: tuple[int, int]
    out_shape: tuple[int, int]
    start: Tensor | None = None


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
        coarse: a coarse space that may hold most of the top singular vector; used in place of
            `hints`.
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
    coarse: Callable[[], CoarseSpace] | None = None

    @property
    def rows(self) -> int:
        """m·e."""
        return math.prod(self.out_shape)

    @property
    def columns(self) -> int:
        """n·d."""
        return math.prod(self.in_shape)

    def image(self, vectors: Tensor) -> Tensor:
        """J of flat vectors (b, n·d), b the flattened batch; (b, m·e).

        Raises:
            OverflowError: it is not finite.
        """
        return self._flat(self.matvec, vectors, self.in_shape, self.rows)

    def pull_back(self, vectors: Tensor) -> Tensor:
        """Jᵀ of flat vectors (b, m·e); (b, n·d). Raises as `image` does."""
        return self._flat(self.rmatvec, vectors, self.out_shape, self.columns)

    def _flat(
        self,
        product: Callable[[Tensor], Tensor],
        vectors: Tensor,
        shape: tuple[int, int],
        size: int,
    ) -> Tensor:
        image = product(vectors.reshape(*self.batch_shape, *shape)).reshape(len(vectors), size)
        # The sum first: it is finite nearly always, and needs no second tensor.
        if not bool(torch.isfinite(image.sum())) and not bool(torch.isfinite(image).all()):
            raise OverflowError(
                f"a product with the linear map leaves the range of {image.dtype}: its norm "
                "cannot be represented; use less extreme weights or a smaller radius"
            )
        return image

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
