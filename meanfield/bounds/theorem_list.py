"""Every theorem, in the order of the table: its words, what it asks, its number."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from scipy.spatial.distance import pdist

from meanfield.bounds.diracs import masked_two_dirac_lower, two_dirac_lower
from meanfield.bounds.l2 import is_tied, l2_attention_2, l2_theorem_3_2
from meanfield.bounds.layer import raised
from meanfield.bounds.rates import mean_field_by_rate
from meanfield.bounds.scores import (
    by_oscillation,
    capped_mean_field,
    l2_mean_field,
    sigmoid_mean_field,
)
from meanfield.bounds.sharp import masked_mean_field, mean_field, tokens
from meanfield.bounds.statements import (
    OURS,
    Ask,
    Question,
    Statement,
    best_pair,
    far_token,
    is_far_enough,
)
from meanfield.bounds.theorems import proposition_3_4, theorem_3_5
from meanfield.checks import as_floats

_TOKENS, _MASKED_TOKENS = "Euclidean, n tokens", "Euclidean, n tokens, masked"
_PLAIN, _CONDITIONAL = "{distance}, all measures", "conditional d₂, masked"
_HERE = "Euclidean, at the points"
_LEMMA_3_8 = "[CAP24], Lemma 3.8{bias}"


# ------------------------------------------------------------ what they ask


def _fits(theorem: Callable[[Any, Any], float], otherwise: str) -> Ask:
    def holds(question: Question) -> bool:
        try:
            theorem(question.layer.parameters, 1)
        except ValueError:
            return False
        return True

    return Ask(otherwise, holds)


_BILINEAR = Ask(
    "the kernel is not the dot product under the softmax",
    lambda q: q.layer.attention.score.kind == "dot product",
)
_UNMASKED = Ask("the layer is masked", lambda q: not q.layer.attention.causal)
_MASKED = Ask("the layer is not masked", lambda q: q.layer.attention.causal)
_COUNTED = Ask("the number of tokens is not given", lambda q: q.n is not None)
_UNIFORM = Ask("the points have weights of their own", lambda q: q.is_uniform)
_PLACED = Ask("no points are given", lambda q: q.points is not None)
_FIRST = Ask("a norm comes before attention", lambda q: q.layer.norm is None)
_ONE_HEAD = Ask("several heads may cancel", lambda q: len(q.layer.norm_A) == 1)
_UNBIASED = Ask("a query bias moves the witness", lambda q: not q.layer.shift.any())
_NO_KEY_BIAS = Ask("a key bias moves scores past the sink", lambda q: not q.layer.key_shift.any())
_NO_VALUE_BIAS = Ask(
    "a bias of the values moves with the mass that a query gives to the atoms",
    lambda q: q.layer.has_centred_values,
)
_EIGEN = Ask("A has no real eigenvalue but 0", lambda q: bool(q.eigenpairs))
_SEVERAL = Ask("there is one token alone", lambda q: q.tokens >= 2)
_FEW = Ask("too many tokens for one to matter", is_far_enough)
_TIED = Ask(
    "queries and keys are not tied, or the scale is negative",
    lambda q: is_tied(q.layer.parameters),
)
_VALUES_FIT = _fits(l2_attention_2, "values see what the queries do not")
_AS_PRINTED = _fits(
    l2_theorem_3_2, "scale or values are not those of the paper, 1/√k and W^Vᵀ W^Q W^Qᵀ/√k"
)
_SIZED = Ask("no bound of the kernel's scores is known", lambda q: q.sizes is not None)
_DECLARES = Ask("the map declares no bound at an input", lambda q: q.declared is not None)
_WITNESSED = (_BILINEAR, _FIRST, _ONE_HEAD, _UNBIASED)


# ------------------------------------------------------------ numbers of several steps


def _mean_field(question: Question) -> float:
    """Each head's bound, by the rate of its A where that can be the smaller one."""
    layer, radius = question.layer, question.radius
    by_norm = mean_field(layer.norm_A, 1.0, radius, shift=layer.shift)
    c = layer.norm_A * radius**2
    dim = layer.parameters.dim
    worth = (layer.shift == 0) & (0.5 * dim * np.log1p(4 * c) < c)
    rates = [
        mean_field_by_rate(layer.A[h], 1.0, radius) if worth[h] else by_norm[h]
        for h in range(len(worth))
    ]
    return layer.joined(rates)


