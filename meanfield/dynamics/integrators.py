"""From one time to the next: Euler (residual layers), RK4, adaptive Dormand–Prince pairs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from meanfield.checks import as_generator, choice, count, describe, is_traced, number
from meanfield.dynamics.velocities import Velocity
from meanfield.errors import ConvergenceError
from meanfield.measures import ParticleMeasure

__all__ = [
    "METHODS",
    "TABLEAUS",
    "Adaptive",
    "Advance",
    "FixedStep",
    "Noise",
    "Tableau",
    "integrator_of",
    "stages",
]

METHODS = ("rk4", "euler", "dopri5", "dop853")
_TINY_RTOL = 1e-13  # below it the error estimate of a step in float64 is rounding


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
        generator: where the random numbers come from.

    Raises:
        ValueError: a temperature that is negative or not finite.
    """

    temperature: float
    generator: torch.Generator

    def __post_init__(self) -> None:
        number(self.temperature, "temperature", least=0)
        as_generator(self.generator)

    def increment(self, points: Tensor, step: float) -> Tensor:
        """√(2τh) ξ, ξ standard normal, in the shape of the points."""
        xi = torch.randn(
            points.shape, generator=self.generator, dtype=points.dtype, device=points.device
        )
        return math.sqrt(2 * self.temperature * step) * xi


class Tableau(NamedTuple):
    """An explicit Runge–Kutta method in which each stage depends on the previous one only.

    Attributes:
        nodes: stage i is at x + h · nodeᵢ · (slope of stage i − 1).
        weights: of the slopes in the step.
    """

    nodes: tuple[float, ...]
    weights: tuple[float, ...]


TABLEAUS = {
    "rk4": Tableau((0.0, 1 / 2, 1 / 2, 1.0), (1 / 6, 1 / 3, 1 / 3, 1 / 6)),
    "euler": Tableau((0.0,), (1.0,)),
}


class Stages(NamedTuple):
    """The points at which a step evaluates the velocity, and its end, all before retraction."""

    reached: tuple[Tensor, ...]
    moved: Tensor


def stages(tableau: Tableau, velocity: Velocity, mu: ParticleMeasure, h: float) -> Stages:
    """One step, with the points at which it evaluates the velocity."""
    # Each stage evaluates attention at its own measure; with the first measure's the order is 1.
    reached, moved, slope = [], mu.points, torch.zeros_like(mu.points)
    for node, weight in zip(tableau.nodes, tableau.weights, strict=True):
        reached.append(mu.points + h * node * slope)
        slope = velocity(mu.replace(velocity.constraint.retract(reached[-1]))).points
        moved = moved + h * weight * slope
    return Stages(tuple(reached), moved)


@dataclass(frozen=True)
class FixedStep:
    """Equal steps, each followed by a retraction onto the constraint.

    Args:
        method: "euler" (order 1: residual layers of size h) or "rk4" (order 4).
        step: largest h; an interval is cut into equal steps. One step per interval if None.
    """

    method: str = "rk4"
    step: float | None = None

    def __post_init__(self) -> None:
        choice(self.method, "method", TABLEAUS)
        if self.step is not None:
            object.__setattr__(self, "step", number(self.step, "step", above=0))

    def steps_in(self, length: float) -> int:
        """How many steps an interval of this length takes."""
        # Slack for rounding: in floats 2.1/0.3 is above 7.
        return 1 if self.step is None else max(1, math.ceil(length / self.step * (1 - 1e-12)))

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
        """Move a measure through an interval in which one map acts."""
        del step, halt  # used by adaptive methods
        tableau = TABLEAUS[self.method]
        length = interval[1] - interval[0]
        count = self.steps_in(length)
        h = length / count
        on = velocity.constraint
        for _ in range(count):
            moved = stages(tableau, velocity, mu, h).moved
            if noise is not None:
                moved = moved + on.tangent(mu.points, noise.increment(mu.points, h))
            mu = mu.replace(on.retract(moved))
        return Advance(interval[1], mu, len(tableau.nodes) * count, None)


