"""Small pieces of HTML: tables of plain values, escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np


def escape(value: object) -> str:
    """The value as text that HTML shows as it is, in elements and in quoted attributes.

    Floats have six digits, truth values are words, None is a dash.

    Example:
        >>> escape("<b>"), escape(1 / 3), escape(None)
        ('&lt;b&gt;', '0.333333', '–')
    """
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return html.escape(f"{value:.6g}" if isinstance(value, float) else str(value))


def span(values: Any) -> str:
    """A number, or from where to where a batch of numbers goes.

    Args:
        values: a number, a nested list, or whatever has `tolist`: an array, a tensor. NaN is
            passed over.

    Example:
        >>> span(2.5), span([[1, 4], [2, 3]])
        ('2.5', '1 to 4 (4 numbers)')
    """
    found = np.asarray(values.tolist() if hasattr(values, "tolist") else values, float)
    numbers = found[~np.isnan(found)]
    if not numbers.size:
        return "NaN" if found.size else "none"
    low, high = f"{numbers.min():.6g}", f"{numbers.max():.6g}"
    ends = low if low == high else f"{low} to {high}"
    return ends if found.size == 1 else f"{ends} ({found.size} numbers)"


def html_table(title: str, rows: Iterable[Sequence[object]], *, header: Sequence[str] = ()) -> str:
    """An HTML table; the first cell of each row is its header. All text is escaped.

    Args:
        title: the caption.
        rows: cells of each row, see `escape`, equally many in each.
        header: names of the columns, if they need names.

    Example:
        >>> html_table("A & B", [("n", 3)]).partition("<tbody>")[2]
        '<tr><th scope="row">n</th><td>3</td></tr></tbody></table>'
    """
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return (
        f'<table style="text-align: left"><caption>{escape(title)}</caption>'
        + (f"<thead><tr>{head}</tr></thead>" if head else "")
        + f"<tbody>{body}</tbody></table>"
    )
