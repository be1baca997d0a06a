"""Random measures and layers: plain generators of numpy arrays, and a strategy of hypothesis.

It draws the shape and the *kind* of a case (they are what shrinks and what a failure
prints) and a seed for the numbers. Layers are dicts with the fields of `AttentionParameters`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from meanfield.measures import ParticleMeasure

CLOUDS = ("gaussian", "ball", "sphere", "line", "duplicates", "clusters", "collapsed", "offset")
WEIGHTS = ("uniform", "dirichlet", "heavy_tailed", "light", "zeros")
POSITIONS = ("sequence", "distinct", "unsorted", "ties", "equal")
LAYERS = ("bilinear", "single_head", "multi_head", "biased", "rectangular")

LIGHT = -900.0  # log-weight: e^{−900} is below the smallest float


# ------------------------------------------------------------------ generators


def cloud(
    rng: np.random.Generator, n: int, d: int, kind: str = "gaussian", radius: float = 1.0
) -> np.ndarray:
    """n points of R^d at the scale of `radius`."""
    x = rng.normal(size=(n, d))
    lengths = np.linalg.norm(x, axis=1, keepdims=True)
    if kind == "ball":
        x = x / lengths * rng.uniform(size=(n, 1)) ** (1 / d)
    elif kind == "sphere":
        x = x / lengths
    elif kind == "line":
        x = rng.normal(size=(n, 1)) * x[:1] / lengths[:1]
    elif kind == "duplicates":
        x = x[rng.integers(max(1, n // 2), size=n)]
    elif kind == "clusters":
        x = x[rng.integers(max(1, n // 2), size=n)] + 1e-7 * rng.normal(size=(n, d))
    elif kind == "collapsed":
        x = np.repeat(x[:1], n, axis=0)
    elif kind == "offset":
        x = x + 30 * rng.normal(size=d)
    return radius * x


def log_weights(rng: np.random.Generator, n: int, kind: str = "uniform") -> np.ndarray:
    """n normalised log-weights; at least one atom has mass of order 1/n."""
    logs = np.zeros(n)
    if kind == "dirichlet":
        logs = np.log(rng.dirichlet(np.ones(n)))
    elif kind == "heavy_tailed":
        logs = 5 * rng.standard_t(2, size=n)
    elif kind in ("light", "zeros"):
        logs = rng.normal(size=n)
        chosen = rng.choice(n, size=rng.integers(1, n), replace=False) if n > 1 else []
        logs[chosen] = -math.inf if kind == "zeros" else LIGHT
    return logs - np.logaddexp.reduce(logs)


def positions(rng: np.random.Generator, n: int, kind: str = "sequence") -> np.ndarray:
    """n positions in [0, 1], in storage order only for "sequence" and "distinct"."""
    if kind == "distinct":
        return np.sort(rng.uniform(size=n))
    if kind == "unsorted":
        return rng.permutation(n) / max(1, n - 1)
    if kind == "ties":
        return rng.integers(1 + n // 2, size=n) / max(1, n // 2)
    if kind == "equal":
        return np.full(n, rng.uniform())
    return np.arange(1, n + 1) / n


def layer(
    rng: np.random.Generator, d: int, kind: str = "single_head", size: float = 1.0
) -> dict[str, Any]:
    """A layer of R^d into itself; ‖A‖ and ‖V‖ are of order `size`.

    "bilinear" is (A, I, V) with scale 1; "multi_head" and "biased" have several heads, the
    latter with all three biases and its own scale; "rectangular" has k, v ≠ d.
    """
    if kind == "bilinear":
        A, V = size * rng.normal(size=(2, 1, d, d)) / math.sqrt(d)
        return {"query": A, "key": np.eye(d)[None], "value": V, "scale": 1.0}
    heads = 1 if kind == "single_head" else int(rng.integers(2, 4))
    k, v = (int(rng.integers(1, d + 3)) for _ in range(2)) if kind != "single_head" else (d, d)
    root = math.sqrt(size / math.sqrt(d))
    fields: dict[str, Any] = {
        "query": root * rng.normal(size=(heads, k, d)),
        "key": root * rng.normal(size=(heads, k, d)),
        "value": root * rng.normal(size=(heads, v, d)),
        "output": root * rng.normal(size=(heads, d, v)),
    }
    if kind == "single_head":
        del fields["output"]
    if kind == "biased":
        fields["query_bias"] = rng.normal(size=(heads, k))
        fields["value_bias"] = rng.normal(size=(heads, v))
        fields["output_bias"] = rng.normal(size=d)
        fields["scale"] = float(rng.uniform(0.2, 1.0))
    return fields


class Problem(NamedTuple):
    """A measure and a layer, as the oracles take them."""

    points: np.ndarray
    log_weights: np.ndarray
    positions: np.ndarray | None
    layer: dict[str, Any]
    causal: bool

    @property
    def mask(self) -> dict[str, Any]:
        """The keyword arguments of the oracles."""
        return {"positions": self.positions, "causal": self.causal}

    @property
    def alive(self) -> np.ndarray:
        """Which atoms have mass."""
        return self.log_weights > -math.inf

    @property
    def measure(self) -> ParticleMeasure:
        """The measure as the library takes it."""
        return ParticleMeasure(self.points, log_weights=self.log_weights, positions=self.positions)


def light_atom_problem(seed: int, n: int, d: int, n_light: int = 1) -> Problem:
    """Atoms so far apart that weights near e^{−900} decide the local constant.

    The heavy atoms sit around −Ru, the light ones around Ru with Au = −u, R² = 450: the growth
    e^{R²} ≈ 1e195 is within float64, its square is not.
    """
    rng = np.random.default_rng(seed)
    u = rng.normal(size=d)
    u /= np.linalg.norm(u)
    across = np.eye(d) - np.outer(u, u)
    A = -np.outer(u, u) + 0.01 * rng.normal(size=(d, d)) @ across
    V = np.eye(d) + 0.3 * rng.normal(size=(d, d))
    side = np.where(np.arange(n) < n_light, 1.0, -1.0)[:, None]
    points = math.sqrt(450) * side * u + 0.01 * rng.normal(size=(n, d))
    logs = np.where(np.arange(n) < n_light, LIGHT, 0.0) + rng.uniform(-1, 1, size=n)
    fields = {"query": A[None], "key": np.eye(d)[None], "value": V[None], "scale": 1.0}
    return Problem(points, logs - np.logaddexp.reduce(logs), None, fields, causal=False)


# ------------------------------------------------------------------ the strategy


@st.composite
def problems(
    draw: st.DrawFn,
    *,
    cloud_kinds: Sequence[str] = CLOUDS,
    weight_kinds: Sequence[str] = WEIGHTS,
    causal: bool | None = None,
) -> Problem:
    """A measure with a layer; masked or not unless `causal` says. Every atom sees some mass."""
    n, d = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    radius, size = draw(st.sampled_from((0.01, 0.5, 1.0, 3.0))), draw(st.sampled_from((0.1, 1, 3)))
    kinds = (cloud_kinds, weight_kinds, LAYERS, POSITIONS)
    of_cloud, of_weights, of_layer, of_positions = (draw(st.sampled_from(kind)) for kind in kinds)
    masked = draw(st.booleans()) if causal is None else causal
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    points, logs = cloud(rng, n, d, of_cloud, radius), log_weights(rng, n, of_weights)
    fields = layer(rng, d, of_layer, size)
    if not masked:
        return Problem(points, logs, None, fields, causal=False)
    where = positions(rng, n, of_positions)
    # Some atom that has mass goes first: an atom that sees no mass has no image.
    first, heaviest = int(np.argmin(where)), int(np.argmax(logs))
    where[[first, heaviest]] = where[[heaviest, first]]
    return Problem(points, logs, where, fields, causal=True)
