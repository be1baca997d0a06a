"""Bounds of the local constant at an input from the columns of its attention weights.

With
uᵢ = Kᵀqᵢ, Covᵢ the covariance of the values seen from i, and T, S the parts of the derivative that
average and that turn (see `meanfield.bounds`), row i of a head is at most
λ_max(VVᵀ + |uᵢ|² V Covᵢ Vᵀ)^½ (Σⱼ Pᵢⱼ|fⱼ|²)^½, by Cauchy–Schwarz under Pᵢ, whose mean annihilates
the cross term. Not in the papers, except for `yudin_bound`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from meanfield.attention.weights import Block, Weights

__all__ = ["Frames", "averaging_norm", "field_norm", "row_blocks", "yudin_bound"]

_CHUNK_ENTRIES = 2**22  # of one array (*batch, H, rows, n, k) at a time


def row_blocks(weights: Weights) -> Iterator[Block]:
    """Blocks of rows with all columns, small enough for a vector per entry."""
    features, n = weights.features, weights.n
    width = max(features.k.shape[-1], features.v.shape[-1])
    step = max(1, _CHUNK_ENTRIES // max(1, features.k.shape[:-1].numel() * width))
    for start in range(0, n, step):
        yield Block(slice(start, min(start + step, n)), slice(0, n))


@dataclass(frozen=True, eq=False)
class Frames:
    """Features of the atoms in orthonormal coordinates per head: lengths are those in R^d.

    Attributes:
        values: R_W v for W = Q_W R_W, ``(*batch, H, n, v)``.
        pulled: Q̃ᵀk, whose covariance with the values is the derivative of the field,
            ``(*batch, H, n, k)``.
        turned: u = Kᵀq, ``(*batch, H, n, k)``.
        image: R_W V u, ``(*batch, H, n, v)``.
        value: R_W V, (H, v, d).
        norm_V: ‖W V‖, (H,).
        norm_A: ‖KᵀQ̃‖, (H,).
    """

    values: Tensor
    pulled: Tensor
    turned: Tensor
    image: Tensor
    value: Tensor
    norm_V: Tensor
    norm_A: Tensor

    @classmethod
    def of(cls, weights: Weights) -> Frames:
        """From the R of QR factorisations of the projections: the orthonormal factor drops out."""
        par, (q, k, values) = weights.parameters, weights.features[:3]
        query, key = par.scale[:, None, None] * par.query, par.per_head(par.key)
        to_keys, to_queries = (torch.linalg.qr(m.mT)[1] for m in (key, query))
        value = par.per_head(par.value)
        if par.output is not None:
            out = torch.linalg.qr(par.output)[1]
            value, values = out @ value, values @ out.mT
        return cls(
            values=values,
            pulled=k @ to_queries.mT,
            turned=q @ to_keys.mT,
            image=q @ (value @ key.mT).mT,
            value=value,
            norm_V=norm(torch.linalg.qr(value.mT)[1]),
            norm_A=norm(to_keys @ to_queries.mT),
        )


def averaging_norm(weights: Weights) -> Tensor:
    """An upper bound of ‖T‖, ``(*batch,)``.

    A head of value V has ‖T‖ ≤ g(V) = [maxⱼ Σᵢ (aᵢ/aⱼ) Pᵢⱼ λ_max(VVᵀ + |uᵢ|² V Covᵢ Vᵀ)]^½. Heads
    are joined by min(Σ_h g(W_hV_h), ‖Σ_h g_h W_hW_hᵀ‖^½ (Σ_h g_h)^½), g_h = g(V_h). The local
    constant is at most this plus `field_norm`. Rounding (about n · eps, relative) is not
    accounted for.

    Args:
        weights: of dot-product attention under the softmax.
    """
    frames = Frames.of(weights)
    summed = _column_norms(weights, frames.values, frames.value, frames.turned).sum(-1)
    par = weights.parameters
    if par.output is None or par.n_heads == 1:
        return summed
    value = par.per_head(par.value)
    heads = _column_norms(weights, weights.features.v, value, frames.turned)
    known = heads.isfinite().all(-1)
    heads = torch.where(known[..., None], heads, 0.0)
    gram = torch.einsum("...h,hij,hkj->...ik", heads, par.output, par.output)
    top = torch.linalg.eigvalsh(gram)[..., -1].clamp_min(0)
    together = torch.where(known, (top * heads.sum(-1)).sqrt(), math.inf)
    return torch.minimum(summed, together)


def field_norm(weights: Weights) -> Tensor:
    """maxᵢ Σ_h ‖W V Covᵢ A‖ ≥ ‖S‖, S the field's derivative at the atoms, ``(*batch,)``.

    Args:
        weights: of dot-product attention under the softmax.
    """
    frames = Frames.of(weights)
    parts = [
        norm(covariance(weights.log_p(block).exp(), frames.values, frames.pulled)).sum(-2)
        for block in row_blocks(weights)
    ]
    return torch.cat(parts, -1).amax(-1)


def yudin_bound(weights: Weights) -> Tensor:
    """Σ_h ‖W_hV_h‖ (‖P‖ + ‖X‖ (‖U‖ + ‖X‖‖A‖) maxᵢ g₁(Pᵢ)), g₁(p) = p₍₁₎(1 − p₍₁₎ + p₍₂₎).

    ``(*batch,)``. For uniform weights it bounds the local constant (both components), masked or
    not; for other weights it is infinite. The theorem has 2‖X‖²‖A‖ in place of
    ‖X‖(‖U‖ + ‖X‖‖A‖). Without a query bias the rows of U are uᵢ = Axᵢ, so that ‖U‖ ≤ ‖X‖‖A‖. With
    one they are uᵢ = Axᵢ + b, and the theorem as it stands fails.

    Args:
        weights: of dot-product attention under the softmax.

    Source: Yudin, Gaponov, Kudriashov, Rakhuba, *Pay attention to attention distribution*,
    arXiv 2507.07814, Theorem 3 (as restated in other work; re-derived).
    """
    frames = Frames.of(weights)
    P = torch.cat([weights.log_p(block).exp() for block in row_blocks(weights)], -2)
    most = P.topk(min(2, P.shape[-1]), -1).values
    first = most[..., 0]
    second = most[..., 1] if most.shape[-1] > 1 else torch.zeros_like(first)
    spread = (first * (1 - first + second)).amax(-1)
    length = norm(weights.points)[..., None]
    turning = length * (norm(frames.turned) + length * frames.norm_A)
    heads = frames.norm_V * (norm(P) + turning * spread)
    logs = weights.log_weights
    uniform = (logs - logs.amax(-1, keepdim=True)).abs().amax(-1) < 1e-12
    return torch.where(uniform, heads.sum(-1), math.inf)


def _column_norms(weights: Weights, values: Tensor, value: Tensor, turned: Tensor) -> Tensor:
    """[maxⱼ Σᵢ (aᵢ/aⱼ) Pᵢⱼ τᵢ]^½ of each head ``(*batch, H)``, in logarithms for light atoms."""
    columns = torch.full_like(values[..., 0], -math.inf)
    square, lengths = value @ value.mT, turned.square().sum(-1)
    for block in row_blocks(weights):
        log_p = weights.log_p(block)
        spread = covariance(log_p.exp(), values, values)
        moments = square[:, None] + lengths[..., block.rows, None, None] * spread
        log_tau = torch.linalg.eigvalsh(moments)[..., -1].clamp_min(0).log()
        logs = log_p + weights.log_ratios(block) + log_tau[..., None]
        columns = torch.logaddexp(columns, logs.logsumexp(-2))
    return (0.5 * columns.amax(-1)).exp()


def covariance(p: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Σⱼ Pᵢⱼ (xⱼ − x̄)(yⱼ − ȳ)ᵀ of each row, ``(*batch, H, rows, x, y)``; absent rows give 0."""

    def centred(x: Tensor) -> Tensor:
        return x[..., None, :, :] - (p @ x)[..., :, None, :]

    return (p[..., None] * centred(one)).mT @ centred(other)


def norm(matrices: Tensor) -> Tensor:
    """Spectral norms over the last two axes."""
    return torch.linalg.matrix_norm(matrices, 2)
