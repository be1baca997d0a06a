"""Weighted particle measures μ = Σᵢ aᵢ δ_{xᵢ} and what can be done to them without a distance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from meanfield.checks import (
    as_bool,
    as_float_tensor,
    check_finite,
    check_same_kind,
    count,
    describe,
    is_traced,
    number,
)
from meanfield.html import span, table

__all__ = [
    "Disintegration",
    "MeasureMap",
    "ParticleMeasure",
    "check_map",
    "check_measure",
    "disintegrate",
    "merge",
    "pushforward",
    "split",
    "stack",
]

# How far the total mass may be from 1 before it is refused; inside it, it is normalised.
_MASS_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-8}


@dataclass(frozen=True, eq=False, repr=False, init=False)
class ParticleMeasure:
    """A probability measure μ = Σᵢ aᵢ δ_{xᵢ} on R^d, or Σᵢ aᵢ δ_{(sᵢ, xᵢ)} on [0, 1] × R^d.

    Weights are kept as logarithms, so that an atom of weight e^{−900} is ordinary, and a ratio of
    two weights comes from the difference of their logarithms.

    Args:
        points: atoms xᵢ, shape (..., n, d), float32 or float64; leading axes are a batch.
        weights: masses aᵢ ≥ 0 with Σᵢ aᵢ = 1, shape (..., n) or broadcastable to it; uniform if
            neither weights nor log-weights are given. Weight 0 is absence: pad ragged batches
            with it.
        log_weights: log aᵢ in place of the weights; −inf is weight 0.
        positions: sᵢ in [0, 1], shape (..., n) or broadcastable to it, for masked attention
            and conditional transport. Equal positions are ties: they see each other.

    Raises:
        ValueError: wrong shapes, NaN or infinite entries, negative weights, weights that do not
            sum to 1, positions outside [0, 1], tensors on different devices.
        TypeError: dtypes that differ or are not float32 or float64.

    Example:
        >>> mu = ParticleMeasure([[0.0], [2.0]], log_weights=[0.0, -900.0])
        >>> mu
        ParticleMeasure(n_particles=2, dim=1, dtype=float64, log_weights in [-900, 0])
    """

    points: Tensor
    log_weights: Tensor
    positions: Tensor | None

    def __init__(
        self,
        points: Any,
        weights: Any = None,
        *,
        log_weights: Any = None,
        positions: Any = None,
    ) -> None:
        points = as_float_tensor(points, "points")
        if points.ndim < 2 or 0 in points.shape[-2:]:
            raise ValueError(
                "points: expected shape (..., n, d) with n ≥ 1 particles in dimension d ≥ 1, "
                f"got {tuple(points.shape)}"
            )
        check_finite(points, "points")
        if weights is not None and log_weights is not None:
            raise ValueError("expected weights or log_weights, got both; give one of them")
        logs = _log_weights(points, weights, log_weights)
        if positions is not None:
            positions = _per_particle(points, positions, "positions")
            _check_positions(positions)
        _fill(self, points, logs, positions)

    @classmethod
    def from_sequence(cls, points: Any) -> ParticleMeasure:
        """The measure of a token sequence (x₁, …, xₙ): uniform, token i at position i/n.

        Args:
            points: tokens, shape (..., n, d).
        """
        points = as_float_tensor(points, "points")
        n = points.shape[-2] if points.ndim >= 2 else 0
        positions = torch.arange(1, n + 1, dtype=points.dtype, device=points.device) / max(n, 1)
        return cls(points, positions=positions)

    @property
    def weights(self) -> Tensor:
        """aᵢ = exp(log aᵢ), shape (..., n); underflows to 0 below about e^{−745} in float64."""
        return self.log_weights.exp()

    @property
    def n_particles(self) -> int:
        """Number of atoms n."""
        return self.points.shape[-2]

    @property
    def dim(self) -> int:
        """Dimension d of the space."""
        return self.points.shape[-1]

    @property
    def batch_shape(self) -> torch.Size:
        """Leading axes: how many measures this is a batch of."""
        return self.points.shape[:-2]

    @property
    def dtype(self) -> torch.dtype:
        """float32 or float64."""
        return self.points.dtype

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self.points.device

    @property
    def is_positioned(self) -> bool:
        """Whether the atoms carry positions."""
        return self.positions is not None

    def mean(self) -> Tensor:
        """Σᵢ aᵢ xᵢ, shape (..., d)."""
        return (self.weights[..., None] * self.points).sum(-2)

    def to(self, *args: Any, **kwargs: Any) -> ParticleMeasure:
        """The same measure in another dtype or on another device (as `torch.Tensor.to`)."""
        moved = None if self.positions is None else self.positions.to(*args, **kwargs)
        points = self.points.to(*args, **kwargs)
        return _measure(points, self.log_weights.to(*args, **kwargs), moved)

    def replace(self, points: Tensor) -> ParticleMeasure:
        """The measure with its atoms moved to `points` (..., n, d'); weights and positions stay.

        Raises:
            ValueError: if `points` is not one point per atom.
        """
        own = self.points.dtype
        if not isinstance(points, Tensor) or points.dtype != own or points.is_sparse:
            what = points.dtype if isinstance(points, Tensor) else describe(points)
            raise TypeError(
                f"points: expected a dense tensor of {own}, the measure's own, got {what}; "
                "mu.to(dtype) changes all of a measure"
            )
        if points.ndim < 2 or points.shape[:-1] != self.points.shape[:-1]:
            raise ValueError(
                f"points: expected one point per particle, shape {tuple(self.points.shape[:-1])} "
                f"+ (d,), got {tuple(points.shape)}"
            )
        return _measure(points, self.log_weights, self.positions)

    def __getitem__(self, index: Any) -> ParticleMeasure:
        """One measure of a batch, or a part of the batch; indexes batch axes only."""
        if not self.batch_shape:
            raise IndexError(
                "expected a batch of measures to index, got one measure; its atoms are mu.points"
            )
        anchors = torch.arange(math.prod(self.batch_shape)).reshape(self.batch_shape)[index]
        if anchors.ndim > len(self.batch_shape):
            raise IndexError(f"too many new axes for batch shape {tuple(self.batch_shape)}")
        positions = None if self.positions is None else self.positions[index]
        return _measure(self.points[index], self.log_weights[index], positions)

    def __iter__(self) -> Iterator[ParticleMeasure]:
        """Over the first batch axis."""
        if not self.batch_shape:
            raise TypeError(
                "expected a batch of measures to go through, got one measure; its atoms are "
                "mu.points"
            )
        return (self[i] for i in range(self.batch_shape[0]))

    def _repr_html_(self) -> str:
        rows = [
            ("particles", self.n_particles),
            ("dimension", self.dim),
            ("batch", " × ".join(map(str, self.batch_shape)) or None),
            ("log-weights", span(self.log_weights)),
            ("positions", None if self.positions is None else span(self.positions)),
            ("tensors", f"{str(self.dtype).removeprefix('torch.')} on {self.device}"),
        ]
        return table("Particle measure", rows)

    def __repr__(self) -> str:
        parts = [f"n_particles={self.n_particles}", f"dim={self.dim}"]
        if self.batch_shape:
            parts.append(f"batch_shape={tuple(self.batch_shape)}")
        parts.append(f"dtype={str(self.dtype).removeprefix('torch.')}")
        if self.device.type != "cpu":
            parts.append(f"device={self.device}")
        if not is_traced(self.log_weights) and self.log_weights.numel():
            low, high = (float(x) for x in self.log_weights.detach().aminmax())
            span = "uniform" if high - low < 1e-6 else f"log_weights in [{low:.4g}, {high:.4g}]"
            parts.append(span)
        if self.is_positioned:
            parts.append("positioned")
        return f"ParticleMeasure({', '.join(parts)})"


# Whatever sends a measure to one with the same weights; what more it may say: `meanfield.Map`.
MeasureMap = Callable[[ParticleMeasure], ParticleMeasure]


def check_measure(mu: object, name: str = "mu", *, finite: bool = True) -> ParticleMeasure:
    """A measure whose atoms with mass are finite; a map may have made others.

    Raises:
        TypeError: no `ParticleMeasure`.
        ValueError: NaN or infinite atoms, unless they may be.
    """
    if not isinstance(mu, ParticleMeasure):
        raise TypeError(
            f"{name}: expected a ParticleMeasure, got {describe(mu)}; wrap points as "
            "ParticleMeasure(points) or ParticleMeasure.from_sequence(points)"
        )
    if not finite or is_traced(mu.points) or bool(torch.isfinite(mu.points.sum())):
        return mu
    lost = ~torch.isfinite(mu.points).all(-1) & (mu.log_weights > -math.inf)
    if bool(lost.any()):
        first = tuple(int(i) for i in lost.nonzero()[0])
        raise ValueError(
            f"{name}: expected finite points, got NaN or infinite ones at {int(lost.sum())} atoms "
            f"(the first at index {first}); the map that made them left the number range"
        )
    return mu


def check_map(F: object, name: str = "F") -> None:
    """Refuse what cannot be a map of measures; what it returns only a call can say.

    Raises:
        TypeError: no function, or a class in place of one of its objects.
    """
    if callable(F) and not isinstance(F, type):
        return
    made = "; SelfAttention(parameters) makes one" if hasattr(F, "query") else ""
    made = "; source.attention(layer) makes one" if hasattr(F, "attention") else made
    raise TypeError(f"{name}: expected a map of measures (a function), got {describe(F)}{made}")


def image_of(F: MeasureMap, mu: ParticleMeasure, name: str = "F") -> ParticleMeasure:
    """F(μ), or what a function that is no map of measures should have been.

    Raises:
        TypeError: it does not take a measure, or does not return one.
    """
    check_map(F, name)
    hint = "return mu.replace(points), or pushforward(T, mu) for a map of points T"
    try:
        image = F(mu)
    except (TypeError, AttributeError) as error:
        if str(error).partition(":")[2].startswith(" expected") or "expected a" in str(error):
            raise
        raise TypeError(
            f"{name}: expected a map that takes a ParticleMeasure, got {_named(F)}, which raised "
            f"{type(error).__name__}: {error}; {hint}"
        ) from error
    if not isinstance(image, ParticleMeasure):
        raise TypeError(
            f"{name}: expected a map that returns a ParticleMeasure, got {_named(F)}, which "
            f"returned {describe(image)}; {hint}"
        )
    return image


def _named(F: object) -> str:
    return getattr(F, "__name__", None) or type(F).__name__


class Disintegration(NamedTuple):
    """μ̄ = ∫ δ_s ⊗ μ^s dθ(s): the positions s, their log-masses log θ(s), the measures μ^s."""

    positions: Tensor
    log_masses: Tensor
    conditionals: tuple[ParticleMeasure, ...]


def pushforward(
    transport: Callable[..., Tensor], mu: ParticleMeasure, *, use_positions: bool = False
) -> ParticleMeasure:
    """T♯μ = Σᵢ aᵢ δ_{T(xᵢ)}; weights and positions stay.

    Args:
        transport: T, from points (..., n, d) to points (..., n, d'); with `use_positions`
            it is called as T(points, positions).
        mu: μ.
        use_positions: whether T takes the positions as its second argument.

    Raises:
        ValueError: if T does not return one point per particle, or positions are asked of a
            measure that has none.
    """
    check_measure(mu, finite=False)
    if not callable(transport) or isinstance(transport, type):
        raise TypeError(f"transport: expected a function of points, got {describe(transport)}")
    use_positions = as_bool(use_positions, "use_positions")
    if use_positions and mu.positions is None:
        raise ValueError("mu: expected a measure with positions, got one without")
    arguments = (mu.points, mu.positions) if use_positions else (mu.points,)
    try:
        return mu.replace(transport(*arguments))
    except (TypeError, AttributeError) as error:
        if "expected" in str(error):
            raise
        raise TypeError(
            f"transport: expected a function of points (..., n, d), got {_named(transport)}, "
            f"which raised {type(error).__name__}: {error}"
        ) from error


def disintegrate(mu: ParticleMeasure) -> Disintegration:
    """Disintegrate a positioned measure along its positions: μ̄ = ∫ δ_s ⊗ μ^s dθ(s).

    Positions are compared exactly. Atoms of weight 0 are dropped.

    Args:
        mu: a positioned measure without batch axes.

    Returns:
        The distinct positions in increasing order, shape (g,); log θ(s), shape (g,); and one
        probability measure on R^d per position.

    Raises:
        ValueError: if μ has no positions or has batch axes.
    """
    check_measure(mu)
    if mu.positions is None:
        raise ValueError("mu: expected a measure with positions, got one without")
    _refuse_batch(mu, "disintegrate")
    alive = mu.log_weights > -math.inf
    points, logs = mu.points[alive], mu.log_weights[alive]
    positions, group = mu.positions[alive].unique(sorted=True, return_inverse=True)
    masses, conditionals = [], []
    for g in range(len(positions)):
        inside = group == g
        masses.append(logs[inside].logsumexp(-1))
        conditionals.append(_measure(points[inside], logs[inside] - masses[-1], None))
    return Disintegration(positions, torch.stack(masses), tuple(conditionals))


def split(mu: ParticleMeasure, copies: int = 2) -> ParticleMeasure:
    """The same measure with each atom stored `copies` times at an equal share of its weight.

    The copies of atom i are neighbours: they stand at places i·copies, …, (i+1)·copies − 1.
    """
    copies, positions = count(copies, "copies"), check_measure(mu, finite=False).positions
    if positions is not None:
        positions = positions.repeat_interleave(copies, -1)
    logs = mu.log_weights.repeat_interleave(copies, -1) - math.log(copies)
    return _measure(mu.points.repeat_interleave(copies, -2), logs, positions)


def merge(mu: ParticleMeasure, atol: float = 0.0) -> ParticleMeasure:
    """The same measure with coinciding atoms stored once, in order of first appearance.

    Args:
        mu: a measure without batch axes. Positions, if any, must coincide exactly too.
        atol: atoms joined by a chain of steps of Euclidean length at most `atol` become one,
            at their barycentre. 0 joins equal points only and moves nothing.
    """
    atol = number(atol, "atol", least=0)
    _refuse_batch(check_measure(mu), "merge")
    alive = mu.log_weights > -math.inf
    points, logs = mu.points[alive], mu.log_weights[alive]
    positions = None if mu.positions is None else mu.positions[alive]
    labels = torch.as_tensor(_coincidence_labels(points, positions, atol), device=mu.device)
    groups = range(int(labels.max()) + 1)
    first = torch.stack([(labels == g).nonzero()[0, 0] for g in groups])
    merged_logs = torch.stack([logs[labels == g].logsumexp(-1) for g in groups])
    merged = points[first]
    if atol > 0:
        share = (logs - merged_logs[labels]).exp()[:, None]
        offsets = share * (points - merged[labels])
        merged = merged.index_add(0, labels, offsets)
    return _measure(merged, merged_logs, None if positions is None else positions[first])


def stack(measures: Sequence[ParticleMeasure]) -> ParticleMeasure:
    """A batch of measures of possibly different sizes; shorter ones are padded with weight 0."""
    if isinstance(measures, ParticleMeasure) or not isinstance(measures, Iterable):
        raise TypeError(f"measures: expected a list of measures, got {describe(measures)}")
    measures = [check_measure(mu, "measures", finite=False) for mu in measures]
    if not measures:
        raise ValueError("measures: expected at least one measure, got none")
    first = measures[0]
    for mu in measures[1:]:
        check_same_kind(first.points, "the first measure", mu.points, "a measure")
        same = (mu.dim, mu.batch_shape, mu.is_positioned)
        if same != (first.dim, first.batch_shape, first.is_positioned):
            raise ValueError(
                "measures: expected one dimension, one batch shape, and all or none with "
                f"positions, got {first!r} and {mu!r}"
            )
    n = max(mu.n_particles for mu in measures)
    logs = torch.stack([_padded(mu.log_weights, n, -math.inf) for mu in measures])
    # Padding repeats the first atom, so that whatever looks at points alone sees nothing new.
    points = torch.stack([_repeat_first(mu.points, n, -2) for mu in measures])
    if not first.is_positioned:
        return _measure(points, logs, None)
    positions = [_repeat_first(mu.positions, n, -1) for mu in measures if mu.positions is not None]
    return _measure(points, logs, torch.stack(positions))


def _fill(mu: ParticleMeasure, points: Tensor, logs: Tensor, positions: Tensor | None) -> None:
    object.__setattr__(mu, "points", points)
    object.__setattr__(mu, "log_weights", logs)
    object.__setattr__(mu, "positions", positions)


def _measure(points: Tensor, logs: Tensor, positions: Tensor | None) -> ParticleMeasure:
    """A measure from parts that are known to fit."""
    mu = object.__new__(ParticleMeasure)
    _fill(mu, points, logs, positions)
    return mu


def _per_particle(points: Tensor, values: Any, name: str) -> Tensor:
    tensor = as_float_tensor(values, name, like=points)
    check_same_kind(points, "points", tensor, name)
    shape = points.shape[:-1]
    if tensor.ndim == 0 or tensor.shape[-1] != shape[-1]:
        raise ValueError(
            f"{name}: expected one number per particle, shape {tuple(shape)} or (n,) with "
            f"n = {shape[-1]}, got {tuple(tensor.shape)}"
        )
    try:
        return tensor.expand(shape)
    except RuntimeError:
        raise ValueError(
            f"{name}: expected a shape that broadcasts to {tuple(shape)}, "
            f"got {tuple(tensor.shape)}"
        ) from None


def _log_weights(points: Tensor, weights: Any, log_weights: Any) -> Tensor:
    if weights is None and log_weights is None:
        n = points.shape[-2]
        return points.new_full((), -math.log(n)).expand(points.shape[:-1])
    if weights is not None:
        masses = _per_particle(points, weights, "weights")
        check_finite(masses, "weights")
        if not is_traced(masses) and bool((masses < 0).any()):
            raise ValueError(
                f"weights: expected numbers ≥ 0, got a smallest weight of {float(masses.min())}"
            )
        return _normalised(masses.log(), "weights")
    logs = _per_particle(points, log_weights, "log_weights")
    if not is_traced(logs) and bool((logs.isnan() | (logs == math.inf)).any()):
        raise ValueError(
            "log_weights: expected numbers below +inf (−inf is weight 0), got NaN/inf"
        )
    return _normalised(logs, "log_weights")


def _normalised(logs: Tensor, name: str) -> Tensor:
    log_total = logs.logsumexp(-1, keepdim=True)
    if not is_traced(logs):
        excess = torch.expm1(log_total.detach().double()).abs().max() if logs.numel() else 0.0
        if not float(excess) <= _MASS_TOLERANCE[logs.dtype]:
            totals = log_total.detach().double().exp().flatten()
            worst = float(totals[(totals - 1).abs().argmax()])
            hint = "divide them by their sum" if name == "weights" else "subtract their logsumexp"
            raise ValueError(f"{name}: expected a total mass of 1, got {worst!r}; {hint}")
    return logs - log_total


def _check_positions(positions: Tensor) -> None:
    check_finite(positions, "positions")
    if is_traced(positions) or not positions.numel():
        return
    low, high = (float(x) for x in positions.detach().aminmax())
    if low < 0 or high > 1:
        raise ValueError(
            f"positions: expected numbers in [0, 1], got a range of [{low}, {high}]; "
            "for a sequence of n tokens use i/n"
        )


def _refuse_batch(mu: ParticleMeasure, name: str) -> None:
    if mu.batch_shape:
        raise ValueError(
            f"{name}: expected a measure without batch axes, got batch shape "
            f"{tuple(mu.batch_shape)}; its parts are not of one size, so call it on each mu[i]"
        )


def _coincidence_labels(points: Tensor, positions: Tensor | None, atol: float) -> np.ndarray:
    """Group numbers in order of first appearance."""
    rows = points.detach().cpu().numpy()
    if positions is not None:
        rows = np.column_stack([positions.detach().cpu().numpy(), rows])
    rows = rows + 0.0  # −0.0 and 0.0 are one point
    if atol == 0:
        _, first, inverse = np.unique(rows, axis=0, return_index=True, return_inverse=True)
        labels, starts = inverse.reshape(-1), first
    else:
        labels = _chained(rows, atol, positioned=positions is not None)
        _, starts = np.unique(labels, return_index=True)
    rank = np.empty(len(starts), dtype=np.int64)
    rank[np.argsort(starts)] = np.arange(len(starts))
    return rank[labels]


def _chained(rows: np.ndarray, atol: float, *, positioned: bool) -> np.ndarray:
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components
    from scipy.spatial import cKDTree

    places = rows[:, 1:] if positioned else rows
    pairs = cKDTree(places).query_pairs(atol, output_type="ndarray")
    if positioned:
        pairs = pairs[rows[pairs[:, 0], 0] == rows[pairs[:, 1], 0]]
    n = len(rows)
    graph = coo_matrix((np.ones(len(pairs)), (pairs[:, 0], pairs[:, 1])), shape=(n, n))
    return connected_components(graph, directed=False)[1]


def _padded(values: Tensor, n: int, fill: float) -> Tensor:
    return torch.nn.functional.pad(values, (0, n - values.shape[-1]), value=fill)


def _repeat_first(values: Tensor, n: int, axis: int) -> Tensor:
    missing = n - values.shape[axis]
    filler = values.narrow(axis, 0, 1).repeat_interleave(missing, axis)
    return torch.cat([values, filler], axis)
