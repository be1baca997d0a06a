"""Constants for other scores ℓ(x, y) than ⟨Ax, y⟩: bounded ones, and those of L2 attention.

The density of attention is w ∝ e^{ℓ(x, y)}. Where ∇_yℓ depends on y, the mean of ⟨e, y−m⟩⟨e, ∇_yℓ⟩
need not vanish, so that √(1+g²R²) becomes 1 + gR (Minkowski).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from meanfield.bounds.arguments import check_together, exponent, norms, out
from meanfield.bounds.running import log_masked_bounded
from meanfield.bounds.sharp import assembled
from meanfield.checks import as_bool
from meanfield.habits import with_hints

# e^{h²}(1 + 2Σ_{j≥1} e^{−(j−½)²h²}) at h = 0.6 is 5.667: mass of L2 attention per direction.
_COLUMN = 5.7


def by_oscillation(
    norm_V: Any,
    radius: Any,
    oscillation: Any,
    gradient: Any,
    field: Any,
    *,
    causal: bool = False,
) -> Any:
    """‖V‖Λ(e^{ω/2}(1 + gR), 1 + gR, s): the W₂ constant of attention with the score ℓ on B_R.

    Where ℓ depends on the positions of x and y as well it is that of the conditional d₂. With Λ
    of `mean_field`. Masked: as `masked_mean_field`, with M = 1+gR, D = e^{ω/2}M, K = e^ω(1+2gR).

    Args:
        norm_V: spectral norm ‖V‖.
        radius: R.
        oscillation: ω ≥ max_y ℓ(x, y) − min_y ℓ(x, y) for each x in B_R.
        gradient: g ≥ |∇_yℓ(x, y)| for all x, y in B_R.
        field: s ≥ ‖E[(y−m)(∇_xℓ)ᵀ]‖; R · sup|∇_xℓ| always will do.
        causal: whether the layer is masked (the conditional distance d₂).

    Source: this package. Proved. A local constant is bounded on any set where ω, g and s hold; a
    Lipschitz constant needs them on a convex one. (Cosine scores have an unbounded gradient at
    the origin: they need |x| ≥ r, which is not convex, or an ε in the norm.)

    Example:
        >>> by_oscillation(1.0, 1.0, 0.0, 0.0, 0.0)
        1.0
    """
    with np.errstate(over="ignore"):
        turning = norms(gradient, "gradient") * norms(radius, "radius")
    omega, turned = norms(oscillation, "oscillation"), norms(field, "field")
    return _bounded(norms(norm_V, "norm_V"), turning, omega, turned, causal)


def _bounded(
    v: np.ndarray, turning: np.ndarray, oscillation: np.ndarray, turned: np.ndarray, causal: bool
) -> Any:
    with np.errstate(over="ignore", invalid="ignore"):
        turning = np.minimum(turning, 1e300)
        turned = np.where(turning < 1e300, turned, np.inf)
        if as_bool(causal, "causal"):
            return assembled(v, log_masked_bounded(turning, oscillation), turned)
        log_mean = np.log1p(turning)
        return assembled(v, log_mean + oscillation / 2, turned, log_mean)


def sigmoid_mean_field(
    norm_A: Any, norm_V: Any, radius: Any, *, shift: Any = 0.0, key_shift: Any = 0.0
) -> Any:
    """‖V‖(1 + ½‖A‖R² + ¼(shift + key_shift)R): ∫ sigmoid(⟨Ax, y⟩)Vy dμ(y), plain or masked.

    Two derivatives of at most ¼, and no exponential: σ + σ′|u||y| ≤ 1 + ¼c is how an atom seen
    counts, ¼‖A‖R² the query. In every order of the distance.

    Args:
        norm_A: spectral norm ‖A‖.
        norm_V: spectral norm ‖V‖.
        radius: R.
        shift: |scale · Kᵀ b_Q|, what a query bias adds to Ax.
        key_shift: |scale · Qᵀ b_K|, what a key bias adds to Aᵀy.

    Source: this package. Proved.
    """
    turning, turned = exponent(norm_A, radius, shift)
    v = norms(norm_V, "norm_V")
    with np.errstate(over="ignore", invalid="ignore"):
        biased = norms(key_shift, "key_shift") * norms(radius, "radius")
        return out(np.where(v > 0, v * (1 + (turning + turned + biased) / 4), 0.0))


def capped_mean_field(
    norm_A: Any,
    norm_V: Any,
    radius: Any,
    tau: Any,
    *,
    causal: bool = False,
    shift: Any = 0.0,
    key_shift: Any = 0.0,
) -> Any:
    """‖V‖Λ(e^{τ tanh(c/τ)}(1 + c), 1 + c, ‖A‖R²): scores τ tanh(⟨Ax, y⟩/τ), an exponent below τ.

    With Λ of `mean_field` and c = ‖A‖R² + shift·R; a key bias adds key_shift·R to ‖A‖R².
    (Without a cap it drops out: it adds the same to ∇_xℓ at every y, and only the covariance with
    y counts. The slope of the cap depends on y.)

    Args:
        norm_A: spectral norm ‖A‖.
        norm_V: spectral norm ‖V‖.
        radius: R.
        tau: τ > 0.
        causal: whether the layer is masked.
        shift: |scale · Kᵀ b_Q|, what a query bias adds to Ax.
        key_shift: |scale · Qᵀ b_K|, what a key bias adds to Aᵀy.

    Source: this package. Proved.

    Example:
        >>> capped_mean_field(1.0, 1.0, 3.0, 1.0)
        32.45
    """
    check_together(
        norm_A=norm_A, norm_V=norm_V, radius=radius, tau=tau, shift=shift, key_shift=key_shift
    )
    turning, turned = exponent(norm_A, radius, shift)
    v, cap = norms(norm_V, "norm_V"), norms(tau, "tau")
    if not (cap > 0).all():
        raise ValueError(f"tau: expected numbers > 0, got {tau!r}")
    with np.errstate(over="ignore"):
        oscillation = 2 * (cap * np.tanh(turning / cap))  # no 2 · cap: it may overflow
        turned = turned + norms(key_shift, "key_shift") * norms(radius, "radius")
    return _bounded(v, turning, oscillation, turned, causal)


@with_hints
def l2_mean_field(
    norm_G: Any, norm_V: Any, radius: Any, rank: Any, *, causal: bool = False
) -> Any:
    """‖V‖ min(Λ(e^{2ρ²}M, M, 2ρ²), 5.7^{r/2}M + 2ρ²), M = 1+4ρ², ρ² = ‖G‖R²: L2 attention on B_R.

    Scores are −(x−y)ᵀG(x−y) with G = WWᵀ/√k, tied queries and keys. The growth is R², not
    exponential: a token sees itself with score 0. Two heavy atoms and a light one between them
    reach 2ρ² (V = I). Λ is that of `mean_field`. Under a mask the bound is that of
    `by_oscillation` with ω = 4ρ².

    Args:
        norm_G: spectral norm ‖G‖ = ‖W‖²/√k.
        norm_V: spectral norm ‖V‖.
        radius: R.
        rank: r, of G; at most k.
        causal: whether the layer is masked.

    Source: this package. Proved.

    Example:
        >>> l2_mean_field(1.0, 1.0, 2.0, 1)
        48.6
    """
    check_together(norm_G=norm_G, norm_V=norm_V, radius=radius, rank=rank)
    v, k = norms(norm_V, "norm_V"), norms(rank, "rank")
    size, turned = exponent(norm_G, radius)
    by_scores = _bounded(v, 4 * size, 4 * size, 2 * turned, causal)
    if causal:
        return by_scores
    by_columns = np.log1p(4 * size) + k / 2 * np.log(_COLUMN)
    return out(np.minimum(by_scores, assembled(v, by_columns, 2 * turned)))
