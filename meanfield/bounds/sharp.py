"""The sharp constants, from three norms of one kernel.

With u = Ax (+ a query bias), c ≥ |u|R, P_x the attention that x pays, w its density and m its
mean, the derivative of F at μ is V(T + S): (Tf)(x) = ∫ w(x,y) [I + (y − m)uᵀ] f(y) dμ, as the
atoms seen move, and (Sf)(x) = Cov_x A f(x), as the query moves, with ‖S‖ ≤ ‖A‖R². For a unit
vector e the kernel k(y) = w |e + ⟨e, y − m⟩u| of ⟨e, Tf⟩ has

    ∫ k dμ ≤ M = √(1 + c²),   (∫ k² dμ)^½ ≤ D(c),   sup k ≤ K = (1 + 2c)e^{2c},

and every bound here follows from these three by Hölder's inequality. None is in the papers; the
proofs are on the page "Sharp constants" of the documentation.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from meanfield.bounds.arguments import check_together, counts, exponent, norms, orders, out
from meanfield.bounds.golden import narrowed
from meanfield.bounds.running import log_masked
from meanfield.checks import as_bool, count

_GRID = np.linspace(0.0, 1.0, 65)


def mean_field(norm_A: Any, norm_V: Any, radius: Any, *, p: Any = 2.0, shift: Any = 0.0) -> Any:
    """‖V‖(D(c) + ‖A‖R²), c = ‖A‖R² + shift·R: the W₂ constant of F on all measures on B_R.

    D(c)² = max_t (te^{−c} + (1−t)e^{c}) (te^{c}(1+2(1−t)c)² + (1−t)e^{−c}(1−2tc)²), the value at
    two Diracs. For other p, D gives way to D^{2/p}(1+c²)^{½−1/p} if p ≥ 2, and to
    D^{2−2/p}((1+2c)e^{2c})^{2/p−1} if p ≤ 2. Two Diracs reach D(c) up to the additive c
    (`two_dirac_lower`): at c = 9 the truth lies between 50,897 and 50,907.

    Args:
        norm_A: spectral norm ‖A‖.
        norm_V: spectral norm ‖V‖.
        radius: R.
        p: order of the Wasserstein distance, 1 ≤ p ≤ ∞.
        shift: |scale · Kᵀ b_Q|, what a query bias adds to Ax.

    Source: this package. Proved; that two Diracs maximise the kernel's norm is computer-assisted
    (interval arithmetic over three variables, in the tests).

    Example:
        >>> mean_field(1.0, 1.0, 3.0)
        50906.7
    """
    check_together(norm_A=norm_A, norm_V=norm_V, radius=radius, p=p, shift=shift)
    v, p = norms(norm_V, "norm_V"), orders(p)
    turning, turned = exponent(norm_A, radius, shift)
    return assembled(v, log_average(*_logs(turning), p), turned)


def masked_mean_field(
    norm_A: Any,
    norm_V: Any,
    radius: Any,
    *,
    dim: int | None = None,
    p: Any = 2.0,
    shift: Any = 0.0,
) -> Any:
    """‖V‖(N + ‖A‖R²): the conditional d₂ constant of masked attention on B_R.

    N is the smaller of two numbers. The first is, with a = ωe^{−2c} and c as in `mean_field`,

        min_ω max_{ρ,Q} (√((1−Q)(1+c²(1−ρ²))) + a(Qe^{2c}(1+c(1+ρ)) − κ)₊)/√a + 2√(κM),

    0 ≤ ρ, Q ≤ 1, κ = 1+2c, M = √(1+c²); about √2·c·e^c. The second, for small c, is
    D(2 + ln(MK/D²)), K = κe^{2c}. On the line a third is about (3√3/4)c·e^c, which is sharp.
    For other p, (a(p−1))^{−1/p} stands for 1/√a, (p/(p−1))M^{1−1/p}κ^{1/p} for 2√(κM), and
    ∫₀¹ v^{−1/p} d min(Kv, D√v, M) is the second; at A = 0 it is Hardy's p/(p−1), the norm of a
    running mean. Infinite at p = 1, as the constant is. From c = 4 on `masked_two_dirac_lower` is
    below by a factor of at most 1.09.

    Args:
        norm_A: spectral norm ‖A‖.
        norm_V: spectral norm ‖V‖.
        radius: R.
        dim: dimension of the points; None if it is unknown.
        p: order of the conditional distance d_p, 1 ≤ p ≤ ∞.
        shift: |scale · Kᵀ b_Q|, what a query bias adds to Ax.

    Source: this package. Proved; the second given D(c).

    Example:
        >>> masked_mean_field(1.0, 1.0, 3.0), masked_mean_field(1.0, 1.0, 3.0, dim=1)
        (107372.57, 103713.15)
    """
    check_together(norm_A=norm_A, norm_V=norm_V, radius=radius, p=p, shift=shift)
    v, p = norms(norm_V, "norm_V"), orders(p)
    dim = None if dim is None else count(dim, "dim")
    turning, turned = exponent(norm_A, radius, shift)
    return assembled(v, log_masked(turning, _logs(turning), p, dim), turned)


def tokens(
    norm_A: Any,
    norm_V: Any,
    radius: Any,
    n: Any,
    *,
    causal: bool = False,
    p: Any = 2.0,
    shift: Any = 0.0,
) -> Any:
    """‖V‖(min(√n max_q √(q(1+c²v(q))), D(c)) + ‖A‖R²): n uniform tokens in B_R.

    The maximum is over 0 ≤ q ≤ 1/(1+(n−1)e^{−2c}), what one token can get of attention; v = 1 up
    to q = ½ and 4q(1−q) beyond, the variance that a law with an atom of mass q can have. It
    grows as √n up to about n = e^{2c}, between ½ and √(16/27) times c√n (`tokens_lower`), then
    levels off. Masked, the squares add up for 1, …, n tokens and D(c) is the masked constant. For
    p = 2 it bounds ‖Df(X)‖; for other p, displacements are measured by (Σ|εᵢ|^p/n)^{1/p}.

    Args:
        norm_A: spectral norm ‖A‖.
        norm_V: spectral norm ‖V‖.
        radius: R.
        n: number of tokens.
        causal: whether the layer is masked.
        p: order of the norm, 1 ≤ p ≤ ∞.
        shift: |scale · Kᵀ b_Q|, what a query bias adds to Ax.

    Source: this package. Proved; sharper than [CAP24] Theorem 3.3 by a factor of 1.58 at least.

    Example:
        >>> tokens(0.0, 1.0, 1.0, 100)
        1.0
    """
    check_together(norm_A=norm_A, norm_V=norm_V, radius=radius, n=n, p=p, shift=shift)
    v, n, p = norms(norm_V, "norm_V"), counts(n), orders(p)
    causal = as_bool(causal, "causal")
    turning, turned = exponent(norm_A, radius, shift)
    logs = _logs(turning)
    log_mean = logs[0]
    # (∫ |e + su|^q dP)^{p/q} for 1/q + 1/p = 1 is at most (1+c²v)^power (1+2c)^steep, between its
    # values at q = 2 and q = ∞.
    inverse, power, steep = 1 / p, np.minimum(p / 2, p - 1), np.maximum(2 - p, 0)
    column = _log_masked_column if causal else _log_column
    with np.errstate(over="ignore", invalid="ignore"):
        summed = np.where(inverse > 0, inverse * column(turning, n, np.minimum(power, 1e300)), 0)
        summed = np.where(np.isinf(p), log_mean, summed)
    summed = summed + inverse * np.where(steep > 0, steep * np.log1p(2 * turning), 0)
    limit = log_masked(turning, logs, p) if causal else log_average(*logs, p)
    return assembled(v, np.minimum(summed, limit), turned)


def kernel_norm(c: Any) -> Any:
    """D(c) = sup (∫ w²|e + ⟨e, y − m⟩u|² dμ)^½ over measures on B_R, |u|R ≤ c and |e| = 1.

    It increases in c, and is (3√3/8) c e^c (1 + o(1)).

    Args:
        c: numbers ≥ 0.

    Source: this package, see `mean_field`.
    """
    with np.errstate(over="ignore"):
        return out(np.exp(_logs(np.minimum(norms(c, "c"), 1e300))[1]))


def _logs(c: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """log M, log D and log K."""
    with np.errstate(over="ignore"):
        top, steep = 2 * c + np.log1p(2 * c), np.log1p(2 * c)
        return np.log(np.hypot(1.0, c)), 0.5 * (top + steep + np.log(_peak(c))), top


def _peak(c: np.ndarray) -> np.ndarray:
    """max_t of the product under D², over ((1+2c)e^{c})²: a polynomial of degree 4 in t."""
    share, light = (2 * c / (1 + 2 * c))[..., None], np.exp(-2 * c)[..., None]

    def product(t: np.ndarray) -> np.ndarray:
        near, far = 1 - share * t, 1 - share - share * t
        return (1 - (1 - light) * t) * (t * near**2 + (1 - t) * light * far**2)

    best = _GRID[np.argmax(product(_GRID), axis=-1)][..., None]
    low, high = np.clip(best - _GRID[1], 0, 1), np.clip(best + _GRID[1], 0, 1)
    # From two grid steps to 1e-9; the maximum then is good to 1e-17.
    low, high = narrowed(lambda t: -product(t), low, high, steps=40)
    return product(np.concatenate([low, best, high], -1)).max(-1)


def log_average(
    log_mean: np.ndarray, log_norm: np.ndarray, log_top: np.ndarray, p: np.ndarray
) -> np.ndarray:
    """log of (∫ k^q dμ)^{1/q} at most, 1/p + 1/q = 1, from its values at q = 1, 2 and ∞."""
    share = 2 / p
    low = share * log_norm + (1 - share) * log_mean
    high = (2 - share) * log_norm + (share - 1) * log_top
    return np.where(share <= 1, low, high)


def _log_column(c: np.ndarray, n: np.ndarray, power: np.ndarray) -> np.ndarray:
    """log of n max_q q(1+c²v(q))^power over q ≤ 1/(1+(n−1)e^{−2c}): a column of P at most."""
    with np.errstate(divide="ignore", over="ignore"):
        # log n, less the logarithm of 1/q = 1 + (n−1)e^{−2c}; n may be infinite.
        least = np.logaddexp(0, np.log(n - 1) - 2 * c)
        share = np.exp(-least)
        top = np.minimum(share, _best_share(c, power))
        log_top = np.where(top < share, np.log(top), -least)
        return np.where(
            np.isinf(n),
            2 * c + 2 * power * np.log(np.hypot(1, c)),
            np.log(n) + log_top + power * _log_spread(c, top),
        )


def _log_masked_column(c: np.ndarray, n: np.ndarray, power: np.ndarray) -> np.ndarray:
    """The same for Σ_{i<n} max_q …, q ≤ 1/(1+ie^{−2c}), at most: the smaller of two bounds.

    With 1+c² for 1+c²v(q); and with one maximum for all i < e^{2c}, where q may be above ½. The
    terms are convex in i, so that sums are at most integrals about them.
    """
    light, log_square = np.exp(-2 * c), 2 * np.log(np.hypot(1, c))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        integral = np.log1p((n - 1) * light / (1 + light / 2)) / light
        # Where ne^{−2c} is below 1e-12 the sum is n to rounding.
        whole = np.log(np.minimum(n, np.where(n * light > 1e-12, 1 + integral, n)))
        whole = whole + power * log_square
        first = np.minimum(n, 1 + np.exp(np.minimum(2 * c, 700)))
        top = np.minimum(1.0, _best_share(c, power))
        head = np.log(first) + np.log(top) + power * _log_spread(c, top)
        rest = np.log1p((n - first) * light / (1 + light * (first - 0.5))) / light
        tail = np.where(n > first, np.log(rest) + power * log_square, -np.inf)
        both = np.logaddexp(head, tail)
        return np.where(np.isnan(both), whole, np.minimum(whole, both))


def _best_share(c: np.ndarray, power: np.ndarray) -> np.ndarray:
    """Where q(1+4c²q(1−q))^power is largest: the root of a quadratic, beyond ½."""
    # With r = power, (2(1+2r)q − (1+r))² = (1+r)² + (1+2r)/c², over (1+r)².
    with np.errstate(divide="ignore", over="ignore"):
        double = (1 + 2 * power) / (1 + power)
        return (1 + np.sqrt(1 + double / (1 + power) / c / c)) / (2 * double)


def _log_spread(c: np.ndarray, q: np.ndarray) -> np.ndarray:
    """log(1 + c²v(q)), v = 1 up to ½ and 4q(1−q) beyond."""
    variance = np.where(q > 0.5, 4 * q * (1 - q), 1.0)
    return 2 * np.log(np.hypot(1, c * np.sqrt(variance)))


def assembled(v: np.ndarray, log_average: np.ndarray, turned: np.ndarray) -> Any:
    """‖V‖(e^log_average + turned), 0 where V is."""
    with np.errstate(over="ignore", invalid="ignore"):
        return out(np.where(v > 0, v * (np.exp(log_average) + turned), 0.0))
