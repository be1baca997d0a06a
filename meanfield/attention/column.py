"""Bounds of the local constant at an input from the columns of its attention weights.

Pure functions of plain tensors: what each head attends to, and the matrices behind it. With
uᵢ = Kᵀqᵢ, Covᵢ the covariance of the values seen from i, and T, S the parts of the derivative that
average and that turn (see `meanfield.bounds`), row i of a head is at most
λ_max(VVᵀ + |uᵢ|² V Covᵢ Vᵀ)^½ (Σⱼ Pᵢⱼ|fⱼ|²)^½, by Cauchy–Schwarz under Pᵢ, whose mean annihilates
the cross term. None of it is in the papers, except for the bound that has their name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from meanfield.attention.rows import softmax
from meanfield.attention.sight import Block, Sight

__all__ = ["Attended", "averaging_norm", "field_norm", "yudin_bound"]

_CHUNK_ENTRIES = 2**22  # of one array (*batch, H, rows, n, k) at a time


@dataclass(frozen=True, eq=False)
class Attended:
    """What the heads of a layer see at an input.

    Attributes:
        log_weights: log aᵢ, ``(*batch, n)``; −∞ for absent atoms.
        queries: scale · (Q xᵢ + b_Q), ``(*batch, H, n, k)``.
        keys: K xⱼ, up to a shift, ``(*batch, H, n, k)``.
        values: V xⱼ before the output matrix, up to a shift, ``(*batch, H, n, v)``.
        query: scale · Q, (H, k, d).
        key: K, (H, k, d).
        value: V, (H, v, d).
        output: W, (H, d_out, v), or None for the identity.
        transitions: rows -> log Pᵢⱼ, ``(*batch, H, rows, n)``; −∞ where j is not seen.
    """

    log_weights: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor | None
    transitions: Callable[[slice], Tensor]

    @classmethod
    def of(cls, sight: Sight) -> Attended:
        """What atoms see through dot products under the softmax."""
        par, features = sight.parameters, sight.features

        def transitions(rows: slice) -> Tensor:
            logs = sight.column_logs(Block(rows, slice(0, sight.n)))
            blind = (logs == -math.inf).all(-1, keepdim=True)
            scores = features.q[..., rows, :] @ features.k.mT
            return softmax.log_p(scores + logs, blind)

        return cls(
            log_weights=sight.log_weights,
            queries=features.q,
            keys=features.k,
            values=features.v,
            query=par.scale[:, None, None] * par.query,
            key=par.per_head(par.key),
            value=par.per_head(par.value),
            output=par.output,
            transitions=transitions,
        )

    def rows(self) -> Iterator[tuple[slice, Tensor]]:
        """Blocks of rows, in order; absent atoms see nobody."""
        n = self.queries.shape[-2]
        width = max(self.queries.shape[-1], self.values.shape[-1])
        step = max(1, _CHUNK_ENTRIES // max(1, self.queries.shape[:-1].numel() * width))
        alive = self.log_weights > -math.inf
        for start in range(0, n, step):
            block = slice(start, min(start + step, n))
            log_p = self.transitions(block)
            seen = alive[..., None, block, None] & alive[..., None, None, :]
            yield block, torch.where(seen, log_p, -math.inf)

    def log_ratios(self, block: slice) -> Tensor:
        """log(aᵢ/aⱼ), ``(*batch, 1, rows, n)``; 0 at absent atoms."""
        alive = self.log_weights > -math.inf
        logs = torch.where(alive, self.log_weights, 0.0)
        return (logs[..., block, None] - logs[..., None, :])[..., None, :, :]


@dataclass(frozen=True, eq=False)
class Frames:
    """The same in coordinates of the heads, in which all lengths are those of the whole space.

    Attributes:
        values: R_W v for W = Q_W R_W, ``(*batch, H, n, v)``.
        pulled: Q̃ᵀk, whose means are the field's, in a frame of its own, ``(*batch, H, n, k)``.
        turned: u = Kᵀq in a frame of its own, ``(*batch, H, n, k)``.
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
    def of(cls, seen: Attended) -> Frames:
        """Triangular factors of the projections, pulled into the heads."""
        to_keys, to_queries = (torch.linalg.qr(m.mT)[1] for m in (seen.key, seen.query))
        value, values = seen.value, seen.values
        if seen.output is not None:
            out = torch.linalg.qr(seen.output)[1]
            value, values = out @ value, values @ out.mT
        return cls(
            values=values,
            pulled=seen.keys @ to_queries.mT,
            turned=seen.queries @ to_keys.mT,
            image=seen.queries @ (value @ seen.key.mT).mT,
            value=value,
            norm_V=norm(torch.linalg.qr(value.mT)[1]),
            norm_A=norm(to_keys @ to_queries.mT),
        )


