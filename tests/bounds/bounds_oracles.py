"""Oracles for the sharp constants: quadrature, brute force and the dense linearisation."""

from __future__ import annotations

import math

import mpmath as mp
import numpy as np


def kernel_norm(c: float, points: int = 4001) -> float:
    """D(c) by a grid over t and a golden section in 30 digits, as the theorem writes it."""
    with mp.workdps(30):
        c = mp.mpf(c)

        def product(t):
            first = t * mp.exp(-c) + (1 - t) * mp.exp(c)
            near = t * mp.exp(c) * (1 + 2 * (1 - t) * c) ** 2
            return first * (near + (1 - t) * mp.exp(-c) * (1 - 2 * t * c) ** 2)

        grid = [mp.mpf(k) / 200 for k in range(201)]
        k = max(range(201), key=lambda j: product(grid[j]))
        low, high = grid[max(k - 1, 0)], grid[min(k + 1, 200)]
        for _ in range(80):
            left, right = low + (high - low) / 3, high - (high - low) / 3
            low, high = (left, high) if product(left) < product(right) else (low, right)
        return float(mp.sqrt(max(product(low), product(grid[k]))))


def mean_field(c: float, p: float) -> float:
    D, M, K = kernel_norm(c), math.sqrt(1 + c * c), (1 + 2 * c) * math.exp(2 * c)
    if p >= 2:
        return D ** (2 / p) * (1 + c * c) ** (0.5 - 1 / p) + c
    return K ** (2 / p - 1) * D ** (2 - 2 / p) + c if M else math.nan


def masked_mean_field(c: float, p: float) -> float:
    """∫₀¹ v^{−1/p} d min(Kv, D√v, M) + c by quadrature."""
    D, M, K = kernel_norm(c), math.sqrt(1 + c * c), (1 + 2 * c) * math.exp(2 * c)
    first, second = (D / K) ** 2, min(1.0, (M / D) ** 2)
    with mp.workdps(20):
        # v = w^k takes the singularity at 0 away.
        k = mp.mpf(p) / (p - 1)
        steep = mp.quad(lambda w: K * k * w ** (k - 1 - k / p), [0, mp.mpf(first) ** (1 / k)])
        middle = mp.quad(lambda v: D / 2 * v ** (-0.5 - mp.mpf(1) / p), [first, second])
        return float(steep + middle) + c


def tokens(c: float, n: int, p: float, *, causal: bool) -> float:
    light = math.exp(-2 * c)
    column = sum(1 / (1 + i * light) for i in range(n)) if causal else n / (1 + (n - 1) * light)
    M = math.sqrt(1 + c * c)
    spread = M if p >= 2 else M ** (2 - 2 / p) * (1 + 2 * c) ** (2 / p - 1)
    limit = (masked_mean_field if causal else mean_field)(c, p) - c if p > 1 else math.inf
    if p == 1 and not causal:
        limit = mean_field(c, 1.0) - c
    return min(spread * column ** (1 / p), limit) + c


def two_dirac_lower(c: float, p: float) -> float:
    t = np.linspace(0, 1, 2_000_001)
    return float(
        (t ** (1 - 1 / p) * (1 - t) ** (1 / p) * (1 + 2 * (1 - t) * c)).max() * math.exp(2 * c / p)
    )


def linearisation(
    A: np.ndarray, points: np.ndarray, weights: np.ndarray, positions: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """J (n, n, d, d) of plain or masked attention with V = I, by double loops, and Covᵢ A."""
    n, d = points.shape
    J, fields = np.zeros((n, n, d, d)), np.zeros((n, d, d))
    for i in range(n):
        u = A @ points[i]
        seen = np.ones(n, bool) if positions is None else positions <= positions[i]
        scores = np.where(seen, points @ u, -np.inf)
        share = weights * np.exp(scores - scores.max())
        share = share / share.sum()
        mean = share @ points
        centred = points - mean
        for j in range(n):
            J[i, j] = share[j] * (np.eye(d) + np.outer(centred[j], u))
        fields[i] = (share[:, None] * centred).T @ centred @ A
        J[i, i] += fields[i]
    return J, fields


def order_norm(J: np.ndarray, weights: np.ndarray, p: float) -> float:
    """The L^p(weights) norm on the line (d = 1): columns for p = 1, rows for p = ∞, SVD for 2."""
    matrix = np.abs(J[:, :, 0, 0]) if p != 2 else J[:, :, 0, 0]
    if p == 1:
        return float((weights[:, None] * matrix / weights).sum(0).max())
    if p == 2:
        root = np.sqrt(weights)
        return float(np.linalg.norm(root[:, None] * matrix / root, 2))
    assert p == math.inf
    return float(matrix.sum(1).max())
