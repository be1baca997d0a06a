"""What a sweep computes: a function with labels, its cases, and what identifies both.

| noun | what it is | where |
|---|---|---|
| `Case` | the parameters of one call, by name | `grid` |
| `Unit` | the places of cases that are run at once: of one, or of a vectorised call | here |
| `Task` | the function, and what its values mean | here |
| `SweepPlan` | a task, its cases, settings and seed: all that a store is asked about | here |
| `Work` | what all cases have in common: all that a worker needs besides them | here |
| job | units that a worker gets at once | `executors` |
| `Batch` | the values of the units that a job has finished | `batches` |
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from meanfield.checks import describe, name_of
from meanfield.results import Variable
from meanfield.results.cases import RESERVED, Labels, unless_nan
from meanfield.results.encoding import check_attrs
from meanfield.results.labels import array_of
from meanfield.results.provenance import provenance
from meanfield.results.store import SCHEMA
from meanfield.sweeps.grid import Case, Grid, cases_of, columns_of
from meanfield.sweeps.identity import Identity, identity_of
from meanfield.sweeps.values import canonical

_VECTORISED = 1024  # cases in one call of a vectorised function; its memory grows with them
_MOST_BYTES = 2**27  # of the results in a batch
_SHOWN, _WORDS = 64, 200  # values of a list, characters of another value that the provenance holds

Unit = list[int]


@dataclass(frozen=True)
class Task:
    """The function of a sweep and what the values that it returns mean.

    Args:
        function: called with the parameters of a case and the fixed settings by name; returns a
            mapping from variable name to a number, a truth value, a text or an array. If it has
            an argument `seed` (an int) or `generator` (a `torch.Generator` on the CPU, seeded
            with it), it is given that of the case, unless it is a partial that binds it. For
            parallel sweeps it must be importable, that is defined at the top of a module.
        variables: the meaning of each value returned. A false truth value `..._converged` gives
            the case the status "not converged". None takes names and types from the first case
            that does not fail: numbers, truth values and texts, or those of a DataArray or a
            Dataset with its dimensions and coordinates, which are then the same in every case.
            A batched task has to give them.
        parameters: the meaning of parameters and of coordinates, whose types and dimensions are
            those of their values; one that is not given here is labelled with its name.
        coords: values along the variables' own dimensions; they fix the sizes of these.
        batched: call the function once for many cases: each parameter is an array of shape (n,),
            `seeds` (if it has this argument) are n seeds, int64, and all results have a leading
            axis of length n. What it draws by other means depends on which cases share its call.
            When a call raises, its cases are run one at a time.
        name: what identifies the function in a store; its module (of a script: its file) and
            name by default. What it carries (the object of a method, closures, defaults, objects
            of its module) counts as well; with a name, what cannot be compared is let pass.

    Raises:
        ValueError: names used twice or reserved, a dimension without coordinates, or with more
            axes than one.
        TypeError: no function, no variables, coordinates without names.

    Example:
        >>> area = Task(lambda radius: {"area": 3 * radius**2}, [Variable("area", "area", "m²")])
        >>> area.variables[0].units
        'm²'
    """

    function: Callable[..., Mapping[str, Any]]
    variables: Sequence[Variable] | None = None
    parameters: Sequence[Variable] = ()
    coords: Mapping[str, Any] = field(default_factory=dict)
    batched: bool = False
    name: str | None = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"fn: expected a function or a Task, got {describe(self.function)}")
        for of, given in (("variables", self.variables or ()), ("parameters", self.parameters)):
            if not isinstance(given, Sequence) or not all(isinstance(v, Variable) for v in given):
                raise TypeError(f"{of}: expected a list of results.Variable, got {given!r:.80}")
        if not isinstance(self.coords, Mapping):
            raise TypeError(f"coords: expected values by dimension, got {describe(self.coords)}")
        # In memory of its own: the owner of an array may go on with it.
        coords = {str(n): np.array(array_of(values)) for n, values in self.coords.items()}
        for name, values in coords.items():
            if values.ndim != 1:
                raise ValueError(
                    f"coords: expected a list of values along {name!r}, got {values.ndim} axes"
                )
            if values.dtype.kind == "O" and any(isinstance(v, tuple) for v in values):
                raise TypeError(
                    f"coords: expected numbers, texts or dates along {name!r}, got tuples, as of "
                    "a MultiIndex, which no file holds; return ds.reset_index(...)"
                )
            if values.dtype.kind not in "biufUOmM":
                raise TypeError(
                    f"coords: expected numbers, texts or dates along {name!r}, got {values.dtype}"
                )
        if self.variables is not None:
            object.__setattr__(self, "variables", tuple(self.variables))
        if self.variables == () or (self.batched and not self.variables):
            kind = " batched" * self.batched
            raise ValueError(
                f"variables: expected those of a{kind} task, such as "
                f'[Variable("value", "what it is")], got {self.variables}'
            )
        object.__setattr__(self, "parameters", tuple(self.parameters))
        object.__setattr__(self, "coords", coords)
        _check_names(self)

    @cached_property
    def arguments(self) -> frozenset[str]:
        """The names of the arguments that the function takes, and that no partial binds."""
        bound = self.function.keywords if isinstance(self.function, partial) else ()
        return frozenset(inspect.signature(self.function).parameters) - {*bound}

    @cached_property
    def labels(self) -> Labels:
        """The labels of the values; without variables as long as they are not known."""
        parameters = {v.name: v.attrs for v in self.parameters}
        return Labels(tuple(self.variables or ()), parameters, self.coords)

    @property
    def label(self) -> str:
        """The name of the function in messages."""
        return self.name or str(getattr(self.function, "__qualname__", self.function))


@dataclass(frozen=True)
class Work:
    """What all cases of a sweep have in common: everything a worker needs."""

    task: Task
    fixed: dict[str, Any]
    seed: int
    most_cases: int  # after which a batch ends
    dtypes: dict[str, np.dtype]  # of the parameters over all cases

    def settings(self) -> dict[str, Any]:
        """The fixed settings for one case, which may change them."""
        memo: dict[int, Any] = {}  # what is one object in two settings stays one
        return {name: _copied(value, memo) for name, value in self.fixed.items()}


@dataclass(frozen=True)
class SweepPlan:
    """A task, the cases to do it for, and the settings and the seed they share."""

    task: Task
    cases: list[Case]
    fixed: dict[str, Any]
    seed: int
    attrs: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def columns(self) -> dict[str, np.ndarray]:
        """The values of each parameter over the cases, see `columns_of`."""
        return columns_of(self.cases)

    @cached_property
    def identity(self) -> Identity:
        """What identifies the function and its settings in a store, see `identity_of`."""
        return identity_of(self.task.function, _by_field(self.fixed), self.task.name)

    @property
    def description(self) -> dict[str, Any]:
        """What `sweep.json` holds, see `results.store`, but for the provenance.

        The configuration is all that the values depend on besides the cases and the function:
        not the grid, which may grow, nor batches, executors, paths and versions.
        """
        task, function = self.task, self.identity
        configuration = {
            "function": function.name,
            "seed": self.seed,
            **{f"fixed.{name}": plain for name, plain in function.settings.items()},
            **{
                f"coords.{name}": canonical(
                    v.tolist() if v.dtype.kind in "UO" else v, f"coords.{name}"
                )
                for name, v in task.coords.items()
            },
            **{f"variable.{v.name}": [v.dtype, list(v.dims)] for v in task.variables or ()},
        }
        return {
            "schema": SCHEMA,
            "configuration": configuration,
            "carried": function.carried,
            "source": function.source,
            **task.labels.plain,
            "attrs": self.attrs,
        }

    def units(
        self, missing: np.ndarray, size: int | None = None, shard: tuple[int, int] = (0, 1)
    ) -> list[Unit]:
        """The missing cases of the shard, in units.

        A vectorised call has the same cases in every shard of as many, because the last digits of
        linear algebra depend on them.
        """
        here = np.flatnonzero(missing & self.of_shard(size, shard)).tolist()
        size = self._unit_size(size, shard)
        return [list(unit) for _, unit in itertools.groupby(here, lambda place: place // size)]

    def of_shard(self, size: int | None, shard: tuple[int, int]) -> np.ndarray:
        """Whether each case is one of the shard."""
        units = np.arange(len(self.cases)) // self._unit_size(size, shard)
        return units % shard[1] == shard[0]

    def _unit_size(self, size: int | None, shard: tuple[int, int]) -> int:
        share = -(-len(self.cases) // shard[1])  # at most: every shard has something to do
        return (size or min(_VECTORISED, share)) if self.task.batched else 1

    def work(self, size: int | None = None) -> Work:
        """What a worker needs; a batch has at most `size` cases, and its results fit in memory."""
        n_bytes = 64 + sum(column.nbytes for column in self.task.labels.blank(1).values())
        most = _MOST_BYTES // n_bytes
        size = most if size is None or self.task.batched else size
        dtypes = {name: column.dtype for name, column in self.columns.items()}
        return Work(self.task, self.fixed, self.seed, max(1, min(size, most)), dtypes)

    def with_labels(self, labels: Labels) -> SweepPlan:
        """The same plan with the variables and coordinates that the function returned."""
        task = replace(self.task, variables=labels.variables, coords=labels.coords)
        _check_names(task, self.columns)
        plan = copy.copy(self)  # with its identity as it was before the first case
        object.__setattr__(plan, "task", task)
        return plan

    @cached_property
    def provenance(self) -> str:
        """What is computed, in readable form, with versions and date; see `results.provenance`."""
        spec = {
            "function": self.task.label,
            "fixed": {name: _plain(value) for name, value in _by_field(self.fixed)},
            **shown_grid(self.columns),
        }
        named = {name.rpartition(".")[2]: value for name, value in _by_field(self.fixed)}
        kind, device = named.get("dtype"), named.get("device")
        return provenance(spec, seed=self.seed, dtype=kind, device=device)


def shown_grid(columns: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The values of parameters and the number of cases for the provenance; None is absence."""
    grid = {}
    for name, of in columns.items():
        different = dict.fromkeys(of.tolist())  # but for NaN, each of which is another one
        values = dict.fromkeys(None if v == "" else unless_nan(v) for v in different)
        grid[name] = _plain(list(values))
    return {"grid": grid, "n_cases": len(next(iter(columns.values())))}


