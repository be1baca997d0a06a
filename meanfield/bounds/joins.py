"""From heads to a layer."""

from __future__ import annotations

from typing import Any

import numpy as np

from meanfield.bounds.arguments import norms, out
from meanfield.checks import as_floats

__all__ = ["joined_heads", "multi_head"]


def multi_head(norms_W: Any, constants: Any) -> Any:
    """Σ_h ‖W^h‖ Lip(f^h) over the last axis.

    Args:
        norms_W: ‖W^h‖ per head (..., H).
        constants: a bound of each head alone (..., H), finite or infinite.

    Source: [CAP24] Lemma 3.8.

    Example:
        >>> multi_head([1.0, 2.0], [3.0, 0.5])
        4.0
    """
    W, each = norms(norms_W, "norms_W"), _bounds(constants)
    with np.errstate(invalid="ignore", over="ignore"):
        return out(np.where(W > 0, W * each, 0.0).sum(-1))


def joined_heads(V: Any, constants: Any, *, norms_V: Any = None) -> Any:
    """min(Σ_h τ_h ‖V_h‖, ‖Σ_h τ_h V_hV_hᵀ‖^½ (Σ_h τ_h)^½): the constant of Σ_h V_h F_h.

    The second is smaller where heads write into different directions: by √H if these are
    orthogonal. It holds for constants in L^p with p ≥ 2: by Cauchy–Schwarz in h, and Minkowski's
    inequality for p/2.

    Args:
        V: what each head does to its mean, (H, d_out, d).
        constants: τ_h, a bound of each head alone at V_h = I, (..., H).
        norms_V: ‖V_h‖, (H,), if they are known.

    Source: the first is [CAP24] Lemma 3.8; the second is this package's. Proved.

    Example:
        >>> joined_heads([[[1.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 1.0]]], [2.0, 2.0])
        2.8284
    """
    matrices, tau = as_floats(V), _bounds(constants)
    if matrices.ndim != 3 or tau.shape[-1:] != matrices.shape[:1]:
        raise ValueError(
            f"expected V (H, d_out, d) and constants (..., H), got {matrices.shape} "
            f"and {tau.shape}"
        )
    if norms_V is None:
        norms_V = np.linalg.norm(matrices, 2, axis=(-2, -1))
    summed = multi_head(norms_V, tau)
    if len(matrices) == 1:
        return summed
    finite = np.where(np.isfinite(tau), tau, 0.0)
    scale = np.maximum(finite.max(-1, keepdims=True), np.finfo(float).tiny)
    share = finite / scale  # so that no product overflows
    gram = np.einsum("...h,hik->...ik", share, matrices @ np.swapaxes(matrices, -1, -2))
    top = np.linalg.eigvalsh(gram)[..., -1].clip(0)
    with np.errstate(over="ignore"):
        together = np.sqrt(top * share.sum(-1)) * scale[..., 0]
    return out(np.where(np.isfinite(tau).all(-1), np.minimum(summed, together), summed))


def _bounds(constants: Any) -> np.ndarray:
    each = as_floats(constants)
    if not (each >= 0).all():
        raise ValueError(f"constants: expected numbers ≥ 0, got {constants!r}")
    return each
