"""How far the outputs of a head over two caches are apart over a ball round a query.

With tⱼ = scale ⟨δ, kⱼ − k̄⟩ at the query q + δ, k̄ and m the means of keys and values under the
attention P at q, and m' the mean of the values under the attention P' to the other cache, both
over the tokens of both caches; with ρ = Z'/Z the ratio of their sums and the signed weights
wⱼ = Pⱼ − ρPⱼ',

    o − o' = [Σⱼ wⱼ e^{tⱼ}(vⱼ − m') − (o'(q + δ) − m') Σⱼ wⱼ e^{tⱼ}] / Σⱼ Pⱼ e^{tⱼ}.

The denominator is at least 1 (Jensen). The exponentials are expanded: first order is exact, and
where it is not too dear so is the second of Σ w e^t (v − m'), since tokens that were merged or
rounded cancel in it; every remainder φ(t) ≤ κt²/2, κ = 2φ(r)/r² with r the largest |t| in the
ball, is the top eigenvalue of a weighted second moment of k. If the caches are equal all w are 0,
and so is the bound. A token whose weight underflows at q may have all of the attention elsewhere
in the ball: presence, κ and |w| are taken from logarithms.

Where the other cache alone is known, and that |kⱼ − k̂ⱼ| ≤ δⱼ and |vⱼ − v̂ⱼ| ≤ ηⱼ, scores differ by
uⱼ with |uⱼ| ≤ τⱼ = scale (|q| + ε) δⱼ, and

    o − ô = Σⱼ P̂ⱼ [(e^{uⱼ} − 1)(v̂ⱼ − ô) + e^{uⱼ}(vⱼ − v̂ⱼ)] / Σⱼ P̂ⱼ e^{uⱼ},

with P̂ the attention of the query in the ball, at most e^{rⱼ} times that at q. Derived here.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from meanfield.linalg.vectors import lengths, power_of_two

# Operations up to which second order is exact, for each query.
_EXACT = 2**27
# Tokens up to which all pairs of values are compared; of more, their distances from a mean.
_PAIRS = 1024
# The least r of which r³ is a number; what is asked of it grows with r.
_LEAST = 1e-100


class Side(NamedTuple):
    """What queries see of a cache.

    Attributes:
        log_p: logarithms of the attention at the queries, ``(m, N)``.
        mean: of the values, m, ``(m, v)``.
        away: |vⱼ − m|, ``(m, N)``.
        gradients: kⱼ − k̄, times the scale, ``(m, N, k)``.
        derivative: of the mean of the values in q, ``(m, v, k)``.
    """

    log_p: Tensor
    mean: Tensor
    away: Tensor
    gradients: Tensor
    derivative: Tensor

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, log_p: Tensor) -> Side:
        """From tokens in units in which they are about 1, and the attention at the queries.

        Args:
            keys: times the scale, ``(N, k)``.
            values: ``(N, v)``.
            log_p: logarithms of the attention, ``(m, N)``.
        """
        p = log_p.exp()
        mean, key_mean = p @ values, p @ keys
        gradients = keys - key_mean[:, None]
        apart = values - mean[:, None]
        derivative = (p[..., None] * apart).mT @ gradients
        return cls(log_p, mean, lengths(apart), gradients, derivative)

    def largest(self, sizes: Tensor) -> Tensor:
        """The largest of these among the tokens that are there, ``(m,)``."""
        return torch.where(self.log_p > -math.inf, sizes, 0.0).amax(-1)

    def reach(self, epsilon: float) -> Tensor:
        """The largest |tⱼ| in the ball, ``(m, N)``."""
        return epsilon * lengths(self.gradients)

    def curvature(self, log_factors: Tensor, epsilon: float, order: int = 2) -> Tensor:
        """An upper bound of Σⱼ cⱼ|φ(tⱼ)| over the ball, from log cⱼ; ``(m,)``, ∞ if unknown.

        φ is what e^t is above its Taylor polynomial of degree order − 1. It is at most
        t²/2 · κ of the largest |t|.
        """
        kappa = (log_factors + _log_excess(self.reach(epsilon), order)).exp()
        return (
            0.5 * epsilon * epsilon * _top(self.gradients.mT @ (kappa[..., None] * self.gradients))
        )

    def quadratic(self, signed: Tensor, vectors: Tensor, epsilon: float) -> Tensor:
        """An upper bound of |Σⱼ wⱼ vⱼ tⱼ²/2| over the ball, w signed; ``(m,)``.

        That of a linear map of t ⊗ t; ∞ where it would take too long.
        """
        n, k = self.gradients.shape[-2:]
        if n * k * k * vectors.shape[-1] > _EXACT:
            return torch.full_like(self.mean[:, 0], math.inf)
        found = []
        for w, v, g in zip(signed, vectors, self.gradients, strict=True):
            squares = (g[:, :, None] * g[:, None, :]).flatten(-2)
            unfolded = (w[:, None] * v).mT @ squares
            unit = power_of_two(unfolded.abs().amax())  # so that its squares are in range
            unfolded = unfolded / unit
            found.append(unit * _top(unfolded @ unfolded.mT).sqrt())
        return 0.5 * epsilon * epsilon * torch.stack(found)

    def moved(self, epsilon: float) -> tuple[Tensor, Tensor]:
        """How far the output is from that at q, and from there and its derivative, at most."""
        slope = epsilon * torch.linalg.matrix_norm(self.derivative, 2)
        bent = self.curvature(self.log_p + self.away.log(), epsilon)
        spread = self.curvature(self.log_p, epsilon)
        beyond = bent + (1 - 1 / (1 + spread)) * slope
        farthest = self.largest(self.away)
        return torch.minimum(slope + bent, farthest), torch.minimum(beyond, farthest + slope)


def _top(moments: Tensor) -> Tensor:
    """The largest eigenvalues of positive matrices; ∞ where an entry has left the number range."""
    known = moments.isfinite().all(-1).all(-1)
    safe = torch.where(known[..., None, None], moments, 0.0)
    return torch.where(known, torch.linalg.eigvalsh(safe)[..., -1].clamp_min(0), math.inf)


def _log_excess(r: Tensor, order: int) -> Tensor:
    """log 2(e^r − Σ_{j<order} r^j/j!)/r²; what is left of the series is e^r P(order, r)."""
    r = r.clamp_min(_LEAST)
    return r + (2 * torch.special.gammainc(torch.full_like(r, order), r)).log() - 2 * r.log()


def bounded(
    values: Tensor, one: Side, other: Side, signs: Tensor, log_sizes: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The bound, one at any query, the gap here, and how the derivative changes, ``(m,)``.

    Args:
        values: of the tokens of both caches, ``(N, v)``.
        one: the first cache as the queries see it.
        other: the other one.
        signs: of w, ``(N,)``.
        log_sizes: log |w|, ``(m, N)``.
        epsilon: ε.
    """
    gap = lengths(one.mean - other.mean)
    slope = torch.linalg.matrix_norm(one.derivative - other.derivative, 2)
    rest = 0.0
    if epsilon:
        rest = epsilon * slope + _remainder(values, one, other, signs, log_sizes, epsilon)
    return gap + rest, _hull(values, one, other, pairs=epsilon > 0), gap, slope


