"""Where particles stay, and from maps of measures to velocities there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from meanfield.checks import choice, is_traced
from meanfield.images import image_of, kept_atoms
from meanfield.layers.composition import Composite, identity_at
from meanfield.linalg import LinearMap
from meanfield.maps import Linearisation, linearize
from meanfield.measures import MeasureMap, ParticleMeasure


@dataclass(frozen=True)
class Constraint:
    """A set that particles do not leave; this one is all of R^d."""

    def tangent(self, points: Tensor, vectors: Tensor) -> Tensor:
        """P_x v, the part of v along the set, at each particle; all (..., n, d)."""
        return vectors

    def retract(self, points: Tensor) -> Tensor:
        """The points of the set next to points near it, (..., n, d)."""
        return points

    def push(self, points: Tensor, eps: Tensor, radius: Tensor) -> Tensor:
        """The derivative of `retract` along ε, as each particle's radius changes by ρ."""
        return eps

    def pull(self, points: Tensor, zeta: Tensor) -> tuple[Tensor, Tensor]:
        """The transpose of `push`: covectors of the points and of the radii."""
        return zeta, torch.zeros_like(zeta[..., :1])

    def each(self) -> Constraint:
        """That of every particle by itself, on points (..., n, 1, d)."""
        return self


@dataclass(frozen=True, eq=False)
class Sphere(Constraint):
    """{x : |x| = r}, r of each particle's own, with P_x v = v − ⟨x, v⟩ x/|x|².

    This is what RMSNorm after each residual layer does as layers become small.

    Attributes:
        radii: r, (..., n, 1).
    """

    radii: Tensor

    def tangent(self, points: Tensor, vectors: Tensor) -> Tensor:
        """P_x v."""
        units = points / _length(points)
        along = (units * vectors).sum(-1, keepdim=True)
        return torch.addcmul(vectors, units, along, value=-1)

    def retract(self, points: Tensor) -> Tensor:
        """r x/|x|."""
        return points * (self.radii / _length(points))

    def turned(self, points: Tensor, vectors: Tensor) -> Tensor:
        """The derivative of P_x v in x, −(⟨x, v⟩P_x + x (P_x v)ᵀ)/|x|², (..., n, d, d)."""
        length = _length(points)
        units = points / length
        along = (units * vectors).sum(-1)[..., None, None]
        across = self.tangent(points, vectors)[..., None, :]
        eye = torch.eye(points.shape[-1], dtype=points.dtype, device=points.device)
        projection = eye - units[..., None] * units[..., None, :]
        return -(along * projection + units[..., None] * across) / length[..., None]

    def push(self, points: Tensor, eps: Tensor, radius: Tensor) -> Tensor:
        """r/|x| P_x ε + ρ x/|x|."""
        length = _length(points)
        return self.radii / length * self.tangent(points, eps) + radius * (points / length)

    def pull(self, points: Tensor, zeta: Tensor) -> tuple[Tensor, Tensor]:
        """r/|x| P_x ζ, and ⟨x, ζ⟩/|x|."""
        length = _length(points)
        radial = (points / length * zeta).sum(-1, keepdim=True)
        return self.radii / length * self.tangent(points, zeta), radial

    def each(self) -> Sphere:
        """With the radii (..., n, 1, 1)."""
        return Sphere(self.radii.unsqueeze(-2))


def _length(points: Tensor) -> Tensor:
    """Norms, (..., n, 1), above 0: an atom without mass may be at 0, or so near that x² is 0.

    Held where squares begin to underflow: norms below are not those of their points.
    """
    sizes = torch.linalg.vector_norm(points, dim=-1, keepdim=True)
    return sizes.clamp_min(torch.finfo(points.dtype).tiny ** 0.5)


def constraint_at(name: str | None, mu: ParticleMeasure) -> Constraint:
    """The constraint of this name through the points of a measure.

    Args:
        name: None (R^d), "sphere" (every particle keeps its norm).
        mu: the measure.

    Raises:
        ValueError: an unknown name, an atom at 0, which is on no sphere, or one so near to 0 or so
            far away that its square leaves the number range.
    """
    if name is None:
        return Constraint()
    choice(name, "constraint", ("sphere",))
    points = mu.points
    radii = torch.linalg.vector_norm(points, dim=-1, keepdim=True)
    absent = mu.log_weights[..., None] == -math.inf
    if not is_traced(points) and not bool(((points != 0).any(-1, keepdim=True) | absent).all()):
        raise ValueError(
            "constraint 'sphere': expected particles off the origin, got one at 0; leave it out, "
            "or move it"
        )
    kind = torch.finfo(mu.dtype)
    least, most = 8 * kind.tiny**0.5, kind.max**0.5 / 8
    if not is_traced(points) and not bool((((radii > least) & (radii < most)) | absent).all()):
        raise ValueError(
            "constraint 'sphere': expected particles whose squared norms are in the range of "
            f"{mu.dtype}, norms between {least:.0e} and {most:.0e}, got others; measure them in "
            "another unit"
        )
    return Sphere(radii)


@final
@dataclass(frozen=True, eq=False, init=False)
class Velocity(Composite):
    """μ ↦ (x ↦ P_x Γ_μ(x))♯μ: the velocities of a flow as a map of measures.

    Its Lipschitz constant is what Grönwall's inequality asks for.

    Args:
        F: Γ, as a map of measures.
        constraint: where the particles stay.
    """

    constraint: Constraint

    def __init__(self, F: MeasureMap, constraint: Constraint) -> None:
        super().__init__([F])
        object.__setattr__(self, "constraint", constraint)

    def __call__(self, mu: ParticleMeasure, /) -> ParticleMeasure:
        """Each particle, which is on the constraint, moves to its velocity.

        Raises:
            ValueError: F changes the weights, or goes to another dimension.
        """
        moved = kept_atoms(image_of(self.maps[0], mu), mu, "F").points
        if moved.shape != mu.points.shape:
            raise ValueError(
                f"F: expected an image in R^{mu.dim}, where the particles are, got one of shape "
                f"{tuple(moved.shape)}; a velocity has the dimension of the space"
            )
        return mu.replace(self.constraint.tangent(mu.points, moved))

    def linearisation(self, mu: ParticleMeasure, *, geometry: str = "euclidean") -> Linearisation:
        """The projected derivative of Γ, plus the derivative of the projection."""
        F, x, on = self.maps[0], mu.points, self.constraint
        inner = linearize(F, mu, geometry=geometry)
        if not isinstance(on, Sphere):
            return inner
        units = torch.eye(mu.dim, dtype=mu.dtype, device=mu.device)
        projection = on.tangent(x[..., None, :], units)
        turned, still = on.turned(x, image_of(F, mu).points), identity_at(mu)
        one = LinearMap.pointwise
        return Linearisation(  # `still`: without absent atoms
            one(projection) @ inner.atoms + one(turned) @ still.atoms,
            one(projection[..., None, :, :]) @ inner.field
            + one(turned[..., None, :, :]) @ still.field,
        )
