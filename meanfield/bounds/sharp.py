"""The sharp constants, from three norms of one kernel.

With u = Ax (+ a query bias), c ≥ |u|R, P_x the attention that x pays, w its density and m its
mean, the derivative of F at μ is V(T + S): (Tf)(x) = ∫ w(x,y) [I + (y − m)uᵀ] f(y) dμ, as the
atoms seen move, and (Sf)(x) = Cov_x A f(x), as the query moves, with ‖S‖ ≤ ‖A‖R². For a unit
vector e the kernel k(y) = w |e + ⟨e, y − m⟩u| of ⟨e, Tf⟩ has

    ∫ k dμ ≤ M = √(1 + c²),   (∫ k² dμ)^½ ≤ D(c),   sup k ≤ K = (1 + 2c)e^{2c},

and every bound here follows from these three. T and S are not large together: T is where f sits
on light atoms, which S does not see, so that their norms need not be added (Λ in `mean_field`).
None is in the papers; the proofs are on the page "Sharp constants" of the documentation.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from meanfield.bounds.arguments import (
    ROUNDING,
    check_together,
    counts,
    exponent,
    narrowed,
    norms,
    orders,
    out,
)
from meanfield.bounds.running import log_masked
from meanfield.checks import as_bool, as_floats, count
from meanfield.habits import with_hints

Logs = tuple[np.ndarray, np.ndarray, np.ndarray]  # log M, log D and log K
_GRID = np.linspace(0.0, 1.0, 65)
_ROWS = 32  # of a mask, that are summed one by one


@with_hints
def mean_field(
    norm_A: Any,
    norm_V: Any,
    radius: Any,
    *,
    p: Any = 2.0,
    shift: Any = 0.0,
    skip: Any = 0.0,
    sink: Any = -np.inf,
) -> Any:
    """‖V‖Λ(D(c), M, ‖A‖R²), c = ‖A‖R² + shift·R: the W₂ constant of F on all measures on B_R.

    Λ(D, M, s)² = s² + ½(D² + 2sM + √((D² + 2sM)² + 4s²(D² − M²))), M = √(1+c²), and D(c)² =
    max_t (te^{−c} + (1−t)e^{c}) (te^{c}(1+2(1−t)c)² + (1−t)e^{−c}(1−2tc)²), the value at two
    Diracs. They reach it up to O(e^{−2c}) (`two_dirac_lower`): at c = 9 the truth lies between
    50,897.6709 and 50,897.6735. For other p it is ‖V‖(N + ‖A‖R²), N = D^{2/p}M^{1−2/p} if p ≥ 2,
    and D^{2−2/p}((1+2c)e^{2c})^{2/p−1} if p ≤ 2.

    Args:
        norm_A: spectral norm ‖A‖.
        norm_V: spectral norm ‖V‖.
        radius: R.
        p: order of the Wasserstein distance, 1 ≤ p ≤ ∞.
        shift: |scale · Kᵀ b_Q|, what a query bias adds to Ax.
        skip: s of a residual map s·x + Γ(x): then Λ(‖V‖D, ‖V‖M, s + ‖V‖‖A‖R²).
        sink: logit β of a key of value 0 in the softmax, −∞ for none: then the smaller of
            e^{(c−β)/2}M and D/√(1+e^β) stands for D, and for M where it is smaller than M. The
            exponent is halved, and gone at β ≥ c.

    Source: this package. Proved; that two Diracs maximise the kernel's norm is computer-assisted
    (interval arithmetic over three variables, in the tests).

    Example:
        >>> mean_field(1.0, 1.0, 3.0)
        50897.6734
        >>> mean_field(1.0, 1.0, 1.0, skip=1.0)
        4.5867
        >>> mean_field(1.0, 1.0, 3.0, sink=0.0)
        815.339
    """
    check_together(
        norm_A=norm_A, norm_V=norm_V, radius=radius, p=p, shift=shift, skip=skip, sink=sink
    )
    v, p, skip = norms(norm_V, "norm_V"), orders(p), norms(skip, "skip")
    beta = as_floats(sink, "sink")
    if not (beta < np.inf).all():
        raise ValueError(f"sink: expected numbers, or −∞ for none, got {sink!r}")
    turning, turned = exponent(norm_A, radius, shift)
    log_mean, log_norm, log_top = _logs(turning)
    by_sink = np.minimum(log_mean + (turning - beta) / 2, log_norm - np.logaddexp(0, beta) / 2)
    # (∫ k^q dμ)^{1/q} at most, 1/p + 1/q = 1, from its values at q = 1, 2 and ∞.
    share = 2 / p
    average = np.where(
        share <= 1,
        share * by_sink + (1 - share) * log_mean,
        (2 - share) * by_sink + (share - 1) * log_top,
    )
    return assembled(v, average, turned, np.where(p == 2, log_mean, average), skip=skip)


def one_sided(norm_A: Any, norm_V: Any, radius: Any, *, shift: Any = 0.0) -> Any:
    """‖V‖(½(D(c) + √(1+c²)) + ‖A‖R²): distances along the flow x′ = Γ_{μ_t}(x) grow as e^{ωt}.

    This is ω in W₂, of plain attention, for all measures on a ball B_R that the flow does not
    leave, without a constraint (masked attention has up to 2‖V‖ at A = 0, where this is ‖V‖):
    half of the Lipschitz constant (`mean_field`) as c → ∞, where it is sharp, and all of it at
    c = 0; D(c) and c as there.
    `meanfield.lipschitz.one_sided` is that at a measure, which may be negative.

    Args:
        norm_A: spectral norm ‖A‖.
        norm_V: spectral norm ‖V‖.
        radius: R.
        shift: |scale · Kᵀ b_Q|, what a query bias adds to Ax.

    Source: this package. Proved, given D(c).

    Example:
        >>> one_sided(1.0, 1.0, 3.0)
        25462.363
    """
    check_together(norm_A=norm_A, norm_V=norm_V, radius=radius, shift=shift)
    turning, turned = exponent(norm_A, radius, shift)
    log_mean, log_norm, _ = _logs(turning)
    half = np.logaddexp(log_mean, log_norm) - np.log(2)
    return assembled(norms(norm_V, "norm_V"), half, turned)


@with_hints
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


@with_hints
def tokens(
    norm_A: Any, norm_V: Any, radius: Any, n: Any, *, causal: bool = False, shift: Any = 0.0
) -> Any:
    """‖V‖Λ(min(√C, D(c)), M, ‖A‖R²) ≥ ‖Df(X)‖, for n uniform tokens in B_R; Λ of `mean_field`.

    C = n max_a (a min(a,q)(1+2(1−a)c)² + (1−a) min(1−a,q)(1−2ac)²) over 0 ≤ a ≤ 1, with
    q = 1/(1+(n−1)e^{−2c}), what one token can get of attention. It grows as c√(n/2) up to about
    n = e^{2c}, then levels off. As c → ∞ that is sharp for 1 ≪ n ≪ e^c, and within √2 of
    `tokens_lower` from n = 12 to n = e^{2c}; for two tokens it is 4 times as much. Masked it is
    the least of three numbers: with q = 1 and without D(c); with the sum over i ≤ n of those
    maxima for i tokens, and ‖A‖R² added; and `masked_mean_field`.

    Args:
        norm_A: spectral norm ‖A‖.
        norm_V: spectral norm ‖V‖.
        radius: R.
        n: number of tokens.
        causal: whether the layer is masked.
        shift: |scale · Kᵀ b_Q|, what a query bias adds to Ax.

    Source: this package. Proved; [CAP24] Theorem 3.3 is at least 2.0 times larger for
    n ≥ 2, masked 1.81 times.

    Example:
        >>> tokens(9.0, 1.0, 1.0, 50)
        48.748
    """
    check_together(norm_A=norm_A, norm_V=norm_V, radius=radius, n=n, shift=shift)
    v, n, causal = norms(norm_V, "norm_V"), counts(n), as_bool(causal, "causal")
    turning, turned = exponent(norm_A, radius, shift)
    logs, order = _logs(turning), np.full((), 2.0)
    if not causal:
        with np.errstate(divide="ignore", invalid="ignore"):
            # n may be infinite, and then all there is.
            seen = -np.logaddexp(0, np.log(n - 1) - 2 * turning)
            norm = np.fmin(0.5 * (np.log(n) + log_row(turning, seen)), logs[1])
        return assembled(v, norm, turned, logs[0])
    by_rows = 0.5 * (np.log(n) + log_row(turning, np.zeros(())))
    apart = np.minimum(0.5 * _log_masked_rows(turning, n), log_masked(turning, logs, order))
    joint = assembled(v, by_rows, turned, logs[0])
    return out(np.minimum(joint, assembled(v, apart, turned)))


def _logs(c: np.ndarray) -> Logs:
    # D(c) = sup (∫ w²|e + ⟨e, y − m⟩u|² dμ)^½ over measures on B_R, |u|R ≤ c and |e| = 1.
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


def log_row(c: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    """log max_a a min(a,q)(1+2(1−a)c)² + (1−a) min(1−a,q)(1−2ac)²: Σⱼ P_ij²|e+sⱼu|² at most.

    For q ≤ ½ it is q(1+c²), at a = ½. For q > ½ it is at some a ≥ ½. Up to q the derivative in
    y = 2a − 1 is (2cy − 1)(cy² − y − c), and the second factor is negative; beyond q a local
    maximum is the middle one of three roots of a cubic in b = 1 − a.
    """
    q = np.exp(log_q)[..., None]
    unit, share = (1 / (1 + 2 * c))[..., None], (2 * c / (1 + 2 * c))[..., None]
    rest = unit - share
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        lead, square = 4 * share**2, 3 * (2 * share * rest - q * share**2)
        line = 2 * (q * share * (share - 2 * unit) + rest**2)
        middle = -square / (3 * lead)
        slope = middle * (2 * square / lead + 3 * middle) + line / lead
        height = middle**2 * (square / lead + middle) + middle * line / lead
        height = height + q * unit * (2 * share - unit) / lead
        turn = np.clip(1.5 * 3**0.5 * height / (-slope) ** 1.5, -1, 1)
        root = middle + 2 * np.sqrt(-slope / 3) * np.sin(np.arcsin(turn) / 3)
        early = 0.5 + 0.25 / np.maximum(c, 1e-300)[..., None]
    q = np.broadcast_to(q, root.shape)
    a = np.concatenate([0 * q + 0.5, q, 0 * q + 1, 0 * q + early, 1 - np.nan_to_num(root)], -1)
    a = np.clip(a, 0.5, 1)
    value = a * np.minimum(a, q) * (unit + share * (1 - a)) ** 2
    value = (value + (1 - a) * np.minimum(1 - a, q) * (unit - share * a) ** 2).max(-1)
    few = np.log(value) + 2 * np.log1p(2 * c)
    return np.where(log_q > np.log(0.5), few, log_q + 2 * np.log(np.hypot(1, c)))


def _log_masked_rows(c: np.ndarray, n: np.ndarray) -> np.ndarray:
    """log of the sum over i ≤ n of e^log_row, q = 1/(1+(i−1)e^{−2c}), at most.

    The first rows one by one; those with q ≥ ½ like the first of them; of the others, convex in
    i, the sum is at most an integral.
    """
    light, place = np.exp(-2 * c), np.arange(1, _ROWS + 2)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        rows = log_row(c[..., None], -np.log1p((place - 1) * light[..., None]))
        rows = np.exp(rows - 2 * np.log1p(2 * c)[..., None])
        head = (rows * (place <= np.minimum(n, _ROWS)[..., None])).sum(-1)
        half = np.maximum(np.floor(np.minimum(n, 1 + 1 / light)), _ROWS)
        rest = np.log1p((n - half) * light / (1 + light * (half - 0.5))) / light
        rest = np.where(n > half, rest * np.hypot(1 / (1 + 2 * c), c / (1 + 2 * c)) ** 2, 0)
        middle = np.where(half > _ROWS, (half - _ROWS) * rows[..., -1], 0)
        return np.log(head + middle + rest) + 2 * np.log1p(2 * c)


def assembled(
    v: np.ndarray, log_norm: np.ndarray, turned: np.ndarray, log_mean: Any = np.inf, skip: Any = 0
) -> Any:
    """Λ(‖V‖e^log_norm, ‖V‖e^log_mean, skip + ‖V‖turned), the sum of first and third without M."""
    with np.errstate(over="ignore", invalid="ignore"):
        norm = np.where(v > 0, v * np.exp(log_norm), 0.0)
        mean = np.where(v > 0, v * np.exp(np.minimum(log_mean, log_norm)), 0.0)
        alone = skip + np.where(v > 0, v * turned, 0.0)
        size = norm + alone
        d, m, s = norm / size, mean / size, alone / size
        trace = d * d + 2 * s * m
        root = np.sqrt(trace * trace + 4 * s * s * (d - m) * (d + m))
        joint = size * np.sqrt(s * s + (trace + root) / 2)
        return out((1 + ROUNDING) * np.where((size > 0) & (size < np.inf), joint, size))
