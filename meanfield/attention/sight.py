"""Who sees whom and how much, a block of rows at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from meanfield.attention.kernels import Features, Kernel
from meanfield.attention.parameters import AttentionParameters
from meanfield.attention.streaming import last_seen, row_parts
from meanfield.checks import describe
from meanfield.measures import ParticleMeasure

__all__ = ["Block", "Sight"]


class Block(NamedTuple):
    """A block of rows and the columns that any of them may see."""

    rows: slice
    columns: slice


@dataclass(frozen=True, eq=False)
class Sight:
    """The atoms of a measure as a layer sees them, sorted by position when the layer is causal.

    Attributes:
        parameters: of the layer.
        kernel: of the layer.
        points: ``(*batch, n, d)``.
        features: of the atoms; score biases are one more coordinate of queries and keys.
        log_weights: ``(*batch, n)``.
        positions: ``(*batch, n)``, or None where nothing depends on them.
        causal: whether a row sees only the columns whose position is at most its own.
        order: the permutation ``(*batch, n)`` that sorted the atoms, or None.
        potentials: added to the log-weights of the columns, per head ``(*batch, H, n)``, or None.
    """

    parameters: AttentionParameters
    kernel: Kernel
    points: Tensor
    features: Features
    log_weights: Tensor
    positions: Tensor | None
    causal: bool
    order: Tensor | None
    potentials: Tensor | None = None

    @classmethod
    def of(
        cls,
        parameters: AttentionParameters,
        kernel: Kernel,
        mu: ParticleMeasure,
        *,
        causal: bool,
        centred: bool,
    ) -> Sight:
        """What `mu` offers to attention with these parameters.

        Args:
            parameters: of the layer.
            kernel: of the layer.
            mu: the measure.
            causal: whether to sort the atoms by position.
            centred: whether keys and values may stay measured from their centres: a shift of
                all keys changes no attention, and attention sums to one.
        """
        points, logs, positions, order = mu.points, mu.log_weights, mu.positions, None
        if causal:
            assert positions is not None
            positions, order = positions.sort(dim=-1, stable=True)
            points = points.gather(-2, order[..., None].expand(points.shape))
            logs = logs.gather(-1, order)
        elif not kernel.needs_positions:
            positions = None
        features = kernel.features(parameters, points, positions)
        _check(features, kernel, points)
        if not centred:
            features = _uncentred(features)
        return cls(
            parameters, kernel, points, _folded(features, 1.0), logs, positions, causal, order
        )

    def queries(self, points: Tensor, positions: Tensor | None) -> Tensor:
        """Queries of other points at this measure, ``(*batch, H, m, k)``."""
        features = self.kernel.features(self.parameters, points, positions)
        return _folded(features, 1.0).q

    @property
    def n(self) -> int:
        """Number of atoms."""
        return self.points.shape[-2]

    @property
    def head_logs(self) -> Tensor:
        """Log-weights and potentials of the columns, ``(*batch, H or 1, n)``."""
        logs = self.log_weights[..., None, :]
        return logs if self.potentials is None else logs + self.potentials

    @property
    def limits(self) -> Tensor | None:
        """Positions that limit sight: those of a causal layer."""
        return self.positions if self.causal else None

    # --- the tangent of the features ---

    def push(self, displacement: Tensor) -> Features:
        """q̇, k̇, v̇ of displacements ``(*batch, n, d)`` in the order here."""
        tangents = self.kernel.push(self.parameters, self.points, self.positions, displacement)
        return _folded(tangents, 0.0)

    def pull(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The transpose of `push`."""
        bias, width = None, self.features.q.shape[-1]
        if self.features.b is not None:
            bias, width = k[..., -1], width - 1
        cotangents = Features(q[..., :width], k[..., :width], v, bias)
        return self.kernel.pull(self.parameters, self.points, self.positions, cotangents)

    # --- blocks of rows ---

    def blocks(
        self, row_positions: Tensor | None, n_rows: int, size: int | None
    ) -> Iterator[Block]:
        """Blocks of rows; columns later than every row of a block are left out.

        Args:
            row_positions: positions of the rows of a causal layer ``(*batch, n_rows)``, in any
                order, but sorted rows skip more.
            n_rows: number of rows.
            size: rows in a block; from the memory of a block if None.
        """
        if size is None:
            parts = row_parts(math.prod(self.features.k.shape[:-2]) * self.n, n_rows)
        else:
            starts = range(0, n_rows, size)
            parts = (slice(start, min(start + size, n_rows)) for start in starts)
        for rows in parts:
            yield Block(rows, slice(0, last_seen(row_positions, self.limits, rows, self.n)))

    def column_logs(self, block: Block) -> Tensor:
        """log aⱼ of a block, −∞ where i does not see j; broadcastable to (*batch, H, rows, ·)."""
        logs = self.head_logs[..., None, block.columns]
        if self.limits is not None:
            seen = self.limits[..., None, block.columns] <= self.limits[..., block.rows, None]
            logs = logs.masked_fill(~seen[..., None, :, :], -math.inf)
        return logs

    def scores(self, queries: Tensor, positions: Tensor | None) -> Tensor:
        """The scores of all rows ``(*batch, H, m, k)`` and atoms at once, (*batch, H, m, n)."""
        scores = queries @ self.features.k.mT
        if self.kernel.activation is not None:
            scores = self.kernel.activation(scores)
        if positions is None or self.positions is None or self.bias_function is None:
            return scores
        bias = self.bias_function(positions, self.positions)
        return scores if bias is None else scores + bias

    def position_bias(self, block: Block) -> Tensor | None:
        """What positions add to the scores of a block, or None."""
        if self.positions is None or self.bias_function is None:
            return None
        return self.bias_function(
            self.positions[..., block.rows], self.positions[..., block.columns]
        )

    @cached_property
    def bias_function(self) -> Callable[[Tensor, Tensor], Tensor | None] | None:
        """The kernel's position bias as a function of positions; None if it has none."""
        if self.positions is None:
            return None
        bias = partial(self.kernel.position_bias, self.parameters)
        first = self.positions[..., :1]
        return None if bias(first, first) is None else bias

    # --- the order of the measure and that of the positions ---

    def in_place(self) -> Sight:
        """The same without its order if the atoms came in order, as sequences do.

        To move every row there and back takes a share of every product. This looks at the numbers,
        which code that is being traced cannot.
        """
        if self.order is None or bool((self.order[..., 1:] < self.order[..., :-1]).any()):
            return self
        return replace(self, order=None)

    def sort(self, per_particle: Tensor) -> Tensor:
        """Rows ``(*batch, n, d)`` in the order of the atoms here."""
        if self.order is None:
            return per_particle
        return per_particle.gather(-2, self.order[..., None].expand(per_particle.shape))

    def unsort(self, per_particle: Tensor) -> Tensor:
        """Rows ``(*batch, n, d)`` back in the order of the measure."""
        if self.order is None:
            return per_particle
        index = self.order[..., None].expand(per_particle.shape)
        return torch.empty_like(per_particle).scatter(-2, index, per_particle)

    def part(self, part: slice) -> Sight:
        """A slice of the flattened batch."""

        def pick(tensor: Tensor | None, event: int) -> Tensor | None:
            return None if tensor is None else tensor.reshape(-1, *tensor.shape[-event:])[part]

        f = self.features
        q, k, v, centre = (pick(t, 3) for t in (f.q, f.k, f.v, f.v_centre))
        b, points = pick(f.b, 2), pick(self.points, 2)
        logs = pick(self.log_weights, 1)
        assert q is not None and k is not None and v is not None
        assert points is not None and logs is not None
        return replace(
            self,
            points=points,
            features=Features(q, k, v, b, None, centre),
            log_weights=logs,
            positions=pick(self.positions, 1),
            order=pick(self.order, 1),
            potentials=pick(self.potentials, 2),
        )

    def unsort_dense(self, matrix: Tensor, part: slice) -> Tensor:
        """Matrices (b, n, ·, n, ·) of a slice of the batch back in the order of the measure."""
        if self.order is None:
            return matrix
        place = self.order.reshape(-1, self.n)[part].argsort(-1)
        batch = torch.arange(len(matrix), device=matrix.device)[:, None]
        return matrix[batch, place].movedim(3, 1)[batch, place].movedim(1, 3)


def _uncentred(f: Features) -> Features:
    """Keys and values measured from the origin."""
    f = f.whole_keys()
    return f if f.v_centre is None else f._replace(v=f.v + f.v_centre, v_centre=None)


def _check(features: Features, kernel: Kernel, points: Tensor) -> None:
    """What a kernel of the user's own has given."""
    name = f"{type(kernel).__name__}.features"
    if not isinstance(features, Features):
        raise TypeError(f"{name}: expected kernels.Features(q, k, v), got {describe(features)}")
    for letter in "qkv":
        found = getattr(features, letter)
        if found.ndim != points.ndim + 1 or found.shape[-2] != points.shape[-2]:
            raise ValueError(
                f"{name}: expected {letter} of shape (*batch, heads, {points.shape[-2]}, width), "
                f"got {tuple(found.shape)}"
            )


def _folded(f: Features, one: float) -> Features:
    """Score biases as one coordinate more: ⟨(q, 1), (k, b)⟩, and for tangents ⟨(q̇, 0), (k̇, ḃ)⟩."""
    if f.b is None:
        return f
    q = torch.cat([f.q, torch.full_like(f.q[..., :1], one)], -1)
    k = torch.cat([f.k, f.b[..., None]], -1)
    return f._replace(q=q, k=k)
