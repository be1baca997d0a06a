"""Plans and potentials as other solvers give them, right and wrong, with the exact optimum."""

from __future__ import annotations

import hashlib
import json
import math
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import sparse

from meanfield.measures import ParticleMeasure
from meanfield.transport import Coupling, TransportResult, solve_wp
from meanfield.transport.checker import HEAD
from tests.transport.transport_oracles import exact_transport

__all__ = ["Case", "check_grade", "damaged_files", "foreign_case", "measure_of", "truth_of"]


class Case(NamedTuple):
    """Two weighted clouds, and what somebody says about them."""

    mu: ParticleMeasure
    nu: ParticleMeasure
    plan: Any
    potentials: Any
    order: int
    kind: str


def clouds(rng: np.random.Generator, n: int, m: int, d: int) -> tuple[np.ndarray, np.ndarray, str]:
    kind = str(rng.choice([
        "gauss", "grid", "collapsed", "duplicates", "line", "offset", "nested", "small", "large",
        "near",
    ]))  # fmt: skip
    x, y = rng.normal(size=(n, d)), rng.normal(size=(m, d)) + 0.3
    if kind == "grid":
        x, y = rng.integers(0, 3, (n, d)) * 1.0, rng.integers(0, 3, (m, d)) * 1.0
    elif kind == "collapsed":
        homes = 10.0 * rng.normal(size=(2, d))
        size = 10.0 ** rng.uniform(-12, -2)
        x, y = (homes[rng.integers(0, 2, k)] + size * rng.normal(size=(k, d)) for k in (n, m))
    elif kind == "duplicates":
        x, y = x[rng.integers(0, n, n)], x[rng.integers(0, n, m)]
    elif kind == "line":
        x, y = x * [[1.0] + [0.0] * (d - 1)], y * [[1.0] + [0.0] * (d - 1)]
    elif kind == "offset":
        far = 10.0 ** rng.uniform(3, 12)
        x, y = x + far, y + far
    elif kind == "nested":
        x, y = (10.0 ** rng.uniform(-9, 1, (len(t), 1)) * t for t in (x, y))
    elif kind in ("small", "large"):
        scale = 10.0 ** (rng.uniform(20, 100) * (1 if kind == "large" else -1))
        x, y = x * scale, y * scale
    elif kind == "near" and n == m:
        y = x + 10.0 ** rng.uniform(-10, -1) * rng.normal(size=x.shape)
    return x, y, kind


def masses(rng: np.random.Generator, n: int) -> np.ndarray:
    """Log-weights."""
    kind = rng.integers(0, 5)
    if kind == 0:
        return np.full(n, -math.log(n))
    if kind == 1:
        logs = np.log(rng.dirichlet(np.ones(n)))
    elif kind == 2:
        logs = np.log(rng.dirichlet(np.full(n, 0.1)) + 1e-18)
    elif kind == 3:
        logs = np.log(rng.integers(1, 9, n) / 1.0)
    else:
        logs = np.where(rng.random(n) < 0.3, rng.uniform(-200, -20, n), 0.0) - rng.random(n)
    if rng.random() < 0.15 and n > 1:
        logs[rng.integers(n)] = -math.inf
    return logs - np.logaddexp.reduce(logs)


def sinkhorn(costs: np.ndarray, a: np.ndarray, b: np.ndarray, blur: float, steps: int) -> tuple:
    """Plan and potentials of a few steps of entropic transport, in logarithms."""
    f, g = np.zeros(len(a)), np.zeros(len(b))
    with np.errstate(divide="ignore", invalid="ignore"):
        log_a, log_b = np.log(a), np.log(b)
        for _ in range(steps):
            g = -blur * np.logaddexp.reduce((f[:, None] - costs) / blur + log_a[:, None], axis=0)
            f = -blur * np.logaddexp.reduce((g - costs) / blur + log_b, axis=1)
        logs = (f[:, None] + g - costs) / blur + log_a[:, None] + log_b
    return np.exp(np.minimum(logs, 1)), f, g


