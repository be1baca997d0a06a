"""The variational equation: the linearisation of a flow as a product over its steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from meanfield.dynamics.constraints import Constraint, constraint_at
from meanfield.dynamics.integrators import Integrator
from meanfield.dynamics.schemes import Tableau, stepped, tableau
from meanfield.dynamics.velocities import Layers, Velocity, particlewise_derivative
from meanfield.linalg import LinearMap
from meanfield.maps import Linearisation
from meanfield.measures import ParticleMeasure


def flow_linearisation(
    layers: Layers,
    mu: ParticleMeasure,
    span: tuple[float, float],
    integrator: Integrator,
    constraint: str | None,
    *,
    geometry: str,
) -> Linearisation:
    """The derivative of the flow over a span of time at μ: exactly that of the scheme.

    Args:
        layers: the maps.
        mu: μ, at the start of the span.
        span: from and to.
        integrator: the scheme.
        constraint: where particles stay.
        geometry: as in `meanfield.linearize`.
    """
    on = constraint_at(constraint, mu.points)
    start = _retraction(on, mu.points)
    steps = tuple(_steps(layers, mu, span, integrator, on, geometry))
    return Linearisation(
        _Product(start, steps, each=False).as_linear_map(mu),
        _Product(start, steps, each=True).as_linear_map(mu),
    )


@dataclass(frozen=True, eq=False)
class _Retraction:
    """The derivatives of x ↦ the point of the constraint next to x.

    Attributes:
        moved: in x.
        outward: in the particle's radius, (*batch, n, d): unit vectors.
    """

    moved: Linearisation
    outward: Tensor


def _retraction(constraint: Constraint, points: Tensor) -> _Retraction | None:
    """None in free space, where nothing is retracted."""
    if constraint.is_free:
        return None
    moved = particlewise_derivative(constraint.retract, points)
    return _Retraction(moved, constraint.outward(points))


@dataclass(frozen=True, eq=False)
class _Step:
    """One step: ε ↦ R'(ε + h Σⱼ bⱼκⱼ), κᵢ = Vᵢ Rᵢ'(ε + h Σⱼ aᵢⱼκⱼ), of linearisations V and R'."""

    method: Tableau
    size: float
    velocities: tuple[Linearisation, ...]
    retractions: tuple[_Retraction | None, ...]
    end: _Retraction | None

    def stages(self) -> list[tuple[tuple[float, ...], Linearisation, _Retraction | None]]:
        return list(zip(self.method.rows, self.velocities, self.retractions, strict=True))


def _steps(
    layers: Layers,
    mu: ParticleMeasure,
    span: tuple[float, float],
    integrator: Integrator,
    on: Constraint,
    geometry: str,
) -> Iterator[_Step]:
    method = tableau(integrator.method)
    mu, following = mu.replace(on.retract(mu.points)), None
    for F, start, end in layers.between(*span):
        velocity = Velocity(F, on)
        for taken in integrator.steps(velocity, mu, (start, end), step=following):
            reached, moved = taken.stages.reached, taken.stages.moved
            seen = (mu.replace(on.retract(x)) for x in reached)
            slopes = (velocity.linearisation(nu, geometry=geometry) for nu in seen)
            yield _Step(
                method,
                taken.size,
                tuple(slopes),
                tuple(_retraction(on, x) for x in reached),
                _retraction(on, moved),
            )
            mu, following = taken.measure, taken.following


@dataclass(frozen=True, eq=False)
class _Product:
    """The steps one after the other; also propagates the derivative in each particle's radius.

    Attributes:
        start: the way onto the constraint.
        steps: the steps.
        each: for the fields of single atoms, in place of all atoms together.
    """

    start: _Retraction | None
    steps: tuple[_Step, ...]
    each: bool

    def as_linear_map(self, mu: ParticleMeasure) -> LinearMap:
        batch = [*mu.batch_shape, mu.n_particles] if self.each else mu.batch_shape
        shape = (1 if self.each else mu.n_particles, mu.dim)
        return LinearMap(
            self.push, self.pull, shape, shape, torch.Size(batch), mu.dtype, mu.device
        )

    def push(self, eps: Tensor) -> Tensor:
        """One product with each V."""
        radius = (self._outward(self.start) * eps).sum(-1, keepdim=True)
        eps = self._onto(self.start, eps, radius)
        for step in self.steps:
            slopes: list[Tensor] = []
            for row, V, R in step.stages():
                reached = stepped(eps, step.size, row, slopes)
                slopes.append(self._pick(V).matvec(self._onto(R, reached, radius)))
            moved = stepped(eps, step.size, step.method.weights, slopes)
            eps = self._onto(step.end, moved, radius)
        return eps

    def pull(self, zeta: Tensor) -> Tensor:
        """The transpose: the same stages, backwards."""
        radius = torch.zeros_like(zeta[..., :1])
        for step in reversed(self.steps):
            moved, radius = self._off(step.end, zeta, radius)
            zeta, h = moved, step.size
            slopes = [h * weight * moved for weight in step.method.weights]
            for i, (row, V, R) in reversed(list(enumerate(step.stages()))):
                back, radius = self._off(R, self._pick(V).rmatvec(slopes[i]), radius)
                zeta = zeta + back
                for j, weight in enumerate(row):
                    slopes[j] = torch.add(slopes[j], back, alpha=h * weight)
        zeta, radius = self._off(self.start, zeta, radius)
        return zeta + self._outward(self.start) * radius

    def _pick(self, part: Linearisation) -> LinearMap:
        return part.field if self.each else part.atoms

    def _outward(self, R: _Retraction | None) -> Tensor | float:
        if R is None:
            return 0.0
        return R.outward.unsqueeze(-2) if self.each else R.outward

    def _onto(self, R: _Retraction | None, eps: Tensor, radius: Tensor) -> Tensor:
        return eps if R is None else self._pick(R.moved).matvec(eps) + self._outward(R) * radius

    def _off(self, R: _Retraction | None, zeta: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
        if R is None:
            return zeta, radius
        more = (self._outward(R) * zeta).sum(-1, keepdim=True)
        return self._pick(R.moved).rmatvec(zeta), radius + more
