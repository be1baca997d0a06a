"""Clusters of a measure: which atoms a chain of short steps joins, and what they weigh."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from meanfield.checks import number
from meanfield.habits import with_hints
from meanfield.measures import (
    ParticleMeasure,
    check_measure,
    check_single,
    close_pairs,
    merge_labelled,
)


@dataclass(frozen=True, eq=False)
class Clusters:
    """Atoms joined by chains of steps of length at most a scale (single linkage).

    Attributes:
        labels: the number of each atom's cluster, (n,), by mass, the heaviest 0; −1 for atoms of
            weight 0.
        log_masses: log of the mass of each cluster, (k,), decreasing.
        centres: barycentres, (k, d).
    """

    labels: Tensor
    log_masses: Tensor
    centres: Tensor

    @property
    def count(self) -> int:
        """How many clusters there are."""
        return len(self.log_masses)


@with_hints
def clusters(mu: ParticleMeasure, scale: float) -> Clusters:
    """The clusters of a measure at a scale, in O(n²) time and O(n) memory, in any dimension.

    Positions are ignored.

    Args:
        mu: a measure without batch axes.
        scale: atoms at most this far apart belong together, ≥ 0.

    Raises:
        ValueError: a batch, a negative scale, points that are not finite.

    Example:
        >>> mu = ParticleMeasure([[0.0], [0.1], [5.0]], [0.1, 0.1, 0.8])
        >>> clusters(mu, 0.5).labels
        tensor([1, 1, 0])
    """
    check_single(mu)
    scale = number(scale, "scale", least=0)
    merged, labels = merge_labelled(mu, scale, across_positions=True)
    order = merged.log_weights.argsort(descending=True, stable=True)
    labels = torch.where(labels < 0, labels, order.argsort()[labels])
    return Clusters(labels, merged.log_weights[order], merged.points[order])


@with_hints
def cluster_count(mu: ParticleMeasure, scale: float) -> Tensor:
    """How many clusters a measure has at a scale, shape (...) of its batch."""
    if not check_measure(mu).batch_shape:
        return torch.tensor(clusters(mu, scale).count, device=mu.device)
    return torch.stack([cluster_count(one, scale) for one in mu])


def coalesced(mu: ParticleMeasure, scale: float) -> tuple[ParticleMeasure, Tensor]:
    """The measure with each small cluster as one atom at its barycentre, and the new numbers.

    Small are clusters whose diameter is at most the scale: a chain may be longer, and stays. So do
    atoms of weight 0. Positions are ignored: this is for maps that do not use them.
    """
    found = clusters(mu, scale)
    labels, alive = found.labels, found.labels >= 0
    sizes = labels[alive].bincount(minlength=found.count)
    pairs = torch.zeros_like(sizes)
    for rows, _ in close_pairs(mu.points[alive].detach(), scale):
        pairs += labels[alive][rows].bincount(minlength=found.count)
    small = pairs == sizes.square()
    alone = ~alive | ~small[labels]
    labels = torch.where(alone, small.sum() + alone.cumsum(0) - 1, (small.cumsum(0) - 1)[labels])
    points = torch.cat([found.centres[small], mu.points[alone]])
    logs = torch.cat([found.log_masses[small], mu.log_weights[alone]])
    return ParticleMeasure(points, log_weights=logs), labels


def meets(mu: ParticleMeasure, scale: float) -> bool:
    """Whether two atoms of positive weight are at most a scale apart."""
    points = mu.points[mu.log_weights > -math.inf]
    return any(bool((rows != columns).any()) for rows, columns in close_pairs(points, scale))
