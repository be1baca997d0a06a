"""Norms of a batch of linear maps by Golub–Kahan–Lanczos and coarse corrections."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meanfield.linalg.bidiagonalisation import Bidiagonalisation
from meanfield.linalg.coarse import CoarseModel
from meanfield.linalg.davidson import Davidson
from meanfield.linalg.evidence import MISS, NormEstimate, met, start_tangent, upper_end
from meanfield.linalg.maps import LinearMap
from meanfield.linalg.vectors import normalised, random_vectors

__all__ = ["lanczos_norm"]

# An error this many times below what was asked for needs no second step to confirm it.
_ROOM = 4.0
# Steps between two looks at an upper end that is still too far, as a share of those made.
_LOOK_AGAIN = 1.05
# A start this much nearer to orthogonal is reckoned with, so that rounding in the upper end, which
# is the square root of the unit's at its worst, is covered. It changes the probability by as much.
_SLACK = 1.001
# Bytes that both bases may take before the iteration restarts, and the fewest vectors of each.
_BASIS_BYTES, _LEAST_BASIS = 2**32, 8
# The random part of a start with a hint. The less, the nearer a good hint is to the top, and the
# larger `upper`.
_PART = 1 / 3
# Steps of Lanczos before a coarse model corrects what they found: they see what the model does
# not, and are what `upper` rests on. And the most corrections: they hold a third basis.
_KRYLOV_STEPS, _CORRECTIONS = 8, 32
# What a correction must take from the residual, on average after the first few, to be worth more
# than a step of Lanczos.
_PACE, _PATIENCE = 0.7, 4
# The share of the vector found so far that must lie in the coarse space.
_SHARE = 0.9
# Entries of the small matrices of a batch that are decomposed at once (8 MiB).
_SMALL_ENTRIES = 2**20


@torch.no_grad()
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
    shape = linear_map.batch_shape
    iteration = _Iteration(linear_map, generator, max_basis, corrected=upper_rtol is None)
    met_before, next_look = False, 0
    while True:
        iteration.advance()
        process = iteration.process
        sigma, residual, error, coefficients = _top_triple(process)
        counts = _may_be_largest(linear_map, sigma, residual) if only_largest else slice(None)
        reached = met(error, residual, rtol)
        all_met = bool(reached[counts].all())
        # The gap behind the error is itself an estimate: it must hold twice in a row, or with
        # room to spare, unless the residual alone is small enough.
        roomy = torch.minimum(residual, _ROOM * error)
        sure = met_before or bool((roomy[counts] <= rtol).all())
        ended = iteration.products >= max_steps or iteration.complete
        if ended or (all_met and sure and iteration.products >= next_look):
            upper = upper_end(sigma, process.cycles, iteration.tangent)
            within = _within(upper, sigma, upper_rtol, shape if only_largest else None)
            if ended or bool(within.all()):
                break
            next_look = math.ceil(_LOOK_AGAIN * iteration.products)
        met_before = all_met
    v = process.right.combine(coefficients)
    return NormEstimate(
        value=sigma.reshape(shape),
        residual=residual.reshape(shape),
        error=error.reshape(shape),
        upper=upper.reshape(shape),
        converged=(reached & within).reshape(shape),
        n_matvecs=iteration.products,
        direction=v.reshape(*shape, *linear_map.in_shape),
    )


class _Iteration:
    """Lanczos; after a few steps corrections, if there is a coarse model; Lanczos if they fail.

    Args:
        linear_map: J.
        generator: of the random starts; a fixed seed if None.
        max_basis: vectors of a basis at which Lanczos restarts.
        corrected: whether corrections may be made: only a Krylov space tells, step by step, how
            large the norm may be.
    """

    def __init__(
        self,
        linear_map: LinearMap,
        generator: torch.Generator | None,
        max_basis: int | None,
        corrected: bool,
    ) -> None:
        self._map, self._batch = linear_map, math.prod(linear_map.batch_shape)
        self._generator = generator or torch.Generator().manual_seed(0)
        if max_basis is None:
            entries = self._batch * (linear_map.rows + linear_map.columns)
            fit = _BASIS_BYTES // max(1, entries * linear_map.dtype.itemsize)
            max_basis = max(_LEAST_BASIS, fit)
        self._max_basis, self._before, self._at_first = max_basis, 0, math.inf
        self._model: CoarseModel | None = None
        random, hint = self._random(), None
        # In one or two dimensions nothing can be missed, and hint and random start might cancel.
        if linear_map.columns >= 3:
            if linear_map.coarse is not None:
                self._model = CoarseModel(linear_map.coarse(), self._generator)
                hint = self._model.direction()
            elif linear_map.hints is not None:
                hint = linear_map.hints().reshape(random.shape)
        if not corrected or max_basis < _KRYLOV_STEPS + 2 * _CORRECTIONS:
            self._model = None
        self.process: Bidiagonalisation | Davidson = self._krylov(random, hint)

    @property
    def products(self) -> int:
        """Products with J so far; as many with Jᵀ."""
        return self._before + self.process.products

    @property
    def complete(self) -> bool:
        """Whether a Krylov space has one step more than the rank can be.

        That step finds nothing, and so proves the residual 0.
        """
        rank = min(self._map.rows, self._map.columns)
        return self.process.parallel and rank < self.process.products and rank < self._max_basis

    def advance(self) -> None:
        """One product with J and one with Jᵀ."""
        process = self.process
        if isinstance(process, Davidson):
            made = process.products - _KRYLOV_STEPS
            slow = float(self._residual()) > self._at_first * _PACE**made
            if made == _CORRECTIONS or (made >= _PATIENCE and slow):
                v, self._before = self._top_vector(), self.products
                self.process = self._krylov(self._random(), v)
        elif self._model is not None and process.products == _KRYLOV_STEPS:
            if bool((self._model.share(self._top_vector()) >= _SHARE).all()):
                self._at_first = float(self._residual())
                self.process = Davidson(process, self._model)
            self._model = None
        elif process.size >= self._max_basis:
            process.restart(keep=self._max_basis // 2)
        self.process.advance()

    def _residual(self) -> Tensor:
        """The largest of the batch."""
        _, _, _, residuals = self.process.triples()
        return residuals[:, 0].amax()

    def _top_vector(self) -> Tensor:
        _, _, right, _ = self.process.triples()
        return self.process.right.combine(right[:, 0].to(self._map.dtype))

    def _krylov(self, random: Tensor, hint: Tensor | None) -> Bidiagonalisation:
        """A process from a random vector and a hint."""
        part = 1.0 if hint is None else _PART
        self.tangent = _SLACK * start_tangent(self._map.columns, part, MISS)
        if hint is not None:
            random = normalised(_PART * random + (1 - _PART) * normalised(hint)[0])[0]
        return Bidiagonalisation(self._map, random)

    def _random(self) -> Tensor:
        """Unit vectors (batch, n·d)."""
        linear_map = self._map
        draw = random_vectors(
            self._batch,
            linear_map.columns,
            dtype=linear_map.dtype,
            device=linear_map.device,
            generator=self._generator,
        )
        return normalised(draw)[0]


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


def _top_triple(process: Bidiagonalisation | Davidson) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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


def _top_of_part(
    process: Bidiagonalisation | Davidson, part: slice
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, values, right, residuals = process.triples(part)
    sigma, residual = values[:, 0], residuals[:, 0]
    error = residual
    if process.size > 2:
        error = torch.minimum(residual, _lehmann(values, residuals, process.parallel))
    return sigma, residual, error, right[:, 0, :].clone()


def _lehmann(values: Tensor, residuals: Tensor, parallel: bool) -> Tensor:
    """The relative error that the whole space proves, if σ₂² is at most ρ < σ₁².

    Temple's bound λ₁ ≤ ρ + ‖(A − ρ)x‖² / ⟨x, (A − ρ)x⟩, A = JᵀJ, holds for every x. Lehmann's is
    its least value over the space: with Ritz values θᵢ, δᵢ = θᵢ − ρ and gᵢ the length of the
    residual of the i-th Ritz vector, all residuals being parallel, λ₁ ≤ ρ + τ where

        τ − δ₁ = (g₁²/δ₁) / (1 + Σ_{i≥2} gᵢ² / (|δᵢ| (|δᵢ| + τ))).

    The numerator alone is Kato and Temple's, which needs nothing parallel. The right side grows
    with τ: put their τ there, and every step of the iteration is a bound. ρ is from the second
    Ritz value and its residual.
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
    for _ in range(2 if parallel else 0):
        tau = (first + excess)[:, None]
        excess = temple / (1 + (g_squared[:, 1:] / (others * (others + tau))).sum(-1))
    # σ₁ − σ ≤ (σ₁² − σ²) / (2σ)
    return torch.where(first > 0, excess / 2, 1.0)
