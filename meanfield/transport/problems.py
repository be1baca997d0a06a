"""One transport problem in normal form: float64, no absent atoms, coordinates of order one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

__all__ = ["UNIT", "Answer", "Problem", "lengths", "log_rms", "mass_error", "squared_distances"]

UNIT = 2.0**-53  # unit roundoff of float64


@dataclass(frozen=True, eq=False)
class Problem:
    """Two weighted clouds in a unit in which they span about one.

    Differences xᵢ − y_j are taken before anything is squared, so no common translation matters,
    and the unit is a power of two, so changing to it rounds nothing.

    Attributes:
        x: points of μ, shape (n, d).
        y: points of ν, shape (m, d).
        log_a: log-weights of μ, shape (n,), all finite.
        log_b: log-weights of ν, shape (m,), all finite.
        exponent: distances in this problem times 2^exponent are the caller's.
    """

    x: np.ndarray
    y: np.ndarray
    log_a: np.ndarray
    log_b: np.ndarray
    exponent: int = 0

    @classmethod
    def of(
        cls, x: np.ndarray, y: np.ndarray, log_a: np.ndarray, log_b: np.ndarray, exponent: int = 0
    ) -> Problem:
        """The problem in its own unit; `exponent` is the unit of the coordinates given."""
        low = np.minimum(x.min(0), y.min(0))
        high = np.maximum(x.max(0), y.max(0))
        span = float((high / 2 - low / 2).max())  # halves: the span itself may overflow
        own = math.frexp(span)[1] + 1 if span > 0 else 0
        return cls(np.ldexp(x, -own), np.ldexp(y, -own), log_a, log_b, exponent + own)

    def part(self, rows: np.ndarray, cols: np.ndarray) -> Problem:
        """The problem between two parts, each normalised to mass one, in its own unit."""
        log_a, log_b = self.log_a[rows], self.log_b[cols]
        total_a, total_b = _log_total(log_a), _log_total(log_b)
        if np.array_equal(np.sort(log_a), np.sort(log_b)):
            total_b = total_a  # one number for both, so that equal weights stay equal
        log_a, log_b = log_a - total_a, log_b - total_b
        # Twice: a total of −900 is known to 1e-13 only, what it leaves is known to 1e-16.
        rest_a, rest_b = _log_total(log_a), _log_total(log_b)
        rest_b = rest_a if total_a == total_b and abs(rest_a - rest_b) < 1e-14 else rest_b
        x, y = self.x[rows], self.y[cols]
        return Problem.of(x, y, log_a - rest_a, log_b - rest_b, self.exponent)

    @property
    def n(self) -> int:
        """Atoms of μ."""
        return len(self.x)

    @property
    def m(self) -> int:
        """Atoms of ν."""
        return len(self.y)

    @property
    def dim(self) -> int:
        """Dimension d."""
        return self.x.shape[1]

    @cached_property
    def a(self) -> np.ndarray:
        """Weights of μ: right to a few units in the last place, 0 below e^{−745}."""
        return _masses(self.log_a)

    @cached_property
    def b(self) -> np.ndarray:
        """Weights of ν."""
        return _masses(self.log_b)

    @cached_property
    def is_uniform(self) -> bool:
        """Whether both clouds are uniform and of one size."""
        flat = np.ptp(self.log_a) == 0 and np.ptp(self.log_b) == 0
        return bool(flat) and self.n == self.m

    @cached_property
    def is_paired(self) -> bool:
        """Whether atom i of μ and atom i of ν have the same weight, to the last bit."""
        return self.n == self.m and np.array_equal(self.log_a, self.log_b)

    @cached_property
    def diameter_squared(self) -> float:
        """An upper bound of every ‖xᵢ − y_j‖²."""
        low = np.minimum(self.x.min(0), self.y.min(0))
        high = np.maximum(self.x.max(0), self.y.max(0))
        return float(np.square(high - low).sum()) * (1 + 4 * (self.dim + 2) * UNIT)


@dataclass(frozen=True, eq=False)
class Answer:
    """What a solver found, in the unit of its problem: lower ≤ W₂ ≤ upper.

    `f` and `g` are feasible potentials of the squared cost, or None where none were made.
    """

    value: float
    lower: float
    upper: float
    rows: np.ndarray
    cols: np.ndarray
    log_mass: np.ndarray
    f: np.ndarray | None
    g: np.ndarray | None
    method: str
    converged: bool

    @property
    def width(self) -> float:
        """Relative width of the interval."""
        return (self.upper - self.lower) / self.upper if self.upper > 0 else 0.0


def squared_distances(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """‖xᵢ − y_j‖² from direct differences, relative error below (d + 2) u."""
    from scipy.spatial.distance import cdist

    return cdist(x, y, "sqeuclidean")


def log_rms(log_weights: np.ndarray, distances: np.ndarray) -> np.ndarray:
    """(Σ exp(lᵢ) tᵢ²)^½ along the last axis, without squaring what is small or large.

    exp(−900)·1 underflows, and so does (1e-170)²; their roots do not. The largest term is
    scaled out.
    """
    logs, distances = np.broadcast_arrays(log_weights, distances)
    moved = (distances > 0) & (logs > -math.inf)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        size = np.where(moved, logs / 2 + np.log(distances), -math.inf)
        top = size.argmax(-1)[..., None]
        top_log = np.take_along_axis(logs, top, -1)
        top_distance = np.take_along_axis(distances, top, -1)
        roots = np.exp(np.clip((logs - top_log) / 2, -690, 690))
        terms = np.where(moved, roots * (distances / top_distance), 0.0)
        total = np.sqrt(np.square(terms).sum(-1))
        scaled = np.exp(top_log / 2) * top_distance
    return np.where(moved.any(-1), scaled[..., 0] * total, 0.0)


def lengths(moves: np.ndarray) -> np.ndarray:
    """‖·‖ along the last axis, also where the square underflows."""
    moves = np.abs(moves)
    if moves.shape[-1] == 1:
        return moves[..., 0]
    largest = moves.max(-1, keepdims=True)
    unit = np.where(largest > 0, largest, 1.0)
    return unit[..., 0] * np.sqrt(np.square(moves / unit).sum(-1))


def mass_error(count: int) -> float:
    """Bound of the relative error of computed weights and of sums of `count` products."""
    return (8 + 2 * math.log2(count + 1)) * UNIT * 2


def _masses(logs: np.ndarray) -> np.ndarray:
    weights = np.exp(logs)
    return weights / weights.sum()


def _log_total(logs: np.ndarray) -> float:
    top = logs.max()
    return float(top + np.log(np.exp(logs - top).sum()))
