"""The constants of L2 attention with tied queries and keys, Lipschitz on all of R^d.

Write u = √s Q x, so that P_ij ∝ e^{−|uᵢ−uⱼ|²}, and let the values be B Q x: then v = (B/√s) u, and

    ȯᵢ = Σⱼ P_ij v̇ⱼ − 2 Σⱼ P_ij (vⱼ−oᵢ)⟨uᵢ−uⱼ, u̇ᵢ⟩ + 2 Σⱼ P_ij (vⱼ−oᵢ)⟨uᵢ−uⱼ, u̇ⱼ⟩.

Everything rests on  Σⱼ P_ij |uᵢ−uⱼ|² ≤ c = φ⁻¹(n−1), φ(x) = x e^{x+1} ([KPM21]): the token sees
itself with score 0, so that t = |uᵢ−uⱼ|² counts only by t e^{−t}, and all t are equal at the
maximum. With Cauchy–Schwarz the three sums are at most 1, 2c and 2c times ‖B‖ max |Q ẋⱼ|. A mask
takes atoms away and never the token itself; weights aᵢ put 1/min aᵢ in the place of n.

With values that depend on more than the queries do (no B), or untied queries and keys, there is no
such constant: two tokens that attention cannot tell apart can differ by any value.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from meanfield.bounds.arguments import ROUNDING
from meanfield.bounds.layer import Layer
from meanfield.checks import as_floats, number

if TYPE_CHECKING:
    from meanfield.attention.parameters import AttentionParameters

# Rows of the values outside the span of the queries by more are no rounding: relative, times the
# width of a head, in units of eps of the layer's own dtype.
_OUTSIDE = 100.0

_Heads = tuple[np.ndarray, np.ndarray, np.ndarray]
_norms: Any = partial(np.linalg.norm, ord=2, axis=(-2, -1))
_sizes: Any = partial(np.linalg.norm, axis=(-2, -1))


def l2_spread(n: Any) -> float:
    """φ⁻¹(n−1) = W₀((n−1)/e), φ(x) = xe^{x+1}: Σⱼ P_ij |uᵢ−uⱼ|² is at most this for n tokens.

    Args:
        n: number of tokens, at least 1; 1/min aᵢ for weights aᵢ.

    Source: [KPM21], the quantity of Theorem 3.2; attained by n−1 tokens at one distance.

    Example:
        >>> l2_spread(2), l2_spread(1000)
        (0.278465, 4.420502)
    """
    from scipy.special import lambertw

    count = number(n, "n", least=1)
    return float(lambertw((count - 1) / math.e).real)


def l2_attention_inf(layer: Any, n: Any) -> float:
    """max over rows w of [W_hB_h]_h of Σ_h β_h(w_h), c = φ⁻¹(n−1): bounds ‖J‖_∞ anywhere.

    β(w) is the smaller of (1 + 4√k c) |w|₁ ‖Q‖_∞ and (1 + 4c) |w|₂ ‖Q‖_{∞→2}. It is the ∞-norm
    constant of tied L2 attention on n tokens of R^d, masked or not: the largest row sum of |J|.
    The second form is the smaller one for wide heads. For the layer of the paper, whose values are
    W^Vᵀ W^Q W^Qᵀ/√k, it is at most the form of the paper,
    (4c + 1/√k) ‖W^Oᵀ‖_∞ max_h ‖W^Q_h‖_∞‖W^Q_hᵀ‖_∞ max_h ‖W^V_hᵀ‖_∞, and equal to it for one head
    of dimension one.

    Args:
        layer: `SelfAttention` with ``kernel=l2``, or its parameters, with key = query and values
            B_h Q_h, see `AttentionParameters.tied_l2`.
        n: number of tokens; 1/min aᵢ for weighted atoms.

    Raises:
        ValueError: another kernel, untied queries and keys, or values that depend on
            more than the queries do.

    Source: [KPM21] Theorem 3.2 for the paper's layer; for any B_h, and the second form, this
    package. Proved: a row of a k×k sum of outer products has an ℓ₁ norm of at most √k times
    their traces; and |⟨w, η⟩| ≤ |w|₂|η|₂ for the three sums η.

    Example:
        >>> from meanfield.attention import AttentionParameters
        >>> l2_attention_inf(AttentionParameters.tied_l2([[1.0]], [[1.0]]), 2)
        2.1138
    """
    W, B, Q = _heads(layer)
    c, left, sums = l2_spread(n), W @ B, np.abs(Q).sum(-1)
    width, dim = Q.shape[1:]
    by_sums = (1 + 4 * math.sqrt(width) * c) * np.abs(left).sum(-1) * sums.max(-1, keepdims=True)
    # max |Qx|₂ over |x|_∞ ≤ 1 is at most either.
    reach = np.minimum(np.linalg.norm(sums, axis=-1), math.sqrt(dim) * _norms(Q))
    rows = np.minimum(by_sums, (1 + 4 * c) * np.linalg.norm(left, axis=-1) * reach[:, None])
    return float((1 + ROUNDING) * rows.sum(0).max())


def l2_attention_2(layer: Any, n: Any) -> float:
    """(√n (1 + 2c) + 2c) · join_h(‖W_hB_h‖, ‖Q_h‖), c = φ⁻¹(n−1): bounds ‖J‖₂.

    The Euclidean constant on n tokens of R^d, and that in the weighted L2 norm (Σ aᵢ|xᵢ|²)^½ for
    atoms of fixed weights aᵢ with n = 1/min aᵢ. The last 2c comes from the token's own
    movement, which is not summed over tokens and so has no √n.

    Args:
        layer: as for `l2_attention_inf`.
        n: number of tokens; 1/min aᵢ for weighted atoms.

    Raises:
        ValueError: as `l2_attention_inf`.

    Source: this package. Proved. That of the paper, `l2_theorem_3_2`, is larger.
    """
    c = l2_spread(n)
    return (math.sqrt(n) * (1 + 2 * c) + 2 * c) * _joined(_heads(layer), stacked=True)


def l2_attention_max(layer: Any, n: Any) -> float:
    """(1 + 4c) · join_h(‖W_hB_h‖, ‖Q_h‖), c = φ⁻¹(n−1): the constant in the norm maxᵢ |xᵢ|.

    No token moves further than this times the furthest that one has moved: the Lipschitz
    constant for W_∞ at matched atoms. It has no factor √n, so a layer that is to be
    inverted is scaled by this one (`meanfield.layers.contractive`).

    Args:
        layer: as for `l2_attention_inf`.
        n: number of tokens; 1/min aᵢ for weighted atoms.

    Raises:
        ValueError: as `l2_attention_inf`.

    Source: this package. Proved, by the rows of the proof of [KPM21] Theorem 3.2.
    """
    return (1 + 4 * l2_spread(n)) * _joined(_heads(layer), stacked=False)


def l2_theorem_3_2(layer: Any, n: Any, *, value: Any = None) -> float:
    """√(n/k) (4c + 1) (Σ_h ‖W^Q_h‖⁴‖W^V_h‖²)^½ ‖W^O‖, c = φ⁻¹(n−1): the paper's bound of ‖J‖₂.

    For values W^Vᵀ W^Q W^Qᵀ/√k; `l2_attention_2` is sharper.

    Args:
        layer: as for `l2_attention_inf`, of scale 1/√k.
        n: number of tokens.
        value: W^V as `AttentionParameters.tied_l2` took it, (H, v, d) or (v, d), which the layer
            does not tell from others of the same values; if None the smallest of them, up to
            the rounding of the layer's dtype.

    Raises:
        ValueError: as `l2_attention_inf`; values that are not of the paper's form, or not those
            that W^V makes.

    Source: [KPM21] Theorem 3.2; with ‖W^Q‖⁴ for the printed ‖W^Q‖², with which it would not scale
    as the Jacobian does when W^Q → sW^Q, x → x/s.
    """
    W, B, Q = _heads(layer)
    par = Layer.of(layer).parameters
    width = Q.shape[1]
    if not np.allclose(as_floats(par.scale), width**-0.5, rtol=4 * _eps(par), atol=0):
        raise ValueError(f"scale: expected 1/√{width}, that of the paper, got another")
    wanted, across = math.sqrt(width) * B, np.swapaxes(Q, -1, -2)
    given = _solved(wanted, across, math.sqrt(_unseen(par)))
    if value is not None:
        own = as_floats(value, "value")
        if own.shape not in (given.shape, given.shape[len(Q) == 1 :]):
            raise ValueError(f"value: expected shape {given.shape}, got {own.shape}")
        given = own.reshape(given.shape)
    if (_sizes((given @ across - wanted) @ Q) > _outside(par) * _sizes(wanted @ Q)).any():
        raise ValueError("values: expected W^Vᵀ W^Q W^Qᵀ/√k, got another function of queries")
    total = float((_norms(Q) ** 4 * _norms(given) ** 2).sum())
    last = np.linalg.norm(np.concatenate(W, -1), 2)
    c = l2_spread(n)
    return float((1 + ROUNDING) * math.sqrt(n / width * total) * (4 * c + 1) * last)


def is_tied(par: AttentionParameters) -> bool:
    """Whether scores are −(x−y)ᵀA(x−y), A = scale · QᵀQ ≥ 0: queries and keys are the same.

    Then, whatever the biases, no token scores higher than one at its own place. Under a negative
    scale all others do.
    """
    queries, keys = as_floats(par.query), as_floats(par.per_head(par.key))
    tied = np.array_equal(queries, keys) and bool((as_floats(par.scale) >= 0).all())
    if par.query_bias is None or par.key_bias is None:
        return tied and par.query_bias is par.key_bias
    biases = as_floats(par.query_bias), as_floats(par.per_head(par.key_bias))
    return tied and np.array_equal(*biases)


def _joined(heads: _Heads, *, stacked: bool) -> float:
    """At least ‖Σ_h W_hB_h G_h Q_h‖ for ‖G_h‖ ≤ 1: the least of three products of norms.

    `stacked`: whether ‖(Q_h x)_h‖ ≤ ‖[Q_h]_h‖‖x‖ holds, as it does in Euclidean norms. In the
    norm maxᵢ|xᵢ| another token may be the largest in every head.
    """
    W, B, Q = heads
    left, q = W @ B, _norms(Q)
    together = _norms(np.concatenate(Q)) if stacked else np.linalg.norm(q)
    least = min(
        _norms(np.concatenate(left, -1)) * together,
        _norms(left) @ q,
        _norms(np.concatenate(W, -1)) * np.linalg.norm(_norms(B) * q),
    )
    return float((1 + ROUNDING) * least)


def _heads(layer: Any) -> _Heads:
    """W_h, B_h and Q_h, each with an axis of heads in front."""
    from meanfield.attention.parameters import AttentionParameters  # loads torch

    found = Layer.of(layer)
    par = found.parameters
    if found.norm is not None:
        raise ValueError("layer: expected L2 attention alone, got a chain of a norm and a layer")
    if not isinstance(layer, AttentionParameters) and found.attention.score.kind != "l2":
        raise ValueError(
            "layer: expected L2 attention, SelfAttention(parameters, kernel=kernels.l2), got "
            f"kernel {found.attention.score.kind}"
        )
    queries = as_floats(par.query)
    values = as_floats(par.per_head(par.value))
    outputs = np.eye(values.shape[1])[None] if par.output is None else as_floats(par.output)
    if not is_tied(par):
        raise ValueError(
            "layer: expected tied queries and keys, key = query and key_bias = query_bias, and a "
            "scale ≥ 0; otherwise it is not Lipschitz on R^d"
        )
    B = _solved(values, queries, _unseen(par))
    outside = _sizes(values - B @ queries)
    for h in np.flatnonzero(outside > _outside(par) * _sizes(values)):
        raise ValueError(
            f"layer: expected values of head {h} that are a function of its queries, "
            f"value = B @ query, got a part {outside[h]:.2g} outside; without it the layer is "
            "not Lipschitz on R^d. AttentionParameters.tied_l2 makes such values"
        )
    return outputs, B, queries


def _solved(right: np.ndarray, matrix: np.ndarray, rtol: float) -> np.ndarray:
    """The smallest X with X @ matrix = right, but for singular values below rtol of the largest.

    One direction after the other, so that a small singular value costs the others no digits.
    """
    left, sizes, across = np.linalg.svd(matrix, full_matrices=False)
    seen = sizes > rtol * sizes[:, :1]
    parts = right @ np.swapaxes(across, -1, -2)
    parts = np.divide(parts, sizes[:, None], out=np.zeros_like(parts), where=seen[:, None])
    return parts @ np.swapaxes(left, -1, -2)


def _unseen(par: AttentionParameters) -> float:
    """Directions of which queries see less see rounding: relative, well within `_outside`."""
    return _outside(par) / 10


def _outside(par: AttentionParameters) -> float:
    """What rounding may leave of values outside the span of their queries, relatively."""
    return _OUTSIDE * par.query.shape[-2] * _eps(par)


def _eps(par: AttentionParameters) -> float:
    """That of the layer's own dtype."""
    return float(np.finfo(np.float32 if par.query.element_size() == 4 else np.float64).eps)
