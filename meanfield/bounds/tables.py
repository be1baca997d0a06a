"""All theorems at once: what each says of one layer on one ball, or why it says nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from meanfield.bounds.diracs import masked_two_dirac_lower, two_dirac_lower
from meanfield.bounds.l2 import l2_attention_2, tied_norms
from meanfield.bounds.layer import Layer, raised
from meanfield.bounds.rates import mean_field_by_rate
from meanfield.bounds.scores import capped_mean_field, l2_mean_field
from meanfield.bounds.sharp import masked_mean_field, mean_field, tokens
from meanfield.bounds.theorems import proposition_3_4, theorem_3_5
from meanfield.checks import count, number
from meanfield.html import html_table
from meanfield.results.answers import Answer, labelled

if TYPE_CHECKING:
    from meanfield.attention.parameters import AttentionParameters

__all__ = ["BoundRow", "BoundTable", "table"]

_TOKENS, _MASKED_TOKENS = "Euclidean, n tokens", "Euclidean, n tokens, masked"
_PLAIN, _MASKED = "W₂, all measures", "conditional d₂, masked"
_OURS = "this package"
_ALONG = ("statement",)
_HEADER = ("statement", "value", "side", "of", "assumption", "source")


@dataclass(frozen=True)
class BoundRow:
    """One theorem applied to one layer.

    Attributes:
        name: of the statement.
        value: the number, or None where the statement does not apply.
        side: "upper" or "lower" bound of the constant, or "limit": an upper bound of the local
            constant at λX as λ → ∞.
        of: of which constant.
        assumption: under what.
        source: "[CAP24] …", or "this package" for what is not in the papers.
        reason: why it does not apply, or None.
    """

    name: str
    value: float | None
    side: str
    of: str
    assumption: str
    source: str
    reason: str | None = None

    @property
    def applicable(self) -> bool:
        """Whether there is a number."""
        return self.value is not None

    def __float__(self) -> float:
        if self.value is None:
            raise ValueError(f"{self.name}: expected a statement that applies, got {self.reason}")
        return self.value

    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        shown = f"{self.value:.6g}" if self.value is not None else f"not applicable: {self.reason}"
        return (self.name, shown, self.side, self.of, self.assumption, self.source)


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
        words = (self.side, self.of, self.assumption, self.source)
        reasons = (reason or None for reason in self.reason)
        columns = zip(self.statement, self.value, *words, reasons, strict=True)
        return tuple(BoundRow(*cells) for cells in columns)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

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


def table(
    layer: Any, radius: float, n: int | None = None, *, causal: bool | None = None
) -> BoundTable:
    """What every theorem says a priori of a layer on B_R; heads are summed ([CAP24] Lemma 3.8).

    Args:
        layer: `meanfield.attention.SelfAttention`, its parameters, or the pair (A, V) of arrays
            (d, d) or (H, d, d). The map says whether it is masked and what its scores are.
        radius: R > 0, the unit of the points.
        n: number of tokens; without it the statements about n tokens do not apply.
        causal: whether bare matrices are masked; without it both kinds of statements are given.

    Raises:
        ValueError: a radius or a number of tokens that is not positive, shapes that do not fit,
            another mask than the map's.

    Example:
        >>> found = table(([[-1.0]], [[1.0]]), 1.0, n=10)
        >>> [row.name for row in found if row.side == "lower"]
        ['Prop. 3.4', 'Prop. 3.4, any V', 'two Diracs', 'two Diracs, masked']
    """
    radius = number(radius, "radius", above=0)
    n = None if n is None else count(n, "n")
    question = _Question(Layer.of(layer, causal), radius, n)
    rows = [*_upper_rows(question), *_other_rows(question), *_lower_rows(question)]
    return BoundTable(
        statement=tuple(row.name for row in rows),
        value=tuple(row.value for row in rows),
        side=tuple(row.side for row in rows),
        of=tuple(row.of for row in rows),
        assumption=tuple(row.assumption for row in rows),
        source=tuple(row.source for row in rows),
        reason=tuple(row.reason or "" for row in rows),
        applies=tuple(row.applicable for row in rows),
        radius=radius,
        n=n,
    )


@dataclass(frozen=True, eq=False)
class _Question:
    """A layer, a ball and a number of tokens; and why statements do not apply, or None."""

    layer: Layer
    radius: float
    n: int | None

    @property
    def kind(self) -> str:
        """Of the scores; bare matrices are A and V of dot products."""
        return "dot product" if self.layer.score is None else self.layer.score.kind

    @property
    def kernel(self) -> str | None:
        bilinear = self.kind == "dot product"
        return None if bilinear else "the kernel is not the dot product under the softmax"

    @property
    def plain(self) -> str | None:
        return "the layer is masked" if self.layer.causal else None

    @property
    def masked(self) -> str | None:
        return "the layer is not masked" if self.layer.causal is False else None

    @property
    def counted(self) -> str | None:
        return None if self.n is not None else "the number of tokens is not given"


def _upper_rows(question: _Question) -> Iterator[BoundRow]:
    layer, radius, some = question.layer, question.radius, question.n or 1
    kernel, counted = question.kernel, question.counted
    A, V = layer.effective_A(radius), layer.norm_V
    bias = "; query bias: this package" if layer.shift.any() else ""
    heads: dict[str, Any] = {
        "norm_A": layer.norm_A,
        "norm_V": 1.0,
        "radius": radius,
        "shift": layer.shift,
    }
    yield _row(
        ("Thm 3.3, 4.3", "upper", _TOKENS, "tokens in B_R", f"[CAP24], Lemma 3.8{bias}"),
        lambda: layer.theorem_3_3(radius, some),
        kernel or counted,
    )
    yield _row(
        ("tokens", "upper", _TOKENS, "tokens in B_R", _OURS),
        lambda: layer.joined(tokens(n=some, **heads)),
        kernel or counted or question.plain,
    )
    yield _row(
        ("masked tokens", "upper", _MASKED_TOKENS, "tokens in B_R", _OURS),
        lambda: layer.joined(tokens(n=some, causal=True, **heads)),
        kernel or counted or question.masked,
    )
    yield _row(
        ("Thm 3.5", "upper", _PLAIN, "measures on B_R", f"[CAP24], Lemma 3.8{bias}"),
        lambda: raised(float(np.sum(theorem_3_5(A, V, radius)))),
        kernel or question.plain,
    )
    yield _row(
        ("mean field", "upper", _PLAIN, "measures on B_R", _OURS),
        lambda: layer.joined(_by_norm_or_rate(layer, radius, mean_field(**heads))),
        kernel or question.plain,
    )
    yield _row(
        ("masked mean field", "upper", _MASKED, "measures on [0,1]×B_R", _OURS),
        lambda: layer.joined(masked_mean_field(**heads, dim=layer.parameters.dim)),
        kernel or question.masked,
    )
    yield _row(
        (
            *("Thm 3.7, 4.5", "limit", "Euclidean at λX, λ → ∞"),
            *("each query has one best key per head", "[CAP24], triangle inequality"),
        ),
        lambda: raised(float(np.sum(V)) * some**0.5),
        kernel or counted,
    )


def _other_rows(question: _Question) -> Iterator[BoundRow]:
    """Of scores that are capped, or squared distances; none for others."""
    if question.kind == "soft cap":
        yield from _capped_rows(question)
    elif question.kind == "l2":
        yield from _l2_rows(question)


def _capped_rows(question: _Question) -> Iterator[BoundRow]:
    layer, score = question.layer, question.layer.score
    assert score is not None

    def bound(causal: bool) -> float:
        each = capped_mean_field(
            layer.norm_A,
            1.0,
            question.radius,
            score.tau,
            causal=causal,
            shift=layer.shift,
            key_shift=layer.key_shift,
        )
        return layer.joined(each)

    where = ("points in B_R", _OURS)
    yield _row(("soft cap", "upper", _PLAIN, *where), lambda: bound(False), question.plain)
    yield _row(
        ("soft cap, masked", "upper", _MASKED, *where), lambda: bound(True), question.masked
    )


def _l2_rows(question: _Question) -> Iterator[BoundRow]:
    layer = question.layer
    tied, G, rank = tied_norms(layer.parameters)
    untied = None if tied else "queries and keys are not tied"

    def bound(causal: bool) -> float:
        return layer.joined(l2_mean_field(G, 1.0, question.radius, rank, causal=causal))

    where = ("points in B_R", _OURS)
    yield _row(("L2", "upper", _PLAIN, *where), lambda: bound(False), untied or question.plain)
    yield _row(
        ("L2, masked", "upper", _MASKED, *where), lambda: bound(True), untied or question.masked
    )
    yield _row(
        ("L2, n tokens", "upper", "Euclidean, n tokens, masked too", "any tokens", _OURS),
        lambda: l2_attention_2(layer.parameters, question.n or 1),
        untied or question.counted or _values_outside(layer.parameters),
    )


def _values_outside(parameters: AttentionParameters) -> str | None:
    try:
        l2_attention_2(parameters, 1)
    except ValueError:
        return "values see what the queries do not"
    return None


def _by_norm_or_rate(layer: Layer, radius: float, by_norm: np.ndarray) -> np.ndarray:
    """Each head's bound, by the rate of its A where that can be the smaller one."""
    c = layer.norm_A * radius**2
    dim = layer.parameters.dim
    worth = (layer.shift == 0) & (0.5 * dim * np.log1p(4 * c) < c)
    rates = [
        mean_field_by_rate(layer.A[h], 1.0, radius) if worth[h] else by_norm[h]
        for h in range(len(worth))
    ]
    return np.minimum(by_norm, rates)