def plan_of(
    rng: np.random.Generator, best: np.ndarray, a: np.ndarray, b: np.ndarray, entropic: np.ndarray
) -> tuple:
    """A plan (n, m), somehow wrong."""
    n, m = best.shape
    kind = str(rng.choice([
        "optimal", "product", "sinkhorn", "noisy", "scaled rows", "stopped", "low rank",
        "minibatch", "corner", "rolled", "float32", "thinned", "mixed",
    ]))  # fmt: skip
    plan = best.copy()
    if kind == "product":
        plan = np.outer(a, b)
    elif kind == "sinkhorn":
        plan = entropic
    elif kind == "noisy":
        plan = plan + 10.0 ** rng.uniform(-18, -2) * rng.random((n, m)) / (n * m)
    elif kind == "scaled rows":
        plan = plan * np.exp(10.0 ** rng.uniform(-16, -0.5) * rng.normal(size=(n, 1)))
    elif kind == "stopped":
        plan[rng.random(n) < 0.3] = 0
    elif kind == "low rank":
        cut = rng.random(n) < 0.5
        parts = [plan[cut], plan[~cut]]
        held = [np.outer(t.sum(1), t.sum(0)) / max(t.sum(), 1e-300) for t in parts]
        plan[cut], plan[~cut] = held
    elif kind == "minibatch":
        sigma = (
            np.stack([rng.permutation(m)[:n] for _ in range(4)])
            if m >= n
            else rng.integers(0, m, (4, n))
        )
        plan = np.zeros((n, m))
        for one in sigma:
            plan[np.arange(n), one] += a / len(sigma)
    elif kind == "corner":
        plan = np.diff(
            np.diff(np.minimum.outer(np.r_[0, a.cumsum()], np.r_[0, b.cumsum()]), axis=0), axis=1
        )
        plan = np.maximum(plan, 0)
    elif kind == "rolled":
        plan = np.roll(plan, 1, axis=1)
    elif kind == "float32":
        plan = plan.astype(np.float32)
    elif kind == "thinned":
        plan = np.where(plan > 1e-3, plan, 0)
    elif kind == "mixed":
        plan = 0.99 * plan + 0.01 * np.outer(a, b)
    return plan, kind


def dressed(rng: np.random.Generator, plan: np.ndarray, x: np.ndarray, y: np.ndarray) -> Any:
    """The same plan as another type."""
    kind = rng.integers(0, 8)
    rows, cols = np.nonzero(plan)
    if kind == 0:
        return torch.as_tensor(plan)
    if kind == 1:
        return sparse.csr_array(plan)
    if kind == 2:
        return sparse.coo_matrix(plan)
    if kind == 3:
        return rows, cols, plan[rows, cols]
    if kind == 4:
        return torch.as_tensor(plan).to_sparse()
    if kind == 5:
        return plan.tolist()
    if kind == 6:
        with np.errstate(divide="ignore"):
            logs = np.log(plan[rows, cols].astype(float))
        return Coupling(x, y, rows, cols, logs)
    return plan


def potentials_of(
    rng: np.random.Generator, found: tuple | None, entropic: tuple, unit: float
) -> tuple:
    """Potentials, somehow wrong; in the unit of the costs."""
    kind = str(rng.choice([
        "optimal", "sinkhorn", "float32", "half", "shifted", "noisy", "negative", "huge", "random",
        "zero", "too high", "only f", "only g", "none",
    ]))  # fmt: skip
    f, g = entropic if found is None else (np.array(t, float) for t in found)
    if kind == "none":
        return None, kind
    if kind == "sinkhorn":
        f, g = entropic
    elif kind == "float32":
        f, g = f / unit, g / unit
        f, g = (t.astype(np.float32).astype(float) * unit for t in (f, g))
    elif kind == "half":
        f, g = f / 2, g / 2
    elif kind == "shifted":
        shift = unit * 10.0 ** rng.uniform(0, 8)
        f, g = f + shift, g - shift
    elif kind == "noisy":
        size = unit * 10.0 ** rng.uniform(-16, 0)
        f, g = f + size * rng.normal(size=f.shape), g + size * rng.normal(size=g.shape)
    elif kind == "negative":
        f, g = -f, -g
    elif kind == "huge":
        f, g = f * 1e12, g * 1e12 + unit
    elif kind == "random":
        f, g = unit * rng.normal(size=f.shape), unit * rng.normal(size=g.shape)
    elif kind == "zero":
        f, g = 0 * f, 0 * g
    elif kind == "too high":
        f, g = 1.02 * f + 0.01 * unit, g
    if kind == "only f":
        return (f, None), kind
    if kind == "only g":
        return (None, torch.as_tensor(g)), kind
    return (f, g) if rng.random() < 0.5 else [torch.as_tensor(f), torch.as_tensor(g)], kind


def measure_of(points: np.ndarray, logs: np.ndarray) -> ParticleMeasure:
    return ParticleMeasure(torch.as_tensor(points), log_weights=torch.as_tensor(logs))


