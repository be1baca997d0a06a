"""Features of the atoms in coordinates in which bounds in a ball are computed, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from meanfield.attention.kernels.kernel import Motion
from meanfield.attention.weights import Block, Weights
from meanfield.linalg.vectors import units

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
        raw_pulled: |yᵢⱼ| without E, from the origin; None where E is 1.
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
        linear: whether Aⱼ and Bᵢ are the same for all atoms.
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
        where = (par, weights.points, weights.positions)
        key_slopes, query_slopes = kernel.key_slopes(*where), kernel.query_slopes(*where)
        if key_slopes is None or query_slopes is None:
            raise NotImplementedError(
                "ball_bounds: expected a kernel that says how its queries and keys move, got "
                f"{kernel}; give it key_slopes, query_slopes and motion"
            )
        norm_A = norm(to_keys) * norm(to_queries)
        linear = _is_constant(key_slopes) and _is_constant(query_slopes)
        if linear:
            # One matrix between all queries and keys.
            key_slopes, query_slopes = key_slopes[..., :1, :, :], query_slopes[..., :1, :, :]
            between = (key_slopes.mT @ query_slopes)[..., 0, :, :]
            norm_A = norm(to_keys @ between @ to_queries.mT)
        return cls(
            weights=weights,
            unit=unit,
            values=values,
            value=value,
            norm_V=norm(torch.linalg.qr(value.mT)[1]),
            norm_A=norm_A,
            linear=linear,
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
        seen = self.weights
        found = seen.kernel.motion(seen.parameters, seen.points, seen.positions, eps)
        if found is None:
            raise NotImplementedError(
                "ball_bounds: expected a kernel that says how far its features move in a ball, "
                f"got {seen.kernel}; give it a method `motion`"
            )
        # Absent atoms say nothing of how far the others' scores may move.
        alive = seen.alive[..., None, :]
        keys = Motion(*(torch.where(alive, part, 0.0) for part in found[1]))
        return found[0], keys

    def rows(self, block: Block, p: Tensor, gain: Tensor | None) -> RowFrames:
        """The vectors of these rows; p and the gain E are ``(*batch, H, rows, n)``."""
        q, k = self.weights.features.q[..., block.rows, :], self.weights.features.k
        turned = torch.einsum("...hra,...hnak->...hrnk", q, self.key_slopes)
        raw_turned = (turned @ self.to_keys.mT[:, None]).norm(dim=-1)
        image = None
        if gain is None and turned.shape[-2] == 1:
            key = self.weights.parameters.per_head(self.weights.parameters.key)
            image = turned[..., 0, :] @ (self.value @ key.mT).mT
        slopes = self.query_slopes
        slopes = slopes if slopes.shape[-3] == 1 else slopes[..., block.rows, :, :]
        pulled = k[..., None, :, :] @ (slopes @ self.to_queries.mT[:, None])
        # |kⱼ − k̄ᵢ| from differences, as expanding the square would cancel.
        keys = torch.cdist(p @ k, k, compute_mode="donot_use_mm_for_euclid_dist")
        raw_pulled, scaled = None, raw_turned
        if gain is not None:
            raw_pulled, keys = pulled.norm(dim=-1), k.norm(dim=-1)[..., None, :]
            pulled, scaled = gain[..., None] * pulled, gain * raw_turned
        lengths = q.norm(dim=-1)
        return RowFrames(scaled, image, pulled, raw_turned, raw_pulled, keys, lengths)


def covariance(p: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Σⱼ Pᵢⱼ (xᵢⱼ − x̄ᵢ)(yᵢⱼ − ȳᵢ)ᵀ of each row, ``(*batch, H, rows, x, y)``; absent rows give 0.

    Args:
        p: P, ``(*batch, H, rows, n)``.
        one: x, ``(*batch, H, rows or 1, n, x)``.
        other: y, likewise.
    """
    return (p[..., None] * centred(p, one)).mT @ centred(p, other)


def centred(p: Tensor, x: Tensor) -> Tensor:
    """xᵢⱼ − x̄ᵢ for x ``(*batch, H, rows or 1, n, ·)``."""
    if x.shape[-3] == 1:
        return x - (p @ x.squeeze(-3))[..., None, :]
    return x - p[..., None, :] @ x


def _is_constant(slopes: Tensor) -> bool:
    return bool((slopes == slopes[..., :1, :, :]).all())


def norm(matrices: Tensor) -> Tensor:
    """Spectral norms over the last two axes."""
    return torch.linalg.matrix_norm(matrices, 2)
