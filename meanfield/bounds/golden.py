"""Golden section, of many functions at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

_RATIO = (5**0.5 - 1) / 2


def narrowed(
    value: Callable[[np.ndarray], Any], low: Any, high: Any, *, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Brackets of minima, shorter by 0.618 a step; of each function one minimum lies within."""
    for _ in range(steps):
        left, right = high - _RATIO * (high - low), low + _RATIO * (high - low)
        smaller = value(left) < value(right)
        low, high = np.where(smaller, low, left), np.where(smaller, right, high)
    return low, high
