"""Linear maps given by their products, and their operator norm with its evidence."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meanfield.errors import ConvergenceError

__all__ = ["LinearMap", "NormEstimate", "operator_norm"]

# Below this many rows or columns a dense factorisation costs less than a Krylov iteration.
_DENSE_LIMIT = 192
# Entries of one chunk of dense matrices (float64: 64 MiB); larger batches go chunk by chunk.
_CHUNK_ENTRIES = 2**23


@dataclass(frozen=True, eq=False)
class LinearMap:
    """A batch of linear maps J: (n, d) → (m, e) given by products with J and Jᵀ.

    Args:
        matvec: ε (*batch, n, d) ↦ Jε (*batch, m, e).
        rmatvec: ζ (*batch, m, e) ↦ Jᵀζ (*batch, n, d).
        in_shape: (n, d).
        out_shape: (m, e).
        batch_shape: leading axes.
        dtype: of the tensors.
        device: of the tensors.
        dense: returns the matrices of a slice of the flattened batch, shape (b, m·e, n·d);
            without it they are assembled column by column.
        hints: displacements (*batch, n, d) that may have a large image; a norm estimate
            starts from them as well as from a random one.
    """

    matvec: Callable[[Tensor], Tensor]
    rmatvec: Callable[[Tensor], Tensor]
    in_shape: tuple[int, int]
    out_shape: tuple[int, int]
    batch_shape: torch.Size = field(default_factory=torch.Size)
    dtype: torch.dtype = torch.float64
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dense: Callable[[slice], Tensor] | None = None
    hints: Callable[[], Tensor] | None = None

    @property
    def rows(self) -> int:
        """m·e."""
        return math.prod(self.out_shape)

    @property
    def columns(self) -> int:
        """n·d."""
        return math.prod(self.in_shape)

    def to_dense(self) -> Tensor:
        """The matrices, shape (*batch, m·e, n·d), particles before features."""
        batch = math.prod(self.batch_shape)
        if self.dense is not None:
            flat = self.dense(slice(0, batch))
        else:
            flat = torch.stack([self._column(j) for j in range(self.columns)], -1)
        return flat.reshape(*self.batch_shape, self.rows, self.columns)

    def _column(self, index: int) -> Tensor:
        unit = torch.zeros(self.columns, dtype=self.dtype, device=self.device)
        unit[index] = 1.0
        image = self.matvec(unit.reshape(self.in_shape).expand(*self.batch_shape, *self.in_shape))
        return image.reshape(-1, self.rows)


@dataclass(frozen=True, eq=False)
class NormEstimate:
    """An estimate of ‖J‖₂ and its evidence; every tensor has the map's batch shape.

    Attributes:
        value: σ = ‖J v‖ for the unit vector v = `direction`: a lower bound of the norm up to
            rounding, whatever the iteration did.
        residual: ‖Jᵀu − σv‖/σ with u = Jv/σ (relative): a singular value of J lies within
            residual · value of `value`.
        converged: whether the residual is at most the rtol asked for.
        n_matvecs: products with J; as many with Jᵀ were made. 0 for a dense factorisation.
        direction: v, shape (*batch, n, d).
    """

    value: Tensor
    residual: Tensor
    converged: Tensor
    n_matvecs: int
    direction: Tensor


def operator_norm(
    linear_map: LinearMap,
    *,
    rtol: float = 1e-4,
    max_steps: int = 300,
    method: str = "auto",
    generator: torch.Generator | None = None,
    strict: bool = True,
) -> NormEstimate:
    """‖J‖₂ = max ‖Jε‖ / ‖ε‖ (Frobenius norms) of each map in the batch.

    ``"dense"`` assembles the matrices and takes the top eigenpair of their Gram matrices, scaled
    so that entries up to the end of the number range do not overflow. ``"lanczos"`` is
    Golub–Kahan–Lanczos bidiagonalisation with full re-orthogonalisation, from a mixture of a
    random start and the map's own hints, so that one dominant direction that is almost
    orthogonal to the random start is not missed. It stops on the *relative* residual of the
    singular triple.

    Args:
        linear_map: J.
        rtol: largest relative residual that counts as converged.
        max_steps: largest number of products with J.
        method: "dense", "lanczos", or "auto": dense for small matrices.
        generator: of the random start; a fixed seed if None.
        strict: raise when not converged; otherwise the estimate comes back flagged.

    Raises:
        ConvergenceError: the residual is above rtol after `max_steps` steps.
        OverflowError: the matrix has entries beyond the range of its dtype.
    """
    if method not in ("auto", "dense", "lanczos"):
        raise ValueError(f"method: expected 'auto', 'dense' or 'lanczos', got {method!r}")
    if method == "auto":
        method = "dense" if min(linear_map.rows, linear_map.columns) <= _DENSE_LIMIT else "lanczos"
    if method == "dense":
        estimate = _dense_norm(linear_map, rtol)
    else:
        estimate = _lanczos_norm(linear_map, rtol, max_steps, generator)
    if strict and not bool(estimate.converged.all()):
        raise ConvergenceError(
            f"operator_norm: relative residual {float(estimate.residual.max()):.2e} is above "
            f"rtol = {rtol:.2e} after {estimate.n_matvecs} products; raise max_steps or rtol, "
            "or pass strict=False for the flagged estimate"
        )
    return estimate


# --- dense ---


def top_singular_triples(matrices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(σ, v, relative residual) of each matrix (b, rows, columns), chunk by chunk."""
    rows, columns = matrices.shape[-2:]
    return _chunked(lambda part: _top_triples(matrices[part]), len(matrices), rows * columns)


