"""Averages Σⱼ Pᵢⱼ vⱼ a block of rows at a time; no derivative of them stores a large n × n matrix.

A `RowSum` is a function of rows (queries) and columns (keys, values, log-weights) with one output
per row and, per column, a sum over rows. The class is closed under jvp and vjp, so that one
`torch.autograd.Function` that runs blocks of rows gives derivatives of every order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meanfield.attention.weights import Places, Scoring
from meanfield.checks import is_differentiated, is_recorded

# Entries of P up to which torch differentiates the formula: a function of ours takes longer than
# its arithmetic. At 16 atoms in 64 dimensions a gradient takes 0.9 ms so, and 2.5 by `_Streamed`.
_FEW_ENTRIES = 2**16

Tensors = tuple[Tensor, ...]


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    log_weights: Tensor,
    row_positions: Tensor | None = None,
    column_positions: Tensor | None = None,
    *,
    scoring: Scoring | None = None,
) -> Tensor:
    """oᵢ = Σⱼ Pᵢⱼ vⱼ with Pᵢⱼ ∝ aⱼ exp⟨qᵢ, kⱼ⟩ over the j that i sees, in O(m + n) memory.

    Differentiable to every order, forwards and backwards, in the queries, keys, values and
    log-weights: by `torch.func.jvp`, `vjp`, `grad`, `jacfwd`, `jacrev`, `hessian`, `vmap` and
    their compositions, and by ordinary autograd, also with ``create_graph=True``. Derivatives
    recompute P in blocks of rows and take O(m + n) memory too, but for a few rows and columns,
    where torch's own keep it. Leading axes broadcast.
    Not supported, and refused by torch: two nested levels of `torch.autograd.forward_ad` (nest
    `torch.func.jvp` instead), and the batched forward mode of `torch.autograd` itself
    (use `torch.func.vmap` of `torch.func.jvp`).

    Args:
        queries: scaled queries qᵢ, ``(*batch, m, k)``.
        keys: kⱼ, ``(*batch, n, k)``.
        values: vⱼ, ``(*batch, n, v)``.
        log_weights: log aⱼ, ``(*batch, n)``, below +inf; −inf is weight 0. They need not be
            normalised.
        row_positions: sᵢ, ``(*batch, m)``; i sees j where tⱼ ≤ sᵢ, if causal.
        column_positions: tⱼ, ``(*batch, n)``, in increasing order if causal; with
            `row_positions` only.
        scoring: how products become P; if None the softmax, causal when positions are given.

    Returns:
        o, ``(*batch, m, v)``. A row that sees no mass is 0.
    """
    tensors = [queries, keys, values, log_weights.unsqueeze(-1)]
    places = [t for t in (row_positions, column_positions) if t is not None]
    shapes = [t.shape[:-2] for t in tensors] + [t.shape[:-1] for t in places]
    batch = shapes[0]
    if any(shape != batch for shape in shapes):
        firsts = [t[..., 0, 0] for t in tensors] + [t[..., 0] for t in places]
        batch = torch.broadcast_tensors(*firsts)[0].shape
        tensors = [t.expand(*batch, *t.shape[-2:]) for t in tensors]
    scoring = scoring or Scoring(causal=row_positions is not None)
    aligned: tuple[Tensor | None, Tensor | None] = (None, None)
    function = _PLAIN if scoring.is_plain else _sum_of(scoring)
    if places and not (scoring.is_plain and scoring.sees_all):
        aligned = _aligned(row_positions, len(batch)), _aligned(column_positions, len(batch))
    few = math.prod(batch) * queries.shape[-2] * keys.shape[-2] <= _FEW_ENTRIES
    if not is_differentiated(*tensors, *places):
        (out,) = _summed(function, *aligned, *tensors)
    elif few or _has_own_derivative(scoring, tensors[0], aligned):
        (out,), _ = function.block(tuple(tensors[:1]), tuple(tensors[1:]), Places(*aligned))
    else:
        (out,) = _Streamed.apply(function, *aligned, *tensors)
    return out


def _has_own_derivative(
    scoring: Scoring, q: Tensor, positions: tuple[Tensor | None, Tensor | None]
) -> bool:
    """Whether what the scores are made with asks for one: a sink, positions, somebody's function.

    `_Streamed` knows of rows and columns alone. So P of one row and one column is looked at.
    """
    if scoring.is_plain or torch.compiler.is_compiling():
        return False
    like: Any = {"dtype": q.dtype, "device": q.device}
    places = Places(*(None if t is None else t[..., :1] for t in positions))
    with torch.enable_grad():
        product = torch.zeros(*q.shape[:-2], 1, 1, **like)
        seen: Tensor | None = scoring.p(product, torch.zeros_like(product), places)
    # The transforms of torch.func wrap a tensor once for each level. Private, as in `is_traced`.
    functorch = torch._C._functorch
    while seen is not None:
        if seen.requires_grad or torch.autograd.forward_ad.unpack_dual(seen).tangent is not None:
            return True
        wrapped = functorch.is_functorch_wrapped_tensor(seen)
        seen = functorch.get_unwrapped(seen) if wrapped else None
    return False


def _aligned(positions: Tensor | None, axes: int) -> Tensor | None:
    """Leading axes of size 1, so that batches broadcast wherever `vmap` puts its own axis."""
    if positions is None:
        return None
    missing = axes + 1 - positions.ndim
    return positions.reshape(*(1,) * missing, *positions.shape) if missing else positions


BlockFunction = Callable[[Tensors, Tensors, Places], tuple[Tensors, Tensors]]


@dataclass(frozen=True, eq=False)
class RowSum:
    """R = (r(xᵢ, Z))ᵢ and C = Σᵢ c(xᵢ, Z) of rows xᵢ and columns Z.

    Attributes:
        block: from rows, columns and their `Places` to the outputs per row and per column.
        n_rows: how many tensors the rows are.
        n_row_outputs: how many outputs belong to rows; the others belong to columns.
        scoring: how products become P.
        own_vjp: the reverse derivative, if there is a formula for it.
        own_jvp: the forward derivative, if there is a formula for it.
    """

    block: BlockFunction
    n_rows: int
    n_row_outputs: int
    scoring: Scoring
    own_vjp: RowSum | None = None
    own_jvp: RowSum | None = None

    def vjp(self, n_inputs: int) -> RowSum:
        """Rows and cotangents of R, columns and cotangents of C ↦ cotangents of both."""
        if self.own_vjp is not None:
            return self.own_vjp
        n_columns = n_inputs - self.n_rows

        def block(rows: Tensors, columns: Tensors, places: Places) -> tuple[Tensors, Tensors]:
            at = rows[: self.n_rows], columns[:n_columns]
            pull_back = torch.func.vjp(lambda r, c: self.block(r, c, places), *at)[1]
            rows_bar, columns_bar = pull_back((rows[self.n_rows :], columns[n_columns:]))
            return rows_bar, columns_bar

        return RowSum(block, self.n_rows + self.n_row_outputs, self.n_rows, scoring=self.scoring)

    def jvp(self, n_inputs: int) -> RowSum:
        """Rows and their tangents, columns and their tangents ↦ tangents of R and of C."""
        if self.own_jvp is not None:
            return self.own_jvp
        n_columns = n_inputs - self.n_rows

        def block(rows: Tensors, columns: Tensors, places: Places) -> tuple[Tensors, Tensors]:
            at = rows[: self.n_rows], columns[:n_columns]
            along = rows[self.n_rows :], columns[n_columns:]
            # The transpose of the transpose. `torch.func.jvp` would not run inside the forward
            # mode of ordinary autograd, which has one level.
            out, pull_back, *_ = torch.func.vjp(lambda r, c: self.block(r, c, places), *at)
            zeros = tuple(tuple(torch.zeros_like(t) for t in part) for part in out)
            push_forward = torch.func.vjp(pull_back, zeros)[1]
            return push_forward(along)[0]

        return RowSum(block, 2 * self.n_rows, self.n_row_outputs, scoring=self.scoring)


# --- attention and its first derivatives ---


def _average(
    scoring: Scoring, rows: Tensors, columns: Tensors, places: Places
) -> tuple[Tensors, Tensors]:
    (q,), (k, v, w) = rows, columns
    return (scoring.p(q @ k.mT, w.mT, places) @ v,), ()


def _average_vjp(
    scoring: Scoring, rows: Tensors, columns: Tensors, places: Places
) -> tuple[Tensors, Tensors]:
    (q, y), (k, v, w) = rows, columns
    p = scoring.p(q @ k.mT, w.mT, places)
    g = (y @ v.mT).mul_(p)
    g.addcmul_(p, g.sum(-1, keepdim=True), value=-1)
    return (g @ k,), (g.mT @ q, p.mT @ y, g.sum(-2)[..., None])


def _average_jvp(
    scoring: Scoring, rows: Tensors, columns: Tensors, places: Places
) -> tuple[Tensors, Tensors]:
    (q, q_dot), (k, v, w, k_dot, v_dot, w_dot) = rows, columns
    p = scoring.p(q @ k.mT, w.mT, places)
    g = torch.cat([q_dot, q], -1) @ torch.cat([k, k_dot], -1).mT
    g.add_(w_dot.mT).mul_(p)
    g.addcmul_(p, g.sum(-1, keepdim=True), value=-1)
    return (g @ v + p @ v_dot,), ()


def _sum_of(scoring: Scoring) -> RowSum:
    vjp, jvp = (
        RowSum(partial(f, scoring), n_rows=2, n_row_outputs=1, scoring=scoring)
        for f in (_average_vjp, _average_jvp)
    )
    value = RowSum(partial(_average, scoring), n_rows=1, n_row_outputs=1, scoring=scoring)
    return replace(value, own_vjp=vjp, own_jvp=jvp) if scoring.is_tilted else value


_PLAIN = _sum_of(Scoring(causal=True))  # without positions nothing is masked


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
        run = _blockwise if is_recorded(tensors[0]) else _summed
        out = run(function, row_positions, column_positions, *tensors)
        # Views are refused as outputs of a function with a forward derivative.
        return tuple(t.clone() if t._is_view() else t for t in out)

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
        at = row_positions, column_positions, *joined
        return None, None, None, *_Streamed.apply(derivative, *at)

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
        return _Streamed.apply(derivative, row_positions, column_positions, *joined)

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
        out = _Streamed.apply(function, row_positions, column_positions, *wide)
        return out, (0,) * len(out)


def _interleaved(
    n_rows: int, tensors: list[Tensor], n_more_rows: int, more: Any
) -> tuple[Tensor, ...]:
    """Both sets of rows, then both sets of columns."""
    return (*tensors[:n_rows], *more[:n_more_rows], *tensors[n_rows:], *more[n_more_rows:])


def _summed(
    function: RowSum,
    row_positions: Tensor | None,
    column_positions: Tensor | None,
    *tensors: Tensor,
) -> Tensors:
    if function is _PLAIN:
        fused = _fused(row_positions, column_positions, *tensors)
        if fused is not None:
            return (fused,)
    return _blockwise(function, row_positions, column_positions, *tensors)


def _blockwise(
    function: RowSum,
    row_positions: Tensor | None,
    column_positions: Tensor | None,
    *tensors: Tensor,
) -> Tensors:
    rows, columns = tensors[: function.n_rows], tensors[function.n_rows :]
    m, n, scoring = rows[0].shape[-2], columns[0].shape[-2], function.scoring
    places = Places(row_positions, column_positions)
    # Expanded axes are copied once, here: products would copy them in every block.
    rows = tuple(t.contiguous() for t in rows)
    columns = tuple(t.contiguous() for t in columns)
    out: tuple[Tensors, Tensors] | None = None
    entries = math.prod(rows[0].shape[:-2]) * n
    for block in scoring.blocks(entries, m, n, places, rows[0].device):
        of_block = function.block(
            tuple(t.narrow(-2, block.rows.start, block.n_rows) for t in rows),
            tuple(t.narrow(-2, block.columns.start, block.n_columns) for t in columns),
            places.block(block),
        )
        if (block.n_rows, block.n_columns) == (m, n):
            return (*of_block[0], *of_block[1])
        # Written into one place: small outputs kept from block to block would lie between the
        # large temporaries of the blocks, and their memory could not be used again.
        out = out or (_room(of_block[0], m), _room(of_block[1], n))
        for whole, output in zip(out[0], of_block[0], strict=True):
            whole.narrow(-2, block.rows.start, block.n_rows).copy_(output)
        for whole, output in zip(out[1], of_block[1], strict=True):
            whole.narrow(-2, block.columns.start, block.n_columns).add_(output)
    assert out is not None
    return (*out[0], *out[1])


def _room(tensors: Tensors, length: int) -> Tensors:
    return tuple(t.new_zeros(*t.shape[:-2], length, t.shape[-1]) for t in tensors)


# --- the fused kernel ---


def _fused(
    row_positions: Tensor | None,
    column_positions: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
) -> Tensor | None:
    """Attention by torch's fused kernel, which is as accurate; None where it does not apply.

    Log-weights go into one more coordinate, q' = (q, 1), k' = (k, log a). The kernel masks by
    storage order only, so rows and columns must share positions, and these must increase.
    """
    # On other devices its arithmetic may be TF32, and its memory n².
    if q.device.type != "cpu":
        return None
    causal = row_positions is not None
    if causal and not _increase_together(row_positions, column_positions):
        return None
    if not w.sum().item() > -math.inf:  # one of −∞ makes it −∞
        # The first column is seen by every row when masked.
        seen = (w[..., :1, :] if causal else w).amax((-2, -1))
        if not bool((seen > -math.inf).all()):
            return None
        # Of absent atoms the least number is the whole logit, wherever they are; −∞ · 0 is none.
        k, v = (torch.where(w > -math.inf, t, 0.0) for t in (k, v))
        w = w.clamp_min(torch.finfo(w.dtype).min)
    if not math.isfinite(q.sum().item()):  # the kernel answers 0 where a query is NaN
        return None
    if w.stride(-2):  # not one number for all, as of a uniform measure
        q = torch.cat([q, torch.ones_like(q[..., :1])], -1)
        k = torch.cat([k, w], -1)
    # Only for equal widths does torch use its fused kernel; else it builds the n × n matrix.
    width = max(k.shape[-1], v.shape[-1])
    out = torch.nn.functional.scaled_dot_product_attention(
        _widened(q, width), _widened(k, width), _widened(v, width), is_causal=causal, scale=1.0
    )
    return out.reshape(*q.shape[:-1], width)[..., : v.shape[-1]]


def _widened(vectors: Tensor, width: int) -> Tensor:
    """With zeros behind, (b, 1, ·, width)."""
    more = width - vectors.shape[-1]
    padded = torch.nn.functional.pad(vectors, (0, more)) if more else vectors
    return padded.reshape(-1, 1, vectors.shape[-2], width)


def _increase_together(rows: Tensor | None, columns: Tensor | None) -> bool:
    """Whether rows and columns share their positions, and each is later than the last."""
    if rows is None or columns is None or rows.shape != columns.shape:
        return False
    same = rows is columns or bool((rows == columns).all())
    return same and bool((columns[..., 1:] > columns[..., :-1]).all())