def _lower_rows(question: _Question) -> Iterator[BoundRow]:
    layer, radius, some = question.layer, question.radius, question.n or 1
    reason = question.kernel or _no_witness(layer)
    pairs: list[tuple[float, float]] = []
    identity = False
    if reason is None:
        A, V = layer.A[0], layer.V[0]
        identity = V.shape[0] == V.shape[1] and bool((np.eye(len(V)) == V).all())
        pairs = _critical_pairs(A, V)
        reason = None if pairs else "A has no real eigenvalue but 0"
    witness = "one token at Ru, the others at −Ru or Ru/2"

    def best(bound: Callable[[float], float]) -> float:
        return max(gain * bound(gamma) for gamma, gain in pairs)

    yield _row(
        ("Prop. 3.4", "lower", _TOKENS, f"V = I; {witness}", "[CAP24]"),
        lambda: best(lambda gamma: proposition_3_4(gamma, radius, some)),
        reason or question.counted or (None if identity else "V is not the identity"),
    )
    yield _row(
        ("Prop. 3.4, any V", "lower", _TOKENS, witness, _OURS),
        lambda: best(lambda gamma: proposition_3_4(gamma, radius, some)),
        reason or question.counted,
    )
    yield _row(
        ("two Diracs", "lower", "W₂ or d₂", "two atoms, best weights", _OURS),
        lambda: best(lambda gamma: two_dirac_lower(gamma, radius)),
        reason,
    )
    yield _row(
        ("two Diracs, masked", "lower", _MASKED, "interleaved at every position", _OURS),
        lambda: best(lambda gamma: masked_two_dirac_lower(gamma, radius)),
        reason or question.masked,
    )


