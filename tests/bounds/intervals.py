"""Interval arithmetic on arrays: enclosures with outward rounding, for proofs by computer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# numpy's exp is good to one unit in the last place; four are allowed for.
_EXP = 4 * np.finfo(float).eps


@dataclass(frozen=True, eq=False)
class Interval:
    """Numbers between `low` and `high`, entry by entry."""

    low: np.ndarray
    high: np.ndarray

    def __add__(self, other: Interval | float) -> Interval:
        o = interval(other)
        return _outward(self.low + o.low, self.high + o.high)

    def __neg__(self) -> Interval:
        return Interval(-self.high, -self.low)

    def __sub__(self, other: Interval | float) -> Interval:
        return self + (-interval(other))

    def __rsub__(self, other: float) -> Interval:
        return -self + other

    def __mul__(self, other: Interval | float) -> Interval:
        o = interval(other)
        ends = [self.low * o.low, self.low * o.high, self.high * o.low, self.high * o.high]
        return _outward(np.minimum.reduce(ends), np.maximum.reduce(ends))

    __radd__, __rmul__ = __add__, __mul__

    def __truediv__(self, other: Interval | float) -> Interval:
        """By what is not 0; everything where it may be."""
        o = interval(other)
        apart = (o.low > 0) | (o.high < 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            inverse = _outward(
                np.where(apart, 1 / o.high, -np.inf), np.where(apart, 1 / o.low, np.inf)
            )
        return self * inverse

    def __rtruediv__(self, other: float) -> Interval:
        return interval(other) / self

    def square(self) -> Interval:
        top = np.maximum(np.abs(self.low), np.abs(self.high))
        bottom = np.maximum(np.maximum(self.low, -self.high), 0.0)
        found = _outward(bottom**2, top**2)
        return Interval(np.maximum(found.low, 0.0), found.high)

    def floored(self) -> Interval:
        """What is known to be ≥ 0."""
        return Interval(np.maximum(self.low, 0.0), np.maximum(self.high, 0.0))


def interval(value: Interval | float | np.ndarray) -> Interval:
    if isinstance(value, Interval):
        return value
    array = np.asarray(value, float)
    return Interval(array, array)


def exp(x: Interval) -> Interval:
    return Interval(np.exp(x.low) * (1 - _EXP), np.exp(x.high) * (1 + _EXP))


def root(x: Interval) -> Interval:
    """The square root; numpy rounds it correctly."""
    found = _outward(np.sqrt(np.maximum(x.low, 0.0)), np.sqrt(np.maximum(x.high, 0.0)))
    return Interval(np.maximum(found.low, 0.0), found.high)


def _outward(low: np.ndarray, high: np.ndarray) -> Interval:
    return Interval(np.nextafter(low, -np.inf), np.nextafter(high, np.inf))
