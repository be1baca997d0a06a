"""What a sweep is going to do: its cases, its configuration, its batches, the time it may take."""

from __future__ import annotations

import inspect
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from meanfield.sweeps.grid import Case, Grid, canonical, case_keys, cases_of
from meanfield.sweeps.task import RESERVED, Task, compute, infer_task

__all__ = ["Estimate", "Plan", "choose_batch_size", "estimate", "make_plan"]

_SECONDS_PER_BATCH = 20.0  # writing a batch costs 20 to 60 ms: some tenths of a percent
_MOST_BATCHES = 2000  # each is a file per variable
_FEW = 64
_VECTORISED = 1024  # cases in one call of a vectorised function; its memory grows with them
_SAMPLE_SECONDS = 0.05
_LARGEST_SAMPLE = 32
_LONG = 60.0  # seconds; a case of this length is not run a second time only to be timed
_SHOWN, _WORDS = 64, 200  # what the provenance spells out


@dataclass(frozen=True)
class Plan:
    """A task, the cases to do it for, and the settings and the seed they share."""

    task: Task
    cases: list[Case]
    fixed: dict[str, Any]
    seed: int
    attrs: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def keys(self) -> np.ndarray:
        """What identifies each case, see `case_keys`."""
        return case_keys(self.cases)

    @property
    def configuration(self) -> dict[str, Any]:
        """All that changes a number, besides the cases; plain data.

        Neither the grid, which may grow, nor batches, executors, paths and versions.

        Raises:
            TypeError: settings whose content cannot be told, a function without a name.
        """
        task = self.task
        return {
            "function": task.identity,
            "seed": self.seed,
            **{f"fixed.{name}": canonical(v, name) for name, v in self.fixed.items()},
            **{f"coords.{name}": _coordinate(v) for name, v in task.coords.items()},
            **{f"variable.{v.name}": [v.dtype, list(v.dims)] for v in task.variables},
        }

    @property
    def description(self) -> dict[str, Any]:
        """What was computed, as a person reads it; for the provenance."""
        values = {name: [case.get(name) for case in self.cases] for name in self.cases[0]}
        return {
            "function": str(self.task.name or getattr(self.task.function, "__qualname__", "?")),
            "fixed": {name: _plain(value) for name, value in self.fixed.items()},
            "grid": {name: _distinct(column) for name, column in values.items()},
            "n_cases": len(self.cases),
        }

    @property
    def record(self) -> dict[str, Any]:
        """The arguments of `meanfield.results.provenance`."""
        known = {name: self.fixed.get(name) for name in ("dtype", "device")}
        return {"spec": self.description, "seed": self.seed, **known}


@dataclass(frozen=True)
class Estimate:
    """What a sweep would take, from a sample of its cases."""

    n_cases: int
    n_batches: int
    batch_size: int
    seconds_per_case: float
    seconds: float


def make_plan(
    fn: Task | Callable[..., Mapping[str, Any]],
    grid: Grid,
    fixed: Mapping[str, Any] | None,
    seed: int,
    attrs: Mapping[str, Any] | None = None,
) -> Plan:
    """Check the arguments of a sweep and put them together.

    Raises:
        ValueError: a name both in the grid and fixed, a ragged grid for a batched task.
        TypeError: parameters that the function does not take.
    """
    cases, fixed = cases_of(grid), dict(fixed or {})
    both = sorted({name for case in cases for name in case} & set(fixed))
    if both:
        raise ValueError(f"fixed: expected names that are not in the grid, got {both} in both")
    function = fn.function if isinstance(fn, Task) else fn
    for case in cases if len({tuple(case) for case in cases}) > 1 else cases[:1]:
        _check_signature(function, {**fixed, **case})
    if not isinstance(fn, Task):
        fn = infer_task(fn, cases, fixed, int(seed))
    _check_names(fn, {name for case in cases for name in case})
    if fn.batched and len({frozenset(case) for case in cases}) > 1:
        raise ValueError(
            "grid: expected the same parameters in each case of a batched task, got "
            f"{sorted({tuple(sorted(case)) for case in cases})}"
        )
    return Plan(fn, cases, fixed, int(seed), _checked_attrs(attrs or {}))


