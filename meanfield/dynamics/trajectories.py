"""The measures of a flow at chosen times, of which only one is held in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from meanfield.checks import describe, is_traced
from meanfield.dynamics.constraints import Constraint, constraint_at
from meanfield.dynamics.integrators import Integrator, Noise, out_of_range
from meanfield.dynamics.merging import coalesced, meets
from meanfield.dynamics.velocities import Schedule, Velocity
from meanfield.measures import ParticleMeasure, check_measure, log_sums


@dataclass(frozen=True, eq=False)
class FlowProblem:
    """A flow; its arguments are checked.

    Attributes:
        start: μ at the first time.
        schedule: the maps, and when each acts.
        times: output times, the first is that of the start.
        integrator: how it gets from one time to the next.
        constraint: None, "sphere" or "layer_norm".
        noise: Brownian motion added to the flow, if any.
        coalesce: distance within which atoms are merged; 0 for no merging.
    """

    start: ParticleMeasure
    schedule: Schedule
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
        self.schedule.check_start(mu)
        constraint_at(self.constraint, mu.points)  # refuses a start that is not on it

    def states(self) -> Iterator[tuple[ParticleMeasure, int]]:
        """(μ_t, evaluations of the velocity since the start) at each time.

        The measures are differentiable functions of the start and of the maps.
        """
        on = constraint_at(self.constraint, self.start.points)
        moving = self.start.replace(on.retract(self.start.points))
        labels: Tensor | None = None  # for each particle the atom that it moves with, (n,)
        step, evaluations = None, 0
        yield moving, evaluations
        for before, until in pairwise(self.times.tolist()):
            for F, begin, end in self.schedule.between(before, until):
                time = begin
                while time < end:
                    for taken in self.integrator.steps(
                        Velocity(F, on), moving, (time, end), noise=self.noise, step=step
                    ):
                        time, moving, step = taken.time, taken.measure, taken.following
                        evaluations += taken.evaluations
                        # The flow contracts clusters fast, which keeps adaptive steps short:
                        # atoms are merged as soon as they meet.
                        if self.coalesce and meets(moving, self.coalesce):
                            break
                    if not is_traced(moving.points) and not bool(moving.points.isfinite().all()):
                        raise out_of_range(moving.dtype, begin)
                    if self.coalesce:
                        labels, moving, on = self._merged(labels, moving, on)
            points = moving.points if labels is None else moving.points[labels]
            yield self.start.replace(points), evaluations

    def _merged(
        self, labels: Tensor | None, moving: ParticleMeasure, on: Constraint
    ) -> tuple[Tensor | None, ParticleMeasure, Constraint]:
        """Atoms that have met as one: each particle's atom, the atoms, and their constraint."""
        together, renumbered = coalesced(moving, self.coalesce)
        if together.n_particles == moving.n_particles:
            return labels, moving, on
        labels = renumbered if labels is None else renumbered[labels]
        logs = log_sums(self.start.log_weights, labels, together.n_particles)
        places = torch.arange(len(labels), device=labels.device)
        first = torch.full_like(logs, len(labels), dtype=places.dtype)
        first = first.scatter_reduce(0, labels, places, "amin")
        on = constraint_at(self.constraint, self.start.points[first])
        return labels, ParticleMeasure(together.points, log_weights=logs), on
