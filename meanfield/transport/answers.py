"""What a caller gets: W₂ with its interval, its coupling and its history."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from meanfield.checks import as_float_tensor, check_same_kind, is_traced
from meanfield.errors import ConvergenceError
from meanfield.html import span, table
from meanfield.measures import ParticleMeasure
from meanfield.transport.couplings import Coupling
from meanfield.transport.problems import UNIT, Answer, Problem

__all__ = [
    "Pair",
    "TransportResult",
    "as_pair",
    "assemble",
    "assemble_arrays",
    "problem_of",
    "refuse_unconverged",
]


@dataclass(frozen=True, eq=False, repr=False)
class TransportResult:
    """W₂(μ, ν), or W₁(μ, ν), with the evidence for it.

    Attributes:
        value: the distance, never its square; shape of the batch, () without one. The unit of the
            points.
        lower: certified lower bound, rounding included.
        upper: certified upper bound, rounding included.
        coupling: the plan that gives `upper`, or None where none exists (infinite distance) or
            none was made (bounds without a plan).
        potentials: (f, g), shapes (..., n) and (..., m), with fᵢ + g_j ≤ ‖xᵢ − y_j‖^order up
            to rounding; None where the method makes none.
        method: what gave the answer; for a batch, the methods that occur, joined by " + ".
        converged: whether plan and potentials meet within `rtol`, for every entry of the batch, up
            to what rounding of the weights given leaves open: that is in the interval alone.
        seconds: wall-clock time spent.
        order: 2 for W₂, 1 for W₁.
    """

    value: Tensor
    lower: Tensor
    upper: Tensor
    coupling: Coupling | None
    potentials: tuple[Tensor, Tensor] | None
    method: str
    converged: bool
    seconds: float
    order: int = 2

    @property
    def relative_width(self) -> Tensor:
        """(upper − lower) / upper; 0 where the upper bound is 0 or infinite."""
        width = (self.upper - self.lower) / self.upper
        return torch.where((self.upper > 0) & self.upper.isfinite(), width, 0.0)

    def __repr__(self) -> str:
        tail = f"method={self.method!r}, converged={self.converged}, seconds={self.seconds:.3g}"
        if self.value.ndim:
            return f"TransportResult(batch_shape={tuple(self.value.shape)}, {tail})"
        low, high = float(self.lower), float(self.upper)
        return (
            f"TransportResult(value={float(self.value):.10g} in [{low:.10g}, {high:.10g}], {tail})"
        )

    def _repr_html_(self) -> str:
        rows = [
            ("value", span(self.value)),
            ("certified lower bound", span(self.lower)),
            ("certified upper bound", span(self.upper)),
            ("relative width", span(self.relative_width)),
            ("method", self.method),
            ("converged", self.converged),
            ("seconds", self.seconds),
        ]
        return table(f"Wasserstein distance {'W₁' if self.order == 1 else 'W₂'}", rows)


class Pair(NamedTuple):
    """Two measures of one kind whose batch axes have been broadcast."""

    mu: ParticleMeasure
    nu: ParticleMeasure


def as_pair(mu: ParticleMeasure | Tensor, nu: ParticleMeasure | Tensor) -> Pair:
    """Both arguments as measures: same dtype, device and dimension, batch axes broadcast.

    Raises:
        TypeError: dtypes that differ or are not float32 or float64.
        ValueError: dimensions, devices or batch shapes that do not fit; atoms with mass that are
            not finite; what `ParticleMeasure` refuses (NaN, empty clouds).
    """
    mu, nu = _as_measure(mu, "mu"), _as_measure(nu, "nu")
    check_same_kind(mu.points, "mu", nu.points, "nu")
    if mu.dim != nu.dim:
        raise ValueError(
            f"nu: expected points in the dimension of mu, d = {mu.dim}, got d = {nu.dim}"
        )
    if is_traced(mu.points) or is_traced(nu.points):
        raise RuntimeError(
            "an exact transport plan depends on values, so it cannot be traced by torch.func or "
            "torch.compile; call w2 outside the transform, or use sinkhorn_divergence"
        )
    for measure, name in ((mu, "mu"), (nu, "nu")):
        _check_atoms(measure, name)
    try:
        batch = torch.broadcast_shapes(mu.batch_shape, nu.batch_shape)
    except RuntimeError:
        raise ValueError(
            f"expected batch shapes that broadcast, got {tuple(mu.batch_shape)} for mu and "
            f"{tuple(nu.batch_shape)} for nu"
        ) from None
    return Pair(_expanded(mu, batch), _expanded(nu, batch))


def _check_atoms(mu: ParticleMeasure, name: str) -> None:
    """Refuse NaN and infinite points, which a map may have made: no distance is true of them."""
    if bool(torch.isfinite(mu.points.sum())):
        return
    lost = ~torch.isfinite(mu.points).all(-1) & (mu.log_weights > -math.inf)
    if bool(lost.any()):
        first = tuple(int(i) for i in lost.nonzero()[0])
        raise ValueError(
            f"{name}: expected finite points, got NaN or infinite ones at {int(lost.sum())} atoms "
            f"(the first at index {first}); the map that made them left the number range"
        )


def problem_of(
    x: np.ndarray, y: np.ndarray, log_a: np.ndarray, log_b: np.ndarray
) -> tuple[Problem, np.ndarray | None, np.ndarray | None]:
    """The problem without atoms of weight 0, and where its atoms stood (None: all kept)."""
    rows = cols = None
    if log_a.min() == -math.inf:
        rows = np.flatnonzero(log_a > -math.inf)
        x, log_a = x[rows], log_a[rows]
    if log_b.min() == -math.inf:
        cols = np.flatnonzero(log_b > -math.inf)
        y, log_b = y[cols], log_b[cols]
    return Problem.of(x, y, log_a, _snapped(log_a, log_b)), rows, cols


def _snapped(log_a: np.ndarray, log_b: np.ndarray) -> np.ndarray:
    """log b with the values of log a where both are the same weights up to rounding.

    The weights of a permuted measure are normalised by a sum in another order, which may move
    all of them by a unit in the last place; they are meant to be the same.
    """
    if len(log_a) != len(log_b) or np.array_equal(log_a, log_b):
        return log_b
    ends = np.array([log_a.min() - log_b.min(), log_a.max() - log_b.max()])
    if np.abs(ends).max() > 8 * UNIT * max(1.0, -float(log_a.min())):
        return log_b
    order_a, order_b = np.argsort(log_a, kind="stable"), np.argsort(log_b, kind="stable")
    mine, theirs = log_a[order_a], log_b[order_b]
    if not (np.abs(mine - theirs) <= 8 * UNIT * np.maximum(np.abs(mine), 1)).all():
        return log_b
    snapped = np.empty_like(log_b)
    snapped[order_b] = mine
    return snapped


def assemble(pair: Pair, answers: Sequence[Answer], *, seconds: float) -> TransportResult:
    """One result from answers in the caller's unit and numbering, one per entry of the batch."""
    size = max((len(s.rows) for s in answers), default=0)
    count = len(answers)
    rows, cols = np.zeros((count, size), np.int64), np.zeros((count, size), np.int64)
    logs = np.full((count, size), -np.inf)
    for k, s in enumerate(answers):
        used = len(s.rows)
        rows[k, :used], cols[k, :used], logs[k, :used] = s.rows, s.cols, s.log_mass
    f, g = ([getattr(s, name) for s in answers] for name in ("f", "g"))
    has_potentials = count > 0 and all(t is not None for t in (*f, *g))
    ends = np.array([(s.value, s.lower, s.upper) for s in answers]).reshape(-1, 3)
    return assemble_arrays(
        pair,
        ends,
        (rows, cols, logs) if size else None,
        (np.stack(f), np.stack(g)) if has_potentials else None,
        method=" + ".join(sorted({s.method for s in answers})) or "empty batch",
        converged=all(s.converged for s in answers),
        seconds=seconds,
    )


