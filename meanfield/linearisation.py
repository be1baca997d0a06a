"""The linearisation of any map of measures: its own where it declares one, else by autodiff."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from meanfield.capabilities import is_particlewise
from meanfield.checks import choice
from meanfield.linalg import LinearMap, largest_block_norm, operator_norm
from meanfield.linalg.vectors import lengths
from meanfield.measures import (
    MeasureMap,
    ParticleMeasure,
    check_map,
    check_measure,
    image_of,
    split,
)

__all__ = [
    "Linearisation",
    "Linearizable",
    "factored_constant",
    "linearize",
    "linearize_by_autodiff",
]

# Up to this many coordinates of all atoms a constant is factored, half a second each; where atoms
# move by themselves, up to this many entries of their matrices, some seconds.
_FACTORED, _FACTORED_ENTRIES = 1024, 2**24

# Steps of the difference quotients that check a derivative, relative to the size of the points:
# one of them suits maps of any curvature.
_STEPS = {torch.float64: (1e-3, 1e-5, 1e-7), torch.float32: (3e-2, 3e-3, 3e-4)}
# How far the best of them may be off. A derivative that misses a part is off by that part.
_AGREES = {torch.float64: 1e-2, torch.float32: 5e-2}


@dataclass(frozen=True, eq=False)
class Linearisation:
    """The derivative of F at μ, weights held fixed.

    Maps of measures compose, and so do both parts: those of G∘F are ``G.atoms @ F.atoms`` and
    ``G.field @ F.field``, with G's linearisation taken at F(μ).

    Attributes:
        atoms: J, of the atoms of F(μ) in those of μ, on displacements ``(*batch, n, d)``;
            D^½ J D^−½ on √aᵢ εᵢ in the geometry "wasserstein".
        field: D_xΓ_μ(xᵢ) of every atom, batch shape ``(*batch, n)``, each (1, d) → (1, d_out): how
            the image moves when a small part of the mass of atom i does.
    """

    atoms: LinearMap
    field: LinearMap

    def __matmul__(self, other: Linearisation) -> Linearisation:
        """Of the composition G∘F: this is G's at F(μ), the other F's at μ."""
        return Linearisation(self.atoms @ other.atoms, self.field @ other.field)


@runtime_checkable
class Linearizable(Protocol):
    """A map of measures that declares its own linearisation."""

    def linearisation(self, mu: ParticleMeasure, *, geometry: str = "euclidean") -> Linearisation:
        """At μ, see `Linearisation`."""


def linearize(F: MeasureMap, mu: ParticleMeasure, *, geometry: str = "euclidean") -> Linearisation:
    """The derivative of a map of measures at μ, weights held fixed.

    A map that has a method ``linearisation`` is asked for it. Any other is differentiated
    automatically, and its products are checked once: against a difference quotient, and the
    transpose against the product.

    Args:
        F: a map of measures that keeps weights, positions and the number of atoms.
        mu: μ; batch axes give a batch of maps. Atoms of weight 0 are absent.
        geometry: "euclidean": J on displacements. "wasserstein": D^½ J D^−½, D = diag(aᵢ).

    Raises:
        TypeError: F is no function, or does not return a ParticleMeasure.
        ValueError: F changes weights, positions or the number of atoms, or its derivative
            disagrees with a difference quotient.

    Example:
        >>> from meanfield.measures import ParticleMeasure, pushforward
        >>> mu = ParticleMeasure([[1.0], [2.0]])
        >>> linearize(lambda mu: pushforward(lambda x: x**2, mu), mu).atoms.to_dense()
        tensor([[2., 0.],
                [0., 4.]], dtype=torch.float64)
    """
    check_geometry(geometry)
    check_map(F)
    check_measure(mu)
    if isinstance(F, Linearizable):
        return F.linearisation(mu, geometry=geometry)
    return linearize_by_autodiff(F, mu, geometry=geometry)


def factored_constant(F: MeasureMap, mu: ParticleMeasure) -> Tensor | None:
    """No less than the local Wasserstein constant at μ, certain up to rounding, ``(*batch,)``.

    The larger of its two components by factoring their matrices; None where those are large.
    """
    alone, size = is_particlewise(F), mu.log_weights.numel() * mu.dim
    if size * mu.dim > _FACTORED_ENTRIES if alone else mu.n_particles * mu.dim > _FACTORED:
        return None
    at = linearize(F, mu, geometry="wasserstein")
    apart = largest_block_norm(at.field, method="dense", strict=False)[0].upper
    if alone:
        return apart
    return torch.maximum(operator_norm(at.atoms, method="dense", strict=False).upper, apart)


def check_geometry(geometry: str) -> None:
    """Refuse anything but the two."""
    choice(geometry, "geometry", ("wasserstein", "euclidean"))


def linearize_by_autodiff(
    F: MeasureMap, mu: ParticleMeasure, *, geometry: str = "euclidean", check: bool = True
) -> Linearisation:
    """`linearize` by automatic differentiation, whatever F declares.

    The field's part stores every atom twice and moves the copies apart: the measure is
    stationary to first order, so that only the moved query shows.
    """
    image = _checked_image(F, mu)
    products = _Products(F, mu)
    if check:
        _check_derivative(F, mu, products)
    out_dim = image.dim
    return Linearisation(
        _atoms(products, mu, out_dim, geometry), _field(_Products(F, split(mu)), mu, out_dim)
    )


def _checked_image(F: MeasureMap, mu: ParticleMeasure) -> ParticleMeasure:
    image = image_of(F, mu)
    name = getattr(type(F), "__name__", "F")
    kept = image.points.shape[:-1] == mu.points.shape[:-1] and _same(
        image.log_weights, mu.log_weights
    )
    if kept and mu.positions is not None:
        kept = image.positions is not None and _same(image.positions, mu.positions)
    if not kept:
        raise ValueError(
            f"{name}: expected a map that keeps the atoms, their weights and positions, got a "
            "measure with others; move points alone: mu.replace(points), or pushforward(T, mu)"
        )
    return image


def _same(a: Tensor, b: Tensor) -> bool:
    room = 1e3 * torch.finfo(b.dtype).eps
    return a.shape == b.shape and bool(torch.allclose(a, b, rtol=room, atol=room))


class _Products:
    """ε ↦ Jε and ζ ↦ Jᵀζ of a map at fixed weights."""

    def __init__(self, F: MeasureMap, mu: ParticleMeasure) -> None:
        self.map, self.mu = F, mu
        self._pull: Callable[[Tensor], tuple[Tensor, ...]] | None = None

    def move(self, points: Tensor) -> Tensor:
        return self.map(self.mu.replace(points)).points

    def forward(self, displacement: Tensor) -> Tensor:
        at, along = self.mu.points.detach(), displacement.detach().contiguous()
        try:
            # The second of the pair: the first is the value of the function, not its tangent.
            return torch.func.jvp(self.move, (at,), (along,))[1]
        except (NotImplementedError, RuntimeError):
            # Without a forward derivative: the transpose of the transpose, which is linear.
            def back(zeta: Tensor) -> Tensor:
                return torch.func.vjp(self.move, at)[1](zeta)[0]

            zeros = torch.zeros_like(self.move(at))
            return torch.func.vjp(back, zeros)[1](along)[0]

    def backward(self, covector: Tensor) -> Tensor:
        if self._pull is None:
            _, self._pull, *_ = torch.func.vjp(self.move, self.mu.points.detach())
        return self._pull(covector.detach())[0]


def _check_derivative(F: MeasureMap, mu: ParticleMeasure, products: _Products) -> None:
    """One product against difference quotients, and the transposed one against it."""
    generator = torch.Generator().manual_seed(0)
    points = mu.points.detach()
    draw = torch.randn(points.shape, generator=generator, dtype=torch.float64).to(points)
    present = (mu.log_weights > -math.inf)[..., None]
    along = torch.where(present, draw, 0.0)
    product = torch.where(present, products.forward(along), 0.0)
    size = float(points.abs().max()) or 1.0
    with torch.no_grad():
        quotients = []
        for step in (size * step for step in _STEPS[points.dtype]):
            ahead, behind = (
                products.move(points + step * along),
                products.move(points - step * along),
            )
            quotients.append(torch.where(present, (ahead - behind) / (2 * step), 0.0))
    scale = max(float(lengths(q.flatten())) for q in (product, *quotients))
    off = min(float(lengths((q - product).flatten())) for q in quotients)
    name = getattr(type(F), "__name__", "F")
    if not off <= _AGREES[points.dtype] * scale:
        raise ValueError(
            f"{name}: its derivative by automatic differentiation is off by {off / scale:.1e} "
            "from a difference quotient; keep all of it in torch operations on mu.points (no "
            ".detach(), .item(), .numpy() or float()): mu.replace(points), or pushforward(T, mu)"
        )
    zeta = torch.randn(product.shape, generator=generator, dtype=torch.float64).to(points)
    zeta = torch.where(present, zeta, 0.0)
    there, back = (product * zeta).sum(), (products.backward(zeta) * along).sum()
    room = float(lengths(product.flatten()) * lengths(zeta.flatten()))
    if not float((there - back).abs()) <= _AGREES[points.dtype] * room:
        raise ValueError(
            f"{name}: its forward and reverse derivatives disagree; look for a custom "
            "autograd.Function in it"
        )


def _atoms(products: _Products, mu: ParticleMeasure, out_dim: int, geometry: str) -> LinearMap:
    present = (mu.log_weights > -math.inf)[..., None]
    into = out_of = present.to(mu.dtype)
    if geometry == "wasserstein":
        rho = torch.where(present, 0.5 * mu.log_weights[..., None], 0.0)
        into, out_of = into * (-rho).exp(), out_of * rho.exp()
    n = mu.n_particles
    return LinearMap(
        matvec=lambda eta: out_of * products.forward(into * eta),
        rmatvec=lambda zeta: into * products.backward(out_of * zeta),
        in_shape=(n, mu.dim),
        out_shape=(n, out_dim),
        batch_shape=mu.batch_shape,
        dtype=mu.dtype,
        device=mu.device,
    )


def _field(doubled: _Products, mu: ParticleMeasure, out_dim: int) -> LinearMap:
    present = (mu.log_weights > -math.inf)[..., None].to(mu.dtype)

    def each(product: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def antisymmetric(vectors: Tensor) -> Tensor:
            one = present * vectors.squeeze(-2)
            pair = torch.stack([one, -one], -2).flatten(-3, -2)
            first, second = product(pair).unflatten(-2, (mu.n_particles, 2)).unbind(-2)
            # The copies answer with opposite signs, as far as rounding allows.
            return (0.5 * present * (first - second)).unsqueeze(-2)

        return antisymmetric

    return LinearMap(
        matvec=each(doubled.forward),
        rmatvec=each(doubled.backward),
        in_shape=(1, mu.dim),
        out_shape=(1, out_dim),
        batch_shape=torch.Size([*mu.batch_shape, mu.n_particles]),
        dtype=mu.dtype,
        device=mu.device,
    )
