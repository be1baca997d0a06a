"""Pairs of measures whose distances are proven: the test set of `known_problem`.

Points are rounded to multiples of 2⁻²⁰, so that a name means the same numbers on every machine.
Recipes use NumPy alone: whoever copies this file beside its table needs nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

Weighted = tuple[np.ndarray, np.ndarray]  # points (n, d), weights (n,)
_TABLE = Path(__file__).with_suffix(".json")
_GRID = 2.0**20
_PRICE, _CONDITIONS = 8.0, 10  # the root of what a change of condition costs; how many there are


@dataclass(frozen=True, eq=False)
class KnownProblem:
    """Two measures, and the interval that holds W_p of them.

    Attributes:
        name: recipe, atoms of μ and dimension: ``"gaussian-1000-2"``.
        x: points of μ, shape (n, d).
        y: points of ν, shape (m, d).
        a: weights of μ, shape (n,).
        b: weights of ν, shape (m,).
        order: p.
        lower: W_p is at least this.
        upper: and at most this.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    a: np.ndarray
    b: np.ndarray
    order: float
    lower: float
    upper: float


def known_names() -> list[str]:
    """The names of all problems of the test set."""
    return list(_known())


def known_problem(name: str) -> KnownProblem:
    """A problem of the test set, whose W_p is known to at most 1e-9 of itself.

    Args:
        name: one of those in ``known.json`` beside this file.

    Raises:
        ValueError: there is none of that name.

    Example:
        >>> problem = known_problem("gaussian-60-2")
        >>> problem.x.shape, problem.upper - problem.lower < 1e-9
        ((60, 2), True)
    """
    if not isinstance(name, str) or name not in _known():
        kinds = ", ".join(RECIPES)
        raise ValueError(
            f"name: expected that of a problem of the test set, as gaussian-1000-2, got {name!r}; "
            f"recipes are {kinds}, and {_TABLE} lists all"
        )
    lower, upper = _known()[name]
    return KnownProblem(name, *made(name), lower, upper)


def made(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]:
    """x, y, a, b and p by the recipe of a name, whether it is in the table or not."""
    kind, n, d = name.rsplit("-", 2)
    rng = np.random.default_rng([int(n), int(d), *kind.encode()])
    (x, a), (y, b) = RECIPES[kind](rng, int(n), int(d))
    x, y = (np.round(points * _GRID) / _GRID for points in (x, y))
    return x, y, a, b, 1 if kind.endswith("order_1") else 2


@cache
def _known() -> dict[str, tuple[float, float]]:
    return {name: (low, high) for name, low, high in json.loads(_TABLE.read_text())["problems"]}


def _flat(points: np.ndarray) -> Weighted:
    return points, np.full(len(points), 1 / len(points))


def _gaussian(rng: np.random.Generator, n: int, d: int) -> tuple[Weighted, Weighted]:
    """N(0, 1) against N(0.5, 1.3²)."""
    return _flat(rng.normal(size=(n, d))), _flat(1.3 * rng.normal(size=(n, d)) + 0.5)


def _dirichlet(rng: np.random.Generator, n: int, d: int) -> tuple[Weighted, Weighted]:
    """The same with weights that are uniform on the simplex, and half as many atoms of ν."""
    (x, _), (y, _) = _gaussian(rng, n, d)
    return (x, rng.dirichlet(np.ones(n))), (y[::2], rng.dirichlet(np.ones(len(y[::2]))))


def _clusters(rng: np.random.Generator, n: int, d: int) -> tuple[Weighted, Weighted]:
    """Eight clusters, of other sizes in μ than in ν."""
    centres, at = 6 * rng.normal(size=(8, d)), rng.integers(8, size=(2, n))
    at[1, : n // 3] = 0
    return tuple(_flat(centres[t] + 0.3 * rng.normal(size=(n, d))) for t in at)  # type: ignore[return-value]


def _heavy_tails(rng: np.random.Generator, n: int, d: int) -> tuple[Weighted, Weighted]:
    """Student's t with two degrees of freedom in every coordinate: no variance."""
    return tuple(_flat(rng.standard_t(2, size=(n, d)) + t) for t in (0, 0.5))  # type: ignore[return-value]


def _light_atoms(rng: np.random.Generator, n: int, d: int) -> tuple[Weighted, Weighted]:
    """Weights from 1 down to e⁻³⁰ of the heaviest."""
    weights = np.exp(-30 * rng.random((2, n)))
    a, b = weights / weights.sum(1, keepdims=True)
    (x, _), (y, _) = _gaussian(rng, n, d)
    return (x, a), (y, b)


def _grid(rng: np.random.Generator, n: int, d: int) -> tuple[Weighted, Weighted]:
    """Whole numbers, with many ties, and atoms that coincide."""
    side = int(2 * n ** (1 / d)) + 2
    return _flat(rng.integers(side, size=(n, d)) * 1.0), _flat(
        rng.integers(side, size=(n, d)) * 1.0
    )


def _spectrum(rng: np.random.Generator, n: int, d: int) -> tuple[Weighted, Weighted]:
    """Vectors of length 1 whose variances fall as 1/k, as those of embeddings of text do."""
    scale = 1 / np.sqrt(np.arange(1, d + 1))
    clouds = (scale * (rng.normal(size=(n, d)) + 0.5 * rng.normal(size=d)) for _ in range(2))
    x, y = (t / np.linalg.norm(t, axis=1, keepdims=True) for t in clouds)
    return _flat(x), _flat(y)


def _attention(rng: np.random.Generator, n: int, d: int) -> tuple[Weighted, Weighted]:
    """A cloud, and x + ½ Σⱼ softmax(⟨x, kⱼ⟩)ⱼ vⱼ with 64 keys and values, in another order."""
    x, k, v = rng.normal(size=(n, d)), *rng.normal(size=(2, 64, d))
    order = rng.permutation(n)
    scores = x @ k.T
    shares = np.exp(scores - scores.max(1, keepdims=True))
    y = x + 0.5 * (shares / shares.sum(1, keepdims=True)) @ v
    return _flat(x), _flat(y[order])


def _moved(rng: np.random.Generator, n: int, d: int) -> tuple[Weighted, Weighted]:
    """A cloud with weights, and its atoms moved by a hundredth of their distance."""
    x, a = rng.normal(size=(n, d)), rng.dirichlet(np.ones(n))
    step = 0.01 * n ** (-1 / d)
    return (x, a), (x + step * rng.normal(size=(n, d)), a)


def _conditional(rng: np.random.Generator, n: int, d: int) -> tuple[Weighted, Weighted]:
    """Points (x, 8 s) of ten conditions s: W₂ where a change of condition costs 64 |s − t|²."""
    (x, _), (y, _) = _gaussian(rng, n, d - 1)
    s = _PRICE * rng.integers(_CONDITIONS, size=(2, n, 1)) / _CONDITIONS
    return _flat(np.concatenate([x, s[0]], 1)), _flat(np.concatenate([y, s[1]], 1))


RECIPES: dict[str, Callable[[np.random.Generator, int, int], tuple[Weighted, Weighted]]] = {
    "gaussian": _gaussian,
    "dirichlet": _dirichlet,
    "clusters": _clusters,
    "heavy_tails": _heavy_tails,
    "light_atoms": _light_atoms,
    "grid": _grid,
    "spectrum": _spectrum,
    "attention": _attention,
    "moved": _moved,
    "conditional": _conditional,
    "gaussian_order_1": _gaussian,
    "dirichlet_order_1": _dirichlet,
}
