"""How far the fields of attention to two measures are apart over a ball round a query.

Write a score as ⟨q(x), k⟩ + b with q affine in the query x. With the signed weights
wⱼ = Pⱼ − ρPⱼ', where P and P' are the attention weights of x₀ to μ and to ν over the atoms of
both and ρ = Z_ν/Z_μ the ratio of their sums, a head at x = x₀ + δ has

    Γ_μ − Γ_ν = [Σⱼ wⱼ e^{tⱼ}(vⱼ − m') − (Γ_ν(x) − m') Σⱼ wⱼ e^{tⱼ}] / Σⱼ Pⱼ e^{tⱼ},

tⱼ = ⟨δ, yⱼ − ȳ⟩, yⱼ the gradient of score j, ȳ and m' the P-mean of y and the P'-mean of v. The
denominator is at least 1 (Jensen) and at most 1 + E_P[e^t − 1 − t]. The exponentials are expanded:
first order is kept together over the heads and is exact; of Σ w e^t (v − m') so is the second,
since atoms that were merged cancel in it; every remainder φ(t) ≤ κt²/2, κ = 2φ(r)/r² with r the
largest |t| in the ball, is the top eigenvalue of a weighted second moment of y. If ν = μ all w are
0, and so is the bound. An atom whose weight underflows at x₀ may have all of the attention
elsewhere in the ball: presence, κ and |w| are taken from logarithms. Derived here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from meanfield.attention import SelfAttention
from meanfield.attention.weights import Weights


class Heads(NamedTuple):
    """Queries and gradients of the scores, per head.

    Attributes:
        queries: q(x₀), ``(H, m, k)``.
        turn: the derivative of q, ``(H, m, k, d)``.
        root: B with BBᵀ = turn · turnᵀ, ``(H, m, k, k)``: |turnᵀk| = |Bᵀk|.
        keys: ``(H, N, k)``.
        values: ``(H, N, v)``.
    """

    queries: Tensor
    turn: Tensor
    root: Tensor
    keys: Tensor
    values: Tensor

    @classmethod
    def of(cls, F: SelfAttention, weights: Weights, centres: Tensor, at: Tensor | None) -> Heads:
        """Of queries round these centres ``(m, d)``, at positions ``(m,)`` or None.

        Raises:
            NotImplementedError: queries that are not affine in x.
        """
        m, d = centres.shape
        units = torch.eye(d, dtype=centres.dtype, device=centres.device)
        # q at 0, at the unit vectors, at x₀ and at −2x₀: affine where the last two agree.
        probes = torch.cat([torch.zeros_like(units[:1]), units]).expand(m, -1, -1)
        probes = torch.cat([probes, centres[:, None], -2 * centres[:, None]], 1)
        places = None if at is None else at[:, None].expand(probes.shape[:-1])
        q = torch.stack(
            [
                weights.queries(p, None if places is None else places[k])
                for k, p in enumerate(probes)
            ],
            1,
        )
        turn = (q[:, :, 1 : d + 1] - q[:, :, :1]).mT
        found = (turn @ torch.stack([centres, -2 * centres], -1)).mT + q[:, :, :1]
        room = 1e4 * torch.finfo(q.dtype).eps * float(q.abs().max())
        if not bool(((found - q[:, :, d + 1 :]).abs() <= room).all()):
            raise NotImplementedError(
                f"compression_error: expected queries that are affine in x, got {F.kernel}"
            )
        values, vectors = torch.linalg.eigh(turn @ turn.mT)
        root = vectors * values.clamp_min(0).sqrt()[..., None, :]
        features = weights.features
        return cls(q[:, :, d + 1], turn, root, features.k, features.v)


@dataclass(frozen=True, eq=False)
class Side:
    """One cache as the queries see it, per head and query.

    Attributes:
        log_p: logarithms of the attention weights at the centres, ``(H, m, N)``.
        mean: of the values, ``(H, m, v)``.
        gradients: Bᵀ(kⱼ − k̄): the gradients of the scores about their mean, up to a rotation,
            ``(H, m, N, k)``.
        derivative: of the mean of the values in x, ``(H, m, v, d)``.
    """

    log_p: Tensor
    mean: Tensor
    gradients: Tensor
    derivative: Tensor

    @classmethod
    def of(cls, heads: Heads, log_p: Tensor) -> Side:
        """From the attention weights at the centres."""
        p = log_p.exp()
        mean, key_mean = p @ heads.values, p @ heads.keys
        keys = heads.keys[:, None] - key_mean[:, :, None]
        away = heads.values[:, None] - mean[:, :, None]
        covariance = (p[..., None] * away).mT @ keys
        return cls(log_p, mean, keys @ heads.root, covariance @ heads.turn)

    def curvature(self, log_factors: Tensor, epsilon: float, order: int = 2) -> Tensor:
        """An upper bound of Σⱼ cⱼ|φ(tⱼ)| over the ball, from log cⱼ; ``(H, m)``, ∞ if unknown.

        φ is what e^t is above its Taylor polynomial of degree order − 1. It is at most
        t²/2 · κ of the largest |t|.
        """
        reach = epsilon * torch.linalg.vector_norm(self.gradients, dim=-1)
        kappa = (log_factors + _LOG_EXCESS[order](reach)).exp()
        moment = self.gradients.mT @ (kappa[..., None] * self.gradients)
        return 0.5 * epsilon**2 * _top(moment)

    def quadratic(self, signed: Tensor, vectors: Tensor, epsilon: float) -> Tensor:
        """An upper bound of |Σⱼ wⱼ vⱼ tⱼ²/2| over the ball, w signed; ``(H, m)``.

        That of a linear map of t ⊗ t.
        """
        found = []
        for w, v, g in zip(
            signed.unbind(1), vectors.unbind(1), self.gradients.unbind(1), strict=True
        ):
            squares = (g[..., :, None] * g[..., None, :]).flatten(-2)
            unfolded = (w[..., None] * v).mT @ squares
            found.append(_top(unfolded @ unfolded.mT).sqrt())
        return 0.5 * epsilon**2 * torch.stack(found, 1)


def _top(moments: Tensor) -> Tensor:
    """The largest eigenvalues of positive matrices; ∞ where an entry has left the number range."""
    known = moments.isfinite().all(-1).all(-1)
    safe = torch.where(known[..., None, None], moments, 0.0)
    return torch.where(known, torch.linalg.eigvalsh(safe)[..., -1].clamp_min(0), math.inf)


def _log_second(r: Tensor) -> Tensor:
    """log 2(e^r − 1 − r)/r², from its series where that would cancel."""
    rest = -torch.expm1(-r) - r * (-r).exp()
    return torch.where(r > 1e-3, r + (2 * rest).log() - 2 * r.log(), (1 + r / 3 + r**2 / 11).log())


def _log_third(r: Tensor) -> Tensor:
    """log 2(e^r − 1 − r − r²/2)/r², likewise."""
    rest = -torch.expm1(-r) - r * (-r).exp() * (1 + 0.5 * r)
    series = r / 3 * (1 + r / 4 + r**2 / 19)
    return torch.where(r > 1e-2, r + (2 * rest).log() - 2 * r.log(), series.log())


_LOG_EXCESS = {2: _log_second, 3: _log_third}


def bounded(
    F: SelfAttention,
    heads: Heads,
    one: Side,
    other: Side,
    signs: Tensor,
    log_sizes: Tensor,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The bound, the gap at the query and the norm of the change of the derivative, ``(m,)``.

    Args:
        F: the layer.
        heads: its queries.
        one: μ as they see it.
        other: ν as they see it.
        signs: of w, ``(N,)``.
        log_sizes: log |w|, ``(H, m, N)``.
        epsilon: ε.
    """
    join = F.parameters.join
    # At first order: the heads' outputs and their derivatives, joined.
    gap = torch.linalg.vector_norm(join(one.mean - other.mean), dim=-1)
    turned = one.derivative - other.derivative
    outputs = torch.stack([join(column) for column in turned.unbind(-1)], -1)
    slope = torch.linalg.matrix_norm(outputs, 2)
    if epsilon == 0:
        return gap, gap, slope
    by_order = gap + epsilon * slope + _remainder(F, heads, one, other, signs, log_sizes, epsilon)
    by_hull = _hulls(F, heads, one.log_p, other.log_p)
    value = torch.fmin(by_order, by_hull)
    # The same atoms with the same weights: the fields are one function.
    value = torch.where((log_sizes == -math.inf).all(-1).all(0), 0.0, value)
    return value, gap, slope


