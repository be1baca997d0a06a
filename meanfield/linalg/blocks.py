"""Linear maps of tokens by their blocks Jᵢⱼ, and what bounds of norms need of them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

# Between these the squares of entries, times and over weights, stay in range.
_IN_RANGE = 1e-50, 1e50
# Entries of (rows, n, d), and of the Gram matrices of rows, at once (float64: 64, 128 MiB).
_PAIR_ENTRIES, _GRAM_ENTRIES = 2**23, 2**24


class InDouble:
    """A frozen dataclass whose numbers are in double precision and carry no gradient."""

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]
            given = getattr(self, each.name)
            if isinstance(given, Tensor) and given.is_floating_point():
                object.__setattr__(self, each.name, given.detach().double())


@dataclass(frozen=True, eq=False)
class Metric(InDouble):
    """BⱼBⱼᵀ = scaleⱼ · base baseᵀ − lessⱼ · yⱼyⱼᵀ, as the derivatives of normalisations have it.

    Attributes:
        scale: (n,).
        base: (d, d′).
        less: ≥ 0, (n,).
        along: y, (n, d).
    """

    scale: Tensor
    base: Tensor
    less: Tensor
    along: Tensor


class Core(ABC):
    """Blocks Tᵢⱼ (e × d), one for each pair of n tokens, that are never all formed at once."""

    @abstractmethod
    def entries(self, *, squares: bool) -> int:
        """How many numbers are formed at once for each row, in products or in `gram`."""

    @abstractmethod
    def step(
        self, x: Tensor, s: Tensor, rows: slice, metric: Metric | None
    ) -> tuple[Tensor, Tensor]:
        """|BⱼᵀTᵢⱼᵀxᵢ|² and Σⱼ sᵢⱼ TᵢⱼBⱼBⱼᵀTᵢⱼᵀxᵢ, (rows, n) and (rows, e), without a bound.

        Args:
            x: (rows, e).
            s: ≥ 0, (rows, n).
            rows: neighbours, from start to stop.
            metric: of B; None is the identity.
        """

    @abstractmethod
    def own(self, rows: slice) -> Tensor:
        """The blocks Tᵢᵢ, (rows, e, d)."""

    @abstractmethod
    def gram(self, s: Tensor, rows: slice, metric: Metric | None) -> tuple[Tensor, Tensor]:
        """Σⱼ sᵢⱼ TᵢⱼBⱼBⱼᵀTᵢⱼᵀ of each row, and what rounding may have taken.

        Args:
            s: ≥ 0, (rows, n).
            rows: neighbours, from start to stop.
            metric: of B; None is the identity.

        Returns:
            The matrices (rows, e, e), and a bound of the norm of their errors, (rows,).
        """

    @abstractmethod
    def seen(self, rows: slice) -> Tensor:
        """Which blocks may differ from 0, (rows, n)."""

    @abstractmethod
    def size(self) -> Tensor:
        """A number of the order of the largest entries."""

    @abstractmethod
    def scaled(self, factor: float) -> Core:
        """The same blocks times a number, without anything in between out of range."""


@dataclass(frozen=True, eq=False)
class TokenBlocks(InDouble):
    """Jᵢⱼ = LᵢTᵢⱼRⱼ + δᵢⱼDᵢ: maps of tokens one by one round one that joins them.

    Such maps compose and add as long as at most one of them joins tokens: a block of a
    transformer with its normalisations, its residual and its feed-forward layer is one of them.

    Attributes:
        diagonal: D, (n, e, d).
        core: T; None is 0.
        left: L, (n, e, ·); None is the identity.
        right: R, (n, ·, d); None is the identity.
        metric: of RⱼRⱼᵀ where there is an R, and of DⱼDⱼᵀ where there is no core, if it is known.
    """

    diagonal: Tensor
    core: Core | None = None
    left: Tensor | None = None
    right: Tensor | None = None
    metric: Metric | None = None

    # --- the algebra; None where the result is not of this kind ---

    def __matmul__(self, first: TokenBlocks) -> TokenBlocks | None:
        """J @ K, first K and then J."""
        diagonal = self.diagonal @ first.diagonal
        if self.core is None:
            if first.core is None:
                return TokenBlocks(diagonal)
            left = self.diagonal if first.left is None else self.diagonal @ first.left
            return replace(first, diagonal=diagonal, left=left)
        if first.core is None and first.metric is not None and self.right is None:
            return replace(self, diagonal=diagonal, right=first.diagonal, metric=first.metric)
        return None

    def __add__(self, other: TokenBlocks) -> TokenBlocks | None:
        """J + K."""
        if self.core is not None and other.core is not None:
            return None
        kept = self if self.core is not None else other
        metric = None if kept.core is None else kept.metric
        return replace(kept, diagonal=self.diagonal + other.diagonal, metric=metric)

    def __mul__(self, factor: float) -> TokenBlocks:
        """c · J."""
        diagonal = factor * self.diagonal
        if self.core is None:
            return TokenBlocks(diagonal)
        return replace(self, diagonal=diagonal, core=self.core.scaled(factor))

    __rmul__ = __mul__

    def in_range(self) -> tuple[TokenBlocks, float]:
        """The blocks times a power of two after which squares stay in range, and that power."""
        largest = self.diagonal.abs().max()
        size = float(largest if self.core is None else largest.maximum(self.core.size()))
        if not 0 < size < math.inf or _IN_RANGE[0] < size < _IN_RANGE[1]:
            return self, 1.0
        factor = math.ldexp(1.0, -math.frexp(size)[1])
        return self * factor, factor

    # --- what bounds need ---

    @property
    def n(self) -> int:
        """Number of tokens."""
        return self.diagonal.shape[0]

    @property
    def shape(self) -> tuple[int, int, int]:
        """n, e, d."""
        n, e, d = self.diagonal.shape
        return n, e, d

    def portions(self, *, squares: bool = False) -> list[slice]:
        """All rows, as many neighbours at a time as fit in memory, for products or for `gram`."""
        n, e, d = self.shape
        entries = n * d if self.core is None else max(n * d, self.core.entries(squares=squares))
        most = max(1, min(_PAIR_ENTRIES // entries, _GRAM_ENTRIES // e**2))
        return [slice(start, min(start + most, n)) for start in range(0, n, most)]

    @cached_property
    def _own_of_core(self) -> Tensor:
        """The blocks TᵢᵢRᵢ of a core, (n, ·, d)."""
        assert self.core is not None
        own = torch.cat([self.core.own(rows) for rows in self.portions(squares=True)])
        return own if self.right is None else own @ self.right

    @cached_property
    def own(self) -> Tensor:
        """The blocks Jᵢᵢ, (n, e, d)."""
        if self.core is None:
            return self.diagonal
        own = self._own_of_core
        return self.diagonal + (own if self.left is None else self.left @ own)

    def step(self, x: Tensor, s: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """|Jᵢⱼᵀxᵢ|² for x (rows, e), and Σⱼ sᵢⱼ JᵢⱼJᵢⱼᵀxᵢ: (rows, n) and (rows, e)."""
        own, at = self.own[rows], self._on_diagonal(s, rows)
        y = _each(own.mT, x)
        after = _each(own, at[:, None] * y)
        if self.core is None:
            squares = torch.zeros_like(s)
        else:
            others = s.clone()
            self._on_diagonal(others, rows).zero_()
            L = None if self.left is None else self.left[rows]
            inner = x if L is None else _each(L.mT, x)
            squares, moved = self.core.step(inner, others, rows, self.metric)
            after = after + (moved if L is None else _each(L, moved))
        self._on_diagonal(squares, rows).copy_(y.square().sum(-1))
        return squares, after

    def gram(self, s: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Σⱼ sᵢⱼ JᵢⱼJᵢⱼᵀ of each row, (rows, e, e), and a bound of the norm of its error."""
        D, own = self.diagonal[rows], self._on_diagonal(s, rows)
        squares = own[:, None, None] * (D @ D.mT)
        slack = (D.shape[-1] + 4) * torch.finfo(D.dtype).eps * own * D.square().sum((-2, -1))
        if self.core is None:
            return squares, slack
        found, error = self._core_gram(self.core, s, rows)
        # TᵢᵢRᵢDᵢᵀ: the core on the diagonal, with D.
        beside = self._own_of_core[rows]
        size = torch.linalg.vector_norm(beside, dim=(-2, -1))
        beside = own[:, None, None] * (beside @ D.mT)
        if self.left is not None:
            L = self.left[rows]
            beside = L @ beside
            size = size * torch.linalg.vector_norm(L, dim=(-2, -1))
        slack = slack + 2 * _room(D) * size * own * torch.linalg.vector_norm(D, dim=(-2, -1))
        # The additions below; of D and of what is beside it they are in their own.
        sums = 4 * torch.finfo(D.dtype).eps * torch.linalg.vector_norm(found, dim=(-2, -1))
        slack = slack + error + sums
        return squares + found + beside + beside.mT, slack

    def _core_gram(self, core: Core, s: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """What the core gives alone, between L and Lᵀ."""
        found, error = core.gram(s, rows, self.metric)
        if self.left is None:
            return found, error
        L = self.left[rows]
        # What L makes of the error inside, and the products with L.
        inner = torch.linalg.vector_norm(found, dim=(-2, -1))
        error = L.square().sum((-2, -1)) * (error + _room(L) * inner)
        return L @ found @ L.mT, error

    def seen(self, rows: slice) -> Tensor:
        """Which blocks may differ from 0, (rows, n)."""
        if self.core is None:
            seen = self.diagonal.new_zeros(rows.stop - rows.start, self.n, dtype=torch.bool)
        else:
            seen = self.core.seen(rows).clone()
        self._on_diagonal(seen, rows).logical_or_(self.diagonal[rows].flatten(1).any(-1))
        return seen

    def _on_diagonal(self, per_pair: Tensor, rows: slice) -> Tensor:
        """The entries (i, i) of (rows, n, …), a view."""
        return per_pair[:, rows].diagonal(0, 0, 1).movedim(-1, 0)


def _each(matrices: Tensor, vectors: Tensor) -> Tensor:
    # Rows times transposes: bmm takes two to six times as long for columns.
    return (vectors[..., None, :] @ matrices.mT)[..., 0, :]


def _room(matrices: Tensor) -> float:
    return 4 * (sum(matrices.shape[-2:]) + 4) * torch.finfo(matrices.dtype).eps
