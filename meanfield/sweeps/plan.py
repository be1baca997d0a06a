"""What a sweep is going to do: its cases, its configuration, the time it may take."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from meanfield.results import Variable, provenance
from meanfield.results.encoding import check_attrs
from meanfield.results.stores import SCHEMA
from meanfield.sweeps.batches import Unit, run_batch
from meanfield.sweeps.evaluate import Work
from meanfield.sweeps.grid import Case, Grid, canonical, case_keys, cases_of, columns_of
from meanfield.sweeps.task import RESERVED, Task

__all__ = ["Estimate", "Plan", "estimate", "make_plan"]

_VECTORISED = 1024  # cases in one call of a vectorised function; its memory grows with them
_MOST_BYTES = 2**27  # of the results in a batch
_SAMPLE_SECONDS, _LARGEST_SAMPLE = 0.05, 32  # of an estimate
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

    @cached_property
    def columns(self) -> dict[str, np.ndarray]:
        """The values of each parameter over the cases, see `columns_of`."""
        return columns_of(self.cases)

    @property
    def configuration(self) -> dict[str, Any]:
        """All that changes a number, besides the cases; plain data.

        Neither the grid, which may grow, nor batches, executors, paths and versions.
        """
        task = self.task
        return {
            "function": task.identity,
            "seed": self.seed,
            **{f"fixed.{name}": canonical(v, name) for name, v in self.fixed.items()},
            **{f"coords.{name}": _coordinate(v) for name, v in task.coords.items()},
            **{f"variable.{v.name}": [v.dtype, list(v.dims)] for v in task.variables or ()},
        }

    @property
    def description(self) -> dict[str, Any]:
        """All that a store says about itself, see `results.stores`."""
        identity = {"configuration": self.configuration, "code": self.task.code}
        return {"schema": SCHEMA, **identity, **self.labels, "provenance": self.provenance}

    @property
    def labels(self) -> dict[str, Any]:
        """What `results.stores.assemble` needs to make the Dataset, besides the provenance."""
        return {
            "variables": [dataclasses.asdict(v) for v in self.task.variables or ()],
            "parameters": {v.name: v.attrs for v in self.task.parameters},
            "coords": {
                name: {"values": v.tolist(), "dtype": "O" if v.dtype.kind == "U" else v.dtype.str}
                for name, v in self.task.coords.items()
            },
            "attrs": self.attrs,
        }

    def units(
        self, missing: np.ndarray, size: int | None = None, shard: tuple[int, int] = (0, 1)
    ) -> list[Unit]:
        """What is missing and belongs to the shard, in units.

        A vectorised call has the cases that it has in the whole grid, whoever runs it, because
        the last digits of linear algebra depend on them.
        """
        size = (size or _VECTORISED) if self.task.batched else 1
        places = np.flatnonzero(missing)
        here = places[places // size % shard[1] == shard[0]].tolist()
        return [list(unit) for _, unit in itertools.groupby(here, lambda place: place // size)]

    def work(self, size: int | None = None) -> Work:
        """What a worker needs to know; a batch has at most `size` cases, and fits in memory."""
        n_bytes = 64 + sum(column.nbytes for column in self.task.blank(1).values())
        most = _MOST_BYTES // n_bytes
        size = most if size is None or self.task.batched else size
        return Work(self.task, self.fixed, self.seed, max(1, min(size, most)))

    def with_variables(self, variables: Sequence[Variable] | None) -> Plan:
        """The same with the variables that the function turned out to return."""
        task = dataclasses.replace(self.task, variables=variables)
        _check_names(task, {name for case in self.cases for name in case})
        return dataclasses.replace(self, task=task)

    @property
    def provenance(self) -> str:
        """What was computed, as a person reads it, with what and when; see `results`."""
        values = {name: [case.get(name) for case in self.cases] for name in self.cases[0]}
        spec = {
            "function": self.task.label,
            "fixed": {name: _plain(value) for name, value in self.fixed.items()},
            "grid": {name: _plain(list(dict.fromkeys(of))) for name, of in values.items()},
            "n_cases": len(self.cases),
        }
        dtype, device = self.fixed.get("dtype"), self.fixed.get("device")
        return provenance(spec, seed=self.seed, dtype=dtype, device=device)


@dataclass(frozen=True)
class Estimate:
    """What a sweep would take, from a sample of its cases; `failure` is the first, if any."""

    n_cases: int
    seconds_per_case: float
    seconds: float
    failure: str | None = None


def make_plan(
    fn: Task | Callable[..., Mapping[str, Any]],
    grid: Grid,
    fixed: Mapping[str, Any] | None,
    seed: int,
    attrs: Mapping[str, Any] | None = None,
) -> Plan:
    """Check the arguments of a sweep and put them together."""
    cases, fixed = cases_of(grid), dict(fixed or {})
    kinds = {tuple(case): case for case in cases}  # ragged grids have several
    parameters = {name for kind in kinds for name in kind}
    if both := sorted(parameters & set(fixed)):
        raise ValueError(f"fixed: expected names that are not in the grid, got {both} in both")
    task = fn if isinstance(fn, Task) else Task(fn)
    for case in kinds.values():
        _check_signature(task.function, {**fixed, **case})
    _check_names(task, parameters)
    if task.batched and len({frozenset(kind) for kind in kinds}) > 1:
        raise ValueError(
            "grid: expected the same parameters in each case of a batched task, got "
            f"{sorted({tuple(sorted(kind)) for kind in kinds})}"
        )
    check_attrs(attrs := dict(attrs or {}), "the sweep")
    if "provenance" in attrs:
        raise ValueError("attrs: expected another name than provenance, which the sweep writes")
    plan = Plan(task, cases, fixed, int(seed), attrs)
    _ = plan.columns  # numbers and texts in one parameter are an error
    return plan


def estimate(
    fn: Task | Callable[..., Mapping[str, Any]],
    grid: Grid,
    *,
    fixed: Mapping[str, Any] | None = None,
    seed: int = 0,
    attrs: Mapping[str, Any] | None = None,
    n_workers: int = 1,
) -> Estimate:
    """Cases and time of a sweep, from timing its first cases; nothing is written.

    Cases of a grid often grow: if the first are the cheapest, the time is an underestimate.
    """
    plan = make_plan(fn, grid, fixed, seed, attrs)
    units = plan.units(np.ones(len(plan.cases), bool))
    seconds, each, messages = 0.0, 0.0, []
    # The first pays for imports, models that are loaded and caches that are filled.
    for sample in (units[:1], units[1:_LARGEST_SAMPLE]):
        if not sample or seconds > 60 * _SAMPLE_SECONDS:
            break
        start = time.perf_counter()
        cases = [[plan.cases[place] for place in unit] for unit in sample]
        batch = run_batch(plan.work(), cases, _SAMPLE_SECONDS)
        if batch.interrupt is not None:
            raise batch.interrupt
        plan = plan.with_variables(batch.variables)
        seconds = time.perf_counter() - start
        each = seconds / len(batch.columns["status"])
        messages += [text for text in batch.columns["message"] if text]
    total = each * len(plan.cases) / n_workers
    return Estimate(len(plan.cases), each, total, messages[0] if messages else None)


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
    if clash := sorted(parameters & {*RESERVED, *task.coords, *task.shapes}):
        raise ValueError(
            f"grid: expected names of parameters other than those of variables, dimensions and "
            f"{RESERVED}, got {clash}"
        )


def _plain(value: Any) -> Any:
    """Numbers and text as they are, of lists the first items; all else in short words."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        more = [f"… {len(value)}"] if len(value) > _SHOWN else []
        return [*map(_plain, value[:_SHOWN]), *more]
    text = repr(value)
    return text if len(text) <= _WORDS else text[: _WORDS - 1] + "…"


def _coordinate(values: Any) -> Any:
    """A coordinate in the configuration, spelled out if short: a difference can then be read."""
    spelled = values.dtype.kind in "UO" or values.size <= _SHOWN
    return canonical(values.tolist() if spelled else values)
