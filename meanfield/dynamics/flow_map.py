"""The flow between two times as a map of measures, composable with all that takes one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np

from meanfield.checks import number
from meanfield.dynamics.adaptive import Adaptive, integrator_of
from meanfield.dynamics.integrators import Integrator
from meanfield.dynamics.trajectories import FlowProblem, states
from meanfield.dynamics.variation import flow_linearisation
from meanfield.dynamics.velocities import layers_of
from meanfield.layers.composition import Composite, identity_at
from meanfield.maps import Linearisation
from meanfield.measures import MeasureMap, ParticleMeasure


@final
@dataclass(frozen=True, eq=False, init=False)
class FlowMap(Composite):
    """Φ: μ ↦ μ_t, the measure that the flow of `flow` has made of μ between two times.

    It is differentiable, so `lipschitz.local_lipschitz`, `lipschitz.secant_ratio` and the like
    take it as they take attention.

    Args:
        F: a map of measures, or one per unit of time, as in `flow`.
        end: t.
        start: the time of μ.
        method: as in `flow`. An adaptive method makes other steps at other measures; they differ
            by its tolerance, and a secant ratio of close measures sees that.
        step: as in `flow`.
        constraint: as in `flow`.

    Example:
        >>> from meanfield import AttentionParameters, SelfAttention
        >>> F = SelfAttention(AttentionParameters.from_bilinear([[0.0]], [[1.0]]))
        >>> FlowMap(F, 1.0)(ParticleMeasure([[1.0], [3.0]])).points
        tensor([[4.4366],
                [6.4366]], dtype=torch.float64)
    """

    span: tuple[float, float]
    integrator: Integrator
    constraint: str | None
    F: MeasureMap | Sequence[MeasureMap] = field(repr=False)

    def __init__(
        self,
        F: MeasureMap | Sequence[MeasureMap],
        end: float,
        start: float = 0.0,
        *,
        method: str | Adaptive = "dopri5",
        step: float | None = None,
        constraint: str | None = None,
    ) -> None:
        start = number(start, "start")
        end = number(end, "end", least=start)
        super().__init__(layers_of(F, start, end).maps)
        store = object.__setattr__
        store(self, "F", F)
        store(self, "span", (start, end))
        store(self, "integrator", integrator_of(method, step))
        store(self, "constraint", constraint)

    def __call__(self, mu: ParticleMeasure, /) -> ParticleMeasure:
        """Φ(μ); weights and positions stay."""
        layers, times = layers_of(self.F, *self.span), np.array(sorted({*self.span}))
        problem = FlowProblem(mu, layers, times, self.integrator, self.constraint)
        *_, last = states(problem)
        return problem.measure_at(last)

    def linearisation(self, mu: ParticleMeasure, *, geometry: str = "euclidean") -> Linearisation:
        """The derivative at μ as a product over the steps, exactly that of the scheme.

        Steps that an adaptive method chooses count as fixed.

        It keeps the linearisation of F at every stage of every step.
        """
        layers = layers_of(self.F, *self.span)
        whole = flow_linearisation(
            layers, mu, self.span, self.integrator, self.constraint, geometry=geometry
        )
        return whole @ identity_at(mu)  # without absent atoms
