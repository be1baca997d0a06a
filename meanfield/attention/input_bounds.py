"""Features of the atoms in coordinates in which bounds in a ball are computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from meanfield.attention.weights import Block, Weights

__all__ = ["Frames", "row_blocks"]

_CHUNK_ENTRIES = 2**22  # of one array (*batch, H, rows, n, k) at a time


def row_blocks(weights: Weights) -> Iterator[Block]:
    """Blocks of rows with all columns, small enough for a vector per entry."""
    features, n = weights.features, weights.n
    width = max(features.k.shape[-1], features.v.shape[-1])
    step = max(1, _CHUNK_ENTRIES // max(1, features.k.shape[:-1].numel() * width))
    for start in range(0, n, step):
        yield Block(slice(start, min(start + step, n)), slice(0, n))


@dataclass(frozen=True, eq=False)
class Frames:
    """Features of the atoms in orthonormal coordinates per head: lengths are those in R^d.

    Attributes:
        values: R_W v for W = Q_W R_W, ``(*batch, H, n, v)``.
        pulled: Q̃ᵀk, whose covariance with the values is the derivative of the field,
            ``(*batch, H, n, k)``.
        turned: u = Kᵀq, ``(*batch, H, n, k)``.
        image: R_W V u, ``(*batch, H, n, v)``.
        value: R_W V, (H, v, d).
        norm_V: ‖W V‖, (H,).
        norm_A: ‖KᵀQ̃‖, (H,).
    """

    values: Tensor
    pulled: Tensor
    turned: Tensor
    image: Tensor
    value: Tensor
    norm_V: Tensor
    norm_A: Tensor

    @classmethod
    def of(cls, weights: Weights) -> Frames:
        """From the R of QR factorisations of the projections: the orthonormal factor drops out."""
        par, (q, k, values) = weights.parameters, weights.features[:3]
        query, key = par.scale[:, None, None] * par.query, par.per_head(par.key)
        to_keys, to_queries = (torch.linalg.qr(m.mT)[1] for m in (key, query))
        value = par.per_head(par.value)
        if par.output is not None:
            out = torch.linalg.qr(par.output)[1]
            value, values = out @ value, values @ out.mT
        return cls(
            values=values,
            pulled=k @ to_queries.mT,
            turned=q @ to_keys.mT,
            image=q @ (value @ key.mT).mT,
            value=value,
            norm_V=norm(torch.linalg.qr(value.mT)[1]),
            norm_A=norm(to_keys @ to_queries.mT),
        )


def covariance(p: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Σⱼ Pᵢⱼ (xⱼ − x̄)(yⱼ − ȳ)ᵀ of each row, ``(*batch, H, rows, x, y)``; absent rows give 0."""

    def centred(x: Tensor) -> Tensor:
        return x[..., None, :, :] - (p @ x)[..., :, None, :]

    return (p[..., None] * centred(one)).mT @ centred(other)


def norm(matrices: Tensor) -> Tensor:
    """Spectral norms over the last two axes."""
    return torch.linalg.matrix_norm(matrices, 2)
