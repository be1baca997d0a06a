"""The states of a flow at chosen times, of which only one is held in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from meanfield.checks import describe, is_traced, number
from meanfield.dynamics.adaptive import Adaptive, integrator_of
from meanfield.dynamics.clocks import checked_times
from meanfield.dynamics.constraints import Constraint, constraint_at
from meanfield.dynamics.integrators import Integrator, Noise, out_of_range
from meanfield.dynamics.merging import coalesced, meets
from meanfield.dynamics.velocities import Layers, Velocity, layers_of
from meanfield.measures import MeasureMap, ParticleMeasure, check_measure, log_sums


class State(NamedTuple):
    """All that is needed to continue from a time.

    Attributes:
        time: t.
        points: of the atoms that move, (..., m, d).
        labels: for each particle the index of its atom, (n,); None if no atoms have merged.
        evaluations: of the velocity, since the start.
        step: the next step that an adaptive method tries.
    """

    time: float
    points: Tensor
    labels: Tensor | None
    evaluations: int
    step: float | None


@dataclass(frozen=True, eq=False)
class FlowProblem:
    """A flow; its arguments are checked.

    Attributes:
        start: μ at the first time.
        layers: the maps.
        times: output times, the first is that of the start.
        integrator: how it gets from one time to the next.
        constraint: None, "sphere" or "layer_norm".
        noise: Brownian motion added to the flow, if any.
        coalesce: distance within which atoms are merged; 0 for no merging.
    """

    start: ParticleMeasure
    layers: Layers
    times: np.ndarray
    integrator: Integrator
    constraint: str | None
    noise: Noise | None = None
    coalesce: float = 0.0

    def __post_init__(self) -> None:
        mu, noise = check_measure(self.start), self.noise
        if noise is not None and not isinstance(noise, Noise):
            raise TypeError(
                f"noise: expected Noise(temperature, generator) or None, got {describe(noise)}"
            )
        if noise is not None and self.integrator.method != "euler":
            raise ValueError(
                "noise: expected method 'euler' (Euler–Maruyama) beside it, got "
                f"{self.integrator.method!r}"
            )
        if self.coalesce and (mu.batch_shape or mu.is_positioned or noise is not None):
            raise ValueError(
                "coalesce: expected one measure without batch axes, positions or noise (atoms at "
                "different positions see different pasts, and noise separates merged atoms), got "
                f"{mu!r}{' and noise' if noise is not None else ''}"
            )
        self.layers.check_start(mu)
        constraint_at(self.constraint, mu.points)  # refuses a start that is not on it

    def measure_at(self, state: State) -> ParticleMeasure:
        """All particles, whether they move together or not."""
        points = state.points
        return self.start.replace(points if state.labels is None else points[state.labels])

    def moving(self, labels: Tensor | None, points: Tensor) -> tuple[ParticleMeasure, Constraint]:
        """The measure of the atoms that move, at these points, and their constraint."""
        if labels is None:
            on = constraint_at(self.constraint, self.start.points)
            return self.start.replace(points), on
        count = int(labels.max()) + 1
        logs = log_sums(self.start.log_weights, labels, count)
        places = torch.arange(len(labels), device=labels.device)
        first = torch.full_like(logs, len(labels), dtype=places.dtype)
        first = first.scatter_reduce(0, labels, places, "amin")
        on = constraint_at(self.constraint, self.start.points[first])
        return ParticleMeasure(points, log_weights=logs), on


def flow_problem(
    F: MeasureMap | Sequence[MeasureMap],
    mu: ParticleMeasure,
    times: Any,
    *,
    method: str | Adaptive,
    step: float | None,
    constraint: str | None,
    noise: Noise | None,
    coalesce: float,
) -> FlowProblem:
    """The flow that these arguments describe (see `flow`)."""
    clock = checked_times(times)
    layers = layers_of(F, float(clock[0]), float(clock[-1]))
    coalesce = number(coalesce, "coalesce", least=0)
    integrator = integrator_of(method, step)
    return FlowProblem(mu, layers, clock, integrator, constraint, noise, coalesce)


def trajectory(
    F: MeasureMap | Sequence[MeasureMap],
    mu: ParticleMeasure,
    times: Any,
    *,
    method: str | Adaptive = "dopri5",
    step: float | None = None,
    constraint: str | None = None,
    noise: Noise | None = None,
    coalesce: float = 0.0,
) -> Iterator[tuple[float, ParticleMeasure]]:
    """(t, μ_t) at each time, one at a time; arguments as in `flow`.

    The measures are differentiable functions of μ and of the maps.
    """
    problem = flow_problem(
        F, mu, times, method=method, step=step, constraint=constraint, noise=noise,
        coalesce=coalesce,
    )  # fmt: skip
    return ((state.time, problem.measure_at(state)) for state in states(problem))


def states(problem: FlowProblem, after: State | None = None) -> Iterator[State]:
    """The states at the times of a problem, from the start or after a given state."""
    state = after
    if state is None:
        onto = constraint_at(problem.constraint, problem.start.points)
        state = State(float(problem.times[0]), onto.retract(problem.start.points), None, 0, None)
        yield state
    for time in problem.times[problem.times > state.time]:
        state = _advanced(problem, state, float(time))
        yield state


def _advanced(problem: FlowProblem, state: State, until: float) -> State:
    labels, step, evaluations = state.labels, state.step, state.evaluations
    measure, constraint = problem.moving(labels, state.points)
    # The flow contracts clusters fast, which keeps adaptive steps short. Stopping as soon as
    # atoms meet, and merging them, removes that.
    halt = partial(meets, scale=problem.coalesce) if problem.coalesce else None
    for F, start, end in problem.layers.between(state.time, until):
        time = start
        while time < end:
            time, measure, spent, step = problem.integrator.advance(
                Velocity(F, constraint), measure, (time, end), noise=problem.noise, step=step,
                halt=halt,
            )  # fmt: skip
            evaluations += spent
            if not is_traced(measure.points) and not bool(measure.points.isfinite().all()):
                raise out_of_range(measure.dtype, start)
            if problem.coalesce:
                together, renumbered = coalesced(measure, problem.coalesce)
                if together.n_particles < measure.n_particles:
                    labels = renumbered if labels is None else renumbered[labels]
                    measure, constraint = problem.moving(labels, together.points)
    return State(until, measure.points, labels, evaluations, step)
