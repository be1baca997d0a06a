"""The blocks of attention's derivative, for certain bounds of its norm."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from meanfield.attention.tangent import AttentionTangent
from meanfield.linalg.blocks import Core, InDouble, Metric, TokenBlocks


@final
@dataclass(frozen=True, eq=False)
class AttentionCore(InDouble, Core):
    """Tᵢⱼ = Σ_h W^h (Mᵢⱼ V^h + Nᵢⱼ (vⱼ − rᵢ) uᵢⱼᵀ), uᵢⱼ = K^hᵀ q̃ᵢⱼ: values and keys move.

    G, N and M are attention weights with tilts, named as in `Matrices`. Keys move by k̇ⱼ = AⱼK ẋⱼ,
    see `Kernel.feature_slopes`, and q̃ᵢⱼ = Aⱼᵀqᵢ; what queries do stands on the diagonal of
    `TokenBlocks`. In sums of squares the means rᵢ are subtracted from
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

    # --- products ---

    def entries(self, *, squares: bool) -> int:
        """Of the weights with which rows of a basis are summed, or of the differences vⱼ − rᵢ."""
        (H, n, v), k, by_token = self.v.shape, self.K.shape[1], self.slopes.shape[1] > 1
        if squares:
            return H * n * (v + k * (1 + v * by_token))
        return 2 * H * n * (1 + (k if by_token else 1))

    def step(
        self, x: Tensor, s: Tensor, rows: slice, metric: Metric | None
    ) -> tuple[Tensor, Tensor]:
        """See `Core.step`. Tᵢⱼᵀxᵢ = Σₐ cₐⱼpₐ for few vectors pₐ of row i, and none is formed.

        They are the V^hᵀz^h, z^h = W^hᵀxᵢ, with Mᵢⱼ, and K^hᵀq̃ᵢ with Nᵢⱼ⟨z^h, vⱼ − rᵢ⟩, or the
        rows of K^h where q̃ᵢⱼ depends on j.
        """
        m, n = (t[:, rows].movedim(0, 1) for t in (self.values, self.keys))  # (r, H, n)
        z, means = x @ self.W, self.means[:, rows]  # (H, r, v)
        along = n * (z @ self.v.mT - (z * means).sum(-1, keepdim=True)).movedim(0, 1)
        q = self._turned(rows)
        one = q.shape[2] == 1
        if one:
            c, turned = along, _by_head(q[:, :, 0], self.K)
        else:
            c = (along[:, :, None] * q.mT).flatten(1, 2)  # (r, H·k, n)
            turned = self.K.flatten(0, 1).expand(len(x), -1, -1)
        c = torch.cat([m, c], 1)  # (r, a, n)
        p = torch.cat([(z @ self.V).movedim(0, 1), turned], 1)  # (r, a, d)
        based, by = p, s[:, None] * m
        if metric is not None:
            based, by = p @ metric.base, by * metric.scale
        products = based @ based.mT @ c  # of pₐ and BⱼBⱼᵀTᵢⱼᵀxᵢ
        moved = by @ c.mT @ based  # Σⱼ sⱼMᵢⱼBⱼBⱼᵀTᵢⱼᵀxᵢ, (r, H, d)
        if metric is not None:
            shares = p @ metric.along.mT
            less = metric.less * (shares * c).sum(1, keepdim=True)
            products = metric.scale * products - shares * less
            moved = moved @ metric.base.mT - (s[:, None] * m * less) @ metric.along
        by_key = products[:, m.shape[1] :]
        if not one:
            by_key = (by_key.unflatten(1, q.shape[1::2]) * q.mT).sum(2)
        by_key = (s[:, None] * n * by_key).movedim(0, 1)
        heads = moved.movedim(1, 0) @ self.V.mT + by_key @ self.v
        heads = heads - by_key.sum(-1, keepdim=True) * means
        return (c * products).sum(1).clamp_min(0.0), (heads @ self.W.mT).sum(0)

    def own(self, rows: slice) -> Tensor:
        """The blocks Tᵢᵢ, (rows, e, d)."""

        def within(per_pair: Tensor) -> Tensor:
            """(H, r, n, …) to (r, H, …), the columns of the rows themselves."""
            return per_pair[:, :, rows].diagonal(0, 1, 2).movedim(-1, 0)

        m, n = within(self.values[:, rows]), within(self.keys[:, rows])
        q = self._turned(rows).expand(-1, -1, self.v.shape[1], -1).movedim(1, 0)
        by_value = torch.einsum("rh,hev,hvd->red", m, self.W, self.V)
        out = torch.einsum("hev,rhv,rh->rhe", self.W, within(self._away(rows)), n)
        turned = torch.einsum("rhk,hkd->rhd", within(q), self.K)
        return by_value + torch.einsum("rhe,rhd->red", out, turned)

    # --- sums of squares ---

    def gram(self, s: Tensor, rows: slice, metric: Metric | None) -> tuple[Tensor, Tensor]:
        """Σⱼ sⱼ TᵢⱼBⱼBⱼᵀTᵢⱼᵀ of each row, with a bound of the rounding.

        With Y = N(v − r) of a head and B = base this is W Z Wᵀ,

            Z = Σⱼ sⱼ (M V + Y uᵀ)BBᵀ(M V + Y uᵀ)ᵀ

        in blocks of heads, from sums of products over j of M, Y and q̃: no block is formed.
        """
        m, n = (t[:, rows].movedim(0, 1) for t in (self.values, self.keys))
        away = self._away(rows).movedim(0, 1)
        heads = _Heads(m, n[..., None] * away, self._turned(rows))
        V, K, scaled = self.V, self.K, s
        if metric is not None:
            V, K, scaled = V @ metric.base, K @ metric.base, s * metric.scale
        Z = _squares(heads, V, K, scaled)
        if metric is not None:
            Z = Z - self._less(heads, s * metric.less, metric.along)
        W = self.W.movedim(0, 1).flatten(1)
        found = W @ Z.flatten(3, 4).flatten(1, 2) @ W.mT
        # A mean of differences is as accurate as its largest terms, which are about the spread.
        far = torch.linalg.vector_norm(away, dim=-1)
        far = far + (self.queries[:, rows].movedim(0, 1).abs() * far).sum(-1, keepdim=True)
        return found, self._rounding(heads, n.abs() * far, V, K, scaled)

    def _less(self, heads: _Heads, s: Tensor, along: Tensor) -> Tensor:
        """Σⱼ sⱼ (Tⱼyⱼ)(Tⱼyⱼ)ᵀ before W."""
        share = (heads.q * (along @ self.K.mT)).sum(-1)  # (r, h, n)
        moved = heads.m[..., None] * (along @ self.V.mT) + heads.y * share[..., None]
        moved = (moved * s.sqrt()[:, None, :, None]).transpose(1, 2).flatten(2)
        return (moved.mT @ moved).reshape(len(s), *2 * heads.y.shape[1::2])

    def _rounding(self, heads: _Heads, y: Tensor, V: Tensor, K: Tensor, s: Tensor) -> Tensor:
        """All terms that are added, without their signs, times what rounding may be of them."""

        def lengths(matrices: Tensor) -> Tensor:
            return torch.linalg.vector_norm(matrices, dim=(-2, -1))[:, None]

        q = torch.linalg.vector_norm(heads.q, dim=-1)
        sizes = heads.m.abs() * lengths(V) + y * q * lengths(K)
        total = (s * (lengths(self.W) * sizes).sum(1).square()).sum(-1)
        terms = s.shape[-1] + 2 * sum(self.V.shape) + 2 * sum(self.K.shape) + self.W.shape[1]
        return 8 * terms * torch.finfo(s.dtype).eps * total

    def seen(self, rows: slice) -> Tensor:
        """Which blocks may differ from 0, (rows, n)."""
        both = (self.values[:, rows] != 0) | (self.keys[:, rows] != 0)
        return both.any(0) & self.W.any() & (self.V.any() | self.v.any())

    def size(self) -> Tensor:
        """The largest of M and N."""
        return torch.maximum(self.values.abs().max(), self.keys.abs().max())

    def scaled(self, factor: float) -> AttentionCore:
        """M and N times a number."""
        return replace(self, values=factor * self.values, keys=factor * self.keys)

    # --- inside ---

    def _away(self, rows: slice) -> Tensor:
        """vⱼ − rᵢ, (H, rows, n, v)."""
        if self.most is None:
            return self.v[:, None] - self.means[:, rows, None]
        away = self.v[:, None] - self.v.take_along_dim(self.most[:, rows], 1)[:, :, None]
        return away - self.queries[:, rows, None] @ away

    def _turned(self, rows: slice) -> Tensor:
        """q̃ᵢⱼ, (rows, H, n or 1, k)."""
        return torch.einsum("hra,hnak->rhnk", self.q[:, rows], self.slopes)


