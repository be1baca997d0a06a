"""What the theorems need of a layer: norms per head, from parameters or from arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from meanfield.bounds.arguments import as_array, out
from meanfield.bounds.joins import joined_heads
from meanfield.bounds.sharp import tokens
from meanfield.bounds.theorems import theorem_3_3
from meanfield.checks import describe

__all__ = [
    "LayerNorms",
    "bilinear",
    "layer_norms",
    "raised",
    "theorem_3_3_of_layer",
    "tokens_of_layer",
    "value_matrices",
]

# Relative: what upper bounds of a layer are raised by, to stay above the rounding of the norms.
_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class LayerNorms:
    """Norms of H heads.

    Attributes:
        A: ‖A_h‖, (H,), of the scores ⟨A_h x + c_h, y⟩.
        shift: ‖c_h‖, (H,): what a query bias adds, c = scale · Kᵀ b_Q; 0 without one.
        V: ‖W_h V_h‖, (H,).
    """

    A: np.ndarray
    shift: np.ndarray
    V: np.ndarray

    def effective_A(self, radius: Any) -> np.ndarray:
        """‖A_h‖ + ‖c_h‖/R, shape (..., H): stands in for ‖A_h‖ where there is a query bias.

        The proofs of Theorems 3.3, 4.3 and 3.5 use ‖A‖ and ‖Ax‖ ≤ ‖A‖R on the ball only, and
        ‖Ax + c‖ ≤ (‖A‖ + ‖c‖/R)R. This step is not in the paper; tested numerically.
        """
        R = np.asarray(radius, float)[..., None]
        if not self.shift.any():
            return np.broadcast_to(self.A, (*R.shape[:-1], len(self.A)))
        with np.errstate(divide="ignore"):
            return self.A + self.shift / R


def layer_norms(layer: Any) -> LayerNorms:
    """The norms of a layer.

    Args:
        layer: parameters with ``A`` and ``V`` (H, d, d), such as
            `meanfield.attention.AttentionParameters`, a map that has them as ``parameters``, or
            the pair (A, V) of arrays (d, d) or (H, d, d). Parameters with ``query`` (H, k, d),
            ``key``, ``value``, ``output`` and ``scale`` cost k × k matrices instead of d × d.

    Raises:
        ValueError: shapes that do not fit.
    """
    layer = getattr(layer, "parameters", layer)
    if not hasattr(layer, "query_bias"):
        A, V = bilinear(layer)
        return LayerNorms(_norms(A), np.zeros(len(A)), _norms(V))
    scale = as_array(layer.scale)
    query, key, value = (as_array(m) for m in (layer.query, layer.key, layer.value))
    # Grouped heads share keys and values.
    key, value = (np.repeat(m, len(query) // len(m), axis=0) for m in (key, value))
    norm_A = np.abs(scale) * _product_norms(np.swapaxes(key, -1, -2), query)
    norm_V = _norms(value)
    if layer.output is not None:
        norm_V = _product_norms(as_array(layer.output), value)
    shift = np.zeros(len(query))
    if layer.query_bias is not None:
        pulled = (as_array(layer.query_bias)[:, None, :] @ key)[:, 0]
        shift = np.abs(scale) * np.linalg.norm(pulled, axis=-1)
    return LayerNorms(norm_A, shift, norm_V)


def theorem_3_3_of_layer(layer: Any, radius: Any, n: int) -> Any:
    """Σ_h √3 ‖V_h‖ ((‖A_h‖ + ‖c_h‖/R)²R⁴(4n+1) + n)^½: a whole layer on n tokens in B_R.

    Args:
        layer: see `layer_norms`.
        radius: R > 0, numbers of any shape.
        n: number of tokens.

    Returns:
        The bound, of the shape of `radius`, raised by 1e-9 relative against rounding.

    Source: [CAP24] Theorems 3.3 and 4.3 with Lemma 3.8; ‖c_h‖/R for query biases is not in the
    paper, see `LayerNorms.effective_A`.

    Example:
        >>> theorem_3_3_of_layer(([[0.0]], [[1.0]]), 1.0, 3)
        3.0
    """
    norms = layer_norms(layer)
    R = np.asarray(radius, float)
    each = theorem_3_3(norms.effective_A(R), norms.V, R[..., None], n)
    return out(raised(np.sum(each, axis=-1)))


def tokens_of_layer(layer: Any, radius: Any, n: int, *, causal: bool = False) -> Any:
    """`tokens` of each head, joined by `joined_heads`: a whole layer on n tokens in B_R.

    Args:
        layer: see `layer_norms`.
        radius: R, numbers of any shape.
        n: number of tokens.
        causal: whether the layer is masked.

    Returns:
        The bound, of the shape of `radius`, raised by 1e-9 relative against rounding.

    Source: this package.

    Example:
        >>> tokens_of_layer(([[0.0]], [[1.0]]), 1.0, 3)
        1.0
    """
    norms = layer_norms(layer)
    R = np.asarray(radius, float)[..., None]
    each = tokens(norms.A, 1.0, R, n, causal=causal, shift=norms.shift)
    return out(raised(joined_heads(value_matrices(layer), each, norms_V=norms.V)))


def value_matrices(layer: Any) -> np.ndarray:
    """V_h, output matrices included, (H, d_out, d)."""
    layer = getattr(layer, "parameters", layer)
    return as_array(layer.V) if hasattr(layer, "query_bias") else bilinear(layer)[1]


def raised(value: Any) -> Any:
    """An upper bound above the rounding of the norms that it comes from."""
    return value * (1 + _ROUNDING)


def bilinear(layer: Any) -> tuple[np.ndarray, np.ndarray]:
    """A (H, d, d) and V (H, d_out, d) of parameters or of a pair of arrays."""
    if not hasattr(layer, "A") and not (isinstance(layer, (tuple, list)) and len(layer) == 2):
        raise TypeError(
            "layer: expected AttentionParameters, a map that has them as `parameters`, or a pair "
            f"(A, V) of matrices, got {describe(layer)}"
        )
    A, V = (layer.A, layer.V) if hasattr(layer, "A") else layer
    A, V = (m[None] if m.ndim == 2 else m for m in (as_array(A, "A"), as_array(V, "V")))
    for name, matrices in (("A", A), ("V", V)):
        if not np.isfinite(matrices).all():
            raise ValueError(f"{name}: expected finite numbers, got NaN or infinite ones")
    if A.ndim != 3 or V.ndim != 3 or len(A) != len(V) or A.shape[-1] != V.shape[-1]:
        raise ValueError(f"expected A (H, d, d) and V (H, d_out, d), got {A.shape} and {V.shape}")
    if A.shape[-1] != A.shape[-2]:
        raise ValueError(f"A: expected square matrices, got shape {A.shape}")
    return A, V


def _norms(matrices: np.ndarray) -> np.ndarray:
    return np.linalg.norm(matrices, 2, axis=(-2, -1))


def _product_norms(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """‖left @ right‖ for tall left (H, m, k) and wide right (H, k, d)."""
    first = np.linalg.qr(left, mode="r")
    second = np.linalg.qr(np.swapaxes(right, -1, -2), mode="r")
    return _norms(first @ np.swapaxes(second, -1, -2))
