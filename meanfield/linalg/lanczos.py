"""Golub–Kahan–Lanczos bidiagonalisation of a batch of linear maps, and norms by it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from meanfield.linalg.evidence import MISS, NormEstimate, start_tangent, upper_end
from meanfield.linalg.maps import LinearMap
from meanfield.linalg.vectors import lengths, normalised

__all__ = ["Basis", "Bidiagonalisation", "lanczos_norm", "start_vectors"]

# Vectors that a basis asks memory for at once: one block that doubles would be held twice.
_BLOCK_VECTORS = 8
# An error this many times below what was asked for needs no second step to confirm it; more where
# there were so few steps that the random part of the start has hardly had its say.
_ROOM, _FEW, _ROOM_OF_FEW = 4.0, 8, 10.0
# Entries of the small matrices of a batch that are decomposed at once (8 MiB).
_SMALL_ENTRIES = 2**20


def lanczos_norm(
    linear_map: LinearMap,
    rtol: float,
    max_steps: int,
    generator: torch.Generator | None,
    *,
    upper_rtol: float | None = None,
    only_largest: bool = False,
) -> NormEstimate:
    """Norms of the whole batch at once, see `meanfield.linalg.operator_norm`.

    With `only_largest`, of the maps along the last batch axis only those have to converge that
    may be the largest as far as their residuals tell.
    """
    batch, shape = math.prod(linear_map.batch_shape), linear_map.batch_shape
    tangent = start_tangent(linear_map.columns, linear_map.hints is not None, MISS)
    # One step more than the rank can be: it finds nothing, and so proves the residual 0.
    steps = max(1, min(max_steps, linear_map.rows + 1, linear_map.columns + 1))
    process = Bidiagonalisation(linear_map, start_vectors(linear_map, batch, generator))
    met_before = False
    while True:
        process.advance()
        sigma, residual, error, coefficients = _top_triple(process)
        counts = _may_be_largest(linear_map, sigma, residual) if only_largest else slice(None)
        met = bool((error[counts] <= rtol).all())
        # The gap behind the error is itself an estimate: it must hold twice in a row, or with
        # room to spare, unless the residual alone is small enough.
        room = _ROOM if process.products >= _FEW else _ROOM_OF_FEW
        roomy = torch.minimum(residual, room * error)
        sure = met_before or bool((roomy[counts] <= rtol).all())
        ended = process.products == steps
        if (met and sure) or ended:
            upper = upper_end(sigma, *process.scalars(), tangent)
            within = _within(upper, sigma, upper_rtol, shape if only_largest else None)
            if ended or bool(within.all()):
                break
        met_before = met
    v = process.right.combine(coefficients)
    return NormEstimate(
        value=sigma.reshape(shape),
        residual=residual.reshape(shape),
        error=error.reshape(shape),
        upper=upper.reshape(shape),
        converged=((error <= rtol) & within).reshape(shape),
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
    size = max(1, _SMALL_ENTRIES // process.products**2)
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
    if process.products > 2:
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
    first, others = delta[:, 0], delta[:, 1:].abs().clamp_min(1e-300)
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
        dtype=torch.float64,
        generator=generator,
        device=generator.device,
    )
    start = normalised(random.to(linear_map.device, linear_map.dtype))[0]
    # In fewer dimensions nothing can be missed, and the two might cancel.
    if linear_map.hints is not None and linear_map.columns >= 3:
        start = start + normalised(linear_map.hints().reshape(batch, -1))[0]
    return normalised(start)[0]


class Basis:
    """Orthonormal vectors (batch, count, size), in blocks that stay where they are as it grows."""

    def __init__(self, batch: int, like: Tensor) -> None:
        self.blocks: list[Tensor] = []
        self.count, self.batch, self.like = 0, batch, like

    def append(self, vectors: Tensor) -> None:
        """One vector more, (batch, size)."""
        place = self.count % _BLOCK_VECTORS
        if place == 0:
            shape = self.batch, _BLOCK_VECTORS, vectors.shape[-1]
            self.blocks.append(self.like.new_empty(shape))
        self.blocks[-1][:, place] = vectors
        self.count += 1

    def newest(self) -> Tensor:
        """The vector appended last, (batch, size)."""
        return self.blocks[-1][:, (self.count - 1) % _BLOCK_VECTORS]

    def remainder(self, vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the basis does not span of the vectors, its length and theirs, (batch,)."""
        if self.count == 0:
            length = lengths(vectors)
            return vectors, length, length
        # The newest vector takes most; what is left is nearly orthogonal to the others already.
        newest = self.newest()
        share = (newest[:, None] @ vectors[..., None])[..., 0]
        vectors, taken = self._without(torch.addcmul(vectors, share, newest, value=-1))
        length = lengths(vectors)
        whole = torch.hypot(torch.hypot(share[:, 0], taken), length)
        # Twice is enough (Kahan, Parlett): one pass of Gram–Schmidt loses orthogonality when the
        # remainder is small beside what it took, and then only.
        if not bool((taken <= length).all()):
            vectors, _ = self._without(vectors)
            length = lengths(vectors)
        return vectors, length, whole

    def _without(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """The vectors less their shares in the basis, and the length of what was taken."""
        shares = [block @ vectors[..., None] for block in self._filled()]
        for block, share in zip(self._filled(), shares, strict=True):
            vectors = vectors - (block.mT @ share)[..., 0]
        return vectors, lengths(torch.cat(shares, 1)[..., 0])

    def _filled(self) -> list[Tensor]:
        if not self.blocks:
            return []
        last = self.blocks[-1][:, : (self.count - 1) % _BLOCK_VECTORS + 1]
        return [*self.blocks[:-1], last]

    def combine(self, coefficients: Tensor) -> Tensor:
        """Σ_k cₖ vₖ over the first vectors: c (batch, ..., k) gives (batch, ..., size)."""
        parts = coefficients.split(_BLOCK_VECTORS, -1)
        out = None
        for part, block in zip(parts, self.blocks, strict=False):
            term = torch.einsum("b...k,bki->b...i", part, block[:, : part.shape[-1]])
            out = term if out is None else out + term
        assert out is not None
        return out


class Bidiagonalisation:
    """The state of a batched Golub–Kahan–Lanczos process.

    A V = U B, Aᵀ U = V Bᵀ + β v eᵀ with B upper bidiagonal, V and U orthonormal.

    Args:
        linear_map: A.
        start: unit vectors (batch, n·d), the first column of V.
    """

    def __init__(self, linear_map: LinearMap, start: Tensor) -> None:
        self.map, self.batch = linear_map, start.shape[0]
        self.right, self.left = Basis(self.batch, start), Basis(self.batch, start)
        self.right.append(start)
        self.alphas: list[Tensor] = []
        self.betas: list[Tensor] = []

    @property
    def products(self) -> int:
        """Products with A so far; as many with Aᵀ."""
        return len(self.alphas)

    def advance(self) -> None:
        """One product with A and one with Aᵀ."""
        image = self._apply(self.map.matvec, self.right.newest(), self.map.in_shape)
        self.alphas.append(self._extend(self.left, image))
        back = self._apply(self.map.rmatvec, self.left.newest(), self.map.out_shape)
        self.betas.append(self._extend(self.right, back))

    def scalars(self, part: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """α and β, (batch, k) each, float64; the last β is that of the remainder."""
        both = self.alphas, self.betas
        alphas, betas = (torch.stack([one[part] for one in column], -1) for column in both)
        return alphas.double(), betas.double()

    def triples(self, part: slice = slice(None)) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Left vectors, values, right vectors (rows) of B, and relative residuals; float64."""
        alphas, betas = self.scalars(part)
        small = torch.diag_embed(alphas) + torch.diag_embed(betas[:, :-1], offset=1)
        left, values, right = torch.linalg.svd(small)
        share = betas[:, -1:] / torch.where(values > 0, values, 1.0)
        return left, values, right, share * left[:, -1, :].abs()

    def _apply(
        self, product: Callable[[Tensor], Tensor], vector: Tensor, shape: tuple[int, int]
    ) -> Tensor:
        image = product(vector.reshape(*self.map.batch_shape, *shape)).reshape(self.batch, -1)
        if not bool(torch.isfinite(image.sum())) and not bool(torch.isfinite(image).all()):
            raise OverflowError(
                f"a product with the linear map leaves the range of {image.dtype}: its norm "
                "cannot be represented; use less extreme weights or a smaller radius"
            )
        return image

    def _extend(self, basis: Basis, vector: Tensor) -> Tensor:
        rest, length, whole = basis.remainder(vector)
        # A remainder at rounding level means an invariant subspace: nothing more to find.
        finished = length <= 16 * torch.finfo(vector.dtype).eps * whole
        if not bool(finished.any()):
            basis.append(rest / length[:, None])
            return length
        safe = torch.where(finished, 1.0, length)
        basis.append(torch.where(finished[:, None], 0.0, rest / safe[:, None]))
        return torch.where(finished, 0.0, length)
