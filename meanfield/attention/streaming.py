"""Attention a block of rows at a time: neither it nor any derivative of it stores an n × n matrix.

Attention sends rows (queries) and columns (keys, values, log-weights) to one output per row. Its
derivatives are of the same kind, if outputs per column are allowed that are sums over the rows:
a `RowSum`. `RowSum`s are closed under both modes of differentiation, so that one
`torch.autograd.Function` that runs blocks of rows gives derivatives of every order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meanfield.attention.rows import RowWise, softmax
from meanfield.checks import is_recorded

__all__ = ["Rule", "attend", "last_seen", "row_parts"]

# Entries of one block of the transition matrix, so that it stays in the cache.
_BLOCK_ENTRIES = 2**20
# With fewer rows than this a matrix product is slow, and a larger block is faster.
_GOOD_ROWS = 64
# Entries that such a larger block may have.
_LARGE_BLOCK_ENTRIES = 2**22
# Log-weight that stands for −inf in the fused kernel. Scores vanish beside it, its exponential is
# 0 beside any weight, and it is finite: −inf would be multiplied by 0 there.
_ABSENT = -1e30

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Rule:
    """From products ⟨qᵢ, kⱼ⟩ to transition probabilities.

    Attributes:
        normalization: of the scores.
        activation: applied to the products, entry by entry; None is the identity.
        position_bias: added to the scores, a function of the positions of rows (..., m) and of
            columns (..., n); −∞ hides a column. None is no bias.
        causal: whether a row sees only the columns whose position is at most its own.
    """

    normalization: RowWise = softmax
    activation: Callable[[Tensor], Tensor] | None = None
    position_bias: Callable[[Tensor, Tensor], Tensor | None] | None = None
    causal: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether it is the softmax of the products and the log-weights alone."""
        return (
            self.normalization.is_softmax
            and self.activation is None
            and self.position_bias is None
        )

    def scores(self, products: Tensor, bias: Tensor | None) -> Tensor:
        """Activated and biased."""
        out = products if self.activation is None else self.activation(products)
        return out if bias is None else out + bias


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    log_weights: Tensor,
    row_positions: Tensor | None = None,
    column_positions: Tensor | None = None,
    *,
    rule: Rule | None = None,
) -> Tensor:
    """oᵢ = Σⱼ Pᵢⱼ vⱼ with Pᵢⱼ ∝ aⱼ exp⟨qᵢ, kⱼ⟩ over the j that i sees, in O(m + n) memory.

    Differentiable to every order, forwards and backwards, in the queries, keys, values and
    log-weights: by `torch.func.jvp`, `vjp`, `grad`, `jacfwd`, `jacrev`, `hessian`, `vmap` and what
    they compose to, and by ordinary autograd, also with ``create_graph=True``. Derivatives
    recompute P in blocks of rows and take O(m + n) memory too. Leading axes broadcast.
    Not supported, and refused by torch: two nested levels of `torch.autograd.forward_ad` (nest
    `torch.func.jvp` instead), and the batched forward mode of `torch.autograd` itself
    (use `torch.func.vmap` of `torch.func.jvp`).

    Args:
        queries: scaled queries qᵢ, ``(*batch, m, k)``.
        keys: kⱼ, ``(*batch, n, k)``.
        values: vⱼ, ``(*batch, n, v)``.
        log_weights: log aⱼ, ``(*batch, n)``, below +inf; −inf is weight 0. They need not be
            normalised.
        row_positions: sᵢ, ``(*batch, m)``; i sees j where tⱼ ≤ sᵢ, if the rule is causal.
        column_positions: tⱼ, ``(*batch, n)``, in increasing order if the rule is causal; with
            `row_positions` only.
        rule: how products become P; if None the softmax, causal when positions are given.

    Returns:
        o, ``(*batch, m, v)``. A row that sees no mass is 0.
    """
    rows, columns = (queries,), (keys, values, log_weights[..., None])
    batch = torch.broadcast_shapes(*(t.shape[:-2] for t in (*rows, *columns)))
    for positions in (row_positions, column_positions):
        if positions is not None:
            batch = torch.broadcast_shapes(batch, positions.shape[:-1])
    tensors = (t.expand(*batch, *t.shape[-2:]) for t in (*rows, *columns))
    sight = (_aligned(row_positions, len(batch)), _aligned(column_positions, len(batch)))
    rule = rule or Rule(causal=row_positions is not None)
    function = _ATTEND
    if not rule.is_plain:
        function = RowSum(partial(_attend_by, rule), n_rows=1, n_row_outputs=1, rule=rule)
    elif not rule.causal:
        sight = (None, None)
    (out,) = _Streamed.apply(function, *sight, *tensors)
    return out


