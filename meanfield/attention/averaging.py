"""The blocks of attention's derivative, for certain bounds of its norm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import final

import torch
from torch import Tensor

from meanfield.attention.tangent import AttentionTangent
from meanfield.linalg.blocks import Core, Metric, Rows, TokenBlocks

# Entries of the differences vⱼ − rᵢ and of their products that are held at once (float64: 64 MiB).
_ENTRIES = 2**23


@final
@dataclass(frozen=True, eq=False)
class AttentionCore(Core):
    """Tᵢⱼ = Σ_h W^h (Mᵢⱼ V^h + Nᵢⱼ (vⱼ − rᵢ) uᵢⱼᵀ), uᵢⱼ = K^hᵀ q̃ᵢⱼ: values and keys move.

    G, N and M are attention weights with tilts, named as in `Matrices`. Keys move by k̇ⱼ = AⱼK ẋⱼ,
    see `Kernel.key_slopes`, and q̃ᵢⱼ = Aⱼᵀqᵢ; what queries do stands on the diagonal of
    `TokenBlocks`. All is in double precision. In sums of squares the means rᵢ are subtracted from
    values measured from vĵ, ĵ the largest weight of the row, so that nearly one-hot rows keep
    their digits.

    Attributes:
        queries: G, (H, n, n), to recompute rᵢ − vĵ = Σⱼ Gᵢⱼ(vⱼ − vĵ) without cancellation.
        keys: N, (H, n, n).
        values: M, (H, n, n).
        v: (H, n, v).
        means: rᵢ, (H, n, v).
        most: ĵ, (H, n, 1), or None where rᵢ is subtracted as it is.
        q: qᵢ, (H, n, k′).
        slopes: Aⱼ, (H or 1, n or 1, k′, k).
        V: (H, v, d).
        K: (H, k, d).
        W: (H, e, v).
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    v: Tensor
    means: Tensor
    most: Tensor | None
    q: Tensor
    slopes: Tensor
    V: Tensor
    K: Tensor
    W: Tensor

    def __post_init__(self) -> None:
        for each in fields(self):
            given = getattr(self, each.name)
            if given is not None and given.is_floating_point():
                object.__setattr__(self, each.name, given.detach().double())

    @property
    def n(self) -> int:  # type: ignore[override]
        """Number of tokens."""
        return self.v.shape[1]

    @property
    def out_dim(self) -> int:  # type: ignore[override]
        """e."""
        return self.W.shape[1]

    @property
    def in_dim(self) -> int:  # type: ignore[override]
        """d."""
        return self.V.shape[-1]

    # --- products ---

    def back(self, x: Tensor, rows: Rows) -> Tensor:
        """Tᵢⱼᵀxᵢ, (rows, n, d)."""
        parts = [self._back(x[part], at) for part, at in self._chunks(rows)]
        return torch.cat(parts)

    def _back(self, x: Tensor, rows: Rows) -> Tensor:
        z = x @ self.W  # (H, r, v)
        along = z @ self.v.mT - (z * self.means[:, rows.slice]).sum(-1, keepdim=True)
        along = (self.keys[:, rows.slice] * along).movedim(0, 1)
        moved = (z @ self.V).movedim(0, 1)
        by_value = self.values[:, rows.slice].movedim(0, 1).mT @ moved  # (r, n, d)
        q = self._turned(rows)  # (r, H, n or 1, k)
        if q.shape[2] == 1:
            return by_value + along.mT @ _by_head(q[:, :, 0], self.K)
        by_key = (along[..., None] * q).transpose(1, 2).flatten(2)  # (r, n, H·k)
        return by_value + by_key @ self.K.flatten(0, 1)

    def forth(self, y: Tensor, rows: Rows) -> Tensor:
        """Σⱼ Tᵢⱼyᵢⱼ, (rows, e)."""
        parts = [self._forth(y[part], at) for part, at in self._chunks(rows)]
        return torch.cat(parts)

    def _forth(self, y: Tensor, rows: Rows) -> Tensor:
        means = self.values[:, rows.slice].movedim(0, 1) @ y  # (r, H, d)
        heads = _by_head(means, self.V.mT).movedim(0, 1)
        q = self._turned(rows)
        if q.shape[2] == 1:
            turned = _by_head(q[:, :, 0], self.K) @ y.mT
        else:
            pushed = (y @ self.K.flatten(0, 1).mT).unflatten(-1, self.K.shape[:2])
            turned = (pushed.transpose(1, 2) * q).sum(-1)
        turned = turned.movedim(0, 1) * self.keys[:, rows.slice]
        heads = heads + turned @ self.v
        heads = heads - turned.sum(-1, keepdim=True) * self.means[:, rows.slice]
        return (heads @ self.W.mT).sum(0)

    def entries(self, rows: Rows) -> Tensor:
        """The blocks within each group, (groups, size, size, e, d)."""
        parts = [self._entries(at) for _, at in self._chunks(rows)]
        return torch.cat(parts)

    def _entries(self, rows: Rows) -> Tensor:
        def within(per_pair: Tensor) -> Tensor:
            """(r, H, n, …) to (groups, size, H, size, …), columns of the same group."""
            one = rows.grouped(per_pair)[:, :, :, rows.slice]
            one = one.unflatten(3, (-1, rows.size))
            return one.diagonal(0, 0, 3).movedim(-1, 0)

        m, n = (within(t[:, rows.slice].movedim(0, 1)) for t in (self.values, self.keys))
        away, q = within(self._away(rows).movedim(0, 1)), self._turned(rows)
        q = within(q.expand(-1, -1, self.n, -1))
        by_value = torch.einsum("gihl,hev,hvd->giled", m, self.W, self.V)
        out = torch.einsum("hev,gihlv,gihl->gihel", self.W, away, n)
        turned = torch.einsum("gihlk,hkd->gihld", q, self.K)
        return by_value + torch.einsum("gihel,gihld->giled", out, turned)

    # --- sums of squares ---

    def gram(self, s: Tensor, rows: Rows, metric: Metric | None) -> tuple[Tensor, Tensor]:
        """Σⱼ sⱼ TᵢⱼBⱼBⱼᵀTₗⱼᵀ of each group, with a bound of the rounding.

        A group of rows is one row with as many heads more. With Y = N(v − r) of a head and
        B = base this is W Z Wᵀ,

            Z = Σⱼ sⱼ (M V + Y uᵀ)BBᵀ(M V + Y uᵀ)ᵀ

        in blocks of heads, from sums of products over j of M, Y and q̃: no block is formed.
        """
        each = [self._gram(s[part], at, metric) for part, at in self._chunks(rows, grouped=True)]
        found, slack = zip(*each, strict=True)
        return torch.cat(found), torch.cat(slack)

    def _gram(self, s: Tensor, rows: Rows, metric: Metric | None) -> tuple[Tensor, Tensor]:
        heads = self._grouped_heads(rows)
        V, K, scaled = self.V, self.K, s
        if metric is not None:
            V, K, scaled = V @ metric.base, K @ metric.base, s * metric.scale
        Z = _squares(heads, V, K, scaled)
        if metric is not None:
            Z = Z - self._less(heads, s * metric.less, metric.along)
        H, v = self.V.shape[:2]
        Z = Z.reshape(len(s), rows.size, H * v, rows.size, H * v).transpose(2, 3)
        W = self.W.movedim(0, 1).flatten(1)
        found = (W @ Z @ W.mT).transpose(2, 3)
        return found, self._rounding(heads, V, K, scaled, rows.size)

    def _grouped_heads(self, rows: Rows) -> _Heads:
        def grouped(per_pair: Tensor) -> Tensor:
            """(r, H, …) as (groups, size·H, …)."""
            return rows.grouped(per_pair).flatten(1, 2)

        m, n = (grouped(t[:, rows.slice].movedim(0, 1)) for t in (self.values, self.keys))
        away = grouped(self._away(rows).movedim(0, 1))
        return _Heads(m, n[..., None] * away, grouped(self._turned(rows)), n)

    def _less(self, heads: _Heads, s: Tensor, along: Tensor) -> Tensor:
        """Σⱼ sⱼ (Tⱼyⱼ)(Tⱼyⱼ)ᵀ before W."""
        size = heads.m.shape[1] // len(self.V)
        value, key = (along @ self.V.mT).repeat(size, 1, 1), (along @ self.K.mT).repeat(size, 1, 1)
        share = (heads.q * key).sum(-1)  # (g, h, n)
        moved = heads.m[..., None] * value + heads.y * share[..., None]
        moved = (moved * s.sqrt()[:, None, :, None]).transpose(1, 2).flatten(2)
        return (moved.mT @ moved).reshape(len(s), *2 * heads.y.shape[1::2])

    def _rounding(self, heads: _Heads, V: Tensor, K: Tensor, s: Tensor, size: int) -> Tensor:
        """All terms that are added, without their signs, times what rounding may be of them."""

        def lengths(matrices: Tensor) -> Tensor:
            return torch.linalg.vector_norm(matrices, dim=(-2, -1)).repeat(size)[:, None]

        y = torch.linalg.vector_norm(heads.y, dim=-1)
        # A mean of differences is as accurate as its largest terms, which are about the spread.
        y = y + heads.n * (heads.m * y).sum(-1, keepdim=True)
        q = torch.linalg.vector_norm(heads.q, dim=-1)
        sizes = heads.m * lengths(V) + y * q * lengths(K)
        total = (s * (lengths(self.W) * sizes).sum(1).square()).sum(-1)
        terms = s.shape[-1] + 2 * sum(self.V.shape) + 2 * sum(self.K.shape) + self.out_dim
        return 8 * terms * torch.finfo(s.dtype).eps * total

    def seen(self, rows: Rows) -> Tensor:
        """Which blocks may differ from 0, (rows, n)."""
        both = (self.values[:, rows.slice] != 0) | (self.keys[:, rows.slice] != 0)
        return both.any(0)

    def absolute(self) -> AttentionCore:
        """|W|(|M||V| + |N|(|vⱼ| + |rᵢ|)|uᵢⱼ|ᵀ), with |K|ᵀ|Aⱼ|ᵀ|qᵢ| for |uᵢⱼ|."""
        named = {each.name: getattr(self, each.name) for each in fields(self)}
        named.pop("most")
        signless = {name: value.abs() for name, value in named.items()}
        return replace(self, **signless | {"means": -signless["means"]})

    @property
    def terms(self) -> int:
        """Along n tokens, the coordinates of points, values, queries, and keys of all heads."""
        H, v, d = self.V.shape
        return self.n + d + self.out_dim + H + v + self.q.shape[-1] + H * self.K.shape[1] + 8

    def size(self) -> float:
        """The largest of M and N."""
        return max(float(self.values.abs().max()), float(self.keys.abs().max()))

    def scaled(self, factor: float) -> AttentionCore:
        """M and N times a number."""
        return replace(self, values=factor * self.values, keys=factor * self.keys)

    # --- inside ---

    def _chunks(self, rows: Rows, *, grouped: bool = False) -> Iterator[tuple[slice, Rows]]:
        """Parts of the rows, whole groups each, whose differences fit in memory."""
        H, n, v = self.v.shape
        width = v + self.K.shape[1] * (1 if self.slopes.shape[1] == 1 else 1 + v * grouped)
        step = max(1, _ENTRIES // (H * n * width * rows.size)) * rows.size
        for start in range(rows.start, rows.stop, step):
            stop = min(start + step, rows.stop)
            part = slice(start - rows.start, stop - rows.start)
            if grouped:
                part = slice(part.start // rows.size, part.stop // rows.size)
            yield part, Rows(start, stop, rows.size)

    def _away(self, rows: Rows) -> Tensor:
        """vⱼ − rᵢ, (H, rows, n, v)."""
        if self.most is None:
            return self.v[:, None] - self.means[:, rows.slice, None]
        most = self.most[:, rows.slice].expand(-1, -1, self.v.shape[-1])
        away = self.v[:, None] - self.v.gather(1, most)[:, :, None]
        return away - self.queries[:, rows.slice, None] @ away

    def _turned(self, rows: Rows) -> Tensor:
        """q̃ᵢⱼ, (rows, H, n or 1, k)."""
        return torch.einsum("hra,hnak->rhnk", self.q[:, rows.slice], self.slopes)


def _by_head(vectors: Tensor, matrices: Tensor) -> Tensor:
    """Rows (r, H, k) times the matrix of their head (H, k, d): (r, H, d)."""
    return (vectors.movedim(1, 0) @ matrices).movedim(0, 1)


@dataclass(frozen=True, eq=False)
class _Heads:
    """Groups of rows with all their heads: M (g, h, n), Y (g, h, n, v), q̃ (g, h, n or 1, k)."""

    m: Tensor
    y: Tensor
    q: Tensor
    n: Tensor


def _squares(heads: _Heads, V: Tensor, K: Tensor, s: Tensor) -> Tensor:
    """Z of each group, (g, h, v, h, v) with the matrices of H heads for each of its rows."""
    H, v = V.shape[:2]
    size = heads.m.shape[1] // H
    stacked = torch.cat([V, K], 1).flatten(0, 1)
    products = (stacked @ stacked.mT).unflatten(0, (H, -1)).unflatten(-1, (H, -1))
    products = products.repeat(size, 1, size, 1)  # (h, v + k, h, v + k)
    values, mixed = products[:, :v, :, :v], products[:, :v, :, v:]
    weighted = heads.m * s[:, None]
    shares = weighted @ heads.m.mT
    Z = shares[:, :, None, :, None] * values
    if heads.q.shape[2] == 1:
        q = heads.q[:, :, 0]
        y = (weighted @ heads.y.transpose(1, 2).flatten(2)).unflatten(-1, heads.y.shape[1::2])
        turned = torch.einsum("hakc,gkc->ghak", mixed, q)
        cross = turned[..., None] * y[:, :, None]
        u = torch.einsum("ghk,hkd->ghd", q, K.repeat(size, 1, 1))
        root = (heads.y * s.sqrt()[:, None, :, None]).transpose(1, 2).flatten(2)
        square = (root.mT @ root).unflatten(-1, heads.y.shape[1::2])
        square = square.unflatten(1, heads.y.shape[1::2])
        square = square * (u @ u.mT)[:, :, None, :, None]
    else:
        cross = _mixed_by_token(heads, weighted, mixed)
        square = _squares_by_token(heads, K.repeat(size, 1, 1), s)
    return Z + cross + cross.permute(0, 3, 4, 1, 2) + square


def _mixed_by_token(heads: _Heads, weighted: Tensor, mixed: Tensor) -> Tensor:
    """Σⱼ sⱼ M (V K′ᵀq̃′ⱼ) Y′ⱼᵀ where q̃ depends on j, (g, h, v, h, v)."""
    out = []
    for head in range(heads.m.shape[1]):
        # One head on the right at a time: (g, n, k·v).
        pairs = heads.q[:, head, :, :, None] * heads.y[:, head, :, None]
        sums = (weighted @ pairs.flatten(2)).unflatten(-1, pairs.shape[2:])
        out.append(torch.einsum("hac,ghcb->ghab", mixed[:, :, head], sums))
    return torch.stack(out, 3)


def _squares_by_token(heads: _Heads, K: Tensor, s: Tensor) -> Tensor:
    """Σⱼ sⱼ ⟨uⱼ, u′ⱼ⟩ Yⱼ Y′ⱼᵀ where u depends on j, (g, h, v, h, v)."""
    u = torch.einsum("ghnk,hkd->gnhd", heads.q, K)
    products = s[:, None, None] * (u @ u.mT).permute(0, 2, 3, 1)  # (g, h, h, n)
    out = []
    for head in range(heads.m.shape[1]):
        left = products[:, head][..., None] * heads.y[:, head, None]  # (g, h, n, v)
        out.append((left.mT @ heads.y).transpose(1, 2))
    return torch.stack(out, 1)


def attention_blocks(tangent: AttentionTangent, index: int) -> TokenBlocks | None:
    """The blocks of one map of the flattened batch, in the order of the measure.

    None where the kernel does not say how keys move, see `Kernel.key_slopes`.
    """
    weights = tangent.weights.part(slice(index, index + 1))
    par = weights.parameters
    slopes = weights.kernel.key_slopes(par, weights.points, weights.positions)
    if slopes is None:
        return None
    one = AttentionTangent(weights, tangent.geometry, memory=2**62)
    order = None if weights.order is None else weights.order[0].argsort()

    def placed(per_token: Tensor, *axes: int) -> Tensor:
        if order is not None:
            for axis in axes:
                per_token = per_token.index_select(axis, order)
        return per_token

    G, N, M = one.square_matrices()
    most = one.rows.most
    if most is not None and weights.order is not None:
        most = weights.order[0][most]
    W = torch.eye(par.out_dim, dtype=M.dtype, device=M.device)[None]
    slopes = slopes[0]
    core = AttentionCore(
        queries=placed(G, 1, 2),
        keys=placed(N, 1, 2),
        values=placed(M, 1, 2),
        v=placed(one.v, 1),
        means=placed(one.rows.means, 1),
        most=None if most is None else placed(most, 1),
        q=placed(one.q, 1),
        slopes=slopes if slopes.shape[1] == 1 else placed(slopes, 1),
        V=par.per_head(par.value),
        K=par.per_head(par.key),
        W=W if par.output is None else par.output,
    )
    fields = tangent.field_jacobians()  # kept there, for the splitting component too
    return TokenBlocks(fields.reshape(-1, *fields.shape[-3:])[index], core)
