"""The measures of a flow at chosen times, of which only one is held in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meanfield.checks import as_floats, is_traced
from meanfield.dynamics.constraints import Constraint, Velocity, constraint_at
from meanfield.dynamics.functionals import coalesced, meets
from meanfield.dynamics.integrators import Integrator, out_of_range
from meanfield.maps import Map
from meanfield.measures import ParticleMeasure, check_measure, log_sums, present_points
from meanfield.results import Variable

TIME = Variable("time", "time, or depth in layers", dims=("time",), symbol="t")


@dataclass(frozen=True, eq=False)
class FlowProblem:
    """A flow; its arguments are checked.

    Attributes:
        start: μ at the first time.
        map: F, whose image is the velocity.
        times: output times, the first is that of the start.
        integrator: how it gets from one time to the next.
        constraint: None or "sphere".
        coalesce: distance within which atoms are merged; 0 for no merging.
    """

    start: ParticleMeasure
    map: Map
    times: np.ndarray
    integrator: Integrator
    constraint: str | None
    coalesce: float = 0.0

    def __post_init__(self) -> None:
        mu = check_measure(self.start)
        if self.coalesce and (mu.batch_shape or mu.is_positioned):
            raise ValueError(
                "coalesce: expected one measure without batch axes or positions (atoms at "
                f"different positions see different pasts), got {mu!r}"
            )
        constraint_at(self.constraint, mu)  # refuses a start that is not on it

    def states(self) -> Iterator[tuple[ParticleMeasure, int]]:
        """(μ_t, evaluations of the velocity since the start) at each time.

        The measures are differentiable functions of the start and of the maps.
        """
        on = constraint_at(self.constraint, self.start)
        moving = self.start.replace(on.retract(self.start.points))
        labels: Tensor | None = None  # for each particle the atom that it moves with, (n,)
        step, evaluations = None, 0
        yield moving, evaluations
        for time, until in pairwise(self.times.tolist()):
            while time < until:
                begun, since = time, moving
                velocity = Velocity(self.map, on)
                for taken in self.integrator.steps(velocity, moving, (time, until), step=step):
                    time, moving, step = taken.time, taken.measure, taken.following
                    evaluations += taken.evaluations
                    # The flow contracts clusters fast, which keeps adaptive steps short: atoms
                    # are merged as soon as they meet.
                    if self.coalesce and meets(moving, self.coalesce):
                        break
                if not is_traced(moving.points) and not _is_finite(moving):
                    raise self._lost(velocity, since, (begun, until))
                if self.coalesce:
                    labels, moving, on = self._merged(labels, moving, on)
            points = moving.points if labels is None else moving.points[labels]
            yield self.start.replace(points), evaluations

    def _lost(
        self, velocity: Velocity, mu: ParticleMeasure, interval: tuple[float, float]
    ) -> Exception:
        """The error of an interval at whose end particles are not finite: its steps once more."""
        time, _ = interval
        for taken in self.integrator.steps(velocity, mu, interval):
            if not _is_finite(taken.measure):
                break
            time, mu = taken.time, taken.measure
        return out_of_range(velocity, mu, time)

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
        start = ParticleMeasure(self.start.points[first], log_weights=logs)
        on = constraint_at(self.constraint, start)
        return labels, start.replace(on.retract(together.points)), on


def _is_finite(mu: ParticleMeasure) -> bool:
    return bool(present_points(mu).isfinite().all())


def checked_times(times: Sequence[float] | Any) -> np.ndarray:
    """Increasing finite times, (T,), T ≥ 1.

    Raises:
        ValueError: another shape, NaN or infinite times, times that do not increase.
    """
    found = as_floats(times, "times", finite=True)
    if found.ndim != 1:
        got = f"{float(found):g}" if found.ndim == 0 else f"shape {found.shape}"
        raise ValueError(f"times: expected increasing numbers such as [0.0, 10.0], got {got}")
    if not (np.diff(found) > 0).all():
        k = int(np.argmin(np.diff(found)))
        raise ValueError(
            f"times: expected increasing numbers, got {found[k]:g} before {found[k + 1]:g}"
        )
    return found