def _by_head(vectors: Tensor, matrices: Tensor) -> Tensor:
    """Rows (r, H, k) times the matrix of their head (H, k, d): (r, H, d)."""
    return (vectors.movedim(1, 0) @ matrices).movedim(0, 1)


@dataclass(frozen=True, eq=False)
class _Heads:
    """Rows with all their heads: M (r, h, n), Y (r, h, n, v), q̃ (r, h, n or 1, k)."""

    m: Tensor
    y: Tensor
    q: Tensor


def _squares(heads: _Heads, V: Tensor, K: Tensor, s: Tensor) -> Tensor:
    """Z of each row, (r, h, v, h, v)."""
    H, v = V.shape[:2]
    stacked = torch.cat([V, K], 1).flatten(0, 1)
    products = stacked @ stacked.mT
    products = products.unflatten(0, (H, -1)).unflatten(-1, (H, -1))  # (h, v + k, h, v + k)
    values, mixed = products[:, :v, :, :v], products[:, :v, :, v:]
    weighted = heads.m * s[:, None]
    shares = weighted @ heads.m.mT
    Z = shares[:, :, None, :, None] * values
    if heads.q.shape[2] == 1:
        q = heads.q[:, :, 0]
        y = (weighted @ heads.y.transpose(1, 2).flatten(2)).unflatten(-1, heads.y.shape[1::2])
        turned = torch.einsum("hakc,rkc->rhak", mixed, q)
        cross = turned[..., None] * y[:, :, None]
        u = torch.einsum("rhk,hkd->rhd", q, K)
        root = (heads.y * s.sqrt()[:, None, :, None]).transpose(1, 2).flatten(2)
        square = (root.mT @ root).unflatten(-1, heads.y.shape[1::2])
        square = square.unflatten(1, heads.y.shape[1::2])
        square = square * (u @ u.mT)[:, :, None, :, None]
    else:
        cross = _mixed_by_token(heads, weighted, mixed)
        square = _squares_by_token(heads, K, s)
    return Z + cross + cross.permute(0, 3, 4, 1, 2) + square