def make_plan(
    fn: Task | Callable[..., Mapping[str, Any]],
    grid: Grid,
    fixed: Mapping[str, Any] | None,
    seed: int,
    attrs: Mapping[str, Any] | None = None,
) -> SweepPlan:
    """Check the arguments of a sweep and put them together."""
    if not isinstance(fixed, Mapping | None):
        raise TypeError(f"fixed: expected settings by name, a dict, got {describe(fixed)}")
    cases, fixed = cases_of(grid), dict(fixed or {})
    kinds = {tuple(case): case for case in cases}  # of a ragged grid several
    parameters = {name for kind in kinds for name in kind}
    if both := sorted(parameters & set(fixed)):
        raise ValueError(f"fixed: expected names that are not in the grid, got {both} in both")
    _refuse_generators(fixed)
    task = fn if isinstance(fn, Task) else Task(fn)
    for case in kinds.values():
        _check_signature(task, {**fixed, **case})
    _check_names(task, parameters)
    if task.batched and len({frozenset(kind) for kind in kinds}) > 1:
        raise ValueError(
            "grid: expected the same parameters in each case of a batched task, got "
            f"{sorted({tuple(sorted(kind)) for kind in kinds})}"
        )
    check_attrs(attrs := dict(attrs or {}), "the sweep")
    if "provenance" in attrs:
        raise ValueError("attrs: expected another name than provenance, which the sweep writes")
    plan = SweepPlan(task, cases, fixed, int(seed), attrs)
    _ = plan.columns  # refuses values that one column cannot hold
    return plan


