"""Who sees whom and how much, a block of rows at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from meanfield.attention.kernels import Kernel
from meanfield.attention.parameters import AttentionParameters
from meanfield.attention.streaming import last_seen, row_parts
from meanfield.measures import ParticleMeasure

__all__ = ["Block", "Interaction"]


class Block(NamedTuple):
    """A block of rows and the columns that any of them may see."""

    rows: slice
    columns: slice


@dataclass(frozen=True, eq=False)
class Interaction:
    """The atoms of a measure as a layer sees them, sorted by position when the layer is causal.

    Attributes:
        keys: (*batch, H, n, k), about a centre.
        values: (*batch, H, n, v), about `centre`.
        centre: (*batch, H, 1, v).
        log_weights: (*batch, n).
        positions: (*batch, n), increasing, or None when every atom sees every other.
        order: the permutation (*batch, n) that sorted the atoms, or None.
    """

    keys: Tensor
    values: Tensor
    centre: Tensor
    log_weights: Tensor
    positions: Tensor | None
    order: Tensor | None

    @classmethod
    def of(
        cls, parameters: AttentionParameters, kernel: Kernel, mu: ParticleMeasure, causal: bool
    ) -> Interaction:
        """What `mu` offers to attention with these parameters."""
        points, logs, positions, order = mu.points, mu.log_weights, None, None
        if causal:
            assert mu.positions is not None
            positions, order = mu.positions.sort(dim=-1, stable=True)
            points = points.gather(-2, order[..., None].expand(points.shape))
            logs = logs.gather(-1, order)
        projections = kernel.project(parameters, points)
        return cls(
            projections.keys, projections.values, projections.centre, logs, positions, order
        )

    def in_place(self) -> Interaction:
        """The same without its order if the atoms came in order, as sequences do.

        To move every row there and back takes a share of every product. This looks at the numbers,
        which code that is being traced cannot.
        """
        if self.order is None or bool((self.order[..., 1:] < self.order[..., :-1]).any()):
            return self
        return replace(self, order=None)

    @property
    def n(self) -> int:
        """Number of atoms."""
        return self.keys.shape[-2]

    def blocks(
        self, row_positions: Tensor | None, n_rows: int, size: int | None
    ) -> Iterator[Block]:
        """Blocks of rows; columns later than every row of a block are left out.

        Args:
            row_positions: (*batch, n_rows); in any order, but sorted rows skip more.
            n_rows: number of rows.
            size: rows in a block; from the memory of a block if None.
        """
        if size is None:
            per_row = math.prod(self.keys.shape[:-2]) * self.n
            parts = row_parts(per_row, n_rows)
        else:
            starts = range(0, n_rows, size)
            parts = (slice(start, min(start + size, n_rows)) for start in starts)
        for rows in parts:
            yield Block(rows, slice(0, last_seen(row_positions, self.positions, rows, self.n)))

    def logits(self, queries: Tensor, row_positions: Tensor | None, block: Block) -> Tensor:
        """⟨qᵢ, kⱼ⟩ + log aⱼ of the rows of a block over its columns, −inf where i does not see j.

        Shape (*batch, H, rows, columns).
        """
        logits = queries[..., block.rows, :] @ self.keys[..., block.columns, :].mT
        logits = logits.add_(self.log_weights[..., None, None, block.columns])
        if self.positions is not None and row_positions is not None:
            seen = self.positions[..., None, block.columns] <= row_positions[..., block.rows, None]
            logits = logits.masked_fill_(~seen[..., None, :, :], -math.inf)
        return logits

    def sort(self, per_particle: Tensor) -> Tensor:
        """Rows (*batch, n, d) in the order of the atoms here."""
        if self.order is None:
            return per_particle
        return per_particle.gather(-2, self.order[..., None].expand(per_particle.shape))

    def unsort(self, per_particle: Tensor) -> Tensor:
        """Rows (*batch, n, d) back in the order of the measure."""
        if self.order is None:
            return per_particle
        index = self.order[..., None].expand(per_particle.shape)
        return torch.empty_like(per_particle).scatter(-2, index, per_particle)

    def unsort_dense(self, matrix: Tensor) -> Tensor:
        """Matrices (b, n, ·, n, ·) back in the order of the measure, on both sides."""
        if self.order is None:
            return matrix
        place = self.order.argsort(-1)
        batch = torch.arange(len(matrix), device=matrix.device)[:, None]
        return matrix[batch, place].movedim(3, 1)[batch, place].movedim(1, 3)

    def part(self, part: slice) -> Interaction:
        """A slice of the flattened batch."""

        def pick(tensor: Tensor | None, event: int) -> Tensor | None:
            return None if tensor is None else tensor.reshape(-1, *tensor.shape[-event:])[part]

        keys, values, centre = (pick(t, 3) for t in (self.keys, self.values, self.centre))
        logs = pick(self.log_weights, 1)
        assert keys is not None and values is not None and centre is not None
        assert logs is not None
        return Interaction(
            keys, values, centre, logs, pick(self.positions, 1), pick(self.order, 1)
        )
