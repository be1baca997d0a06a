"""Measures and tokens that are known to reach much: what bounds a layer from below."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from meanfield.bounds.statements import Question

# Slightly below: singular vectors and eigenvectors are known to rounding only.
_BELOW = 1 - 1e-9


def best_pair(question: Question, bound: Callable[[float], float]) -> float:
    """max ‖Vu‖ · bound(γ), γ = −λ or λ/8, over the real eigenpairs (λ, u) of A.

    In the witness of Proposition 3.4 the response to a displacement of the lone atom along u is
    along Vu, whatever V; so ‖Vu‖ times the number for V = I is reached.
    """
    V = question.layer.V[0]
    return max(
        _BELOW * float(np.linalg.norm(V @ u)) * bound(max(-value, value / 8))
        for value, u in question.eigenpairs
    )


def far_token(question: Question) -> float:
    """½√(n−1) ‖V(I + ½(y−x)uᵀ)‖: n − 1 tokens at x pay half of their attention to y, u = Ax.

    x is along the first right singular vector of A, and y as far from x as ⟨u, y − x⟩ = ln(n−1)
    allows.
    """
    A, V = question.layer.A[0], question.layer.V[0]
    radius, n = question.radius, question.tokens
    x = radius * np.linalg.svd(A)[2][0]
    u = A @ x
    unit = u / np.linalg.norm(u)
    height = unit @ x + math.log(n - 1) / np.linalg.norm(u)
    across = x - (unit @ x) * unit
    if len(x) > 1 and np.linalg.norm(across) < 1e-6 * radius:
        # x is along u: any direction across it does.
        across = np.linalg.svd(unit[None])[2][-1]
    length = np.linalg.norm(across)
    width = math.sqrt(max(radius**2 - height**2, 0.0))
    y = height * unit - (width / length * across if length > 1e-6 * radius else 0.0)
    block = V @ (np.eye(len(x)) + np.outer(y - x, u) / 2)
    return _BELOW * math.sqrt(n - 1) / 2 * float(np.linalg.norm(block, 2))


def is_far_enough(question: Question) -> bool:
    """Whether one place in the ball can have as much attention as n − 1 tokens elsewhere."""
    A, radius = question.layer.A[0], question.radius
    x = radius * np.linalg.svd(A)[2][0]
    u = A @ x
    size = float(np.linalg.norm(u))
    return size > 0 and math.log(question.tokens - 1) <= size * radius - float(u @ x)
