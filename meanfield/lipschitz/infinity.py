"""The ∞-norm of a Jacobian: its largest row sum, exactly."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meanfield.habits import with_hints
from meanfield.maps import linearize
from meanfield.measures import MeasureMap, ParticleMeasure, check_single, stack
from meanfield.results.answers import Answer, labelled

# Entries of the rows, and of one matrix of weights for each of them, that are made at once.
_ENTRIES = 2**23


class InfinityNorm(Answer, noun="infinity_norm", title="∞-norm of the Jacobian"):
    """‖J‖_∞ and where it is attained.

    Attributes:
        value: max over rows of Σ |J|: the largest change of any coordinate of any token when
            every coordinate of every token changes by at most one. Exact up to rounding.
        token: the token whose row it is.
        feature: the coordinate of that token.
        direction: signs (n, d) with (J · direction)[token, feature] = value.
    """

    value: Tensor = labelled("largest absolute row sum of the Jacobian")
    token: int = labelled("token of that row", dtype="int64")
    feature: int = labelled("coordinate of that token", dtype="int64")
    direction: Tensor = labelled(
        "change of all coordinates by one that attains it", dims=("particle", "feature")
    )


@with_hints
def infinity_norm(F: MeasureMap, mu: ParticleMeasure) -> InfinityNorm:
    """‖J‖_∞ = max_{i,a} Σ_{j,b} |∂F(X)_{ia}/∂x_{jb}|, the norm of [KPM21].

    Every row is Jᵀ applied to a unit vector. They are made in blocks: on b copies of μ one
    product gives b rows, so that memory stays bounded whatever n is. The cost is n·d products.

    Args:
        F: a map of measures.
        mu: μ, without batch axes. Atoms of weight 0 are absent.

    Raises:
        ValueError: μ has batch axes.

    Example:
        >>> from meanfield.measures import pushforward
        >>> mu = ParticleMeasure([[1.0], [-2.0]])
        >>> infinity_norm(lambda mu: pushforward(lambda x: x**2, mu), mu).value
        tensor(4., dtype=torch.float64)
    """
    check_single(mu)
    shape = linearize(F, mu).atoms.out_shape
    count = math.prod(shape)
    each = mu.n_particles * max(mu.n_particles, mu.dim)
    size = max(1, min(count, _ENTRIES // each))
    rows = linearize(F, stack([mu] * size)).atoms.T
    best, top, signs = -1.0, 0, torch.zeros_like(mu.points)
    for start in range(0, count, size):
        # The last block repeats the last row where there are no more.
        index = torch.arange(start, start + size, device=mu.device).clamp_max(count - 1)
        units = torch.zeros(size, count, dtype=mu.dtype, device=mu.device)
        units[torch.arange(size, device=mu.device), index] = 1.0
        block = rows @ units.reshape(size, *shape)
        sums = block.abs().sum((-2, -1))
        value, place = sums.max(0)
        if not float(value) <= best:
            best, top, signs = float(value), int(index[place]), block[place].sign()
    return InfinityNorm(mu.points.new_tensor(best), top // shape[1], top % shape[1], signs)
