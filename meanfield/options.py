"""Checks at the door of plain values: numbers, arrays, truth values, names. Without torch.

Each takes the value and its name, and gives it back as Python's own type, or raises with what was
expected and what came.
"""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Iterable
from typing import Any

import numpy as np

__all__ = ["choice", "count", "flag", "meant", "number", "reals", "shown"]

_MOST = 10**12  # of a count: more is a typing error, and would fill any memory


def number(
    value: Any,
    name: str,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
    finite: bool = True,
) -> float:
    """One real number in a range: Python's, NumPy's, or an array or tensor without axes.

    Args:
        value: what came.
        name: of the argument.
        above: it must be more than this.
        least: it must be at least this.
        below: it must be less than this.
        most: it must be at most this.
        finite: whether infinity is refused.

    Raises:
        TypeError: no number; truth values, texts and complex numbers are none.
        ValueError: NaN, or out of the range.
    """
    expected = _range(above, least, below, most)
    found = _plain(value)
    if isinstance(found, bool) or not isinstance(found, numbers.Real):
        raise TypeError(f"{name}: expected {expected}, got {shown(value)}")
    x = float(found)
    good = (
        not math.isnan(x)
        and not (finite and math.isinf(x))
        and (above is None or x > above)
        and (least is None or x >= least)
        and (below is None or x < below)
        and (most is None or x <= most)
    )
    if not good:
        expected = expected.replace("a number", "a finite number") if math.isinf(x) else expected
        raise ValueError(f"{name}: expected {expected}, got {found}")
    return x


def count(value: Any, name: str, *, least: int = 1, most: int = _MOST) -> int:
    """A whole number from `least` to `most`; 3.0 is one, 2.5 and True are not.

    Raises:
        TypeError: no number.
        ValueError: not whole, too small, or too large.
    """
    expected = f"a whole number ≥ {least}"
    found = _plain(value)
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise TypeError(f"{name}: expected {expected}, got {shown(value)}")
    if found != found or not least <= found <= most or found != int(found):
        end = f" and ≤ {most}" if found > most else ""
        raise ValueError(f"{name}: expected {expected}{end}, got {found}")
    return int(found)


def flag(value: Any, name: str) -> bool:
    """True or False, Python's or NumPy's: "False" would count as true, and 0 as a number.

    Raises:
        TypeError: anything else.
    """
    found = _plain(value)
    if not isinstance(found, bool):
        raise TypeError(f"{name}: expected True or False, got {shown(value)}")
    return found


def choice(value: Any, name: str, known: Iterable[str]) -> str:
    """One of several names.

    Raises:
        TypeError: no text.
        ValueError: another name; the message has the nearest one.
    """
    known = tuple(known)
    listed = "one of " + ", ".join(map(repr, known)) if len(known) > 1 else repr(known[0])
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected {listed}, got {shown(value)}")
    if value not in known:
        raise ValueError(f"{name}: expected {listed}, got {value!r}{meant(value, known)}")
    return value


def meant(word: str, known: Iterable[str]) -> str:
    """The end of a message: a question after the known word that is nearest, or nothing."""
    by_letters = {one.strip().lower(): one for one in known}
    near = difflib.get_close_matches(str(word).strip().lower(), by_letters, 1)
    return f"; did you mean {by_letters[near[0]]!r}?" if near else ""


def shown(value: Any) -> str:
    """What came, in a few words: a text or a number as it is, anything else by its type."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    if isinstance(value, type):
        return f"the class {value.__name__}; write {value.__name__}(...)"
    shape = getattr(value, "shape", None)
    of = f" of shape {tuple(shape)}" if isinstance(shape, tuple) and shape else ""
    return f"{type(value).__name__}{of}"


def reals(values: Any, name: str = "value") -> np.ndarray:
    """A float64 array of numbers, an array, or a tensor on any device.

    Raises:
        TypeError: text, truth values, complex numbers, objects.
        ValueError: rows of different lengths, masked entries.
    """
    if hasattr(values, "detach"):
        if values.is_complex() or str(values.dtype) == "torch.bool" or values.is_sparse:
            raise TypeError(f"{name}: expected real numbers, got {values.dtype}, {values.layout}")
        values = values.detach().cpu().double().numpy()
    elif hasattr(values, "to_numpy"):
        values = values.to_numpy()
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{name}: expected rows of one length, got {error}") from None
    except (TypeError, RuntimeError):  # tables of tables, tensors with a gradient in a list
        raise TypeError(f"{name}: expected an array of numbers, got {shown(values)}") from None
    if array.dtype.kind == "O" and not array.ndim and isinstance(values, numbers.Real):
        array = np.asarray(float(values))
    if not array.size:
        raise ValueError(f"{name}: expected at least one number, got none")
    if array.dtype.kind not in "iuf":
        raise TypeError(f"{name}: expected a number or an array of them, got {shown(values)}")
    if np.ma.is_masked(values):
        raise ValueError(f"{name}: expected an array without masked entries, got some")
    return array.astype(float, copy=False)


def _plain(value: Any) -> Any:
    """A number of NumPy or torch without axes as Python's own; anything else as it is."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return value.item()
    return value


def _range(
    above: float | None, least: float | None, below: float | None, most: float | None
) -> str:
    if above == 0 and below == 1:
        return "a number between 0 and 1"
    ends = [
        f"{sign} {end:g}"
        for sign, end in ((">", above), ("≥", least), ("<", below), ("≤", most))
        if end is not None
    ]
    return f"a number {' and '.join(ends)}".strip()