def _aligned(positions: Tensor | None, axes: int) -> Tensor | None:
    """Leading axes of size 1, so that batches broadcast wherever `vmap` puts its own axis."""
    if positions is None:
        return None
    return positions.reshape(*(1,) * (axes + 1 - positions.ndim), *positions.shape)


class View(NamedTuple):
    """What a block of rows knows of positions.

    Attributes:
        seen: whom the rows see, (..., rows, columns); None is everybody.
        blind: which rows see nobody, (..., rows, 1); None is none.
        bias: what positions add to the scores, (..., rows, columns), or None.
    """

    seen: Tensor | None
    blind: Tensor | None
    bias: Tensor | None


BlockFunction = Callable[[Tensors, Tensors, View], tuple[Tensors, Tensors]]


@dataclass(frozen=True, eq=False)
class RowSum:
    """R = (r(xᵢ, Z))ᵢ and C = Σᵢ c(xᵢ, Z) of rows xᵢ and columns Z.

    Attributes:
        block: takes rows, columns and a `View`, gives the outputs per row and per column.
        n_rows: how many tensors the rows are.
        n_row_outputs: how many outputs belong to rows; the others belong to columns.
        own_vjp: the reverse derivative, if there is a formula for it.
        own_jvp: the forward derivative, if there is a formula for it.
        rule: what positions mean to it.
    """

    block: BlockFunction
    n_rows: int
    n_row_outputs: int
    own_vjp: RowSum | None = None
    own_jvp: RowSum | None = None
    rule: Rule = Rule(causal=True)

    def vjp(self, n_inputs: int) -> RowSum:
        """Rows and cotangents of R, columns and cotangents of C ↦ cotangents of both."""
        if self.own_vjp is not None:
            return self.own_vjp
        n_columns = n_inputs - self.n_rows

        def block(rows: Tensors, columns: Tensors, view: View) -> tuple[Tensors, Tensors]:
            at = rows[: self.n_rows], columns[:n_columns]
            pull_back = torch.func.vjp(lambda r, c: self.block(r, c, view), *at)[1]
            rows_bar, columns_bar = pull_back((rows[self.n_rows :], columns[n_columns:]))
            return rows_bar, columns_bar

        return RowSum(block, self.n_rows + self.n_row_outputs, self.n_rows, rule=self.rule)

    def jvp(self, n_inputs: int) -> RowSum:
        """Rows and their tangents, columns and their tangents ↦ tangents of R and of C."""
        if self.own_jvp is not None:
            return self.own_jvp
        n_columns = n_inputs - self.n_rows

        def block(rows: Tensors, columns: Tensors, view: View) -> tuple[Tensors, Tensors]:
            at = rows[: self.n_rows], columns[:n_columns]
            along = rows[self.n_rows :], columns[n_columns:]
            # The transpose of the transpose. `torch.func.jvp` would not run inside the forward
            # mode of ordinary autograd, which has one level.
            out, pull_back, *_ = torch.func.vjp(lambda r, c: self.block(r, c, view), *at)
            push_forward = torch.func.vjp(pull_back, _zeros_like(out))[1]
            return push_forward(along)[0]

        return RowSum(block, 2 * self.n_rows, self.n_row_outputs, rule=self.rule)


def _zeros_like(outputs: tuple[Tensors, Tensors]) -> tuple[Tensors, Tensors]:
    of_rows, of_columns = (tuple(torch.zeros_like(t) for t in part) for part in outputs)
    return of_rows, of_columns


# --- attention and its first derivatives ---


def _transition(q: Tensor, k: Tensor, w: Tensor, view: View) -> Tensor:
    logits = (q @ k.mT).add_(w.mT)
    if view.seen is not None:
        logits.masked_fill_(~view.seen, -math.inf)
    if view.blind is None:
        return logits.softmax(-1)
    return logits.masked_fill(view.blind, 0.0).softmax(-1).masked_fill(view.blind, 0.0)


def _attend_by(rule: Rule, rows: Tensors, columns: Tensors, view: View) -> tuple[Tensors, Tensors]:
    (q,), (k, v, w) = rows, columns
    scores, logs, blind = rule.scores(q @ k.mT, view.bias), w.mT, view.blind
    if view.seen is not None:
        logs = logs.masked_fill(~view.seen, -math.inf)
    if view.bias is not None:
        logs = torch.where(view.bias == -math.inf, -math.inf, logs)
        blind = (logs == -math.inf).all(-1, keepdim=True)
    own = rule.normalization
    return (own.p(own.logits(scores, logs), blind) @ v,), ()


def _attend(rows: Tensors, columns: Tensors, view: View) -> tuple[Tensors, Tensors]:
    (q,), (k, v, w) = rows, columns
    return (_transition(q, k, w, view) @ v,), ()


