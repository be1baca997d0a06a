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

__all__ = ["LinearMap", "NormEstimate", "largest_block_norm", "operator_norm"]

# Below this many rows or columns a dense factorisation costs less than a Krylov iteration.
_DENSE_LIMIT = 192
# Entries of one chunk of dense matrices (float64: 8 MiB); larger batches go chunk by chunk.
_CHUNK_ENTRIES = 2**20


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
        error: relative distance to that singular value, at most the residual r, and at most
            r²/(2·gap) (Kato–Temple) with the relative gap to the second singular value. The
            gap is taken from the second Ritz value and its residual.
        converged: whether the error is at most the rtol asked for.
        n_matvecs: products with J; as many with Jᵀ were made. 0 for a dense factorisation.
        direction: v, shape (*batch, n, d).
    """

    value: Tensor
    residual: Tensor
    error: Tensor
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
    orthogonal to the random start is not missed. It stops on the *relative* error of σ that
    the residual of the singular triple proves, see `NormEstimate.error`.

    Args:
        linear_map: J.
        rtol: largest relative error that counts as converged.
        max_steps: largest number of products with J.
        method: "dense", "lanczos", or "auto": dense for small matrices.
        generator: of the random start; a fixed seed if None.
        strict: raise when not converged; otherwise the estimate comes back flagged.

    Raises:
        ConvergenceError: the error is above rtol after `max_steps` steps.
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
    return _checked(estimate, rtol, strict)


def largest_block_norm(
    linear_map: LinearMap,
    *,
    rtol: float = 1e-4,
    max_steps: int = 300,
    method: str = "dense",
    generator: torch.Generator | None = None,
    strict: bool = True,
) -> tuple[NormEstimate, Tensor]:
    """Norm of a block-diagonal map whose blocks are the last batch axis, and the block it is in.

    Args:
        linear_map: the blocks, batch shape (*batch, n).
        rtol: as for `operator_norm`.
        max_steps: as for `operator_norm`.
        method: "dense" or "lanczos" (every block at once).
        generator: as for `operator_norm`.
        strict: as for `operator_norm`.

    Returns:
        An estimate of batch shape (*batch,), whose direction (*batch, *in_shape) lives in the
        block of the index returned beside it, (*batch,).
    """
    if method == "dense":
        estimate, block = _largest_dense(linear_map, rtol)
        return _checked(estimate, rtol, strict), block
    every = _lanczos_norm(linear_map, rtol, max_steps, generator)
    value, block = every.value.max(-1)
    index = block[..., None, None, None].expand(*block.shape, 1, *linear_map.in_shape)
    estimate = NormEstimate(
        value=value,
        residual=every.residual.amax(-1),
        error=every.error.amax(-1),
        converged=every.converged.all(-1),
        n_matvecs=every.n_matvecs,
        direction=every.direction.gather(-3, index).squeeze(-3),
    )
    return _checked(estimate, rtol, strict), block


def _checked(estimate: NormEstimate, rtol: float, strict: bool) -> NormEstimate:
    if strict and not bool(estimate.converged.all()):
        raise ConvergenceError(
            f"operator_norm: relative error {float(estimate.error.max()):.2e} is above "
            f"rtol = {rtol:.2e} after {estimate.n_matvecs} products; raise max_steps or rtol, "
            "or pass strict=False for the flagged estimate"
        )
    return estimate


# --- dense ---


def _largest_dense(linear_map: LinearMap, rtol: float) -> tuple[NormEstimate, Tensor]:
    """Blocks whose Frobenius norm is below a spectral norm already found are not factored."""
    n = linear_map.batch_shape[-1]
    blocks = linear_map.to_dense().reshape(-1, n, linear_map.rows, linear_map.columns)
    peak = blocks.abs().amax((-2, -1), keepdim=True).clamp_min(torch.finfo(blocks.dtype).tiny)
    frobenius = torch.linalg.vector_norm(blocks / peak, dim=(-2, -1)) * peak[..., 0, 0]
    every = torch.arange(len(blocks), device=blocks.device)
    best = frobenius.argmax(-1)
    sigma, v, residual = _factor(blocks[every, best])
    frobenius[every, best] = -1.0
    rows, others = (frobenius > sigma[:, None]).nonzero(as_tuple=True)
    if len(rows):
        more, v_more, residual_more = _factor(blocks[rows, others])
        # The largest of each row: sorted by value, the last write to a row wins.
        order = more.argsort()
        winner = torch.full_like(every, -1).scatter_reduce(
            0, rows[order], torch.arange(len(order), device=blocks.device), "amax"
        )
        place = order[winner.clamp_min(0)]
        better = (winner >= 0) & (more[place] > sigma)
        sigma = torch.where(better, more[place], sigma)
        v = torch.where(better[:, None], v_more[place], v)
        residual = torch.where(better, residual_more[place], residual)
        best = torch.where(better, others[place], best)
    shape = linear_map.batch_shape[:-1]
    estimate = _dense_estimate(sigma, v, residual, shape, linear_map, rtol)
    return estimate, best.reshape(shape)


def _factor(matrices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
        flat = linear_map.to_dense().reshape(-1, linear_map.rows, linear_map.columns)
        sigma, v, residual = _factor(flat)
    return _dense_estimate(sigma, v, residual, linear_map.batch_shape, linear_map, rtol)


def _dense_estimate(
    sigma: Tensor,
    v: Tensor,
    residual: Tensor,
    shape: torch.Size,
    linear_map: LinearMap,
    rtol: float,
) -> NormEstimate:
    # The factorisation itself is accurate to rounding, whatever was asked for.
    floor = 1e3 * torch.finfo(linear_map.dtype).eps
    return NormEstimate(
        value=sigma.reshape(shape),
        residual=residual.reshape(shape),
        error=residual.reshape(shape),
        converged=(residual <= max(rtol, floor)).reshape(shape),
        n_matvecs=0,
        direction=v.reshape(*shape, *linear_map.in_shape),
    )


def _chunked(
    solve: Callable[[slice], tuple[Tensor, Tensor, Tensor]], batch: int, entries: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Solve slices of a batch and join them, several at a time."""
    workers = min(torch.get_num_threads(), os.cpu_count() or 1)
    size = max(1, min(_CHUNK_ENTRIES // entries, -(-batch // workers) if batch > 256 else batch))
    slices = [slice(i, min(i + size, batch)) for i in range(0, batch, size)] or [slice(0, 0)]
    if len(slices) == 1:
        return solve(slices[0])
    # LAPACK loops over a batch on one core and lets go of the interpreter lock. One torch thread
    # in each: nested teams are 1.5 times slower. The caller's number is what new threads inherit.
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            parts = list(pool.map(solve, slices))
    finally:
        torch.set_num_threads(threads)
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
    # One step more than the rank can be: it finds nothing, and so proves the residual 0.
    steps = max(1, min(max_steps, linear_map.rows + 1, linear_map.columns + 1))
    process = _Bidiagonalisation(linear_map, batch, _start(linear_map, batch, generator))
    met_before = False
    while True:
        process.advance()
        sigma, residual, error, coefficients = process.top_triple()
        met = bool((error <= rtol).all())
        # The gap behind the error is itself an estimate: it must hold twice in a row, unless
        # the residual alone is small enough.
        if (met and met_before) or bool((residual <= rtol).all()) or process.products == steps:
            break
        met_before = met
    v = process.right.combine(coefficients)
    shape = linear_map.batch_shape
    return NormEstimate(
        value=sigma.reshape(shape),
        residual=residual.reshape(shape),
        error=error.reshape(shape),
        converged=(error <= rtol).reshape(shape),
        n_matvecs=process.products,
        direction=v.reshape(*shape, *linear_map.in_shape),
    )


def _start(linear_map: LinearMap, batch: int, generator: torch.Generator | None) -> Tensor:
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    random = torch.randn(
        batch,
        linear_map.columns,
        dtype=torch.float64,
        generator=generator,
        device=generator.device,
    )
    start = _normalised(random.to(linear_map.device, linear_map.dtype))[0]
    if linear_map.hints is not None:
        start = start + _normalised(linear_map.hints().reshape(batch, -1))[0]
    return _normalised(start)[0]


class _Basis:
    """Orthonormal vectors (batch, count, size) in one growing block of memory."""

    def __init__(self, like: Tensor, capacity: int = 16) -> None:
        self.block = like.new_empty(like.shape[0], capacity, like.shape[1])
        self.count = 0

    def append(self, vectors: Tensor) -> None:
        if self.count == self.block.shape[1]:
            self.block = torch.cat([self.block, torch.empty_like(self.block)], 1)
        self.block[:, self.count] = vectors
        self.count += 1

    def newest(self) -> Tensor:
        return self.block[:, self.count - 1]

    def remainder(self, vectors: Tensor) -> Tensor:
        """What the basis does not span of the vectors."""
        if self.count == 0:
            return vectors
        # The newest vector takes most; what is left is nearly orthogonal to the others already.
        vectors = self._without(vectors, self.count - 1)
        for _ in range(2):
            _, before = _normalised(vectors)
            vectors = self._without(vectors, 0)
            # Twice is enough (Kahan, Parlett): one pass of Gram–Schmidt loses orthogonality
            # when the remainder is small, and then only.
            if bool((_normalised(vectors)[1] >= 0.7 * before).all()):
                break
        return vectors

    def _without(self, vectors: Tensor, first: int) -> Tensor:
        basis = self.block[:, first : self.count]
        shares = basis @ vectors[..., None]
        return vectors - (basis.mT @ shares)[..., 0]

    def combine(self, coefficients: Tensor) -> Tensor:
        return torch.einsum("bki,bk->bi", self.block[:, : coefficients.shape[-1]], coefficients)


class _Bidiagonalisation:
    """The state of a batched Golub–Kahan–Lanczos process."""

    def __init__(self, linear_map: LinearMap, batch: int, start: Tensor) -> None:
        self.map, self.batch = linear_map, batch
        self.right, self.left = _Basis(start), _Basis(start.new_empty(batch, linear_map.rows))
        self.right.append(start)
        self.alphas: list[Tensor] = []
        self.betas: list[Tensor] = []

    @property
    def products(self) -> int:
        return len(self.alphas)

    def advance(self) -> None:
        image = self._apply(self.map.matvec, self.right.newest(), self.map.in_shape)
        self.alphas.append(self._extend(self.left, image))
        back = self._apply(self.map.rmatvec, self.left.newest(), self.map.out_shape)
        self.betas.append(self._extend(self.right, back))

    def top_triple(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(σ, relative residual, relative error, coefficients of v in the right basis)."""
        alphas, betas = torch.stack(self.alphas, -1).double(), torch.stack(self.betas, -1).double()
        small = torch.diag_embed(alphas) + torch.diag_embed(betas[:, :-1], offset=1)
        left, values, right = torch.linalg.svd(small)
        sigma = values[:, 0]
        share = betas[:, -1] / torch.where(sigma > 0, sigma, 1.0)
        residual = share * left[:, -1, 0].abs()
        error = residual
        if self.products > 2:
            second = values[:, 1] / torch.where(sigma > 0, sigma, 1.0)
            gap = 1.0 - second - share * left[:, -1, 1].abs()
            temple = torch.where(gap > 0, residual**2 / (2 * gap.clamp_min(1e-300)), 1.0)
            error = torch.minimum(residual, temple)
        dtype = self.map.dtype
        return sigma.to(dtype), residual.to(dtype), error.to(dtype), right[:, 0, :].to(dtype)

    def _apply(
        self, product: Callable[[Tensor], Tensor], vector: Tensor, shape: tuple[int, int]
    ) -> Tensor:
        image = product(vector.reshape(*self.map.batch_shape, *shape)).reshape(self.batch, -1)
        if not bool(torch.isfinite(image).all()):
            raise OverflowError(
                f"a product with the linear map leaves the range of {image.dtype}: its norm "
                "cannot be represented; use less extreme weights or a smaller radius"
            )
        return image

    def _extend(self, basis: _Basis, vector: Tensor) -> Tensor:
        _, before = _normalised(vector)
        unit, length = _normalised(basis.remainder(vector))
        # A remainder at rounding level means an invariant subspace: nothing more to find.
        finished = length <= 16 * torch.finfo(vector.dtype).eps * before
        basis.append(torch.where(finished[:, None], 0.0, unit))
        return torch.where(finished, 0.0, length)


def _normalised(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Unit vectors and lengths; scaled first, since squares may leave the number range."""
    peak = vectors.abs().amax(-1, keepdim=True)
    scaled = vectors / torch.where(peak > 0, peak, 1.0)
    length = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    unit = scaled / torch.where(length > 0, length, 1.0)
    return unit, (length * peak)[..., 0]
