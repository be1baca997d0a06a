"""What a caller may give: measures, points, points with weights, NumPy arrays, data frames."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from meanfield.checks import as_float_tensor, check_same_kind, describe, is_traced
from meanfield.measures import ParticleMeasure, check_measure

__all__ = ["Measure", "Pair", "as_pair", "flat_arrays", "refuse_cost_matrix"]

Measure = Any  # ParticleMeasure | Tensor | ndarray | DataFrame | (points, weights)

_MASS_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-8}  # as ParticleMeasure's


class Pair(NamedTuple):
    """Two measures of one kind whose batch axes have been broadcast."""

    mu: ParticleMeasure
    nu: ParticleMeasure
    as_numpy: bool  # both came as NumPy arrays (or data frames), so NumPy goes back


def as_pair(mu: Measure, nu: Measure, weights: tuple[Any, Any] | None = None) -> Pair:
    """Both arguments as measures: same dtype, device and dimension, batch axes broadcast.

    Args:
        mu: a `ParticleMeasure`; points (..., n, d) of a uniform measure as tensor, NumPy array,
            list or data frame; or a pair (points, weights).
        nu: the same.
        weights: (a, b) for points given without weights; None for a uniform one.

    Raises:
        TypeError: dtypes that differ or are not float32 or float64.
        ValueError: dimensions, devices or batch shapes that do not fit; weights that do not sum
            to 1; atoms with mass that are not finite; empty clouds.
    """
    if weights is not None and (not isinstance(weights, (tuple, list)) or len(weights) != 2):
        got = (
            f"{len(weights)} entries" if isinstance(weights, (tuple, list)) else describe(weights)
        )
        raise ValueError(f"weights: expected a pair (a, b), got {got}")
    a, b = weights or (None, None)
    (mu, mu_is_numpy), (nu, nu_is_numpy) = _as_measure(mu, a, "mu"), _as_measure(nu, b, "nu")
    check_same_kind(mu.points, "mu", nu.points, "nu")
    if mu.dim != nu.dim:
        raise ValueError(
            f"nu: expected points in the dimension of mu, d = {mu.dim}, got d = {nu.dim}"
        )
    if is_traced(mu.points) or is_traced(nu.points):
        raise RuntimeError(
            "expected measures with values, got traced ones: an optimal plan is looked for among "
            "values, which torch.func and torch.compile hide; take the gradient by requires_grad "
            "and backward()"
        )
    for measure, name in ((mu, "mu"), (nu, "nu")):
        check_measure(measure, name)
    as_numpy = mu_is_numpy and nu_is_numpy
    if mu.batch_shape == nu.batch_shape:
        return Pair(mu, nu, as_numpy)
    try:
        batch = torch.broadcast_shapes(mu.batch_shape, nu.batch_shape)
    except RuntimeError:
        raise ValueError(
            f"expected batch shapes that broadcast, got {tuple(mu.batch_shape)} for mu and "
            f"{tuple(nu.batch_shape)} for nu"
        ) from None
    return Pair(_expanded(mu, batch), _expanded(nu, batch), as_numpy)


def refuse_cost_matrix(extra: tuple[Any, ...], name: str) -> None:
    """Meet the habit ``ot.emd2(a, b, M)`` with the call that does the same here."""
    if extra:
        raise TypeError(
            f"{name}: expected two measures, got {2 + len(extra)} positional arguments. In the "
            f"place of POT's emd2(a, b, M) write {name}((x, a), (y, b)) or {name}(x, y, "
            "weights=(a, b)), with points x (n, d) and y (m, d): costs are made from the points, "
            "since a matrix of squares has lost the digits of small displacements"
        )


def flat_arrays(pair: Pair) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """x (B, n, d), y (B, m, d), log a (B, n), log b (B, m) in float64 on the CPU."""

    def array(tensor: Tensor, axes: int) -> np.ndarray:
        flat = tensor.detach().reshape(-1, *tensor.shape[tensor.ndim - axes :])
        return flat.double().cpu().numpy()

    return (
        array(pair.mu.points, 2),
        array(pair.nu.points, 2),
        array(pair.mu.log_weights, 1),
        array(pair.nu.log_weights, 1),
    )


def _as_measure(value: Measure, weights: Any, name: str) -> tuple[ParticleMeasure, bool]:
    """The measure, and whether it came as NumPy."""
    if isinstance(value, ParticleMeasure):
        if weights is not None:
            raise ValueError(f"weights: expected None for {name}, which is a measure with weights")
        return value, False
    if isinstance(value, tuple) and len(value) == 2 and np.ndim(value[0]) >= 2:
        if weights is not None:
            raise ValueError(f"weights: expected None for {name}, which comes with its own")
        value, weights = value
    is_numpy = _is_numpy(value)
    points = as_float_tensor(value, name)
    if points.ndim == 1:
        raise ValueError(
            f"{name}: expected points of shape (..., n, d), got a vector of shape "
            f"{tuple(points.shape)}; points on the line are {name}[:, None], and weights go "
            "beside points: (points, weights)"
        )
    if points.ndim < 2 or 0 in points.shape[-2:]:
        raise ValueError(
            f"{name}: expected points of shape (..., n, d) with n ≥ 1 and d ≥ 1, "
            f"got {tuple(points.shape)}"
        )
    if weights is None:
        n = points.shape[-2]
        return _measure(points, points.new_full(points.shape[:-1], -math.log(n)), None), is_numpy
    weights = as_float_tensor(weights, f"weights of {name}", like=points)
    _check_mass(weights, points, name)
    return ParticleMeasure(points, weights), is_numpy


def _is_numpy(value: Any) -> bool:
    """Whether the answer should be NumPy: arrays, and data frames of them."""
    return isinstance(value, np.ndarray) or hasattr(value, "to_numpy")


def _check_mass(weights: Tensor, points: Tensor, name: str) -> None:
    total = weights.detach().sum(-1).reshape(-1)
    missing = (total - 1).abs()
    if bool((missing > _MASS_TOLERANCE[points.dtype]).any()):
        worst = float(total[missing.argmax()])
        axis = "" if weights.ndim == 1 else "-1, keepdims=True"
        raise ValueError(
            f"weights of {name}: expected a total mass of 1, got {worst:g}; "
            f"pass weights / weights.sum({axis})"
        )


def _expanded(mu: ParticleMeasure, batch: torch.Size) -> ParticleMeasure:
    positions = None if mu.positions is None else mu.positions.expand(*batch, -1)
    points, logs = mu.points.expand(*batch, -1, -1), mu.log_weights.expand(*batch, -1)
    return _measure(points, logs, positions)


def _measure(points: Tensor, logs: Tensor, positions: Tensor | None) -> ParticleMeasure:
    """What has been checked already."""
    made = object.__new__(ParticleMeasure)
    for name, value in (("points", points), ("log_weights", logs), ("positions", positions)):
        object.__setattr__(made, name, value)
    return made
