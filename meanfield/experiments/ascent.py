"""Token sequences in a ball with a larger Euclidean constant than the one to start from."""

from __future__ import annotations

import torch
from torch import Tensor

from meanfield.attention import SelfAttention
from meanfield.lipschitz import LocalLipschitz, local_lipschitz
from meanfield.measures import ParticleMeasure

_SMALLEST_STEP = 1e-4  # of the radius


def climb(
    F: SelfAttention, mu: ParticleMeasure, radius: float, *, steps: int
) -> tuple[ParticleMeasure, LocalLipschitz]:
    """Projected ascent of ‖Df(X)‖ over tokens in B_R, at uniform weights.

    With the top singular vectors u, v held fixed, the gradient of the norm is that of
    ⟨u, Df(X)v⟩. A step that does not climb is taken back and halved, so that the answer is never
    below the start. It is a lower bound of the supremum and nothing more;
    `lipschitz.worst_case` searches over weights too, for the Wasserstein constant.

    Args:
        F: the layer.
        mu: uniform measure of a sequence in B_R, without batch axes.
        radius: R.
        steps: norms to compute at most.

    Returns:
        The best sequence and its constant.
    """
    best = _constant(F, mu)
    length, direction = 0.5, _gradient(F, mu, best)
    for _ in range(steps):
        if length < _SMALLEST_STEP or not bool(torch.isfinite(direction).all()):
            break
        moved = mu.replace(_projected(mu.points + length * radius * direction, radius))
        constant = _constant(F, moved)
        if float(constant.value) > float(best.value) and bool(constant.converged):
            mu, best = moved, constant
            direction = _gradient(F, mu, best)
            length = min(2 * length, 1.0)
        else:
            length /= 2
    return mu, best


def _constant(F: SelfAttention, mu: ParticleMeasure) -> LocalLipschitz:
    return local_lipschitz(F, mu, geometry="euclidean", strict=False)


def _gradient(F: SelfAttention, mu: ParticleMeasure, constant: LocalLipschitz) -> Tensor:
    """Gradient of the norm, scaled so that the token that moves most moves by one."""
    v = constant.direction

    def tangent(X: Tensor) -> Tensor:
        return torch.func.jvp(lambda Y: F(mu.replace(Y)).points, (X,), (v,))[1]

    image = tangent(mu.points)
    u = image / torch.linalg.vector_norm(image)
    gradient = torch.func.grad(lambda X: (u * tangent(X)).sum())(mu.points)
    return gradient / torch.linalg.vector_norm(gradient, dim=-1).amax()


def _projected(points: Tensor, radius: float) -> Tensor:
    norms = torch.linalg.vector_norm(points, dim=-1, keepdim=True)
    return points * (radius / norms.clamp_min(radius))
