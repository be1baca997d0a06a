"""Clusters of a measure: which atoms a chain of short steps joins, and what they weigh."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from meanfield.checks import count as whole
from meanfield.checks import number
from meanfield.measures import ParticleMeasure, check_measure

__all__ = ["Clusters", "cluster_count", "cluster_masses", "clusters", "coalesced", "meets"]

_BLOCK = 2**22  # entries of a block of distances: 32 MB in float64


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


def clusters(mu: ParticleMeasure, scale: float) -> Clusters:
    """The clusters of a measure at a scale, in O(n²) time and O(n) memory, in any dimension.

    Positions, if there are any, are not looked at.

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
    if check_measure(mu).batch_shape:
        raise ValueError(
            f"clusters: expected a measure without batch axes, got {tuple(mu.batch_shape)}; "
            "their numbers differ, so call it on each mu[i]"
        )
    scale = number(scale, "scale", least=0)
    alive = (mu.log_weights > -math.inf).nonzero()[:, 0]
    found = _components(mu.points[alive].detach(), scale)
    count = int(found.max()) + 1
    logs = mu.log_weights[alive]
    log_masses = _log_sums(logs, found, count)
    order = log_masses.argsort(descending=True, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(count, device=order.device)
    labels = torch.full((mu.n_particles,), -1, device=mu.device)
    labels[alive] = rank[found]
    shares = (logs - log_masses[found]).exp()[:, None]  # within a cluster they sum to 1
    centres = torch.zeros(count, mu.dim, dtype=mu.dtype, device=mu.device)
    centres.index_add_(0, rank[found], shares * mu.points[alive])
    return Clusters(labels, log_masses[order], centres)


def cluster_count(mu: ParticleMeasure, scale: float) -> Tensor:
    """How many clusters a measure has at a scale, shape (...) of its batch."""
    if not check_measure(mu).batch_shape:
        return torch.tensor(clusters(mu, scale).count)
    return torch.stack([cluster_count(one, scale) for one in mu])


def cluster_masses(mu: ParticleMeasure, scale: float, most: int) -> Tensor:
    """Masses of the `most` heaviest clusters, decreasing, 0 where there are fewer; (..., most)."""
    most = whole(most, "most")
    if mu.batch_shape:
        return torch.stack([cluster_masses(one, scale, most) for one in mu])
    masses = clusters(mu, scale).log_masses[:most].exp()
    return torch.nn.functional.pad(masses, (0, most - len(masses)))


def coalesced(mu: ParticleMeasure, scale: float) -> tuple[ParticleMeasure, Tensor]:
    """The measure with each cluster as one atom at its barycentre, and each atom's new number.

    Atoms of weight 0 stay as they are. Positions are not looked at: it is for maps that do not
    use them.
    """
    found = clusters(mu, scale)
    dead = found.labels < 0
    labels = found.labels.clone()
    labels[dead] = found.count + torch.arange(int(dead.sum()), device=mu.device)
    points = torch.cat([found.centres, mu.points[dead]])
    logs = torch.cat([found.log_masses, mu.log_weights[dead]])
    return ParticleMeasure(points, log_weights=logs), labels


def meets(mu: ParticleMeasure, scale: float) -> bool:
    """Whether two atoms of positive weight are at most a scale apart."""
    points = mu.points[mu.log_weights > -math.inf]
    return any(bool((rows != columns).any()) for rows, columns in _close(points, scale))


def _components(points: Tensor, scale: float) -> Tensor:
    """The number of each point's connected component, in the order of their first points."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    labels = np.arange(len(points))
    for rows, columns in _close(points, scale):
        edges = labels[rows.cpu().numpy()], labels[columns.cpu().numpy()]
        graph = coo_array((np.ones(len(rows), bool), edges), shape=(len(points), len(points)))
        labels = connected_components(graph, directed=False)[1][labels]
    return torch.as_tensor(labels, dtype=torch.int64, device=points.device)


def _close(points: Tensor, scale: float) -> Iterator[tuple[Tensor, Tensor]]:
    """The pairs of points at most a scale apart, a block of rows at a time."""
    size = max(1, _BLOCK // max(len(points), 1))
    for start in range(0, len(points), size):
        # Not by matrix products, whose cancellation is 1e-8 where clusters have collapsed.
        gaps = torch.cdist(
            points[start : start + size], points, compute_mode="donot_use_mm_for_euclid_dist"
        )
        rows, columns = (gaps <= scale).nonzero(as_tuple=True)
        yield rows + start, columns


def _log_sums(logs: Tensor, groups: Tensor, count: int) -> Tensor:
    """log Σ exp over each group, (count,)."""
    top = logs.new_full((count,), -math.inf).scatter_reduce(0, groups, logs, "amax")
    sums = logs.new_zeros(count).index_add_(0, groups, (logs - top[groups]).exp())
    return top + sums.log()