def _capped(question: Question, causal: bool) -> float:
    layer = question.layer
    return question.joined(
        capped_mean_field, tau=layer.attention.score.tau, causal=causal, key_shift=layer.key_shift
    )


def _sink(question: Question) -> float:
    rows = question.layer.attention.normalization.rows
    assert rows is not None
    return question.joined(mean_field, sink=as_floats(rows.sink))


def _l2(question: Question, causal: bool) -> float:
    layer, rank = question.layer, min(question.layer.parameters.query.shape[-2:])
    return layer.joined(l2_mean_field(layer.norm_A, 1.0, question.radius, rank, causal=causal))


def _bounded(question: Question, causal: bool) -> float:
    """Rotary positions, QK-norm, …: by what is known of the sizes of queries and keys."""
    q, k, q_slope, k_slope, bias = (as_floats(one) for one in question.sizes)
    radius = question.radius
    each = by_oscillation(
        1.0, radius, 2 * q * k + bias, q * k_slope, radius * q_slope * k, causal=causal
    )
    return question.layer.joined(each)


def _theorem_c_3(question: Question) -> float:
    """Σ_h √3 ‖V_h‖ (n(1 + U²r²) + W²r²)^½ with r the diameter, U = max|uᵢ|, W = max|Aᵀxᵢ|.

    Of the three parts of the derivative: (Σⱼ Pᵢⱼεⱼ)ᵢ is at most √n|ε|, Σⱼ Pᵢⱼ(xⱼ−mᵢ)⟨uᵢ, εⱼ⟩ at
    most √n·r·U|ε|, and Covᵢ A εᵢ = Σⱼ Pᵢⱼ(xⱼ−mᵢ)⟨Aᵀxⱼ, εᵢ⟩ at most r·W|εᵢ|. The scripts of [CAP24]
    evaluate the form with W = U and without √3.
    """
    layer, points = question.layer, question.points
    assert points is not None
    if layer.norm is not None:
        points = layer.norm.unit(points)
    x, n = as_floats(points.points), points.n_particles
    spread = float(pdist(x, "sqeuclidean").max(initial=0.0))
    ahead = np.linalg.norm(np.einsum("hij,nj->hni", layer.A, x) + layer.pull[:, None], axis=-1)
    back = np.linalg.norm(np.einsum("hji,nj->hni", layer.A, x), axis=-1)
    inside = n * (1 + ahead.max(1) ** 2 * spread) + back.max(1) ** 2 * spread
    return float(raised(np.sum(math.sqrt(3) * layer.norm_V * np.sqrt(inside))))


# ------------------------------------------------------------ the list


def _both(
    name: str, assumption: str, asks: Sequence[Ask], value: Callable[[Question, bool], float]
) -> list[Statement]:
    """A bound of plain attention and, given True, of masked attention."""
    words = ("upper", _PLAIN, assumption, OURS), ("upper", _CONDITIONAL, assumption, OURS)
    return [
        _upper((name, *words[0]), (*asks, _UNMASKED), lambda q: value(q, False)),
        _upper((f"{name}, masked", *words[1]), (*asks, _MASKED), lambda q: value(q, True)),
    ]


_upper = partial(Statement, times_slope=True)

OF_DOT_PRODUCTS = [
    _upper(
        ("Thm 3.3, 4.3", "upper", _TOKENS, "tokens in B_R", _LEMMA_3_8),
        (_BILINEAR, _COUNTED, _UNIFORM),
        lambda q: q.layer.theorem_3_3(q.radius, q.tokens),
    ),
    _upper(
        ("tokens", "upper", _TOKENS, "tokens in B_R", OURS),
        (_BILINEAR, _COUNTED, _UNIFORM, _UNMASKED),
        lambda q: q.joined(tokens, n=q.tokens),
    ),
    _upper(
        ("masked tokens", "upper", _MASKED_TOKENS, "tokens in B_R", OURS),
        (_BILINEAR, _COUNTED, _UNIFORM, _MASKED),
        lambda q: q.joined(tokens, n=q.tokens, causal=True),
    ),
    _upper(
        ("Thm 3.5", "upper", _PLAIN, "measures on B_R", _LEMMA_3_8),
        (_BILINEAR, _UNMASKED),
        lambda q: raised(
            np.sum(theorem_3_5(q.layer.effective_A(q.radius), q.layer.norm_V, q.radius))
        ),
    ),
    _upper(
        ("mean field", "upper", _PLAIN, "measures on B_R", OURS),
        (_BILINEAR, _UNMASKED),
        _mean_field,
    ),
    _upper(
        ("masked mean field", "upper", _CONDITIONAL, "measures on [0,1]×B_R", OURS),
        (_BILINEAR, _MASKED),
        lambda q: q.joined(masked_mean_field, dim=q.layer.parameters.dim),
    ),
    _upper(
        (
            *("Thm 3.7, 4.5", "limit", "Euclidean at λX, λ → ∞"),
            *("each query has one best key per head", "[CAP24], triangle inequality"),
        ),
        (_BILINEAR, _COUNTED, _UNIFORM, _FIRST),
        lambda q: raised(float(np.sum(q.layer.norm_V)) * q.tokens**0.5),
    ),
]

