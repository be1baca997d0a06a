"""The c-transform fᵢ = min_j C_ij − g_j of two clouds: all pairs are looked at, C is not stored.

Two ways. In low dimension the rows are cut into cells of a few dozen points: the costs at the
centre of a cell tell which columns can be the smallest for any of its points, and few can. Where
many can, blocks of rows are compared with all columns by matrix products.
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
_SMALL_CELL = 32
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
        return _as_arrays(minima, rows, cols, values, slack)

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
        return _as_arrays(minima, rows[below], cols[below], values[below], 0.0)

    def _prepared(self, g: np.ndarray) -> tuple[Tensor, float]:
        slack = (self.x.shape[1] + 8) * 2 * UNIT * (self._size + float(np.abs(g).max()))
        return self._squares_y - torch.as_tensor(g, device=self.x.device), slack

    def _found(self, offset: Tensor, count: int, slack: float, top: Tensor | None) -> _Found:
        found = _Found(len(self.x), min(count, len(self.y)), self.x.device)
        # On a device whole blocks are faster than to choose columns, which waits for each cell.
        is_local = is_host(self.x.device) and self._share(offset, count, slack) <= _SHARE
        blocks = self._by_cells if is_local else self._by_blocks
        for rows, cols, costs in blocks(offset, count, slack):
            found.add(rows, cols, costs, top)
        return found

    def _by_blocks(
        self, offset: Tensor, count: int, slack: float
    ) -> Iterator[tuple[Tensor, None, Tensor]]:
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
        step = max(1, _BLOCK // (4 * len(self.y)))
        for start in range(0, len(self._cells), step):
            cells = self._cells[start : start + step]
            for cell, kept in zip(cells, self._eligible(cells, offset, count, slack), strict=True):
                cols = torch.nonzero(kept).squeeze(-1)
                costs = torch.addmm(
                    offset[cols], self.x[cell.points], self._targets[:, cols], alpha=-2
                )
                yield cell.points, cols, costs

    def _share(self, offset: Tensor, count: int, slack: float) -> float:
        """The part of the columns that a row of a typical cell has to look at."""
        if len(self.x) < 2 * _PROBES * _SMALL_CELL:
            return 1.0
        probes = self._cells[:: max(1, len(self._cells) // _PROBES)]
        return float(self._eligible(probes, offset, count, slack).double().mean())

    def _eligible(self, cells: list[_Cell], offset: Tensor, count: int, slack: float) -> Tensor:
        """Columns that may be the smallest for some point of the cell, (cells, m).

        With c the centre, r the radius and h_j = ‖y_j‖² − g_j − 2 ⟨c, y_j⟩, least at j*, column j
        beats j* at a point within r of c only if h_j − h_j* ≤ 2 r ‖y_j − y_j*‖.
        """
        centres = torch.stack([cell.centre for cell in cells])
        radii = torch.tensor([cell.radius for cell in cells]).to(centres)[:, None]
        at_centre = torch.addmm(offset, centres, self._targets, alpha=-2)
        lowest = at_centre.topk(min(count, len(offset)), dim=-1, largest=False)
        best = lowest.indices[:, 0]
        moved = torch.addmm(self._squares_y, self.y[best], self._targets, alpha=-2)
        moved += self._squares_y[best, None] + 4 * slack
        reach = moved.clamp_(min=0).sqrt_().mul_(2 * radii)
        # At least `count` columns stay: those with the smallest costs at the centre.
        reach.clamp_(min=lowest.values[:, -1:] - lowest.values[:, :1])
        return at_centre <= reach.add_(lowest.values[:, :1] + 4 * slack)

    @cached_property
    def _cells(self) -> list[_Cell]:
        points = to_host(self.x)
        cells = []
        # In the plane, columns at centres and columns left to look at are then equally many.
        size = max(_SMALL_CELL, round(0.5 * math.sqrt(len(self.y))))
        order, starts = halved(points, size)
        for which in np.split(order, starts[1:]):
            inside = points[which]
            centre = (inside.min(0) + inside.max(0)) / 2
            radius = float(np.sqrt(np.square(inside - centre).sum(-1).max())) * (1 + 1e-12)
            index = torch.as_tensor(which, device=self.x.device)
            cells.append(_Cell(index, torch.as_tensor(centre, device=self.x.device), radius))
        return cells


def _as_arrays(
    minima: Tensor, rows: Tensor, cols: Tensor, values: Tensor, slack: float
) -> RowMinima:
    first, second, third, fourth = (to_host(t) for t in (minima, rows, cols, values))
    return RowMinima(first, second, third, fourth, slack)


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
        many = min(self._count, costs.shape[1])
        few = costs.topk(many, dim=-1, largest=False)
        chosen = few.indices if cols is None else cols[few.indices]
        if top is not None:
            chosen = torch.where(few.values < top[rows, None], chosen, -1)
        self._cols[rows, :many], self._values[rows, :many] = chosen, few.values

    def arcs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, columns and values of all arcs."""
        rows, place = torch.nonzero(self._cols >= 0, as_tuple=True)
        return rows, self._cols[rows, place], self._values[rows, place]


def halved(points: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Groups of at most `size` neighbours, by halving along the widest axis of each group.

    Returns:
        The points in an order in which groups stand together, and where each group starts.
    """
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
