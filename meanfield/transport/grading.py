"""The certificate for everybody: a plan and potentials of any solver, graded to an interval."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from meanfield.checks import number
from meanfield.habits import with_hints
from meanfield.transport.certificate import (
    Interval,
    SparsePlan,
    certified,
    clipped,
    in_unit,
)
from meanfield.transport.foreign import Entries, entries_of, potentials_of
from meanfield.transport.pairs import Measure, as_pair
from meanfield.transport.plans.c_transform import CTransform
from meanfield.transport.plans.formulas import monotone_along_widest
from meanfield.transport.problem import Problem, costs_between, log_masses
from meanfield.transport.result import TransportResult, assemble
from meanfield.transport.solve import as_order, in_numbering

_ADDED = 1e-13  # of the mass: less of it is priced by the certificate, not put elsewhere
_DIRECT = 50_000_000  # coordinate differences up to which every cost is taken from its own
_BLOCK = 1 << 21  # costs held at once
_CANDIDATES = 8  # of a row, whose costs are taken again from differences


@with_hints
def certify(
    mu: Measure,
    nu: Measure,
    *,
    plan: Any = None,
    potentials: Any = None,
    p: float = 2,
    rtol: float = 1e-9,
) -> TransportResult:
    """Grade a plan and potentials of any solver: an interval that holds W_p(μ, ν), proven.

    The cost of any plan is an upper bound, and potentials with fᵢ + g_j ≤ ‖xᵢ − y_j‖^p give
    W_p^p ≥ ⟨a, f⟩ + ⟨b, g⟩. Nothing is believed. A plan whose marginals are off is scaled down to
    them, and the mass that is left goes in the order of its projections on the widest direction.
    Potentials are replaced by c-transforms of theirs, fᵢ = min_j ‖xᵢ − y_j‖^p − g_j, which are
    feasible and at least as good. Rounding is in the interval; weights are read as by `solve_w2`
    without ``exact_weights``: those that agree to a few units in their last place are equal.

    Args:
        mu: μ, as for `solve_w2`; one measure.
        nu: ν, likewise.
        plan: a permutation or map (n,) of whole numbers, xᵢ to y_plan[i]; a matrix (n, m), also
            sparse; a tuple (rows, cols), as of SciPy's assignment, or (rows, cols, mass); a
            `Coupling`. Without one the upper end is that of a monotone plan along one direction.
        potentials: (f, g), of which one may be None; any precision and device; of the cost
            ‖x − y‖^p itself (GeomLoss has half of it for p = 2: multiply by 2; POT's
            solvers with ``reg=`` have potentials over `reg`: multiply by that). Without them the
            lower end is that of nearest points.
        p: the order, from 1 to 100.
        rtol: what `converged` means. Nothing is raised where it is not met.

    Returns:
        The interval; `value` is the cost of the plan, `coupling` the repaired plan, `potentials`
        the c-transforms. How far `solve_w2(mu, nu).value` lies from either end says whether plan
        or potentials make it wide.

    Raises:
        TypeError: a plan or potentials of another kind, or measures that `solve_w2` refuses.
        ValueError: shapes that do not fit, masses that are negative, not finite or far from a sum
            of 1, potentials that are not finite; a batch of measures.

    Example:
        >>> import numpy as np
        >>> x, y = np.array([[0.0], [1.0]]), np.array([[0.5], [2.0]])
        >>> found = certify(x, y, plan=[1, 0], potentials=(None, [0.0, 0.0]))
        >>> round(float(found.lower), 4), round(float(found.upper), 4)
        (0.7906, 1.4577)
        >>> certify(x, y, plan=[0, 1], potentials=(None, [0.0, 0.75])).converged
        np.True_
    """
    start = time.perf_counter()
    order, rtol = as_order(p), number(rtol, "rtol", above=0, below=1)
    pair = as_pair(mu, nu)
    if pair.batch_shape:
        raise ValueError(
            f"expected one pair of measures, got a batch of shape {pair.batch_shape}; "
            "certify each pair by itself"
        )
    x, y, log_a, log_b = (t[0] for t in pair.flat)
    entries = entries_of(plan, len(x), len(y))
    f, g = potentials_of(potentials, len(x), len(y))
    whole = Problem(x, y, log_a, log_b, order=order)
    atoms = whole.atoms
    problem = whole.part(*atoms, snap=True)
    if problem.pairs < whole.pairs:
        entries = _among(entries, *atoms)
    given = _repaired(problem, entries)
    unit = -order * float(problem.exponent)
    known = [_in_unit(t, which, unit) for t, which in zip((f, g), atoms, strict=True)]
    names = ("plan" * (plan is not None), "potentials" * (potentials is not None))
    method = "given " + (" and ".join(filter(None, names)) or "nothing")
    answer = _graded(problem, given, known, method, rtol, pair.device)
    answer = in_numbering(in_unit(answer, problem.exponent), whole)
    seconds = time.perf_counter() - start
    return assemble(pair, answer[None], seconds=seconds)


def _in_unit(
    potential: np.ndarray | None, atoms: np.ndarray, exponent: float
) -> np.ndarray | None:
    """A potential at the atoms that have mass, in the unit of the problem."""
    if potential is None:
        return None
    if not np.isfinite(potential[atoms]).all():
        raise ValueError("potentials: expected finite ones at atoms with mass, got NaN or inf")
    with np.errstate(over="ignore"):
        return np.minimum(np.maximum(potential[atoms] * np.exp2(exponent), -1e300), 1e300)


def _among(entries: Entries, rows: np.ndarray, cols: np.ndarray) -> Entries:
    """The entries between atoms that have mass, in the numbering of these."""
    there = np.isin(entries.rows, rows) & np.isin(entries.cols, cols)
    i, j = (
        np.searchsorted(*t) for t in ((rows, entries.rows[there]), (cols, entries.cols[there]))
    )
    return Entries(i, j, None if entries.log_mass is None else entries.log_mass[there])


def _repaired(problem: Problem, entries: Entries) -> SparsePlan:
    """A plan with the marginals of the problem.

    Rows, then columns, that hold too much are scaled down; what is left goes in the order of its
    projections on the widest direction. Less than rounding is left to the certificate, which
    prices it.
    """
    i, j, logs = entries
    logs = problem.logs_a[i] if logs is None else logs
    mass, scaled = np.exp(logs), logs
    sides = ((i, problem.a), (j, problem.b))
    for index, weights in sides:
        held = np.bincount(index, mass, len(weights))
        if (held > weights).any():
            share = np.where(held > weights, weights / np.maximum(held, 1e-300), 1.0)[index]
            mass, scaled = mass * share, scaled + log_masses(share)
    left = [np.maximum(w - np.bincount(index, mass, len(w)), 0) for index, w in sides]
    misplaced = float(max(t.sum() for t in left))
    if misplaced <= _ADDED:
        return SparsePlan(i, j, scaled)
    added = monotone_along_widest(problem, *left)
    kept = added.log_mass > -math.inf
    moved = (added.rows[kept], added.cols[kept], added.log_mass[kept] + math.log(misplaced))
    joined = (np.concatenate(t) for t in zip((i, j, scaled), moved, strict=True))
    return SparsePlan(*joined)


def _graded(
    problem: Problem,
    plan: SparsePlan,
    known: Sequence[np.ndarray | None],
    method: str,
    rtol: float,
    device: str,
) -> Interval:
    """The interval of a plan and of c-transforms of f or of g, whichever are better."""
    f, g = known
    starts = [(g, problem.b, False)] * (g is not None or f is None)
    starts += [(f, problem.a, True)] * (f is not None or g is None)
    pairs = []
    for given, weights, mirror in starts:
        start = np.zeros_like(weights) if given is None else given
        start = clipped(problem, start, weights)
        first = priced(problem, start, mirror=mirror, device=device)
        second = priced(problem, first, mirror=not mirror, device=device)
        pairs.append((second, first) if mirror else (first, second))
    best = max(pairs, key=lambda pair: float(problem.a @ pair[0] + problem.b @ pair[1]))
    return certified(problem, plan, best, method=method, rtol=rtol)


def priced(
    problem: Problem, known: np.ndarray, *, mirror: bool = False, device: str = "cpu"
) -> np.ndarray:
    """fᵢ = min_j C_ij − g_j of one problem.

    Args:
        problem: one problem.
        known: g (m,), or f (n,) if it is `mirror`.
        mirror: g_j = min_i C_ij − fᵢ instead.
        device: where products of many coordinates are computed.
    """
    if problem.pairs <= _BLOCK:  # held, as they are asked for four times
        return ((problem.costs.T if mirror else problem.costs) - known).min(1)
    x, y = (problem.y, problem.x) if mirror else (problem.x, problem.y)
    if problem.order == 2 and problem.pairs * problem.dim > _DIRECT:
        nowhere = np.full(len(x), np.inf)
        return CTransform(x, y, device=device).precise(known, _CANDIDATES, nowhere).minima
    step = max(1, _BLOCK // len(y))
    blocks = (x[start : start + step] for start in range(0, len(x), step))
    minima = [(costs_between(block, y, problem.order) - known).min(1) for block in blocks]
    return np.concatenate(minima)
