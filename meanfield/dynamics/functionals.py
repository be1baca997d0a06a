"""The interaction energy of a measure, which attention increases."""

from __future__ import annotations

import torch
from torch import Tensor

from meanfield.checks import as_float_tensor, at_once, check_finite, without_autocast
from meanfield.measures import ParticleMeasure, check_measure

_BLOCK = 2**22  # entries of a block of pairs: 32 MB in float64


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
    A = as_float_tensor(A, "A", like=check_measure(mu).points)
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
