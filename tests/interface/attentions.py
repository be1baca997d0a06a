"""Attention of every kind at measures of every kind, with its derivatives by double loops.

`test_doors` hands them to every public function that takes a map. The oracle is
`tests.attention.kernel_oracles`, in 50 digits where a weight underflows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from meanfield import ParticleMeasure
from tests import oracles
from tests.attention import kernel_oracles as slow
from tests.attention.test_kernels import library, looks_at_positions
from tests.strategies import LIGHT

DOT, L2 = ("dot",), ("l2",)
NORMALIZATIONS = (
    *[("softmax",)] * 3,
    *(("sink", [0.4, -1.0]), ("sigmoid", -0.5), ("sinkhorn", 200), ("custom",)),
)
WEIGHTS = ("uniform", "dirichlet", "zeros", "light")
BIASES = ("query_bias", "key_bias", "value_bias", "output_bias")


# ------------------------------------------------------------------ problems


def _kernel(name: str, k: int, heads: int, rng: np.random.Generator) -> slow.Spec:
    inner = L2 if name in ("soft_cap", "alibi", "window") and rng.random() < 0.3 else DOT
    return {
        "dot": DOT,
        "l2": L2,
        "rotary": ("rotary", {"base": 100.0, "length": 7.0}, DOT),
        "soft_cap": ("soft_cap", 1.5, inner),
        "qk_norm": ("qk_norm", [1.3, 0.7] * (k // 2), [-0.4, 2.0] * (k // 2), 1e-3, DOT),
        "cosine": ("cosine", 2.5, 0.1, DOT),
        "alibi": ("alibi", [0.5, 0.25][:heads], 7.0, inner),
        "window": ("window", 0.45, inner),
    }[name]


KERNELS = ("dot", "dot", "l2", "rotary", "soft_cap", "qk_norm", "cosine", "alibi", "window")


def _layer(d: int, heads: int, groups: int, k: int, rng: np.random.Generator) -> dict[str, Any]:
    v = int(rng.integers(1, 4))
    shapes = {
        "query_bias": (heads, k),
        "key_bias": (groups, k),
        "value_bias": (groups, v),
        "output_bias": (d,),
    }
    return {
        "query": 0.8 * rng.normal(size=(heads, k, d)),
        "key": 0.8 * rng.normal(size=(groups, k, d)),
        "value": rng.normal(size=(groups, v, d)),
        "output": rng.normal(size=(heads, d, v)),
        **{name: rng.normal(size=shapes[name]) for name in BIASES if rng.random() < 0.4},
    }


def _tied(layer: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """L2 attention as its global bounds want it: keys are queries, values depend on them."""
    query = layer["query"]
    mixed = rng.normal(size=(len(query), layer["output"].shape[2], query.shape[1])) @ query
    return {"query": query, "key": query, "value": mixed, "output": layer["output"]}


def draw(seed: int, kinds: tuple[str, ...] = KERNELS) -> Problem:
    """Attention of some kind at a measure of some kind."""
    rng = np.random.default_rng(seed)
    n, d, heads = int(rng.integers(2, 5)), int(rng.integers(1, 4)), int(rng.integers(1, 3))
    groups, k = int(rng.integers(1, heads + 1)), 2 * int(rng.integers(1, 3))
    name, own = str(rng.choice(kinds)), NORMALIZATIONS[rng.integers(len(NORMALIZATIONS))]
    kernel, layer = _kernel(name, k, heads, rng), _layer(d, heads, groups, k, rng)
    if own[0] == "sink":
        own = ("sink", own[1][:heads])
    if name == "l2" and rng.random() < 0.7:
        layer = _tied(layer, rng)
    weights = str(rng.choice(WEIGHTS))
    # Plain iteration, the oracle of Sinkhorn's plans, is slow where scores are far apart.
    if own[0] == "sinkhorn":
        layer["scale"], weights = 0.1, "dirichlet"
    logs = np.zeros(n) if weights == "uniform" else np.log(rng.dirichlet(np.ones(n)))
    if weights in ("zeros", "light"):
        logs[rng.integers(1, n)] = -math.inf if weights == "zeros" else LIGHT
    causal = bool(rng.random() < 0.5) and own[0] != "sinkhorn"
    positions = (1.0 + np.arange(n)) / n
    if rng.random() < 0.3:  # a tie
        positions[-1] = positions[0]
    placed = causal or looks_at_positions(kernel)
    case = slow.Case(
        0.8 * rng.normal(size=(n, d)) + 0.2,
        logs - np.logaddexp.reduce(logs),
        positions if placed else None,
        layer,
        kernel,
        own,
        causal,
    )
    return Problem(case, rng)


def splitting() -> Problem:
    """A = −1 and V = 1 where splitting an atom is worse than moving atoms: 0.886 and 0.273."""
    one = np.ones((1, 1, 1))
    layer = {"query": -one, "key": one, "value": one, "output": one, "scale": 1.0}
    points, logs = np.array([[4.0], [1e-9]]), np.log([1 / 17, 16 / 17])
    case = slow.Case(points, logs, None, layer, DOT, ("softmax",), causal=False)
    return Problem(case, np.random.default_rng(0))


def _float(array: np.ndarray) -> np.ndarray:
    return np.array(array, dtype=float)


@dataclass
class Truth:
    """The map and its derivatives at one measure, by loops; absent atoms are 0."""

    case: slow.Case

    @cached_property
    def _exact(self) -> slow.Case:
        """In 50 digits where a weight underflows."""
        case = self.case
        if not (np.isfinite(case.log_weights) & (case.log_weights < -600)).any():
            return case
        whole = oracles.exact_layer(case.layer)
        return case._replace(
            points=oracles.exact(case.points),
            log_weights=oracles.exact(case.log_weights),
            layer=whole,
        )

    @property
    def alive(self) -> np.ndarray:
        return self.case.log_weights > -math.inf

    @property
    def images(self) -> np.ndarray:
        return _float(slow.attention_map(self.case)) * self.alive[:, None]

    @cached_property
    def whole(self) -> np.ndarray:
        """(n d, n d), as exact as the weights want it."""
        return slow.absent_out(slow.jacobian(self._exact), self.case.log_weights)

    @cached_property
    def fields(self) -> np.ndarray:
        return _float(slow.field_jacobians(self._exact)) * self.alive[:, None, None]

    def conjugated(self, shift: float = 0.0, factor: float = 1.0) -> np.ndarray:
        """Shift + factor · D^½JD^−½."""
        there = np.repeat(self.alive, self.case.points.shape[1])
        weighted = _float(slow.weighted(self.whole, self._exact.log_weights))
        return shift * np.diag(1.0 * there) + factor * weighted

    def parts(self, shift: float = 0.0, factor: float = 1.0) -> tuple[float, float]:
        """Both components of the local constant of shift · x + factor · F."""
        eye = shift * np.eye(self.fields.shape[-1]) * self.alive[:, None, None]
        fields = np.linalg.norm(eye + factor * self.fields, 2, axis=(1, 2))
        return float(np.linalg.norm(self.conjugated(shift, factor), 2)), float(fields.max())

    @property
    def constant(self) -> float:
        return max(self.parts())


@dataclass
class Problem:
    """Attention at a measure, for the library and for the oracle."""

    case: slow.Case
    rng: np.random.Generator

    def __post_init__(self) -> None:
        self.F, self.mu = library(self.case)
        self.truth = Truth(self.case)

    def at(self, measure: ParticleMeasure) -> Truth:
        """The truth at another measure."""
        where = None if measure.positions is None else measure.positions.numpy()
        logs = measure.log_weights.numpy()
        points, logs = measure.points.numpy(), np.broadcast_to(logs, measure.points.shape[:-1])
        return Truth(self.case._replace(points=points, log_weights=logs, positions=where))

    def moved(self, length: float, mu: ParticleMeasure | None = None) -> ParticleMeasure:
        """Every atom moved by `length`, somewhere."""
        mu = self.mu if mu is None else mu
        away = self.rng.normal(size=tuple(mu.points.shape))
        away *= length / np.linalg.norm(away, axis=-1, keepdims=True)
        return mu.replace(mu.points + torch.as_tensor(away))

    @property
    def kind(self) -> str:
        """What a failure prints."""
        case = self.case
        biases = [name for name in BIASES if name in case.layer]
        return (
            f"{case.kernel} {case.normalization} causal={case.causal} {biases} {case.log_weights}"
        )


# ------------------------------------------------------------------ what is right


def near(found: Any, wanted: Any, tolerance: float = 1e-6) -> None:
    """Equal, relative to the largest entry."""
    wanted = np.asarray(wanted, dtype=float)
    found = np.asarray(found, dtype=float)
    size = max(float(np.abs(wanted).max()), 1e-6)
    off = float(np.abs(found - wanted).max())
    assert off <= tolerance * size, f"{found} for {wanted}"


def above(found: Any, wanted: Any, slack: float = 1e-8) -> None:
    """No less, entry by entry."""
    wanted, found = np.asarray(wanted, dtype=float), np.asarray(found, dtype=float)
    assert (found >= wanted * (1 - slack) - 1e-12).all(), f"{found} below {wanted}"
