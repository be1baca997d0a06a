"""The constants of L2 attention, which is Lipschitz on all of R^d."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from meanfield.bounds.arguments import as_array

__all__ = ["l2_attention_2", "l2_attention_inf"]


def l2_attention_inf(n: int, query: Any, value: Any, output: Any) -> float:
    """(4φ⁻¹(n−1) + 1/√k) ‖W^Oᵀ‖_∞ max_h ‖W^Q_h‖_∞‖W^Q_hᵀ‖_∞ max_h ‖W^V_hᵀ‖_∞, φ(x) = xe^{x+1}.

    The ∞-norm constant of L2 attention on n tokens: P_ij ∝ exp(−‖W^Q_hᵀ(xᵢ − xⱼ)‖²/√k), heads
    P X W^Q_h W^Q_hᵀ W^V_h/√k concatenated, times W^O.

    Args:
        n: number of tokens.
        query: W^Q, shape (H, d, k); keys are tied to it.
        value: W^V, shape (H, d, k).
        output: W^O, shape (H·k, d_out).

    Source: [KPM21] Theorem 3.2, as remembered; tested numerically.

    Example:
        >>> l2_attention_inf(2, [[[1.0]]], [[[1.0]]], [[1.0]])
        2.1138
    """
    W, V, out = _matrices(n, query, value, output)
    head = 4 * _phi_inverse(n - 1) + 1 / math.sqrt(W.shape[-1])
    queries = max(_inf(w) * _inf(w.T) for w in W)
    return float(head * _inf(out.T) * queries * max(_inf(v.T) for v in V))


def l2_attention_2(n: int, query: Any, value: Any, output: Any) -> float:
    """√(n/k) (4φ⁻¹(n−1) + 1) (Σ_h ‖W^Q_h‖⁴‖W^V_h‖²)^½ ‖W^O‖: the Euclidean constant.

    Args:
        n: number of tokens.
        query: as for `l2_attention_inf`.
        value: as for `l2_attention_inf`.
        output: as for `l2_attention_inf`.

    Source: the form of [KPM21] Theorem 3.2, corrected here for homogeneity; tested numerically.
    """
    W, V, out = _matrices(n, query, value, output)
    head = math.sqrt(n / W.shape[-1]) * (4 * _phi_inverse(n - 1) + 1)
    norms_W, norms_V = (np.linalg.norm(m, 2, axis=(-2, -1)) for m in (W, V))
    heads = float(np.sqrt(np.sum(norms_W**4 * norms_V**2)))
    return float(head * heads * np.linalg.norm(out, 2))


def _phi_inverse(y: float) -> float:
    """The x with x e^{x+1} = y: W₀(y/e)."""
    from scipy.special import lambertw

    return float(lambertw(y / math.e).real)


def _inf(matrix: np.ndarray) -> float:
    return float(np.abs(matrix).sum(-1).max())


def _matrices(
    n: int, query: Any, value: Any, output: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    W, V, out = (as_array(m) for m in (query, value, output))
    if n < 1:
        raise ValueError(f"n: expected at least 1 token, got {n}")
    if W.ndim != 3 or V.shape != W.shape or out.ndim != 2 or len(out) != len(W) * W.shape[-1]:
        raise ValueError(
            f"expected query and value (H, d, k) and output (H·k, d_out), got {W.shape}, "
            f"{V.shape} and {out.shape}"
        )
    return W, V, out
