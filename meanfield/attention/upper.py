"""An upper bound of the local constant of attention, from the attention weights."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from meanfield.attention.input_bounds import averaging_norm, field_norm, yudin_bound
from meanfield.attention.weights import Block, Weights

__all__ = ["upper_bound"]

# Up to this many entries of the small matrices of all atoms together, their norms are computed;
# beyond it, traces stand in for the norms.
_MOMENT_ENTRIES = 2**25
# Up to this many multiplications, n · d_out · d · min(d, d_out), the norms of the field's
# Jacobians are computed.
_JACOBIAN_WORK = 2**26
_CHUNK_ENTRIES = 2**22
_SMALL, _POWER_STEPS, _SLACK = 96, 30, 0.01
_ROUNDS = 4  # of power iteration from above; each multiplies once by P and once by Pᵀ


def upper_bound(weights: Weights) -> Tensor:
    r"""A number that neither ‖D^½JD^−½‖ nor maxᵢ ‖D_xΓ_μ(xᵢ)‖ exceeds, shape ``(*batch,)``.

    Not in the papers. The tangent is a sum over heads of three parts, W_h G_h U_h, where U_h is
    the projection to values, keys or queries, W_h the output projection, and G_h acts on the
    displacements inside the head (weighted: ηᵢ = √aᵢ εᵢ). With cᵢⱼ = aᵢPᵢⱼ/aⱼ, Σᵢ the covariance
    of the values seen from i and Sᵢ their covariance with the keys,

        values   ‖G‖² = ρ(PᵀP) ≤ maxⱼ (PᵀP x)ⱼ / xⱼ for any x > 0 (Collatz–Wielandt), from x = 1
        keys     ‖G‖² ≤ maxⱼ ‖Σᵢ cᵢⱼ ‖Σᵢ‖ qᵢqᵢᵀ‖, by Cauchy–Schwarz in j
        queries  ‖G‖ = maxᵢ ‖Sᵢ‖; without heads, maxᵢ ‖D_xΓ_μ(xᵢ)‖ itself where it is affordable

    and numbers g_h ≥ ‖G_h‖ give ‖Σ_h W_h G_h U_h‖ ≤ ‖[√g_h W_h]_h‖ ‖[√g_h U_h]_h‖, or
    Σ_h g_h ‖W_h‖ ‖U_h‖ if that is less (for the values Σ_h g_h ‖W_h U_h‖). Where it is
    affordable, the values and keys are also bounded together (`input_bounds.averaging_norm`), and
    all three by the bound of Yudin et al. (`input_bounds.yudin_bound`); the answer is the
    smallest. Rounding (about n · eps, relative) is not accounted for.

    Args:
        weights: of dot-product attention under the softmax.
    """
    par, queries, output = weights.parameters, weights.features.q, weights.parameters.output
    value, key = par.per_head(par.value), par.per_head(par.key)
    # Of a QR factorisation of each projection, R multiplies the features inside the heads.
    left, values = (
        (None, weights.features.v) if output is None else _absorb(output, weights.features.v)
    )
    to_queries, keys = _absorb((par.scale[:, None, None] * par.query).mT, weights.features.k)
    to_keys, turned = _absorb(key.mT, queries)
    log_spreads, query_norms, jacobians = _moments(weights, values, keys, left, to_queries)
    value_part = _join(_value_norms(weights), output, value, commuting=True)
    key_part = _join(_key_norms(weights, log_spreads, turned), left, to_keys.mT)
    query_part = torch.minimum(_join(query_norms, left, to_queries.mT), jacobians)
    averaging = value_part + key_part
    if values.numel() * max(values.shape[-1], keys.shape[-1]) > _MOMENT_ENTRIES:
        return averaging + query_part
    averaging = torch.minimum(averaging, averaging_norm(weights))
    query_part = torch.minimum(query_part, field_norm(weights))
    return torch.minimum(averaging + query_part, yudin_bound(weights))


def _absorb(matrix: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Q and R x of matrix x = Q R x, for each head and vector x ``(*batch, H, n, ·)``."""
    q, r = torch.linalg.qr(matrix)
    return q, vectors @ r.mT


