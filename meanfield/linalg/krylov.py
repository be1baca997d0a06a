"""Norms of a batch of linear maps by Golub–Kahan–Lanczos, from random starts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meanfield.linalg.bidiagonalisation import Bidiagonalisation, image
from meanfield.linalg.evidence import MISS, NormEstimate, met, start_tangent, upper_end
from meanfield.linalg.linear_map import LinearMap
from meanfield.linalg.vectors import lengths, normalised, random_vectors

__all__ = ["krylov_norm"]

# After an upper end that was still too far, so many more steps, as a share of those made, pass
# before it is computed again.
_LOOK_AGAIN = 1.05
# The angle of the start is taken this much wider than it is with probability 0.999, so that
# rounding in the upper end (at worst the square root of the unit roundoff) is covered.
_SLACK = 1.001
# Bytes that the two bases may take before the iteration restarts.
_BASIS_BYTES = 2**32
# Vectors that each basis may always have, however long they are.
_LEAST_BASIS = 8
# Entries of the small matrices of a batch that are decomposed at once (float64: 8 MiB).
_SMALL_ENTRIES = 2**20


@torch.no_grad()
def krylov_norm(
    linear_map: LinearMap,
    *,
    rtol: float,
    upper_rtol: float,
    max_steps: int,
    generator: torch.Generator | None,
    max_basis: int | None = None,
    only_largest: bool = False,
) -> NormEstimate:
    """Norms of the whole batch at once, see `meanfield.linalg.operator_norm`.

    With `only_largest`, of the maps along the last batch axis only those have to converge that
    may be the largest as far as their residuals tell.
    """
    start = _random_start(linear_map, generator)
    tangent = _SLACK * start_tangent(linear_map.columns, MISS)
    process = Bidiagonalisation(linear_map, start)
    rank = min(linear_map.rows, linear_map.columns)
    most, next_look = max_basis or _fitting_basis(linear_map), 0
    while True:
        if process.size >= most:
            process.restart(keep=most // 2)
        process.advance()
        sigma, residual, gap, coefficients = _top_triples(process)
        candidates = _may_be_largest(linear_map, sigma, residual, only_largest)
        reached = met(_error(residual, gap), residual, rtol)
        # A space with one step more than the rank can be is exhausted.
        ended = process.products >= max_steps or rank < process.products < most
        if ended or (process.products >= next_look and bool(reached[candidates].all())):
            upper = upper_end(sigma, process.cycles, tangent)
            near = _near(upper, sigma, upper_rtol, linear_map, only_largest)
            if ended or bool(near.all()):
                break
            next_look = math.ceil(_LOOK_AGAIN * process.products)
    v = normalised(process.right.combine(coefficients))[0]
    value, residual = _measured(linear_map, v)
    error, shape = _error(residual, gap), linear_map.batch_shape
    return NormEstimate(
        value=value.reshape(shape),
        residual=residual.reshape(shape),
        error=error.reshape(shape),
        upper=torch.maximum(upper, value).reshape(shape),
        miss=MISS,
        converged=(met(error, residual, rtol) & near).reshape(shape),
        n_matvecs=process.products + 1,
        direction=v.reshape(*shape, *linear_map.in_shape),
    )


def _random_start(linear_map: LinearMap, generator: torch.Generator | None) -> Tensor:
    """Unit vectors (b, n·d), uniform on the sphere."""
    draw = random_vectors(
        math.prod(linear_map.batch_shape),
        linear_map.columns,
        dtype=linear_map.dtype,
        device=linear_map.device,
        generator=generator or torch.Generator().manual_seed(0),
    )
    return normalised(draw)[0]


def _fitting_basis(linear_map: LinearMap) -> int:
    """Vectors on either side that fit in memory."""
    entries = math.prod(linear_map.batch_shape) * (linear_map.rows + linear_map.columns)
    return max(_LEAST_BASIS, _BASIS_BYTES // max(1, entries * linear_map.dtype.itemsize))


def _measured(linear_map: LinearMap, v: Tensor) -> tuple[Tensor, Tensor]:
    """σ = ‖Jv‖ and ‖Jᵀu − σv‖/σ with u = Jv/σ, from two products of their own.

    What the iteration believes rests on the orthogonality of its bases; this does not.
    """
    u, sigma = normalised(image(linear_map, v))
    defect = lengths(image(linear_map.T, u) - sigma[:, None] * v)
    # The image of 0 is exact.
    return sigma, torch.where(sigma > 0, defect / torch.where(sigma > 0, sigma, 1.0), 0.0)


def _top_triples(process: Bidiagonalisation) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """σ, relative residual, relative gap, coefficients of v in the right basis; per map."""
    # A part of the batch at a time: many small matrices at once would outweigh the bases.
    size = max(1, _SMALL_ENTRIES // process.size**2)
    starts = range(0, max(process.batch, 1), size)
    parts = [_top_of_part(process, slice(i, i + size)) for i in starts]
    dtype = process.map.dtype
    sigma, residual, gap, coefficients = (
        torch.cat(column).to(dtype) for column in zip(*parts, strict=True)
    )
    return sigma, residual, gap, coefficients


def _top_of_part(process: Bidiagonalisation, part: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, values, right, residuals = process.triples(part)
    gap = torch.zeros_like(values[:, 0])
    if process.size > 2:
        scale = torch.where(values[:, 0] > 0, values[:, 0], 1.0)
        # The second singular value may lie above the second Ritz value by that one's residual.
        second = (values[:, 1] * (1 + residuals[:, 1]) / scale).square()
        gap = (1 - second).clamp_min(0.0)
    return values[:, 0], residuals[:, 0], gap, right[:, 0, :].clone()


def _error(residual: Tensor, gap: Tensor) -> Tensor:
    """The smaller of the residual r and r²/(2·gap), gap = 1 − σ₂²/σ₁² (Kato–Temple)."""
    temple = 0.5 * residual.square() / gap.clamp_min(torch.finfo(gap.dtype).tiny)
    return torch.where(gap > 0, torch.minimum(residual, temple), residual)


def _may_be_largest(
    linear_map: LinearMap, sigma: Tensor, residual: Tensor, only_largest: bool
) -> Tensor:
    """Which maps of the flattened batch have to converge, see `krylov_norm`."""
    if not only_largest:
        return torch.ones_like(sigma, dtype=torch.bool)
    along = (-1, linear_map.batch_shape[-1])
    best = sigma.reshape(along).amax(-1, keepdim=True)
    return (sigma * (1 + residual)).reshape(along).ge(best).flatten()


def _near(
    upper: Tensor, sigma: Tensor, upper_rtol: float, linear_map: LinearMap, only_largest: bool
) -> Tensor:
    """Whether the upper ends are near enough; of blocks, the largest end and the largest σ."""
    if not only_largest:
        return upper <= (1 + upper_rtol) * sigma
    along = (-1, linear_map.batch_shape[-1])
    best, most = (x.reshape(along).amax(-1, keepdim=True) for x in (sigma, upper))
    return (most <= (1 + upper_rtol) * best).expand(along).reshape(-1)
