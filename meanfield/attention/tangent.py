"""The linearisation of attention at a measure, matrix-free and dense."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from meanfield.attention.coarse import coarse_space
from meanfield.attention.heads import JoinedHeads
from meanfield.attention.interaction import Block, Interaction
from meanfield.attention.normalization import softmax
from meanfield.attention.parameters import AttentionParameters
from meanfield.linalg import LinearMap

__all__ = ["AttentionTangent"]


@dataclass(frozen=True, eq=False)
class _Rows:
    """What is known of one block of rows.

    Attributes:
        block: which rows, and the columns that they may see.
        kept: their transition matrices P and M, or None.
        most: the atom ĵ that each row sees most, (*batch, H, rows, 1).
        nearest: v_ĵ, (*batch, H, rows, v).
        offsets: oᵢ − v_ĵ. Where attention is nearly on one atom it is tiny, and a difference of
            the two would be rounding: keys and values of size s would put s² units of rounding
            into J.
    """

    block: Block
    kept: tuple[Tensor, Tensor] | None
    most: Tensor
    nearest: Tensor
    offsets: Tensor


@dataclass(frozen=True, eq=False)
class AttentionTangent:
    """The derivative of F at μ with the weights held fixed ([CAP24] Lemmas C.2, C.6, D.1).

    With P the transition matrix, oᵢ = Σⱼ Pᵢⱼ vⱼ, scaled queries q, keys k, values v of a head and
    q̇, k̇, v̇ their tangents,

        ȯᵢ = Σⱼ Mᵢⱼ v̇ⱼ + Σⱼ Pᵢⱼ ⟨q̇ᵢ, kⱼ⟩ (vⱼ − oᵢ) + Σⱼ Mᵢⱼ ⟨qᵢ, k̇ⱼ⟩ (vⱼ − oᵢ),   M = P,

    acting on plain displacements ε. With ``geometry="wasserstein"`` it acts on weighted ones,
    ηᵢ = √aᵢ εᵢ, as D^½ J D^−½; then Mᵢⱼ = √(aᵢ/aⱼ) Pᵢⱼ, formed from logarithms: Pᵢⱼ may be
    e^{−900} where Mᵢⱼ is 1. Atoms of weight 0 are absent: their rows and columns are 0.

    P never changes, so a product needs no new softmax. It is kept when it fits in `memory` bytes
    and otherwise recomputed from the log-normalisers in blocks of rows, O(n · block) memory.

    Nothing is computed before the first product.

    Args:
        parameters: of the layer.
        queries: scaled queries of the atoms in the interaction's order, (*batch, H, n, k).
        interaction: the atoms as the layer sees them.
        geometry: "euclidean" or "wasserstein".
        memory: bytes that the kept transition matrices may take.
        block_size: rows per block; chosen from the memory of a block if None.
    """

    parameters: AttentionParameters
    queries: Tensor
    interaction: Interaction
    geometry: str = "euclidean"
    memory: int = 2**29
    block_size: int | None = None

    def as_linear_map(self) -> LinearMap:
        """The tangent as a `LinearMap` on displacements."""
        n, par = self.interaction.n, self.parameters
        return LinearMap(
            matvec=self.matvec,
            rmatvec=self.rmatvec,
            in_shape=(n, par.dim),
            out_shape=(n, par.out_dim),
            batch_shape=self.queries.shape[:-3],
            dtype=self.queries.dtype,
            device=self.queries.device,
            dense=self.dense,
            coarse=lambda: coarse_space(self),
        )

    def field_linear_map(self) -> LinearMap:
        """D_xΓ_μ(xᵢ) of every atom as a batch (*batch, n) of maps R^d → R^d_out."""
        par, batch = self.parameters, self.queries.shape[:-3]

        def each(product: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            return lambda vectors: product(vectors.squeeze(-2)).unsqueeze(-2)

        return LinearMap(
            matvec=each(self.query_matvec),
            rmatvec=each(self.query_rmatvec),
            in_shape=(1, par.dim),
            out_shape=(1, par.out_dim),
            batch_shape=torch.Size([*batch, self.interaction.n]),
            dtype=self.queries.dtype,
            device=self.queries.device,
            dense=lambda part: self._flat_field_jacobians[part],
        )

    # --- what does not change from product to product ---

    @cached_property
    def heads(self) -> JoinedHeads:
        """The layer's matrices side by side."""
        return JoinedHeads(self.parameters)

    @cached_property
    def alive(self) -> Tensor:
        """Which atoms have mass, (*batch, n)."""
        return self.interaction.log_weights > -math.inf

    @cached_property
    def _half_logs(self) -> Tensor | None:
        """ρ = ½ log a where M differs from P; 0 for −inf, since those atoms are cut out."""
        logs = self.interaction.log_weights
        if self.geometry == "euclidean" or bool((logs == logs[..., :1]).all()):
            return None
        return torch.where(self.alive, 0.5 * logs, 0.0)

    @property
    def uniform(self) -> bool:
        """Whether M is P."""
        return self._half_logs is None

    @cached_property
    def _prepared(self) -> tuple[list[_Rows], Tensor]:
        """The blocks of rows, and the outputs oᵢ per head (*batch, H, n, v)."""
        interaction, n = self.interaction, self.interaction.n
        copies = 1 if self._half_logs is None else 2
        size = math.prod(self.queries.shape[:-1]) * n * self.queries.element_size() * copies
        blocks = list(interaction.blocks(interaction.positions, n, self.block_size))
        rows, outputs = [], torch.empty_like(interaction.values)
        for block in blocks:
            p, m = self._transition(block)
            values = interaction.values[..., block.columns, :]
            largest, most = p.max(-1, keepdim=True)
            nearest = values.gather(-2, most.expand(*most.shape[:-1], values.shape[-1]))
            others = p.scatter(-1, most, 0.0)
            mean = others @ values
            outputs[..., block.rows, :] = mean + largest * nearest
            offsets = mean - others.sum(-1, keepdim=True) * nearest
            kept = (p, m) if size <= self.memory else None
            rows.append(_Rows(block, kept, most, nearest, offsets))
        return rows, outputs

    @property
    def rows(self) -> list[_Rows]:
        """The blocks of rows."""
        return self._prepared[0]

    @property
    def outputs(self) -> Tensor:
        """oᵢ of each head, (*batch, H, n, v)."""
        return self._prepared[1]

    @property
    def kept(self) -> bool:
        """Whether the transition matrices stay in memory."""
        return self.rows[0].kept is not None

    def transition(self, rows: _Rows) -> tuple[Tensor, Tensor]:
        """P and M of a block of rows."""
        return self._transition(rows.block) if rows.kept is None else rows.kept

    def _transition(self, block: Block) -> tuple[Tensor, Tensor]:
        rho = self._half_logs
        logits = self.interaction.logits(self.queries, self.interaction.positions, block)
        alive = self.alive[..., None, block.rows, None]
        everyone = bool(alive.all())
        if rho is None:
            # A row that sees no mass is not alive.
            p = logits.softmax(-1)
            p = p if everyone else torch.where(alive, p, 0.0)
            return p, p
        log_p = softmax(logits).log_transition
        p = log_p.exp() if everyone else torch.where(alive, log_p.exp(), 0.0)
        # √(aᵢ/aⱼ) Pᵢⱼ in one exponential: either factor alone may leave the number range.
        log_p += rho[..., None, block.rows, None] - rho[..., None, None, block.columns]
        m = log_p.exp_()
        return p, m if everyone else torch.where(alive, m, 0.0)

    # --- products ---

    def matvec(self, displacement: Tensor) -> Tensor:
        """Jε, (*batch, n, d) → (*batch, n, d_out)."""
        q_dot, k_dot, v_dot = self.heads.project(self.interaction.sort(displacement))
        heads = torch.empty_like(self.outputs)
        if self._half_logs is None:
            # ⟨q̇ᵢ, kⱼ⟩ + ⟨qᵢ, k̇ⱼ⟩ as one product.
            left = torch.cat([q_dot, self.queries], -1)
            right = torch.cat([self.interaction.keys, k_dot], -1)
        for rows in self.rows:
            i, j = rows.block
            p, m = self.transition(rows)
            if self._half_logs is None:
                w = (left[..., i, :] @ right[..., j, :].mT).mul_(p)
            else:
                w = (q_dot[..., i, :] @ self.interaction.keys[..., j, :].mT).mul_(p)
                w += (self.queries[..., i, :] @ k_dot[..., j, :].mT).mul_(m)
            heads[..., i, :] = self._spread(rows, w).add_(m @ v_dot[..., j, :])
        return self.interaction.unsort(self.heads.join(heads))

    def _spread(self, rows: _Rows, w: Tensor) -> Tensor:
        """Σⱼ wᵢⱼ (vⱼ − oᵢ) of a block of rows, (*batch, H, rows, v); overwrites w."""
        largest = w.gather(-1, rows.most)
        w.scatter_(-1, rows.most, 0.0)
        others = w.sum(-1, keepdim=True)
        spread = w @ self.interaction.values[..., rows.block.columns, :]
        spread.addcmul_(others, rows.nearest, value=-1.0)
        return spread.addcmul_(largest.add_(others), rows.offsets, value=-1.0)

    def _deviations(self, rows: _Rows, y: Tensor) -> Tensor:
        """⟨vⱼ − oᵢ, yᵢ⟩ of a block of rows, its y (*batch, H, rows, v)."""
        g = y @ self.interaction.values[..., rows.block.columns, :].mT
        g -= (y * self.outputs[..., rows.block.rows, :]).sum(-1, keepdim=True)
        return g.scatter_(-1, rows.most, -(y * rows.offsets).sum(-1, keepdim=True))

    def rmatvec(self, covector: Tensor) -> Tensor:
        """Jᵀζ, (*batch, n, d_out) → (*batch, n, d)."""
        y = self.heads.split(self.interaction.sort(covector))
        joined = y.new_zeros(*y.shape[:-3], y.shape[-2], self.heads.inner.shape[0])
        parts = self.heads.parts(joined)
        for rows in self.rows:
            self._rmatvec_rows(rows, y, *parts)
        return self.interaction.unsort(joined @ self.heads.inner)

    def _rmatvec_rows(
        self, rows: _Rows, y: Tensor, q_bar: Tensor, k_bar: Tensor, v_bar: Tensor
    ) -> None:
        i, j = rows.block
        p, m = self.transition(rows)
        keys, y_i = self.interaction.keys[..., j, :], y[..., i, :]
        g = self._deviations(rows, y_i)
        if p is m:
            g.mul_(p)
            q_bar[..., i, :] = g @ keys
        else:
            q_bar[..., i, :] = (g * p) @ keys
            g.mul_(m)
        k_bar[..., j, :] += g.mT @ self.queries[..., i, :]
        v_bar[..., j, :] += m.mT @ y_i

    # --- the part that moves one query only: the derivative of the field ---

    def query_matvec(self, displacement: Tensor) -> Tensor:
        """D_xΓ_μ(xᵢ) εᵢ for every atom, (*batch, n, d) → (*batch, n, d_out)."""
        par = self.parameters
        eps = self.interaction.sort(displacement)[..., None, :, :]
        q_dot = (eps @ par.query.mT) * par.scale[:, None, None]
        heads = torch.empty_like(self.outputs)
        for rows in self.rows:
            i, j = rows.block
            w = q_dot[..., i, :] @ self.interaction.keys[..., j, :].mT
            heads[..., i, :] = self._spread(rows, w.mul_(self.transition(rows)[0]))
        return self.interaction.unsort(self.heads.join(heads))

    def query_rmatvec(self, covector: Tensor) -> Tensor:
        """D_xΓ_μ(xᵢ)ᵀ ζᵢ for every atom, (*batch, n, d_out) → (*batch, n, d)."""
        par = self.parameters
        y = self.heads.split(self.interaction.sort(covector))
        q_bar = torch.empty_like(self.queries)
        for rows in self.rows:
            i, j = rows.block
            g = self._deviations(rows, y[..., i, :]).mul_(self.transition(rows)[0])
            q_bar[..., i, :] = g @ self.interaction.keys[..., j, :]
        back = (q_bar * par.scale[:, None, None]) @ par.query
        return self.interaction.unsort(back.sum(-3))

    def covariances(self) -> Tensor:
        """Cᵢ = Σⱼ Pᵢⱼ (vⱼ − oᵢ) kⱼᵀ per head, (*batch, H, n, v, k), in the interaction's order."""
        keys, values = self.interaction.keys, self.interaction.values
        width = keys.shape[-1] + values.shape[-1]
        shape = (*self.queries.shape[:-1], values.shape[-1], keys.shape[-1])
        out = self.queries.new_empty(shape)
        for rows in self.rows:
            p_rows = self.transition(rows)[0]
            # The differences take `width` times the room of P: smaller steps.
            step = max(1, p_rows.shape[-2] // width)
            for start in range(0, p_rows.shape[-2], step):
                p = p_rows[..., start : start + step, :]
                i = slice(rows.block.rows.start + start, rows.block.rows.start + start + step)
                i = slice(i.start, min(i.stop, rows.block.rows.stop))
                k, v = keys[..., rows.block.columns, :], values[..., rows.block.columns, :]
                # Differences, not products of means: covariances of close atoms keep digits.
                dk = k[..., None, :, :] - (p @ k)[..., None, :]
                dv = v[..., None, :, :] - self.outputs[..., i, None, :]
                out[..., i, :, :] = dv.mT @ (p[..., None] * dk)
        return out

    def field_jacobians(self) -> Tensor:
        """D_xΓ_μ(xᵢ) = Σ_h W^h Cᵢ^h · scale Q^h, shape (*batch, n, d_out, d)."""
        joined = self._field_jacobians()
        return self.interaction.unsort(joined.flatten(-2)).reshape(joined.shape)

    @cached_property
    def _flat_field_jacobians(self) -> Tensor:
        return self.field_jacobians().flatten(0, -3)

    def _field_jacobians(self) -> Tensor:
        par = self.parameters
        blocks = self.covariances() @ (par.scale[:, None, None] * par.query)[:, None]
        if par.output is not None:
            blocks = par.output[:, None] @ blocks
        return blocks.sum(-4)

    # --- dense ---

    def dense(self, part: slice) -> Tensor:
        """The matrices of a slice of the flattened batch, (b, n·d_out, n·d)."""
        queries = self.queries.reshape(-1, *self.queries.shape[-3:])[part]
        interaction = self.interaction.part(part)
        whole = replace(
            self,
            queries=queries,
            interaction=interaction,
            memory=2**62,
            block_size=interaction.n,
        )
        return whole._dense_flat()

    def _dense_flat(self) -> Tensor:
        par, interaction = self.parameters, self.interaction
        (rows,) = self.rows
        m = self.transition(rows)[1]
        values, means = interaction.values, self.outputs
        if par.output is not None:
            values, means = values @ par.output.mT, means @ par.output.mT
        # [b, i, α, j, β]: the value's share, the key's share, and the query's on the diagonal.
        matrix = torch.einsum("bhij,hac->biajc", m, par.V)
        spread = m[..., None] * (values[..., None, :, :] - means[..., :, None, :])
        matrix += torch.einsum("bhija,bhic->biajc", spread, self.queries @ par.key)
        diagonal = torch.arange(interaction.n, device=m.device)
        matrix[:, diagonal, :, diagonal, :] += self._field_jacobians().movedim(1, 0)
        return interaction.unsort_dense(matrix).flatten(3, 4).flatten(1, 2)