@dataclass(frozen=True)
class Adaptive:
    """Steps of SciPy's Dormand–Prince pairs, chosen from an estimate of their error.

    All particles and cases share a step. On a sphere the velocity is extended off the sphere,
    constant along rays, so that it stays tangent; particles are retracted at the end of each
    interval.

    Args:
        method: "dopri5", order 5(4), or "dop853", order 8(5,3), better below rtol of about 1e-8.
        rtol: relative error of a step in each coordinate.
        atol: absolute error of a step in each coordinate.
        max_steps: largest number of steps in an interval.
    """

    method: str = "dopri5"
    rtol: float = 1e-6
    atol: float = 1e-9
    max_steps: int = 100_000

    def __post_init__(self) -> None:
        choice(self.method, "method", ("dopri5", "dop853"))
        number(self.rtol, "rtol", least=_TINY_RTOL)
        number(self.atol, "atol", above=0)
        count(self.max_steps, "max_steps")

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

        The first step has the length `step`, if given. Stops after the first step where
        ``halt(measure)``.

        Raises:
            ConvergenceError: a step below the spacing of floats, or more than `max_steps`.
        """
        if is_traced(mu.points):
            raise ValueError(
                f"method {self.method!r} chooses its steps by values, which torch.func hides; "
                "differentiate 'rk4' or 'euler'"
            )
        solver = self._solver(velocity, mu, interval, step)

        def reached() -> ParticleMeasure:
            return mu.replace(velocity.constraint.retract(_as_points(solver.y, mu.points)))

        proposed = solver.h_abs
        for _ in range(self.max_steps):
            if solver.status != "running":
                break
            proposed = solver.h_abs
            message = solver.step()
            if solver.status == "failed":
                raise ConvergenceError(
                    f"{self.method}: no step of relative error {self.rtol:g} at t = "
                    f"{solver.t:g}: {message} Loosen rtol and atol, or use a fixed step"
                )
            if halt is not None and halt(reached()):
                break
        else:
            if solver.status == "running":
                raise ConvergenceError(
                    f"{self.method}: {self.max_steps} steps end at t = {solver.t:g} of "
                    f"{interval[1]:g}; loosen rtol and atol, give coalesce=, or raise max_steps"
                )
        # The end of the interval cuts the last step short: go on with the length before that.
        following = max(float(proposed), float(solver.h_abs))
        return Advance(float(solver.t), reached(), int(solver.nfev), following)

    def _solver(
        self,
        velocity: Velocity,
        mu: ParticleMeasure,
        interval: tuple[float, float],
        step: float | None,
    ) -> Any:
        from scipy.integrate import DOP853, RK45

        def derivative(_t: float, y: np.ndarray) -> np.ndarray:
            at = mu.replace(velocity.constraint.retract(_as_points(y, mu.points)))
            return _as_array(velocity(at).points)

        kind = RK45 if self.method == "dopri5" else DOP853
        first = None if step is None else min(step, interval[1] - interval[0])
        return kind(
            derivative,
            interval[0],
            _as_array(mu.points),
            interval[1],
            rtol=self.rtol,
            atol=self.atol,
            first_step=first,
        )


def integrator_of(method: str | Adaptive, step: float | None) -> FixedStep | Adaptive:
    """The integrator that a method and a step stand for.

    Raises:
        ValueError: an unknown name, or a step where it means nothing.
    """
    if isinstance(method, str):
        choice(method, "method", METHODS)
        if method in TABLEAUS:
            return FixedStep(method, step)
        method = Adaptive(method)
    if not isinstance(method, Adaptive):
        raise TypeError(
            f"method: expected one of {METHODS} or Adaptive(...), got {describe(method)}"
        )
    if step is not None:
        raise ValueError(f"step: expected None with {method}, which has its own; got {step}")
    return method


def _as_array(points: Tensor) -> np.ndarray:
    return points.detach().double().cpu().numpy().reshape(-1)


def _as_points(flat: np.ndarray, like: Tensor) -> Tensor:
    # A copy: SciPy writes its next stage over the array.
    return torch.tensor(flat, dtype=like.dtype, device=like.device).reshape(like.shape)
