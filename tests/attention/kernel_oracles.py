"""Attention with any kernel and normalisation, pair by pair, from the formulas alone.

Nothing here knows the library. As in `oracles`, arrays hold floats, complex numbers (complex
steps) or `mpmath` numbers, and weight 0 is absence. A kernel is a nested tuple, outermost first:

    ("dot",)                                scale ⟨q, k⟩
    ("l2",)                                 −scale |q − k|²
    ("cosine", T, eps, inner)               T ⟨q, k⟩ with q/√(|q|² + eps), k likewise
    ("qk_norm", gains_q, gains_k, eps, inner)   scale ⟨q, k⟩ with g ∘ q/√(|q|²/k + eps)
    ("rotary", {...}, inner)                q turned by its position, k by its own
    ("soft_cap", tau, inner)                τ tanh(s/τ)
    ("alibi", slopes, length, inner)        s − slope_h · length · |s − t|
    ("window", width, inner)                −∞ from that distance on

A normalisation is ("softmax",), ("sink", logits), ("sigmoid", shift), ("sinkhorn", sweeps), or
("psi", ψ, divides, logits): aⱼψ(sᵢⱼ), over their sum and e^{logit of the head} if it divides;
("custom",) is that of ψ = log(1 + e^s) with logits of 0. Layers are those of `oracles`, with
key_bias beside, and keys and values of G groups of heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from tests.oracles import evaluated, exp, jacobian_by_complex_step, log

Scalar = Any
Spec = tuple[Any, ...]


class Case(NamedTuple):
    """A measure, a layer, a kernel and a normalisation."""

    points: np.ndarray
    log_weights: np.ndarray
    positions: np.ndarray | None
    layer: Mapping[str, Any]
    kernel: Spec
    normalization: Spec
    causal: bool


# ------------------------------------------------------------------ one pair


def _base(layer: Mapping[str, Any], h: int, x: np.ndarray, y: np.ndarray) -> tuple[Any, Any, Any]:
    query, key = np.asarray(layer["query"]), np.asarray(layer["key"])
    group = h * len(key) // len(query)
    q, k = query[h] @ x, key[group] @ y
    if layer.get("query_bias") is not None:
        q = q + np.asarray(layer["query_bias"])[h]
    if layer.get("key_bias") is not None:
        k = k + np.asarray(layer["key_bias"])[group]
    scale = layer.get("scale")
    scale = 1 / math.sqrt(query.shape[1]) if scale is None else scale
    return np.broadcast_to(np.asarray(scale), (len(query),))[h], q, k


def _turned(vector: np.ndarray, position: Scalar, how: Mapping[str, Any]) -> np.ndarray:
    """The vector with each pair of its coordinates turned, one by one."""
    dim = how.get("dim") or len(vector)
    pairs = dim // 2
    out = list(vector)
    for m in range(pairs):
        given = how.get("frequencies")
        frequency = how.get("base", 10_000.0) ** (-2 * m / dim) if given is None else given[m]
        angle = float(how.get("length", 1.0) * position) * frequency
        i, j = (2 * m, 2 * m + 1) if how.get("interleaved") else (m, m + pairs)
        out[i] = math.cos(angle) * vector[i] - math.sin(angle) * vector[j]
        out[j] = math.sin(angle) * vector[i] + math.cos(angle) * vector[j]
    return np.array(out)


def _unit(vector: np.ndarray, mean: bool, eps: float) -> np.ndarray:
    square = sum(entry * entry for entry in vector)
    return vector / evaluated("sqrt", (square / len(vector) if mean else square) + eps)


def score(
    kernel: Spec,
    layer: Mapping[str, Any],
    h: int,
    query: tuple[np.ndarray, Scalar],
    key: tuple[np.ndarray, Scalar],
    turns: tuple[Spec, ...] = (),
) -> Scalar:
    """What head h of the query's particle, a pair (x, s), thinks of the key's; −inf is hidden."""
    name, *settings = kernel
    (x, s), (y, t) = query, key
    if name in ("rotary", "cosine", "qk_norm"):
        return score(settings[-1], layer, h, query, key, (kernel, *turns))
    if name in ("soft_cap", "alibi", "window"):
        inner = score(settings[-1], layer, h, query, key, turns)
        if name == "soft_cap":
            return settings[0] * evaluated("tanh", inner / settings[0])
        if name == "window":
            return inner if abs(s - t) < settings[0] else -math.inf
        slopes, length = settings[:2]
        return inner - (slopes[h] if len(slopes) > 1 else slopes[0]) * length * abs(s - t)
    scale, q, k = _base(layer, h, x, y)
    factor = scale
    for turn, *how in turns:
        if turn == "rotary":
            q, k = _turned(q, s, how[0]), _turned(k, t, how[0])
        elif turn == "cosine":
            factor, q, k = 1, how[0] * _unit(q, False, how[1]), _unit(k, False, how[1])
        else:
            factor, q = scale, np.asarray(how[0]) * _unit(q, True, how[2])
            k = np.asarray(how[1]) * _unit(k, True, how[2])
    if name == "dot":
        return factor * sum(a * b for a, b in zip(q, k, strict=True))
    return -factor * sum((a - b) ** 2 for a, b in zip(q, k, strict=True))


# ------------------------------------------------------------------ one row


def _log_sum(logits: list[Scalar]) -> Scalar:
    top = max(logit.real for logit in logits)
    return top + log(sum(exp(logit - top) for logit in logits))


def _log_sums(rows: np.ndarray) -> np.ndarray:
    """Of each row; NumPy's functions do not know the numbers of mpmath."""
    if rows.dtype == object:
        return np.array([_log_sum(list(row)) for row in rows])
    top = rows.real.max(-1, keepdims=True)
    return top[:, 0] + np.log(np.exp(rows - top).sum(-1))


