"""Upper bounds of a layer on a ball, statement by statement."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from meanfield.bounds.l2 import l2_attention_2, l2_theorem_3_2, tied_norms
from meanfield.bounds.layer import Layer, raised
from meanfield.bounds.rates import mean_field_by_rate
from meanfield.bounds.scores import by_oscillation, capped_mean_field, l2_mean_field
from meanfield.bounds.sharp import masked_mean_field, mean_field, tokens
from meanfield.bounds.statements import OURS, BoundRow, Question
from meanfield.bounds.theorems import theorem_3_5
from meanfield.checks import as_floats

if TYPE_CHECKING:
    from meanfield.attention.parameters import AttentionParameters

_TOKENS, _MASKED_TOKENS = "Euclidean, n tokens", "Euclidean, n tokens, masked"
_PLAIN, _MASKED = "W₂, all measures", "conditional d₂, masked"


def upper_rows(question: Question) -> Iterator[BoundRow]:
    """Of dot products under the softmax, on all measures or all tokens in the ball."""
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
    yield question.upper(
        ("Thm 3.3, 4.3", "upper", _TOKENS, "tokens in B_R", f"[CAP24], Lemma 3.8{bias}"),
        lambda: layer.theorem_3_3(radius, some),
        kernel or counted,
    )
    yield question.upper(
        ("tokens", "upper", _TOKENS, "tokens in B_R", OURS),
        lambda: layer.joined(tokens(n=some, **heads)),
        kernel or counted or question.plain,
    )
    yield question.upper(
        ("masked tokens", "upper", _MASKED_TOKENS, "tokens in B_R", OURS),
        lambda: layer.joined(tokens(n=some, causal=True, **heads)),
        kernel or counted or question.masked,
    )
    yield question.upper(
        ("Thm 3.5", "upper", _PLAIN, "measures on B_R", f"[CAP24], Lemma 3.8{bias}"),
        lambda: raised(float(np.sum(theorem_3_5(A, V, radius)))),
        kernel or question.plain,
    )
    yield question.upper(
        ("mean field", "upper", _PLAIN, "measures on B_R", OURS),
        lambda: layer.joined(_by_norm_or_rate(layer, radius, mean_field(**heads))),
        kernel or question.plain,
    )
    yield question.upper(
        ("masked mean field", "upper", _MASKED, "measures on [0,1]×B_R", OURS),
        lambda: layer.joined(masked_mean_field(**heads, dim=layer.parameters.dim)),
        kernel or question.masked,
    )
    yield question.upper(
        (
            *("Thm 3.7, 4.5", "limit", "Euclidean at λX, λ → ∞"),
            *("each query has one best key per head", "[CAP24], triangle inequality"),
        ),
        lambda: raised(float(np.sum(V)) * some**0.5),
        kernel or counted or question.bare,
    )


def other_rows(question: Question) -> Iterator[BoundRow]:
    """Of other scores: capped, squared distances, or of bounded queries and keys."""
    if question.kind == "soft cap":
        yield from _capped_rows(question)
    elif question.kind == "l2":
        yield from _l2_rows(question)
    elif question.kind == "other":
        yield from _bounded_rows(question)


def _bounded_rows(question: Question) -> Iterator[BoundRow]:
    """Rotary positions, QK-norm, …: by what is known of the sizes of queries and keys."""
    layer, radius = question.layer, question.radius
    sizes = layer.sizes(radius)
    unknown = "no bound of the kernel's scores is known" if sizes is None else None

    def bound(causal: bool) -> float:
        assert sizes is not None
        q, k, q_slope, k_slope, bias = (as_floats(one) for one in sizes)
        each = by_oscillation(
            1.0, radius, 2 * q * k + bias, q * k_slope, radius * q_slope * k, causal=causal
        )
        return layer.joined(each)

    yield from _both(question, "bounded scores", "points in B_R, any positions", bound, unknown)


def _capped_rows(question: Question) -> Iterator[BoundRow]:
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

    yield from _both(question, "soft cap", "points in B_R", bound, None)


def _l2_rows(question: Question) -> Iterator[BoundRow]:
    layer = question.layer
    tied, G, rank = tied_norms(layer.parameters)
    untied = None if tied else "queries and keys are not tied"

    def bound(causal: bool) -> float:
        return layer.joined(l2_mean_field(G, 1.0, question.radius, rank, causal=causal))

    yield from _both(question, "L2", "points in B_R", bound, untied)
    yield question.upper(
        ("L2, n tokens", "upper", "Euclidean, n tokens, masked too", "any tokens", OURS),
        lambda: l2_attention_2(layer.parameters, question.n or 1),
        untied or question.counted or _values_outside(layer.parameters),
    )
    yield question.upper(
        ("L2, Thm 3.2", "upper", _TOKENS, "any tokens", "[KPM21]"),
        lambda: l2_theorem_3_2(layer.parameters, question.n or 1),
        untied
        or question.counted
        or question.plain
        or _values_outside(layer.parameters, theorem=l2_theorem_3_2),
    )


def _both(
    question: Question,
    name: str,
    assumption: str,
    bound: Callable[[bool], float],
    reason: str | None,
) -> Iterator[BoundRow]:
    """A bound of plain attention and, given True, of masked attention."""
    yield question.upper(
        (name, "upper", _PLAIN, assumption, OURS),
        lambda: bound(False),
        reason or question.plain,
    )
    yield question.upper(
        (f"{name}, masked", "upper", _MASKED, assumption, OURS),
        lambda: bound(True),
        reason or question.masked,
    )


def _values_outside(
    parameters: AttentionParameters, *, theorem: Callable[[Any, Any], float] = l2_attention_2
) -> str | None:
    try:
        theorem(parameters, 1)
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
