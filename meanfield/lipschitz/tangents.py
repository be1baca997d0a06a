"""The linearisation of any map of measures: its own where it has one, else autodiff."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from meanfield.linalg import LinearMap
from meanfield.measures import MeasureMap, ParticleMeasure, split

__all__ = ["field_tangent", "tangent"]


def tangent(F: MeasureMap, mu: ParticleMeasure, geometry: str) -> LinearMap:
    """J on displacements ("euclidean"), or D^½JD^−½ on weighted ones ("wasserstein")."""
    if hasattr(F, "linearize"):
        linear_map = F.linearize(mu, geometry=geometry)
        assert isinstance(linear_map, LinearMap)
        return linear_map
    present = (mu.log_weights > -math.inf)[..., None]
    into = out_of = present.to(mu.dtype)
    if geometry == "wasserstein":
        rho = torch.where(present, 0.5 * mu.log_weights[..., None], 0.0)
        into, out_of = into * (-rho).exp(), out_of * rho.exp()
    forward, backward, out_dim = _products(F, mu)
    n = mu.n_particles
    return LinearMap(
        matvec=lambda eta: out_of * forward(into * eta),
        rmatvec=lambda zeta: into * backward(out_of * zeta),
        in_shape=(n, mu.dim),
        out_shape=(n, out_dim),
        batch_shape=mu.batch_shape,
        dtype=mu.dtype,
        device=mu.device,
    )


def field_tangent(F: MeasureMap, mu: ParticleMeasure) -> LinearMap:
    """D_xΓ_μ(xᵢ): what F does to displacements that split an atom and keep its barycentre.

    Without help from F: each atom is stored twice and its copies are moved by ε and −ε. The
    measure is stationary to first order, so that only the moved query shows.
    """
    if hasattr(F, "linearize_field"):
        linear_map = F.linearize_field(mu)
        assert isinstance(linear_map, LinearMap)
        return linear_map
    present = (mu.log_weights > -math.inf)[..., None].to(mu.dtype)
    forward, backward, out_dim = _products(F, split(mu))

    def each(product: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def antisymmetric(vectors: Tensor) -> Tensor:
            one = present * vectors.squeeze(-2)
            pair = torch.stack([one, -one], -2).flatten(-3, -2)
            first = product(pair).unflatten(-2, (mu.n_particles, 2))[..., 0, :]
            return (present * first).unsqueeze(-2)

        return antisymmetric

    return LinearMap(
        matvec=each(forward),
        rmatvec=each(backward),
        in_shape=(1, mu.dim),
        out_shape=(1, out_dim),
        batch_shape=torch.Size([*mu.batch_shape, mu.n_particles]),
        dtype=mu.dtype,
        device=mu.device,
    )


def _products(
    F: MeasureMap, mu: ParticleMeasure
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], int]:
    """Jacobian and transposed products at fixed weights, and the dimension F maps into."""

    def move(points: Tensor) -> Tensor:
        return F(mu.replace(points)).points

    def forward(displacement: Tensor) -> Tensor:
        # The second of the pair: the first is the value of the function, not its tangent.
        return torch.func.jvp(move, (mu.points,), (displacement.contiguous(),))[1]

    image, *rest = torch.func.vjp(move, mu.points)
    pull_back = rest[0]

    def backward(covector: Tensor) -> Tensor:
        return pull_back(covector)[0]

    return forward, backward, image.shape[-1]