def _columns(weights: Weights) -> Iterator[tuple[Block, Tensor, Tensor]]:
    """log Pᵢⱼ and log cᵢⱼ, a block of rows at a time."""
    for block in weights.blocks():
        log_p = weights.log_p(block)
        yield block, log_p, log_p + weights.log_ratios(block)


def _core(left: Tensor | None, right: Tensor) -> Tensor:
    """A small matrix per head with the singular values of left @ right."""
    right = torch.linalg.qr(right.mT)[1].mT
    return right if left is None else torch.linalg.qr(left)[1] @ right


def _join(norms: Tensor, left: Tensor | None, right: Tensor, commuting: bool = False) -> Tensor:
    """An upper bound of ‖Σ_h left_h G_h right_h‖, for ‖G_h‖ ≤ norms ``(*batch, H)``.

    `commuting`: G_h acts on atoms only, so that it commutes with right_h, and left_h right_h is
    one matrix. Where a norm has overflowed, the bound is ∞.
    """
    known = norms.isfinite()
    norms = torch.where(known, norms, 0.0)
    each = _norms(_core(left, right)) if commuting else _norms(_core(None, right))
    together = _top(torch.einsum("...h,hij,hik->...jk", norms, right, right))
    if left is None:  # the heads are added as they are
        together = together * norms.sum(-1).sqrt()
    else:
        together = together * _top(torch.einsum("...h,hij,hkj->...ik", norms, left, left))
        each = each if commuting else each * _norms(_core(None, left.mT))
    joined = torch.minimum((norms * each).sum(-1), together)
    return torch.where(known.all(-1), joined, math.inf)