def _mixed_by_token(heads: _Heads, weighted: Tensor, mixed: Tensor) -> Tensor:
    """Σⱼ sⱼ M (V K′ᵀq̃′ⱼ) Y′ⱼᵀ where q̃ depends on j, (r, h, v, h, v)."""
    out = []
    for head in range(heads.m.shape[1]):
        # One head on the right at a time: (r, n, k·v).
        pairs = heads.q[:, head, :, :, None] * heads.y[:, head, :, None]
        sums = (weighted @ pairs.flatten(2)).unflatten(-1, pairs.shape[2:])
        out.append(torch.einsum("hac,rhcb->rhab", mixed[:, :, head], sums))
    return torch.stack(out, 3)


def _squares_by_token(heads: _Heads, K: Tensor, s: Tensor) -> Tensor:
    """Σⱼ sⱼ ⟨uⱼ, u′ⱼ⟩ Yⱼ Y′ⱼᵀ where u depends on j, (r, h, v, h, v)."""
    u = torch.einsum("rhnk,hkd->rnhd", heads.q, K)
    products = s[:, None, None] * (u @ u.mT).permute(0, 2, 3, 1)  # (r, h, h, n)
    out = []
    for head in range(heads.m.shape[1]):
        left = products[:, head][..., None] * heads.y[:, head, None]  # (r, h, n, v)
        out.append((left.mT @ heads.y).transpose(1, 2))
    return torch.stack(out, 1)


def attention_blocks(tangent: AttentionTangent, index: int) -> TokenBlocks | None:
    """The blocks of one map of the flattened batch, in the order of the measure.

    None where the kernel does not say how keys move, see `Kernel.feature_slopes`.
    """
    weights = tangent.weights.part(slice(index, index + 1))
    par, slopes = weights.parameters, weights.kernel.feature_slopes(weights.at)
    if slopes is None:
        return None
    one = replace(tangent, weights=weights).whole
    ((_, matrices),) = one.matrices()
    W = torch.eye(par.out_dim, dtype=one.v.dtype, device=one.v.device)[None]
    core = AttentionCore(
        *matrices,
        v=one.v,
        means=one.rows.means,
        most=one.rows.most,
        q=one.q,
        slopes=slopes[0][0],
        V=par.per_head(par.value),
        K=par.per_head(par.key),
        W=W if par.output is None else par.output,
    )
    fields = tangent.field_jacobians()  # kept there, for the splitting component too
    return TokenBlocks(fields.reshape(-1, *fields.shape[-3:])[index], core)