OF_OTHER_SCORES = {
    "soft cap": _both("soft cap", "points in B_R", (), _capped),
    "l2": [
        *_both("L2", "points in B_R", (_TIED,), _l2),
        _upper(
            ("L2, n tokens", "upper", "Euclidean, n tokens, masked too", "any tokens", OURS),
            (_TIED, _COUNTED, _UNIFORM, _VALUES_FIT),
            lambda q: l2_attention_2(q.layer.parameters, q.tokens),
        ),
        _upper(
            ("L2, Thm 3.2", "upper", _TOKENS, "any tokens", "[KPM21]"),
            (_TIED, _COUNTED, _UNIFORM, _UNMASKED, _VALUES_FIT, _AS_PRINTED),
            lambda q: l2_theorem_3_2(q.layer.parameters, q.tokens),
        ),
    ],
    "sink": [
        _upper(
            ("null key", "upper", _PLAIN, "measures on B_R", OURS),
            (_UNMASKED, _NO_KEY_BIAS, _NO_VALUE_BIAS),
            _sink,
        )
    ],
    "sigmoid": _both(
        "sigmoid",
        "points in B_R, averaged",
        (_NO_VALUE_BIAS,),
        lambda q, causal: q.joined(sigmoid_mean_field, key_shift=q.layer.key_shift),
    ),
    "other": _both("bounded scores", "points in B_R, any positions", (_SIZED,), _bounded),
}

AT_POINTS = [
    _upper(
        ("Thm C.3", "upper", _HERE, "these tokens", "[CAP24], as its scripts; |Aᵀx|: " + OURS),
        (_BILINEAR, _PLACED),
        _theorem_c_3,
    ),
    Statement(
        ("at the points", "upper", "W₂ or d₂, at the points", "these points", OURS),
        (_PLACED, _DECLARES),
        lambda q: q.declared,
    ),
]

FROM_BELOW = [
    Statement(
        (
            *("Prop. 3.4", "lower", _TOKENS, "one token at Ru, the others at −Ru or Ru/2"),
            "[CAP24]; any V: " + OURS,
        ),
        (*_WITNESSED, _EIGEN, _COUNTED, _UNIFORM),
        lambda q: best_pair(q, lambda gamma: proposition_3_4(gamma, q.radius, q.tokens)),
    ),
    Statement(
        ("two Diracs", "lower", "W₂ or d₂", "two atoms, best weights", OURS),
        (*_WITNESSED, _EIGEN),
        lambda q: best_pair(q, lambda gamma: two_dirac_lower(gamma, q.radius)),
    ),
    Statement(
        ("two Diracs, masked", "lower", _CONDITIONAL, "interleaved at every position", OURS),
        (*_WITNESSED, _EIGEN, _MASKED),
        lambda q: best_pair(q, lambda gamma: masked_two_dirac_lower(gamma, q.radius)),
    ),
    Statement(
        ("far token", "lower", _TOKENS, "n − 1 tokens at one place, one far across", OURS),
        (*_WITNESSED, _COUNTED, _UNIFORM, _UNMASKED, _SEVERAL, _FEW),
        far_token,
    ),
]


def statements(scores: str) -> list[Statement]:
    """The theorems of the table of a layer with scores of this kind."""
    return [*OF_DOT_PRODUCTS, *OF_OTHER_SCORES.get(scores, ()), *AT_POINTS, *FROM_BELOW]