def _remainder(
    values: Tensor, one: Side, other: Side, signs: Tensor, log_sizes: Tensor, epsilon: float
) -> Tensor:
    """What first order leaves out, ``(m,)``."""
    signed = signs * log_sizes.exp()
    apart = values - other.mean[:, None]  # vⱼ − m', (m, N, v)
    farther = log_sizes + other.away.log()
    # Of Σ w e^t (v − m'), its second order exactly or not, and of Σ w e^t.
    exact = one.quadratic(signed, apart, epsilon) + one.curvature(farther, epsilon, order=3)
    bent = torch.minimum(exact, one.curvature(farther, epsilon))
    bent_total = one.curvature(log_sizes, epsilon)
    most, beyond = other.moved(epsilon)
    tilted = lengths((signed[..., None] * one.gradients).sum(-2))
    # (o'(x) − m') Σ w e^t, less its first order Σ w · Do' δ.
    return bent + signed.sum(-1).abs() * beyond + most * (epsilon * tilted + bent_total)


def _hull(values: Tensor, one: Side, other: Side, *, pairs: bool) -> Tensor:
    """max |vⱼ − v_l| over the tokens j of one cache and l of the other, ``(m,)``, or above it."""
    if not pairs or len(values) > _PAIRS:
        length = lengths(values - values.mean(0))
        return one.largest(length) + other.largest(length)
    apart = torch.cdist(values, values, compute_mode="donot_use_mm_for_euclid_dist")
    seen = zip(one.log_p > -math.inf, other.log_p > -math.inf, strict=True)
    return torch.stack([torch.where(j[:, None] & k, apart, 0.0).amax() for j, k in seen])


def bounded_by_steps(
    side: Side, tau: Tensor, eta: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """What another cache may change whose scores and values are so near, here and at any query.

    Args:
        side: the cache that is known, as the queries see it.
        tau: τ, ``(m, N)``: scores in the ball differ by at most this.
        eta: η, ``(N,)``, of the values.
        epsilon: ε.
    """
    farthest = side.largest(side.away)
    bent = side.moved(epsilon)[0] if epsilon else torch.zeros_like(farthest)
    # P̂ in the ball is at most e^r times that at q, and Σ P̂ e^u at least e^{−Σ P̂ τ} (Jensen).
    within = side.log_p + side.reach(epsilon)
    turned = (-torch.expm1(-tau) * (side.away + bent[:, None]) + eta) * (within + tau).exp()
    least = torch.fmin((within.exp() * tau).sum(-1), side.largest(tau))
    return turned.sum(-1) * least.exp(), 2 * farthest + side.largest(eta)
