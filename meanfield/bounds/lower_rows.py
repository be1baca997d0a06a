"""Lower bounds of a layer on a ball: what measures reach that are known."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from meanfield.bounds.diracs import circle_response, masked_two_dirac_lower, two_dirac_lower
from meanfield.bounds.layer import Layer
from meanfield.bounds.statements import OURS, BoundRow, Question, statement
from meanfield.bounds.theorems import proposition_3_4

_TOKENS, _MASKED = "Euclidean, n tokens", "conditional d₂, masked"
_ALONG_SPHERE = "W₂, times 1/σ, behind a norm"
# Slightly below: singular vectors and eigenvectors are known to rounding only.
_BELOW = 1 - 1e-9


def lower_rows(question: Question) -> Iterator[BoundRow]:
    """What measures and tokens that are known reach."""
    layer, radius, some = question.layer, question.radius, question.n or 1
    reason = question.kernel or question.bare or _no_witness(layer)
    pairs: list[tuple[float, float]] = []
    identity = False
    if reason is None:
        A, V = layer.A[0], layer.V[0]
        identity = V.shape[0] == V.shape[1] and bool((np.eye(len(V)) == V).all())
        pairs = _critical_pairs(A, V)
        reason = None if pairs else "A has no real eigenvalue but 0"
    witness = "one token at Ru, the others at −Ru or Ru/2"

    def best(bound: Callable[[float], float]) -> float:
        return max(gain * bound(gamma) for gamma, gain in pairs)

    yield statement(
        ("Prop. 3.4", "lower", _TOKENS, f"V = I; {witness}", "[CAP24]"),
        lambda: best(lambda gamma: proposition_3_4(gamma, radius, some)),
        reason or question.counted or (None if identity else "V is not the identity"),
    )
    yield statement(
        ("Prop. 3.4, any V", "lower", _TOKENS, witness, OURS),
        lambda: best(lambda gamma: proposition_3_4(gamma, radius, some)),
        reason or question.counted,
    )
    yield statement(
        ("two Diracs", "lower", "W₂ or d₂", "two atoms, best weights", OURS),
        lambda: best(lambda gamma: two_dirac_lower(gamma, radius)),
        reason,
    )
    yield statement(
        ("two Diracs, masked", "lower", _MASKED, "interleaved at every position", OURS),
        lambda: best(lambda gamma: masked_two_dirac_lower(gamma, radius)),
        reason or question.masked,
    )
    yield statement(
        ("far token", "lower", _TOKENS, "n − 1 tokens at one place, one far across", OURS),
        lambda: _far_token(layer.A[0], layer.V[0], radius, some),
        question.kernel
        or question.bare
        or _no_witness(layer)
        or question.counted
        or question.plain
        or _too_many(layer, radius, question.n),
    )
    yield from _sphere_row(question)


def _sphere_row(question: Question) -> Iterator[BoundRow]:
    """Along the sphere behind a norm with ε = 0; its constant is times 1/σ."""
    layer = question.layer
    reason = question.kernel or question.normalised or question.plain or _no_witness(layer)
    pairs: list[tuple[float, np.ndarray]] = []
    if reason is None:
        pairs = [(-value, u) for value, u in _eigenpairs(layer.A[0]) if value < 0]
        reason = None if pairs else "A has no negative eigenvalue"

    def reached(gamma: float, u: np.ndarray) -> float:
        radius = math.sqrt(layer.parameters.dim)
        value, along = circle_response(gamma * radius**2)
        # The plane of the circle: u, and where V is largest across it.
        right = np.linalg.svd(layer.V[0])[2]
        if layer.norm is not None and layer.norm.centred:
            right = right - right.mean(-1, keepdims=True)
        across = right - np.outer(right @ u, u)
        lengths = np.linalg.norm(across, axis=1)
        across = across[lengths > 0.1] / lengths[lengths > 0.1, None]
        moved = np.linalg.norm(layer.V[0] @ (along[0] * u + along[1] * across).T, axis=0)
        return _BELOW * value * float(moved.max(initial=0.0))

    yield statement(
        ("sphere, two Diracs", "lower", _ALONG_SPHERE, "two atoms on a circle", OURS),
        lambda: max(reached(*pair) for pair in pairs),
        reason,
    )


def _far_token(A: np.ndarray, V: np.ndarray, radius: float, n: int) -> float:
    """½√(n−1) ‖V(I + ½(y−x)uᵀ)‖: n − 1 tokens at x pay half of their attention to y, u = Ax.

    x is along the first right singular vector of A, and y as far from x as ⟨u, y − x⟩ = ln(n−1)
    allows.
    """
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


def _too_many(layer: Layer, radius: float, n: int | None) -> str | None:
    """Whether one place in the ball can have as much attention as n − 1 tokens elsewhere."""
    if n is None or n < 2:
        return "there is one token alone"
    x = radius * np.linalg.svd(layer.A[0])[2][0]
    u = layer.A[0] @ x
    size = float(np.linalg.norm(u))
    reach = size * radius - float(u @ x)
    return None if size > 0 and math.log(n - 1) <= reach else "too many tokens for one to matter"


def _no_witness(layer: Layer) -> str | None:
    if len(layer.norm_A) > 1:
        return "several heads may cancel"
    if layer.shift.any():
        return "a query bias moves the witness"
    return None


def _critical_pairs(A: np.ndarray, V: np.ndarray) -> list[tuple[float, float]]:
    """γ = −λ or λ/8 and ‖Vu‖ for the real eigenpairs (λ, u) of A.

    In the witness of Proposition 3.4 the response to a displacement of the lone atom along u is
    along Vu, whatever V; so ‖Vu‖ times the number for V = I is reached.
    """
    return [
        (max(-value, value / 8), _BELOW * float(np.linalg.norm(V @ u)))
        for value, u in _eigenpairs(A)
    ]


def _eigenpairs(A: np.ndarray) -> Iterator[tuple[float, np.ndarray]]:
    """The real eigenvalues of A but 0, each with a unit vector."""
    values, vectors = np.linalg.eig(A)
    for value, u in zip(values, vectors.T, strict=True):
        if value.imag == 0 and value.real != 0:
            yield float(value.real), u.real / np.linalg.norm(u.real)
