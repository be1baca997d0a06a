"""Output times of a flow: metastable stages last about e^β, so they are often logarithmic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from meanfield.checks import as_floats, number
from meanfield.checks import count as whole
from meanfield.results import Variable

TIME = Variable("time", "time, or depth in layers", dims=("time",), symbol="t")


def log_clock(first: float, last: float, count: int, *, start: float = 0.0) -> np.ndarray:
    """The start, and then `count` times whose distances from it grow geometrically.

    Args:
        first: distance of the second time from the start, > 0.
        last: distance of the last time from the start, > first.
        count: how many times follow the start, at least 2.
        start: the first time.

    Returns:
        Times t₀ < … < t_count, shape (count + 1,).

    Example:
        >>> log_clock(0.1, 10.0, 3)
        array([ 0. ,  0.1,  1. , 10. ])
    """
    first = number(first, "first", above=0)
    last, start = number(last, "last", above=first), number(start, "start")
    count = whole(count, "count", least=2)
    # Exact ends: a geometric sequence misses them by a rounding error.
    inner = start + np.geomspace(first, last, count)[1:-1]
    return np.concatenate([[start, start + first], inner, [start + last]])


def checked_times(times: Sequence[float] | Any) -> np.ndarray:
    """Increasing finite times, (T,), T ≥ 1.

    Raises:
        ValueError: another shape, NaN or infinite times, times that do not increase.
    """
    found = as_floats(times, "times", finite=True)
    if found.ndim != 1:
        got = f"{float(found):g}" if found.ndim == 0 else f"shape {found.shape}"
        raise ValueError(f"times: expected increasing numbers such as [0.0, 10.0], got {got}")
    if not (np.diff(found) > 0).all():
        k = int(np.argmin(np.diff(found)))
        raise ValueError(
            f"times: expected increasing numbers, got {found[k]:g} before {found[k + 1]:g}"
        )
    return found
