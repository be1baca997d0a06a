"""Weighted particle measures μ = Σᵢ aᵢ δ_{xᵢ}: construction, pushforward, splitting, merging."""

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
    at_once,
    called,
    check_alongside,
    check_move,
    check_positioned,
    check_same_kind,
    count,
    describe,
    is_traced,
    number,
    to_host,
    without_autocast,
)
from meanfield.habits import Hinted, NoNumber, is_function, with_hints
from meanfield.html import html_table, span
from meanfield.measure_arguments import as_points, check_positions, drawn, logs_of, per_particle
from meanfield.results.labels import copied

__all__ = [
    "ParticleMeasure",
    "disintegrate",
    "merge",
    "mixture",
    "pushforward",
    "split",
    "stack",
]

_NO_BATCH = "expected a batch of measures, got one measure; its atoms are mu.points, mu.weights"
_BLOCK = 2**22  # distances held at once: 32 MB in float64


@dataclass(frozen=True, eq=False, repr=False, init=False)
class ParticleMeasure(NoNumber, Hinted):
    """A probability measure μ = Σᵢ aᵢ δ_{xᵢ} on R^d, or Σᵢ aᵢ δ_{(sᵢ, xᵢ)} on [0, 1] × R^d.

    Weights are kept as logarithms, so that an atom of weight e^{−900} loses no digits, and a ratio
    of two weights is computed from the difference of their logarithms. Arrays and tensors that
    come in are copied: a measure is a value. Gradients go to what it was made of until that is
    changed in place, as by an optimiser: make it anew at each step. ``mu == nu`` asks whether they
    are one object, `meanfield.w2` whether they are one measure.

    Args:
        points: atoms xᵢ, shape (..., n, d), float32 or float64; leading axes are a batch. Axes of
            xarray that are called particle and feature are found by name.
        weights: masses aᵢ ≥ 0 with Σᵢ aᵢ = 1, shape (..., n), or (n,) for all of a batch;
            uniform if neither weights nor log-weights are given. With more batch axes than the
            points: many measures on one cloud. Weight 0 is absence: pad ragged batches with it.
        log_weights: log aᵢ in place of the weights; −inf is weight 0.
        positions: sᵢ in [0, 1], shape (..., n), or (n,) for all of a batch, for masked attention
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

    _instead = "take mu.points or mu.weights (mixture adds, mu.replace moves atoms)"
    points: Tensor
    log_weights: Tensor
    positions: Tensor | None

    @with_hints
    def __init__(
        self,
        points: Any,
        weights: Any = None,
        *,
        log_weights: Any = None,
        positions: Any = None,
    ) -> None:
        if weights is not None and log_weights is not None:
            raise ValueError("expected weights or log_weights, got both; give one of them")
        given = {"weights": weights, "log_weights": log_weights, "positions": positions}
        for name, each in given.items():
            check_alongside(points, "points", each, name)
        points = as_points(points, "points")
        logs = logs_of(points, weights, log_weights)
        if positions is not None:
            positions = per_particle(logs[..., None], positions, "positions")
            check_positions(positions)
            logs = logs.expand(positions.shape)
        points = points.expand(*logs.shape, -1)
        vars(self).update(points=points, log_weights=logs, positions=positions)

    @classmethod
    def of(cls, value: Any, weights: Any = None, *, name: str = "mu") -> ParticleMeasure:
        """Convert to a measure; points get equal weights.

        Args:
            value: a `ParticleMeasure`; points (..., n, d) as a tensor, NumPy array, list or data
                frame; or a pair (points, weights).
            weights: masses of the points, shape (..., n), if `value` has none; None if equal.
            name: what an error calls the value.

        Raises:
            TypeError, ValueError: as `ParticleMeasure`; weights given twice; a measure that a map
                has left with NaN or infinite atoms.

        Example:
            >>> ParticleMeasure.of(([[0.0], [2.0]], [0.25, 0.75])).weights
            tensor([0.2500, 0.7500], dtype=torch.float64)
        """
        is_pair = isinstance(value, tuple) and len(value) == 2
        if weights is not None and (is_pair or isinstance(value, ParticleMeasure)):
            raise ValueError(
                f"weights: expected None for {name}, which comes with its own, "
                f"got {describe(weights)}"
            )
        if isinstance(value, ParticleMeasure):
            return check_measure(value, name)
        value, weights = value if is_pair else (value, weights)
        check_alongside(value, name, weights, f"weights of {name}")
        points = as_points(value, name)
        logs = logs_of(points, weights, None, f"weights of {name}")
        return _measure(points.expand(*logs.shape, -1), logs, None)

    @classmethod
    @with_hints
    def from_sequence(cls, points: Any) -> ParticleMeasure:
        """The measure of a token sequence (x₁, …, xₙ): uniform, token i at position i/n.

        Args:
            points: tokens, shape (..., n, d).
        """
        points = as_points(points, "points")
        n = points.shape[-2]
        positions = torch.arange(1, n + 1, dtype=points.dtype, device=points.device) / n
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
        """Leading axes: the shape of the batch of measures, () for a single one."""
        return self.points.shape[:-2]

    @property
    def dtype(self) -> torch.dtype:
        """float32 or float64."""
        return self.points.dtype

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.points.device

    @property
    def is_positioned(self) -> bool:
        """Whether the atoms carry positions."""
        return self.positions is not None

    def mean(self) -> Tensor:
        """Σᵢ aᵢ xᵢ, shape (..., d)."""
        return (self.weights[..., None] * present_points(self)).sum(-2)

    @without_autocast
    def covariance(self) -> Tensor:
        """Σᵢ aᵢ (xᵢ − m)(xᵢ − m)ᵀ with the mean m, shape (..., d, d)."""
        weights = self.weights[..., None]
        at = present_points(self) - self.mean()[..., None, :]
        # Far from the origin the mean is rounded; what it is off by is a mean of small numbers.
        at = at - (weights * at).sum(-2, keepdim=True)
        return at.mT @ (weights * at)

    def to(self, *args: Any, **kwargs: Any) -> ParticleMeasure:
        """The same measure in another dtype or on another device (as `torch.Tensor.to`)."""
        check_move(self.points, *args, **kwargs)
        return self._with(self.points.to(*args, **kwargs), lambda t: t.to(*args, **kwargs))

    def detach(self) -> ParticleMeasure:
        """The same measure without the derivatives that its tensors record."""
        return self._with(self.points.detach(), lambda t: t.detach())

    @with_hints
    def sample(self, n: int, *, generator: Any = None) -> ParticleMeasure:
        """The empirical measure of n independent draws: n atoms of equal weight.

        Atoms keep their positions. W₂(μ, μⁿ)² falls as n^{-1/2} for n beyond the number of atoms.

        Args:
            n: how many draws, of each measure of a batch.
            generator: a `torch.Generator` or an integer seed; torch's own if None.
        """
        chosen = drawn(self.weights, count(n, "n"), generator)
        points = self.points.take_along_dim(chosen[..., None], -2)
        logs, at = torch.full_like(points[..., 0], -math.log(n)), self.positions
        return _measure(points, logs, at if at is None else at.take_along_dim(chosen, -1))

    def __deepcopy__(self, memo: dict[int, Any]) -> ParticleMeasure:
        return copied(self, memo)

    def expand(self, *batch: int) -> ParticleMeasure:
        """The measure repeated along batch axes, without a copy (as `torch.Tensor.expand`)."""
        return self._with(self.points.expand(*batch, -1, -1), lambda t: t.expand(*batch, -1))

    @with_hints
    def replace(self, points: Tensor) -> ParticleMeasure:
        """The measure with its atoms moved to `points` (..., n, d'); weights and positions stay.

        The tensor is kept, not copied: this is for images that were made for it.

        Raises:
            ValueError: if `points` is not one point per atom.
        """
        own = self.points.dtype
        if not isinstance(points, Tensor) or points.dtype != own or points.is_sparse:
            what = points.dtype if isinstance(points, Tensor) else describe(points)
            raise TypeError(
                f"points: expected a dense tensor of {own}, the measure's own, got {what}; "
                f"torch.as_tensor(points, dtype={own}) is one"
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
            raise IndexError(_NO_BATCH)
        anchors = torch.arange(math.prod(self.batch_shape), device=self.device).reshape(
            self.batch_shape
        )[index]
        if anchors.ndim > len(self.batch_shape):
            raise IndexError(f"too many new axes for batch shape {tuple(self.batch_shape)}")
        places = index if isinstance(index, tuple) else (index,)
        rest = [slice(None)] * any(one is ... for one in places)  # which is of batch axes alone
        return self._with(self.points[*places, *rest, *rest], lambda t: t[*places, *rest])

    def __len__(self) -> int:
        """Of the first batch axis, as `__iter__`."""
        if not self.batch_shape:
            raise TypeError(_NO_BATCH)
        return self.batch_shape[0]

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[ParticleMeasure]:
        """Over the first batch axis."""
        return (self[i] for i in range(len(self)))

    def _with(self, points: Tensor, change: Callable[[Tensor], Tensor]) -> ParticleMeasure:
        """Other points, with `change` applied to log-weights and positions."""
        positions = None if self.positions is None else change(self.positions)
        return _measure(points, change(self.log_weights), positions)

    def _repr_html_(self) -> str:
        rows = [
            ("particles", self.n_particles),
            ("dimension", self.dim),
            ("batch", " × ".join(map(str, self.batch_shape)) or None),
            ("log-weights", span(self.log_weights)),
            ("positions", None if self.positions is None else span(self.positions)),
            ("tensors", f"{str(self.dtype).removeprefix('torch.')} on {self.device}"),
        ]
        return html_table("Particle measure", rows)

    def __repr__(self) -> str:
        parts = [f"n_particles={self.n_particles}", f"dim={self.dim}"]
        if self.batch_shape:
            parts.append(f"batch_shape={tuple(self.batch_shape)}")
        parts.append(f"dtype={str(self.dtype).removeprefix('torch.')}")
        if self.device.type != "cpu":
            parts.append(f"device={self.device}")
        if not is_traced(self.log_weights) and self.log_weights.numel():
            low, high = (float(x) + 0.0 for x in self.log_weights.detach().aminmax())
            logs = f"log_weights in [{low:.4g}, {high:.4g}]"
            parts.append("uniform" if high - low < 1e-6 else logs)
        if self.is_positioned:
            parts.append("positioned")
        return f"ParticleMeasure({', '.join(parts)})"


# For annotations: a function from a measure to one with the same weights. See `meanfield.Map`.
MeasureMap = Callable[[ParticleMeasure], ParticleMeasure]


def check_measure(mu: object, name: str = "mu", *, finite: bool = True) -> ParticleMeasure:
    """The measure, if its atoms with mass are finite; a map may have made them infinite.

    Raises:
        TypeError: no `ParticleMeasure`.
        ValueError: NaN or infinite atoms, if `finite`.
    """
    if not isinstance(mu, ParticleMeasure):
        hint = "wrap points as ParticleMeasure(points) or ParticleMeasure.from_sequence(points)"
        if isinstance(mu, list) and any(isinstance(one, ParticleMeasure) for one in mu):
            hint = "stack([mu, nu]) makes a batch of them"
        if type(mu).__name__ == "Dataset":
            hint = "dynamics.measure_at(ds, -1) is the measure at the last time of a flow"
        raise TypeError(f"{name}: expected a ParticleMeasure, got {describe(mu)}; {hint}")
    if not finite or is_traced(mu.points) or math.isfinite(mu.points.sum().item()):
        return mu
    lost = ~torch.isfinite(mu.points).all(-1) & (mu.log_weights > -math.inf)
    if bool(lost.any()):
        first = tuple(int(i) for i in lost.nonzero()[0])
        raise ValueError(
            f"{name}: expected finite points, got NaN or infinite ones at {int(lost.sum())} atoms "
            f"(the first at index {first}); the map that made them left the number range"
        )
    return mu


def present_points(mu: ParticleMeasure) -> Tensor:
    """The points; of atoms without mass, which may be anywhere, 0."""
    return torch.where(mu.log_weights[..., None] > -math.inf, mu.points, 0.0)


def check_single(mu: object, name: str = "mu") -> ParticleMeasure:
    """`check_measure` of one measure, refused if it has batch axes."""
    found = check_measure(mu, name)
    if found.batch_shape:
        raise ValueError(
            f"{name}: expected one measure, without batch axes, got a batch of shape "
            f"{tuple(found.batch_shape)}; call it on each of them"
        )
    return found


class Disintegration(NamedTuple):
    """μ̄ = ∫ δ_s ⊗ μ^s dθ(s): the positions s, their log-masses log θ(s), the measures μ^s."""

    positions: Tensor
    log_masses: Tensor
    conditionals: tuple[ParticleMeasure, ...]


@with_hints
def pushforward(
    transport: Callable[..., Tensor], mu: ParticleMeasure, *, use_positions: bool = False
) -> ParticleMeasure:
    """T♯μ = Σᵢ aᵢ δ_{T(xᵢ)}; weights and positions stay. Absent atoms sent nowhere go to 0.

    Args:
        transport: T, from points (..., n, d) to points (..., n, d'); with `use_positions`
            it is called as T(points, positions).
        mu: μ.
        use_positions: whether T takes the positions as its second argument.

    Raises:
        ValueError: if T does not return one point per particle, or positions are asked of a
            measure that has none.
    """
    if not is_function(transport):
        raise TypeError(
            f"transport: expected a function of points, got {describe(transport)}; the order is "
            "pushforward(T, mu)"
        )
    check_measure(mu, finite=False)
    use_positions = as_bool(use_positions, "use_positions")
    points = mu.points.clone()  # which T may overwrite, as ReLU(inplace=True) does
    arguments = (points, check_positioned(mu)) if use_positions else (points,)
    nu = mu.replace(called(transport, arguments, "transport: expected a function of points"))
    absent = (mu.log_weights == -math.inf)[..., None]
    return nu.replace(torch.where(absent, nu.points.nan_to_num(0.0, 0.0, 0.0), nu.points))


def disintegrate(mu: ParticleMeasure) -> Disintegration:
    """Disintegrate a positioned measure along its positions: μ̄ = ∫ δ_s ⊗ μ^s dθ(s).

    Positions are compared exactly. Atoms of weight 0 are dropped.

    Args:
        mu: a positioned measure without batch axes.

    Returns:
        The g distinct positions in increasing order, their log θ(s), and one measure for each.

    Raises:
        ValueError: if μ has no positions or has batch axes.
    """
    positions = check_positioned(check_single(mu))
    present = mu.log_weights > -math.inf
    points, logs = mu.points[present], mu.log_weights[present]
    positions, groups = positions[present].unique(sorted=True, return_inverse=True)
    log_masses = log_sums(logs, groups, len(positions))
    logs = logs - log_masses[groups]
    members = [groups == g for g in range(len(positions))]
    conditionals = tuple(_measure(points[inside], logs[inside], None) for inside in members)
    return Disintegration(positions, log_masses, conditionals)


@with_hints
def split(mu: ParticleMeasure, copies: int = 2) -> ParticleMeasure:
    """The same measure with each atom stored `copies` times at an equal share of its weight.

    The copies of atom i are neighbours: they stand at places i·copies, …, (i+1)·copies − 1.
    """
    copies, mu = count(copies, "copies"), check_measure(mu, finite=False)
    points = mu.points.repeat_interleave(copies, -2)
    repeated = mu._with(points, lambda t: t.repeat_interleave(copies, -1))
    return _measure(points, repeated.log_weights - math.log(copies), repeated.positions)


@with_hints
def merge(mu: ParticleMeasure, atol: float = 0.0) -> ParticleMeasure:
    """The same measure with coinciding atoms stored once, in order of first appearance.

    Args:
        mu: a measure without batch axes. Positions, if any, must coincide exactly too.
        atol: atoms that a chain of steps of Euclidean length at most `atol` joins become one
            atom, at their barycentre. 0 joins equal points only and moves nothing.
    """
    atol = number(atol, "atol", least=0)
    check_single(mu)
    return merge_labelled(mu, atol)[0]


def merge_labelled(
    mu: ParticleMeasure, atol: float, *, across_positions: bool = False
) -> tuple[ParticleMeasure, Tensor]:
    """`merge`, and the new number of each atom, (n,), −1 for atoms of weight 0.

    With `across_positions` atoms of different positions may be merged; the result has none.
    """
    present = (mu.log_weights > -math.inf).nonzero()[:, 0]
    points, logs = mu.points[present], mu.log_weights[present]
    positions = None if across_positions or mu.positions is None else mu.positions[present]
    groups, first = _single_linkage(points.detach(), positions, atol)
    log_masses = log_sums(logs, groups, len(first))
    shares = (logs - log_masses[groups]).exp()[:, None]  # they sum to 1 in each group
    origins = points[first]  # averages of differences, so that equal points do not move
    centres = origins.index_add(0, groups, shares * (points - origins[groups]))
    labels = torch.full((mu.n_particles,), -1, device=mu.device)
    labels[present] = groups
    positions = None if positions is None else positions[first]
    return _measure(centres, log_masses, positions), labels


def close_pairs(points: Tensor, scale: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of points (n, d) at most a scale apart, a block of rows at a time: memory O(n)."""
    size = max(1, at_once(_BLOCK, points.device) // max(len(points), 1))
    # In a power of two near the scale, squares of gaps near it stay in the number range.
    kind, largest = torch.finfo(points.dtype), float(points.detach().abs().max())
    least = max(scale, 4 * (largest / kind.max), kind.tiny)
    unit = math.ldexp(1.0, math.frexp(least)[1] - 1)
    points, scale = points / unit, scale / unit
    for start in range(0, len(points), size):
        # Not by matrix products, whose cancellation is 1e-8 where clusters have collapsed.
        gaps = torch.cdist(
            points[start : start + size], points, compute_mode="donot_use_mm_for_euclid_dist"
        )
        rows, columns = (gaps <= scale).nonzero(as_tuple=True)
        yield rows + start, columns


def log_sums(logs: Tensor, groups: Tensor, count: int) -> Tensor:
    """log Σ exp(logs) over each group, (..., count), from logs and group numbers (..., n)."""
    top = logs.new_full((*logs.shape[:-1], count), -math.inf)
    top = top.scatter_reduce(-1, groups, logs, "amax")
    scaled = (logs - top.gather(-1, groups)).nan_to_num(nan=-math.inf).exp()
    return top + torch.zeros_like(top).scatter_add(-1, groups, scaled).log()


@with_hints
def stack(measures: Sequence[ParticleMeasure]) -> ParticleMeasure:
    """A batch of measures of possibly different sizes; shorter ones are padded with weight 0."""
    if isinstance(measures, ParticleMeasure) or not isinstance(measures, Iterable):
        raise TypeError(
            f"measures: expected a list of measures, [mu, nu], got {describe(measures)}"
        )
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
    parts = [_padded(mu, n) for mu in measures]
    positions = [mu.positions for mu in parts if mu.positions is not None]
    return _measure(
        torch.stack([mu.points for mu in parts]),
        torch.stack([mu.log_weights for mu in parts]),
        torch.stack(positions) if positions else None,
    )


@with_hints
def mixture(measures: Sequence[ParticleMeasure], weights: Any = None) -> ParticleMeasure:
    """Σₖ wₖ μₖ: the atoms of all measures, of their weights times wₖ.

    Args:
        measures: of one dimension and batch shape, all or none with positions.
        weights: w, one each, of sum 1; equal if None.

    Raises:
        ValueError: measures that do not fit, another number of weights, weights that are negative
            or do not add up to 1.

    Example:
        >>> one, two = ParticleMeasure([[0.0]]), ParticleMeasure([[1.0], [2.0]])
        >>> mixture([one, two], [0.5, 0.5]).weights
        tensor([0.5000, 0.2500, 0.2500], dtype=torch.float64)
    """
    if isinstance(measures, Iterable) and not isinstance(measures, ParticleMeasure):
        measures = list(measures)
    many = len(stack(measures).points)  # refuses what does not fit
    logs = ParticleMeasure(measures[0].points.new_zeros(many, 1), weights).log_weights
    if logs.ndim > 1:
        raise ValueError(f"weights: expected {many} numbers, got shape {tuple(logs.shape)}")
    positions = [mu.positions for mu in measures if mu.positions is not None]
    return _measure(
        torch.cat([mu.points for mu in measures], -2),
        torch.cat([mu.log_weights + log for mu, log in zip(measures, logs, strict=True)], -1),
        torch.cat(positions, -1) if positions else None,
    )


def _measure(points: Tensor, logs: Tensor, positions: Tensor | None) -> ParticleMeasure:
    """A measure from parts that are known to fit."""
    mu = object.__new__(ParticleMeasure)
    vars(mu).update(points=points, log_weights=logs, positions=positions)
    return mu


def _single_linkage(
    points: Tensor, positions: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Groups joined by chains of steps of length at most a scale, by order of appearance.

    Returns:
        The number of each point's group, (n,), and the first point of each group, (k,).
    """
    if scale == 0:
        rows = points if positions is None else torch.cat([positions[:, None], points], -1)
        keys = to_host(rows)  # of which −0.0 and 0.0 are one
    else:
        keys = _components(points, positions, scale)
    _, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)
    groups = torch.from_numpy(np.argsort(order)[inverse.reshape(-1)]).to(points.device)
    return groups, torch.from_numpy(first[order])


def _components(points: Tensor, positions: Tensor | None, scale: float) -> np.ndarray:
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    n = len(points)
    labels = np.arange(n)
    for i, j in close_pairs(points, scale):
        if positions is not None:
            together = positions[i] == positions[j]
            i, j = i[together], j[together]
        edges = labels[to_host(i)], labels[to_host(j)]
        graph = coo_array((np.ones(len(i), bool), edges), shape=(n, n))
        labels = connected_components(graph, directed=False)[1][labels]
    return labels


def _padded(mu: ParticleMeasure, n: int) -> ParticleMeasure:
    """Padded to n atoms by copies of the first atom with weight 0."""
    there = torch.arange(n, device=mu.device) < mu.n_particles
    index = torch.arange(n, device=mu.device) * there
    padded = mu._with(mu.points[..., index, :], lambda t: t[..., index])
    return _measure(padded.points, padded.log_weights.where(there, -math.inf), padded.positions)
