"""Where particles live: free space, or spheres about 0."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meanfield.checks import choice, is_traced


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
        along = (points * vectors).sum(-1, keepdim=True) / points.square().sum(-1, keepdim=True)
        return torch.addcmul(vectors, points, along, value=-1)

    def retract(self, points: Tensor) -> Tensor:
        """r x/|x|."""
        return self.radii * (points / torch.linalg.vector_norm(points, dim=-1, keepdim=True))

    def turned(self, points: Tensor, vectors: Tensor) -> Tensor:
        """The derivative of P_x v in x, −(⟨x, v⟩P_x + x (P_x v)ᵀ)/|x|², (..., n, d, d)."""
        square = points.square().sum(-1)[..., None, None]
        units = torch.eye(points.shape[-1], dtype=points.dtype, device=points.device)
        along = (points * vectors).sum(-1)[..., None, None]
        across = self.tangent(points, vectors)[..., None, :]
        projection = units - points[..., None] * points[..., None, :] / square
        return -(along * projection + points[..., None] * across) / square

    def push(self, points: Tensor, eps: Tensor, radius: Tensor) -> Tensor:
        """r/|x| P_x ε + ρ x/|x|."""
        length = torch.linalg.vector_norm(points, dim=-1, keepdim=True)
        return self.radii / length * self.tangent(points, eps) + radius * (points / length)

    def pull(self, points: Tensor, zeta: Tensor) -> tuple[Tensor, Tensor]:
        """r/|x| P_x ζ, and ⟨x, ζ⟩/|x|."""
        length = torch.linalg.vector_norm(points, dim=-1, keepdim=True)
        radial = (points / length * zeta).sum(-1, keepdim=True)
        return self.radii / length * self.tangent(points, zeta), radial

    def each(self) -> Sphere:
        """With the radii (..., n, 1, 1)."""
        return Sphere(self.radii.unsqueeze(-2))


def constraint_at(name: str | None, points: Tensor) -> Constraint:
    """The constraint of this name through given points.

    Args:
        name: None (R^d), "sphere" (every particle keeps its norm).
        points: (..., n, d).

    Raises:
        ValueError: an unknown name, or a point at 0, which is on no sphere.
    """
    if name is None:
        return Constraint()
    choice(name, "constraint", ("sphere",))
    radii = torch.linalg.vector_norm(points, dim=-1, keepdim=True)
    if not is_traced(points) and not bool((radii > 0).all()):
        raise ValueError(
            "constraint 'sphere': expected particles off the origin, got one at 0; leave it out, "
            "or move it"
        )
    return Sphere(radii)
