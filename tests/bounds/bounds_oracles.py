"""Oracles for the sharp constants: quadrature, brute force and the dense linearisation."""

from __future__ import annotations

import math

import mpmath as mp
import numpy as np


def largest(value, high) -> mp.mpf:
    """max of a function over [0, high]: a grid and golden section, to the digits at work."""
    grid = [high * mp.mpf(k) / 100 for k in range(101)]
    k = max(range(101), key=lambda j: value(grid[j]))
    low, high, ratio = grid[max(k - 1, 0)], grid[min(k + 1, 100)], (mp.sqrt(5) - 1) / 2
    for _ in range(100):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (left, high) if value(left) < value(right) else (low, right)
    return max(value(low), value(high))


def exact_kernel_norm(c: mp.mpf) -> mp.mpf:
    """D(c) as the theorem writes it, in the digits at work."""

    def product(t):
        first = t * mp.exp(-c) + (1 - t) * mp.exp(c)
        near = t * mp.exp(c) * (1 + 2 * (1 - t) * c) ** 2
        return first * (near + (1 - t) * mp.exp(-c) * (1 - 2 * t * c) ** 2)

    return mp.sqrt(largest(product, mp.mpf(1)))


def kernel_norm(c: float) -> float:
    """D(c) from 30 digits."""
    with mp.workdps(30):
        return float(exact_kernel_norm(mp.mpf(c)))


def exact_joint(c: mp.mpf) -> mp.mpf:
    """Λ(D(c), M, c) as Theorem Λ writes it."""
    D, M = exact_kernel_norm(c), mp.sqrt(1 + c * c)
    s = D * D + 2 * c * M
    return mp.sqrt(c * c + (s + mp.sqrt(s * s + 4 * c * c * (D * D - M * M))) / 2)


def exact_two_diracs(c: mp.mpf) -> mp.mpf:
    """The largest norm of T + S at two atoms at ±1 on the line, whose derivative is 2 × 2."""

    def norm(gamma, log_ratio):
        a = [1 / (1 + mp.exp(-log_ratio)), 1 / (1 + mp.exp(log_ratio))]
        # Attention that the atom at +1 and that at −1 pay to the one at +1.
        t = [a[0] / (a[0] + a[1] * mp.exp(-2 * side * gamma)) for side in (1, -1)]
        root = mp.sqrt(a[0] / a[1])
        turned = [4 * each * (1 - each) * gamma for each in t]
        entries = [
            t[0] * (1 + 2 * (1 - t[0]) * gamma) + turned[0],
            root * (1 - t[0]) * (1 - 2 * t[0] * gamma),
            t[1] * (1 - 2 * (1 - t[1]) * gamma) / root,
            (1 - t[1]) * (1 + 2 * t[1] * gamma) + turned[1],
        ]
        trace = sum(each**2 for each in entries)
        determinant = entries[0] * entries[3] - entries[1] * entries[2]
        return mp.sqrt((trace + mp.sqrt(trace**2 - 4 * determinant**2)) / 2)

    return max(largest(lambda r, g=g: norm(g, r), 2 * c + 6) for g in (c, -c))


def joint(D: float, M: float, s: float) -> float:
    """sup ∫(h + s|f|)² from the matrix of k⊗k + s(k⊗1 + 1⊗k) in the plane of 1 and k, and s²."""
    M = min(M, D)
    k, one = np.array([M, math.sqrt(D * D - M * M)]), np.array([1.0, 0.0])
    form = np.outer(k, k) + s * (np.outer(k, one) + np.outer(one, k))
    return math.sqrt(float(np.linalg.eigvalsh(form)[-1]) + s * s)


def mean_field(c: float, p: float) -> float:
    D, M, K = kernel_norm(c), math.sqrt(1 + c * c), (1 + 2 * c) * math.exp(2 * c)
    if p == 2:
        return joint(D, M, c)
    if p >= 2:
        return D ** (2 / p) * (1 + c * c) ** (0.5 - 1 / p) + c
    return K ** (2 / p - 1) * D ** (2 - 2 / p) + c


def by_three_norms(c: float, p: float) -> float:
    """∫₀¹ v^{−1/p} d min(Kv, D√v, M) by quadrature."""
    return _by_quadrature(kernel_norm(c), math.sqrt(1 + c * c), (1 + 2 * c) * math.exp(2 * c), p)


def by_three_norms_bounded(turning: float, oscillation: float, p: float) -> float:
    mean = 1 + turning
    top = (1 + 2 * turning) * math.exp(oscillation)
    return _by_quadrature(math.exp(oscillation / 2) * mean, mean, top, p)


def _by_quadrature(D: float, M: float, K: float, p: float) -> float:
    first, second = (D / K) ** 2, min(1.0, (M / D) ** 2)
    with mp.workdps(20):
        # v = w^k takes the singularity at 0 away.
        k = mp.mpf(p) / (p - 1)
        steep = mp.quad(lambda w: K * k * w ** (k - 1 - k / p), [0, mp.mpf(first) ** (1 / k)])
        middle = mp.quad(lambda v: D / 2 * v ** (-0.5 - mp.mpf(1) / p), [first, second])
        return float(steep + middle)


