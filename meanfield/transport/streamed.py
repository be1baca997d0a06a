"""The Sinkhorn divergence of clouds too large for a matrix of costs, without KeOps.

The algorithm is GeomLoss's own (symmetric, annealed: [Feydy 2020] Algorithm 3.5), so that the
answer is the one of its tensorised backend up to rounding; here costs are made for a block of
rows at a time, forward and backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["streamed_divergence"]


def streamed_divergence(
    a: Tensor, x: Tensor, b: Tensor, y: Tensor, *, blur: float, scaling: float, entries: int
) -> Tensor:
    """S_ε of the cost ½‖x − y‖² at ε = blur², as ``geomloss.SamplesLoss("sinkhorn", p=2)``.

    Differentiable in points and weights by the envelope theorem: the potentials are held fixed
    but for one last step.

    Args:
        a: weights (n,).
        x: points (n, d), at least two.
        b: weights (m,).
        y: points (m, d).
        blur: √ε, in the unit of the points.
        scaling: ratio of successive annealing lengths.
        entries: coordinate differences held at once.
    """
    with torch.no_grad():
        potentials, epsilons = None, _schedule(x, y, blur, scaling)
        logs = a.log(), b.log()
        for epsilon in [epsilons[0], *epsilons]:
            new = _step((x, y), logs, potentials, epsilon, entries)
            # The first step starts the potentials; later ones are averaged, for stability.
            potentials = new if potentials is None else [
                (old + moved) / 2 for old, moved in zip(potentials, new, strict=True)
            ]  # fmt: skip
    assert potentials is not None
    f_ba, g_ab, f_aa, g_bb = _step((x, y), logs, potentials, epsilons[-1], entries)
    return (a * (f_ba - f_aa)).sum() + (b * (g_ab - g_bb)).sum()


def _step(
    points: tuple[Tensor, Tensor],
    logs: tuple[Tensor, Tensor],
    potentials: list[Tensor] | None,
    epsilon: float,
    entries: int,
) -> list[Tensor]:
    """The potentials f of μ against ν, g of ν against μ, and of each against itself."""
    (x, y), (log_a, log_b) = points, logs
    f_ba, g_ab, f_aa, g_bb = potentials or [x.new_zeros(())] * 4
    sides = ((x, y, log_b, g_ab), (y, x, log_a, f_ba), (x, x, log_a, f_aa), (y, y, log_b, g_bb))
    return [
        _Softmin.apply(rows, columns.detach(), (log + h / epsilon).detach(), epsilon, entries)
        for rows, columns, log, h in sides
    ]


class _Softmin(torch.autograd.Function):
    """−ε log Σ_j exp(h_j − ½‖xᵢ − y_j‖²/ε) for every i; its gradient in x is xᵢ − Σ_j Pᵢⱼ y_j."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, h: Tensor, epsilon: float, entries: int) -> Tensor:
        ctx.save_for_backward(x, y, h)
        ctx.settings = epsilon, entries
        scores = _scores(x, y, h, epsilon, entries)
        return torch.cat([-epsilon * block.logsumexp(1) for block in scores])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        x, y, h = ctx.saved_tensors
        means = torch.cat([block.softmax(1) @ y for block in _scores(x, y, h, *ctx.settings)])
        return grad[:, None] * (x - means), None, None, None, None


def _scores(x: Tensor, y: Tensor, h: Tensor, epsilon: float, entries: int) -> Iterator[Tensor]:
    """h_j − ½‖xᵢ − y_j‖²/ε by direct differences, a block of rows at a time."""
    for rows in x.split(max(1, entries // y.numel())):
        yield h - (rows[:, None, :] - y).square_().sum(-1).div_(2 * epsilon)


def _schedule(x: Tensor, y: Tensor, blur: float, scaling: float) -> list[float]:
    """ε from the squared diameter of the bounding box down to blur², a ratio of scaling²."""
    both = torch.cat([x, y])
    diameter = float(torch.linalg.vector_norm(both.amax(0) - both.amin(0)))
    if diameter <= 0:
        return [blur**2]
    steps = math.ceil((math.log(blur) - math.log(diameter)) / math.log(scaling))
    lengths = [diameter * scaling**k for k in range(max(0, steps))]
    return [diameter**2, *(length**2 for length in lengths), blur**2]