def assemble_arrays(
    pair: Pair,
    ends: np.ndarray,
    plan: tuple[np.ndarray, np.ndarray, np.ndarray] | None,
    potentials: tuple[np.ndarray, np.ndarray] | None,
    *,
    method: str,
    converged: bool,
    seconds: float,
) -> TransportResult:
    """Tensors of the caller's kind and batch shape.

    Args:
        pair: the two measures.
        ends: value, lower and upper, shape (b, 3).
        plan: rows, columns and log-masses, shape (b, k) each.
        potentials: f (b, n) and g (b, m).
        method: as in the result.
        converged: as in the result.
        seconds: as in the result.
    """
    batch, like = pair.mu.batch_shape, pair.mu.points

    def tensor(values: np.ndarray) -> Tensor:
        made = torch.as_tensor(values, device=like.device).reshape(*batch, values.shape[-1])
        return made.to(like.dtype) if made.is_floating_point() else made

    value, lower, upper = (
        _rounded(ends[:, k], like, side).reshape(batch) for k, side in enumerate((0, -1, 1))
    )
    coupling = None
    if plan is not None:
        points = (pair.mu.points.detach(), pair.nu.points.detach())
        coupling = Coupling(*points, *(tensor(t) for t in plan))
    return TransportResult(
        value.clamp(lower, upper),
        lower,
        upper,
        coupling,
        None if potentials is None else (tensor(potentials[0]), tensor(potentials[1])),
        method,
        converged,
        seconds,
    )


