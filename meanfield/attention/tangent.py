"""The linearisation of attention at a measure, matrix-free and dense."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from threading import get_ident
from typing import NamedTuple

import torch
from torch import Tensor

from meanfield.attention.kernels.kernel import At
from meanfield.attention.small_products import SmallProducts
from meanfield.attention.weights import Block, Weights, flat
from meanfield.linalg import LinearMap
from meanfield.linalg.linear_map import Product

# Entries of differences vⱼ − rᵢ that are formed at once (float64: 8 MiB).
_DIFFERENCES = 2**20
# Bytes that kept matrices may take by default.
_MEMORY = 2**29


class Matrices(NamedTuple):
    """The matrices of a block of rows, (B, rows, columns) with B over batch and heads.

    With P the attention weights, Eᵢⱼ = ∂ log(aⱼψ)/∂⟨qᵢ, kⱼ⟩, the row sum held fixed (1 for the
    softmax of plain scores), and the tilt τᵢⱼ = √(aᵢ/aⱼ) (1 in the Euclidean geometry):

    Attributes:
        queries: G = E∘P, for the motion of the queries.
        keys: N = τ∘E∘P, for the motion of the keys.
        values: M = τ∘P, for the motion of the values.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor


class _Rows(NamedTuple):
    """Data of all rows, (B, n, ·) each.

    Attributes:
        means: rᵢ, see `AttentionTangent`.
        tops: the largest logit.
        log_sums: log P = logits − tops − log_sums, in this order: beside large scores the sum of
            both would lose the digits of the second. +∞ for rows that are absent or see nobody.
        most: ĵ = argmaxⱼ Pᵢⱼ, int64, or None where it is not used.
        tilts: τ_iĵ, or None where tilts are 1.
        kept: the matrices of every block, if they fit in memory.
    """

    means: Tensor
    tops: Tensor
    log_sums: Tensor
    most: Tensor | None
    tilts: Tensor | None
    kept: list[Matrices] | None


