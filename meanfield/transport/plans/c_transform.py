"""The c-transform fᵢ = min_j C_ij − g_j of two clouds: all pairs are looked at, C is not stored.

Two ways. In low dimension the rows are cut into cells, and these into smaller ones: the costs at
the centre of a cell tell which columns can be the smallest for any of its points, and only these
are looked at inside it. Where many can, blocks of rows are compared with all columns by matrix
products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from meanfield.checks import at_once, is_host, to_host
from meanfield.transport.problem import UNIT

_BLOCK = 1 << 21  # costs held at once
_SMALL_CELL = 64  # points; with 32 or 128 a pass takes a fifth longer (262,144 atoms, d = 3)
_INSIDE = 8  # times as many points in the next larger cell
_AXES = 32  # along which points are halved, at most
_PROBES = 8  # cells from which the share of columns that can be smallest is judged
_SHARE = 0.5  # above it, whole blocks are faster (20,000 and 60,000 atoms, d = 3 to 8)


class RowMinima(NamedTuple):
    """Row minima of C − g, and the candidate arcs asked for with their C_ij − g_j."""

    minima: np.ndarray
    rows: np.ndarray
    cols: np.ndarray
    values: np.ndarray
    slack: float  # how far a minimum may lie above the true one


class _Cell(NamedTuple):
    points: Tensor  # indices
    centre: Tensor
    radius: float
    inner: list[_Cell]


class CTransform:
    """The c-transform between two clouds, for one g after another.

    Args:
        x: points of the rows, shape (n, d).
        y: points of the columns, shape (m, d).
        device: where to compute.
    """

    def __init__(self, x: np.ndarray, y: np.ndarray, *, device: str = "cpu") -> None:
        centre = x.mean(0)
        self._original = tuple(torch.as_tensor(t, device=device) for t in (x, y))
        self.x, self.y = (torch.as_tensor(t - centre, device=device) for t in (x, y))
        self._squares_x, self._squares_y = self.x.square().sum(-1), self.y.square().sum(-1)
        self._targets = self.y.T.contiguous()
        longest = float(self._squares_x.max().sqrt() + self._squares_y.max().sqrt())
        self._size = longest**2

    def __call__(self, g: np.ndarray, count: int, ceiling: np.ndarray | None = None) -> RowMinima:
        """The minimum of every row, and the `count` arcs of each row with the smallest C − g.

        Costs come from products of centred coordinates, right to `slack`.

        Args:
            g: potential of the columns, shape (m,).
            count: arcs of every row.
            ceiling: shape (n,); only arcs with C_ij − g_j below it, beyond rounding.
        """
        offset, slack = self._prepared(g)
        top = None
        if ceiling is not None:
            top = torch.as_tensor(ceiling, device=self.x.device) - self._squares_x - 4 * slack
        found = self._found(offset, count, slack, top)
        rows, cols, values = found.arcs()
        values += self._squares_x[rows]
        minima = found.minima + self._squares_x
        return RowMinima._make([*map(to_host, (minima, rows, cols, values)), slack])

    def precise(self, g: np.ndarray, count: int, ceiling: np.ndarray) -> RowMinima:
        """The same where costs are small beside the coordinates: slower, and without slack.

        Costs of the `count` smallest arcs are taken again from direct differences. All others are
        above the last of them, up to the slack of the products, which then no longer matters.
        """
        offset, slack = self._prepared(g)
        found = self._found(offset, count, slack, None)
        rows, cols, rough = found.arcs()
        x, y = self._original  # centring rounds: differences of 1e-8 would lose half their digits
        costs = (x[rows] - y[cols]).square().sum(-1)
        values = costs - torch.as_tensor(g, device=self.x.device)[cols]
        minima = torch.full_like(found.minima, math.inf)
        minima.scatter_reduce_(0, rows, values, "amin")
        if count < len(self.y):
            others = torch.full_like(minima, -math.inf)
            others.scatter_reduce_(0, rows, rough, "amax")
            minima = torch.minimum(minima, others + self._squares_x - 2 * slack)
        below = values < torch.as_tensor(ceiling, device=self.x.device)[rows]
        arcs = (t[below] for t in (rows, cols, values))
        return RowMinima._make([*map(to_host, (minima, *arcs)), 0.0])

    def _prepared(self, g: np.ndarray) -> tuple[Tensor, float]:
        slack = (self.x.shape[1] + 8) * 2 * UNIT * (self._size + float(np.abs(g).max()))
        return self._squares_y - torch.as_tensor(g, device=self.x.device), slack

    def _found(self, offset: Tensor, count: int, slack: float, top: Tensor | None) -> _Found:
        count = min(count, len(self.y))
        found = _Found(len(self.x), count, self.x.device)
        # On a device whole blocks are faster than to choose columns, which waits for each cell.
        is_local = is_host(self.x.device) and self._share(offset, count, slack) <= _SHARE
        cells = self._by_cells(offset, count, slack)
        for rows, cols, costs in cells if is_local else self._by_blocks(offset):
            found.add(rows, cols, costs, top)
        return found

    def _by_blocks(self, offset: Tensor) -> Iterator[tuple[Tensor, None, Tensor]]:
        step = max(1, at_once(_BLOCK, self.x.device) // len(self.y))
        n = len(self.x)
        # One buffer: pieces that survive between freed blocks would keep the heap from
        # shrinking, and the peak would be quadratic after all.
        buffer = torch.empty(min(step, n), len(self.y), dtype=offset.dtype, device=offset.device)
        everyone = torch.arange(n, device=offset.device)
        for start in range(0, n, step):
            rows = everyone[start : start + step]
            out = buffer[: len(rows)]
            yield rows, None, torch.addmm(offset, self.x[rows], self._targets, alpha=-2, out=out)

    def _by_cells(
        self, offset: Tensor, count: int, slack: float
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        columns = self._columns(offset)
        step = max(1, _BLOCK // (4 * len(self.y)))
        for start in range(0, len(self._cells), step):
            yield from self._inside(self._cells[start : start + step], columns, count, slack)

    def _inside(
        self, cells: list[_Cell], columns: _Columns, count: int, slack: float
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for cell, kept in zip(cells, columns.eligible(cells, count, slack), strict=True):
            which = kept.nonzero().squeeze(-1)
            few = _Columns(columns.places[which], columns.lifted.index_select(0, which))
            if cell.inner:
                yield from self._inside(cell.inner, few, count, slack)
            else:
                yield cell.points, few.places, few.costs(self.x[cell.points])

    def _columns(self, offset: Tensor) -> _Columns:
        everyone = torch.arange(len(self.y), device=self.x.device)
        parts = -2 * self.y, offset[:, None], 4 * self._squares_y[:, None]
        return _Columns(everyone, torch.cat(parts, -1))

    def _share(self, offset: Tensor, count: int, slack: float) -> float:
        """The part of the columns that a row of a typical cell has to look at."""
        if len(self.x) < 2 * _PROBES * _SMALL_CELL:
            return 1.0
        probes = self._cells[:: max(1, len(self._cells) // _PROBES)]
        while probes[0].inner:
            probes = [cell.inner[len(cell.inner) // 2] for cell in probes]
        return float(self._columns(offset).eligible(probes, count, slack).double().mean())

    @cached_property
    def _cells(self) -> list[_Cell]:
        sizes = [_SMALL_CELL]
        while sizes[0] * _INSIDE * _PROBES <= len(self.x):
            sizes.insert(0, sizes[0] * _INSIDE)
        return _cells_of(to_host(self.x), np.arange(len(self.x)), sizes, self.x.device)


def _cells_of(
    points: np.ndarray, index: np.ndarray, sizes: list[int], device: torch.device
) -> list[_Cell]:
    """Cells of at most so many points, with smaller cells inside; `index` numbers the points."""
    cells = []
    order, starts = halved(points, sizes[0])
    for which in np.split(order, starts[1:]):
        inside = points[which]
        centre = (inside.min(0) + inside.max(0)) / 2
        radius = float(np.sqrt(np.square(inside - centre).sum(-1).max())) * (1 + 1e-12)
        inner = _cells_of(inside, index[which], sizes[1:], device) if sizes[1:] else []
        own = torch.as_tensor(index[which], device=device)
        cells.append(_Cell(own, torch.as_tensor(centre, device=device), radius, inner))
    return cells


class _Columns(NamedTuple):
    """Some of all columns, at their places: (−2 y_j, ‖y_j‖² − g_j, 4 ‖y_j‖²), (k, d + 2)."""

    places: Tensor
    lifted: Tensor

    def costs(self, points: Tensor) -> Tensor:
        """h_j(x) = ‖y_j‖² − g_j − 2 ⟨x, y_j⟩ of points x, (p, k)."""
        return torch.nn.functional.pad(points, (0, 1), value=1.0) @ self.lifted[:, :-1].T

    def eligible(self, cells: list[_Cell], count: int, slack: float) -> Tensor:
        """Columns that may be the smallest for some point of the cell, (cells, k).

        With c the centre, r the radius and h_j least at c for j*, column j beats j* at a point
        within r of c only if h_j(c) − h_j*(c) ≤ 2 r ‖y_j − y_j*‖.
        """
        centres = torch.stack([cell.centre for cell in cells])
        radii = centres.new_tensor([cell.radius for cell in cells])[:, None]
        at_centre = self.costs(centres)
        lowest, best = at_centre.min(-1, keepdim=True)
        nearest = self.lifted[best[:, 0]]
        nearest[:, :-2] *= -2
        last = nearest[:, -1:].clone()
        nearest[:, -2], nearest[:, -1] = 0, 1
        # 4 ‖y_j − y_j*‖²
        room = (nearest @ self.lifted.T).add_(last + 16 * slack).clamp_(min=0).sqrt_().mul_(radii)
        kept = at_centre <= room.add_(lowest + 4 * slack)
        # At least `count` columns stay: those with the smallest costs at the centre.
        few = (kept.sum(-1) < count).nonzero().squeeze(-1)
        if len(few) and count > 1:
            threshold = at_centre[few].kthvalue(count, dim=-1, keepdim=True)
            kept[few] |= at_centre[few] <= threshold.values
        return kept


class _Found:
    """Minima and arcs, collected block by block in arrays made beforehand."""

    def __init__(self, n: int, count: int, device: torch.device) -> None:
        self._count = count
        self.minima = torch.empty(n, dtype=torch.float64, device=device)
        self._cols = torch.full((n, count), -1, dtype=torch.int64, device=device)
        self._values = torch.empty(n, count, dtype=torch.float64, device=device)

    def add(self, rows: Tensor, cols: Tensor | None, costs: Tensor, top: Tensor | None) -> None:
        lowest = costs.amin(-1)
        self.minima[rows] = lowest
        if top is not None and is_host(costs.device):
            wanted = lowest < top[rows]
            if not bool(wanted.any()):
                return
            if not bool(wanted.all()):
                rows, costs = rows[wanted], costs[wanted]
        many = self._count
        few = costs.min(-1, keepdim=True) if many == 1 else costs.topk(many, -1, largest=False)
        chosen = few.indices if cols is None else cols[few.indices]
        if top is not None:
            chosen = torch.where(few.values < top[rows, None], chosen, -1)
        self._cols[rows], self._values[rows] = chosen, few.values

    def arcs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, columns and values of all arcs."""
        rows, place = torch.nonzero(self._cols >= 0, as_tuple=True)
        return rows, self._cols[rows, place], self._values[rows, place]


def halved(points: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Groups of at most `size` neighbours, by halving along the widest axis of each group.

    Of many axes those of the largest variance: a group is halved along less than twenty.

    Returns:
        The points in an order in which groups stand together, and where each group starts.
    """
    if points.shape[1] > _AXES:
        points = np.ascontiguousarray(points[:, np.argsort(points.var(0))[-_AXES:]])
    order, starts = np.arange(len(points)), np.zeros(1, np.int64)
    while True:
        sizes = np.diff(starts, append=len(order))
        if sizes.max() <= size:
            return order, starts
        inside = points[order]
        extent = np.maximum.reduceat(inside, starts) - np.minimum.reduceat(inside, starts)
        group = np.repeat(np.arange(len(starts)), sizes)
        along = inside[np.arange(len(order)), extent.argmax(1)[group]]
        order = order[np.lexsort((along, group))]
        starts = np.stack([starts, starts + sizes // 2], -1).ravel()