def averaging_norm(seen: Attended) -> Tensor:
    """Σ_h [maxⱼ Σᵢ (aᵢ/aⱼ) Pᵢⱼ λ_max(VVᵀ + |uᵢ|² V Covᵢ Vᵀ)]^½ ≥ ‖T‖, or less, ``(*batch,)``.

    Heads are joined as Σ_h W_h T_h by min(Σ_h g_h ‖·‖, ‖Σ_h g_h W_hW_hᵀ‖^½ (Σ_h g_h)^½). The local
    constant is at most this plus `field_norm`. Rounding, some n · eps, is not accounted for.

    Args:
        seen: what the heads see.
    """
    frames = Frames.of(seen)
    summed = _column_norms(seen, frames.values, frames.value, frames.turned).sum(-1)
    if seen.output is None or seen.output.shape[0] == 1:
        return summed
    heads = _column_norms(seen, seen.values, seen.value, frames.turned)
    known = heads.isfinite().all(-1)
    heads = torch.where(known[..., None], heads, 0.0)
    gram = torch.einsum("...h,hij,hkj->...ik", heads, seen.output, seen.output)
    top = torch.linalg.eigvalsh(gram)[..., -1].clamp_min(0)
    together = torch.where(known, (top * heads.sum(-1)).sqrt(), math.inf)
    return torch.minimum(summed, together)


def field_norm(seen: Attended) -> Tensor:
    """maxᵢ Σ_h ‖W V Covᵢ A‖ ≥ ‖S‖, the field's derivative at the atoms, ``(*batch,)``.

    Args:
        seen: what the heads see.
    """
    frames = Frames.of(seen)
    parts = [
        norm(covariance(log_p.exp(), frames.values, frames.pulled)).sum(-2)
        for _, log_p in seen.rows()
    ]
    return torch.cat(parts, -1).amax(-1)


def yudin_bound(seen: Attended, points: Tensor) -> Tensor:
    """Σ_h ‖W_hV_h‖ (‖P‖ + ‖X‖ (‖U‖ + ‖X‖‖A‖) maxᵢ g₁(Pᵢ)), g₁(p) = p₍₁₎(1 − p₍₁₎ + p₍₂₎).

    ``(*batch,)``. It bounds the local constant at uniform weights (both components), masked or
    not, and is infinite at others. The theorem has 2‖X‖²‖A‖ for ‖X‖(‖U‖ + ‖X‖‖A‖). The rows of U
    are uᵢ = Axᵢ, so that ‖U‖ ≤ ‖X‖‖A‖. With a query bias they are uᵢ = Axᵢ + b, and there the
    theorem as it stands fails.

    Args:
        seen: what the heads see.
        points: X, ``(*batch, n, d)``.

    Source: Yudin, Gaponov, Kudriashov, Rakhuba, *Pay attention to attention distribution*,
    arXiv 2507.07814, Theorem 3 (as restated in other work; re-derived).
    """
    frames = Frames.of(seen)
    log_p = torch.cat([part for _, part in seen.rows()], -2)
    P = log_p.exp()
    most = P.topk(min(2, P.shape[-1]), -1).values
    first = most[..., 0]
    second = most[..., 1] if most.shape[-1] > 1 else torch.zeros_like(first)
    spread = (first * (1 - first + second)).amax(-1)
    length = norm(points)[..., None]
    turning = length * (norm(frames.turned) + length * frames.norm_A)
    heads = frames.norm_V * (norm(P) + turning * spread)
    logs = seen.log_weights
    uniform = (logs - logs.amax(-1, keepdim=True)).abs().amax(-1) < 1e-12
    return torch.where(uniform, heads.sum(-1), math.inf)


def _column_norms(seen: Attended, values: Tensor, value: Tensor, turned: Tensor) -> Tensor:
    """[maxⱼ Σᵢ (aᵢ/aⱼ) Pᵢⱼ τᵢ]^½ of each head ``(*batch, H)``, in logarithms for light atoms."""
    columns = torch.full_like(values[..., 0], -math.inf)
    square, lengths = value @ value.mT, turned.square().sum(-1)
    for block, log_p in seen.rows():
        spread = covariance(log_p.exp(), values, values)
        moments = square[:, None] + lengths[..., block, None, None] * spread
        log_tau = torch.linalg.eigvalsh(moments)[..., -1].clamp_min(0).log()
        logs = log_p + seen.log_ratios(block) + log_tau[..., None]
        columns = torch.logaddexp(columns, logs.logsumexp(-2))
    return (0.5 * columns.amax(-1)).exp()


def covariance(weights: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Σⱼ Pᵢⱼ (xⱼ − x̄)(yⱼ − ȳ)ᵀ of each row, ``(*batch, H, rows, x, y)``; absent rows give 0."""

    def centred(x: Tensor) -> Tensor:
        return x[..., None, :, :] - (weights @ x)[..., :, None, :]

    return (weights[..., None] * centred(one)).mT @ centred(other)


def norm(matrices: Tensor) -> Tensor:
    """Spectral norms over the last two axes."""
    return torch.linalg.matrix_norm(matrices, 2)