@dataclass(frozen=True, eq=False)
class AttentionTangent:
    """The derivative of F at μ with the weights held fixed ([CAP24] Lemmas C.2, C.6, D.1).

    With q̇, k̇, v̇ the tangents of queries, keys and values of a head,

        ȯᵢ = Σⱼ Mᵢⱼ v̇ⱼ + Σⱼ Gᵢⱼ ⟨q̇ᵢ, kⱼ⟩ (vⱼ − rᵢ) + Σⱼ Nᵢⱼ ⟨qᵢ, k̇ⱼ⟩ (vⱼ − rᵢ),

    with G, N and M as in `Matrices`. rᵢ is the mean Σⱼ Pᵢⱼvⱼ where rows are divided by a sum
    (softmax, a sink) and 0 where not (sigmoid). The map acts on plain displacements ε, or with
    ``geometry="wasserstein"`` on ηᵢ = √aᵢ εᵢ as D^½ J D^−½; then τᵢⱼPᵢⱼ is formed from logarithms,
    for Pᵢⱼ can be e^{−900} where the product is of order 1. Atoms of weight 0 are absent: their
    rows and columns are 0.

    Under the softmax with E = 1 a shift of a row of ⟨q̇ᵢ, kⱼ⟩ + ⟨qᵢ, k̇ⱼ⟩ changes nothing. Its entry
    at ĵ = argmaxⱼ Pᵢⱼ is subtracted from each row. Otherwise, for nearly one-hot rows, the
    rounding error of vⱼ − rᵢ is multiplied by large scores.

    P is kept for all products when it fits in `memory` bytes, and otherwise recomputed in blocks
    of rows, O(n · block) memory, in buffers that are made once. Nothing is computed before the
    first product. Products record no gradients.

    Args:
        weights: P between the atoms.
        geometry: "euclidean" or "wasserstein".
        memory: bytes that the kept matrices may take.
        block_size: rows per block; chosen from the memory of a block if None.
    """

    weights: Weights
    geometry: str = "euclidean"
    memory: int = _MEMORY
    block_size: int | None = None

    def as_linear_map(self) -> LinearMap:
        """The tangent as a `LinearMap` on displacements."""
        return LinearMap.of(
            self.weights.points,
            Product(self.matvec, lambda: None if self._small is None else self._small.matvec),
            Product(self.rmatvec, lambda: None if self._small is None else self._small.rmatvec),
            out_dim=self.weights.parameters.out_dim,
            dense=self.dense,
        )

    def field_linear_map(self) -> LinearMap:
        """D_xΓ_μ(xᵢ) of every atom as a batch ``(*batch, n)`` of maps R^d → R^d_out."""
        return LinearMap.of(
            self.weights.points,
            partial(self.matvec, keys=False),
            partial(self.rmatvec, keys=False),
            out_dim=self.weights.parameters.out_dim,
            each=True,
            dense=lambda part: self.field_jacobians().flatten(0, -3)[part],
        )

    @property
    def whole(self) -> AttentionTangent:
        """The same with all rows in one block, whose matrices are kept."""
        return replace(self, memory=2**62, block_size=self.weights.n)

    # --- what all products share ---

    @property
    def batch_shape(self) -> torch.Size:
        """Leading axes of the measure."""
        return self.weights.points.shape[:-2]

    @cached_property
    def q(self) -> Tensor:
        """Queries, (B, n, k)."""
        return flat(self.weights.features.q.detach())

    @cached_property
    def k(self) -> Tensor:
        """Keys, (B, n, k)."""
        return flat(self.weights.features.k.detach())

    @cached_property
    def v(self) -> Tensor:
        """Values, (B, n, v)."""
        return flat(self.weights.features.v.detach())

    def _headed(self, flat: Tensor) -> Tensor:
        """(B, ·, ·) as ``(*batch, H, ·, ·)``."""
        return flat.view(*self.batch_shape, self.weights.parameters.n_heads, *flat.shape[1:])

    @cached_property
    def _half_logs(self) -> Tensor | None:
        """ρ = ½ log a, (B, n, 1), where τᵢⱼ = e^{ρᵢ−ρⱼ} is not 1; 0 for absent atoms."""
        logs = self.weights.log_weights
        if self.geometry == "euclidean" or bool((logs == logs[..., :1]).all()):
            return None
        half = torch.where(logs > -math.inf, 0.5 * logs, 0.0)[..., None, :]
        wide = half.expand(*self.batch_shape, self.weights.parameters.n_heads, self.weights.n)
        return wide.reshape(-1, self.weights.n, 1)

    @cached_property
    def blocks(self) -> list[Block]:
        """Of rows, with the columns that they may see."""
        return self.weights.blocks(self.block_size)

    @cached_property
    def _room(self) -> dict[tuple[int, int], Tensor]:
        """Buffers for the largest block, by thread and number, made when needed."""
        return {}

    def _buffer(self, which: int, block: Block) -> Tensor:
        """Room for the matrices of a block (0), for its products (1, 2)."""
        shape, key = (len(self.q), block.n_rows, block.n_columns), (get_ident(), which)
        if key not in self._room:
            largest = max(b.n_rows * b.n_columns for b in self.blocks)
            self._room[key] = self.q.new_empty(len(self.q) * largest)
        return self._room[key][: math.prod(shape)].view(shape)

    @cached_property
    @torch.no_grad()
    def rows(self) -> _Rows:
        """The data of all rows, see `_Rows`."""
        q, v = self.q, self.v
        entries = sum(b.n_rows * b.n_columns for b in self.blocks)
        scoring, normalization = self.weights.scoring, self.weights.rows
        matrices = (1 + (self._half_logs is not None)) * (1 + scoring.has_gain)
        keep = len(q) * entries * matrices * q.element_size() <= self.memory
        # Made before the blocks: small tensors that survive between the large ones of the blocks
        # would keep the allocator from using their memory again.
        means = q.new_zeros(*q.shape[:-1], v.shape[-1])
        tops, log_sums = (q.new_empty(*q.shape[:-1], 1) for _ in range(2))
        most = torch.zeros(*q.shape[:-1], 1, dtype=torch.int64, device=q.device)
        kept = []
        for block in self.blocks:
            i, j = block
            logits, gain = self._logits(block)
            top, log_sum = normalization.log_sums(logits)
            # So P is 0 where a row is absent or sees no mass.
            absent = self.weights.log_weights[..., None, i, None] == -math.inf
            blind = absent | (log_sum == -math.inf)
            top, log_sum = flat(top), flat(log_sum.masked_fill_(blind, math.inf))
            tops[:, i], log_sums[:, i] = top, log_sum
            log_p = flat(logits).sub_(top).sub_(log_sum)
            if scoring.is_tilted:
                most[:, i] = log_p.argmax(-1, keepdim=True).add_(j.start)
            if normalization.divides:
                means[:, i] = torch.bmm(log_p.exp(), v[:, j])
            if keep:
                kept.append(self._matrices(block, log_p.clone(), gain))
        tilts = None
        if self._half_logs is not None:
            tilts = (self._half_logs - self._half_logs.gather(1, most)).exp()
            tilts = tilts.where(log_sums < math.inf, 0.0)  # of rows without attention: not ∞ · 0
        shift = most if scoring.is_tilted else None
        return _Rows(means, tops, log_sums, shift, tilts, kept if keep else None)

    def _logits(self, block: Block) -> tuple[Tensor, Tensor | None]:
        """log aⱼψ of a block in a buffer, ``(*batch, H, rows, columns)``, and E, (B, ·, ·)."""
        q, k = self.q[:, block.rows], self.k[:, block.columns]
        products = self._headed(torch.bmm(q, k.mT, out=self._buffer(0, block)))
        logits, gain = self.weights.logits_and_gain(block, products)
        return logits, None if gain is None else flat(gain)

    def _matrices(self, block: Block, log_p: Tensor, gain: Tensor | None) -> Matrices:
        """G, N and M; overwrites log P."""
        rho = self._half_logs
        if rho is None:
            p = log_p.exp_()
            g = p if gain is None else p * gain
            return Matrices(g, g, p)
        # τP in one exponential: either factor alone may leave the number range.
        m = log_p + (rho[:, block.rows] - rho[:, block.columns].mT)
        m.exp_()
        # Absent columns: e^{−∞} is 0 whatever ρ.
        p = log_p.exp_()
        return Matrices(p, m, m) if gain is None else Matrices(p * gain, m * gain, m)

    def matrices(self) -> Iterator[tuple[Block, Matrices]]:
        """The matrices of every block."""
        rows = self.rows
        if rows.kept is not None:
            yield from zip(self.blocks, rows.kept, strict=True)
            return
        for block in self.blocks:
            logits, gain = self._logits(block)
            log_p = flat(logits).sub_(rows.tops[:, block.rows])
            log_p.sub_(rows.log_sums[:, block.rows])
            yield block, self._matrices(block, log_p, gain)

    # --- products ---

    @cached_property
    def _small(self) -> SmallProducts | None:
        return SmallProducts(self) if SmallProducts.fit(self) else None

    @torch.no_grad()
    def matvec(self, displacement: Tensor, *, keys: bool = True) -> Tensor:
        """Jε, ``(*batch, n, d) → (*batch, n, d_out)``.

        D_xΓ_μ(xᵢ) εᵢ of every atom if keys, and values, stay.
        """
        q_dot, k_dot, v_dot = self.pushed(displacement)
        # Written in place: small tensors that survive between blocks, see `rows`.
        heads = torch.empty_like(self.rows.means)
        for block, matrices in self.matrices():
            i, j = block
            w = self._scored(block, matrices, q_dot[:, i], k_dot[:, j] if keys else None)
            total = w.sum(-1, keepdim=True)
            moved = torch.bmm(w, self.v[:, j], out=heads[:, i])
            moved.addcmul_(total, self.rows.means[:, i], value=-1.0)
            if keys:
                moved.baddbmm_(matrices.values, v_dot[:, j])
        return self.joined(heads)

    def pushed(self, displacement: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q̇, k̇, v̇ of a displacement, (B, n, ·) each."""
        f = self.weights.push(self.weights.sort(displacement))
        return flat(f.q), flat(f.k), flat(f.v)

    def joined(self, heads: Tensor) -> Tensor:
        """The outputs ``(*batch, n, d_out)`` from those of the heads, (B, n, v)."""
        return self.weights.unsort(self.weights.parameters.join(self._headed(heads)))

    def _scored(
        self, block: Block, matrices: Matrices, q_dot: Tensor, k_dot: Tensor | None
    ) -> Tensor:
        """wᵢⱼ = Gᵢⱼ⟨q̇ᵢ, kⱼ⟩ + Nᵢⱼ⟨qᵢ, k̇ⱼ⟩ of a block, rows shifted."""
        most, one = self._most(block), matrices.queries is matrices.keys
        q = self.q[:, block.rows]
        w = torch.bmm(q_dot, self.k[:, block.columns].mT, out=self._buffer(1, block))
        if k_dot is not None and one:
            w.baddbmm_(q, k_dot.mT)
        if most is not None:
            w.sub_(w.gather(-1, most))
        w.mul_(matrices.queries)
        if k_dot is None or one:
            return w
        x = torch.bmm(q, k_dot.mT, out=self._buffer(2, block))
        if most is not None:
            assert self.rows.tilts is not None
            shift = x.gather(-1, most).mul_(self.rows.tilts[:, block.rows])
            w.addcmul_(matrices.queries, shift, value=-1.0)
        w.addcmul_(x, matrices.keys)
        return w if most is None else w.scatter_(-1, most, 0.0)

    def _most(self, block: Block) -> Tensor | None:
        """ĵ of the rows of a block, counted from its first column."""
        most, first = self.rows.most, block.columns.start
        if most is None:
            return None
        return most[:, block.rows] - first if first else most[:, block.rows]

    @torch.no_grad()
    def rmatvec(self, covector: Tensor, *, keys: bool = True) -> Tensor:
        """The transpose of `matvec`, ``(*batch, n, d_out) → (*batch, n, d)``."""
        y = self.split(covector)
        q_bar, k_bar, v_bar = (
            torch.empty_like(self.q),
            torch.zeros_like(self.k),
            torch.zeros_like(self.v),
        )
        for block, matrices in self.matrices():
            i, j = block
            by_query, by_key = self._deviations(block, matrices, y[:, i])
            torch.bmm(by_query, self.k[:, j], out=q_bar[:, i])
            if keys:
                k_bar[:, j].baddbmm_(by_key.mT, self.q[:, i])
                v_bar[:, j].baddbmm_(matrices.values.mT, y[:, i])
        return self.pulled(q_bar, k_bar, v_bar)

    def split(self, covector: Tensor) -> Tensor:
        """The transpose of `joined`."""
        return flat(self.weights.parameters.join_transposed(self.weights.sort(covector)))

    def pulled(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The transpose of `pushed`."""
        return self.weights.unsort(
            self.weights.pull(self._headed(q), self._headed(k), self._headed(v))
        )

    def _deviations(self, block: Block, matrices: Matrices, y: Tensor) -> tuple[Tensor, Tensor]:
        """Gᵢⱼ⟨vⱼ − rᵢ, yᵢ⟩ and Nᵢⱼ⟨vⱼ − rᵢ, yᵢ⟩ of a block: the transpose of shifted rows."""
        most = self._most(block)
        g = torch.bmm(y, self.v[:, block.columns].mT, out=self._buffer(1, block))
        g.sub_((y * self.rows.means[:, block.rows]).sum(-1, keepdim=True))
        by_key = g
        if matrices.queries is not matrices.keys:
            by_key = torch.mul(g, matrices.keys, out=self._buffer(2, block))
        g.mul_(matrices.queries)
        if most is not None:
            balance = g.scatter_(-1, most, 0.0).sum(-1, keepdim=True).neg_()
            g.scatter_(-1, most, balance)
            if by_key is not g:
                assert self.rows.tilts is not None
                by_key.scatter_(-1, most, balance.mul_(self.rows.tilts[:, block.rows]))
        return g, by_key

    # --- dense ---

    @torch.no_grad()
    def field_jacobians(self) -> Tensor:
        """D_xΓ_μ(xᵢ) = Σ_h W^h Cᵢ^h Dqᵢ^h, shape ``(*batch, n, d_out, d)``."""
        shape = (*self.batch_shape, *self._field.shape[1:])
        jacobians = self._field.reshape(shape)
        return self.weights.unsort(jacobians.flatten(-2)).reshape(shape)

    @cached_property
    def _field(self) -> Tensor:
        """The same in the order of `weights`, (b, n, d_out, d) with b over the batch."""
        q_dot, _, _ = self.unit_pushes
        # What all atoms share has axes of length 1, of which einsum makes one large product.
        covariances = self._per_batch(self.covariances())
        return self._joined(torch.einsum("bhivk,bhidk->bhidv", covariances, q_dot)).mT

    @torch.no_grad()
    def covariances(self) -> Tensor:
        """Cᵢ = Σⱼ Gᵢⱼ (vⱼ − rᵢ) ⊗ (kⱼ − k_ĵ) per head, (B, n, v, k), in the order of `weights`.

        kⱼ alone where rows are not shifted. Differences, not products of means: covariances of
        atoms close together keep their digits.
        """
        k, v = self.k, self.v
        out = k.new_empty(*k.shape[:-1], v.shape[-1], k.shape[-1])
        for block, matrices in self.matrices():
            # The differences take k + v times the memory of P: a few rows at a time.
            per_row = len(k) * block.n_columns * (k.shape[-1] + v.shape[-1])
            step = max(1, _DIFFERENCES // max(1, per_row))
            for start in range(block.rows.start, block.rows.stop, step):
                part = slice(start, min(start + step, block.rows.stop))
                of_block = slice(part.start - block.rows.start, part.stop - block.rows.start)
                g = matrices.queries[:, of_block]
                few = Block(part, block.columns)
                dk = g[..., None] * self._from_most(k, few)
                out[:, part] = _row_by_row(self._away(g, few).mT, dk)
        return out

    def _from_most(self, t: Tensor, block: Block, heads: slice = slice(None)) -> Tensor:
        """tⱼ − t_ĵ of a few rows, (B, rows, columns, ·); tⱼ where rows are not shifted."""
        own, most = t[heads, block.columns], self._most(block)
        if most is None:
            return own[:, None]
        return own[:, None] - own.take_along_dim(most[heads], 1)[:, :, None]

    def _away(self, g: Tensor, block: Block, heads: slice = slice(None)) -> Tensor:
        """vⱼ − rᵢ of a few rows, (B, rows, columns, v)."""
        v = self._from_most(self.v, block, heads)
        if self.rows.most is None:
            return v - self.rows.means[heads, block.rows, None]
        # rᵢ − v_ĵ as a mean of differences: it is tiny where row i is nearly one-hot at ĵ.
        return v - _row_by_row(g[:, :, None], v)

    @cached_property
    def unit_pushes(self) -> tuple[Tensor, Tensor, Tensor]:
        """q̇, k̇ and v̇ along each unit vector, (b or 1, H, n or 1, d, ·)."""
        par, kernel = self.weights.parameters, self.weights.kernel
        points, positions = self.weights.points.detach(), self.weights.positions
        units = torch.eye(points.shape[-1], dtype=points.dtype, device=points.device)
        if kernel.is_linear:  # those of d atoms, wherever they are
            q, k, v, *_ = kernel.push(At(par, units, None), units).folded(0.0)
            return q[None, :, None], k[None, :, None], v[None, :, None]
        points = points.reshape(-1, *points.shape[-2:])
        if positions is not None:
            positions = positions.reshape(points.shape[:-1])
        slopes = kernel.feature_slopes(At(par, points, positions))
        if slopes is not None:
            by_key, by_query = slopes
            q = by_query @ (par.scale[:, None, None] * par.query)[:, None]
            k, v = by_key @ par.per_head(par.key)[:, None], par.per_head(par.value)
            return q.mT, k.mT, v.mT[None, :, None]
        units = units[:, None, None].expand(-1, *points.shape[:-1], -1)
        if positions is not None:
            positions = positions.expand(units.shape[:-1])
        at = points.expand_as(units).contiguous()
        q, k, v, *_ = kernel.push(At(par, at, positions), units).folded(0.0)
        return q.movedim(0, -2), k.movedim(0, -2), v.movedim(0, -2)

    def _joined(self, blocks: Tensor) -> Tensor:
        """Σ_h W^h of (b, H, n, d, v), (b, n, d, d_out)."""
        joined = self.weights.parameters.join(blocks.flatten(2, 3))
        return joined.unflatten(1, blocks.shape[2:4])

    def _per_batch(self, flat: Tensor) -> Tensor:
        """(B, ...) as (b, H, ...)."""
        return flat.unflatten(0, (-1, self.weights.parameters.n_heads))

    def dense(self, part: slice) -> Tensor:
        """The matrices of a slice of the flattened batch, (b, n·d_out, n·d)."""
        kept = self.weights.order is None and len(self.blocks) == 1 and self.rows.kept
        if kept:
            return self._dense(part)
        weights = self.weights.part(part)
        return replace(self, weights=weights).whole._dense(slice(0, len(weights.points)))

    @torch.no_grad()
    def _dense(self, part: slice) -> Tensor:
        """`dense` where the one block of rows is kept."""
        assert self.rows.kept is not None
        (block,), (matrices,) = self.blocks, self.rows.kept
        n_heads = self.weights.parameters.n_heads
        heads = slice(part.start * n_heads, part.stop * n_heads)
        g, n, m = (t[heads] for t in matrices)
        dv = self._away(g, block, heads)
        _, k_dot, v_dot = (t if len(t) == 1 else t[part] for t in self.unit_pushes)
        # ⟨qᵢ, k̇ⱼ⟩ for unit displacements of atom j: (b, H, j or 1, i, d).
        turned = self._per_batch(self.q[heads])[:, :, None] @ k_dot.mT
        # [b, h, i, j, β, ·]: the parts of keys and values, before the output matrices.
        moved = self._per_batch(dv * n[..., None])[..., None, :]
        by_key = moved * turned.transpose(2, 3)[..., None]
        by_key.addcmul_(self._per_batch(m)[..., None, None], v_dot[:, :, None])
        matrix = self._joined(by_key.flatten(2, 3)).unflatten(1, by_key.shape[2:4])
        matrix = matrix.permute(0, 1, 4, 2, 3)  # [b, i, α, j, β], queries on the diagonal
        matrix.diagonal(0, 1, 3).add_(self._field[part].movedim(1, -1))
        return matrix.flatten(3, 4).flatten(1, 2)


def _row_by_row(left: Tensor, right: Tensor) -> Tensor:
    """Products of matrices (B, rows, ·, ·), one for each row."""
    products = torch.bmm(left.flatten(0, 1), right.flatten(0, 1))
    return products.unflatten(0, left.shape[:2])
