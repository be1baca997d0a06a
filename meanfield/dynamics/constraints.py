"""Where particles live: free space, spheres, and the spheres that LayerNorm maps to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from meanfield.checks import choice, is_traced

# How far a start may be from the hyperplane that LayerNorm maps to, relative to its size.
_OFF_CENTRE = {torch.float32: 1e-5, torch.float64: 1e-12}


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
    """{x : |x| = r}, r of each particle's own, and with `centred` its part in {x : Σₖ xₖ = 0}.

    P_x v = v − ⟨x, v⟩ x/|x|² (of the centred v). This is what a norm after each residual layer
    does as layers become small: RMSNorm keeps the sphere, LayerNorm its centred part.

    Attributes:
        radii: r, (..., n, 1).
        centred: whether coordinates have mean 0, as after LayerNorm.
    """

    is_free: ClassVar[bool] = False
    radii: Tensor
    centred: bool = False

    def tangent(self, points: Tensor, vectors: Tensor) -> Tensor:
        """P_x v."""
        if self.centred:
            vectors = _centred(vectors)
        along = (points * vectors).sum(-1, keepdim=True) / points.square().sum(-1, keepdim=True)
        return torch.addcmul(vectors, points, along, value=-1)

    def retract(self, points: Tensor) -> Tensor:
        """r x/|x| (of the centred x)."""
        return self.radii * self.outward(points)

    def stretch(self, points: Tensor) -> Tensor:
        """r/|x| (of the centred x)."""
        if self.centred:
            points = _centred(points)
        return self.radii / torch.linalg.vector_norm(points, dim=-1, keepdim=True)

    def outward(self, points: Tensor) -> Tensor:
        """x/|x| (of the centred x)."""
        if self.centred:
            points = _centred(points)
        return points / torch.linalg.vector_norm(points, dim=-1, keepdim=True)


def constraint_at(name: str | None, points: Tensor) -> Constraint:
    """The constraint of this name through given points.

    Args:
        name: None (R^d), "sphere" (every particle keeps its norm), "layer_norm" (besides, its
            coordinates keep the mean 0).
        points: (..., n, d).

    Raises:
        ValueError: an unknown name, or points that are not on such a set.
    """
    if name is None:
        return Constraint()
    choice(name, "constraint", ("sphere", "layer_norm"))
    centred = name == "layer_norm"
    radii = torch.linalg.vector_norm(points, dim=-1, keepdim=True)
    if not is_traced(points):
        if not bool((radii > 0).all()):
            raise ValueError(
                f"constraint {name!r}: expected particles off the origin, got one at 0; "
                "leave it out, or move it"
            )
        off = (points.mean(-1, keepdim=True) / radii).abs().max()
        if centred and not float(off) <= _OFF_CENTRE[points.dtype]:
            raise ValueError(
                "constraint 'layer_norm': expected particles whose coordinates have mean 0, got "
                f"a mean of {float(off):.3g} of their norm; subtract each particle's mean first, "
                "points - points.mean(-1, keepdim=True)"
            )
    return Sphere(radii, centred)


def _centred(vectors: Tensor) -> Tensor:
    return vectors - vectors.mean(-1, keepdim=True)