def _row(
    normalization: Spec, h: int, scores: dict[int, Scalar], logs: np.ndarray
) -> dict[int, Scalar]:
    """P of the columns seen."""
    name, *settings = normalization
    if name == "sigmoid":
        return {j: exp(logs[j]) / (1 + exp(-s - settings[0])) for j, s in scores.items()}
    if name in ("psi", "custom"):
        psi, divides, sinks = settings or (lambda s: log(1 + exp(s)), True, {h: 0})
        parts = {j: exp(logs[j]) * psi(s) for j, s in scores.items()}
        total = sum(parts.values()) + (0 if sinks is None else exp(sinks[h]))
        return {j: part / total for j, part in parts.items()} if divides else parts
    logits = {j: s + logs[j] for j, s in scores.items()}
    sink = []
    if name == "sink":
        every = np.atleast_1d(settings[0])
        sink = [every[h] if len(every) > 1 else every[0]]
    total = _log_sum([*logits.values(), *sink]) if logits else 0
    return {j: exp(logit - total) for j, logit in logits.items()}


def _scores(case: Case, h: int, x: np.ndarray, s: Scalar) -> dict[int, Scalar]:
    """Those of the columns that a query at x sees."""
    places = case.positions if case.positions is not None else [None] * len(case.points)
    found = {
        j: score(case.kernel, case.layer, h, (x, s), (y, t))
        for j, (y, t) in enumerate(zip(case.points, places, strict=True))
        if case.log_weights[j] > -math.inf and not (case.causal and t > s)
    }
    return {j: value for j, value in found.items() if value.real > -math.inf}


