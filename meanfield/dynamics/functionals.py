"""Functionals of a measure: its interaction energy, and its clusters."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meanfield.checks import (
    as_float_tensor,
    at_once,
    check_finite,
    check_same_kind,
    number,
    without_autocast,
)
from meanfield.habits import with_hints
from meanfield.measures import (
    ParticleMeasure,
    check_measure,
    close_pairs,
    merge_labelled,
    present_points,
)

_BLOCK = 2**22  # entries of a block of pairs: 32 MB in float64


@without_autocast
def log_energy(mu: ParticleMeasure, A: Tensor) -> Tensor:
    """log ∬ e^{⟨Ax, y⟩} dμ(x) dμ(y), shape (...): it neither overflows nor loses small values.

    With A symmetric and V = A the energy increases along the flow of attention, on spheres and in
    R^d. Unnormalised attention (`attention.normalizations.exponential`), A∫e^{⟨Ax,y⟩}y dμ(y), is
    the gradient of half the energy; the softmax divides it by ∫e^{⟨Ax,y⟩}dμ(y) ([GLPR23] for
    A = βI).

    Args:
        mu: μ.
        A: scores, shape (d, d).
    """
    A = as_float_tensor(A, "A", like=check_measure(mu).points)
    if A.shape != (mu.dim, mu.dim):
        raise ValueError(f"A: expected shape {(mu.dim, mu.dim)}, got {tuple(A.shape)}")
    check_finite(A, "A")
    check_same_kind(mu.points, "mu", A, "A")
    # Of absent rows alone a logarithm of a sum is −∞, and its gradient none.
    points, logs = present_points(mu), mu.log_weights.clamp_min(torch.finfo(mu.dtype).min / 4)
    queries = points @ A.mT
    size = max(1, at_once(_BLOCK, logs.device) // max(logs.numel(), 1))
    parts = []
    for rows, row_logs in zip(queries.split(size, -2), logs.split(size, -1), strict=True):
        scores = rows @ points.mT + logs[..., None, :] + row_logs[..., None]
        parts.append(scores.flatten(-2).logsumexp(-1))
    return torch.stack(parts).logsumexp(0)


@with_hints
def cluster_count(mu: ParticleMeasure, scale: float) -> Tensor:
    """How many clusters a measure has, shape (...) of its batch; positions are ignored.

    A cluster is what chains of steps of length at most the scale join (single linkage); atoms of
    weight 0 are in none. O(n²) time and O(n) memory, in any dimension.

    Args:
        mu: a measure.
        scale: atoms at most this far apart belong together, ≥ 0.

    Example:
        >>> cluster_count(ParticleMeasure([[0.0], [0.1], [5.0]]), 0.5)
        tensor(2)
    """
    scale = number(scale, "scale", least=0)
    if shape := check_measure(mu).batch_shape:
        counts = [cluster_count(one, scale) for one in mu]
        if not counts:
            return torch.zeros(shape, dtype=torch.int64, device=mu.device)
        return torch.stack(counts)
    merged, _ = merge_labelled(mu, scale, across_positions=True)
    return torch.tensor(merged.n_particles, device=mu.device)


def coalesced(mu: ParticleMeasure, scale: float) -> tuple[ParticleMeasure, Tensor]:
    """The measure with each small cluster as one atom at its barycentre, and the new numbers.

    Small are clusters whose diameter is at most the scale: a chain may be longer, and stays. So do
    atoms of weight 0. Positions are ignored: this is for maps that do not use them.
    """
    merged, labels = merge_labelled(mu, scale, across_positions=True)
    alive = labels >= 0
    sizes = labels[alive].bincount(minlength=merged.n_particles)
    pairs = torch.zeros_like(sizes)
    for rows, _ in close_pairs(mu.points[alive].detach(), scale):
        pairs += labels[alive][rows].bincount(minlength=merged.n_particles)
    small = pairs == sizes.square()
    alone = ~alive | ~small[labels]
    labels = torch.where(alone, small.sum() + alone.cumsum(0) - 1, (small.cumsum(0) - 1)[labels])
    points = torch.cat([merged.points[small], mu.points[alone]])
    logs = torch.cat([merged.log_weights[small], mu.log_weights[alone]])
    return ParticleMeasure(points, log_weights=logs), labels


def meets(mu: ParticleMeasure, scale: float) -> bool:
    """Whether two atoms of positive weight are at most a scale apart."""
    points = mu.points[mu.log_weights > -math.inf]
    return any(bool((rows != columns).any()) for rows, columns in close_pairs(points, scale))
