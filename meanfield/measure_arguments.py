"""What a measure is made of: points, weights, positions as they come in; draws from atoms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meanfield.checks import (
    as_generator,
    check_coordinates,
    check_finite,
    check_same_kind,
    is_single,
    is_traced,
)
from meanfield.copies import own_tensor

# Total masses this near 1 are normalised, others refused.
MASS_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-8}


def as_points(value: Any, name: str) -> Tensor:
    """Points (..., n, d) in memory of their own."""
    check_coordinates(value, name)
    points = own_tensor(value, name, ("particle", "feature"))
    if points.ndim < 2 or 0 in points.shape[-2:]:
        hint = f"; points on the line are {name}[:, None], and weights come second"
        raise ValueError(
            f"{name}: expected shape (..., n, d) with n ≥ 1 particles in dimension d ≥ 1, "
            f"got {tuple(points.shape)}{hint * (points.ndim == 1)}"
        )
    check_finite(points, name)
    return points


def per_particle(points: Tensor, values: Any, name: str) -> Tensor:
    """One number for each point, (..., n), from that shape or (n,), or of more batch axes."""
    tensor = own_tensor(values, name, ("particle",), like=points)
    if is_single(values) and points.dtype == torch.float64:
        tensor = tensor.double()  # no digit is lost
    check_same_kind(points, "points", tensor, name)
    shape = points.shape[:-1]
    if tensor.ndim == 0 or tensor.shape[-1] != shape[-1]:
        raise ValueError(
            f"{name}: expected one number per particle, shape {tuple(shape)} or (n,) with "
            f"n = {shape[-1]}, got {tuple(tensor.shape)}"
        )
    try:
        return torch.broadcast_tensors(tensor, points[..., 0])[0]
    except RuntimeError:
        raise ValueError(
            f"{name}: expected a shape that broadcasts to {tuple(shape)}, "
            f"got {tuple(tensor.shape)}"
        ) from None


def logs_of(points: Tensor, weights: Any, log_weights: Any, name: str = "weights") -> Tensor:
    """Log-weights (..., n) of mass 1, from weights, log-weights or neither."""
    if log_weights is not None:
        logs = per_particle(points, log_weights, "log_weights")
        if not is_traced(logs) and bool((logs.isnan() | (logs == math.inf)).any()):
            raise ValueError(
                "log_weights: expected numbers below +inf (−inf is weight 0), got NaN/inf"
            )
        return _normalised(logs, log_weights, "log_weights", "subtract their logsumexp")
    if weights is None:
        n = points.shape[-2]
        return points.new_full((), -math.log(n)).expand(points.shape[:-1])
    # Arrays are of double precision: beside points in single they keep their range.
    like = points if isinstance(weights, Tensor) else points[..., :1].double()
    masses = per_particle(like, weights, name)
    check_finite(masses, name)
    if not is_traced(masses) and bool((masses < 0).any()):
        raise ValueError(
            f"{name}: expected numbers ≥ 0, got a smallest weight of {float(masses.min())}"
        )
    by = "weights.sum()" if np.ndim(weights) == 1 else "weights.sum(-1, keepdims=True)"
    cure = f"divide them by their sum: weights / {by}"
    present = masses > 0  # at 0 the logarithm has no derivative
    logs = torch.where(present, torch.where(present, masses, 1.0).log(), -math.inf)
    return _normalised(logs, weights, name, cure).to(points.dtype)


def _normalised(logs: Tensor, given: Any, name: str, cure: str) -> Tensor:
    # Arrays in single precision sum to 1 as far as they can, beside points in double too.
    tolerance = MASS_TOLERANCE[torch.float32 if is_single(given) else logs.dtype]
    # In double precision, so that the same weights in another order stay the same.
    log_total = logs.double().logsumexp(-1, keepdim=True)
    if not is_traced(logs):
        excess = torch.expm1(log_total.detach())
        worst = float(excess.flatten()[excess.abs().argmax()]) if logs.numel() else 0.0
        if not abs(worst) <= tolerance:
            cure = cure if worst > -1 else "give one atom at least some of it"
            raise ValueError(f"{name}: expected a total mass of 1, got {1 + worst:.10g}; {cure}")
    return (logs - log_total).to(logs.dtype)


def check_positions(positions: Tensor) -> None:
    """Refuse positions outside [0, 1]."""
    check_finite(positions, "positions")
    if not is_traced(positions) and bool(((positions < 0) | (positions > 1)).any()):
        low, high = (float(x) for x in positions.detach().aminmax())
        raise ValueError(
            f"positions: expected numbers in [0, 1], got a range of [{low}, {high}]; "
            "for a sequence of n tokens use i/n"
        )


def drawn(masses: Tensor, n: int, generator: Any) -> Tensor:
    """Numbers of atoms, (..., n), drawn independently by their masses (..., k)."""
    generator = as_generator(generator)
    shape, device = (*masses.shape[:-1], n), generator.device
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64, device=device)
    shares = masses.detach().double().cumsum(-1)
    shares = (shares / shares[..., -1:]).contiguous()
    # To the right: a draw of 0 passes absent atoms. All draws are below 1, the last share.
    return torch.searchsorted(shares, uniform.to(masses.device), right=True)
