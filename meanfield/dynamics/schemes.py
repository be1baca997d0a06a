"""Explicit Runge–Kutta methods: their coefficients, and one step of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meanfield.dynamics.constraints import Velocity
from meanfield.measures import ParticleMeasure

FIXED = ("rk4", "euler")
ADAPTIVE = ("dopri5", "dop853")


class Tableau(NamedTuple):
    """The coefficients of an explicit method with s stages.

    Attributes:
        rows: stage i is at x + h Σⱼ aᵢⱼκⱼ, κⱼ the slopes of the stages before it.
        weights: b, of the slopes in the step x + h Σⱼ bⱼκⱼ.
        errors: one or two rows of s + 1 weights of the slopes, that at the end of the step last:
            estimates of the error of a step of length 1; none for methods without any.
        order: of the first estimate, of h.
    """

    rows: tuple[tuple[float, ...], ...]
    weights: tuple[float, ...]
    errors: tuple[tuple[float, ...], ...] = ()
    order: int = 0


@cache
def tableau(method: str) -> Tableau:
    """The coefficients of "rk4", "euler", "dopri5" or "dop853"; the last two are SciPy's."""
    if method == "rk4":
        return Tableau(((), (1 / 2,), (0.0, 1 / 2), (0.0, 0.0, 1.0)), (1 / 6, 1 / 3, 1 / 3, 1 / 6))
    if method == "euler":
        return Tableau(((),), (1.0,))
    from scipy.integrate import DOP853, RK45

    if method == "dopri5":
        return _from_arrays(RK45, [RK45.E])
    return _from_arrays(DOP853, [DOP853.E5, DOP853.E3])


def _from_arrays(kind: Any, errors: Sequence[Iterable[float]]) -> Tableau:
    rows = tuple(tuple(map(float, row[:i])) for i, row in enumerate(kind.A[: kind.n_stages]))
    weights = tuple(map(float, kind.B))
    return Tableau(
        rows, weights, tuple(tuple(map(float, e)) for e in errors), kind.error_estimator_order
    )


def stages(
    method: Tableau, velocity: Velocity, mu: ParticleMeasure, h: float, first: Tensor | None = None
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """One step from a measure, with the slope at its start if that is known.

    Returns:
        The points of each stage before retraction, the slopes there, and the end of the step,
        before retraction.
    """
    # Each stage evaluates attention at its own measure; with the first measure's the order is 1.
    reached, slopes = [], [] if first is None else [first]
    for row in method.rows:
        reached.append(stepped(mu.points, h, row, slopes))
        if len(slopes) < len(reached):
            slopes.append(velocity(mu.replace(velocity.constraint.retract(reached[-1]))).points)
    return reached, slopes, stepped(mu.points, h, method.weights, slopes)


def stepped(
    points: Tensor, h: float, weights: Sequence[float], slopes: Sequence[Tensor]
) -> Tensor:
    """x + h Σⱼ wⱼκⱼ."""
    for weight, slope in zip(weights, slopes, strict=False):
        if weight:
            points = torch.add(points, slope, alpha=h * weight)
    return points
