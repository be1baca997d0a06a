"""An upper bound of all local constants in a ball, of attention by averages of sigmoids.

Γ(x) = ∫ σ(s(x, y)) Vy dμ(y) has no normaliser, so that weights move as their own scores do. With
o the most that a score moves (letters otherwise as in `ball_bounds`)

    T = σV + σ′vuᵀ,   S = ∫ σ′vyᵀ dμ,   |σ(s′) − σ(s)| ≤ δ,   |σ′(s′) − σ′(s)| ≤ δ′,

δ the larger of σ(s+o) − σ(s) and σ(s) − σ(s−o), and δ′ the least of o/(6√3) (σ″ is no larger),
σ′(s)(e^o − 1) (nor is σ″/σ′ than 1), ¼ and σ(s+o), which no weight and no slope exceeds.
Densities of T are bounded entry by entry, whatever parts atoms split into. Not in the papers;
proved on the page "Sharp constants".
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meanfield.attention.ball_bounds import norm_from_above
from meanfield.attention.input_bounds import Frames, norm, row_blocks
from meanfield.attention.kernels.kernel import Motion
from meanfield.attention.weights import Block, Weights
from meanfield.linalg.vectors import lengths
from meanfield.maps import BallBounds


def sigmoid_ball_bound(weights: Weights, eps: Tensor) -> BallBounds:
    """As `ball_bounds.ball_bound`, of weights aⱼσ(sᵢⱼ).

    Args:
        weights: at the input, rows not divided by their sums.
        eps: ε ≥ 0, ``(..., *batch)``.
    """
    if weights.kernel.activation is not None:
        raise NotImplementedError(
            f"ball_bounds: expected sigmoids of scores without a cap, got {weights.kernel}"
        )
    frames, n = Frames.of(weights), weights.n
    motion = frames.motion(eps)
    batch = torch.broadcast_tensors(weights.points[..., 0, 0], eps)[0].shape
    change, upper = (weights.points.new_zeros(*batch, n, n) for _ in range(2))
    turning_change, turning, displacement = (torch.zeros_like(change[..., 0]) for _ in range(3))
    halves, present = (0.5 * weights.log_weights).exp(), weights.log_weights > -math.inf
    for block in row_blocks(weights):
        rows = _Rows(frames, block, motion, eps)
        pairs = halves[..., block.rows, None] * halves[..., None, :]
        both = present[..., block.rows, None] & present[..., None, :]
        change[..., block.rows, :] = torch.where(both, pairs * rows.change.sum(-3), 0.0)
        upper[..., block.rows, :] = torch.where(both, pairs * rows.upper.sum(-3), 0.0)
        turning_change[..., block.rows] = rows.turning_change.sum(-2)
        turning[..., block.rows] = rows.turning.sum(-2)
        displacement[..., block.rows] = rows.displacement.sum(-2)
    change, upper = (norm_from_above(each.log()) for each in (change, upper))
    change, upper = change + turning_change.amax(-1), upper + turning.amax(-1)
    unit, unknown = frames.unit, torch.full_like(change, math.inf)
    return BallBounds.of(unknown, unit * change, unit * upper, unit * displacement)


class _Rows:
    """A block of rows of every head; entries ``(*batch, H, rows, n)`` are densities."""

    def __init__(
        self, frames: Frames, block: Block, motion: tuple[Motion, Motion], eps: Tensor
    ) -> None:
        log_p, away_from_one = frames.log_p_and_gain(block)
        seen, p = log_p > -math.inf, log_p.exp()
        eps = eps[..., None, None]
        vectors = frames.rows(block, p, torch.ones_like(p))
        assert away_from_one is not None and vectors.raw_pulled is not None
        pulled = vectors.raw_pulled
        own, u_change, y_change = frames.changes(block, motion, vectors, eps, seen, pulled)
        u_change, y_change = u_change[..., None], y_change[..., None]
        logs = torch.where(seen, log_p - frames.weights.log_weights[..., None, None, :], -math.inf)
        # What underflows is not absent: it may be all of the attention elsewhere in the ball.
        least = torch.finfo(logs.dtype).tiny
        sigma, rest = logs.exp().clamp_min(least), away_from_one.clamp_min(least)
        end = (logs - away_from_one.log() + own).sigmoid()  # σ(s+o)
        most = torch.where(seen, end.clamp_min(least), 0.0)
        shrunk = (-own).exp()
        nearest = (sigma + rest * shrunk).minimum(sigma * shrunk + rest)
        slope, off = sigma * rest, -torch.expm1(-own)
        # No change is more than σ(s+o), of σ′ ≤ σ neither; 0 · ∞ is where a sigmoid may go from
        # one end to the other.
        moved = torch.fmin(slope * off / nearest, most)
        bent = torch.fmin(own / (6 * math.sqrt(3)), slope * torch.expm1(own)).clamp_max(0.25)
        bent = torch.fmin(bent, most)
        steepest = torch.fmin((slope + bent).clamp_max(0.25), most)
        values, step = frames.values[..., None, :, :], (frames.norm_V[:, None] * eps)[..., None]
        size, norm_V = lengths(values), frames.norm_V[:, None, None]
        turned, log_mass = vectors.turned, frames.weights.log_weights[..., None, None, :]

        def mean(densities: Tensor) -> Tensor:  # of an absent atom 0 · ∞ is 0
            shares = (log_mass + densities.log()).exp()
            return torch.where(log_mass > -math.inf, shares, 0.0).sum(-1)

        self.change = (
            moved * norm_V
            + bent * size * turned
            + steepest * (step * (turned + u_change) + size * u_change)
        )
        self.upper = most * norm_V + steepest * (size + step) * (turned + u_change)
        by_query = bent * size * pulled + steepest * (step * (pulled + y_change) + size * y_change)
        self.turning_change = mean(by_query)
        at_input = norm((slope * log_mass.exp())[..., None, :] * values.mT @ vectors.pulled)
        largest = mean(steepest * (size + step) * (pulled + y_change))
        self.turning = torch.fmin(largest, at_input + self.turning_change)
        self.displacement = mean(moved * size + most * step)
