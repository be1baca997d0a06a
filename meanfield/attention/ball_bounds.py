"""An upper bound of all local constants in a ball around an input, computed at that input.

Every token may move by ε, and an atom may split into parts that move differently: the ball of
radius ε for the distance W_∞ (masked: at fixed positions). Attention weights then change by a
factor between l and h, which bounds the change of the derivative entry by entry, and outputs stay
within ‖V‖ε of the convex hull of the values. Not in the papers; the proof is on the page "Sharp
constants" of the documentation. Letters as there:

    P, P̄          attention weights at the input; bounds of them over the ball (`p`, `most`)
    χ              bound of |P'/P − 1| in a row (`chi`)
    uᵢⱼ, yᵢⱼ       slopes of the score sᵢⱼ in the key's and the query's point (`turned`, `pulled`)
    u, y           bounds of how far these move within ε (`turned_change`, `pulled_change`)
    own            half of how far scores of a row move apart
    mᵢ, |vⱼ − mᵢ|  mean of the values that row i sees; distances from it (`away`)
    T, S           the parts of the derivative by which atoms j and atom i itself move output i
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from meanfield.attention.input_bounds import (
    Frames,
    RowFrames,
    centred,
    covariance,
    norm,
    row_blocks,
)
from meanfield.attention.kernels.kernel import Motion
from meanfield.attention.weights import Block, Weights
from meanfield.maps import BallBounds

_ROUNDS = 12  # of power iteration from above; each multiplies once by N and once by Nᵀ


def ball_bound(weights: Weights, epsilon: float | Tensor, *, splitting: bool = True) -> BallBounds:
    """How much the derivative may change within ε, and a bound of all local constants there.

    The change is what small ε need, on top of the constant at the input, which is not asked for
    here. The bound comes from the columns of the attention weights over the ball.

    Args:
        weights: attention weights at the input, under the softmax, with a null key or without.
        epsilon: ε ≥ 0, how far each token may move; a number, ``(*batch,)``, or
            ``(..., *batch)``.
        splitting: whether atoms may split. If not, every token keeps its weight, and the bounds
            are a little smaller.
    """
    points = weights.points
    eps = torch.as_tensor(epsilon, dtype=points.dtype, device=points.device)
    frames, n = Frames.of(weights), weights.n
    motion, values = frames.motion(eps), frames.values
    batch = torch.broadcast_tensors(points[..., 0, 0], eps)[0].shape
    own = torch.where(weights.alive, weights.log_weights, 0.0)[..., None, :]
    log_N = values.new_full((*batch, n, n), -math.inf)
    columns = values.new_full((*batch, values.shape[-3], n), -math.inf)
    turning_change, turning, displacement = (values.new_zeros(*batch, n) for _ in range(3))
    for block in row_blocks(weights):
        rows = _Rows(frames, block, motion, eps, splitting)
        ratios = own[..., block.rows, None] - own[..., None, :]  # log(aᵢ/aⱼ)
        # A null key, behind the others, does not move: it counts in rows alone.
        logs = 0.5 * ratios + rows.log_averaging_change[..., :n]
        log_N[..., block.rows, :] = logs.logsumexp(-3)
        logs = rows.log_densest[..., :n] + ratios + rows.tau.log()[..., None]
        columns = torch.logaddexp(columns, logs.logsumexp(-2))
        turning_change[..., block.rows] = rows.turning_change.sum(-2)
        turning[..., block.rows] = rows.turning.sum(-2)
        displacement[..., block.rows] = rows.displacement.sum(-2)
    change = norm_from_above(log_N) + turning_change.amax(-1)
    upper = (0.5 * columns.amax(-1)).exp().sum(-1) + turning.amax(-1)
    unknown, unit = torch.full_like(change, math.inf), frames.unit
    return BallBounds.of(unknown, unit * change, unit * upper, unit * displacement)


class _Rows:
    """A block of rows of every head, ``(*batch, H, rows, n)`` and ``(*batch, H, rows)``."""

    def __init__(
        self,
        frames: Frames,
        block: Block,
        motion: tuple[Motion, Motion],
        eps: Tensor,
        splitting: bool,
    ) -> None:
        log_p, gain = frames.log_p_and_gain(block)
        self.norm_V, self.eps = frames.norm_V[:, None], eps[..., None, None]
        self.p, self.seen = log_p.exp(), log_p > -math.inf
        self.away = centred(self.p, frames.values[..., None, :, :]).norm(dim=-1)  # |vⱼ − mᵢ|
        vectors = frames.rows(block, self.p, gain)
        self.pulled_away = centred(self.p, vectors.pulled).norm(dim=-1)  # |yᵢⱼ − ȳᵢ|
        own, self.turned_change, self.pulled_change = frames.changes(
            block, motion, vectors, self.eps, self.seen, self.pulled_away
        )
        self.length = vectors.turned
        self.varies = (
            vectors.image is None or frames.bends is not None or bool(motion[1].bent.any())
        )
        self._factors(log_p, own, splitting)
        self._spreads(frames, vectors)
        self.log_averaging_change = self._log_averaging_change(frames, vectors)
        values = frames.values[..., None, :, :]
        at_input = _where_finite(norm, covariance(self.p, values, vectors.pulled))
        self._turning(at_input)

    def _factors(self, log_p: Tensor, own: Tensor, splitting: bool) -> None:
        """P̄ ≥ P' and χ ≥ |P'/P − 1| over the ball, where scores move by ±own but for a shift.

        If an atom splits, P' ≤ 1 holds for the sum over its parts (rows) but not for each part's
        density P'/a (columns).
        """
        theta = own
        low = (log_p - own).logsumexp(-1, keepdim=True)
        high = (log_p + own).logsumexp(-1, keepdim=True)
        if splitting:
            log_h, log_l = theta - low, -theta - high
        else:  # the factor applies to the other weights of the row only
            log_h = -torch.logaddexp(log_p, _log_of_others(log_p - own) - theta)
            log_l = -torch.logaddexp(log_p, _log_of_others(log_p + own) + theta)
        log_h = torch.where(self.seen, log_h.clamp_min(0), 0.0)
        log_l = torch.where(self.seen, log_l.clamp_max(0), 0.0)
        # In logarithms: a P that underflows counts once divided by the weight of a light atom.
        log_growth = log_p + log_h + (-torch.expm1(-log_h)).log()
        log_loss = log_p + (-torch.expm1(log_l)).log()
        log_change = torch.maximum(torch.minimum(log_growth, (1 - self.p).log()), log_loss)
        log_most = (log_p + log_h).clamp_max(0)
        self.most = log_most.exp()
        self.change = torch.where(self.seen, log_change.exp(), 0.0)
        self.log_densest, self.log_density_change = log_most, log_change
        if splitting:
            self.log_densest = log_p + log_h
            self.log_density_change = torch.maximum(log_growth, log_loss)
        self.chi = torch.maximum(torch.expm1(log_h), -torch.expm1(log_l)).amax(-1)
        self.log_h = log_h.amax(-1)

    def _spreads(self, frames: Frames, vectors: RowFrames) -> None:
        """Standard deviations in the worst direction, at the input and over the ball."""
        self.std, self.pulled_std = (
            _where_finite(_top_eigenvalue, covariance(self.p, x, x)).sqrt()
            for x in (frames.values[..., None, :, :], vectors.pulled)
        )
        self.std_most = self._std_most(self.std, self.away) + self.norm_V * self.eps
        self.pulled_most = self._std_most(self.pulled_std, self.pulled_away) + self.pulled_change
        longest = torch.where(self.seen, self.length, 0.0).amax(-1)
        spread = (longest + self.turned_change) * self.std_most
        # Where u depends on j, its mean product with v − m need not vanish.
        each = self.norm_V + spread if self.varies else torch.hypot(self.norm_V, spread)
        self.tau = each**2
        self.shift = self._shift(self.std, self.away)
        self.pulled_shift = self._shift(self.pulled_std, self.pulled_away)

    def _std_most(self, std: Tensor, away: Tensor) -> Tensor:
        farthest = torch.where(self.seen, away, 0.0).amax(-1)
        by_mass = (self.most * away.square()).sum(-1).sqrt()
        by_factor = torch.where(std > 0, (0.5 * self.log_h).exp() * std, 0.0)
        return torch.minimum(torch.minimum(by_factor, by_mass), farthest)

    def _shift(self, std: Tensor, away: Tensor) -> Tensor:
        """How far a mean moves at most as the weights change."""
        by_factor = torch.where(std > 0, self.chi * std, 0.0)
        return torch.minimum((self.change * away).sum(-1), by_factor)

    def _log_averaging_change(self, frames: Frames, vectors: RowFrames) -> Tensor:
        """Logarithms of upper bounds of the norms of the blocks of T' − T."""
        away, norm_V = self.away, self.norm_V[..., None]
        block_norm = norm_V + self.length * away
        if vectors.image is not None:
            block_norm = block_norm.minimum(self._block_norm(frames, vectors.image))
        moved = (2 * self.norm_V * self.eps + self.shift)[..., None]
        turned_change = self.turned_change[..., None]
        return torch.logaddexp(
            self.log_density_change + block_norm.log(),
            self.log_densest
            + (moved * (self.length + turned_change) + away * turned_change).log(),
        )

    def _block_norm(self, frames: Frames, image: Tensor) -> Tensor:
        """‖V + δuᵀ‖² ≤ ‖V‖² + ⟨g, δ⟩ + |g||δ| with g = Vu + |u|²δ/2; an equality for V = I."""
        mean, away = self.p @ frames.values, self.away
        along = image @ frames.values.mT - (image * mean).sum(-1, keepdim=True)
        square = self.length.square()
        inner = along + 0.5 * square * away.square()
        g = image.square().sum(-1, keepdim=True) + square * (along + 0.25 * square * away.square())
        norm_V = self.norm_V[..., None]
        return (norm_V**2 + inner + g.clamp_min(0).sqrt() * away).clamp_min(0).sqrt()

    def _turning(self, at_input: Tensor) -> None:
        """Upper bounds of ‖S' − S‖ and ‖S'‖ of each row, and of its displacement."""
        std, pulled = self.std, self.pulled_std
        by_factor = torch.where(std * pulled > 0, self.chi * std * pulled, 0.0)
        squares = [(self.change * away.square()).sum(-1) for away in (self.away, self.pulled_away)]
        by_weights = torch.minimum(by_factor, (squares[0] * squares[1]).sqrt())
        growth = torch.where(std + pulled > 0, (1 + self.chi).sqrt(), 1.0)
        self.turning_change = (
            by_weights
            + self.shift * self.pulled_shift
            + growth * (self.pulled_change * std + self.norm_V * self.eps * pulled)
            + self.pulled_change * self.norm_V * self.eps
        )
        self.turning = torch.fmin(self.std_most * self.pulled_most, at_input + self.turning_change)
        # A mean stays in the convex hull of the values that its row sees.
        farthest = torch.where(self.seen, self.away, 0.0).amax(-1)
        self.displacement = torch.fmin(
            self.eps * (self.tau.sqrt() + self.turning), farthest + self.norm_V * self.eps
        )


