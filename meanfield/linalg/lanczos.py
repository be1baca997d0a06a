"""Norms of a batch of linear maps by Golub–Kahan–Lanczos bidiagonalisation."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from meanfield.linalg.bidiagonalisation import Bidiagonalisation
from meanfield.linalg.evidence import MISS, NormEstimate, met, start_tangent, upper_end
from meanfield.linalg.maps import LinearMap
from meanfield.linalg.vectors import normalised

__all__ = ["lanczos_norm", "start_vectors"]

# An error this many times below what was asked for needs no second step to confirm it.
_ROOM = 4.0
# Steps between two looks at an upper end that is still too far, as a share of those made.
_LOOK_AGAIN = 1.05
# A start this much nearer to orthogonal is reckoned with, so that rounding in the upper end, which
# is the square root of the unit's at its worst, is covered. It changes the probability by as much.
_SLACK = 1.001
# Bytes that both bases may take before the iteration restarts, and the fewest vectors of each.
_BASIS_BYTES, _LEAST_BASIS = 2**32, 8
# Entries of the small matrices of a batch that are decomposed at once (8 MiB).
_SMALL_ENTRIES = 2**20


def lanczos_norm(
    linear_map: LinearMap,
    rtol: float,
    max_steps: int,
    generator: torch.Generator | None,
    *,
    upper_rtol: float | None = None,
    max_basis: int | None = None,
    only_largest: bool = False,
) -> NormEstimate:
    """Norms of the whole batch at once, see `meanfield.linalg.operator_norm`.

    With `only_largest`, of the maps along the last batch axis only those have to converge that
    may be the largest as far as their residuals tell.
    """
    batch, shape = math.prod(linear_map.batch_shape), linear_map.batch_shape
    tangent = _SLACK * start_tangent(linear_map.columns, _hints(linear_map) is not None, MISS)
    process = Bidiagonalisation(linear_map, start_vectors(linear_map, batch, generator))
    if max_basis is None:
        entries = batch * (linear_map.rows + linear_map.columns)
        fit = _BASIS_BYTES // max(1, entries * linear_map.dtype.itemsize)
        max_basis = max(_LEAST_BASIS, fit)
    # One step more than the rank can be: it finds nothing, and so proves the residual 0.
    rank = min(linear_map.rows, linear_map.columns)
    steps = max(1, min(max_steps, rank + 1) if max_basis > rank else max_steps)
    met_before, next_look = False, 0
    while True:
        if process.size >= max_basis:
            process.restart(keep=max_basis // 2)
        process.advance()
        sigma, residual, error, coefficients = _top_triple(process)
        counts = _may_be_largest(linear_map, sigma, residual) if only_largest else slice(None)
        reached = met(error, residual, rtol)
        all_met = bool(reached[counts].all())
        # The gap behind the error is itself an estimate: it must hold twice in a row, or with
        # room to spare, unless the residual alone is small enough.
        roomy = torch.minimum(residual, _ROOM * error)
        sure = met_before or bool((roomy[counts] <= rtol).all())
        ended = process.products == steps
        if ended or (all_met and sure and process.products >= next_look):
            upper = upper_end(sigma, process.cycles, tangent)
            within = _within(upper, sigma, upper_rtol, shape if only_largest else None)
            if ended or bool(within.all()):
                break
            next_look = math.ceil(_LOOK_AGAIN * process.products)
        met_before = all_met
    v = process.right.combine(coefficients)
    return NormEstimate(
        value=sigma.reshape(shape),
        residual=residual.reshape(shape),
        error=error.reshape(shape),
        upper=upper.reshape(shape),
        converged=(reached & within).reshape(shape),
        n_matvecs=process.products,
        direction=v.reshape(*shape, *linear_map.in_shape),
    )


def _within(
    upper: Tensor, sigma: Tensor, upper_rtol: float | None, shape: torch.Size | None
) -> Tensor:
    """Whether the upper ends are near enough; with a shape, those along its last axis together."""
    if upper_rtol is None:
        return torch.ones_like(sigma, dtype=torch.bool)
    if shape is None:
        return upper <= (1 + upper_rtol) * sigma
    along = (-1, shape[-1])
    best, most = (x.reshape(along).amax(-1, keepdim=True) for x in (sigma, upper))
    return (most <= (1 + upper_rtol) * best).expand(along).reshape(-1)


def _may_be_largest(linear_map: LinearMap, sigma: Tensor, residual: Tensor) -> Tensor:
    """Which maps of the flattened batch have a residual that reaches up to the largest σ."""
    along = (-1, linear_map.batch_shape[-1])
    best = sigma.reshape(along).amax(-1, keepdim=True)
    return (sigma * (1 + residual)).reshape(along).ge(best).flatten()


def _top_triple(process: Bidiagonalisation) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(σ, relative residual, relative error, coefficients of v in the right basis)."""
    # Many small matrices at once would outweigh the bases.
    size = max(1, _SMALL_ENTRIES // process.size**2)
    starts = range(0, max(process.batch, 1), size)
    parts = [_top_of_part(process, slice(i, i + size)) for i in starts]
    dtype = process.map.dtype
    sigma, residual, error, coefficients = (
        torch.cat(column).to(dtype) for column in zip(*parts, strict=True)
    )
    return sigma, residual, error, coefficients


def _top_of_part(process: Bidiagonalisation, part: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, values, right, residuals = process.triples(part)
    sigma, residual = values[:, 0], residuals[:, 0]
    error = residual
    if process.size > 2:
        error = torch.minimum(residual, _lehmann(values, residuals))
    return sigma, residual, error, right[:, 0, :].clone()


def _lehmann(values: Tensor, residuals: Tensor) -> Tensor:
    """The relative error that the whole Krylov space proves, if σ₂² is at most ρ < σ₁².

    Temple's bound λ₁ ≤ ρ + ‖(A − ρ)x‖² / ⟨x, (A − ρ)x⟩, A = JᵀJ, holds for every x. Lehmann's is
    its least value over the space: with Ritz values θᵢ, δᵢ = θᵢ − ρ and gᵢ the length of the
    residual of the i-th Ritz vector (all residuals are parallel), λ₁ ≤ ρ + τ where

        τ − δ₁ = (g₁²/δ₁) / (1 + Σ_{i≥2} gᵢ² / (|δᵢ| (|δᵢ| + τ))).

    The numerator alone is Kato and Temple's. The right side grows with τ: put their τ there, and
    every step of the iteration is a bound. ρ is from the second Ritz value and its residual.
    """
    scale = torch.where(values[:, :1] > 0, values[:, :1], 1.0)
    relative = values / scale
    # residuals are relative to their own value; ‖JᵀJv − σ²v‖ = σ · ‖Jᵀu − σv‖.
    g_squared = (residuals * relative**2).square()
    rho = (relative[:, 1:2] * (1 + residuals[:, 1:2])).square()
    delta = relative.square() - rho
    # Of a value known to the last digit only rounding is left, of δᵢ as of gᵢ.
    first, others = delta[:, 0], delta[:, 1:].abs().clamp_min(torch.finfo(delta.dtype).eps)
    temple = g_squared[:, 0] / first.clamp_min(1e-300)
    excess = temple
    for _ in range(2):
        tau = (first + excess)[:, None]
        excess = temple / (1 + (g_squared[:, 1:] / (others * (others + tau))).sum(-1))
    # σ₁ − σ ≤ (σ₁² − σ²) / (2σ)
    return torch.where(first > 0, excess / 2, 1.0)


def start_vectors(linear_map: LinearMap, batch: int, generator: torch.Generator | None) -> Tensor:
    """Unit vectors (batch, n·d): a random one and the map's hint, in equal parts."""
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    random = torch.randn(
        batch,
        linear_map.columns,
        dtype=linear_map.dtype,
        generator=generator,
        device=generator.device,
    )
    start = normalised(random.to(linear_map.device))[0]
    hints = _hints(linear_map)
    if hints is not None:
        start = start + normalised(hints().reshape(random.shape))[0]
    return normalised(start)[0]


def _hints(linear_map: LinearMap) -> Callable[[], Tensor] | None:
    # In one or two dimensions nothing can be missed, and hint and random start might cancel.
    return linear_map.hints if linear_map.columns >= 3 else None
