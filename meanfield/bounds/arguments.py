"""What the bounds share: checked numbers in, a float or an array out, and golden section."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from meanfield.checks import as_floats, is_tensor

ROUNDING = 1e-12  # relative: what upper ends are raised by
_LARGEST = 1e300  # of c: a few times as much still is a float64
_RATIO = (5**0.5 - 1) / 2  # of golden section


def norms(value: Any, name: str) -> np.ndarray:
    """Finite numbers ≥ 0: norms, radii, factors; no square array, which is of matrices."""
    array = as_floats(value, name)
    axes = (2, 3) if is_tensor(value) else (2,)  # tensors (H, d, d) are those of heads
    is_square = array.ndim in axes and array.shape[-2] == array.shape[-1] > 1
    if name.startswith("norm") and is_square:
        raise ValueError(
            f"{name}: expected a norm or an array of norms, got square matrices {array.shape}; "
            "give its norm, or take bounds.table(F, R) of a layer; a square array of norms has to "
            "be flattened, or broadcast from a row and a column"
        )
    return _checked(array, (array >= 0) & (array < np.inf), f"{name}: expected finite numbers ≥ 0")


def check_together(**values: Any) -> None:
    """Refuse arguments of a bound whose shapes do not broadcast with each other."""
    shapes = {
        name: (norms if name.startswith("norm") else as_floats)(value, name).shape
        for name, value in values.items()
    }
    try:
        np.broadcast_shapes(*shapes.values())
    except ValueError:
        got = ", ".join(f"{name} {shape}" for name, shape in shapes.items() if shape)
        raise ValueError(
            f"{next(iter(values))}: expected numbers, or arrays of shapes that broadcast with "
            f"those of the other arguments, got {got}; a column and a row, (m, 1) and (n,), give "
            "every pair"
        ) from None


def square(A: Any) -> np.ndarray:
    """A square matrix of finite numbers."""
    matrix = as_floats(A, "A", finite=True)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"A: expected one square matrix (d, d), got shape {matrix.shape}")
    return matrix


def counts(n: Any) -> np.ndarray:
    """Numbers of tokens ≥ 1; infinity is allowed, for the mean-field limit."""
    array = as_floats(n, "n")
    whole = (array >= 1) & ((array == np.floor(array)) | (array == np.inf))
    return _checked(array, whole, "n: expected whole numbers of tokens, at least 1")


def orders(p: Any) -> np.ndarray:
    """Orders 1 ≤ p ≤ ∞ of a Wasserstein distance."""
    array = as_floats(p, "p")
    return _checked(array, array >= 1, "p: expected orders 1 ≤ p ≤ ∞ of a distance")


def exponent(
    norm_A: Any, radius: Any, shift: Any = 0.0, *, name: str = "norm_A"
) -> tuple[np.ndarray, np.ndarray]:
    """c = ‖A‖R² + |b|R, cut off at 1e300, and ‖A‖R², infinite where c was cut off.

    The first is the exponent of a bound, the second is added to it.
    """
    a, r, b = norms(norm_A, name), norms(radius, "radius"), norms(shift, "shift")
    with np.errstate(over="ignore"):
        field = a * r * r
        average = field + b * r
    return np.minimum(average, _LARGEST), np.where(average > _LARGEST, np.inf, field)


def _checked(array: np.ndarray, good: np.ndarray, expected: str) -> np.ndarray:
    if not good.all():
        raise ValueError(f"{expected}, got {array[~good].flat[0]}")
    return array


def out(value: Any) -> Any:
    """A float where the arguments were numbers."""
    return float(value) if np.ndim(value) == 0 else value


def narrowed(
    value: Callable[[np.ndarray], Any], low: Any, high: Any, *, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Brackets of minima, shorter by 0.618 a step; of each function one minimum lies within."""
    for _ in range(steps):
        left, right = high - _RATIO * (high - low), low + _RATIO * (high - low)
        smaller = value(left) < value(right)
        low, high = np.where(smaller, low, left), np.where(smaller, right, high)
    return low, high
