"""A flow as maps of measures, composable with all that takes one: its velocity, its spans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meanfield.dynamics.constraints import constraint_at
from meanfield.dynamics.integrators import FixedStep
from meanfield.dynamics.trajectories import trajectory
from meanfield.dynamics.variation import flow_linearisation, velocity_linearisation
from meanfield.dynamics.velocities import Velocity
from meanfield.maps import Linearisation, Map, as_map
from meanfield.measures import MeasureMap, ParticleMeasure

__all__ = ["FlowMap", "VelocityMap"]


@dataclass(frozen=True)
class VelocityMap(Map):
    """μ ↦ (x ↦ P_x Γ_μ(x))♯μ: the velocities of a flow as a map of measures.

    Its Lipschitz constant is what Grönwall's inequality asks for.

    Args:
        F: Γ, as a map of measures.
        constraint: as in `flow`.
    """

    F: MeasureMap
    constraint: str | None = None

    def __call__(self, mu: ParticleMeasure, /) -> ParticleMeasure:
        """Atoms move to their velocities; weights and positions stay."""
        return mu.replace(self._velocity(mu)(mu.points))

    def linearisation(self, mu: ParticleMeasure, *, geometry: str = "euclidean") -> Linearisation:
        """The derivative at μ, see `meanfield.linearize`."""
        return velocity_linearisation(self._velocity(mu), mu.points, geometry)

    @property
    def causal(self) -> bool:  # type: ignore[override]
        """Whether F is masked."""
        return as_map(self.F).causal

    @property
    def particlewise(self) -> bool:  # type: ignore[override]
        """Whether F moves every particle by itself."""
        return as_map(self.F).particlewise

    @property
    def dim(self) -> int | None:  # type: ignore[override]
        """d, if F says it."""
        return as_map(self.F).dim

    def _velocity(self, mu: ParticleMeasure) -> Velocity:
        return Velocity(self.F, mu, constraint_at(self.constraint, mu.points))


@dataclass(frozen=True)
class FlowMap(Map):
    """Φ: μ ↦ μ_t, the measure that the flow of `flow` has made of μ between two times.

    It is differentiable, so `lipschitz.local_lipschitz`, `lipschitz.secant_ratio` and the like
    take it as they take attention.

    Args:
        F: a map of measures, or one per unit of time, as in `flow`.
        end: t.
        start: the time of μ.
        method: "rk4" or "euler".
        step: largest step; the whole span if None.
        constraint: as in `flow`.

    Example:
        >>> from meanfield import AttentionParameters, SelfAttention
        >>> F = SelfAttention(AttentionParameters.from_bilinear([[0.0]], [[1.0]]))
        >>> FlowMap(F, 1.0, step=0.1)(ParticleMeasure([[1.0], [3.0]])).points
        tensor([[4.4366],
                [6.4366]], dtype=torch.float64)
    """

    F: MeasureMap | Sequence[MeasureMap]
    end: float
    start: float = 0.0
    method: str = "rk4"
    step: float | None = None
    constraint: str | None = None

    def __post_init__(self) -> None:
        FixedStep(self.method, self.step)
        if not self.start <= self.end:
            raise ValueError(f"start, end: expected start ≤ end, got {self.start}, {self.end}")

    def __call__(self, mu: ParticleMeasure, /) -> ParticleMeasure:
        """Φ(μ); weights and positions stay."""
        times = [self.start, self.end] if self.end > self.start else [self.start]
        found = mu
        for _, measure in trajectory(
            self.F, mu, times, method=self.method, step=self.step, constraint=self.constraint
        ):
            found = measure
        return found

    def linearisation(self, mu: ParticleMeasure, *, geometry: str = "euclidean") -> Linearisation:
        """The derivative at μ as a product over the steps, see `meanfield.linearize`.

        It keeps the linearisation of F at every stage of every step.
        """
        return flow_linearisation(
            self.F,
            mu,
            (self.start, self.end),
            FixedStep(self.method, self.step),
            self.constraint,
            geometry=geometry,
        )

    @property
    def causal(self) -> bool:  # type: ignore[override]
        """Whether one of the maps is masked."""
        return any(as_map(each).causal for each in self._maps)

    @property
    def particlewise(self) -> bool:  # type: ignore[override]
        """Whether all of the maps move every particle by itself."""
        return all(as_map(each).particlewise for each in self._maps)

    @property
    def dim(self) -> int | None:  # type: ignore[override]
        """d, of the first map, if it says it."""
        return as_map(self._maps[0]).dim

    @property
    def _maps(self) -> Sequence[MeasureMap]:
        return self.F if isinstance(self.F, Sequence) else [self.F]
