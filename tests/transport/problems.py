"""Pairs of measures of every kind that has been hard for a solver: the table PROBLEMS.

A kind draws points and log-weights of two measures of a few atoms, so that an integer program
knows their distance.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
import torch

from meanfield.measures import ParticleMeasure
from tests.transport.transport_oracles import exact_transport

Rng = np.random.Generator
Drawn = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # x, y, log a, log b


class Problem:
    """Two measures, and their exact distances in integers.

    Attributes:
        mu: μ, its logarithms of weights as a measure stores them.
        nu: ν.
        name: the kind, and the seed.
    """

    def __init__(self, x: Any, y: Any, log_a: Any, log_b: Any, name: str = "") -> None:
        self.name = name
        with np.errstate(divide="ignore"):
            self.mu, self.nu = measure(x, log_a), measure(y, log_b)
        self._known: dict[tuple[int, bool], Fraction] = {}

    @cached_property
    def arrays(self) -> Drawn:
        """Points and log-weights as they are stored, in double precision."""
        tensors = self.mu.points, self.nu.points, self.mu.log_weights, self.nu.log_weights
        return tuple(t.double().numpy() for t in tensors)  # type: ignore[return-value]

    @property
    def is_single(self) -> bool:
        return self.mu.dtype == torch.float32

    @property
    def is_paired(self) -> bool:
        return np.array_equal(*self.arrays[2:])

    def truth(self, order: int, *, meant: bool = False) -> Fraction:
        """W_p^p; `meant`: of weights that agree to their last places taken as equal."""
        key = order, meant and self._is_rounded
        if key not in self._known:
            x, y, a, b = self.arrays
            if key[1]:
                b = b.copy()
                b[np.argsort(b, kind="stable")] = np.sort(a)
            rows, cols = a > -math.inf, b > -math.inf
            self._known[key] = exact_transport(x[rows], y[cols], a[rows], b[cols], order)
        return self._known[key]

    @property
    def _is_rounded(self) -> bool:
        _, _, a, b = self.arrays
        if len(a) != len(b) or min(a.min(), b.min()) == -math.inf:
            return False
        return bool((np.abs(np.sort(a) - np.sort(b)) <= 8e-16 * np.maximum(-np.sort(a), 1)).all())


def measure(points: Any, logs: Any) -> ParticleMeasure:
    """A measure of points and log-weights; of an atom without mass any point, also NaN."""
    points, logs = torch.as_tensor(points), torch.as_tensor(logs)
    found = ParticleMeasure(points.nan_to_num(0.0), log_weights=logs)
    return found.replace(points) if points.isnan().any() else found


# ------------------------------------------------------------------ how the atoms are weighted


def normal(logs: np.ndarray) -> np.ndarray:
    return logs - np.logaddexp.reduce(logs)


def flat(rng: Rng, n: int) -> np.ndarray:
    return np.full(n, -math.log(n))


def dirichlet(rng: Rng, n: int) -> np.ndarray:
    return np.log(rng.dirichlet(np.ones(n)))


def underflowing(rng: Rng, n: int) -> np.ndarray:
    return normal(rng.uniform(-900, 0, n) * (rng.random(n) < 0.5) + dirichlet(rng, n))


def heavy_tailed(rng: Rng, n: int) -> np.ndarray:
    return normal(10 * rng.standard_t(2, size=n))


def sizes(rng: Rng) -> tuple[int, int, int]:
    """n, m, d."""
    n, m = rng.integers(2, 7, size=2)
    return int(n), int(n if rng.random() < 0.3 else m), int(rng.integers(2, 4))


def gaussian(
    rng: Rng, weigh: Callable = dirichlet, size: float = 1.0, shift: float = 0.0
) -> Drawn:
    n, m, d = sizes(rng)
    x, y = rng.normal(size=(n, d)), rng.normal(size=(m, d)) + 0.3
    return size * x + shift, size * y + shift, weigh(rng, n), weigh(rng, m)


def image(
    rng: Rng, move: Callable[[np.ndarray], np.ndarray], weigh: Callable = dirichlet
) -> Drawn:
    """A cloud and its image, numbered otherwise, with the same weights."""
    n, _, d = sizes(rng)
    x, a, order = rng.normal(size=(n, d)), weigh(rng, n), rng.permutation(n)
    return x, move(x)[order], a, a[order]


def clustered(rng: Rng, small: float, weigh: Callable, *, balanced: bool) -> Drawn:
    """Clusters of size `small` and far apart; balanced: as many atoms of each in both clouds."""
    n, m, d = sizes(rng)
    centres = 8.0 * np.array([np.zeros(d), np.eye(d)[0], np.eye(d)[1]])[: rng.integers(2, 4)]
    if balanced:
        n = m = 6
        at_x = at_y = np.arange(6) % len(centres)
    else:
        at_x, at_y = (rng.integers(len(centres), size=k) for k in (n, m))
    x, y = (centres[at] + small * rng.normal(size=(len(at), d)) for at in (at_x, at_y))
    return x, y, weigh(rng, n), weigh(rng, m)


def two_places(rng: Rng) -> Drawn:
    points = rng.normal(size=(2, 2))
    n, m, _ = sizes(rng)
    x, y = (points[rng.integers(2, size=k)] for k in (n, m))
    return x, y, dirichlet(rng, n), dirichlet(rng, m)


def grid(rng: Rng) -> Drawn:
    n, m, d = sizes(rng)
    weigh = flat if rng.random() < 0.5 else dirichlet
    x, y = (rng.integers(-2, 3, size=(k, d)).astype(float) for k in (n, m))
    return x, y, weigh(rng, n), weigh(rng, m)


def collinear(rng: Rng) -> Drawn:
    x, y, a, b = gaussian(rng)
    along = rng.normal(size=x.shape[1])
    return x[:, :1] * along, y[:, :1] * along, a, b


def line(rng: Rng, weigh: Callable = dirichlet) -> Drawn:
    x, y, a, b = gaussian(rng, weigh)
    return x[:, :1], y[:, :1], a, b


def one_atom(rng: Rng) -> Drawn:
    x, y, a, b = gaussian(rng, underflowing)
    return (x[:1], y, a[:1] * 0, b) if rng.random() < 0.5 else (x, y[:1], a, b[:1] * 0)


def two_atoms(rng: Rng) -> Drawn:
    d = int(rng.integers(1, 4))
    light = rng.uniform(-700, 0, size=2) if rng.random() < 0.5 else rng.uniform(-3, 0, size=2)
    if rng.random() < 0.5:
        light[1] = light[0] - 10 ** rng.uniform(-9, -1)
    logs = (normal(np.array([0.0, t])) for t in light)
    return *rng.normal(size=(2, 2, d)), *logs


def light_mover(rng: Rng) -> Drawn:
    """Only a light atom moves, so that it is all of the distance."""
    logs = normal(np.array([rng.uniform(-700, -1), math.log(0.3), math.log(0.7)]))
    x = np.array([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0]])
    y = x.copy()
    y[0] += rng.uniform(0.001, 0.4, size=2)
    order = rng.permutation(3)
    return x, y[order], logs, logs[order]


def far_atoms(rng: Rng) -> Drawn:
    x, y, a, b = gaussian(rng)
    x[0], y[-1] = 1e8, 1e8 + 10.0 ** rng.uniform(-6, 0)
    return x, y, a, b


def nested(rng: Rng) -> Drawn:
    x, y, a, b = gaussian(rng)
    return *(10.0 ** rng.uniform(-9, 1, (len(t), 1)) * t for t in (x, y)), a, b


def shared(rng: Rng) -> Drawn:
    x, y, a, b = gaussian(rng, flat if rng.random() < 0.5 else dirichlet)
    k = min(len(x), len(y)) - 1
    y[:k] = x[:k]
    return x, y, a, b


def last_places(rng: Rng) -> Drawn:
    """The same weights, up to the rounding of their logarithms."""
    x, y, a, b = image(rng, lambda x: x + 1e-3 * rng.normal(size=x.shape))
    return x, y, a, np.nextafter(b, rng.choice([-np.inf, np.inf], size=len(b)))


def absent(rng: Rng) -> Drawn:
    """Some atoms without mass, of which one is nowhere."""
    x, y, a, b = gaussian(rng)
    x, a = np.vstack([x, x[:1] + 1]), np.append(a, -math.inf)
    y, b = np.vstack([y, y[:1] * math.nan, x[:1]]), np.append(b, [-math.inf, -math.inf])
    return x, y, a, b


def crossing(rng: Rng) -> Drawn:
    """Clusters that exchange a little mass, whose way costs more than all the rest."""
    x, y, a, _ = clustered(rng, 1e-4, dirichlet, balanced=True)
    b = np.exp(a)
    b[:2] += 10 ** rng.uniform(-9, -7) * np.array([1, -1])
    return x, y, a, normal(np.log(b))


def light_beside_heavy(rng: Rng) -> Drawn:
    """A light atom far from a small and heavy cluster: potentials as large as it is far."""
    n = int(rng.integers(3, 7))
    light, spread = 10 ** rng.uniform(-12, -2), 10 ** rng.uniform(-8.5, -6.5)
    home = np.zeros((n, 2))
    home[1:, 0] = 1
    logs = (np.log(np.r_[light, (1 - light) * rng.dirichlet(np.ones(n - 1))]) for _ in range(2))
    return *(home + spread * rng.normal(size=(2, n, 2))), *logs


def spd(rng: Rng, d: int) -> np.ndarray:
    half = rng.normal(size=(d, d))
    return np.eye(d) + 0.3 * half @ half.T


PROBLEMS: dict[str, Callable[[Rng], Drawn]] = {
    "uniform": lambda rng: gaussian(rng, flat),
    "weighted": gaussian,
    "permuted": lambda rng: image(rng, lambda x: x),
    "translated": lambda rng: image(rng, lambda x: x + rng.normal(size=x.shape[1])),
    "an affine image": lambda rng: image(rng, lambda x: x @ spd(rng, x.shape[1]) + 0.3),
    "moved a little": lambda rng: image(
        rng, lambda x: x + 10 ** rng.uniform(-10, -2) * rng.normal(size=x.shape),
        flat if rng.random() < 0.5 else dirichlet),
    "moved a little, in order": lambda rng: (
        lambda x, a, size: (x, x + size * rng.normal(size=x.shape), a, a))(
            rng.normal(size=(6, 2)), dirichlet(rng, 6), 10 ** rng.uniform(-10, -1)),
    "duplicates": two_places,
    "a grid with ties": grid,
    "shared atoms": shared,
    "collinear": collinear,
    "the line": line,
    "the line, uniform": lambda rng: line(rng, flat),
    "one atom": one_atom,
    "two atoms": two_atoms,
    "clusters": lambda rng: clustered(rng, 10 ** rng.uniform(-10, -3), dirichlet, balanced=False),
    "collapsed clusters": lambda rng: clustered(
        rng, 10 ** rng.uniform(-10, -3), flat, balanced=True),
    "crossing": crossing,
    "a light atom beside a cluster": light_beside_heavy,
    "light atoms": lambda rng: gaussian(rng, underflowing),
    "a light atom alone moves": light_mover,
    "heavy tails": lambda rng: gaussian(rng, heavy_tailed),
    "far atoms": far_atoms,
    "far from the origin": lambda rng: gaussian(rng, shift=10.0 ** rng.uniform(3, 12)),
    "nested scales": nested,
    "a huge unit": lambda rng: gaussian(rng, size=10 ** rng.uniform(20, 150)),
    "a tiny unit": lambda rng: gaussian(rng, size=10 ** rng.uniform(-150, -20)),
    "high dimension": lambda rng: (
        *rng.normal(size=(2, 4, 40)), dirichlet(rng, 4), dirichlet(rng, 4)),
    "weights of other last places": last_places,
    "atoms without mass": absent,
    "single precision": lambda rng: tuple(t.astype(np.float32) for t in gaussian(rng)),
}  # fmt: skip


@functools.cache
def problem(kind: str, seed: int = 0) -> Problem:
    """One of a kind."""
    rng = np.random.default_rng([seed, *kind.encode()])
    return Problem(*PROBLEMS[kind](rng), f"{kind}, {seed}")
