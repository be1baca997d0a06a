"""The exponential rate of a given matrix A, which its norm alone overstates."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from meanfield.bounds.arguments import exponent, narrowed, norms, out, square
from meanfield.bounds.sharp import assembled, mean_field


def exponential_rate(A: Any, radius: Any = 1.0) -> Any:
    """E = R² max_{|x| ≤ 1} (|Ax| − ⟨Ax, x⟩): the W₂ constant on B_R grows as e^{E/2}.

    That is up to powers of ‖A‖R². A = −γI has E = 2γR², a skew A ‖A‖R², and a positive
    semi-definite one ‖A‖R²/4: there γ/8 in [CAP24] Proposition 3.4 is exact. Computed from above,
    as min_s 1/(2s) + λ_max(sAᵀA/2 − A)₊ with the symmetric part of A: exact if d ≥ 3 (or d = 1),
    by the convexity of joint numerical ranges, and a bound in the plane. For layers without
    query biases: with one Ax is not what queries are.

    Args:
        A: square matrix (d, d).
        radius: R.

    Source: this package. Proved.

    Example:
        >>> exponential_rate([[2.0, 0.0], [0.0, 1.0]])
        0.5
    """
    matrix, r = square(A), norms(radius, "radius")
    size = float(np.linalg.norm(matrix, 2))
    with np.errstate(over="ignore"):
        return out(size * _unit_rate(matrix / size) * r * r if size > 0 else 0.0 * r)


def _unit_rate(A: np.ndarray) -> float:
    """For ‖A‖ = 1: a convex function of s, minimised by golden section."""
    square, symmetric = A.T @ A / 2, (A + A.T) / 2

    def bound(log_s: Any) -> float:
        s = math.exp(log_s)
        return 0.5 / s + max(0.0, float(np.linalg.eigvalsh(s * square - symmetric)[-1]))

    # At the minimum 1/(2s) and s/2 − 1 are at most bound(s = 1) ≤ 2.
    low, high = narrowed(bound, math.log(0.25), math.log(6.0), steps=50)
    return bound((low + high) / 2)


def mean_field_by_rate(A: Any, norm_V: Any, radius: Any) -> Any:
    """‖V‖(√(e(1+c²)) (1+4c)^{d/2} e^{E/2} + c), c = ‖A‖R², or `mean_field` where it is smaller.

    Without query biases: it takes none.

    Args:
        A: square matrix (d, d).
        norm_V: spectral norm ‖V‖.
        radius: R.

    Source: this package. Proved.

    Example:
        >>> mean_field_by_rate([[1.0]], 1.0, 6.0) < 1e6  # mean_field: 1e17
        True
    """
    matrix, v = square(A), norms(norm_V, "norm_V")
    rate = exponential_rate(matrix, radius)
    norm_A = np.linalg.norm(matrix, 2)
    c, turned = exponent(norm_A, radius)
    log_cells = 0.5 * (1 + rate + len(matrix) * np.log1p(4 * c)) + np.log(np.hypot(1, c))
    return out(np.minimum(assembled(v, log_cells, turned), mean_field(norm_A, v, radius)))
