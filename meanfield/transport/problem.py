"""Transport problems in normal form: float64, no absent atoms, coordinates of order one.

Leading axes are a batch of problems of one shape, as everywhere in `torch.linalg`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, cached_property

import numpy as np

UNIT = 2.0**-53  # unit roundoff of float64
_SAFE_LENGTH = 1e-140  # below it a square loses digits to underflow
_LOOPED = 800  # coordinate differences of a problem from which each has a call of its own


@dataclass(frozen=True, eq=False)
class Problem:
    """Two weighted clouds in a unit in which they span about one; the cost is ‖x − y‖^order.

    Differences xᵢ − y_j are taken before anything is squared, so no common translation matters,
    and the unit is a power of two, so changing to it rounds nothing.

    Attributes:
        x: points of μ, shape (..., n, d).
        y: points of ν, shape (..., m, d).
        log_a: log-weights of μ as they are stored, shape (..., n), up to a constant; −∞ of atoms
            without mass, which `part` leaves out before anything is solved. Not normalised,
            because normalising rounds; equality of weights is tested on these.
        log_b: log-weights of ν, shape (..., m), likewise.
        exponent: distances in this problem times 2^exponent are the caller's, shape (...).
        order: p of W_p, at least 1.
    """

    x: np.ndarray
    y: np.ndarray
    log_a: np.ndarray
    log_b: np.ndarray
    exponent: np.ndarray = field(default_factory=lambda: np.zeros((), int))
    order: float = 2

    @classmethod
    def of(
        cls,
        x: np.ndarray,
        y: np.ndarray,
        log_a: np.ndarray,
        log_b: np.ndarray,
        *,
        order: float = 2,
    ) -> Problem:
        """The problem in its own unit."""
        low = np.minimum(x.min(-2), y.min(-2))
        high = np.maximum(x.max(-2), y.max(-2))
        span = (high / 2 - low / 2).max(-1)  # halves: the span itself may overflow
        if not span.all():  # atoms that are all in one place: by how far it is
            span = np.where(span > 0, span, np.abs(low).max(-1))
        own = np.frexp(span)[1] + (span > 0)
        unit = own[..., None, None]
        if (np.abs(own) < 1000).all():  # a product with a power of two: ten times as fast
            factor = 2.0**-unit
            x, y = x * factor, y * factor
        else:
            x, y = np.ldexp(x, -unit), np.ldexp(y, -unit)
        return cls(x, y, log_a, log_b, own, order)

    def part(self, rows: np.ndarray, cols: np.ndarray, *, snap: bool) -> Problem:
        """The problem between some atoms of both, each side of mass one, in a unit of its own.

        With `snap`, weights that agree up to rounding are taken as equal.
        """
        log_a, log_b = self.log_a[rows], self.log_b[cols]
        log_b = snapped(log_a, log_b) if snap else log_b
        return Problem.of(self.x[rows], self.y[cols], log_a, log_b, order=self.order)

    @property
    def atoms(self) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of the atoms that have mass, of μ and of ν; of one problem."""
        return np.flatnonzero(self.log_a > -math.inf), np.flatnonzero(self.log_b > -math.inf)

    @property
    def n(self) -> int:
        """Atoms of μ."""
        return self.x.shape[-2]

    @property
    def m(self) -> int:
        """Atoms of ν."""
        return self.y.shape[-2]

    @property
    def dim(self) -> int:
        """Dimension d."""
        return self.x.shape[-1]

    @property
    def pairs(self) -> int:
        """Entries n m of one matrix of costs."""
        return self.n * self.m

    @cached_property
    def logs_a(self) -> np.ndarray:
        """log aᵢ with Σ aᵢ = 1, shape (..., n); right to a unit in its last place."""
        return normalised_logs(self.log_a)

    @cached_property
    def logs_b(self) -> np.ndarray:
        """log b_j, shape (..., m)."""
        return self.logs_a if self.is_paired.all() else normalised_logs(self.log_b)

    @cached_property
    def a(self) -> np.ndarray:
        """Weights of μ, shape (..., n): right to a few last places, 0 below e^{−745}."""
        return _masses(self.logs_a)

    @cached_property
    def b(self) -> np.ndarray:
        """Weights of ν, shape (..., m)."""
        return self.a if self.logs_b is self.logs_a else _masses(self.logs_b)

    @cached_property
    def logs(self) -> np.ndarray:
        """log a, then log b, shape (..., n + m)."""
        return np.concatenate([self.logs_a, self.logs_b], -1)

    @cached_property
    def weights(self) -> np.ndarray:
        """a, then b, shape (..., n + m)."""
        return np.concatenate([self.a, self.b], -1)

    @cached_property
    def is_paired(self) -> np.ndarray:
        """Whether atom i of μ and atom i of ν have the same weight, to the last bit."""
        if self.n != self.m:
            return np.zeros(self.log_a.shape[:-1], bool)
        return (self.log_a == self.log_b).all(-1)

    @cached_property
    def costs(self) -> np.ndarray:
        """‖xᵢ − y_j‖^order from direct differences, shape (..., n, m)."""
        return costs_between(self.x, self.y, self.order)

    @cached_property
    def diameter(self) -> np.ndarray:
        """An upper bound of every ‖xᵢ − y_j‖, shape (...)."""
        low = np.minimum(self.x.min(-2), self.y.min(-2))
        high = np.maximum(self.x.max(-2), self.y.max(-2))
        return row_norms(high - low) * (1 + (2 * self.dim + 16) * UNIT)

    def moved(self, rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
        """‖x_{i_k} − y_{j_k}‖, shape (..., k)."""
        return row_norms(taken(self.x, rows, -2) - taken(self.y, cols, -2))


def costs_between(x: np.ndarray, y: np.ndarray, order: float) -> np.ndarray:
    """‖xᵢ − y_j‖^order of all pairs, relative error below (d + 4) u; leading axes are a batch."""
    from scipy.spatial.distance import cdist

    if order not in (1, 2):
        return costs_between(x, y, 1) ** order
    metric = "sqeuclidean" if order == 2 else "euclidean"
    if x.ndim == 2:
        return cdist(x, y, metric)
    if len(x) == 1:
        return cdist(x[0], y[0], metric)[None]
    if x[0].size * y.shape[1] >= _LOOPED:
        return np.stack([cdist(*clouds, metric) for clouds in zip(x, y, strict=True)])
    moves = x[:, :, None] - y[:, None]
    squares = np.einsum("bnmd,bnmd->bnm", moves, moves)
    return squares if order == 2 else np.sqrt(squares)


def taken(values: np.ndarray, index: np.ndarray, axis: int = -1) -> np.ndarray:
    """values[index] along an axis, of one problem or of a batch along the first axis."""
    if values.ndim == -axis:
        return values[index]
    return values[np.arange(len(values))[:, None], index]


def row_norms(moves: np.ndarray) -> np.ndarray:
    """‖·‖ along the last axis, also where the square underflows."""
    found = np.asarray(np.sqrt(np.einsum("...d,...d->...", moves, moves)))
    short = found < _SAFE_LENGTH
    if short.any():
        left = np.abs(moves[short])
        unit = left.max(-1)
        scaled = left / np.where(unit > 0, unit, 1.0)[:, None]
        found[short] = unit * np.sqrt(np.square(scaled).sum(-1))
    return found


def normalised_logs(logs: np.ndarray) -> np.ndarray:
    """Log-weights less the logarithm of their sum, the same for every order of the atoms."""
    count = logs.shape[-1]
    flat = (logs == logs[..., :1]).all(-1)
    if flat.all():
        return np.full(logs.shape, -math.log(count))
    for _ in range(2):  # a total of −900 is known to 1e-13 only, what it leaves to 1e-16
        top = logs.max(-1, keepdims=True)
        total = top + np.log(np.sort(np.exp(logs - top), -1).sum(-1, keepdims=True))
        logs = logs - total
        if np.abs(total).max() < 0.1:  # known to 1e-17
            break
    return np.where(flat[..., None], -math.log(count), logs) if flat.any() else logs


def root(power: np.ndarray, order: float) -> np.ndarray:
    """t^(1/p) to a few last places: of 1e-240, rounding of 1/p alone moves it by 1e-14."""
    found = power ** (1 / order)
    lost = _lost_of_inverse(order)
    known = (power > 0) & (power < math.inf)
    return found * (1 + lost * np.log(np.where(known, power, 1.0))) if lost else found


@cache
def _lost_of_inverse(order: float) -> float:
    """1/p less the number next to it."""
    return float(1 / Fraction(order) - Fraction(1 / order))


def snapped(log_a: np.ndarray, log_b: np.ndarray) -> np.ndarray:
    """log b with the values of log a where both are the same weights up to rounding.

    The weights of a permuted measure are normalised by a sum in another order, which may move
    all of them by a unit in the last place; they are meant to be the same.
    """
    if len(log_a) != len(log_b) or np.array_equal(log_a, log_b):
        return log_b
    ends = np.abs([np.ptp(log_a) - np.ptp(log_b), np.abs(log_a).max(), np.abs(log_b).max()])
    if ends[0] > 32 * UNIT * max(1.0, *ends[1:]):  # most weights are told apart by their range
        return log_b
    meant = np.empty_like(log_b)
    meant[np.argsort(log_b, kind="stable")] = np.sort(log_a)
    mine, theirs = normalised_logs(meant), normalised_logs(log_b)
    is_same = (np.abs(mine - theirs) <= 8 * UNIT * np.maximum(np.abs(mine), 1)).all()
    return meant if is_same else log_b


def _masses(logs: np.ndarray) -> np.ndarray:
    weights = np.exp(logs)
    return weights / weights.sum(-1, keepdims=True)


def log_masses(masses: np.ndarray) -> np.ndarray:
    """Logarithms of a solver's masses; −inf where they are not positive."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(masses > 0, np.log(masses), -math.inf)


def powers_added(one: np.ndarray, other: np.ndarray, order: float) -> np.ndarray:
    """(s^p + t^p)^(1/p) without underflow."""
    if order in (1, 2):
        return np.hypot(one, other) if order == 2 else np.add(one, other)
    top, least = np.maximum(one, other), np.minimum(one, other)
    share = np.divide(least, top, out=np.zeros(np.shape(top)), where=np.isfinite(top) & (top > 0))
    return top * root(1 + share**order, order)


def powers_less(whole: np.ndarray, taken: np.ndarray, order: float) -> np.ndarray:
    """(s^p − t^p)^(1/p), rounded down, 0 where that is negative."""
    left = np.maximum(whole - taken, 0)
    if order in (1, 2):
        return (np.sqrt(left) * np.sqrt(whole + taken) if order == 2 else left) * (1 - 8 * UNIT)
    share = np.divide(taken, whole, out=np.ones(np.shape(left)), where=left > 0)
    # A power of a quotient right to u is right to (p + 1) u.
    rest = np.maximum(1 - share**order - 4 * (order + 1) * UNIT, 0)
    return whole * root(rest, order) * (1 - 8 * UNIT)
