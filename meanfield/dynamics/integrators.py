"""From one time to the next: what an integrator is, equal steps, and noise."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from meanfield.checks import as_generator, choice, number
from meanfield.dynamics.schemes import FIXED, Stages, stages, tableau
from meanfield.dynamics.velocities import Velocity
from meanfield.measures import ParticleMeasure


class Advance(NamedTuple):
    """The time and measure reached, evaluations of the velocity, the next step to try."""

    time: float
    measure: ParticleMeasure
    evaluations: int
    step: float | None


@dataclass(frozen=True, eq=False)
class Noise:
    """Brownian motion: dX = P_X Γ_μ(X) dt + √(2τ) P_X ∘ dW, so ∂μ + div(μΓ) = τΔμ.

    Args:
        temperature: τ ≥ 0.
        generator: where the random numbers come from; a new one of a fixed seed if None.

    Raises:
        ValueError: a temperature that is negative or not finite.
    """

    temperature: float
    generator: torch.Generator = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        number(self.temperature, "temperature", least=0)
        object.__setattr__(self, "generator", as_generator(self.generator))

    def increment(self, points: Tensor, step: float) -> Tensor:
        """√(2τh) ξ, ξ standard normal, in the shape of the points."""
        xi = torch.randn(
            points.shape, generator=self.generator, dtype=points.dtype, device=points.device
        )
        return math.sqrt(2 * self.temperature * step) * xi


class Step(NamedTuple):
    """A step that was taken.

    Attributes:
        size: h.
        stages: where the velocity was evaluated.
        time: reached.
        measure: reached, on the constraint.
        evaluations: of the velocity, since the step before.
        following: the next step to try; None for fixed steps.
    """

    size: float
    stages: Stages
    time: float
    measure: ParticleMeasure
    evaluations: int
    following: float | None


class Integrator(ABC):
    """A way from one time to the next: steps, each followed by a retraction onto the constraint.

    Attributes:
        method: the name of its coefficients in `schemes.tableau`.
    """

    method: str

    @abstractmethod
    def steps(
        self,
        velocity: Velocity,
        mu: ParticleMeasure,
        interval: tuple[float, float],
        *,
        noise: Noise | None = None,
        step: float | None = None,
    ) -> Iterator[Step]:
        """The steps through an interval in which one map acts, from μ on the constraint."""

    def advance(
        self,
        velocity: Velocity,
        mu: ParticleMeasure,
        interval: tuple[float, float],
        *,
        noise: Noise | None = None,
        step: float | None = None,
        halt: Callable[[ParticleMeasure], bool] | None = None,
    ) -> Advance:
        """Move a measure through an interval in which one map acts.

        The first step has the length `step`, if steps are chosen here and it is given. Stops
        after the first step where ``halt(measure)``.
        """
        at = Advance(interval[0], mu, 0, None)
        for taken in self.steps(velocity, mu, interval, noise=noise, step=step):
            spent = at.evaluations + taken.evaluations
            at = Advance(taken.time, taken.measure, spent, taken.following)
            if halt is not None and halt(taken.measure):
                break
        return at


@final
@dataclass(frozen=True)
class FixedStep(Integrator):
    """Equal steps.

    Args:
        method: "euler" (order 1: residual layers of size h) or "rk4" (order 4).
        step: largest h; an interval is cut into equal steps.
    """

    method: str
    step: float

    def __post_init__(self) -> None:
        choice(self.method, "method", FIXED)
        object.__setattr__(self, "step", number(self.step, "step", above=0))

    def steps_in(self, length: float) -> int:
        """How many steps an interval of this length takes."""
        # Slack for rounding: in floats 2.1/0.3 is above 7.
        return max(1, math.ceil(length / self.step * (1 - 1e-12)))

    def steps(
        self,
        velocity: Velocity,
        mu: ParticleMeasure,
        interval: tuple[float, float],
        *,
        noise: Noise | None = None,
        step: float | None = None,
    ) -> Iterator[Step]:
        """Equal steps no longer than the one asked for."""
        del step  # of adaptive methods
        method, (start, end), on = tableau(self.method), interval, velocity.constraint
        count = self.steps_in(end - start)
        h = (end - start) / count
        for k in range(1, count + 1):
            found = stages(method, velocity, mu, h)
            moved = found.moved
            if noise is not None:
                moved = moved + on.tangent(mu.points, noise.increment(mu.points, h))
            mu = mu.replace(on.retract(moved))
            time = end if k == count else start + k * h
            yield Step(h, found, time, mu, len(method.rows), None)


def out_of_range(dtype: torch.dtype, time: float) -> OverflowError:
    """The error of particles that are no longer finite soon after this time."""
    return OverflowError(
        f"particles leave the range of {dtype} after t = {time:g}; flows in R^d with expanding "
        "values grow like e^t: stop earlier, use a smaller step, or constraint='sphere'"
    )