def _remainder(
    F: SelfAttention,
    heads: Heads,
    one: Side,
    other: Side,
    signs: Tensor,
    log_sizes: Tensor,
    epsilon: float,
) -> Tensor:
    """What first order leaves out, summed over the heads, ``(m,)``."""
    par = F.parameters
    signed = signs * log_sizes.exp()
    norms = torch.ones(par.n_heads, dtype=signed.dtype, device=signed.device)
    if par.output is not None:
        norms = torch.linalg.matrix_norm(par.output.detach(), 2)
    apart = heads.values[:, None] - other.mean[:, :, None]  # vⱼ − m', (H, m, N, v)
    away = torch.linalg.vector_norm(apart, dim=-1)
    farther = log_sizes + away.log()
    # Of Σ w e^t (v − m'), its second order exactly or not, and of Σ w e^t.
    exact = one.quadratic(signed, apart, epsilon) + one.curvature(farther, epsilon, order=3)
    bent = torch.minimum(exact, one.curvature(farther, epsilon))
    bent_total = one.curvature(log_sizes, epsilon)
    moved = _moved(other, away, epsilon)
    tilted = torch.linalg.vector_norm((signed[..., None] * one.gradients).sum(-2), dim=-1)
    # (Γ_ν(x) − m') Σ w e^t, less its first order Σ w · DΓ_ν δ.
    curved = signed.sum(-1).abs() * moved.beyond + moved.most * (epsilon * tilted + bent_total)
    if par.n_heads == 1:
        return norms[0] * (bent + curved)[0]
    # Denominators are from 1 to 1 + spread: first orders of heads that cancel shrink by that.
    spread = one.curvature(one.log_p, epsilon)
    head_slope = torch.linalg.matrix_norm(one.derivative - other.derivative, 2)
    first = torch.linalg.vector_norm(one.mean - other.mean, dim=-1) + epsilon * head_slope
    shrunk = _share(spread) * first
    return (norms[:, None] * (bent + curved + shrunk)).sum(0)