def by_two_norms(c: float, p: float) -> float:
    """The bound of every dimension as the theorem writes it, by search over a, ρ and Q."""
    kappa, M = 1 + 2 * c, math.sqrt(1 + c * c)

    def pair(rho, Q):
        mean = np.sqrt((1 - Q) * (1 + c * c * (1 - rho**2)))
        return mean, np.maximum(Q * math.exp(2 * c) * (1 + c * (1 + rho)) - kappa, 0)

    rest = p / (p - 1) * M ** (1 - 1 / p) * kappa ** (1 / p)
    return least_joint(pair, c, p) + rest


def by_two_norms_bounded(turning: float, oscillation: float, p: float) -> float:
    """The same for scores of a given oscillation."""
    kappa = 1 + 2 * turning

    def pair(_, Q):
        mean = np.sqrt(1 - Q) * (1 + turning)
        return mean, np.maximum(Q * math.exp(oscillation) * kappa - kappa, 0)

    rest = p / (p - 1) * (1 + turning) ** (1 - 1 / p) * kappa ** (1 / p)
    return least_joint(pair, oscillation / 2, p) + rest


def on_the_line(c: float, p: float) -> float:
    def pair(t, _):
        mean = t * (1 + 2 * (1 - t) * c) + (1 - t) * np.maximum(1 - 2 * t * c, 0)
        return mean, ((1 - t) * math.exp(2 * c) + t) * (1 + 2 * (1 - t) * c)

    if c <= 0.5:
        return least_joint(pair, c, p)
    t = np.linspace(0, 1, 200_001)
    mean = ((1 - t) * (2 * t * c - 1)).max()
    top = max(1.0, math.exp(-2) * (math.exp(2 * c - 1) / (2 * c) + 1))
    return least_joint(pair, c, p) + p / (p - 1) * mean ** (1 - 1 / p) * top ** (1 / p)


def least_joint(pair, c: float, p: float) -> float:
    """min_a (a(p−1))^{−1/p} max (X + aY), (X, Y) = pair(x, y) over the unit square, by zooming."""

    def joint(log_a: float) -> float:
        a, low, high = math.exp(log_a), np.zeros(2), np.ones(2)
        best = 0.0
        for count in (201, *[11] * 7):
            x, y = (np.linspace(low[k], high[k], count) for k in range(2))
            mean, top = pair(x[:, None], y[None])
            value = mean + a * top + 0 * (x[:, None] + y)
            place = np.unravel_index(np.argmax(value), value.shape)
            best = max(best, float(value[place]))
            middle, width = np.array([x[place[0]], y[place[1]]]), 2 * (high - low) / (count - 1)
            low, high = np.maximum(middle - width, 0), np.minimum(middle + width, 1)
        return math.log(best) - (log_a + math.log(p - 1)) / p

    low, high = -2 * c - 3 - max(math.log(p - 1), 0), -2 * c + 3 - min(math.log(p - 1), 0)
    for _ in range(30):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, right) if joint(left) < joint(right) else (left, high)
    return math.exp(joint((low + high) / 2))


def row(c: float, q: float) -> float:
    """max_a Σⱼ P_ij²|e + sⱼu|² as the theorem writes it, on a grid with its corners."""
    a = np.union1d(np.linspace(0, 1, 4_001), [q, 1 - q])
    first = a * np.minimum(a, q) * (1 + 2 * (1 - a) * c) ** 2
    return float((first + (1 - a) * np.minimum(1 - a, q) * (1 - 2 * a * c) ** 2).max())


def tokens(c: float, n: int, *, causal: bool, limit: float) -> float:
    """With the bound of all measures under a mask, `limit`; every sum and maximum as written."""
    M, shares = math.sqrt(1 + c * c), [1 / (1 + i * math.exp(-2 * c)) for i in range(n)]
    if not causal:
        return joint(min(math.sqrt(n * row(c, shares[-1])), kernel_norm(c)), M, c)
    apart = math.sqrt(sum(row(c, q) for q in shares)) + c
    return min(joint(math.sqrt(n * row(c, 1.0)), M, c), apart, limit)


def two_dirac_lower(c: float, p: float) -> float:
    t = np.linspace(0, 1, 20_001)
    return float(
        (t ** (1 - 1 / p) * (1 - t) ** (1 / p) * (1 + 2 * (1 - t) * c)).max() * math.exp(2 * c / p)
    )


def order_norm(J: np.ndarray, weights: np.ndarray, p: float) -> float:
    """The L^p(weights) norm on the line (d = 1), p = 1, 2 or ∞."""
    root = weights ** (1 / p)
    return float(np.linalg.norm(root[:, None] * J / root, p))
