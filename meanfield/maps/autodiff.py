"""The derivative of any map of measures by automatic differentiation, with a check of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from meanfield.checks import called, choice, describe, is_traced, name_of
from meanfield.habits import Hinted
from meanfield.images import image_of
from meanfield.linalg import LinearMap
from meanfield.linalg.vectors import one_thread, pushed_forward
from meanfield.maps.derivative_checks import (
    Product,
    check_derivative,
    check_light_atoms,
    check_repeats,
    check_weights,
    checked_image,
)
from meanfield.measures import MeasureMap, ParticleMeasure, split

# Coordinates up to which a map without a forward derivative is differentiated row by row: a second
# for 1,024 of torch.cdist.
_BY_ROWS = 2**11


@dataclass(frozen=True, eq=False)
class Linearisation(Hinted):
    """The derivative of F at μ, weights held fixed.

    Maps of measures compose, and so do both parts: those of G∘F are ``G.atoms @ F.atoms`` and
    ``G.field @ F.field``, with G's linearisation taken at F(μ).

    Attributes:
        atoms: J, of the atoms of F(μ) in those of μ, on displacements ``(*batch, n, d)``;
            D^½ J D^−½ on √aᵢ εᵢ in the geometry "wasserstein".
        field: D_xΓ_μ(xᵢ) of every atom, batch shape ``(*batch, n)``, each (1, d) → (1, d_out): how
            the image moves when a small part of the mass of atom i does.
        check_direction: refuses a direction ``(*batch, n, d)`` along which rounding stands in
            the place of the derivative in light atoms; None where nothing is to be feared.
    """

    atoms: LinearMap
    field: LinearMap
    check_direction: Callable[[Tensor], None] | None = None

    def __matmul__(self, other: Linearisation) -> Linearisation:
        """That of G∘F from those of G at F(μ) (`self`) and of F at μ (`other`)."""
        return Linearisation(self.atoms @ other.atoms, self.field @ other.field)

    def assembled(self) -> Linearisation:
        """By its matrices."""
        return Linearisation(self.atoms.assembled(), self.field.assembled())


def check_geometry(geometry: str) -> None:
    """Refuse anything but "wasserstein" and "euclidean"."""
    choice(geometry, "geometry", ("wasserstein", "euclidean"))


def linearize_by_autodiff(
    F: MeasureMap, mu: ParticleMeasure, *, geometry: str = "euclidean"
) -> Linearisation:
    """`linearize` by automatic differentiation, whatever F declares.

    For the field every atom is stored twice and its copies move apart: to first order the measure
    stays as it is, so that only the motion of the query counts.

    Raises:
        NoDerivativeError: F has none at μ.
        ValueError: F is no map of measures, or its derivative is not that of its values; see
            `meanfield.maps.derivative_checks`.
    """
    check_geometry(geometry)
    image = checked_image(F, mu)
    products, halves = _Products(F, mu), split(mu)
    apart = _Products(F, halves)
    if mu.points.numel():  # of an empty batch nothing can be compared
        check_repeats(F, mu, image)
        check_derivative(
            F, mu, image, products.forward, products.backward, along_at=products.forward_at
        )
        if geometry == "wasserstein":
            check_weights(F, mu, image)
            # The maximum of all atoms has a derivative, but none where its atom splits.
            whole = image_of(F, halves)
            check_derivative(
                F, halves, whole, apart.forward, apart.backward, parts=2, along_at=apart.forward_at
            )
    out_dim = image.dim
    atoms = _atoms(products, mu, out_dim, geometry)
    field = _field(apart, mu, out_dim)
    if geometry == "euclidean":
        return Linearisation(atoms, field)
    light_atoms = partial(check_light_atoms, name_of(F), mu, image, atoms)
    light_atoms()
    return Linearisation(atoms, field, light_atoms)


def check_declared(
    F: MeasureMap, mu: ParticleMeasure, found: Linearisation, geometry: str, *, particlewise: bool
) -> None:
    """Refuse a derivative that a map declares and that is not that of its values.

    With weights it is compared where every atom is stored twice: what both copies move together
    is about the atoms, what they move apart about the field. Where each atom moves alone, or
    without weights, n atoms stay n.
    """
    if is_traced(mu.points) or not mu.points.numel():
        return
    image = checked_image(F, mu)
    check_repeats(F, mu, image)
    _check_spaces(name_of(F), mu, image.dim, found)
    atoms, field = found.atoms, found.field

    def push(vectors: Tensor) -> Tensor:
        return field.matvec(vectors[..., None, :]).squeeze(-2)

    def pull(vectors: Tensor) -> Tensor:
        return field.rmatvec(vectors[..., None, :]).squeeze(-2)

    if particlewise or geometry == "euclidean":
        check_derivative(F, mu, image, atoms.matvec, atoms.rmatvec)
        if particlewise:
            check_derivative(F, mu, image, push, pull)
        return
    check_weights(F, mu, image)
    root = mu.weights.sqrt()[..., None]
    if bool(((root == 0) & (mu.log_weights > -math.inf)[..., None]).any()):
        return  # what light atoms would be divided by has underflowed
    root = torch.where(root > 0, root, 1.0)

    def copies(product: Product, apart: Product) -> Product:
        """A product on atoms stored twice, by that of what moves together and of what does not."""

        def doubled(vectors: Tensor) -> Tensor:
            one, other = vectors.unflatten(-2, (mu.n_particles, 2)).unbind(-2)
            same, opposite = product((one + other) / 2), apart((one - other) / 2)
            return torch.stack([same + opposite, same - opposite], -2).flatten(-3, -2)

        return doubled

    forward = copies(lambda eps: atoms.matvec(root * eps) / root, push)
    backward = copies(lambda zeta: root * atoms.rmatvec(zeta / root), pull)
    doubled = split(mu)
    check_derivative(F, doubled, image_of(F, doubled), forward, backward, parts=2)


def _check_spaces(name: str, mu: ParticleMeasure, out_dim: int, found: object) -> None:
    """Refuse what is no linearisation, or one with maps between other spaces."""
    if not isinstance(found, Linearisation):
        raise TypeError(
            f"linearisation of {name}: expected maps.Linearisation, got {describe(found)}"
        )
    batch, n = mu.batch_shape, mu.n_particles
    parts = (("atoms", found.atoms, n, batch), ("field", found.field, 1, (*batch, n)))
    for part, J, count, wanted in parts:
        given, image = (count, mu.dim), (count, out_dim)
        if (J.in_shape, J.out_shape, tuple(J.batch_shape)) != (given, image, tuple(wanted)):
            raise ValueError(
                f"{part} of the linearisation of {name}: expected maps {given} → {image} "
                f"with batch_shape={tuple(wanted)}, got {J}"
            )


def derivative_along(F: MeasureMap, mu: ParticleMeasure, displacement: Tensor) -> Tensor:
    """Jε at μ, ``(*batch, n, d_out)``, without a gradient."""
    return _Products(F, mu).forward(displacement).detach()


def derivative_paired(
    F: MeasureMap, mu: ParticleMeasure, displacement: Tensor, covector: Tensor
) -> Tensor:
    """⟨ζ, Jε⟩ at μ, ``(*batch,)``, with a gradient in μ, ε, ζ and in parameters of F.

    As ⟨Jᵀζ, ε⟩, since torch takes mean and spread for constants where the forward derivative of
    its layer, batch and instance norms is differentiated once more.
    """
    (back,) = torch.func.vjp(_Products(F, mu).move, mu.points)[1](covector)
    return (back * displacement).sum((-2, -1))


class _Products:
    """ε ↦ Jε and ζ ↦ Jᵀζ of a map at fixed weights."""

    def __init__(self, F: MeasureMap, mu: ParticleMeasure) -> None:
        self.map, self.mu = F, mu
        self._pull: Callable[[Tensor], tuple[Tensor, ...]] | None = None
        self._rows: Tensor | None = None

    def move(self, points: Tensor) -> Tensor:
        # Fused attention of torch has no second derivative on the CPU, and no forward one.
        with one_thread, sdpa_kernel(SDPBackend.MATH):
            at = self.mu.replace(points)
            return called(self.map, (at,), "F: expected a map of measures").points

    def forward(self, displacement: Tensor) -> Tensor:
        at, along = self.mu.points.detach(), displacement.detach().contiguous()
        if self._rows is None:
            with suppress(NotImplementedError, RuntimeError):
                pushed: Tensor = pushed_forward(self.move, at, along)[1]
                return pushed
            zeros = torch.zeros_like(self.move(at))
            with suppress(NotImplementedError, RuntimeError):
                # No forward derivative: take the transpose of the reverse one, which is linear.
                pulled = torch.func.vjp(lambda zeta: self._pulled(at, zeta), zeros)
                return pulled[1](along)[0]
            self._rows = self._by_rows(zeros)
        images = (self._rows * along).sum((-2, -1)).movedim(0, -1)
        return images.unflatten(-1, (along.shape[-2], -1))

    def forward_at(self, points: Tensor, displacement: Tensor) -> Tensor:
        """Jε at other points."""
        return _Products(self.map, self.mu.replace(points)).forward(displacement)

    def _pulled(self, at: Tensor, zeta: Tensor) -> Tensor:
        return torch.func.vjp(self.move, at)[1](zeta)[0]

    def _by_rows(self, zeros: Tensor) -> Tensor:
        """J of each measure, ``(n d_out, *batch, n, d)``, where torch has one derivative alone."""
        n, dim = zeros.shape[-2:]
        self.backward(zeros)  # where torch has none at all, it says why
        if n * max(dim, self.mu.dim) > _BY_ROWS:
            raise NotImplementedError(
                f"{name_of(self.map)}: expected a map that torch differentiates forwards, or "
                f"twice, of {n} atoms in {dim} dimensions, got one that it does not, as of "
                "torch.cdist: write distances as (x[..., :, None, :] - y[..., None, :, :])"
                ".norm(dim=-1)"
            )
        units = torch.eye(n * dim, dtype=zeros.dtype, device=zeros.device)
        return torch.stack([self.backward(e.view(n, dim).expand_as(zeros)) for e in units])

    def backward(self, covector: Tensor) -> Tensor:
        if self._pull is None:
            _, self._pull, *_ = torch.func.vjp(self.move, self.mu.points.detach())
        return self._pull(covector.detach())[0]


def _atoms(products: _Products, mu: ParticleMeasure, out_dim: int, geometry: str) -> LinearMap:
    present = (mu.log_weights > -math.inf)[..., None]
    into = out_of = present.to(mu.dtype)
    if geometry == "wasserstein":
        rho = torch.where(present, 0.5 * mu.log_weights[..., None], 0.0)
        into, out_of = into * (-rho).exp(), out_of * rho.exp()
    return LinearMap.of(
        mu.points,
        lambda eta: out_of * torch.where(present, products.forward(into * eta), 0.0),
        lambda zeta: into * torch.where(present, products.backward(out_of * zeta), 0.0),
        out_dim=out_dim,
    )


def _field(doubled: _Products, mu: ParticleMeasure, out_dim: int) -> LinearMap:
    present = (mu.log_weights > -math.inf)[..., None]

    def each(product: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def antisymmetric(vectors: Tensor) -> Tensor:
            one = present * vectors
            pair = torch.stack([one, -one], -2).flatten(-3, -2)
            first, second = product(pair).unflatten(-2, (mu.n_particles, 2)).unbind(-2)
            # The images of the copies move oppositely, up to rounding.
            return torch.where(present, 0.5 * (first - second), 0.0)

        return antisymmetric

    forward, backward = each(doubled.forward), each(doubled.backward)
    return LinearMap.of(mu.points, forward, backward, out_dim=out_dim, each=True)
