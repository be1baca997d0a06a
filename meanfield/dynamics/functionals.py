"""Functionals of a measure: size, spread, interaction energy. Each takes batches."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meanfield.checks import as_float_tensor, at_once, check_finite, without_autocast
from meanfield.linalg.vectors import power_of_two
from meanfield.measures import ParticleMeasure, check_measure

_BLOCK = 2**22  # entries of a block of pairs: 32 MB in float64


def diameter(mu: ParticleMeasure) -> Tensor:
    """Largest |xᵢ − xⱼ| among atoms with weight, shape (...); blocks of pairs, O(n) memory."""
    points, unit = _about_the_heaviest(check_measure(mu))
    size = max(1, at_once(_BLOCK, points.device) // max(points[..., 0].numel(), 1))
    parts = [
        torch.cdist(rows, points, compute_mode="donot_use_mm_for_euclid_dist").amax((-2, -1))
        for rows in points.split(size, -2)
    ]
    return torch.stack(parts).amax(0) * unit


@without_autocast
def covariance(mu: ParticleMeasure) -> Tensor:
    """Σᵢ aᵢ (xᵢ − m)(xᵢ − m)ᵀ about the mean m, shape (..., d, d)."""
    points, unit = _about_the_heaviest(check_measure(mu))
    weights = mu.weights[..., None]
    centred = points - (weights * points).sum(-2, keepdim=True)
    return (weights * centred).mT @ centred * unit[..., None, None] ** 2


@without_autocast
def log_energy(mu: ParticleMeasure, A: Tensor) -> Tensor:
    """log ∬ e^{⟨Ax, y⟩} dμ(x) dμ(y), shape (...): it neither overflows nor loses small values.

    With A symmetric and V = A the energy increases along the flow of attention, on spheres and in
    R^d. Unnormalised attention (`attention.normalizations.exponential`) is its gradient
    A∫e^{⟨Ax,y⟩}y dμ(y); the softmax divides it by ∫e^{⟨Ax,y⟩}dμ(y) ([GLPR23] for A = βI).

    Args:
        mu: μ.
        A: scores, shape (d, d).
    """
    A = as_float_tensor(A, "A", like=mu.points)
    if A.shape != (mu.dim, mu.dim):
        raise ValueError(f"A: expected shape {(mu.dim, mu.dim)}, got {tuple(A.shape)}")
    check_finite(A, "A")
    queries, logs = mu.points @ A.mT, mu.log_weights
    size = max(1, at_once(_BLOCK, logs.device) // max(logs.numel(), 1))
    parts = []
    for rows, row_logs in zip(queries.split(size, -2), logs.split(size, -1), strict=True):
        scores = rows @ mu.points.mT + logs[..., None, :] + row_logs[..., None]
        parts.append(scores.flatten(-2).logsumexp(-1))
    return torch.stack(parts).logsumexp(0)


def _about_the_heaviest(mu: ParticleMeasure) -> tuple[Tensor, Tensor]:
    """Atoms seen from the heaviest one, (..., n, d), and their unit, a power of two, (...).

    A crowd far from 0 keeps its digits: atoms at one place are exactly 0. In this unit squares
    neither vanish nor overflow. Absent atoms do not count: they are put where the heaviest is.
    """
    heaviest = mu.log_weights.argmax(-1)[..., None, None]
    origin = mu.points.take_along_dim(heaviest, -2)
    points = mu.points.where((mu.log_weights > -math.inf)[..., None], origin) - origin
    unit = power_of_two(points.detach().abs().amax((-2, -1)))
    return points / unit[..., None, None], unit