def _norms(matrices: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(matrices, 2)


def _top(gram: Tensor) -> Tensor:
    """√λ_max of positive semi-definite matrices; for large ones, up to 1 % more.

    tI − G has a Cholesky factor exactly when t > λ_max; to try takes a tenth of the time of an
    eigenvalue. Power iteration says which t to try.
    """
    size = gram.shape[-1]
    if size <= _SMALL:
        return torch.linalg.eigvalsh(gram)[..., -1].clamp_min(0).sqrt()
    v = gram.square().sum(-1, keepdim=True).sqrt()
    top = torch.zeros_like(v[..., 0, 0])
    for _ in range(_POWER_STEPS):
        image = gram @ v
        top = torch.linalg.vector_norm(image, dim=(-2, -1)) / torch.linalg.vector_norm(
            v, dim=(-2, -1)
        ).clamp_min(torch.finfo(v.dtype).tiny)
        v = image / image.abs().amax((-2, -1), keepdim=True).clamp_min(torch.finfo(v.dtype).tiny)
    bound, eye = top * (1 + _SLACK), torch.eye(size, dtype=gram.dtype, device=gram.device)
    while True:
        trial = torch.where(bound > 0, bound, 1.0)[..., None, None]
        info = torch.linalg.cholesky_ex(trial * eye - gram)[1]
        if not bool((info > 0).any()):
            return bound.sqrt()
        bound = torch.where(info > 0, bound * (1 + _SLACK), bound)


def _value_norms(weights: Weights) -> Tensor:
    """Upper bounds of ‖√(aᵢ/aⱼ) Pᵢⱼ‖ of each head, ``(*batch, H)``, by way of logarithms.

    maxⱼ (PᵀP x)ⱼ/xⱼ does not grow from one round of power iteration to the next.
    """
    queries = weights.features.q
    log_x = queries.new_zeros(queries.shape[:-1])
    for _ in range(_ROUNDS):
        log_z = torch.full_like(log_x, -math.inf)
        for block, log_p, log_c in _columns(weights):
            log_y = (log_p + log_x[..., None, block.columns]).logsumexp(-1)
            back = (log_c + log_y[..., :, None]).logsumexp(-2)
            log_z[..., block.columns] = torch.logaddexp(log_z[..., block.columns], back)
        alive = log_z > -math.inf
        growth = torch.where(alive, log_z - log_x, -math.inf).amax(-1)
        log_x = torch.where(alive, log_z - log_z.amax(-1, keepdim=True), 0.0)
    return (0.5 * growth).exp()


def _key_norms(weights: Weights, log_s: Tensor, queries: Tensor) -> Tensor:
    """√maxⱼ ‖Σᵢ cᵢⱼ sᵢ qᵢqᵢᵀ‖ of each head; the trace for ‖·‖ where matrices are too many."""
    dim = queries.shape[-1]
    top = torch.full_like(log_s, -math.inf)
    squares = queries.square().sum(-1).log()
    matrices = queries.shape[:-1].numel() * dim**2 <= _MOMENT_ENTRIES
    for block, _, log_c in _columns(weights):
        logs = log_c + log_s[..., block.rows, None]
        logs = logs if matrices else logs + squares[..., block.rows, None]
        top[..., block.columns] = torch.logaddexp(top[..., block.columns], logs.logsumexp(-2))
    if not matrices:
        return (0.5 * top.amax(-1)).exp()
    # Relative to the largest: the ratios of light atoms would overflow.
    peak = torch.where(top > -math.inf, top, 0.0)
    outer = (queries[..., :, None] * queries[..., None, :]).flatten(-2)
    moments = torch.zeros_like(outer)
    for block, _, log_c in _columns(weights):
        logs = log_c + log_s[..., block.rows, None] - peak[..., None, block.columns]
        moments[..., block.columns, :] += logs.exp().mT @ outer[..., block.rows, :]
    norms = torch.linalg.eigvalsh(moments.unflatten(-1, (dim, dim)))[..., -1].clamp_min(0)
    return (0.5 * (norms.log() + peak).amax(-1)).exp()


def _moments(
    weights: Weights, values: Tensor, keys: Tensor, left: Tensor | None, right: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Bounds of log ‖Σᵢ‖ (*batch, H, n), maxᵢ ‖Sᵢ‖ (*batch, H) and maxᵢ ‖D_xΓ_μ(xᵢ)‖ (*batch).

    The last, maxᵢ ‖Σ_h left_h Sᵢ right_hᵀ‖, is infinite where it is not affordable.
    """
    entries = values.numel() * max(values.shape[-1], keys.shape[-1])
    matrices = entries <= _MOMENT_ENTRIES
    d, out = right.shape[-2], values.shape[-1] if left is None else left.shape[-2]
    exact = matrices and values[..., 0, :, 0].numel() * d * out * min(d, out) <= _JACOBIAN_WORK
    log_spreads = values.new_full(values.shape[:-1], -math.inf)
    norms = values.new_zeros(values.shape[:-2])
    jacobians = values.new_full(values.shape[:-3], 0.0 if exact else math.inf)
    reach = keys.square().sum(-1).amax(-1).sqrt()
    for block in weights.blocks():
        log_p = weights.log_p(block)
        v, k = values[..., block.columns, :], keys[..., block.columns, :]
        step = max(1, _CHUNK_ENTRIES // max(1, v.numel()))
        for start in range(0, log_p.shape[-2], step):
            log_rows = log_p[..., start : start + step, :]
            p, first = log_rows.exp(), block.rows.start + start
            i = slice(first, first + p.shape[-2])
            dv = v[..., None, :, :] - (p @ v)[..., None, :]
            squares = dv.square().sum(-1)
            lost = _log_lost(log_rows, squares)
            if not matrices:
                log_spreads[..., i] = torch.logaddexp((p * squares).sum(-1).log(), lost)
                continue
            weighted = (p[..., None] * dv).mT
            tops = torch.linalg.eigvalsh(weighted @ dv)[..., -1].clamp_min(0)
            log_spreads[..., i] = torch.logaddexp(tops.log(), lost)
            crossed = weighted @ k[..., None, :, :]
            norms = torch.maximum(norms, _norms(crossed).amax(-1))
            if exact:
                moved = crossed @ right.mT[:, None]
                moved = moved if left is None else left[:, None] @ moved
                jacobians = torch.maximum(jacobians, _norms(moved.sum(-4)).amax(-1))
    return (
        log_spreads,
        norms if matrices else (0.5 * log_spreads.amax(-1)).exp() * reach,
        jacobians,
    )


def _log_lost(log_p: Tensor, squares: Tensor) -> Tensor:
    """log Σ p · squares over the terms that underflow, which the sum itself misses.

    They count: the spread is multiplied by aᵢ/aⱼ, which is large for a light atom j.
    """
    logs = log_p + squares.log()
    least = math.log(torch.finfo(log_p.dtype).tiny)
    below = torch.minimum(log_p, logs) < least
    return torch.where(below, logs, -math.inf).logsumexp(-1)