def _no_witness(layer: Layer) -> str | None:
    if len(layer.norm_A) > 1:
        return "several heads may cancel"
    if layer.shift.any():
        return "a query bias moves the witness"
    return None


def _critical_pairs(A: np.ndarray, V: np.ndarray) -> list[tuple[float, float]]:
    """γ = −λ or λ/8 and ‖Vu‖ for the real eigenpairs (λ, u) of A.

    In the witness of Proposition 3.4 the response to a displacement of the lone atom along u is
    along Vu, whatever V; so ‖Vu‖ times the number for V = I is reached.
    """
    values, vectors = np.linalg.eig(A)
    pairs = []
    for value, u in zip(values, vectors.T, strict=True):
        if value.imag == 0 and value.real != 0:
            direction = u.real / np.linalg.norm(u.real)
            # Slightly below: eigenvectors are known to rounding only.
            gain = (1 - 1e-9) * float(np.linalg.norm(V @ direction))
            pairs.append((float(max(-value.real, value.real / 8)), gain))
    return pairs


def _row(
    words: tuple[str, str, str, str, str], value: Callable[[], float], reason: str | None
) -> BoundRow:
    name, side, of, assumption, source = words
    number = None if reason is not None else float(value())
    return BoundRow(name, number, side, of, assumption, source, reason)
