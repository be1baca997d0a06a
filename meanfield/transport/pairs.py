"""Two arguments of a distance, whatever they come as, made one pair of measures."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from meanfield.checks import (
    check_same_axes,
    check_same_columns,
    check_same_kind,
    describe,
    is_traced,
    to_host,
)
from meanfield.measure_arguments import MASS_TOLERANCE
from meanfield.measures import ParticleMeasure, stack

Measure = Any  # ParticleMeasure | Tensor | ndarray | DataFrame | (points, weights)


class Pair(NamedTuple):
    """Points (..., n, d), (..., m, d) and log-weights of two measures whose batch axes agree.

    NumPy arrays where both came as such (or as data frames), so that NumPy goes back; tensors
    otherwise.
    """

    x: Any
    y: Any
    log_a: Any
    log_b: Any

    @property
    def as_numpy(self) -> bool:
        """Whether NumPy goes back."""
        return isinstance(self.x, np.ndarray)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Leading axes, () for a single pair."""
        return tuple(self.log_a.shape[:-1])

    @property
    def is_single(self) -> bool:
        """Whether they are of single precision."""
        return int(self.x.dtype.itemsize) == 4

    @property
    def device(self) -> str:
        """Where the points are."""
        return "cpu" if self.as_numpy else str(self.x.device)

    @property
    def flat(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """x (B, n, d), y (B, m, d), log a (B, n), log b (B, m) in float64 on the CPU."""
        arrays = self if self.as_numpy else (to_host(t.double()) for t in self)
        axes = len(self.batch_shape)
        flat = (t.reshape(-1, *t.shape[axes:]) for t in arrays)
        x, y, log_a, log_b = (t.astype(np.float64, copy=False) for t in flat)
        return x, y, log_a, log_b


class Measures(NamedTuple):
    """Two measures of one kind whose batch axes have been broadcast."""

    mu: ParticleMeasure
    nu: ParticleMeasure
    as_numpy: bool

    @property
    def pair(self) -> Pair:
        """Their arrays."""
        mu, nu, as_numpy = self
        tensors = (mu.points, nu.points, mu.log_weights, nu.log_weights)
        return Pair(*(to_host(t) if as_numpy else t for t in tensors))


def as_pair(mu: Measure, nu: Measure, weights: tuple[Any, Any] | None = None) -> Pair:
    """Both arguments as arrays of one dtype, device and dimension, batch axes broadcast.

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
    a, b = _both(weights)
    first, second = _plain(mu, a), _plain(nu, b)
    if first is not None and second is not None and first[0].shape[1] == second[0].shape[1]:
        return Pair(first[0], second[0], first[1], second[1])
    return as_measures(mu, nu, weights).pair


def as_measures(mu: Measure, nu: Measure, weights: tuple[Any, Any] | None = None) -> Measures:
    """Both arguments as measures; arguments and errors as of `as_pair`."""
    a, b = _both(weights)
    check_same_columns(points_of(mu), "mu", points_of(nu), "nu")
    check_same_axes(points_of(mu), "mu", points_of(nu), "nu")
    has_tensors = any(isinstance(t, torch.Tensor) for t in (a, b))
    as_numpy = _is_numpy(mu) and _is_numpy(nu) and not has_tensors
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
        firsts = (measure.log_weights[..., 0] for measure in (mu, nu))
        batch = torch.broadcast_tensors(*firsts)[0].shape
    except RuntimeError:
        raise ValueError(
            f"expected batch shapes that broadcast, got {tuple(mu.batch_shape)} for mu and "
            f"{tuple(nu.batch_shape)} for nu"
        ) from None
    return Measures(mu.expand(*batch), nu.expand(*batch), as_numpy)


def _both(weights: Any) -> tuple[Any, Any]:
    if weights is None:
        return None, None
    if not isinstance(weights, (tuple, list)) or len(weights) != 2:
        got = (
            f"{len(weights)} entries" if isinstance(weights, (tuple, list)) else describe(weights)
        )
        raise ValueError(f"weights: expected a pair (a, b), got {got}")
    return weights[0], weights[1]


def _measure(value: Measure, weights: Any, name: str) -> ParticleMeasure:
    """The measure of one argument; of a list of clouds a batch, padded with atoms of weight 0."""
    sizes = {_size(entry) for entry in value} if isinstance(value, list) and value else {None}
    kinds = ParticleMeasure, tuple
    if None in sizes or (len(sizes) == 1 and not any(isinstance(t, kinds) for t in value)):
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


def _plain(value: Measure, weights: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """Points and log-weights of one cloud of NumPy arrays that is plainly right, otherwise None.

    A fast path: torch's checks take two thirds of a distance of 10 atoms, half of one of 100. What
    is not plainly right is left to `ParticleMeasure.of`, which says what is wrong with it.
    """
    is_pair = type(value) is tuple and len(value) == 2 and weights is None
    points, weights = value if is_pair else (value, weights)
    if not _is_plain(points) or points.ndim != 2 or not points.size:
        return None
    if not np.isfinite(points).all():
        return None
    points = points.copy()  # an answer holds them: a measure is a value
    if weights is None:
        return points, np.full(len(points), -math.log(len(points)))
    if not _is_plain(weights) or weights.shape != points.shape[:1] or not weights.min() > 0:
        return None
    if not abs(weights.sum() - 1) <= MASS_TOLERANCE[torch.float64]:
        return None
    return points, np.log(weights)  # a problem normalises them


def _is_plain(values: Any) -> bool:
    return type(values) is np.ndarray and values.dtype == np.float64


def _is_numpy(value: Measure) -> bool:
    """Whether the answer should be NumPy: arrays and data frames, beside weights and in lists.

    Weights that are a tensor may have a gradient, which NumPy would lose.
    """
    if isinstance(value, list) and value:
        return all(map(_is_numpy, value))
    if isinstance(value, tuple) and any(isinstance(t, torch.Tensor) for t in value):
        return False
    points = points_of(value)
    return isinstance(points, np.ndarray) or hasattr(points, "to_numpy")


def points_of(value: Measure) -> Any:
    """What was given for the points of a measure."""
    if isinstance(value, ParticleMeasure):  # of itself, each question for a member is slow
        return value.points
    return value[0] if isinstance(value, tuple) and value else value
