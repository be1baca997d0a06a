"""Linear maps given by their products: an algebra of Jacobians that are never stored."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from meanfield.checks import describe, to_host, without_autocast
from meanfield.linalg.blocks import TokenBlocks


@dataclass(frozen=True)
class Product:
    """A product with a linear map, which may have a faster form for few entries on the host.

    Attributes:
        tensors: ε ``(*batch, n, d)`` ↦ Jε ``(*batch, m, e)``.
        arrays: returns the same on arrays (1, n·d) ↦ (1, m·e), or None where it has no such form.
    """

    tensors: Callable[[Tensor], Tensor]
    arrays: Callable[[], Callable[[Any], Any] | None]

    @without_autocast
    def __call__(self, vectors: Tensor) -> Tensor:
        """Jε."""
        return self.tensors(vectors)


@dataclass(frozen=True, eq=False, repr=False)
class LinearMap:
    """A batch of linear maps J: (n, d) → (m, e), given by products with J and Jᵀ.

    Maps compose and add: ``J @ K``, ``J + K``, ``J - K``, ``c * J``, ``J.T``; ``J @ x`` is a
    product. The derivative of a residual block x + f(x), for example, is
    ``LinearMap.identity(...) + J``, and that of a composition g∘f is ``J_g @ J_f``.

    Args:
        matvec: ε ``(*batch, n, d)`` ↦ Jε ``(*batch, m, e)``.
        rmatvec: ζ ``(*batch, m, e)`` ↦ Jᵀζ ``(*batch, n, d)``.
        in_shape: (n, d).
        out_shape: (m, e).
        batch_shape: leading axes.
        dtype: of the tensors.
        device: of the tensors.
        dense: returns the matrices of a slice of the flattened batch, shape (b, m·e, n·d);
            without it they are assembled column by column.
        blocks: returns the `TokenBlocks` of one map of the flattened batch, or None where it has
            none; for certain bounds of norms. None if no map has them.

    Example:
        >>> J = LinearMap.pointwise(torch.tensor([[[0.0, 1.0], [2.0, 0.0]]]))
        >>> (2 * J.T @ J + LinearMap.identity(J.in_shape, dtype=J.dtype)).to_dense()
        tensor([[9., 0.],
                [0., 3.]])
    """

    matvec: Callable[[Tensor], Tensor]
    rmatvec: Callable[[Tensor], Tensor]
    in_shape: tuple[int, int]
    out_shape: tuple[int, int]
    batch_shape: torch.Size = field(default_factory=torch.Size)
    dtype: torch.dtype = torch.float64
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dense: Callable[[slice], Tensor] | None = None
    blocks: Callable[[int], TokenBlocks | None] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"LinearMap: expected dtype torch.float32 or torch.float64, got {self.dtype}; "
                "convert with .double()"
            )

    def __repr__(self) -> str:
        batch = f", batch_shape={tuple(self.batch_shape)}" if self.batch_shape else ""
        kind = str(self.dtype).removeprefix("torch.")
        return f"LinearMap({self.in_shape} → {self.out_shape}{batch}, dtype={kind})"

    # --- maps to begin with ---

    @classmethod
    def of(
        cls,
        points: Tensor,
        matvec: Callable[[Tensor], Tensor],
        rmatvec: Callable[[Tensor], Tensor],
        *,
        out_dim: int | None = None,
        each: bool = False,
        dense: Callable[[slice], Tensor] | None = None,
        blocks: Callable[[int], TokenBlocks | None] | None = None,
    ) -> LinearMap:
        """A map of displacements of these points, by products.

        Args:
            points: ``(*batch, n, d)``: gives shape, dtype and device; values are not read.
            matvec: ε ``(*batch, n, d)`` ↦ Jε ``(*batch, n, out_dim)``.
            rmatvec: ζ ↦ Jᵀζ, the other way.
            out_dim: d by default.
            each: one map R^d → R^out_dim for each point, a batch ``(*batch, n)`` of maps; the
                products given are those of all points at once.
            dense: as of `LinearMap`.
            blocks: as of `LinearMap`.
        """
        *batch, n, d = points.shape
        rows = 1 if each else n
        if each:
            matvec, rmatvec = _one_by_one(matvec), _one_by_one(rmatvec)
        return cls(
            matvec,
            rmatvec,
            in_shape=(rows, d),
            out_shape=(rows, d if out_dim is None else out_dim),
            batch_shape=torch.Size([*batch, n] if each else batch),
            dtype=points.dtype,
            device=points.device,
            dense=dense,
            blocks=blocks,
        )

    @classmethod
    def identity(
        cls,
        shape: tuple[int, int],
        *,
        batch_shape: tuple[int, ...] = (),
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> LinearMap:
        """ε ↦ ε on displacements ``(*batch, n, d)``, with shape (n, d)."""
        one = torch.ones((), dtype=dtype, device=device)
        return cls.diagonal(one.expand(*batch_shape, *shape))

    @classmethod
    def diagonal(cls, factors: Tensor) -> LinearMap:
        """ε ↦ factors ∘ ε, factors ``(*batch, n, d)``."""
        if not isinstance(factors, Tensor) or factors.ndim < 2:
            raise TypeError(f"factors: expected a tensor (..., n, d), got {describe(factors)}")
        n, d = factors.shape[-2:]

        def product(vectors: Tensor) -> Tensor:
            return factors * vectors

        def dense(part: slice) -> Tensor:
            return torch.diag_embed(factors.reshape(-1, n * d)[part])

        def blocks(index: int) -> TokenBlocks:
            return TokenBlocks(torch.diag_embed(factors.reshape(-1, n, d)[index]))

        return cls.of(factors, product, product, dense=dense, blocks=blocks)

    @classmethod
    def pointwise(cls, matrices: Tensor) -> LinearMap:
        """εᵢ ↦ Bᵢεᵢ: block-diagonal, with one matrix per particle, ``(*batch, n, e, d)``."""
        if not isinstance(matrices, Tensor) or matrices.ndim < 3:
            raise TypeError(
                f"matrices: expected a tensor (..., n, e, d), got {describe(matrices)}"
            )
        n, e, d = matrices.shape[-3:]

        def product(blocks: Tensor) -> Callable[[Tensor], Tensor]:
            return lambda vectors: (blocks @ vectors[..., None])[..., 0]

        def dense(part: slice) -> Tensor:
            blocks = matrices.reshape(-1, n, e, d)[part]
            whole = blocks.new_zeros(len(blocks), n, e, n, d)
            every = torch.arange(n, device=blocks.device)
            whole[:, every, :, every, :] = blocks.movedim(1, 0)
            return whole.flatten(3, 4).flatten(1, 2)

        def token_blocks(index: int) -> TokenBlocks:
            return TokenBlocks(matrices.reshape(-1, n, e, d)[index])

        like = matrices.new_empty(()).expand(*matrices.shape[:-3], n, d)
        forth, back = product(matrices), product(matrices.mT)
        return cls.of(like, forth, back, out_dim=e, dense=dense, blocks=token_blocks)

    # --- the algebra ---

    @property
    def T(self) -> LinearMap:
        """The transpose."""
        return replace(
            self,
            matvec=self.rmatvec,
            rmatvec=self.matvec,
            in_shape=self.out_shape,
            out_shape=self.in_shape,
            dense=_mapped(lambda matrices: matrices.mT, self.dense),
            blocks=None,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrices: ``(*batch, m·e, n·d)``."""
        return (*self.batch_shape, math.prod(self.out_shape), math.prod(self.in_shape))

    __array_ufunc__ = None  # NumPy leaves products to this class

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: NumPy would make one object of it."""
        raise TypeError("expected an array, got a LinearMap; take J.to_dense() or J.to_scipy()")

    @overload
    def __matmul__(self, other: LinearMap) -> LinearMap: ...

    @overload
    def __matmul__(self, other: Tensor) -> Tensor: ...

    @without_autocast
    def __matmul__(self, other: LinearMap | Tensor) -> LinearMap | Tensor:
        """J @ K, first K and then J; or J @ x, the product with a displacement."""
        if isinstance(other, torch.Tensor):
            wanted = (*self.batch_shape, *self.in_shape)
            if tuple(other.shape) != wanted:
                raise ValueError(f"J @ x: expected x of shape {wanted}, got {tuple(other.shape)}")
            return self.matvec(other)
        if not isinstance(other, LinearMap):
            raise TypeError(
                f"J @ x: expected a tensor or a LinearMap, got {describe(other)}; torch.as_tensor "
                "makes a tensor of an array"
            )
        self._check_kind(other, "@")
        if self.in_shape != other.out_shape:
            raise ValueError(
                f"J @ K: expected K to map into {self.in_shape}, where J starts, "
                f"got a K that maps into {other.out_shape}"
            )
        return replace(
            self,
            matvec=lambda eps: self.matvec(other.matvec(eps)),
            rmatvec=lambda zeta: other.rmatvec(self.rmatvec(zeta)),
            in_shape=other.in_shape,
            dense=_mapped(torch.matmul, self.dense, other.dense),
            blocks=_mapped(operator.matmul, self.blocks, other.blocks),
        )

    def __add__(self, other: LinearMap) -> LinearMap:
        """J + K of maps between the same spaces."""
        if not isinstance(other, LinearMap):
            return NotImplemented
        self._check_kind(other, "+")
        if (self.in_shape, self.out_shape) != (other.in_shape, other.out_shape):
            raise ValueError(
                f"J + K: expected two maps {self.in_shape} → {self.out_shape}, "
                f"got a K from {other.in_shape} to {other.out_shape}"
            )
        return replace(
            self,
            matvec=lambda eps: self.matvec(eps) + other.matvec(eps),
            rmatvec=lambda zeta: self.rmatvec(zeta) + other.rmatvec(zeta),
            dense=_mapped(torch.add, self.dense, other.dense),
            blocks=_mapped(operator.add, self.blocks, other.blocks),
        )

    def __mul__(self, factor: float) -> LinearMap:
        """c · J for a real number c."""
        if not isinstance(factor, numbers.Real):
            raise TypeError(f"J * c: expected a number, got {describe(factor)}; J @ x applies J")
        return replace(
            self,
            matvec=lambda eps: factor * self.matvec(eps),
            rmatvec=lambda zeta: factor * self.rmatvec(zeta),
            dense=_mapped(lambda matrices: factor * matrices, self.dense),
            blocks=_mapped(lambda blocks: float(factor) * blocks, self.blocks),
        )

    __rmul__ = __mul__

    def __neg__(self) -> LinearMap:
        return -1.0 * self

    def __sub__(self, other: LinearMap) -> LinearMap:
        return self + -other

    def _check_kind(self, other: LinearMap, sign: str) -> None:
        for name in ("batch_shape", "dtype", "device"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise ValueError(f"J {sign} K: expected K with {name} {mine}, got {theirs}")

    # --- other forms ---

    @property
    def rows(self) -> int:
        """m·e."""
        return math.prod(self.out_shape)

    @property
    def columns(self) -> int:
        """n·d."""
        return math.prod(self.in_shape)

    @without_autocast
    def to_dense(self) -> Tensor:
        """The matrices, shape ``(*batch, m·e, n·d)``, particles before features."""
        if self.dense is not None:
            flat = self.dense(slice(0, math.prod(self.batch_shape)))
        elif self.columns <= self.rows:
            flat = torch.stack(list(self._images()), -1)
        else:
            flat = torch.stack(list(self.T._images()), -2)
        return flat.reshape(*self.batch_shape, self.rows, self.columns)

    def to_scipy(self) -> Any:
        """A `scipy.sparse.linalg.LinearOperator` on flat NumPy vectors, for one map on the CPU.

        Raises:
            ValueError: the map is a batch of several.
        """
        from scipy.sparse.linalg import LinearOperator

        if math.prod(self.batch_shape) != 1:
            raise ValueError(
                f"to_scipy: expected one map, got a batch of shape {tuple(self.batch_shape)}"
            )

        def product(apply: Callable[[Tensor], Tensor], shape: tuple[int, int]) -> Any:
            def flat(vector: Any) -> Any:
                if np.iscomplexobj(vector):
                    return flat(vector.real) + 1j * flat(vector.imag)
                tensor = torch.as_tensor(vector, dtype=self.dtype, device=self.device)
                return to_host(apply(tensor.reshape(*self.batch_shape, *shape)).flatten())

            return flat

        return LinearOperator(
            (self.rows, self.columns),
            matvec=product(self.matvec, self.in_shape),
            rmatvec=product(self.rmatvec, self.out_shape),
            dtype=str(self.dtype).removeprefix("torch."),
        )

    def assembled(self) -> LinearMap:
        """The same maps by their matrices: assembled once, every product is one with them."""
        return self._by_matrices(self.to_dense())

    def without_gradient(self) -> LinearMap:
        """The same maps, whose products and matrices record nothing."""
        quietly = torch.no_grad()

        def quiet(product: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            if isinstance(product, Product):  # whose form on arrays stays
                return replace(product, tensors=quietly(product.tensors))
            return quietly(product)

        return replace(
            self,
            matvec=quiet(self.matvec),
            rmatvec=quiet(self.rmatvec),
            dense=None if self.dense is None else quietly(self.dense),
        )

    def block(self, index: Tensor) -> LinearMap:
        """Of blocks along the last batch axis one each, ``(*batch,)``, by its matrices."""
        chosen = self.to_dense().take_along_dim(index[..., None, None, None], -3)
        return self._by_matrices(chosen.squeeze(-3))

    def _by_matrices(self, matrices: Tensor) -> LinearMap:
        """Maps between the same spaces, by matrices ``(*batch, m·e, n·d)``."""
        flat = matrices.reshape(-1, self.rows, self.columns)
        return LinearMap(
            matvec=_by_matrix(matrices, self.out_shape),
            rmatvec=_by_matrix(matrices.mT, self.in_shape),
            in_shape=self.in_shape,
            out_shape=self.out_shape,
            batch_shape=matrices.shape[:-2],
            dtype=self.dtype,
            device=self.device,
            dense=lambda part: flat[part],
        )

    def _images(self) -> Iterator[Tensor]:
        """The columns, (b, m·e) each."""
        for index in range(self.columns):
            unit = torch.zeros(self.columns, dtype=self.dtype, device=self.device)
            unit[index] = 1.0
            shape = (*self.batch_shape, *self.in_shape)
            yield self.matvec(unit.reshape(self.in_shape).expand(shape)).reshape(-1, self.rows)


def _one_by_one(product: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda vectors: product(vectors.squeeze(-2)).unsqueeze(-2)


def _by_matrix(matrices: Tensor, shape: tuple[int, int]) -> Callable[[Tensor], Tensor]:
    def product(vectors: Tensor) -> Tensor:
        out = matrices @ vectors.reshape(*vectors.shape[:-2], matrices.shape[-1], 1)
        return out.reshape(*matrices.shape[:-2], *shape)

    return product


def _mapped(operation: Callable[..., Any], *members: Callable[[Any], Any] | None) -> Any:
    """`dense` or `blocks` of one map or two, after an operation; None where one has none."""
    if any(member is None for member in members):
        return None

    def mapped(at: slice | int) -> Any:
        parts = [member(at) for member in members if member is not None]
        return None if any(part is None for part in parts) else operation(*parts)

    return mapped
