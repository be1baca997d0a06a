"""All theorems at once: what each says of one layer on one ball, or why it says nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple
from functools import cached_property
from typing import TYPE_CHECKING, Any

from meanfield.bounds.layer import Layer
from meanfield.bounds.statements import BoundRow, Question
from meanfield.bounds.theorem_list import statements
from meanfield.checks import count, length_rounding, number
from meanfield.habits import with_hints
from meanfield.html import html_table
from meanfield.results.answers import Answer, labelled

if TYPE_CHECKING:
    from meanfield.measures import ParticleMeasure

_ALONG = ("statement",)
_HEADER = ("statement", "value", "side", "of", "assumption", "source")


class BoundTable(
    Answer, Sequence[BoundRow], noun="value", title="Bounds of the Lipschitz constant"
):
    """Rows in the order of the theorems; an index is a number, or a name by `row`.

    Attributes:
        statement: the names of the rows; the other columns are those of `BoundRow`.
        value: None where a statement does not apply.
        reason: why, or "".
        applies: whether there is a number.
        radius: R of the ball.
        n: number of tokens, if it was given.
    """

    statement: tuple[str, ...] = labelled("statement", dims=_ALONG, dtype="str")
    value: tuple[float | None, ...] = labelled("bound of the Lipschitz constant", dims=_ALONG)
    side: tuple[str, ...] = labelled("side", dims=_ALONG, dtype="str")
    of: tuple[str, ...] = labelled("of", dims=_ALONG, dtype="str")
    assumption: tuple[str, ...] = labelled("assumption", dims=_ALONG, dtype="str")
    source: tuple[str, ...] = labelled("source", dims=_ALONG, dtype="str")
    reason: tuple[str, ...] = labelled("reason", dims=_ALONG, dtype="str")
    applies: tuple[bool, ...] = labelled(
        "whether the statement applies", dims=_ALONG, dtype="bool", name="applicable"
    )
    radius: float = labelled("radius", attribute=True)
    n: int | None = labelled("number of tokens", attribute=True)

    @cached_property
    def rows(self) -> tuple[BoundRow, ...]:
        """One statement each."""
        words = (self.side, self.of, self.assumption, self.source, self.reason)
        return tuple(map(BoundRow, self.statement, self.value, *words))

    def __getitem__(self, index: Any) -> Any:
        return self.row(index) if isinstance(index, str) else self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, name: str) -> BoundRow:
        """The row of a statement.

        Raises:
            KeyError: no such statement.
        """
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"expected one of {[row.name for row in self.rows]}, got {name!r}")

    @property
    def applicable(self) -> tuple[BoundRow, ...]:
        """The rows that have a number."""
        return tuple(row for row in self.rows if row.applicable)

    def _title(self) -> str:
        tokens = "" if self.n is None else f", n = {self.n}"
        return f"Bounds on the ball of radius {self.radius:g}{tokens}"

    def __str__(self) -> str:
        lines = [_HEADER, *(row.cells() for row in self.rows)]
        widths = [max(len(line[k]) for line in lines) for k in range(len(_HEADER))]
        text = ("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines)
        return "\n".join([self._title(), *(line.rstrip() for line in text)])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return html_table(self._title(), [row.cells() for row in self.rows], header=_HEADER)


@with_hints
def table(
    layer: Any,
    radius: float,
    n: int | None = None,
    *,
    points: Any = None,
) -> BoundTable:
    """What every theorem says of a layer on B_R; heads are summed ([CAP24] Lemma 3.8).

    Behind LayerNorm or RMSNorm the gain is absorbed (`AttentionParameters.after`), attention sees
    the ball of radius √d, and what bounds attention is multiplied by the norm's constant, 1/σ for
    the least spread σ of `points`, or 1/√ε.

    Args:
        layer: `meanfield.attention.SelfAttention`, a `meanfield.layers.Chain` of a norm and such a
            layer, or the parameters of a plain one.
        radius: R > 0 of the points that come in, in their unit.
        n: number of tokens; without it, and without points, the statements about n tokens do not
            apply.
        points: tokens (n, d) or a measure, in B_R; without them the statements at an input do not
            apply, and with weights of their own those about n tokens do not.

    Raises:
        TypeError: another map.
        ValueError: a radius or a number of tokens that is not positive, points outside the ball
            or of another number.

    Example:
        >>> from meanfield.attention import AttentionParameters, SelfAttention
        >>> F = SelfAttention(AttentionParameters.from_bilinear([[-1.0]], [[1.0]]), causal=True)
        >>> [row.name for row in table(F, 1.0, n=10).applicable if row.side == "lower"]
        ['Prop. 3.4', 'two Diracs', 'two Diracs, masked']
    """
    radius = number(radius, "radius", above=0)
    n = None if n is None else count(n, "n")
    known = Layer.of(layer)
    mu = None if points is None else _in_ball(points, radius, n)
    n = n if mu is None else mu.n_particles
    question = Question.of(known, radius, n, mu)
    rows = [each.row(question) for each in statements(known.attention.score.kind)]
    columns: dict[str, Any] = dict(
        zip((*_HEADER, "reason"), zip(*map(astuple, rows), strict=True), strict=True)
    )
    applies = tuple(row.applicable for row in rows)
    return BoundTable(**columns, applies=applies, radius=radius, n=n)


def _in_ball(points: Any, radius: float, n: int | None) -> ParticleMeasure:
    """The measure of these points: their own, or uniform at positions i/n."""
    from meanfield.measures import ParticleMeasure, check_single  # loads torch

    mu = points if isinstance(points, ParticleMeasure) else ParticleMeasure.from_sequence(points)
    check_single(mu, "points")
    present = mu.log_weights > -math.inf  # others are no tokens
    points, logs = mu.points[present], mu.log_weights[present]
    positions = None if mu.positions is None else mu.positions[present]
    mu = ParticleMeasure(points, log_weights=logs, positions=positions)
    if n not in (None, mu.n_particles):
        raise ValueError(f"n: expected {mu.n_particles}, the number of points, or None, got {n}")
    largest = float(mu.points.norm(dim=-1).max())
    if largest > radius * (1 + length_rounding(mu.points)):
        raise ValueError(
            f"points: expected them in the ball of radius {radius:.9g}, got {largest:.9g}"
        )
    return mu
