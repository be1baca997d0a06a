"""The flow between two times as a map of measures, and its derivative along the steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from meanfield.checks import number
from meanfield.dynamics.constraints import Constraint, Velocity, constraint_at
from meanfield.dynamics.integrators import Adaptive, Integrator, integrator_of
from meanfield.dynamics.schemes import Tableau, stepped, tableau
from meanfield.dynamics.trajectories import FlowProblem
from meanfield.habits import with_hints
from meanfield.layers.composition import Composite, identity_at
from meanfield.linalg import LinearMap
from meanfield.maps import Linearisation
from meanfield.maps.map import as_map
from meanfield.measures import MeasureMap, ParticleMeasure


@with_hints
@final
@dataclass(frozen=True, eq=False, init=False)
class FlowMap(Composite):
    """Φ: μ ↦ μ_t, the measure that the flow of `flow` has made of μ after a time.

    It is differentiable, so `lipschitz.local_lipschitz`, `lipschitz.secant_ratio` and the like
    take it as they take attention.

    Args:
        F: a map of measures, as in `flow`.
        time: t ≥ 0.
        method: as in `flow`. An adaptive method makes other steps at other measures; they differ
            by its tolerance, and a secant ratio of close measures sees that.
        step: as in `flow` with the times 0 and t; with more times its steps end at each of them.
        constraint: as in `flow`.

    Example:
        >>> from meanfield import AttentionParameters, SelfAttention
        >>> F = SelfAttention(AttentionParameters.from_bilinear([[0.0]], [[1.0]]))
        >>> FlowMap(F, 1.0)(ParticleMeasure([[1.0], [3.0]])).points
        tensor([[4.4366],
                [6.4366]], dtype=torch.float64)
    """

    time: float
    integrator: Integrator
    constraint: str | None

    def __init__(
        self,
        F: MeasureMap,
        time: float,
        *,
        method: str | Adaptive = "dopri5",
        step: float | None = None,
        constraint: str | None = None,
    ) -> None:
        super().__init__([as_map(F)])
        store = object.__setattr__
        store(self, "time", number(time, "time", least=0))
        store(self, "integrator", integrator_of(method, step))
        store(self, "constraint", constraint)

    def __call__(self, mu: ParticleMeasure, /) -> ParticleMeasure:
        """Φ(μ); weights and positions stay."""
        times = np.unique([0.0, self.time])
        problem = FlowProblem(mu, self.maps[0], times, self.integrator, self.constraint)
        *_, (last, _) = problem.states()
        return last

    def linearisation(self, mu: ParticleMeasure, *, geometry: str = "euclidean") -> Linearisation:
        """The derivative at μ as a product over the steps, exactly that of the scheme.

        Steps that an adaptive method chooses count as fixed.

        It keeps the linearisation of F at every stage of every step.
        """
        return self.followed(mu, geometry)[0]

    def followed(
        self, mu: ParticleMeasure, geometry: str
    ) -> tuple[Linearisation, ParticleMeasure]:
        """The linearisation, and Φ(μ)."""
        on = constraint_at(self.constraint, mu)
        steps = tuple(self._steps(mu, on, geometry))
        whole = Linearisation(
            _Product(on, steps, each=False).as_linear_map(mu),
            _Product(on.each(), steps, each=True).as_linear_map(mu),
        )
        end = steps[-1].moved if steps else mu.points
        return whole @ identity_at(mu), mu.replace(on.retract(end))  # without absent atoms

    def _steps(self, mu: ParticleMeasure, on: Constraint, geometry: str) -> Iterator[_Step]:
        method, velocity = tableau(self.integrator.method), Velocity(self.maps[0], on)
        mu = mu.replace(on.retract(mu.points))
        if not self.time:
            return
        for taken in self.integrator.steps(velocity, mu, (0.0, self.time)):
            slopes = [
                velocity.linearisation(mu.replace(on.retract(x)), geometry=geometry)
                for x in taken.stages
            ]
            yield _Step(method, taken.size, slopes, taken.stages, taken.moved)


class _Step(NamedTuple):
    """One step: ε ↦ R'(ε + h Σⱼ bⱼκⱼ), κᵢ = Vᵢ R'(ε + h Σⱼ aᵢⱼκⱼ), with V and R' linearisations.

    R' is that of the retraction, at the points of each stage and at the end, before retraction.
    """

    method: Tableau
    size: float
    velocities: list[Linearisation]
    reached: Sequence[Tensor]
    moved: Tensor


@dataclass(frozen=True, eq=False)
class _Product:
    """The steps one after the other, with the derivative in each particle's radius.

    A step begins on the constraint: there a displacement changes the radius by its part along x.

    Attributes:
        on: the constraint.
        steps: the steps.
        each: for the fields of single atoms, in place of all atoms together.
    """

    on: Constraint
    steps: tuple[_Step, ...]
    each: bool

    def as_linear_map(self, mu: ParticleMeasure) -> LinearMap:
        batch = [*mu.batch_shape, mu.n_particles] if self.each else mu.batch_shape
        shape = (1 if self.each else mu.n_particles, mu.dim)
        return LinearMap(
            self.push,
            self.pull,
            shape,
            shape,
            torch.Size(batch),
            mu.dtype,
            mu.device,
            dense=lambda part: self._dense(mu, torch.Size([*batch, *shape]))[part],
        )

    def push(self, eps: Tensor) -> Tensor:
        """One product with each V."""
        return self._pushed(eps, lambda V, eps: V.matvec(eps))

    def _dense(self, mu: ParticleMeasure, shape: torch.Size) -> Tensor:
        """The matrices of the flattened batch: all columns are pushed at once."""
        size = math.prod(shape[-2:])
        units = torch.eye(size, dtype=mu.dtype, device=mu.device)
        units = units.reshape(size, *(1 for _ in shape[:-2]), *shape[-2:]).expand(size, *shape)
        images = self._pushed(units, lambda V, eps: _by_columns(V.to_dense(), eps))
        return images.reshape(size, -1, size).permute(1, 2, 0)

    def _pushed(self, eps: Tensor, product: Callable[[LinearMap, Tensor], Tensor]) -> Tensor:
        for step in self.steps:
            _, radius = self.on.pull(self._of(step.reached[0]), eps)
            slopes: list[Tensor] = []
            for row, V, x in self._stages(step):
                reached = stepped(eps, step.size, row, slopes)
                slopes.append(product(V, self.on.push(x, reached, radius)))
            moved = stepped(eps, step.size, step.method.weights, slopes)
            eps = self.on.push(self._of(step.moved), moved, radius)
        return eps

    def pull(self, zeta: Tensor) -> Tensor:
        """The transpose: the same stages, backwards."""
        for step in reversed(self.steps):
            zeta, radius = self.on.pull(self._of(step.moved), zeta)
            h = step.size
            slopes = [h * weight * zeta for weight in step.method.weights]
            for i, (row, V, x) in reversed(list(enumerate(self._stages(step)))):
                back, more = self.on.pull(x, V.rmatvec(slopes[i]))
                zeta, radius = zeta + back, radius + more
                for j, weight in enumerate(row):
                    slopes[j] = torch.add(slopes[j], back, alpha=h * weight)
            start = self._of(step.reached[0])
            zeta = zeta + self.on.push(start, torch.zeros_like(zeta), radius)
        return zeta

    def _of(self, points: Tensor) -> Tensor:
        return points.unsqueeze(-2) if self.each else points

    def _stages(self, step: _Step) -> Iterator[tuple[tuple[float, ...], LinearMap, Tensor]]:
        for row, V, x in zip(step.method.rows, step.velocities, step.reached, strict=True):
            yield row, V.field if self.each else V.atoms, self._of(x)


def _by_columns(matrices: Tensor, eps: Tensor) -> Tensor:
    """Products of (*batch, n·d, n·d) with displacements (k, *batch, n, d) of the same atoms."""
    columns = eps.flatten(-2).movedim(0, -1)
    return (matrices @ columns).movedim(-1, 0).unflatten(-1, eps.shape[-2:])
