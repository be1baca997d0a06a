"""All theorems at once: what each says of one layer on one ball, or why it says nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from meanfield import html
from meanfield.attention.self_attention import Score, SelfAttention
from meanfield.bounds.diracs import masked_two_dirac_lower, two_dirac_lower
from meanfield.bounds.joins import joined_heads
from meanfield.bounds.l2 import l2_attention_2, tied_norms
from meanfield.bounds.layer import (
    LayerNorms,
    bilinear,
    layer_norms,
    raised,
    theorem_3_3_of_layer,
    value_matrices,
)
from meanfield.bounds.rates import mean_field_by_rate
from meanfield.bounds.scores import l2_mean_field, soft_cap
from meanfield.bounds.sharp import masked_mean_field, mean_field, tokens
from meanfield.bounds.theorems import proposition_3_4, theorem_3_5
from meanfield.checks import as_bool, count, number

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["BoundRow", "BoundTable", "table"]

_TOKENS, _MASKED_TOKENS = "Euclidean, n tokens", "Euclidean, n tokens, masked"
_PLAIN, _MASKED = "W₂, all measures", "conditional d₂, masked"
_OURS = "this package"
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


@dataclass(frozen=True, repr=False)
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

    def to_dataset(self) -> xr.Dataset:
        """The rows along `statement`: value (NaN where there is none), applicable, and words."""
        from meanfield.results import Variable
        from meanfield.results.labels import dataset

        words = ("side", "of", "assumption", "source", "reason")
        along: dict[str, Any] = {"dims": ("statement",)}
        variables = [
            Variable("value", "bound of the Lipschitz constant", **along),
            Variable("applicable", "whether the statement applies", dtype="bool", **along),
            *(Variable(word, word, dtype="str", **along) for word in words),
        ]
        values: dict[str, Any] = {
            word: [getattr(row, word) or "" for row in self.rows] for word in words
        }
        values["value"] = [np.nan if row.value is None else row.value for row in self.rows]
        values["applicable"] = [row.applicable for row in self.rows]
        statement = Variable("statement", "statement", dtype="str", **along)
        names = [row.name for row in self.rows]
        attrs: dict[str, float | int] = {"radius": self.radius}
        if self.n is not None:
            attrs["n"] = self.n
        return dataset(variables, values, coords={"statement": (statement, names)}, attrs=attrs)

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
        ['Prop. 3.4', 'Prop. 3.4, any V', 'two Diracs', 'two Diracs, masked']
    """
    radius = number(radius, "radius", above=0)
    n = None if n is None else count(n, "n")
    causal = getattr(layer, "causal", None) if causal is None else as_bool(causal, "causal")
    other, score = None, Score("dot product")
    if isinstance(layer, SelfAttention):
        score = layer.score
    if score.kind != "dot product":
        other = "the kernel is not the dot product under the softmax"
    parameters = getattr(layer, "parameters", layer)
    norms = layer_norms(parameters)
    masked = None if causal is None or causal else "the layer is not masked"
    plain = "the layer is masked" if causal else None
    rows = [
        *_upper_rows(parameters, norms, radius, n, (other, plain, masked)),
        *_other_rows(layer, score, norms, radius, n, (plain, masked)),
        *_lower_rows(parameters, norms, radius, n, (other, masked)),
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
    heads: dict[str, Any] = {
        "norm_A": norms.A,
        "norm_V": 1.0,
        "radius": radius,
        "shift": norms.shift,
    }

    def joined(each: Any) -> float:
        return raised(joined_heads(value_matrices(parameters), each, norms_V=V))

    yield _row(
        ("Thm 3.3, 4.3", "upper", _TOKENS, "tokens in B_R", f"[CAP24], Lemma 3.8{bias}"),
        lambda: theorem_3_3_of_layer(parameters, radius, some),
        other or counted,
    )
    yield _row(
        ("tokens", "upper", _TOKENS, "tokens in B_R", _OURS),
        lambda: joined(tokens(n=some, **heads)),
        other or counted or plain,
    )
    yield _row(
        ("masked tokens", "upper", _MASKED_TOKENS, "tokens in B_R", _OURS),
        lambda: joined(tokens(n=some, causal=True, **heads)),
        other or counted or masked,
    )
    yield _row(
        ("Thm 3.5", "upper", _PLAIN, "measures on B_R", f"[CAP24], Lemma 3.8{bias}"),
        lambda: raised(float(np.sum(theorem_3_5(A, V, radius)))),
        other or plain,
    )
    yield _row(
        ("mean field", "upper", _PLAIN, "measures on B_R", _OURS),
        lambda: joined(_by_norm_or_rate(parameters, norms, radius, mean_field(**heads))),
        other or plain,
    )
    yield _row(
        ("masked mean field", "upper", _MASKED, "measures on [0,1]×B_R", _OURS),
        lambda: joined(masked_mean_field(**heads)),
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


def _other_rows(
    layer: Any,
    score: Score,
    norms: LayerNorms,
    radius: float,
    n: int | None,
    masks: tuple[str | None, str | None],
) -> Iterator[BoundRow]:
    """Of scores that are capped, or squared distances; none for others."""
    parameters = getattr(layer, "parameters", layer)

    def joined(each: Any) -> float:
        return raised(joined_heads(value_matrices(parameters), each, norms_V=norms.V))

    untied = None
    if score.kind == "l2":
        tied, G, rank = tied_norms(parameters)
        untied = None if tied else "queries and keys are not tied"
    kinds = (("", False, _PLAIN, masks[0]), (", masked", True, _MASKED, masks[1]))
    for tail, causal, of, mask in kinds:
        if score.kind == "soft cap":
            yield _row(
                (f"soft cap{tail}", "upper", of, "points in B_R", _OURS),
                lambda causal=causal: joined(  # type: ignore[misc]
                    soft_cap(norms.A, 1.0, radius, score.tau, causal=causal, shift=norms.shift)
                ),
                mask,
            )
        elif score.kind == "l2":
            yield _row(
                (f"L2{tail}", "upper", of, "points in B_R", _OURS),
                lambda causal=causal: joined(  # type: ignore[misc]
                    l2_mean_field(G, 1.0, radius, rank, causal=causal)
                ),
                untied or mask,
            )
    if score.kind == "l2":
        counted = None if n is not None else "the number of tokens is not given"
        yield _row(
            ("L2, n tokens", "upper", "Euclidean, n tokens, masked too", "any tokens", _OURS),
            lambda: l2_attention_2(parameters, n or 1),
            untied or counted or _values_outside(parameters),
        )


def _values_outside(parameters: Any) -> str | None:
    try:
        l2_attention_2(parameters, 1)
    except ValueError:
        return "values see what the queries do not"
    return None


def _by_norm_or_rate(
    parameters: Any, norms: LayerNorms, radius: float, by_norm: np.ndarray
) -> np.ndarray:
    """Each head's bound, by the rate of its A where that can be the smaller one."""
    c = norms.A * radius**2
    dim = value_matrices(parameters).shape[-1]
    worth = (norms.shift == 0) & (0.5 * dim * np.log1p(4 * c) < c)
    if not worth.any():
        return by_norm
    A = bilinear(parameters)[0]
    found = [
        mean_field_by_rate(A[h], 1.0, radius) if worth[h] else by_norm[h] for h in range(len(A))
    ]
    return np.minimum(by_norm, found)


def _lower_rows(
    parameters: Any,
    norms: LayerNorms,
    radius: float,
    n: int | None,
    reasons: tuple[str | None, str | None],
) -> Iterator[BoundRow]:
    other, masked = reasons
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
        lambda: best(lambda gamma: proposition_3_4(gamma, radius, some)),
        reason or counted or (None if identity else "V is not the identity"),
    )
    yield _row(
        ("Prop. 3.4, any V", "lower", _TOKENS, witness, _OURS),
        lambda: best(lambda gamma: proposition_3_4(gamma, radius, some)),
        reason or counted,
    )
    yield _row(
        ("two Diracs", "lower", "W₂ or d₂", "two atoms, best weights", _OURS),
        lambda: best(lambda gamma: two_dirac_lower(gamma, radius)),
        reason,
    )
    yield _row(
        ("two Diracs, masked", "lower", _MASKED, "interleaved at every position", _OURS),
        lambda: best(lambda gamma: masked_two_dirac_lower(gamma, radius)),
        reason or masked,
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
