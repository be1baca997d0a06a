"""Where particles live: free space, or spheres about 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from meanfield.checks import choice, is_traced


@dataclass(frozen=True)
class Constraint:
    """A set that particles do not leave; this one is all of R^d.

    Attributes:
        is_free: whether nothing is projected or retracted.
    """

    is_free: ClassVar[bool] = True

    def tangent(self, points: Tensor, vectors: Tensor) -> Tensor:
        """P_x v, the part of v along the set, at each particle; all (..., n, d)."""
        return vectors

    def retract(self, points: Tensor) -> Tensor:
        """The points of the set next to points near it, (..., n, d)."""
        return points

    def stretch(self, points: Tensor) -> Tensor:
        """s, with s P_x the derivative of `retract`, P_x at the retracted points, (..., n, 1)."""
        return torch.ones_like(points[..., :1])

    def outward(self, points: Tensor) -> Tensor:
        """The derivative of `retract` in each particle's radius, (..., n, d)."""
        return torch.zeros_like(points)


@dataclass(frozen=True, eq=False)
class Sphere(Constraint):
    """{x : |x| = r}, r of each particle's own, with P_x v = v − ⟨x, v⟩ x/|x|².

    This is what RMSNorm after each residual layer does as layers become small.

    Attributes:
        radii: r, (..., n, 1).
    """

    is_free: ClassVar[bool] = False
    radii: Tensor

    def tangent(self, points: Tensor, vectors: Tensor) -> Tensor:
        """P_x v."""
        along = (points * vectors).sum(-1, keepdim=True) / points.square().sum(-1, keepdim=True)
        return torch.addcmul(vectors, points, along, value=-1)

    def retract(self, points: Tensor) -> Tensor:
        """r x/|x|."""
        return self.radii * self.outward(points)

    def stretch(self, points: Tensor) -> Tensor:
        """r/|x|."""
        return self.radii / torch.linalg.vector_norm(points, dim=-1, keepdim=True)

    def outward(self, points: Tensor) -> Tensor:
        """x/|x|."""
        return points / torch.linalg.vector_norm(points, dim=-1, keepdim=True)


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
