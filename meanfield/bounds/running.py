"""Masked attention as a running average: its norm in d_p, from norms of one kernel.

At a past of mass G the masked derivative is an average with a kernel k on that past. Let f* be
the decreasing rearrangement of |f|, and F = ∫f*. Two ways lead from norms of k to one of T, both
proved on the page "Sharp constants" of the documentation:

- three norms, ∫k ≤ M, (∫k²)^½ ≤ D, sup k ≤ K: ‖T‖ ≤ ∫₀¹ v^{−1/p} d min(Kv, D√v, M);
- two norms of the *same* past, ∫k + a sup k ≤ Λ for one a > 0: ‖T‖ ≤ (a(p−1))^{−1/p} Λ, and
  bounds of the parts of a kernel add, each with an a of its own.

All logarithms are of ‖T‖ for V = I. In the second every a is a bound, so that the search for the
best one costs tightness at most.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from meanfield.bounds.arguments import narrowed


def log_masked(
    c: np.ndarray,
    logs: tuple[np.ndarray, np.ndarray, np.ndarray],
    p: np.ndarray,
    dim: int | None = None,
) -> np.ndarray:
    """For dot products: the least of what three norms give, two in any dimension, two on the line.

    Args:
        c: ‖A‖R², with what a query bias adds.
        logs: log M, log D and log K.
        p: orders.
        dim: of the points; None if unknown.
    """
    steep = _steep(c)
    mean, top = np.hypot(1, c) / (1 + c), (1 + 2 * c) / (1 + c)
    product = c / (1 + c) / (1 + c)

    def joint(a: np.ndarray) -> np.ndarray:
        # Concave in the length 1 + c(1+ρ) for a < 1/2, increasing beyond.
        with np.errstate(divide="ignore", invalid="ignore"):
            length = np.where(a < 0.5, np.sqrt(2 * product / (1 - 4 * a * a)), np.inf)
        length = np.clip(length, 1, top)
        square = length * (2 - length) - 2 * product
        return np.maximum(mean, _over_depth(a * length, square) - a * top * np.exp(-2 * c))

    two = _log_least(joint, p) + np.log1p(c) + 2 * c / p
    two = np.logaddexp(two, _log_apart(logs[0], steep, p))
    found = np.minimum(_log_by_three_norms(*logs, p), _where_finite(two, p))
    return np.minimum(found, _where_finite(_log_on_the_line(c, p), p)) if dim == 1 else found


def log_masked_bounded(turning: np.ndarray, oscillation: np.ndarray) -> np.ndarray:
    """For scores of oscillation ω and gradient g: M = 1+gR, D = e^{ω/2}M, K = e^ω(1+2gR); p = 2.

    Args:
        turning: gR.
        oscillation: ω.
    """
    p = np.full((), 2.0)
    log_mean, steep = np.log1p(turning), _steep(turning)
    mean = np.exp(log_mean - steep)

    def joint(a: np.ndarray) -> np.ndarray:
        return np.maximum(mean, _over_depth(a, mean**2) - a * np.exp(-oscillation))

    two = _log_least(joint, p) + steep + oscillation / p
    two = np.logaddexp(two, _log_apart(log_mean, steep, p))
    three = _log_by_three_norms(log_mean, log_mean + oscillation / 2, steep + oscillation, p)
    return np.minimum(three, _where_finite(two, p))


def _steep(c: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.log1p(2 * c)


def _over_depth(rise: np.ndarray, square: np.ndarray) -> np.ndarray:
    """max over 0 ≤ Q ≤ 1 of √((1−Q) square) + Q rise, where that is not at Q = 0; 0 elsewhere."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(4 * rise**2 >= square, rise + square / (4 * rise), 0.0)


def _log_least(joint: Callable[[np.ndarray], np.ndarray], p: np.ndarray) -> np.ndarray:
    """log min_a (a(p−1))^{−1/p} joint(a), for a maximum of functions linear in a."""
    # In log a it is convex.
    order = np.clip(p - 1, 1e-16, 1e300)

    def value(log_a: np.ndarray) -> np.ndarray:
        return np.log(joint(np.exp(log_a))) - (log_a + np.log(order)) / p

    low = np.minimum(-np.log(order), 0) - np.log(8) + 0 * joint(np.ones(()))
    high = np.maximum(-np.log(order), 0) + np.log(8) + 0 * low
    # From a length of at most 40 to 1e-13.
    low, high = narrowed(value, low, high, steps=70)
    return value((low + high) / 2)


def _log_apart(log_mean: np.ndarray, log_top: np.ndarray, p: np.ndarray) -> np.ndarray:
    """log (p/(p−1)) M^{1−1/p} K^{1/p}: two norms that are bounded apart, with the best a."""
    with np.errstate(divide="ignore"):
        return log_mean + (log_top - log_mean) / p - np.log(1 - 1 / p)


def _log_on_the_line(c: np.ndarray, p: np.ndarray) -> np.ndarray:
    """d = 1: the kernel's parts where 1 + u(y−m) is positive and negative, with an a each."""
    light, unit = np.exp(-2 * c), 1 / (1 + 2 * c)

    def joint(a: np.ndarray) -> np.ndarray:
        # (1 − share·t)(a + slope·t) is a parabola in the attention t paid to the light pole.
        share, slope = 1 - unit, 1 - a * (1 - light)
        with np.errstate(divide="ignore", invalid="ignore"):
            t = np.clip(np.nan_to_num(1 / share - a / slope, nan=0.0) / 2, 0, 1)
        return np.maximum(unit + a, (1 - share * t) * (a + slope * t))

    positive = _log_least(joint, p) + np.log1p(2 * c) + 2 * c / p
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.where(c > 0.5, 2 * np.log(2 * c - 1) - np.log(8 * c), -np.inf)
        top = np.maximum(0, np.logaddexp(2 * c - 1 - np.log(2 * c), 0) - 2)
        negative = np.where(c > 0.5, _log_apart(mean, top, p), -np.inf)
    return np.logaddexp(positive, negative)


def _where_finite(found: np.ndarray, p: np.ndarray) -> np.ndarray:
    return np.where((p > 1) & (p < np.inf) & ~np.isnan(found), found, np.inf)


def _log_by_three_norms(
    log_mean: np.ndarray, log_norm: np.ndarray, log_top: np.ndarray, p: np.ndarray
) -> np.ndarray:
    """log ∫₀¹ v^{−1/p} d min(Kv, D√v, M), whose pieces meet at (D/K)² and (M/D)²."""
    first, second = 2 * (log_norm - log_top), 2 * (log_mean - log_norm)
    power, length = 0.5 - 1 / p, np.maximum(second - first, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        steep = log_top + (1 - 1 / p) * first - np.log(1 - 1 / p)
        width = np.where(power == 0, length, -np.expm1(-np.abs(power) * length) / np.abs(power))
        middle = log_norm - np.log(2) + np.maximum(power * first, power * second) + np.log(width)
    # Logarithms as large as c lose c units in the last place; as p → ∞ what is left is M.
    lost = 16 * np.finfo(float).eps * (np.abs(log_norm) + np.abs(log_top))
    return np.where(p == np.inf, log_mean, np.logaddexp(steep, middle) + lost)
