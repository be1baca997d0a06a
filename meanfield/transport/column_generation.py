"""Large problems to a proven gap: a sparse simplex on few arcs, and pricing of all of them.

An optimal plan uses n + m − 1 of the n m arcs. Potentials of a coarse problem show where they
lie; the simplex is solved on the arcs with the smallest reduced costs; all pairs are priced in
blocks, nothing n × m is stored; what violates is added. Pricing makes the potentials feasible, so
each round ends with a certified interval, and the gap says when to stop.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from meanfield.transport.certificates import certify
from meanfield.transport.closed_forms import monotone_plan
from meanfield.transport.exact import Plan, simplex, sparse_simplex
from meanfield.transport.problems import UNIT, Answer, Problem, squared_distances

__all__ = ["coarse_potentials", "solve_columns"]

_REPRESENTATIVES = 1500
_FIRST_ARCS = 10
_NEW_ARCS = 8
_ROUNDS = 40
_BLOCK = 1 << 21  # costs held at once


class _Pricing(NamedTuple):
    """Row minima of C − g, and the arcs asked for."""

    minima: np.ndarray
    rows: np.ndarray
    cols: np.ndarray
    slack: float  # how far a minimum may lie above the true one


def solve_columns(
    problem: Problem, *, rtol: float, time_limit: float | None = None, device: str = "cpu"
) -> Answer:
    """W₂ with a proven gap, in memory proportional to (n + m) · 40 and a block.

    Args:
        problem: the problem.
        rtol: gap at which to stop, relative to W₂.
        time_limit: seconds after which the best interval so far is returned unconverged.
        device: where to price; the simplex is on the CPU.
    """
    deadline = np.inf if time_limit is None else time.perf_counter() + time_limit
    g = coarse_potentials(problem)
    first = _priced(problem, g, None, device=device)
    second = _priced(_mirrored(problem), first.minima, None, device=device)
    f, g = first.minima, second.minima
    staircase = _staircase(problem)
    rows = np.concatenate([first.rows, second.cols, staircase[0]])
    cols = np.concatenate([first.cols, second.rows, staircase[1]])
    arcs = np.unique(rows * problem.m + cols)
    best: Answer | None = None
    for _ in range(_ROUNDS):
        plan = _on_arcs(problem, arcs, f, g)
        pricing = _priced(problem, plan.g, plan.f, device=device)
        answer = certify(
            problem,
            plan,
            (pricing.minima, plan.g),
            method="column generation",
            rtol=rtol / 4,  # the interval, rounding included, is to be narrower than rtol
            slack=pricing.slack,
        )
        best = answer if best is None else _better(best, answer)
        new = np.setdiff1d(pricing.rows * problem.m + pricing.cols, arcs)
        if best.converged or not len(new) or time.perf_counter() > deadline:
            break
        arcs = np.union1d(arcs, new)
        f, g = plan.f, plan.g
    assert best is not None
    return best


def coarse_potentials(problem: Problem) -> np.ndarray:
    """g of a problem between representatives, extended to all of ν.

    Representatives are drawn by weight, without replacement; uniform ones miss the heavy atoms
    and stall.
    """
    generator = np.random.default_rng(0)
    keep_x = _drawn(problem.log_a, generator)
    keep_y = _drawn(problem.log_b, generator)
    x, y = problem.x[keep_x], problem.y[keep_y]
    a = np.bincount(_closest(problem.x, x), problem.a, len(x)) + 1e-300
    b = np.bincount(_closest(problem.y, y), problem.b, len(y)) + 1e-300
    cost = squared_distances(x, y)
    unit = max(float(cost.max()), 1e-300)
    f = simplex(a / a.sum(), b / b.sum(), cost / unit).f * unit
    g = np.empty(problem.m)
    step = max(1, _BLOCK // len(x))
    for start in range(0, problem.m, step):
        block = slice(start, start + step)
        g[block] = (squared_distances(problem.y[block], x) - f).min(1)
    return g


def _drawn(logs: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    if len(logs) <= _REPRESENTATIVES:
        return np.arange(len(logs))
    keys = logs + generator.gumbel(size=len(logs))  # top-k of these is a draw by weight
    return np.sort(np.argpartition(keys, -_REPRESENTATIVES)[-_REPRESENTATIVES:])


def _closest(points: np.ndarray, centres: np.ndarray) -> np.ndarray:
    if len(points) == len(centres):
        return np.arange(len(points))
    out = np.empty(len(points), np.int64)
    step = max(1, _BLOCK // len(centres))
    for start in range(0, len(points), step):
        block = slice(start, start + step)
        out[block] = squared_distances(points[block], centres).argmin(1)
    return out


def _mirrored(problem: Problem) -> Problem:
    return Problem(problem.y, problem.x, problem.log_b, problem.log_a, problem.exponent)


def _staircase(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """A feasible coupling: monotone along the direction in which the clouds are widest."""
    points = np.concatenate([problem.x, problem.y])
    centred = points - points.mean(0)
    direction = np.linalg.eigh(centred.T @ centred)[1][:, -1]
    order_x, order_y = (np.argsort(t @ direction) for t in (problem.x, problem.y))
    i, j, _ = monotone_plan(problem.a[order_x], problem.b[order_y])
    # Both ways around a corner, so that rounding of the sums cannot cut the staircase.
    rows = np.concatenate([i, i[:-1], i[1:]])
    cols = np.concatenate([j, j[1:], j[:-1]])
    return order_x[rows], order_y[cols]


def _on_arcs(problem: Problem, arcs: np.ndarray, f: np.ndarray, g: np.ndarray) -> Plan:
    rows, cols = np.divmod(arcs, problem.m)
    costs = np.square(problem.x[rows] - problem.y[cols]).sum(-1)
    return sparse_simplex(problem.a, problem.b, (rows, cols, costs), (f, g))


def _better(one: Answer, other: Answer) -> Answer:
    """Plans improve from round to round; potentials need not."""
    if other.lower >= one.lower:
        return other
    return Answer(
        max(other.value, one.lower),
        one.lower,
        other.upper,
        other.rows,
        other.cols,
        other.log_mass,
        one.f,
        one.g,
        other.method,
        other.converged,
    )


def _priced(problem: Problem, g: np.ndarray, f: np.ndarray | None, *, device: str) -> _Pricing:
    """min_j C_ij − g_j for all i, by matrix products on centred data.

    Without `f`, the arcs are the smallest few of every row; with it, those of reduced cost
    C_ij − fᵢ − g_j below 0, at most `_NEW_ARCS` in a row and in a column.
    """
    centre = problem.x.mean(0)
    x, y = (torch.as_tensor(t - centre, device=device) for t in (problem.x, problem.y))
    squares_x, squares_y = x.square().sum(-1), y.square().sum(-1)
    longest = float(squares_x.max().sqrt() + squares_y.max().sqrt())
    slack = (problem.dim + 8) * 2 * UNIT * (longest**2 + float(np.abs(g).max()))
    offset = squares_y - torch.as_tensor(g, device=device)
    targets = y.T.contiguous()
    minima = np.empty(problem.n)
    many = min(_FIRST_ARCS, problem.m)
    firsts = np.empty((problem.n if f is None else 0, many), np.int64)
    rows, cols, reduced = [np.repeat(np.arange(len(firsts)), many)], [firsts.ravel()], []
    step = max(1, _BLOCK // problem.m)
    # One buffer, and results written in place: small survivors between freed blocks would keep
    # the heap from shrinking, and the peak would be quadratic after all.
    buffer = torch.empty(min(step, problem.n), problem.m, dtype=x.dtype, device=device)
    for start in range(0, problem.n, step):
        block = slice(start, min(start + step, problem.n))
        costs = torch.addmm(
            offset, x[block], targets, alpha=-2, out=buffer[: block.stop - block.start]
        )
        lowest = costs.amin(-1)
        minima[block] = (lowest + squares_x[block]).cpu().numpy()
        if f is None:
            firsts[block] = costs.topk(many, dim=-1, largest=False).indices.cpu().numpy()
            continue
        ceiling = torch.as_tensor(f[block], device=device) - squares_x[block] - 4 * slack
        r, c, v = _violations(costs, ceiling, lowest)
        rows.append(start + r)
        cols.append(c)
        reduced.append(v)
    all_rows, all_cols = np.concatenate(rows), np.concatenate(cols)
    if f is not None:
        kept = _few(all_rows, all_cols, np.concatenate(reduced))
        all_rows, all_cols = all_rows[kept], all_cols[kept]
    return _Pricing(minima, all_rows, all_cols, slack)


def _violations(
    costs: Tensor, ceiling: Tensor, lowest: Tensor
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Entries below the ceiling of their row: row, column, by how much."""
    bad = torch.nonzero(lowest < ceiling).squeeze(-1)
    if not len(bad):
        return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0)
    part = costs[bad] - ceiling[bad, None]
    many = min(4 * _NEW_ARCS, part.shape[1])
    found = part.topk(many, dim=-1, largest=False)
    kept = found.values < 0
    rows = bad[:, None].expand_as(kept)[kept]
    return rows.cpu().numpy(), found.indices[kept].cpu().numpy(), found.values[kept].cpu().numpy()


def _few(rows: np.ndarray, cols: np.ndarray, reduced: np.ndarray) -> np.ndarray:
    """The most violated arcs, at most a few in each row and then in each column."""
    kept = np.arange(len(rows))
    for index in (rows, cols):
        order = kept[np.lexsort((reduced[kept], index[kept]))]
        starts = np.flatnonzero(np.diff(index[order], prepend=-1))
        rank = np.arange(len(order)) - np.repeat(starts, np.diff(starts, append=len(order)))
        kept = order[rank < _NEW_ARCS]
    return kept