def refuse_unconverged(result: TransportResult, rtol: float) -> TransportResult:
    """The result if it converged.

    Raises:
        ConvergenceError: otherwise, with the interval that was reached.
    """
    if result.converged:
        return result
    worst = int(result.relative_width.reshape(-1).argmax())
    low, high = (float(t.reshape(-1)[worst]) for t in (result.lower, result.upper))
    raise ConvergenceError(
        f"W{result.order}: expected plan and potentials to meet within rtol={rtol:g}, got the "
        f"interval [{low:.12g}, {high:.12g}] by {result.method!r}; take strict=False for the "
        "flagged interval, a larger rtol, or another method"
    )


def _as_measure(value: ParticleMeasure | Tensor, name: str) -> ParticleMeasure:
    if isinstance(value, ParticleMeasure):
        return value
    points = as_float_tensor(value, name)
    if points.ndim < 2 or 0 in points.shape[-2:]:
        raise ValueError(
            f"{name}: expected points of shape (..., n, d) with n ≥ 1 and d ≥ 1, "
            f"got {tuple(points.shape)}"
        )
    return ParticleMeasure(points)


def _expanded(mu: ParticleMeasure, batch: torch.Size) -> ParticleMeasure:
    if mu.batch_shape == batch:
        return mu
    grown = object.__new__(ParticleMeasure)
    positions = None if mu.positions is None else mu.positions.expand(*batch, -1)
    object.__setattr__(grown, "points", mu.points.expand(*batch, -1, -1))
    object.__setattr__(grown, "log_weights", mu.log_weights.expand(*batch, -1))
    object.__setattr__(grown, "positions", positions)
    return grown


def _rounded(values: np.ndarray, like: Tensor, direction: int) -> Tensor:
    """In the dtype of `like`, rounded outward where that dtype is shorter."""
    if like.dtype == torch.float64:
        return torch.as_tensor(values, device=like.device)
    with np.errstate(over="ignore"):
        short = values.astype(np.float32)
    if direction:
        wrong = (short > values) if direction < 0 else (short < values)
        short[wrong] = np.nextafter(short[wrong], np.float32(direction * np.inf))
    return torch.as_tensor(short, device=like.device)
