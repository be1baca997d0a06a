"""From one time to the next: equal steps, or steps chosen by their error."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from meanfield.checks import choice, count, describe, number
from meanfield.dynamics.constraints import Velocity
from meanfield.dynamics.schemes import ADAPTIVE, FIXED, Tableau, stages, stepped, tableau
from meanfield.errors import ConvergenceError
from meanfield.habits import with_hints
from meanfield.linalg.vectors import lengths
from meanfield.measures import ParticleMeasure, present_points

_TINY_RTOL = 1e-13  # below it the error estimate of a step in float64 is rounding
# The next step is longer or shorter than the last by these factors at most, and that of the
# formula by a margin.
_SHORTER, _LONGER, _MARGIN = 0.2, 10.0, 0.9


class Step(NamedTuple):
    """A step that was taken.

    Attributes:
        size: h.
        stages: where the velocity was evaluated, before retraction.
        moved: the end, before retraction.
        time: reached.
        measure: reached, on the constraint.
        evaluations: of the velocity, since the step before.
        following: the next step to try; None for fixed steps.
    """

    size: float
    stages: list[Tensor]
    moved: Tensor
    time: float
    measure: ParticleMeasure
    evaluations: int
    following: float | None


@final
@dataclass(frozen=True)
class FixedStep:
    """Equal steps, each followed by a retraction onto the constraint.

    Args:
        method: "euler" (order 1: residual layers of size h) or "rk4" (order 4).
        step: largest h; an interval is cut into equal steps.
    """

    method: str
    step: float

    def __post_init__(self) -> None:
        choice(self.method, "method", FIXED)
        object.__setattr__(self, "step", number(self.step, "step", above=0))

    def steps(
        self,
        velocity: Velocity,
        mu: ParticleMeasure,
        interval: tuple[float, float],
        *,
        step: float | None = None,
    ) -> Iterator[Step]:
        """The steps through an interval in which one map acts, from μ on the constraint."""
        del step  # of adaptive methods
        method, (start, end) = tableau(self.method), interval
        # Slack for rounding: in floats 2.1/0.3 is above 7.
        n_steps = max(1, math.ceil((end - start) / self.step * (1 - 1e-12)))
        h = (end - start) / n_steps
        for k in range(1, n_steps + 1):
            reached, _, moved = stages(method, velocity, mu, h)
            mu = mu.replace(velocity.constraint.retract(moved))
            time = end if k == n_steps else start + k * h
            yield Step(h, reached, moved, time, mu, len(method.rows), None)


@with_hints
@final
@dataclass(frozen=True)
class Adaptive:
    """Steps of the Dormand–Prince pairs, chosen from an estimate of their error.

    All particles and cases share a step, and the largest error among the particles counts:
    neither splitting particles nor adding cases makes any of them less accurate. On a sphere the
    velocity is extended off the sphere, constant along rays, so that it stays tangent. The
    measures that are reached are differentiable functions of the start and of the maps, with
    these steps held fixed.

    Args:
        method: "dopri5", order 5(4), or "dop853", order 8(5,3), better below rtol of about 1e-8.
        rtol: error of a step at a particle, relative to its distance from 0.
        atol: absolute error of a step at a particle, added to that.
        max_steps: largest number of steps in an interval, or between two meetings of atoms that
            `coalesce` merges.
    """

    method: str = "dopri5"
    rtol: float = 1e-6
    atol: float = 1e-9
    max_steps: int = 100_000

    def __post_init__(self) -> None:
        choice(self.method, "method", ADAPTIVE)
        number(self.rtol, "rtol", least=_TINY_RTOL)
        number(self.atol, "atol", above=0)
        count(self.max_steps, "max_steps")

    def steps(
        self,
        velocity: Velocity,
        mu: ParticleMeasure,
        interval: tuple[float, float],
        *,
        step: float | None = None,
    ) -> Iterator[Step]:
        """The steps through an interval in which one map acts; the first tried has length `step`.

        Raises:
            ConvergenceError: a step below the spacing of floats, or more than `max_steps`.
            OverflowError: particles leave the range of their dtype.
            ValueError: F is not finite where the particles are.
        """
        method, (time, end), taken, longest = tableau(self.method), interval, 0, _LONGER
        slope, spent = velocity(mu).points, 1
        absent = mu.log_weights == -math.inf  # these may be anywhere
        if step is None:
            step, spent = self._first_size(method, velocity, mu, slope), 2
        while time < end:
            if taken == self.max_steps:
                raise ConvergenceError(
                    f"{self.method}: {self.max_steps} steps end at t = {time:g} of {end:g}; "
                    "loosen rtol and atol, give coalesce=, or raise max_steps"
                )
            least = 10 * math.ulp(time)
            size = min(max(step, least), end - time)
            places, slopes, moved = stages(method, velocity, mu, size, slope)
            reached = mu.replace(velocity.constraint.retract(moved))
            last, spent = velocity(reached).points, spent + len(method.rows)
            room = self._room(mu.points, reached.points)
            error = size * self._error(method, (*slopes, last), room, absent)
            factor = _MARGIN * error ** (-1 / (method.order + 1)) if error else _LONGER
            if not error < 1:
                step, longest = size * (factor if factor > _SHORTER else _SHORTER), 1.0
                if not step >= least or _at_the_edge(mu.points, size * slope, reached.points):
                    raise self._stuck(velocity, mu, time, reached.points)
                continue
            # The end of the interval may have cut this step short: go on with the longer one.
            step = max(size * min(factor, longest), step if size < step else 0.0)
            time = end if size == end - time else time + size
            yield Step(size, places, moved, time, reached, spent, step)
            mu, slope, spent, taken, longest = reached, last, 0, taken + 1, _LONGER

    def _room(self, *points: Tensor) -> Tensor:
        """The error that a step may make at each particle, (..., n)."""
        sizes = torch.stack([self._lengths(x) for x in points])
        return self.atol + self.rtol * sizes.amax(0)

    def _error(
        self, method: Tableau, slopes: Sequence[Tensor], room: Tensor, absent: Tensor
    ) -> float:
        """The largest error of a step of length 1, over what it may be."""
        zero = torch.zeros_like(slopes[0])
        each = (stepped(zero, 1.0, row, slopes) for row in method.errors)
        errors = [self._largest(one, room, absent) for one in each]
        if len(errors) == 1 or not errors[0]:
            return errors[0]
        # Of order 5, corrected by one of order 3: Hairer, Nørsett, Wanner, II.10.
        return errors[0] ** 2 / math.hypot(errors[0], 0.1 * errors[1])

    def _largest(self, of: Tensor, room: Tensor, absent: Tensor) -> float:
        shares = (self._lengths(of) / room).masked_fill(absent, 0.0)
        return float(shares.max()) if shares.numel() else 0.0

    def _lengths(self, of: Tensor) -> Tensor:
        try:
            return lengths(of.detach())
        except RuntimeError as error:
            raise ValueError(
                f"method {self.method!r} chooses its steps by values, which vmap hides; give a "
                "batch of measures in its place, or take 'rk4' or 'euler'"
            ) from error

    def _first_size(
        self, method: Tableau, velocity: Velocity, mu: ParticleMeasure, slope: Tensor
    ) -> float:
        """As in Hairer, Nørsett, Wanner, Solving ODEs I, II.4; one evaluation of the velocity."""
        room, x, v = self._room(mu.points), mu.points.detach(), slope.detach()
        absent = mu.log_weights == -math.inf
        far, fast = (self._largest(of, room, absent) for of in (x, v))
        if not fast < math.inf:
            return math.nan  # with which the flow ends
        h = 1e-6 if min(far, fast) < 1e-5 else 0.01 * far / fast
        ahead = mu.replace(velocity.constraint.retract(x + h * v))
        bend = self._largest(velocity(ahead).points - v, room, absent) / h
        if max(fast, bend) <= 1e-15:
            return max(1e-6, 1e-3 * h)
        return min(100 * h, (0.01 / max(fast, bend)) ** (1 / (method.order + 1)))

    def _stuck(
        self, velocity: Velocity, mu: ParticleMeasure, time: float, reached: Tensor
    ) -> Exception:
        if not bool((1e3 * reached).isfinite().all()):  # sums of slopes leave the range before
            return out_of_range(velocity, mu, time)
        return ConvergenceError(
            f"{self.method}: no step of relative error {self.rtol:g} at t = {time:g}: it would be "
            "shorter than the spacing of floats; loosen rtol and atol, or use a fixed step"
        )


def _at_the_edge(points: Tensor, move: Tensor, reached: Tensor) -> bool:
    """Whether a step by some last places of each coordinate leaves the number range."""
    if bool(reached.isfinite().all()):
        return False
    room = 100 * torch.finfo(points.dtype).eps * points.abs()
    return bool(((move.abs() <= room) | ~(points.abs() < math.inf)).all())


Integrator = FixedStep | Adaptive


def integrator_of(method: str | Adaptive, step: float | None) -> Integrator:
    """The integrator that a method and a step stand for.

    Raises:
        ValueError: an unknown name, a step where it means nothing, or none where it is needed.
    """
    if isinstance(method, str):
        choice(method, "method", (*ADAPTIVE, *FIXED))
        if method in FIXED:
            if step is None:
                raise ValueError(
                    f"step: expected a number > 0 with method {method!r}, got None; its error is "
                    "that of its step: choose one, or take 'dopri5', which does (a stack of "
                    "residual layers is method 'euler' with step 1)"
                )
            return FixedStep(method, step)
        method = Adaptive(method)
    if not isinstance(method, Adaptive):
        raise TypeError(
            f"method: expected one of {(*ADAPTIVE, *FIXED)} or Adaptive(...), got "
            f"{describe(method)}"
        )
    if step is not None:
        raise ValueError(
            f"step: expected None with method {method.method!r}, which chooses its steps, got "
            f"{step}; fixed steps are those of 'rk4' and 'euler'"
        )
    return method


def out_of_range(velocity: Velocity, mu: ParticleMeasure, time: float) -> Exception:
    """The error of particles that are finite in μ, at this time, and not after the next step."""
    slope, farthest = present_points(velocity(mu)), float(present_points(mu).abs().max())
    is_fast = bool((slope.abs() > 1e3 * (1 + farthest)).any())  # of NaN it is not known
    if farthest < torch.finfo(mu.dtype).max ** 0.25 and not is_fast:
        return ValueError(
            f"F: expected an image in finite numbers, got NaN or ∞ near t = {time:g}, where no "
            f"coordinate is above {farthest:.3g}; look at its parameters and at F(mu).points, or "
            "take smaller steps, if they are fixed"
        )
    return OverflowError(
        f"particles leave the range of {mu.dtype} after t = {time:g}; flows in R^d with expanding "
        "values grow like e^t: stop earlier, use a smaller step, or constraint='sphere'"
    )