def _attend_vjp(rows: Tensors, columns: Tensors, view: View) -> tuple[Tensors, Tensors]:
    (q, y), (k, v, w) = rows, columns
    p = _transition(q, k, w, view)
    g = (y @ v.mT).mul_(p)
    g.addcmul_(p, g.sum(-1, keepdim=True), value=-1)
    return (g @ k,), (g.mT @ q, p.mT @ y, g.sum(-2)[..., None])


def _attend_jvp(rows: Tensors, columns: Tensors, view: View) -> tuple[Tensors, Tensors]:
    (q, q_dot), (k, v, w, k_dot, v_dot, w_dot) = rows, columns
    p = _transition(q, k, w, view)
    g = torch.cat([q_dot, q], -1) @ torch.cat([k, k_dot], -1).mT
    g.add_(w_dot.mT).mul_(p)
    g.addcmul_(p, g.sum(-1, keepdim=True), value=-1)
    return (g @ v + p @ v_dot,), ()


_ATTEND = RowSum(
    _attend,
    n_rows=1,
    n_row_outputs=1,
    own_vjp=RowSum(_attend_vjp, n_rows=2, n_row_outputs=1),
    own_jvp=RowSum(_attend_jvp, n_rows=2, n_row_outputs=1),
)


# --- any RowSum, block by block, with its derivatives ---


class _Streamed(torch.autograd.Function):
    """A `RowSum` with row positions, column positions, row inputs and column inputs."""

    @staticmethod
    def forward(
        function: RowSum,
        row_positions: Tensor | None,
        column_positions: Tensor | None,
        *tensors: Tensor,
    ) -> Tensors:
        rows, columns = tensors[: function.n_rows], tensors[function.n_rows :]
        places = _Places(row_positions, column_positions, function.rule)
        if function is _ATTEND:
            out = _fused(places, rows, columns)
            if out is not None:
                return (out,)
        return _run(function, places, rows, columns)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.function = inputs[0]
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        function: RowSum = ctx.function
        row_positions, column_positions, *tensors = ctx.saved_tensors
        joined = _interleaved(function.n_rows, tensors, function.n_row_outputs, cotangents)
        derivative = function.vjp(len(tensors))
        return None, None, None, *_apply(derivative, row_positions, column_positions, *joined)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensors:
        function: RowSum = ctx.function
        row_positions, column_positions, *tensors = ctx.saved_tensors
        along = [
            torch.zeros_like(at) if dot is None else dot
            for at, dot in zip(tensors, tangents[3:], strict=True)
        ]
        joined = _interleaved(function.n_rows, tensors, function.n_rows, along)
        derivative = function.jvp(len(tensors))
        return _apply(derivative, row_positions, column_positions, *joined)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], function: RowSum, *tensors: Tensor | None
    ) -> tuple[Tensors, tuple[int, ...]]:
        row_positions, column_positions, *others = (
            None if t is None else t.unsqueeze(0) if axis is None else t.movedim(axis, 0)
            for t, axis in zip(tensors, in_dims[1:], strict=True)
        )
        # Values share all their batch axes; positions only broadcast against them.
        wide = (t.expand(info.batch_size, *t.shape[1:]) for t in others if t is not None)
        out = _apply(function, row_positions, column_positions, *wide)
        return out, (0,) * len(out)


def _apply(function: RowSum, *tensors: Tensor | None) -> Tensors:
    out = _Streamed.apply(function, *tensors)
    return tuple(out)


def _interleaved(
    n_rows: int, tensors: list[Tensor], n_more_rows: int, more: Any
) -> tuple[Tensor, ...]:
    """Rows and more rows, then columns and more columns."""
    return (*tensors[:n_rows], *more[:n_more_rows], *tensors[n_rows:], *more[n_more_rows:])


@dataclass(frozen=True, eq=False)
class _Places:
    """Positions of rows and columns, and what they mean; None where nothing depends on them."""

    rows: Tensor | None
    columns: Tensor | None
    rule: Rule

    @property
    def limits(self) -> tuple[Tensor | None, Tensor | None]:
        """The positions that limit sight."""
        return (self.rows, self.columns) if self.rule.causal else (None, None)

    @property
    def increase_together(self) -> bool:
        """Whether rows and columns share their positions, and each is later than the last."""
        if self.rows is None or self.columns is None or self.rows.shape != self.columns.shape:
            return False
        same = bool((self.rows == self.columns).all())
        return same and bool((self.columns.diff(dim=-1) > 0).all())

    def blind(self, log_weights: Tensor) -> Tensor | None:
        """Rows that see no mass, (..., m, 1), or None when there are none."""
        alive, (rows, columns) = log_weights > -math.inf, self.limits
        if rows is None or columns is None:
            blind = ~alive.any(-1, keepdim=True)
        else:
            first = torch.where(alive, columns, math.inf).amin(-1, keepdim=True)
            blind = rows < first
        return blind[..., None] if is_recorded(blind) or bool(blind.any()) else None

    def view(self, part: slice, last: int, blind: Tensor | None) -> View:
        """What a block of rows sees of the first columns."""
        if blind is not None and blind.shape[-2] > 1:
            blind = blind[..., part, :]
        if self.rows is None or self.columns is None:
            return View(None, blind, None)
        rows, columns = self.rows[..., part], self.columns[..., :last]
        seen = columns[..., None, :] <= rows[..., None] if self.rule.causal else None
        bias = None
        if self.rule.position_bias is not None:
            # Heads are an axis of the answer, not of positions.
            bias = self.rule.position_bias(rows.squeeze(-2), columns.squeeze(-2))
        return View(seen, blind, bias)


