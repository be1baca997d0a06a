"""Features of the atoms in coordinates in which bounds in a ball are computed, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from meanfield.attention.kernels.kernel import Motion
from meanfield.attention.weights import Block, Weights
from meanfield.linalg.vectors import finite, lengths, units

_CHUNK_ENTRIES = 2**22  # of one array (*batch, H, rows, n, k) at a time


def row_blocks(weights: Weights) -> Iterator[Block]:
    """Blocks of rows with all columns, small enough for a vector per entry."""
    features, n = weights.features, weights.n
    width = max(features.k.shape[-1], features.v.shape[-1])
    step = max(1, _CHUNK_ENTRIES // max(1, features.k.shape[:-1].numel() * width))
    for start in range(0, n, step):
        yield Block(slice(start, min(start + step, n)), slice(0, n))


@dataclass(frozen=True, eq=False)
class RowFrames:
    """The vectors of a block of rows, in orthonormal coordinates per head.

    With E the derivative of log aⱼψ in ⟨qᵢ, kⱼ⟩ (1 without a cap), Dq and Dk those of queries and
    keys: uᵢⱼ = EDkⱼᵀqᵢ and yᵢⱼ = EDqᵢᵀkⱼ.

    Attributes:
        turned: |uᵢⱼ|, ``(*batch, H, rows, n or 1)``.
        image: R_W V u, ``(*batch, H, rows, v)``, where u does not depend on j; else None.
        pulled: yᵢⱼ, ``(*batch, H, rows or 1, n, k)``.
        raw_turned: |uᵢⱼ| without E.
        raw_pulled: |yᵢⱼ| without E, from the origin; None where E is 1 and scores of a row may
            shift together.
        keys: |kⱼ − k̄ᵢ|, or |kⱼ| where E is not 1, ``(*batch, H, rows, n)``.
        queries: |qᵢ|, ``(*batch, H, rows)``.
    """

    turned: Tensor
    image: Tensor | None
    pulled: Tensor
    raw_turned: Tensor
    raw_pulled: Tensor | None
    keys: Tensor
    queries: Tensor


@dataclass(frozen=True, eq=False)
class Frames:
    """Features of the atoms in orthonormal coordinates per head: lengths are those in R^d.

    A null key is one more column, of key and value 0, that never moves.

    Those of values are over a unit, a power of two near the largest entry of all W V: squares of
    very small values would be 0, and with them bounds that are linear in the values.

    Attributes:
        weights: of the layer.
        unit: of the values, a scalar.
        values: R_W v for W = Q_W R_W, ``(*batch, H, n, v)``.
        value: R_W V, (H, v, d).
        norm_V: ‖W V‖, (H,).
        norm_A: ‖KᵀAᵀBQ̃‖, ``(*batch, H)``, or ‖K‖‖Q̃‖ where A or B depends on the atom.
        to_keys: R of Kᵀ, (H, k, k).
        to_queries: R of Q̃ᵀ, (H, k, k).
        linear: whether AⱼᵀBᵢ is the same for all atoms.
        bends: see `Kernel.bends`.
        key_slopes: Aⱼ with Dkⱼ = AⱼK, ``(*batch, H or 1, n or 1, k′, k)``.
        query_slopes: Bᵢ with Dqᵢ = BᵢQ̃, likewise.
    """

    weights: Weights
    unit: Tensor
    values: Tensor
    value: Tensor
    norm_V: Tensor
    norm_A: Tensor
    to_keys: Tensor
    to_queries: Tensor
    linear: bool
    bends: tuple[Tensor, Tensor] | None
    key_slopes: Tensor
    query_slopes: Tensor

    @classmethod
    def of(cls, weights: Weights) -> Frames:
        """From the R of QR factorisations of the projections: the orthonormal factor drops out."""
        par, kernel = weights.parameters, weights.kernel
        query, key = par.scale[:, None, None] * par.query, par.per_head(par.key)
        to_keys, to_queries = (torch.linalg.qr(m.mT)[1] for m in (key, query))
        value, values = par.per_head(par.value), weights.features.v
        if par.output is not None:
            out = torch.linalg.qr(par.output)[1]
            value, values = out @ value, values @ out.mT
        unit = units(value.flatten())[0]
        value, values = value / unit, values / unit
        slopes = kernel.feature_slopes(weights.at)
        if slopes is None:
            raise NotImplementedError(
                "ball_bounds: expected a kernel that says how its queries and keys move, got "
                f"{kernel}; give it feature_slopes and motion"
            )
        key_slopes, query_slopes = slopes
        norm_A, bends = norm(to_keys) * norm(to_queries), kernel.bends(par)
        constant = _is_constant(key_slopes) and _is_constant(query_slopes)
        if constant:
            key_slopes, query_slopes = key_slopes[..., :1, :, :], query_slopes[..., :1, :, :]
        linear = constant or bends is not None
        if linear:
            # One matrix between all queries and keys.
            between = key_slopes[..., 0, :, :].mT @ query_slopes[..., 0, :, :]
            norm_A = norm(finite(to_keys @ between @ to_queries.mT, "the matrix of the scores"))
        if weights.rows.sink is not None:
            values = _with_null(values, -2)
        return cls(
            weights=weights,
            unit=unit,
            values=values,
            value=value,
            norm_V=norm(torch.linalg.qr(value.mT)[1]),
            norm_A=norm_A,
            linear=linear,
            bends=bends,
            to_keys=to_keys,
            to_queries=to_queries,
            key_slopes=key_slopes,
            query_slopes=query_slopes,
        )

    def motion(self, eps: Tensor) -> tuple[Motion, Motion]:
        """How queries and keys may move, see `Kernel.motion`.

        Raises:
            NotImplementedError: the kernel does not say.
        """
        kernel = self.weights.kernel
        found = kernel.motion(self.weights.at, eps)
        if found is None:
            raise NotImplementedError(
                "ball_bounds: expected a kernel that says how far its features move in a ball, "
                f"got {kernel}; give it a method `motion`"
            )
        # Absent atoms say nothing of how far the others' scores may move.
        alive = self.weights.alive[..., None, :]
        keys = Motion(*(torch.where(alive, part, 0.0) for part in found[1]))
        return found[0], keys

    def log_p_and_gain(self, block: Block) -> tuple[Tensor, Tensor | None]:
        """log P, and E, the derivative of log aⱼψ in ⟨qᵢ, kⱼ⟩, with the column of a null key.

        None stands for an E of 1.
        """
        log_p, gain = self.weights.log_p(block), None
        if self.weights.scoring.has_gain:
            _, gain = self.weights.logits_and_gain(block, self.weights.products(block))
        if not self._sunk:
            return log_p, gain
        log_p = torch.cat([log_p, self.weights.log_p_of_sink(block)], -1)
        return log_p, None if gain is None else _with_null(gain, -1)

    def rows(self, block: Block, p: Tensor, gain: Tensor | None) -> RowFrames:
        """The vectors of these rows; p and the gain E are ``(*batch, H, rows, n)``."""
        q, k = self.weights.features.q[..., block.rows, :], self.weights.features.k
        turned = torch.einsum("...hra,...hnak->...hrnk", q, self.key_slopes)
        raw_turned = lengths(turned @ self.to_keys.mT[:, None])
        image = None
        if gain is None and turned.shape[-2] == 1:
            key = self.weights.parameters.per_head(self.weights.parameters.key)
            image = turned[..., 0, :] @ (self.value @ key.mT).mT
        if self._sunk:
            k = _with_null(k, -2)
            raw_turned = raw_turned if turned.shape[-2] == 1 else _with_null(raw_turned, -1)
        slopes = self.query_slopes
        slopes = slopes if slopes.shape[-3] == 1 else slopes[..., block.rows, :, :]
        pulled = k[..., None, :, :] @ (slopes @ self.to_queries.mT[:, None])
        # |kⱼ − k̄ᵢ| from differences, as expanding the square would cancel.
        keys = lengths(centred(p, k[..., None, :, :]))
        raw_pulled, scaled = None, raw_turned
        if gain is not None:
            raw_pulled, keys = lengths(pulled), lengths(k)[..., None, :]
            pulled, scaled = gain[..., None] * pulled, gain * raw_turned
        return RowFrames(scaled, image, pulled, raw_turned, raw_pulled, keys, lengths(q))

    def changes(
        self,
        block: Block,
        motion: tuple[Motion, Motion],
        vectors: RowFrames,
        eps: Tensor,
        seen: Tensor,
        pulled_away: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What the ball does to scores and their slopes: `own`, `turned_change`, `pulled_change`.

        Scores move by at most the first, but for a number of their row where E is 1.

        Args:
            block: the rows.
            motion: of queries and keys.
            vectors: of the rows.
            eps: ε, ``(..., *batch, 1, 1)``.
            seen: which columns a row sees.
            pulled_away: |yᵢⱼ − ȳᵢ|.
        """
        # What holds for all atoms has an axis of length 1.
        of_rows = (t if t.shape[-1] == 1 else t[..., block.rows] for t in motion[0])
        queries, keys = Motion(*of_rows), motion[1]
        norm_A, shifted = self.norm_A[..., None], vectors.raw_pulled is not None
        pulled = pulled_away if vectors.raw_pulled is None else vectors.raw_pulled
        as_query = eps[..., None] * (pulled + queries.bent[..., None] * vectors.keys)
        key_bent = keys.bent[..., None, :]
        if self._sunk:
            key_bent = _with_null(key_bent, -1)
        both = norm_A * eps * eps
        # The changes of u and y, with all keys seen in the place of one.
        u = keys.bent.amax(-1, keepdim=True) * vectors.queries
        y = queries.bent * torch.where(seen, vectors.keys, 0.0).amax(-1)
        if self.linear and not bool(queries.bent.any() | keys.bent.any()):
            u, y = u + norm_A * eps, y + norm_A * eps
        else:
            farthest = keys.moved.amax(-1, keepdim=True)
            both = queries.moved * farthest
            u = u + keys.steepest.amax(-1, keepdim=True) * queries.moved
            y = y + queries.steepest * farthest
        if self.bends is not None:
            query_bend, key_bend = (bend[:, None] * eps for bend in self.bends)
            u = u + key_bend
            if shifted or self._sunk:
                y, both = y + query_bend, both + (query_bend + key_bend) * eps / 2
            else:
                # The key's lies on one side of 0, and the query's is one number of the row.
                both = both + key_bend * eps / 4
        as_key = vectors.raw_turned + key_bent * vectors.queries[..., None]
        own = as_query + eps[..., None] * as_key + both[..., None]
        if self._sunk:
            own = torch.cat([own[..., :-1], as_query[..., -1:].expand_as(own[..., -1:])], -1)
        if vectors.raw_pulled is not None:
            bent = (self.weights.kernel.curvature * own).clamp_max(1.0)
            bent = torch.where(seen, bent, 0.0)
            u = u + (bent * vectors.raw_turned).amax(-1)
            y = y + (bent * vectors.raw_pulled).amax(-1)
        return own, u, y

    @property
    def _sunk(self) -> bool:
        return self.weights.rows.sink is not None


def centred(p: Tensor, x: Tensor) -> Tensor:
    """xᵢⱼ − x̄ᵢ for x ``(*batch, H, rows or 1, n, ·)``."""
    if x.shape[-3] == 1:
        return x - (p @ x.squeeze(-3))[..., None, :]
    return x - p[..., None, :] @ x


def _with_null(columns: Tensor, dim: int) -> Tensor:
    return torch.cat([columns, torch.zeros_like(columns.narrow(dim, 0, 1))], dim)


def _is_constant(slopes: Tensor) -> bool:
    return bool((slopes == slopes[..., :1, :, :]).all())


def norm(matrices: Tensor) -> Tensor:
    """Spectral norms over the last two axes."""
    return torch.linalg.matrix_norm(matrices, 2)