def potentials(case: Case, h: int) -> np.ndarray:
    """g with Pᵢⱼ ∝ aⱼ e^{sᵢⱼ + gⱼ} and Σᵢ aᵢPᵢⱼ = aⱼ, by the two scalings in turn."""
    n = len(case.points)
    alive = [j for j in range(n) if case.log_weights[j] > -math.inf]
    places = case.positions if case.positions is not None else [None] * n
    rows = [_scores(case, h, case.points[i], places[i]) for i in alive]
    logits = np.array(
        [[row.get(j, -math.inf) + case.log_weights[j] for j in alive] for row in rows]
    )
    logs = case.log_weights[alive]
    g = np.zeros(len(alive), logits.dtype)
    for _ in range(case.normalization[1]):
        shifted = logits + g
        f = -_log_sums(shifted)
        back = shifted + (logs + f)[:, None]
        before, g = g, g - _log_sums(back.T) + logs
        if g.dtype != object and all(
            np.abs(part(g - before)).max() <= 4e-16 * np.abs(part(g)).max()
            for part in (np.real, np.imag)
        ):
            break
    out = np.zeros(n, g.dtype)
    out[alive] = g
    return out


def field(
    case: Case, x: np.ndarray, s: Scalar = None, columns: list[np.ndarray] | None = None
) -> np.ndarray:
    """Γ_μ(s, x); `columns` are the logs of the columns per head, potentials included."""
    layer = case.layer
    value = np.asarray(layer["value"])
    heads = len(layer["query"])
    out: Any = 0
    for h in range(heads):
        group = h * len(value) // heads
        scores = _scores(case, h, x, s)
        logs = case.log_weights if columns is None else columns[h]
        row = _row(case.normalization, h, scores, logs)
        bias = layer.get("value_bias")
        total: Any = np.zeros(value.shape[1])
        for j, p in row.items():
            v = value[group] @ case.points[j]
            total = total + p * (v if bias is None else v + np.asarray(bias)[group])
        output = layer.get("output")
        out = out + (total if output is None else np.asarray(output)[h] @ total)
    bias = layer.get("output_bias")
    return out if bias is None else out + np.asarray(bias)


def column_logs(case: Case) -> list[np.ndarray] | None:
    """Log-weights with Sinkhorn's potentials, per head; None for other normalisations."""
    if case.normalization[0] != "sinkhorn":
        return None
    return [case.log_weights + potentials(case, h) for h in range(len(case.layer["query"]))]


def attention_map(case: Case) -> np.ndarray:
    """The images of the atoms, (n, d_out)."""
    places = case.positions if case.positions is not None else [None] * len(case.points)
    columns = column_logs(case)
    return np.stack([field(case, x, s, columns) for x, s in zip(case.points, places, strict=True)])


# ------------------------------------------------------------------ derivatives by complex steps


def jacobian(case: Case) -> np.ndarray:
    """Of the atoms' images in the atoms, (n d_out, n d)."""
    return jacobian_by_complex_step(
        lambda points: attention_map(case._replace(points=points)), case.points
    )


def field_jacobians(case: Case) -> np.ndarray:
    """D_xΓ_μ(xᵢ) at fixed μ, (n, d_out, d)."""
    places = case.positions if case.positions is not None else [None] * len(case.points)
    columns = column_logs(case)
    return np.stack(
        [
            jacobian_by_complex_step(lambda x, s=s: field(case, x, s, columns), point)
            for point, s in zip(case.points, places, strict=True)
        ]
    )


def weighted(matrix: np.ndarray, log_weights: np.ndarray) -> np.ndarray:
    """D^½ J D^−½, with rows and columns of absent atoms 0."""
    n = len(log_weights)
    out = matrix.reshape(n, -1, n, matrix.shape[1] // n).copy()
    for i in range(n):
        for j in range(n):
            if -math.inf in (log_weights[i], log_weights[j]):
                out[i, :, j] = out[i, :, j] * 0
            else:
                out[i, :, j] = out[i, :, j] * exp((log_weights[i] - log_weights[j]) / 2)
    return out.reshape(matrix.shape)


def absent_out(matrix: np.ndarray, log_weights: np.ndarray) -> np.ndarray:
    """J with rows and columns of absent atoms 0."""
    return weighted(matrix, np.where(log_weights > -math.inf, 0.0, -math.inf))