def choose_batch_size(plan: Plan, n_workers: int) -> int:
    """Cases per batch: some seconds of work, enough batches for the workers, not too many files.

    The first cases of a function are timed for a moment; what they return is thrown away. For a
    vectorised function the size depends on the number of cases alone, because the last digits of
    linear algebra depend on it, and results must not depend on the speed of the machine.
    """
    n_cases = len(plan.cases)
    if plan.task.batched:
        fitting = _VECTORISED
    elif n_cases <= _FEW:  # one by one, and no case is timed in vain: they may take an hour each
        return 1
    else:
        fitting = max(1, int(_SECONDS_PER_BATCH / max(_seconds_per_case(plan), 1e-9)))
        if n_workers > 1:
            fitting = min(fitting, math.ceil(n_cases / (4 * n_workers)))
    return min(n_cases, max(fitting, math.ceil(n_cases / _MOST_BATCHES)))


def estimate(
    fn: Task | Callable[..., Mapping[str, Any]],
    grid: Grid,
    *,
    fixed: Mapping[str, Any] | None = None,
    seed: int = 0,
    attrs: Mapping[str, Any] | None = None,
    n_workers: int = 1,
) -> Estimate:
    """Cases, batches and time of a sweep, from timing its first cases; nothing is written.

    Cases of a grid often grow: if the first are the cheapest, the time is an underestimate.
    """
    plan = make_plan(fn, grid, fixed, seed, attrs)
    each = _seconds_per_case(plan)
    size = choose_batch_size(plan, n_workers)
    n_cases = len(plan.cases)
    return Estimate(n_cases, math.ceil(n_cases / size), size, each, each * n_cases / n_workers)


def _seconds_per_case(plan: Plan) -> float:
    """The median time of the first cases, or of a case of the first batch if vectorised."""
    if plan.task.batched:
        return _time(plan, plan.cases[:_VECTORISED]) / min(len(plan.cases), _VECTORISED)
    # The first case pays for imports, models that are loaded and caches that are filled.
    first = _time(plan, plan.cases[:1])
    if len(plan.cases) == 1 or first > _LONG:
        return first
    times: list[float] = []
    for case in plan.cases[1 : _LARGEST_SAMPLE + 1]:
        times.append(_time(plan, [case]))
        if sum(times) > _SAMPLE_SECONDS:
            break
    return statistics.median(times)


def _time(plan: Plan, cases: list[Case]) -> float:
    start = time.perf_counter()
    compute(plan.task, cases, plan.fixed, plan.seed)
    return time.perf_counter() - start


def _check_signature(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    signature = inspect.signature(function)
    provided = {"seed", "generator", "seeds"} & set(signature.parameters) - set(arguments)
    try:
        signature.bind(**arguments, **dict.fromkeys(provided))
    except TypeError as error:
        name = getattr(function, "__qualname__", repr(function))
        raise TypeError(
            f"{name}{signature} cannot be called with the parameters {sorted(arguments)}: {error}"
        ) from None


def _check_names(task: Task, parameters: set[str]) -> None:
    taken = {*RESERVED, *task.coords, *(v.name for v in task.variables)}
    if clash := sorted(parameters & taken):
        raise ValueError(
            f"grid: expected names of parameters other than those of variables, dimensions and "
            f"{RESERVED}, got {clash}"
        )


def _checked_attrs(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes that every format takes: text and numbers."""
    for name, value in attrs.items():
        if (
            name == "provenance"
            or isinstance(value, bool)
            or not isinstance(value, str | int | float)
        ):
            raise TypeError(
                f"attrs[{name!r}]: expected text or a number (and not the name provenance), "
                f"got {value!r}"
            )
    return dict(attrs)


def _plain(value: Any) -> Any:
    """Numbers, text and lists as they are; anything large or else in short words."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple) and len(value) <= _SHOWN:
        return [_plain(item) for item in value]
    text = repr(value)
    return text if len(text) <= _WORDS else text[: _WORDS - 1] + "…"


def _distinct(column: list[Any]) -> list[Any]:
    """The distinct values of a parameter, in the order they come; the first ones if many."""
    distinct = list(dict.fromkeys(map(_plain_key, column)))
    return distinct if len(distinct) <= _SHOWN else [*distinct[:_SHOWN], f"… {len(distinct)}"]


def _plain_key(value: Any) -> Any:
    plain = _plain(value.item() if isinstance(value, np.generic) else value)
    return tuple(plain) if isinstance(plain, list) else plain


def _coordinate(values: Any) -> Any:
    """A coordinate in the configuration, spelled out if short: a difference can then be read."""
    spelled = values.dtype.kind in "UO" or values.size <= _SHOWN
    return canonical(values.tolist() if spelled else values)
