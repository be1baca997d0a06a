"""What two unbalanced Diracs reach: lower bounds of the constants on a ball."""

from __future__ import annotations

from typing import Any

import numpy as np

from meanfield.bounds.arguments import check_together, counts, exponent, narrowed, orders, out
from meanfield.checks import as_floats
from meanfield.habits import with_hints


def two_dirac_entry(gamma: Any, radius: Any, log_ratio: Any, *, p: Any = 2.0) -> Any:
    """t^{1−1/p}(1−t)^{1/p} (1 + 2(1−t)c) e^{2c/p}, c = γR²: how a light atom moves a heavy one.

    t = a e^{2c}/(1 + a e^{2c}) is the attention that the heavy atom pays to the light one, a the
    ratio of their weights. For p = 2, √(t(1−t))(1+2(1−t)c)e^c, it is one entry of D^½JD^−½ in the
    configuration of Proposition 3.4 (V = I), so the local constant of that two-atom measure is at
    least this, and a little more.

    Args:
        gamma: scaling factor γ = max(−γ_min, γ_max/8) of the real eigenvalues of A.
        radius: R.
        log_ratio: log(light weight / heavy weight).
        p: order of the Wasserstein distance, 1 ≤ p ≤ ∞.

    Source: growth [CAP24] Prop. 3.6 and App. C.8; this constant is this package's. Proved.
    """
    check_together(gamma=gamma, radius=radius, log_ratio=log_ratio, p=p)
    c, inverse = exponent(gamma, radius, name="gamma")[0], 1 / orders(p)
    logit = as_floats(log_ratio, "log_ratio") + 2 * c
    # No overflow at either end.
    return _entry(c, inverse, -np.logaddexp(0, -logit), -np.logaddexp(0, logit))


@with_hints
def two_dirac_lower(gamma: Any, radius: Any, *, p: Any = 2.0) -> Any:
    """The supremum of `two_dirac_entry` over weights: what two Diracs in B_R reach at least.

    For p = 2 and large c = γR² the best attention is t → 1/4, the best ratio of weights e^{−2c}/3,
    and the value (3√3/8) c e^c, which is the sharp constant up to a factor 1 + o(1). For p = 1 it
    is (1+2c)e^{2c}, as the light weight tends to 0.

    Args:
        gamma: scaling factor γ.
        radius: R.
        p: order of the Wasserstein distance, 1 ≤ p ≤ ∞.

    Source: as `two_dirac_entry`.

    Example:
        >>> two_dirac_lower(1.0, 3.0)
        50897.67
    """
    return _entry(*_best_attention(gamma, radius, p))


def masked_two_dirac_lower(gamma: Any, radius: Any, *, p: Any = 2.0) -> Any:
    """p/(p−1) times `two_dirac_lower`: what masked attention reaches in the conditional d_p.

    Light and heavy atoms interleaved in one proportion at every scale of position
    (`meanfield.sampling.interleaved_diracs`) tend to it or above: there the masked average is
    Hardy's running mean of the plain one.

    Args:
        gamma: scaling factor γ.
        radius: R.
        p: order of the conditional distance, 1 ≤ p ≤ ∞; infinite at 1.

    Source: this package. Proved.
    """
    plain = as_floats(two_dirac_lower(gamma, radius, p=p))
    with np.errstate(divide="ignore", over="ignore"):
        return out(plain / (1 - 1 / orders(p)))


@with_hints
def tokens_lower(norm_A: Any, radius: Any, n: Any) -> Any:
    """max_z √(2(n−2)) c√(1−z²)/(2 + (n−2)e^{−c(1+z)}): what n tokens reach.

    A = −(c/R²)I, n − 2 tokens stand at −Re₁ and see two at R(z, ±√(1−z²)), which are the first
    under a mask and move along e₁ in opposite senses. For c ≫ ln n it is c√(n/2 − 1)(1 + o(1)),
    for many tokens the upper end (`tokens`): √n hides the factor c. For few tokens, and for
    e^c < n < e^{2c}, ½√((n−1)(1 + c² + ln(n−1))) is larger, without a mask: A/‖A‖ is a rotation,
    and n − 1 tokens at x, |x| = R, pay half of their attention to one at −x, ⟨Ax, −2x⟩ = ln(n−1).

    Args:
        norm_A: spectral norm ‖A‖.
        radius: R.
        n: number of tokens.

    Returns:
        The larger of the two; 0 where there are no such tokens.

    Source: this package. Proved, for V = I and d ≥ 2; of masked attention the first alone.

    Example:
        >>> tokens_lower(9.0, 1.0, 50)
        44.0
    """
    check_together(norm_A=norm_A, radius=radius, n=n)
    c, n = exponent(norm_A, radius)[0], counts(n)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        logs = np.log(n - 1)
        far = np.sqrt(n - 1) * np.hypot(c, np.sqrt(1 + logs)) / 2
        one = np.where((n > 1) & (logs <= 2 * c), far, 0.0)

        def two(height: np.ndarray) -> np.ndarray:
            across, seen = np.sqrt(height * (2 - height)), np.exp(-c * height)
            return c * np.sqrt(2 * (n - 2)) * across / (2 + (n - 2) * seen)

        # 1 + z: the logarithm is concave.
        low, high = narrowed(lambda height: -two(height), 0 * (c + n), 2 + 0 * c, steps=60)
        return out(np.fmax(one, np.where((n > 2) & (n < np.inf), two((low + high) / 2), 0.0)))


@with_hints
def two_dirac_best_log_ratio(gamma: Any, radius: Any, *, p: Any = 2.0) -> Any:
    """log(light/heavy) that maximises `two_dirac_entry`: log(t/(1−t)) − 2γR².

    t is the smaller root of 4ct² − (1 + 4c + 2cq)t + q(1+2c) = 0 with c = γR², q = 1 − 1/p.
    """
    c, _, log_t, log_rest = _best_attention(gamma, radius, p)
    return out(log_t - log_rest - 2 * c)


def _entry(c: np.ndarray, inverse: np.ndarray, log_t: np.ndarray, log_rest: np.ndarray) -> Any:
    """`two_dirac_entry` from c, 1/p, log t and log (1−t)."""
    with np.errstate(over="ignore", invalid="ignore"):
        # t⁰ is 1 at the ends of the orders, also for the best light atom there, of no weight.
        light = np.where(inverse == 1, 0.0, (1 - inverse) * log_t)
        heavy = np.where(inverse == 0, 0.0, inverse * log_rest)
        log_entry = light + heavy + 2 * c * inverse
        return out((1 + 2 * np.exp(log_rest) * c) * np.exp(log_entry))


def _best_attention(
    gamma: Any, radius: Any, p: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """c, 1/p, and log t and log (1−t) of the t that maximises the entry."""
    check_together(gamma=gamma, radius=radius, p=p)
    c, inverse = exponent(gamma, radius, name="gamma")[0], 1 / orders(p)
    q = 1 - inverse
    # Divided by 1 + 2c, so that no square overflows.
    unit, share = 1 / (1 + 2 * c), np.minimum(c / (1 + 2 * c), 0.5)
    middle = unit + share * (4 + 2 * q)
    root = np.sqrt(np.maximum(middle**2 - 16 * share * q, 0))
    t = np.minimum(2 * q / (middle + root), 1.0)
    with np.errstate(divide="ignore"):
        return c, inverse, np.log(t), np.log1p(-t)