def _dense_norm(linear_map: LinearMap, rtol: float) -> NormEstimate:
    batch = math.prod(linear_map.batch_shape)
    if linear_map.dense is not None:
        dense = linear_map.dense
        entries = linear_map.rows * linear_map.columns
        sigma, v, residual = _chunked(lambda part: _top_triples(dense(part)), batch, entries)
    else:
        sigma, v, residual = top_singular_triples(linear_map.to_dense().flatten(0, -3))
    shape = linear_map.batch_shape
    # The factorisation itself is accurate to rounding, whatever was asked for.
    floor = 1e3 * torch.finfo(linear_map.dtype).eps
    return NormEstimate(
        value=sigma.reshape(shape),
        residual=residual.reshape(shape),
        converged=(residual <= max(rtol, floor)).reshape(shape),
        n_matvecs=0,
        direction=v.reshape(*shape, *linear_map.in_shape),
    )


def _chunked(
    solve: Callable[[slice], tuple[Tensor, Tensor, Tensor]], batch: int, entries: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Solve slices of a batch and join them; on the CPU several at a time."""
    workers = min(torch.get_num_threads(), os.cpu_count() or 1)
    size = max(1, min(_CHUNK_ENTRIES // entries, -(-batch // workers) if batch > 256 else batch))
    slices = [slice(i, min(i + size, batch)) for i in range(0, batch, size)] or [slice(0, 0)]
    if len(slices) == 1:
        return solve(slices[0])
    # LAPACK loops over a batch on one core and lets go of the interpreter lock.
    with ThreadPoolExecutor(workers) as pool:
        parts = list(pool.map(solve, slices))
    sigma, v, residual = (torch.cat(part) for part in zip(*parts, strict=True))
    return sigma, v, residual


def _top_triples(matrices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    peak = matrices.abs().amax((-2, -1))
    if not bool(torch.isfinite(peak).all()):
        raise OverflowError(
            f"the linear map has entries beyond the range of {matrices.dtype}: its norm cannot "
            "be represented; use less extreme weights or a smaller radius"
        )
    # A power of two: the scaling is exact, and the Gram matrix stays in range.
    scale = torch.exp2(torch.ceil(torch.log2(peak.clamp_min(torch.finfo(peak.dtype).tiny))))
    scale = scale.clamp(2.0**-1000, 2.0**1000) if peak.dtype == torch.float64 else scale
    unit = matrices / scale[..., None, None]
    wide = unit.shape[-1] > unit.shape[-2]
    gram = unit @ unit.mT if wide else unit.mT @ unit
    top = torch.linalg.eigh(gram)[1][..., -1:]
    v = _unit(unit.mT @ top) if wide else top
    image = unit @ v
    sigma = torch.linalg.vector_norm(image, dim=(-2, -1), keepdim=True)
    u = image / torch.where(sigma > 0, sigma, 1.0)
    defect = torch.linalg.vector_norm(unit.mT @ u - sigma * v, dim=(-2, -1))
    sigma = sigma[..., 0, 0]
    residual = defect / torch.where(sigma > 0, sigma, 1.0)
    return sigma * scale, v[..., 0], torch.where(sigma > 0, residual, 0.0)


def _unit(column: Tensor) -> Tensor:
    length = torch.linalg.vector_norm(column, dim=-2, keepdim=True)
    return column / torch.where(length > 0, length, 1.0)


# --- Golub–Kahan–Lanczos ---


def _lanczos_norm(
    linear_map: LinearMap, rtol: float, max_steps: int, generator: torch.Generator | None
) -> NormEstimate:
    """A V = U B, Aᵀ U = V Bᵀ + r eᵀ with B upper bidiagonal, for the whole batch at once."""
    batch = math.prod(linear_map.batch_shape)
    steps = min(max_steps, linear_map.rows, linear_map.columns)
    process = _Bidiagonalisation(linear_map, batch, _start(linear_map, batch, generator))
    sigma = residual = right = None
    for step in range(1, steps + 1):
        process.advance()
        # Looking at the small problem each time would cost more than the products it saves.
        if step < 4 or step % 2 == 0 or step == steps:
            sigma, residual, right = process.top_triple()
            if bool((residual <= rtol).all()):
                break
    assert sigma is not None and residual is not None and right is not None
    v = torch.einsum("kbi,bk->bi", torch.stack(process.right_basis[: right.shape[-1]]), right)
    shape = linear_map.batch_shape
    return NormEstimate(
        value=sigma.reshape(shape),
        residual=residual.reshape(shape),
        converged=(residual <= rtol).reshape(shape),
        n_matvecs=process.products,
        direction=v.reshape(*shape, *linear_map.in_shape),
    )


def _start(linear_map: LinearMap, batch: int, generator: torch.Generator | None) -> Tensor:
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    random = torch.randn(batch, linear_map.columns, dtype=torch.float64, generator=generator)
    start = _normalised(random.to(linear_map.device, linear_map.dtype))[0]
    if linear_map.hints is not None:
        start = start + _normalised(linear_map.hints().reshape(batch, -1))[0]
    return _normalised(start)[0]


class _Bidiagonalisation:
    """The state of a batched Golub–Kahan–Lanczos process."""

    def __init__(self, linear_map: LinearMap, batch: int, start: Tensor) -> None:
        self.map, self.batch = linear_map, batch
        self.right_basis: list[Tensor] = [start]
        self.left_basis: list[Tensor] = []
        self.alphas: list[Tensor] = []
        self.betas: list[Tensor] = []
        self.products = 0

    def advance(self) -> None:
        v = self.right_basis[-1]
        image = self._apply(self.map.matvec, v, self.map.in_shape)
        u, alpha = self._next(image, self.left_basis)
        self.left_basis.append(u)
        back = self._apply(self.map.rmatvec, u, self.map.out_shape)
        v, beta = self._next(back, self.right_basis)
        self.right_basis.append(v)
        self.alphas.append(alpha)
        self.betas.append(beta)
        self.products += 1

    def top_triple(self) -> tuple[Tensor, Tensor, Tensor]:
        """(σ, relative residual, coefficients of v in the right basis)."""
        alphas, betas = torch.stack(self.alphas, -1), torch.stack(self.betas, -1)
        small = torch.diag_embed(alphas) + torch.diag_embed(betas[:, :-1], offset=1)
        left, values, right = torch.linalg.svd(small.double())
        sigma = values[:, 0]
        defect = betas[:, -1].double() * left[:, -1, 0].abs()
        floor = torch.finfo(torch.float64).tiny
        residual = torch.where(sigma > floor, defect / sigma.clamp_min(floor), 0.0)
        dtype = self.map.dtype
        return sigma.to(dtype), residual.to(dtype), right[:, 0, :].to(dtype)

    def _apply(
        self, product: Callable[[Tensor], Tensor], vector: Tensor, shape: tuple[int, int]
    ) -> Tensor:
        image = product(vector.reshape(*self.map.batch_shape, *shape))
        return image.reshape(self.batch, -1)

    def _next(self, vector: Tensor, basis: list[Tensor]) -> tuple[Tensor, Tensor]:
        before = torch.linalg.vector_norm(vector, dim=-1)
        if basis:
            stacked = torch.stack(basis, 1)
            # Twice: one pass of Gram–Schmidt loses orthogonality when the remainder is small.
            for _ in range(2):
                vector = vector - torch.einsum(
                    "bki,bk->bi", stacked, torch.einsum("bki,bi->bk", stacked, vector)
                )
        unit, length = _normalised(vector)
        # A remainder at rounding level means an invariant subspace: nothing more to find.
        finished = length <= 16 * torch.finfo(vector.dtype).eps * before
        return (
            torch.where(finished[:, None], torch.zeros_like(unit), unit),
            torch.where(finished, torch.zeros_like(length), length),
        )


def _normalised(vectors: Tensor) -> tuple[Tensor, Tensor]:
    length = torch.linalg.vector_norm(vectors, dim=-1)
    return vectors / torch.where(length > 0, length, 1.0)[:, None], length