def _check_signature(task: Task, arguments: Mapping[str, Any]) -> None:
    signature = inspect.signature(task.function)
    drawn = {"seeds"} if task.batched else {"seed", "generator"}
    try:
        signature.bind(**arguments, **dict.fromkeys((drawn & task.arguments) - set(arguments)))
    except TypeError as error:
        raise TypeError(
            f"fn: expected a function of the parameters {sorted(arguments)}, got "
            f"{name_of(task.function)}{signature}: {error}; beside these it may take "
            f"{' or '.join(sorted(drawn))}"
        ) from None


def _check_names(task: Task, parameters: Iterable[str] = ()) -> None:
    variables = task.variables or ()
    names = [*parameters, *(v.name for v in variables), *task.coords, *RESERVED]
    if strange := sorted({name for name in names if not name.isidentifier()}):
        raise ValueError(
            f"grid, variables, coords: expected identifiers such as 'gain' as names, got {strange}"
        )
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            "grid, variables, coords: expected different names of parameters, variables and "
            f"dimensions, none of {RESERVED}, got {twice}"
        )
    if missing := {dim for v in variables for dim in v.dims} - set(task.coords):
        raise ValueError(
            f"coords: expected values along {sorted(missing)}, which the variables have as "
            "dimensions; give for example coords={'head': range(12)}"
        )


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """A copy; the same object of what cannot be copied, or says in its class what it is."""
    holds = is_dataclass(value) or isinstance(value, (list, dict, set))
    if holds or not hasattr(type(value), "identified_by"):
        with contextlib.suppress(Exception):  # objects raise what they like
            return copy.deepcopy(value, memo)
        memo.clear()  # a copy that fails leaves parts of itself there
    return value


def _refuse_generators(fixed: Mapping[str, Any]) -> None:
    """Refuse streams of random numbers, which would be the same in each case, or in none."""
    kinds = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
    for name, value in fixed.items():
        if isinstance(value, kinds):
            raise TypeError(
                f"fixed: expected no generator, got {name}={describe(value)}; name an argument of "
                "the function `generator` or `seed`: each case gets its own"
            )


def _by_field(fixed: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fixed settings by name, those that are dataclasses field by field: ``s.radius``."""
    for name, value in fixed.items():
        expanded = is_dataclass(value) and not isinstance(value, type)
        if expanded and not hasattr(value, "identified_by"):
            yield name, type(value)
            for one in fields(value):
                yield f"{name}.{one.name}", getattr(value, one.name)
        else:
            yield name, value


def _plain(value: Any) -> Any:
    """Numbers and text as they are, lists cut short, anything else by its `repr`, cut short."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        more = [f"… {len(value)}"] if len(value) > _SHOWN else []
        return [*map(_plain, value[:_SHOWN]), *more]
    text = value.__qualname__ if isinstance(value, type) else repr(value)
    return text if len(text) <= _WORDS else text[: _WORDS - 1] + "…"