def foreign_case(seed: int) -> Case:
    rng = np.random.default_rng([seed, 77])
    n, m, d = rng.integers(1, 7), rng.integers(1, 7), rng.integers(1, 4)
    m = n if rng.random() < 0.5 else m
    order = int(rng.choice([1, 2], p=[0.3, 0.7]))
    x, y, cloud = clouds(rng, n, m, d)
    log_a = masses(rng, n)
    log_b = log_a if n == m and rng.random() < 0.3 else masses(rng, m)
    mu, nu = measure_of(x, log_a), measure_of(y, log_b)
    a, b = (t.log_weights.exp().numpy() for t in (mu, nu))
    costs = np.linalg.norm(x[:, None] - y, axis=-1) ** order
    unit = float(costs.max()) or 1.0
    best = solve_wp(mu, nu, order, strict=False)
    dense = best.plan.numpy()
    entropic, f, g = sinkhorn(
        costs / unit, a, b, 10.0 ** rng.uniform(-2.5, 0), rng.integers(1, 30)
    )
    there = [np.nan_to_num(t, nan=0.0, posinf=0.0, neginf=0.0) for t in (f, g)]
    if rng.random() < 0.15 and n == m:
        plan, kind = rng.permutation(n), "permutation"
    elif rng.random() < 0.08:
        plan, kind = rng.integers(0, m, n), "map"
    elif rng.random() < 0.1:
        plan, kind = None, "none"
    else:
        plan, kind = plan_of(rng, dense, a, b, np.nan_to_num(entropic))
        if 0.51 < plan.sum() < 1.49:
            plan = dressed(rng, plan, x, y)
        else:
            plan, kind = dense, "optimal"
    found = None if best.potentials is None else [np.asarray(t) for t in best.potentials]
    pair, wrong = potentials_of(rng, found, tuple(t * unit for t in there), unit)
    return Case(mu, nu, plan, pair, order, f"{cloud} · {kind} · {wrong}")


def truth_of(case: Case) -> Fraction:
    """W_p^p, between atoms that have mass, in integers."""
    sides = []
    for t in case[:2]:
        there = t.log_weights.numpy() > -math.inf
        sides.append((t.points.numpy()[there], t.log_weights.numpy()[there]))
    (x, log_a), (y, log_b) = sides
    return exact_transport(x, y, log_a, log_b, case.order)


def check_grade(case: Case, found: TransportResult, truth: Fraction) -> str:
    """What is wrong with a grade; nothing, if all is well."""
    low, high = (Fraction(float(t)) ** case.order for t in (found.lower, found.upper))
    if not low <= truth * (1 + Fraction(1, 2**300)):
        return "lower end above the optimum"
    if not truth * (1 - Fraction(1, 2**300)) <= high:
        return "upper end below the optimum"
    width = float(found.upper) - float(found.lower)
    if not found.lower <= found.value <= found.upper:
        return "value outside"
    if found.converged and width > 2e-9 * float(found.upper) + 3 * float(found.rounding):
        return "converged, and wide"
    return ""


def damaged_files(rng: np.random.Generator, content: bytes) -> bytes:
    """A file with something wrong: by accident, or on purpose and signed again."""
    kind = rng.integers(0, 14)
    place = int(rng.integers(len(content)))
    if kind == 0:
        return content[:place]
    if kind == 1:
        return (
            content[:place]
            + bytes([content[place] ^ (1 << rng.integers(8))])
            + content[place + 1 :]
        )
    if kind == 2:
        return content[:place] + content[place + 1 :]
    if kind == 3:
        return content + b"\n"
    if kind == 4:
        return content.partition(b"\n")[2]
    data = json.loads(content.partition(b"\n")[2])
    change = 10 ** int(rng.integers(9, 20))
    if kind == 5:  # a narrower claim
        data["lower"] = data["upper"] + max(data["upper"] // change, 1)
        data["upper"] = data["lower"]
    elif kind == 6:  # another plan: all to one column
        data["rows"], data["cols"], data["mass"] = [], [], []
        data["upper"] = data["lower"] + (data["upper"] - data["lower"]) // 2
        data["lower"] = data["upper"] + 1
    elif kind == 7:
        data["rows"][0] = -1
    elif kind == 8:
        data["cols"][-1] = len(data["b"])
    elif kind == 9:
        data["mass"][0] = -data["mass"][0] - 1
    elif kind == 10:
        data["a"] = data["a"][1:]
    elif kind == 11:
        data["g"][0] = 0.5
    elif kind == 12:
        del data[str(rng.choice(list(data)))]
    else:
        data["x"][0] = [*data["x"][0], 1]
    body = json.dumps(data, separators=(",", ":")).encode()
    return (HEAD + hashlib.sha256(body).hexdigest()).encode() + b"\n" + body
