"""The largest singular values of linear maps, with their directions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from meanfield.errors import ConvergenceError
from meanfield.linalg.bidiagonalisation import Bidiagonalisation
from meanfield.linalg.dense import power_of_two
from meanfield.linalg.maps import LinearMap
from meanfield.linalg.norms import DENSE_LIMIT
from meanfield.linalg.vectors import lengths, normalised, random_vectors

__all__ = ["SingularValues", "largest_singular_values"]


@dataclass(frozen=True, eq=False)
class SingularValues:
    """The k largest singular triples of each map of a batch, σ₁ ≥ … ≥ σ_k.

    Attributes:
        values: σᵢ = ‖J vᵢ‖, shape (*batch, k): as often as it is repeated.
        left: uᵢ = J vᵢ / σᵢ, shape (*batch, k, m, e); orthonormal to the accuracy asked for. For
            σᵢ = 0 any unit vectors ("dense") or 0 ("lanczos").
        right: vᵢ, orthonormal, shape (*batch, k, n, d).
        residuals: ‖Jᵀuᵢ − σᵢvᵢ‖/σ₁ (*batch, k): there is a singular value of J within
            residual · σ₁ of σᵢ.
        converged: whether the residuals are at most √(k + 1) times the rtol asked for (each triple
            set aside meets rtol itself, and leaves its residual in those that come after) and
            the last search found nothing larger than σ_k outside of what is here, (*batch,).
        n_matvecs: products with J; as many with Jᵀ were made. 0 for a dense factorisation.
    """

    values: Tensor
    left: Tensor
    right: Tensor
    residuals: Tensor
    converged: Tensor
    n_matvecs: int


def largest_singular_values(
    linear_map: LinearMap,
    k: int,
    *,
    rtol: float = 1e-4,
    max_steps: int = 300,
    method: str = "auto",
    generator: torch.Generator | None = None,
    strict: bool = True,
) -> SingularValues:
    """J vᵢ = σᵢ uᵢ, Jᵀ uᵢ = σᵢ vᵢ for the k largest σᵢ.

    ``"dense"`` is a singular value decomposition. ``"lanczos"`` runs Golub–Kahan–Lanczos until
    the residuals of the triples still missing are small, sets them aside, and searches the
    orthogonal complement from a new random start until it holds nothing larger: one Krylov space
    sees one direction only of a repeated singular value. The last search confirms the answer.

    Args:
        linear_map: J.
        k: how many, at most the smaller of m·e and n·d.
        rtol: largest residual, relative to σ₁, that counts as converged.
        max_steps: largest number of products with J.
        method: "dense", "lanczos", or "auto": dense for small matrices.
        generator: of the random starts; a fixed seed if None.
        strict: raise when not converged; otherwise the answer comes back flagged.

    Raises:
        ValueError: k is not in 1..min(m·e, n·d), or the method is unknown.
        ConvergenceError: not converged after `max_steps` products.
        OverflowError: the matrix has entries beyond the range of its dtype.
    """
    largest = min(linear_map.rows, linear_map.columns)
    if not 1 <= k <= largest:
        raise ValueError(f"k: expected a number in 1..{largest}, got {k}")
    if method not in ("auto", "dense", "lanczos"):
        raise ValueError(f"method: expected 'auto', 'dense' or 'lanczos', got {method!r}")
    if method == "dense" or (method == "auto" and largest <= DENSE_LIMIT):
        return _dense(linear_map, k)
    found = _lanczos(linear_map, k, rtol, max_steps, generator)
    if strict and not bool(found.converged.all()):
        raise ConvergenceError(
            f"largest_singular_values: not converged to rtol = {rtol:.2e} after "
            f"{found.n_matvecs} products (largest residual {float(found.residuals.max()):.2e}); "
            "raise max_steps or rtol, or pass strict=False for the flagged answer"
        )
    return found


def _dense(linear_map: LinearMap, k: int) -> SingularValues:
    shape = linear_map.batch_shape
    matrices = linear_map.to_dense().reshape(-1, linear_map.rows, linear_map.columns)
    scale = power_of_two(matrices)
    unit = matrices / scale[:, None, None]
    u, s, vh = torch.linalg.svd(unit, full_matrices=False)
    u, s, v = u[..., :k].mT, s[:, :k], vh[:, :k]
    top = torch.where(s[:, :1] > 0, s[:, :1], 1.0)
    defect = lengths(u @ unit - s[..., None] * v) / top
    return SingularValues(
        values=(s * scale[:, None]).reshape(*shape, k),
        left=u.reshape(*shape, k, *linear_map.out_shape),
        right=v.reshape(*shape, k, *linear_map.in_shape),
        residuals=defect.reshape(*shape, k),
        converged=torch.ones(shape, dtype=torch.bool, device=matrices.device),
        n_matvecs=0,
    )


@dataclass(frozen=True, eq=False)
class _Found:
    """Values (batch, c) and right and left vectors (batch, c, size) set aside so far."""

    values: Tensor
    right: Tensor
    left: Tensor

    def joined(self, values: Tensor, right: Tensor, left: Tensor) -> _Found:
        values = torch.cat([self.values, values], -1)
        order = values.argsort(dim=-1, descending=True, stable=True)
        right, left = torch.cat([self.right, right], 1), torch.cat([self.left, left], 1)
        return _Found(
            values.gather(-1, order),
            right.gather(1, order[..., None].expand(right.shape)),
            left.gather(1, order[..., None].expand(left.shape)),
        )


@torch.no_grad()
def _lanczos(
    linear_map: LinearMap, k: int, rtol: float, max_steps: int, generator: torch.Generator | None
) -> SingularValues:
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    batch = math.prod(linear_map.batch_shape)
    empty = torch.empty(batch, 0, dtype=linear_map.dtype, device=linear_map.device)
    found = _Found(
        empty,
        empty.new_empty(batch, 0, linear_map.columns),
        empty.new_empty(batch, 0, linear_map.rows),
    )
    products, complete, met = 0, False, True
    while not complete and met and products < max_steps:
        missing = max(1, k - found.values.shape[-1])
        process, met = _search(linear_map, found, missing, rtol, max_steps - products, generator)
        products += process.products
        left, values, right, _ = process.triples()
        # Triples at rounding level are no directions. Where nothing else is left, any vector of
        # the complement will do: its start, one from each search.
        top = values[:, :1]
        if found.values.shape[-1]:
            top = torch.maximum(top, found.values[:, :1].double())
        real = values > 1e3 * torch.finfo(linear_map.dtype).eps * top
        take = max(1, min(missing, int(real.sum(-1).amin()) if batch else 1))
        values, right = values * real, right.clone()
        right[:, 0] = torch.where(real[:, :1], right[:, 0], torch.eye(len(right[0]))[0].to(right))
        values, dtype = values[:, :take], linear_map.dtype
        enough = found.values.shape[-1] >= k
        smallest = found.values[:, k - 1].double() if enough else values.new_zeros(batch)
        # Equal up to the accuracy asked for counts as not larger.
        room = rtol * torch.maximum(found.values[:, 0], empty.new_zeros(())) if enough else 0.0
        everything = found.values.shape[-1] + take >= min(linear_map.rows, linear_map.columns)
        complete = (enough and bool((values[:, 0] <= smallest + room).all())) or everything
        found = found.joined(
            values.to(dtype),
            normalised(process.right.combine(right[:, :take].to(dtype)))[0],
            process.left.combine(left[..., :take].mT.to(dtype)),
        )
    return _confirmed(linear_map, found, k, rtol, products, complete and met)


def _search(
    linear_map: LinearMap,
    found: _Found,
    wanted: int,
    rtol: float,
    max_steps: int,
    generator: torch.Generator,
) -> tuple[Bidiagonalisation, bool]:
    """A process outside of what was found whose first triples have converged, and whether so."""
    random = random_vectors(
        found.values.shape[0],
        linear_map.columns,
        dtype=torch.float64,
        device=linear_map.device,
        generator=generator,
    )
    start = _outside(random.to(linear_map.dtype), found.right)
    process = Bidiagonalisation(_deflated(linear_map, found), normalised(start)[0])
    known = found.values[:, :1].double() if found.values.shape[-1] else 0.0
    steps = min(max_steps, linear_map.rows + 1, linear_map.columns + 1)
    while True:
        process.advance()
        _, values, _, residuals = process.triples()
        # Relative to σ₁ of all; a process that has come to its end is exact as it stands.
        top = torch.maximum(values[:, :1], torch.as_tensor(known, device=values.device))
        defect = residuals * values / torch.where(top > 0, top, 1.0)
        ended = process.remainders == 0
        enough = process.products >= wanted
        met = bool((ended | (enough & (defect[:, :wanted] <= rtol).all(-1))).all())
        if met or process.products >= steps:
            return process, met


def _deflated(linear_map: LinearMap, found: _Found) -> LinearMap:
    """(1 − U Uᵀ) J (1 − V Vᵀ)."""

    def product(
        apply: Callable[[Tensor], Tensor], into: Tensor, out: Tensor, vector: Tensor
    ) -> Tensor:
        flat = _outside(vector.reshape(into.shape[0], -1), into)
        image = apply(flat.reshape(vector.shape))
        return _outside(image.reshape(into.shape[0], -1), out).reshape(image.shape)

    return replace(
        linear_map,
        matvec=lambda x: product(linear_map.matvec, found.right, found.left, x),
        rmatvec=lambda y: product(linear_map.rmatvec, found.left, found.right, y),
        dense=None,
        hints=None,
        coarse=None,
    )


def _outside(vectors: Tensor, basis: Tensor) -> Tensor:
    """What rows of an orthonormal basis (batch, c, size) do not span of (batch, size); twice."""
    for _ in range(2 if basis.shape[1] else 0):
        vectors = vectors - (basis.mT @ (basis @ vectors[..., None]))[..., 0]
    return vectors


def _confirmed(
    linear_map: LinearMap, found: _Found, k: int, rtol: float, products: int, complete: bool
) -> SingularValues:
    """The triples with residuals from products of their own."""
    batch, shape = found.values.shape[0], linear_map.batch_shape
    pad = max(0, k - found.values.shape[-1])
    right = torch.nn.functional.pad(found.right[:, :k], (0, 0, 0, pad))
    left = found.left.new_zeros(batch, k, linear_map.rows)
    values, defects = right.new_zeros(batch, k), right.new_zeros(batch, k)
    for i in range(k - pad):
        v = right[:, i].reshape(*shape, *linear_map.in_shape)
        image = linear_map.matvec(v).reshape(batch, -1)
        u, values[:, i] = normalised(image)
        # The image of a null direction is rounding, and its direction means nothing.
        real = values[:, i] > 1e3 * torch.finfo(u.dtype).eps * values[:, :1].amax(-1)
        left[:, i] = torch.where(real[:, None], u, 0.0)
        back = linear_map.rmatvec(left[:, i].reshape(*shape, *linear_map.out_shape))
        defects[:, i] = lengths(back.reshape(batch, -1) - values[:, i, None] * right[:, i])
    top = values.amax(-1, keepdim=True)
    residuals = defects / torch.where(top > 0, top, 1.0)
    # Values from products may swap places within rounding.
    order = values.argsort(dim=-1, descending=True, stable=True)
    left = left.gather(1, order[..., None].expand(left.shape))
    right = right.gather(1, order[..., None].expand(right.shape))
    residuals = residuals.gather(-1, order)
    # Deflation leaves the residuals of what was set aside, and rounding, in the later ones.
    limit = max(rtol * math.sqrt(k + 1), 1e3 * torch.finfo(linear_map.dtype).eps)
    good = complete and not pad
    return SingularValues(
        values=values.gather(-1, order).reshape(*shape, k),
        left=left.reshape(*shape, k, *linear_map.out_shape),
        right=right.reshape(*shape, k, *linear_map.in_shape),
        residuals=residuals.reshape(*shape, k),
        converged=((residuals <= limit).all(-1) & good).reshape(shape),
        n_matvecs=products + k - pad,
    )