def _share(spread: Tensor) -> Tensor:
    """spread/(1 + spread), 1 at ∞."""
    return 1 - 1 / (1 + spread)


class _Moved(NamedTuple):
    """How far Γ_ν(x) is from Γ_ν(x₀), and from there and its derivative, at most; ``(H, m)``."""

    most: Tensor
    beyond: Tensor


def _moved(side: Side, away: Tensor, epsilon: float) -> _Moved:
    slope = epsilon * torch.linalg.matrix_norm(side.derivative, 2)
    bent = side.curvature(side.log_p + away.log(), epsilon)
    spread = side.curvature(side.log_p, epsilon)
    beyond = bent + _share(spread) * slope
    farthest = torch.where(side.log_p > -math.inf, away, 0.0).amax(-1)
    return _Moved(torch.minimum(slope + bent, farthest), torch.minimum(beyond, farthest + slope))


def _hulls(F: SelfAttention, heads: Heads, log_p: Tensor, other: Tensor) -> Tensor:
    """Σ_h max |W_h(vⱼ − v_l)| over the atoms that either cache shows, ``(m,)``."""
    par, values = F.parameters, heads.values
    if par.output is not None:
        values = values @ par.output.detach().mT
    apart = torch.cdist(values, values, compute_mode="donot_use_mm_for_euclid_dist")  # (H, N, N)
    most = []
    one_seen, other_seen = log_p > -math.inf, other > -math.inf
    for query in range(log_p.shape[1]):
        pairs = one_seen[:, query, :, None] & other_seen[:, query, None, :]
        most.append(torch.where(pairs, apart, 0.0).amax((-2, -1)).sum())
    return torch.stack(most)
