"""The formulas of the theorems. Every function takes numbers or arrays and broadcasts them."""

from __future__ import annotations

from typing import Any

import numpy as np

from meanfield.capabilities import HasLocalUpper

__all__ = [
    "general",
    "general_lower",
    "local_upper",
    "masked_mean_field",
    "mean_field",
    "multi_head",
    "scaling_factor",
    "two_dirac_best_log_ratio",
    "two_dirac_entry",
    "two_dirac_lower",
]


def general(norm_A: Any, norm_V: Any, radius: Any, n: Any) -> Any:
    """√3 ‖V‖ (‖A‖²R⁴(4n+1) + n)^½: the Euclidean constant on n tokens in B_R, plain or masked.

    Args:
        norm_A: spectral norm ‖A‖.
        norm_V: spectral norm ‖V‖.
        radius: R.
        n: number of tokens.

    Source: [CAP24] Theorems 3.3 and 4.3.

    Example:
        >>> general(0.0, 1.0, 1.0, 3)
        3.0
    """
    a, v, r = (
        _norm(x, name) for x, name in ((norm_A, "norm_A"), (norm_V, "norm_V"), (radius, "radius"))
    )
    n = _count(n)
    with np.errstate(over="ignore"):
        return _out(np.sqrt(3.0) * v * np.hypot(a * r**2 * np.sqrt(4 * n + 1), np.sqrt(n)))


def general_lower(gamma: Any, radius: Any, n: Any) -> Any:
    """√(n−1) / (1 + (n−1)e^{−2γR²}): what the worst n tokens in B_R reach at least, for V = I.

    Args:
        gamma: scaling factor γ = max(−γ_min, γ_max/8) of the real eigenvalues of A
            (`scaling_factor`), or −γ, γ/8 of one of them.
        radius: R.
        n: number of tokens.

    Source: [CAP24] Proposition 3.4; `meanfield.sampling.adversarial` builds the witness.
    """
    g, r, n = np.asarray(gamma, float), _norm(radius, "radius"), _count(n)
    with np.errstate(over="ignore"):
        return _out(np.sqrt(n - 1) / (1 + (n - 1) * np.exp(-2 * g * r**2)))


def mean_field(norm_A: Any, norm_V: Any, radius: Any) -> Any:
    """‖V‖(1 + 3‖A‖R²)e^{2‖A‖R²}: the W₂ constant of F on all measures on B_R.

    Args:
        norm_A: spectral norm ‖A‖.
        norm_V: spectral norm ‖V‖.
        radius: R.

    Source: [CAP24] Theorem 3.5.
    """
    a, v, r = _norm(norm_A, "norm_A"), _norm(norm_V, "norm_V"), _norm(radius, "radius")
    c = a * r**2
    with np.errstate(over="ignore"):
        return _out(v * (1 + 3 * c) * np.exp(2 * c))


def masked_mean_field(norm_A: Any, norm_V: Any, radius: Any, p: float = 2) -> Any:
    """‖V‖(‖A‖R² + p/(p−1) · (1 + 2‖A‖R²)e^{2‖A‖R²}): the d_p constant of masked mean-field F.

    At A = 0 the masked map is a running mean, whose L^p norm is Hardy's p/(p−1): the unmasked
    constant cannot hold for the conditional distance.

    Args:
        norm_A: spectral norm ‖A‖.
        norm_V: spectral norm ‖V‖.
        radius: R.
        p: order of the conditional transport distance, above 1.

    Source: not in the papers; derived here, tested numerically.
    """
    if not p > 1:
        raise ValueError(f"p: expected p > 1 (Hardy's constant p/(p−1) is infinite at 1), got {p}")
    a, v, r = _norm(norm_A, "norm_A"), _norm(norm_V, "norm_V"), _norm(radius, "radius")
    c = a * r**2
    with np.errstate(over="ignore"):
        return _out(v * (c + p / (p - 1) * (1 + 2 * c) * np.exp(2 * c)))


