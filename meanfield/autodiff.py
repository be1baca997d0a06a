"""The derivative of any map of measures by automatic differentiation, with a check of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from meanfield.checks import choice, name_of
from meanfield.images import image_of
from meanfield.linalg import LinearMap
from meanfield.linalg.vectors import lengths
from meanfield.measures import MeasureMap, ParticleMeasure, split

__all__ = ["Linearisation", "check_geometry", "derivative_along", "linearize_by_autodiff"]

# Steps of the difference quotients that check a derivative, relative to the size of the points.
# The best of the three is compared.
_STEPS = {torch.float64: (1e-3, 1e-5, 1e-7), torch.float32: (3e-2, 3e-3, 3e-4)}
# Largest relative error. A missing term shows as its own size, far above.
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
        """That of G∘F from those of G at F(μ) (`self`) and of F at μ (`other`)."""
        return Linearisation(self.atoms @ other.atoms, self.field @ other.field)


def check_geometry(geometry: str) -> None:
    """Refuse anything but "wasserstein" and "euclidean"."""
    choice(geometry, "geometry", ("wasserstein", "euclidean"))


def linearize_by_autodiff(
    F: MeasureMap, mu: ParticleMeasure, *, geometry: str = "euclidean", check: bool = True
) -> Linearisation:
    """`linearize` by automatic differentiation, whatever F declares.

    For the field every atom is stored twice and its copies move apart: to first order the measure
    stays as it is, so that only the motion of the query counts.
    """
    image = _checked_image(F, mu)
    products = _Products(F, mu)
    if check:
        _check_derivative(F, mu, products)
    out_dim = image.dim
    return Linearisation(
        _atoms(products, mu, out_dim, geometry), _field(_Products(F, split(mu)), mu, out_dim)
    )


def derivative_along(F: MeasureMap, mu: ParticleMeasure, displacement: Tensor) -> Tensor:
    """Jε at μ, ``(*batch, n, d_out)``, itself differentiable, in μ and in parameters of F."""
    return _Products(F, mu).along(mu.points, displacement)


def _checked_image(F: MeasureMap, mu: ParticleMeasure) -> ParticleMeasure:
    image = image_of(F, mu)
    name = name_of(F)
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
        return self.along(self.mu.points.detach(), displacement.detach())

    def along(self, at: Tensor, displacement: Tensor) -> Tensor:
        along = displacement.contiguous()
        try:
            # The second of the pair: the first is the value of the function, not its tangent.
            return torch.func.jvp(self.move, (at,), (along,))[1]
        except (NotImplementedError, RuntimeError):
            # No forward derivative: take the transpose of the reverse one, which is linear.
            def back(zeta: Tensor) -> Tensor:
                return torch.func.vjp(self.move, at)[1](zeta)[0]

            zeros = torch.zeros_like(self.move(at))
            return torch.func.vjp(back, zeros)[1](along)[0]

    def backward(self, covector: Tensor) -> Tensor:
        if self._pull is None:
            _, self._pull, *_ = torch.func.vjp(self.move, self.mu.points.detach())
        return self._pull(covector.detach())[0]


def _check_derivative(F: MeasureMap, mu: ParticleMeasure, products: _Products) -> None:
    """Compare one product with difference quotients, and the transposed product with it."""
    generator = torch.Generator().manual_seed(0)
    points = mu.points.detach()
    draw = torch.randn(points.shape, generator=generator, dtype=torch.float64).to(points)
    present = (mu.log_weights > -math.inf)[..., None]
    along = torch.where(present, draw, 0.0)
    product = torch.where(present, products.forward(along), 0.0).detach()
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
    name = name_of(F)
    if not off <= _AGREES[points.dtype] * scale:
        raise ValueError(
            f"{name}: its derivative by automatic differentiation is off by {off / scale:.1e} "
            "from a difference quotient; keep all of it in torch operations on mu.points (no "
            ".detach(), .item(), .numpy() or float()): mu.replace(points), or pushforward(T, mu)"
        )
    zeta = torch.randn(product.shape, generator=generator, dtype=torch.float64).to(points)
    zeta = torch.where(present, zeta, 0.0)
    there, back = (product * zeta).sum(), (products.backward(zeta).detach() * along).sum()
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
    return LinearMap.of(
        mu.points,
        lambda eta: out_of * products.forward(into * eta),
        lambda zeta: into * products.backward(out_of * zeta),
        out_dim=out_dim,
    )


def _field(doubled: _Products, mu: ParticleMeasure, out_dim: int) -> LinearMap:
    present = (mu.log_weights > -math.inf)[..., None].to(mu.dtype)

    def each(product: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def antisymmetric(vectors: Tensor) -> Tensor:
            one = present * vectors
            pair = torch.stack([one, -one], -2).flatten(-3, -2)
            first, second = product(pair).unflatten(-2, (mu.n_particles, 2)).unbind(-2)
            # The images of the copies move oppositely, up to rounding.
            return 0.5 * present * (first - second)

        return antisymmetric

    forward, backward = each(doubled.forward), each(doubled.backward)
    return LinearMap.of(mu.points, forward, backward, out_dim=out_dim, each=True)
