"""Pairs of measures in a ball that a map may send far apart: what a search for secants tries.

Each family returns a batch of pairs (μ, ν) with all atoms in B_R, or None where it has none to
offer. For masked maps the two measures of a pair share their law of positions, so that the
conditional distance is finite.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from meanfield import sampling
from meanfield.lipschitz.local import LocalLipschitz
from meanfield.measures import ParticleMeasure, split

# Relative to the radius. Below 1e-6 the rounding of points costs more than the step gains.
STEPS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
# Shares of an atom's mass that move in a transfer.
SHARES = (1.0, 0.5, 0.1, 1e-2, 1e-3)


class Pairs(NamedTuple):
    """A batch of pairs: both measures of batch shape (b,)."""

    mu: ParticleMeasure
    nu: ParticleMeasure


def random_pairs(
    n_pairs: int,
    n_atoms: int,
    dim: int,
    radius: float,
    *,
    positioned: bool,
    generator: torch.Generator,
) -> Pairs:
    """Random measures of n atoms, one half paired at random, one half with a measure nearby.

    Atoms are uniform on the ball or the sphere, weights from uniform to ratios of e^{−4R²}.
    A nearby one has the atoms xᵢ + s(yᵢ − xᵢ) with s from 1 to 1e-4. Positioned pairs have token i
    at i/n and the same weights; otherwise the far pairs have weights of their own.
    """
    x, first = random_measures(n_pairs, n_atoms, dim, radius, generator)
    y, second = random_measures(n_pairs, n_atoms, dim, radius, generator)
    near = torch.arange(n_pairs) % 2 == 1
    exponents = 4 * torch.rand(n_pairs, generator=generator, dtype=torch.float64)
    length = torch.where(near, 10.0**-exponents, 1.0)[:, None, None]
    same = torch.ones_like(near) if positioned else near
    positions = None
    if positioned:
        positions = torch.arange(1, n_atoms + 1, dtype=torch.float64) / n_atoms
    return Pairs(
        ParticleMeasure(x, log_weights=first, positions=positions),
        ParticleMeasure(
            x + length * (y - x),
            log_weights=torch.where(same[:, None], first, second),
            positions=positions,
        ),
    )


def direction_pairs(mu: ParticleMeasure, constant: LocalLipschitz, radius: float) -> Pairs:
    """Shrinking steps along the worst direction of a local constant, both ways.

    At step t the measure is first shrunk by 1 − t, so that displacements up to tR stay in B_R.
    """
    # √aᵢ εᵢ → εᵢ: relative to the largest, since 1/√aᵢ may be beyond the number range.
    half = 0.5 * (mu.log_weights.amax(-1, keepdim=True) - mu.log_weights)
    v = constant.direction
    logs = v.abs().clamp_min(1e-300).log() + half[..., None].clamp_max(1e4)
    epsilon = v.sign() * (logs - logs.max()).exp()
    return _steps(mu, epsilon, radius)


def splitting_pairs(mu: ParticleMeasure, constant: LocalLipschitz, radius: float) -> Pairs:
    """Each atom stored twice; the halves of the worst one go apart along its worst direction."""
    assert constant.splitting_atom is not None and constant.splitting_direction is not None
    halves = split(mu)
    epsilon = torch.zeros_like(halves.points)
    first = 2 * int(constant.splitting_atom)
    epsilon[first] = constant.splitting_direction
    epsilon[first + 1] = -constant.splitting_direction
    return _steps(halves, epsilon, radius)


def transfer_pairs(mu: ParticleMeasure) -> Pairs | None:
    """Weight goes from one atom to another and no atom moves: every ordered pair, every share.

    For positioned measures only between atoms at one position: elsewhere the law of positions
    would change.
    """
    n = mu.n_particles
    index = torch.cartesian_prod(torch.arange(n), torch.arange(n))
    source, target = index[index[:, 0] != index[:, 1]].T if n > 1 else (index[:0, 0],) * 2
    apart = (mu.points[source] != mu.points[target]).any(-1)
    apart &= torch.isfinite(mu.log_weights[source])
    if mu.positions is not None:
        apart &= mu.positions[source] == mu.positions[target]
    source, target = source[apart], target[apart]
    if not len(source):
        return None
    shares = torch.tensor(SHARES, dtype=mu.dtype).repeat(len(source))
    source, target = (k.repeat_interleave(len(SHARES))[:, None] for k in (source, target))
    logs = mu.log_weights.expand(len(shares), n)
    moved = logs.gather(1, source) + shares[:, None].log()
    left = logs.gather(1, source) + torch.log1p(-shares[:, None])
    after = logs.scatter(1, source, left)
    after = after.scatter(1, target, torch.logaddexp(logs.gather(1, target), moved))
    points = mu.points.expand(len(shares), n, mu.dim)
    return Pairs(
        ParticleMeasure(points, log_weights=logs, positions=mu.positions),
        ParticleMeasure(points, log_weights=after, positions=mu.positions),
    )


def tied_measures(
    count: int, n: int, dim: int, radius: float, generator: torch.Generator
) -> ParticleMeasure:
    """Random measures with two atoms at each of n positions, between which mass can move."""
    points, logs = random_measures(count, 2 * n, dim, radius, generator)
    where = torch.arange(1, n + 1, dtype=torch.float64).repeat_interleave(2) / n
    return ParticleMeasure(points, log_weights=logs, positions=where)


def _steps(stored: ParticleMeasure, epsilon: Tensor, radius: float) -> Pairs:
    """(1 − t)xᵢ against (1 − t)xᵢ ± tR εᵢ/max‖ε‖."""
    # Slightly below 1, so that rounding does not leave the ball.
    unit = (1 - 1e-9) * radius * epsilon / torch.linalg.vector_norm(epsilon, dim=-1).max()
    t = torch.tensor(STEPS, dtype=stored.dtype).repeat(2)[:, None, None]
    sign = torch.ones_like(t)
    sign[len(STEPS) :] = -1.0
    base = (1 - t) * stored.points

    def at(points: Tensor) -> ParticleMeasure:
        return ParticleMeasure(points, log_weights=stored.log_weights, positions=stored.positions)

    return Pairs(at(base), at(base + sign * t * unit))


def random_measures(
    count: int, n: int, dim: int, radius: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Atoms in the ball or on the sphere, and log-weights, uniform to extremely unbalanced."""
    inside = sampling.ball(n, dim, radius=radius, batch_shape=(count,), generator=generator)
    outside = sampling.sphere(n, dim, radius=radius, batch_shape=(count,), generator=generator)
    share = torch.rand(count, 1, 1, generator=generator, dtype=torch.float64)
    depth = 4.0 * radius**2 * torch.rand(count, 1, generator=generator, dtype=torch.float64)
    logits = -depth * torch.rand(count, n, generator=generator, dtype=torch.float64)
    # Slightly inside, so that rounding does not leave the ball.
    points = (1 - 1e-15) * torch.where(share < 0.5, inside, outside)
    return points, logits.log_softmax(-1)