def _log_of_others(logs: Tensor) -> Tensor:
    """log Σ_{k≠j} e^{logs_k} of each j: a sum from both ends, in which nothing is subtracted."""
    nothing = torch.full_like(logs[..., :1], -math.inf)
    before = torch.cat([nothing, logs[..., :-1].logcumsumexp(-1)], -1)
    after = torch.cat([logs.flip(-1)[..., :-1].logcumsumexp(-1).flip(-1), nothing], -1)
    return torch.logaddexp(before, after)


def _where_finite(size: Callable[[Tensor], Tensor], matrices: Tensor) -> Tensor:
    """Sizes of matrices, ∞ where entries leave the number range: nothing is known of them."""
    known = matrices.isfinite().all(-1).all(-1)
    return torch.where(known, size(matrices.where(known[..., None, None], 0.0)), math.inf)


def _top_eigenvalue(squares: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(squares)[..., -1].clamp_min(0)


def norm_from_above(log_N: Tensor) -> Tensor:
    """‖N‖² ≤ maxⱼ (NᵀNx)ⱼ/xⱼ for any x > 0 (Collatz–Wielandt), for a nonnegative N."""
    log_x = torch.zeros_like(log_N[..., 0, :])
    best = torch.full_like(log_N[..., 0, 0], math.inf)
    for _ in range(_ROUNDS):
        log_y = (log_N + log_x[..., None, :]).logsumexp(-1)
        log_z = (log_N + log_y[..., :, None]).logsumexp(-2)
        alive = log_z != -math.inf  # of NaN nothing is known: the bound is ∞
        growth = torch.where(alive, log_z - log_x, -math.inf).amax(-1)
        best = torch.fmin(best, growth)
        log_x = torch.where(alive, log_z - log_z.amax(-1, keepdim=True), 0.0)
    return (0.5 * best).exp()
