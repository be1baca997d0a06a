"""From maps of measures to velocities on a constraint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

from meanfield.dynamics.constraints import Constraint, Sphere
from meanfield.images import image_of
from meanfield.layers.composition import Composite, identity_at
from meanfield.linalg import LinearMap
from meanfield.maps import Linearisation, linearize
from meanfield.measures import MeasureMap, ParticleMeasure


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
        image = image_of(self.maps[0], mu)
        logs, moved = image.log_weights, image.points
        if logs is not mu.log_weights and not torch.equal(logs, mu.log_weights):
            raise ValueError(
                "F: expected a velocity at the atoms of the measure, got an image with other "
                "weights; keep them: mu.replace(points), or pushforward(T, mu)"
            )
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
