"""All theorems at once: what each says of one layer on one ball, or why it says nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meanfield import html
from meanfield.bounds.layer import (
    LayerNorms,
    bilinear,
    general_of_layer,
    layer_norms,
    raised,
)
from meanfield.bounds.theorems import (
    general_lower,
    masked_mean_field,
    mean_field,
    two_dirac_lower,
)
from meanfield.capabilities import HasScoreMatrices

__all__ = ["BoundRow", "BoundTable", "table"]

_TOKENS = "Euclidean, n tokens"
_PLAIN, _MASKED = "W₂, all measures", "conditional d₂, masked"
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

    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        shown = f"{self.value:.6g}" if self.value is not None else f"not applicable: {self.reason}"
        return (self.name, shown, self.side, self.of, self.assumption, self.source)


@dataclass(frozen=True)
class BoundTable(Sequence[BoundRow]):
    """Rows in the order of the theorems; an index is a number, or a name by `row`."""

    rows: tuple[BoundRow, ...]
    radius: float
    n: int | None

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[BoundRow]:
        return iter(self.rows)

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

    def _repr_html_(self) -> str:
        return html.table(self._title(), [row.cells() for row in self.rows], header=_HEADER)


def table(
    layer: Any, radius: float, n: int | None = None, *, causal: bool | None = None
) -> BoundTable:
    """What every theorem says a priori of a layer on B_R; heads are summed ([CAP24] Lemma 3.8).

    Args:
        layer: parameters, a map that has them as ``parameters``, or the pair (A, V), see
            `layer_norms`.
        radius: R > 0, the unit of the points.
        n: number of tokens; without it the statements about n tokens do not apply.
        causal: whether the layer is masked; by default as the map says (its ``causal``), else
            both kinds of statements are given.

    Raises:
        ValueError: a radius or a number of tokens that is not positive, shapes that do not fit.

    Example:
        >>> found = table(([[-1.0]], [[1.0]]), 1.0, n=10)
        >>> [row.name for row in found if row.side == "lower"]
        ['Prop. 3.4', 'Prop. 3.4, any V', 'two Diracs']
    """
    if not radius > 0:
        raise ValueError(f"radius: expected a number > 0, got {radius}")
    if n is not None and n < 1:
        raise ValueError(f"n: expected at least 1 token, or None, got {n}")
    if causal is None:
        causal = getattr(layer, "causal", None)
    other = None
    if isinstance(layer, HasScoreMatrices) and not len(layer.score_matrices):
        other = "the kernel is not the dot product under the softmax"
    parameters = getattr(layer, "parameters", layer)
    norms = layer_norms(parameters)
    masked = None if causal is None or causal else "the layer is not masked"
    plain = "the layer is masked" if causal else None
    rows = [
        *_upper_rows(parameters, norms, radius, n, (other, plain, masked)),
        *_lower_rows(parameters, norms, radius, n, other),
    ]
    return BoundTable(tuple(rows), radius, n)


def _upper_rows(
    parameters: Any,
    norms: LayerNorms,
    radius: float,
    n: int | None,
    reasons: tuple[str | None, str | None, str | None],
) -> Iterator[BoundRow]:
    other, plain, masked = reasons
    counted = None if n is not None else "the number of tokens is not given"
    some = n or 1
    A, V = norms.effective_A(radius), norms.V
    bias = "; query bias: this package" if norms.shift.any() else ""
    yield _row(
        ("Thm 3.3, 4.3", "upper", _TOKENS, "tokens in B_R", f"[CAP24], Lemma 3.8{bias}"),
        lambda: general_of_layer(parameters, radius, some),
        other or counted,
    )
    yield _row(
        ("Thm 3.5", "upper", _PLAIN, "measures on B_R", f"[CAP24], Lemma 3.8{bias}"),
        lambda: raised(float(np.sum(mean_field(A, V, radius)))),
        other or plain,
    )
    yield _row(
        ("masked mean field", "upper", _MASKED, "measures on [0,1]×B_R", "this package"),
        lambda: raised(float(np.sum(masked_mean_field(A, V, radius)))),
        other or masked,
    )
    yield _row(
        (
            *("Thm 3.7, 4.5", "limit", "Euclidean at λX, λ → ∞"),
            *("each query has one best key per head", "[CAP24], triangle inequality"),
        ),
        lambda: raised(float(np.sum(V)) * some**0.5),
        other or counted,
    )


def _lower_rows(
    parameters: Any, norms: LayerNorms, radius: float, n: int | None, other: str | None
) -> Iterator[BoundRow]:
    counted = None if n is not None else "the number of tokens is not given"
    some = n or 1
    reason = other or _no_witness(norms)
    pairs: list[tuple[float, float]] = []
    identity = False
    if reason is None:
        A, V = (heads[0] for heads in bilinear(parameters))
        identity = V.shape[0] == V.shape[1] and bool((np.eye(len(V)) == V).all())
        pairs = _critical_pairs(A, V)
        reason = None if pairs else "A has no real eigenvalue but 0"
    witness = "one token at Ru, the others at −Ru or Ru/2"

    def best(bound: Callable[[float], float]) -> float:
        return max(gain * bound(gamma) for gamma, gain in pairs)

    yield _row(
        ("Prop. 3.4", "lower", _TOKENS, f"V = I; {witness}", "[CAP24]"),
        lambda: best(lambda gamma: general_lower(gamma, radius, some)),
        reason or counted or (None if identity else "V is not the identity"),
    )
    yield _row(
        ("Prop. 3.4, any V", "lower", _TOKENS, witness, "this package"),
        lambda: best(lambda gamma: general_lower(gamma, radius, some)),
        reason or counted,
    )
    yield _row(
        ("two Diracs", "lower", "W₂ or d₂", "two atoms, best weights", "this package"),
        lambda: best(lambda gamma: two_dirac_lower(gamma, radius)),
        reason,
    )


def _no_witness(norms: LayerNorms) -> str | None:
    if len(norms.A) > 1:
        return "several heads may cancel"
    if norms.shift.any():
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
            # A hair below: eigenvectors are known to rounding only.
            gain = (1 - 1e-9) * float(np.linalg.norm(V @ direction))
            pairs.append((float(max(-value.real, value.real / 8)), gain))
    return pairs


def _row(
    words: tuple[str, str, str, str, str], value: Callable[[], float], reason: str | None
) -> BoundRow:
    name, side, of, assumption, source = words
    number = None if reason is not None else float(value())
    return BoundRow(name, number, side, of, assumption, source, reason)
