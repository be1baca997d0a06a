"""What a normalisation before attention buys: displacements along a sphere."""

from __future__ import annotations

from typing import Any

import numpy as np

from meanfield.bounds.arguments import check_together, exponent, norms, out
from meanfield.bounds.golden import narrowed
from meanfield.bounds.sharp import assembled, kernel_norm

# Of the search for a maximum over ζ: a grid, and golden section about its highest places.
_PLACES, _TOPS = 129, 8
_SCALES, _ROUNDS = 33, 10  # of the search for λ: 16^−10 of the first bracket
_LARGEST = 750.0  # e^c is no float64 beyond


def sphere_mean_field(norm_A: Any, norm_V: Any, radius: Any, *, shift: Any = 0.0) -> Any:
    """‖V‖Λ(min(D_S, D), √(1+c²), ‖A‖R²): attention on B_R whose atoms move across themselves.

    With Λ and D(c) of `mean_field`, D_S(c) of `tangential_norm`, the smaller from c = 1.21
    on, and f(y) ⟂ y. So they move behind LayerNorm or RMSNorm (R = √d, the gain absorbed into A
    and V, ε = 0): there the constant at an input is at most this over the least spread of its
    points. It bounds ‖T + S‖ on tangential displacements in L²(μ), plain attention, as
    `mean_field` does on all; the exponential stays, a factor of √(ec/2) goes.
    `sphere_two_dirac_lower` is 0.6 times it.

    Args:
        norm_A: spectral norm ‖A‖.
        norm_V: spectral norm ‖V‖.
        radius: R.
        shift: |scale · Kᵀ b_Q|, what a query bias adds to Ax.

    Source: this package. Proved.

    Example:
        >>> sphere_mean_field(1.0, 1.0, 3.0)
        22875.7204
    """
    check_together(norm_A=norm_A, norm_V=norm_V, radius=radius, shift=shift)
    v = norms(norm_V, "norm_V")
    turning, turned = exponent(norm_A, radius, shift)
    average = np.log(np.minimum(tangential_norm(turning), kernel_norm(turning)))
    return assembled(v, average, turned, np.log(np.hypot(1, turning)))


def tangential_norm(c: Any) -> Any:
    """D_S(c) = min_λ max_ζ (λe^{−cζ} + e^{cζ}(1 + 2c√(1−ζ²))²/λ)/2: the kernel's norm along y^⊥.

    It is the root of sup_P E[e^{−cζ}] E[e^{cζ}(1+2c√(1−ζ²))²] over laws of ζ on [−1, 1]. Every λ
    gives a bound.

    Args:
        c: numbers ≥ 0.

    Source: this package, see `sphere_mean_field`.
    """
    sizes = norms(c, "c")
    return out(np.vectorize(_tangential, otypes=[float])(np.minimum(sizes, _LARGEST)))


def _tangential(c: float) -> float:
    """The best λ, by rounds over a grid: the maximum over ζ is convex in log λ."""
    low, high = -1.0, 2 * np.log1p(2 * c) + 1
    for _ in range(_ROUNDS):
        scales = np.linspace(low, high, _SCALES)
        found = _largest(c, scales)
        place = int(np.argmin(found))
        low, high = scales[max(place - 1, 0)], scales[min(place + 1, _SCALES - 1)]
    with np.errstate(over="ignore"):
        return float(np.exp(c) * found.min() / 2)


def _largest(c: float, log_scales: np.ndarray) -> np.ndarray:
    """max_ζ of the sum, over e^c, for each log λ; ζ = −cos of an angle."""
    near = np.sqrt(min(1.0, 8 / max(c, 1e-300))) * np.linspace(0, np.pi / 2, _PLACES)
    # Finer towards both ends, where the two maxima are for large c.
    angles = np.sort(np.concatenate([near, np.linspace(0, np.pi, _PLACES), np.pi - near]))

    def value(angle: np.ndarray) -> np.ndarray:
        low, high = -2 * c * np.sin(angle / 2) ** 2, -2 * c * np.cos(angle / 2) ** 2
        steep = (1 + 2 * c * np.sin(angle)) ** 2
        return np.exp(log_scales[:, None] + low) + np.exp(high - log_scales[:, None]) * steep

    found = value(angles)
    # The best of the grid and their neighbours, in case two maxima are nearly equal.
    tops = np.argpartition(found, -_TOPS, axis=1)[:, -_TOPS:]
    left = angles[np.maximum(tops - 1, 0)]
    right = angles[np.minimum(tops + 1, len(angles) - 1)]
    left, right = narrowed(lambda angle: -value(angle), left, right, steps=40)
    return np.maximum(found.max(1), value((left + right) / 2).max(1))