def two_dirac_entry(gamma: Any, radius: Any, log_ratio: Any) -> Any:
    """√(t(1−t)) (1 + 2(1−t)c) e^c with c = γR²: how the light of two atoms moves the heavy one.

    t = a e^{2c}/(1 + a e^{2c}) is the attention that the heavy atom pays to the light one, a the
    ratio of their weights. It is one entry of D^½JD^−½ in the configuration of Proposition 3.4
    (V = I), so the local constant of that two-atom measure is at least this, and a little more.

    Args:
        gamma: scaling factor γ = max(−γ_min, γ_max/8) of the real eigenvalues of A.
        radius: R.
        log_ratio: log(light weight / heavy weight).

    Source: growth [CAP24] Prop. 3.6 and App. C.8; this constant is not in the paper: derived
    here, tested numerically.
    """
    c = _exponent(gamma, radius)
    logit = np.asarray(log_ratio, float) + 2 * c
    # log √(t(1−t)) = −½ (log(1+e^z) + log(1+e^−z)): no overflow at either end.
    log_root = -0.5 * (np.logaddexp(0, logit) + np.logaddexp(0, -logit))
    share = np.exp(-np.logaddexp(0, logit))
    with np.errstate(over="ignore"):
        return _out((1 + 2 * share * c) * np.exp(log_root + c))


def two_dirac_lower(gamma: Any, radius: Any) -> Any:
    """The largest `two_dirac_entry` over weights: what two Diracs in B_R reach at least.

    For large c = γR² the best attention is t → 1/4, the best ratio of weights e^{−2c}/3, and the
    value (3√3/8) c e^c.

    Args:
        gamma: scaling factor γ.
        radius: R.

    Source: as `two_dirac_entry`.
    """
    return two_dirac_entry(gamma, radius, two_dirac_best_log_ratio(gamma, radius))


def two_dirac_best_log_ratio(gamma: Any, radius: Any) -> Any:
    """log(light/heavy) that maximises `two_dirac_entry`: log(t/(1−t)) − 2γR².

    t is the root in (0, 1/2] of 8ct² − (10c+2)t + 1 + 2c = 0 with c = γR².
    """
    c = _exponent(gamma, radius)
    t = (1 + 2 * c) / (5 * c + 1 + np.sqrt(9 * c**2 + 2 * c + 1))
    return _out(np.log(t) - np.log1p(-t) - 2 * c)


def multi_head(norms_W: Any, constants: Any) -> float:
    """Σ_h ‖W^h‖ Lip(f^h) over the last axis.

    Args:
        norms_W: ‖W^h‖ per head (..., H).
        constants: a bound of each head alone (..., H).

    Source: [CAP24] Lemma 3.8.
    """
    return _out((_norm(norms_W, "norms_W") * _norm(constants, "constants")).sum(-1))


def scaling_factor(A: Any) -> float:
    """γ = max(−γ_min, γ_max/8) over the real eigenvalues of A; 0 if that is negative or none is.

    Args:
        A: square matrix (d, d).

    Source: [CAP24] Proposition 3.4.
    """
    matrix = np.asarray(A, float)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"A: expected a square matrix, got shape {matrix.shape}")
    eigenvalues = np.linalg.eigvals(matrix)
    real = eigenvalues[np.isreal(eigenvalues)].real
    return float(max(-real.min(), real.max() / 8, 0.0)) if real.size else 0.0


def local_upper(F: Any, mu: Any) -> Any:
    """An upper bound of the local Wasserstein constant at μ, both components.

    Not in the papers; derived here, tested numerically. It uses the attention weights that are
    there (column masses and covariances), so it is far below the a-priori bounds, and it costs a
    few products with the linearisation. For uniform weights it bounds the Euclidean constant
    ‖Df(X)‖ too.

    Args:
        F: a map of measures that has the method `local_upper`, such as `SelfAttention`.
        mu: a measure, or a batch of them.

    Returns:
        The bound, a tensor of the measure's batch shape.

    Raises:
        TypeError: if the map offers none.
    """
    if not isinstance(F, HasLocalUpper):
        raise TypeError(
            f"expected a map with a method local_upper(mu), such as SelfAttention, "
            f"got {type(F).__name__}"
        )
    return F.local_upper(mu)


def _exponent(gamma: Any, radius: Any) -> np.ndarray:
    return _norm(gamma, "gamma") * _norm(radius, "radius") ** 2


def _norm(value: Any, name: str) -> np.ndarray:
    array = np.asarray(value, float)
    if not (array >= 0).all():
        raise ValueError(f"{name}: expected numbers ≥ 0, got {value!r}")
    return array


def _count(n: Any) -> np.ndarray:
    array = np.asarray(n, float)
    if not (array >= 1).all():
        raise ValueError(f"n: expected at least 1 token, got {n!r}")
    return array


def _out(value: np.ndarray) -> Any:
    return float(value) if np.ndim(value) == 0 else value
