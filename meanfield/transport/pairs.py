"""Two arguments of a distance, whatever they come as, made one pair of measures."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from meanfield.checks import check_same_kind, describe, is_traced
from meanfield.measures import MASS_TOLERANCE, ParticleMeasure, stack

Measure = Any  # ParticleMeasure | Tensor | ndarray | DataFrame | (points, weights)


class Pair(NamedTuple):
    """Two measures of one kind whose batch axes have been broadcast."""

    mu: ParticleMeasure
    nu: ParticleMeasure
    as_numpy: bool  # both came as NumPy arrays (or data frames), so NumPy goes back


def as_pair(mu: Measure, nu: Measure, weights: tuple[Any, Any] | None = None) -> Pair:
    """Both arguments as measures: same dtype, device and dimension, batch axes broadcast.

    Args:
        mu: a `ParticleMeasure`; points (..., n, d) of a uniform measure as tensor, NumPy array,
            list or data frame; a pair (points, weights); or a list of clouds of any sizes, which
            is a batch.
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
    as_numpy = _is_numpy(mu) and _is_numpy(nu)
    first, second = _plain(mu, a), _plain(nu, b)
    if first is not None and second is not None and first.dim == second.dim:
        return Pair(first, second, as_numpy)
    mu, nu = _measure(mu, a, "mu"), _measure(nu, b, "nu")
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
    try:
        batch = torch.broadcast_shapes(mu.batch_shape, nu.batch_shape)
    except RuntimeError:
        raise ValueError(
            f"expected batch shapes that broadcast, got {tuple(mu.batch_shape)} for mu and "
            f"{tuple(nu.batch_shape)} for nu"
        ) from None
    return Pair(mu.expand(*batch), nu.expand(*batch), as_numpy)


def _measure(value: Measure, weights: Any, name: str) -> ParticleMeasure:
    """The measure of one argument; of a list of clouds a batch, padded with atoms of weight 0."""
    sizes = {_size(entry) for entry in value} if isinstance(value, list) and value else {None}
    if None in sizes or (len(sizes) == 1 and not isinstance(value[0], ParticleMeasure)):
        return ParticleMeasure.of(value, weights, name=name)
    if weights is not None:
        raise ValueError(
            f"weights: expected None for {name}, a list of clouds; give (points, weights) or a "
            "ParticleMeasure for each of them"
        )
    return stack([ParticleMeasure.of(t, name=f"{name}[{k}]") for k, t in enumerate(value)])


def _size(cloud: Any) -> int | None:
    """How many atoms an entry of a list has, if it is a cloud."""
    if isinstance(cloud, ParticleMeasure):
        return None if cloud.batch_shape else cloud.n_particles
    points = cloud[0] if isinstance(cloud, tuple) and len(cloud) == 2 else cloud
    is_array = isinstance(points, np.ndarray | torch.Tensor) and points.ndim == 2
    return len(points) if is_array else None


def _plain(value: Measure, weights: Any) -> ParticleMeasure | None:
    """The measure of one cloud of NumPy arrays that is plainly right, otherwise None.

    Every day's case: checks by torch take longer than transport between ten atoms. What is not
    plainly right is left to `ParticleMeasure.of`, which says what is wrong with it.
    """
    is_pair = type(value) is tuple and len(value) == 2 and weights is None
    points, weights = value if is_pair else (value, weights)
    if not _is_plain(points) or points.ndim != 2 or not points.size:
        return None
    if not np.isfinite(points).all():
        return None
    if weights is None:
        logs = np.full(len(points), -math.log(len(points)))
    else:
        if not _is_plain(weights) or weights.shape != points.shape[:1] or not weights.min() > 0:
            return None
        total = weights.sum()
        if not abs(total - 1) <= MASS_TOLERANCE[torch.float64]:
            return None
        logs = np.log(weights) - math.log(total)
    return ParticleMeasure.checked(torch.from_numpy(points), torch.from_numpy(logs))


def _is_plain(values: Any) -> bool:
    if type(values) is not np.ndarray or values.dtype != np.float64:
        return False
    return bool(values.flags.c_contiguous and values.flags.writeable)


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
    (mu, nu, _), axes = pair, len(pair.mu.batch_shape)
    tensors = (mu.points, nu.points, mu.log_weights, nu.log_weights)
    flat = (t.detach().reshape(-1, *t.shape[axes:]) for t in tensors)
    x, y, log_a, log_b = (t.double().cpu().numpy() for t in flat)
    return x, y, log_a, log_b


def _is_numpy(value: Measure) -> bool:
    """Whether the answer should be NumPy: arrays and data frames, also beside weights."""
    points = value[0] if isinstance(value, tuple) and value else value
    return isinstance(points, np.ndarray) or hasattr(points, "to_numpy")
