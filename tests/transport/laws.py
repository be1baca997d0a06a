"""What holds for an answer of anybody: the laws."""

from __future__ import annotations

import functools
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import sparse

from meanfield.transport import Coupling, TransportResult, solve_wp
from tests.transport.lies import LIES
from tests.transport.problems import Problem

RTOL = 1e-9  # the default of every solver


class Told(NamedTuple):
    """What an answer says of one pair."""

    lower: float
    value: float
    upper: float
    converged: bool
    rounding: float
    plan: np.ndarray | None
    f: np.ndarray | None
    g: np.ndarray | None


def told(found: TransportResult, place: Any = ()) -> Told:
    """Of a batch, what it says of the pair at a place."""
    ends = found.lower, found.value, found.upper
    arrays = *ends, found.converged, found.rounding, found.plan, *(found.potentials or [None] * 2)
    lower, value, upper, converged, rounding, *rest = (
        None if t is None else np.asarray(t)[place] for t in arrays
    )
    ends = (float(t) for t in (lower, value, upper))
    return Told(*ends, bool(converged), float(rounding), *rest)


def contains(
    found: Told,
    truth: Fraction,
    order: int,
    scale: Fraction = Fraction(1),
    room: Fraction = Fraction(0),
) -> None:
    """lower ≤ W_p ≤ upper, but for masses of 2^−1400 that the oracle rounds."""
    lower, upper = (Fraction(t) / scale for t in (found.lower, found.upper))
    tiny = Fraction(1, 2**1200) + room
    assert found.lower <= found.value <= found.upper
    assert lower**order <= truth + max(truth, upper**order) * tiny
    assert truth <= upper**order + max(truth, upper**order) * tiny


def is_coupling(found: Told, p: Problem, order: int) -> None:
    """The plan has its marginals, and costs no more than the upper end."""
    x, y, a, b = p.arrays
    assert found.plan is not None
    room = 1e-6 if p.is_single else 1e-14
    np.testing.assert_allclose(found.plan.sum(1), np.exp(a), atol=room, rtol=0)
    np.testing.assert_allclose(found.plan.sum(0), np.exp(b), atol=room, rtol=0)
    rows, cols = np.nonzero(found.plan)
    moves = x[rows] - y[cols]
    unit = np.abs(moves).max(initial=1e-300)
    lengths = np.linalg.norm(moves / unit, axis=-1)
    cost = float(found.plan[rows, cols].astype(float) @ lengths**order) ** (1 / order)
    assert cost <= found.upper / unit * (1 + (1e-6 if p.is_single else 1e-12))


def is_feasible(found: Told, p: Problem, order: int) -> None:
    """fᵢ + g_j ≤ ‖xᵢ − y_j‖^p, and ⟨a, f⟩ + ⟨b, g⟩ is worth the lower end, up to rounding."""
    x, y, a, b = p.arrays
    f, g = (t.astype(float) for t in (found.f, found.g))
    costs = np.linalg.norm(x[:, None] - y, axis=-1) ** order
    size = np.nan_to_num(costs + np.abs(f[:, None]) + np.abs(g))
    unit = 1e-6 if p.is_single else 1e-13
    excess = (f[:, None] + g - costs)[np.isfinite(costs)]
    slack = 0.1 * RTOL * found.upper**order  # of fast products, at most
    assert (excess <= unit * size[np.isfinite(costs)] + slack).all()
    held = np.exp(a) > 0, np.exp(b) > 0
    gained = np.exp(a)[held[0]] @ f[held[0]] + np.exp(b)[held[1]] @ g[held[1]]
    if found.lower > 0:  # below 0 they prove nothing
        lost = 10 * unit * size.max() + 10 * len(size) * 2.0**-1074  # of denormal potentials
        assert gained >= found.lower**order * (1 - 10 * unit) - lost


def is_flagged_rightly(found: Told, p: Problem, order: int) -> None:
    """Converged: as narrow as was asked, or rounding explains what is left; and the other way."""
    upper = found.upper or 1.0
    width = 1 - (found.lower / upper) ** order if found.upper else 0.0
    doubt = 1 - max(1 - found.rounding / upper, 0) ** order
    outward = order * 2.0**-22 if p.is_single else 1e-12
    if found.converged:
        assert width <= order * RTOL + 2.001 * doubt + outward
    else:
        assert width > order * RTOL / 5


# ------------------------------------------------------------------ what others say


def dressed(plan: np.ndarray, p: Problem, kind: int) -> Any:
    """The same plan as another type."""
    rows, cols = np.nonzero(plan)
    types: list[Callable[[], Any]] = [
        lambda: plan,
        lambda: torch.as_tensor(plan),
        lambda: sparse.csr_array(plan),
        lambda: (rows, cols, plan[rows, cols]),
        lambda: torch.as_tensor(plan).to_sparse(),
        lambda: plan.tolist(),
        lambda: Coupling(*p.arrays[:2], rows, cols, np.log(plan[rows, cols])),
        lambda: sparse.coo_matrix(plan),
    ]
    return types[kind % len(types)]()


def refusal(plan: np.ndarray, f: np.ndarray, g: np.ndarray, p: Problem) -> str:
    """Why a plan or potentials cannot be graded, if so."""
    if not np.isfinite(plan).all():
        return "finite masses"
    if plan.min() < -1e-6 * plan.max():
        return "masses ≥ 0"
    if not 0.5 <= plan.sum() <= 1.5:
        return "sum to 1"
    held = [t[np.exp(w) > 0] for t, w in zip((f, g), p.arrays[2:], strict=True)]
    return "" if np.isfinite(np.concatenate(held)).all() else "finite ones at atoms with mass"


def check_grade(p: Problem, found: TransportResult, order: int) -> None:
    """The interval and the repaired plan of an answer of somebody."""
    grade = told(found)
    contains(grade, p.truth(order, meant=True), order)
    is_flagged_rightly(grade, p, order)
    is_coupling(grade, p, order)


@functools.cache
def best_of(p: Problem, order: int) -> Told:
    return told(solve_wp(p.mu, p.nu, order, strict=False))


def claim(p: Problem, lie: str, order: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What a liar says of a problem: plan, f, g."""
    best = best_of(p, order)
    with np.errstate(all="ignore"):
        return LIES[lie](*(np.nan_to_num(t.astype(float)) for t in (best.plan, best.f, best.g)))