def _run(function: RowSum, places: _Places, rows: Tensors, columns: Tensors) -> Tensors:
    m, n = rows[0].shape[-2], columns[0].shape[-2]
    blind = places.blind(columns[2][..., 0])
    # Expanded axes are copied once, here: products would copy them in every block.
    rows = tuple(t.contiguous() for t in rows)
    columns = tuple(t.contiguous() for t in columns)
    out: tuple[Tensors, Tensors] | None = None
    for part in row_parts(math.prod(rows[0].shape[:-2]) * n, m):
        last, size = last_seen(*places.limits, part, n), part.stop - part.start
        own = tuple(t.narrow(-2, part.start, size) for t in rows)
        seen_columns = tuple(t.narrow(-2, 0, last) for t in columns)
        of_block = function.block(own, seen_columns, places.view(part, last, blind))
        # Written into one place: small outputs kept from block to block would lie between the
        # large temporaries of the blocks, and their memory could not be used again.
        out = out or (_room(of_block[0], m), _room(of_block[1], n))
        for whole, output in zip(out[0], of_block[0], strict=True):
            whole.narrow(-2, part.start, size).copy_(output)
        for whole, output in zip(out[1], of_block[1], strict=True):
            whole.narrow(-2, 0, last).add_(output)
    assert out is not None
    return (*out[0], *out[1])


def _room(tensors: Tensors, length: int) -> Tensors:
    return tuple(t.new_zeros(*t.shape[:-2], length, t.shape[-1]) for t in tensors)


def row_parts(entries_per_row: int, m: int) -> Iterator[slice]:
    """Blocks of m rows, at least one, whose part of the matrix has a bounded size."""
    large = min(_GOOD_ROWS, _LARGE_BLOCK_ENTRIES // max(entries_per_row, 1))
    size = max(1, large, _BLOCK_ENTRIES // max(entries_per_row, 1))
    for start in range(0, max(m, 1), size):
        yield slice(start, min(start + size, m))


def last_seen(
    row_positions: Tensor | None, column_positions: Tensor | None, rows: slice, n: int
) -> int:
    """How many of n columns any of these rows sees; at least one, so that shapes stay alive."""
    if row_positions is None or column_positions is None or column_positions.numel() == 0:
        return n
    if is_recorded(column_positions) or is_recorded(row_positions):
        return n
    latest = row_positions[..., rows].amax(-1, keepdim=True)
    return max(1, int((column_positions <= latest).sum(-1).max()))


# --- the fused kernel ---


def _fused(places: _Places, rows: Tensors, columns: Tensors) -> Tensor | None:
    """Attention by torch's fused kernel, which is as accurate; None where it does not apply.

    A log-weight rides as one more coordinate, q' = (q, 1), k' = (k, log a). A mask must be the
    kernel's own, by storage order: positions that rows and columns share and that increase.
    """
    (q,), (k, v, w) = rows, columns
    # On other devices its arithmetic may be TF32, and its memory n².
    if q.device.type != "cpu" or is_recorded(q):
        return None
    causal, logs = places.rows is not None, w[..., 0]
    if causal and not places.increase_together:
        return None
    alive = logs > -math.inf
    # The first column is seen by every row when masked.
    if not bool((alive[..., 0] if causal else alive.any(-1)).all()):
        return None
    if not bool((logs == logs[..., :1]).all()):
        q = torch.cat([q, torch.ones_like(q[..., :1])], -1)
        k = torch.cat([k, w.clamp_min(_ABSENT)], -1)
    # Only equal widths take the fast road; others would build the n × n matrix.
    width = max(k.shape[-1], v.shape[-1])
    q_flat, k_flat, v_flat = (
        torch.nn.functional.pad(t, (0, width - t.shape[-1])).reshape(-1, 1, t.shape[-2], width)
        for t in (q, k, v)
    )
    out = torch.nn.functional.scaled_dot_product_attention(
        q_flat, k_flat, v_flat, is_causal=causal, scale=1.0
    )
    # Cloned: autograd refuses views as outputs of a function with a forward derivative.
    return out.reshape(*q.shape[:-1], width)[..., : v.shape[-1]].clone()
