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

Weights, what they grow by, and squares of distances are kept as logarithms until they have been
multiplied: a weight that underflows may be all of the attention elsewhere in the ball.
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
    norm,
    row_blocks,
)
from meanfield.attention.kernels.kernel import Motion
from meanfield.attention.weights import Block, Weights
from meanfield.linalg.vectors import lengths
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
        vectors = frames.rows(block, self.p, gain)
        apart = [centred(self.p, x) for x in (frames.values[..., None, :, :], vectors.pulled)]
        self.away, self.pulled_away = map(lengths, apart)  # |vⱼ − mᵢ|, |yᵢⱼ − ȳᵢ|
        self.log_away, self.log_pulled_away = (
            torch.where(self.seen, away.log(), -math.inf) for away in (self.away, self.pulled_away)
        )
        own, self.turned_change, self.pulled_change = frames.changes(
            block, motion, vectors, self.eps, self.seen, self.pulled_away
        )
        self.length = vectors.turned
        self.varies = (
            vectors.image is None or frames.bends is not None or bool(motion[1].bent.any())
        )
        self._factors(log_p, own, splitting)
        self._spreads(log_p, *apart)
        self.log_averaging_change = self._log_averaging_change(frames, vectors)
        covariance = (self.p[..., None] * apart[0]).mT @ apart[1]
        self._turning(_where_finite(norm, covariance))

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
        log_growth = log_p + log_h + (-torch.expm1(-log_h)).log()
        log_loss = log_p + (-torch.expm1(log_l)).log()
        log_change = torch.maximum(torch.minimum(log_growth, (1 - self.p).log()), log_loss)
        self.log_most = (log_p + log_h).clamp_max(0)
        self.log_change = torch.where(self.seen, log_change, -math.inf)
        self.log_densest, self.log_density_change = self.log_most, log_change
        if splitting:
            self.log_densest = log_p + log_h
            self.log_density_change = torch.maximum(log_growth, log_loss)
        log_grown = log_h + (-torch.expm1(-log_h)).log()  # log(h − 1)
        self.log_chi = torch.maximum(log_grown, (-torch.expm1(log_l)).log()).amax(-1)
        self.log_h = log_h.amax(-1)

    def _spreads(self, log_p: Tensor, apart: Tensor, pulled_apart: Tensor) -> None:
        """Standard deviations in the worst direction, at the input and over the ball."""
        self.log_std = _log_std(log_p + 2 * self.log_away, apart, self.away)
        self.log_pulled_std = _log_std(
            log_p + 2 * self.log_pulled_away, pulled_apart, self.pulled_away
        )
        # Of v and y at the input under the weights in the ball, and of v′ and y′.
        self.std = self._std_over_ball(self.log_std, self.log_away)
        self.pulled_std = self._std_over_ball(self.log_pulled_std, self.log_pulled_away)
        self.std_most = self.std + self.norm_V * self.eps
        self.pulled_most = self.pulled_std + self.pulled_change
        longest = torch.where(self.seen, self.length, 0.0).amax(-1)
        spread = (longest + self.turned_change) * self.std_most
        # Where u depends on j, its mean product with v − m need not vanish.
        each = self.norm_V + spread if self.varies else torch.hypot(self.norm_V, spread)
        self.tau = each**2
        self.shift = self._shift(self.log_std, self.log_away)
        self.pulled_shift = self._shift(self.log_pulled_std, self.log_pulled_away)

    def _std_over_ball(self, log_std: Tensor, log_away: Tensor) -> Tensor:
        by_mass = 0.5 * (self.log_most + 2 * log_away).logsumexp(-1)
        by_distance = torch.minimum(by_mass, log_away.amax(-1)).exp()
        return torch.minimum(_product(0.5 * self.log_h, log_std), by_distance)

    def _shift(self, log_std: Tensor, log_away: Tensor) -> Tensor:
        """How far a mean moves at most as the weights change."""
        by_change = (self.log_change + log_away).logsumexp(-1).exp()
        return torch.minimum(by_change, _product(self.log_chi, log_std))

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
        by_factor = _product(self.log_chi, self.log_std + self.log_pulled_std)
        one, other = (
            0.5 * (self.log_change + 2 * log_away).logsumexp(-1)
            for log_away in (self.log_away, self.log_pulled_away)
        )
        by_weights = torch.minimum(by_factor, _product(one, other))
        self.turning_change = (
            by_weights
            + self.shift * self.pulled_shift
            + self.pulled_change * self.std
            + self.norm_V * self.eps * (self.pulled_std + self.pulled_change)
        )
        self.turning = torch.fmin(self.std_most * self.pulled_most, at_input + self.turning_change)
        # A mean stays in the convex hull of the values that its row sees.
        farthest = torch.where(self.seen, self.away, 0.0).amax(-1)
        self.displacement = torch.fmin(
            self.eps * (self.tau.sqrt() + self.turning), farthest + self.norm_V * self.eps
        )


def _product(log_factor: Tensor, log_size: Tensor) -> Tensor:
    """The product, 0 where the size is 0, whatever the factor."""
    return torch.where(log_size > -math.inf, (log_factor + log_size).exp(), 0.0)


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


def _log_std(log_squares: Tensor, apart: Tensor, away: Tensor) -> Tensor:
    """log λ, λ² the largest eigenvalue of Σⱼ Pⱼ zⱼzⱼᵀ.

    From the directions of z, whose weights P|z|² are taken over the largest of their row.

    Args:
        log_squares: log P|z|².
        apart: z.
        away: |z|.
    """
    most = log_squares.amax(-1, keepdim=True)
    shares = (log_squares - most.where(most > -math.inf, 0.0)).exp()
    directions = apart / away.where(away > 0, 1.0)[..., None]
    squares = (shares[..., None] * directions).mT @ directions
    return 0.5 * (most[..., 0] + _where_finite(_top_eigenvalue, squares).log())


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
