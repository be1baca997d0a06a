"""Linear maps of tokens by their blocks Jᵢⱼ, and what bounds of norms need of them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Between these the squares of entries, times and over weights, stay in range.
_IN_RANGE = 1e-50, 1e50
# Entries of (rows, n, d), and of the matrices of groups of rows, at once (float64: 64, 128 MiB).
_PAIR_ENTRIES, _GRAM_ENTRIES = 2**23, 2**24


@dataclass(frozen=True)
class Rows:
    """Some rows of blocks, in groups of neighbours: tokens start, …, stop − 1 by `size`."""

    start: int
    stop: int
    size: int = 1

    @property
    def slice(self) -> slice:
        """Of the tokens."""
        return slice(self.start, self.stop)

    @property
    def count(self) -> int:
        """Number of tokens."""
        return self.stop - self.start

    def grouped(self, per_row: Tensor) -> Tensor:
        """(rows, …) as (groups, size, …)."""
        return per_row.unflatten(0, (-1, self.size))

    def repeated(self, per_group: Tensor) -> Tensor:
        """(groups, …) as (rows, …), the same for each row of a group."""
        return per_group.repeat_interleave(self.size, 0)


def groups(n: int, size: int, most: int) -> Iterator[Rows]:
    """All rows in groups, at most so many groups at a time; a smaller last group by itself."""
    whole = n - n % size
    for start in range(0, whole, most * size):
        yield Rows(start, min(start + most * size, whole), size)
    if whole < n:
        yield Rows(whole, n, n - whole)


def portions(shape: tuple[int, int, int], size: int = 1) -> list[Rows]:
    """All rows of n × n blocks (e × d), so many groups at a time as fit in memory."""
    n, e, d = shape
    most = min(_PAIR_ENTRIES // (size * n * d), _GRAM_ENTRIES // (size * e) ** 2)
    return list(groups(n, size, max(1, most)))


@dataclass(frozen=True, eq=False)
class Metric:
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

    def __post_init__(self) -> None:
        for name in ("scale", "base", "less", "along"):
            object.__setattr__(self, name, getattr(self, name).detach().double())


class Core(ABC):
    """Blocks Tᵢⱼ (e × d), one for each pair of tokens, that are never all formed at once.

    Attributes:
        n: number of tokens.
        out_dim: e.
        in_dim: d.
    """

    n: int
    out_dim: int
    in_dim: int

    @abstractmethod
    def back(self, x: Tensor, rows: Rows) -> Tensor:
        """Tᵢⱼᵀxᵢ for x (rows, e): (rows, n, d)."""

    @abstractmethod
    def forth(self, y: Tensor, rows: Rows) -> Tensor:
        """Σⱼ Tᵢⱼyᵢⱼ for y (rows, n, d): (rows, e)."""

    @abstractmethod
    def entries(self, rows: Rows) -> Tensor:
        """The blocks within each group, (groups, size, size, e, d)."""

    @abstractmethod
    def gram(self, s: Tensor, rows: Rows, metric: Metric | None) -> tuple[Tensor, Tensor]:
        """Σⱼ sⱼ TᵢⱼBⱼBⱼᵀTₗⱼᵀ for i, l in one group, and what rounding may have taken.

        Args:
            s: ≥ 0, (groups, n).
            rows: the groups.
            metric: of B; None is the identity.

        Returns:
            The matrices (groups, size, e, size, e), and a bound of the norm of their errors,
            (groups,).
        """

    @abstractmethod
    def seen(self, rows: Rows) -> Tensor:
        """Which blocks may differ from 0, (rows, n)."""

    @abstractmethod
    def absolute(self) -> Core:
        """The blocks with |·| for every number: a bound, entry by entry, also of all terms."""

    @property
    @abstractmethod
    def terms(self) -> int:
        """Roundings, at most, between a number and a product with all blocks."""

    @abstractmethod
    def size(self) -> float:
        """A number of the order of the largest entries."""

    @abstractmethod
    def scaled(self, factor: float) -> Core:
        """The same blocks times a number, without anything in between out of range."""


@dataclass(frozen=True, eq=False)
class TokenBlocks:
    """Jᵢⱼ = scale · LᵢTᵢⱼRⱼ + δᵢⱼDᵢ: maps of tokens one by one round one that joins them.

    Such maps compose and add as long as at most one of them joins tokens: a block of a
    transformer with its normalisations, its residual and its feed-forward layer is one of them.

    Attributes:
        diagonal: D, (n, e, d).
        core: T; None is 0.
        left: L, (n, e, ·); None is the identity.
        right: R, (n, ·, d); None is the identity.
        metric: of RⱼRⱼᵀ where there is an R, and of DⱼDⱼᵀ where there is no core, if it is known.
        scale: a factor.

    All are in double precision, whatever they come in.
    """

    diagonal: Tensor
    core: Core | None = None
    left: Tensor | None = None
    right: Tensor | None = None
    metric: Metric | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("diagonal", "left", "right"):
            given = getattr(self, name)
            object.__setattr__(self, name, None if given is None else given.detach().double())

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
        metric = None if self.core is None else self.metric
        return replace(
            self, diagonal=factor * self.diagonal, scale=factor * self.scale, metric=metric
        )

    def in_range(self) -> tuple[TokenBlocks, float]:
        """The blocks times a power of two after which squares stay in range, and that power."""
        size = float(self.diagonal.abs().max())
        if self.core is not None:
            size = max(size, abs(self.scale) * self.core.size())
        if not 0 < size < math.inf or _IN_RANGE[0] < size < _IN_RANGE[1]:
            return self, 1.0
        factor = math.ldexp(1.0, -math.frexp(size)[1])
        core = None if self.core is None else self.core.scaled(factor)
        return replace(self, diagonal=factor * self.diagonal, core=core), factor

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

    def absolute(self) -> TokenBlocks:
        """The blocks with |·| for every number: a bound, entry by entry, also of all terms."""
        return TokenBlocks(
            self.diagonal.abs(),
            None if self.core is None else self.core.absolute(),
            None if self.left is None else self.left.abs(),
            None if self.right is None else self.right.abs(),
            scale=abs(self.scale),
        )

    @property
    def terms(self) -> int:
        """Roundings, at most, between a number and a product with all blocks."""
        inside = sum(self.diagonal.shape[1:]) if self.core is None else self.core.terms
        around = [sum(t.shape[1:]) for t in (self.left, self.right) if t is not None]
        return inside + sum(around) + 4

    def back(self, x: Tensor, rows: Rows) -> Tensor:
        """Jᵢⱼᵀxᵢ for x (rows, e): (rows, n, d)."""
        d = self.diagonal.shape[-1]
        if self.core is None:
            y = x.new_zeros(rows.count, self.n, d)
        else:
            inner = x if self.left is None else _each(self.left[rows.slice].mT, x)
            y = self.scale * self.core.back(inner, rows)
            if self.right is not None:
                y = (y.movedim(1, 0) @ self.right).movedim(0, 1)
        self._on_diagonal(y, rows).add_(_each(self.diagonal[rows.slice].mT, x))
        return y

    def forth(self, y: Tensor, rows: Rows) -> Tensor:
        """Σⱼ Jᵢⱼyᵢⱼ for y (rows, n, d): (rows, e)."""
        x = _each(self.diagonal[rows.slice], self._on_diagonal(y, rows))
        if self.core is None:
            return x
        if self.right is not None:
            y = (y.movedim(1, 0) @ self.right.mT).movedim(0, 1)
        inner = self.scale * self.core.forth(y, rows)
        return x + (inner if self.left is None else _each(self.left[rows.slice], inner))

    def gram(self, s: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Σⱼ sⱼ J_gjJ_gjᵀ of each group g, (groups, size·e, size·e), and a bound of its error."""
        size, e = rows.size, self.diagonal.shape[-2]
        D = rows.grouped(self.diagonal[rows.slice])
        own = rows.grouped(self._on_diagonal(rows.repeated(s)[..., None], rows))[..., None]
        eps = torch.finfo(D.dtype).eps
        room = (D.shape[-1] + 4) * eps
        squares = own * (D @ D.mT)
        slack = room * (own[..., 0, 0] * D.square().sum((-2, -1))).sum(-1)
        out = D.new_zeros(len(D), size, e, size, e)
        if self.core is not None:
            out, slack = self._core_gram(s, rows, D, own[..., 0, 0], slack)
        every = torch.arange(size, device=D.device)
        out[:, every, :, every, :] += squares.movedim(1, 0)
        return out.flatten(3, 4).flatten(1, 2), slack

    def _core_gram(
        self, s: Tensor, rows: Rows, D: Tensor, own: Tensor, slack: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What the core gives, alone and with the diagonal."""
        assert self.core is not None
        found, error = self.core.gram(s, rows, self.metric)
        found, error = self.scale**2 * found, self.scale**2 * error
        # T_il Rₗ Dₗᵀ for i, l in a group: the column of token l, once.
        beside = self.scale * self.core.entries(rows)
        if self.right is not None:
            beside = beside @ rows.grouped(self.right[rows.slice])[:, None]
        sizes = torch.linalg.vector_norm(beside, dim=(-2, -1))  # (groups, i, l)
        beside = (beside @ D.mT[:, None]) * own[:, None, :, None, None]
        if self.left is not None:
            L = rows.grouped(self.left[rows.slice])
            beside = L[:, :, None] @ beside
            lengths = torch.linalg.vector_norm(L, dim=(-2, -1))
            # What L makes of the error inside, and the products with L.
            inner = torch.linalg.vector_norm(found.flatten(1), dim=-1)
            error = lengths.square().sum(-1) * (error + _room(L) * inner)
            found = (L[:, :, None] @ found.transpose(2, 3) @ L[:, None].mT).transpose(2, 3)
            sizes = sizes * lengths[..., None]
        each = torch.linalg.vector_norm(D, dim=(-2, -1))[:, None] * own[:, None]
        slack = slack + error + 2 * _room(D) * (sizes * each).sum((-2, -1))
        beside = beside.movedim(3, 2)  # (groups, i, e, l, e)
        return found + beside + beside.permute(0, 3, 4, 1, 2), slack

    def seen(self, rows: Rows) -> Tensor:
        """Which columns a group sees, (groups, n)."""
        if self.core is None:
            seen = torch.zeros(rows.count, self.n, dtype=torch.bool, device=self.diagonal.device)
        else:
            seen = self.core.seen(rows).clone()
        self._on_diagonal(seen, rows)[:] = True
        return rows.grouped(seen).any(1)

    def _on_diagonal(self, per_pair: Tensor, rows: Rows) -> Tensor:
        """The entries (i, i) of (rows, n, …), a view."""
        return per_pair[:, rows.slice].diagonal(0, 0, 1).movedim(-1, 0)


def _each(matrices: Tensor, vectors: Tensor) -> Tensor:
    return (matrices @ vectors[..., None])[..., 0]


def _room(matrices: Tensor) -> float:
    return 4 * (sum(matrices.shape[-2:]) + 4) * torch.finfo(matrices.dtype).eps
