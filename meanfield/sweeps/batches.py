"""Batches: cases computed one after the other and kept together when their time is up.

A mistake in a case is a failure of that case and stops nothing else.
"""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xarray as xr

from meanfield.results import Variable
from meanfield.results.cases import FAILED, NOT_CONVERGED, OK, Labels
from meanfield.results.labels import array_of, fitting, printable
from meanfield.sweeps.grid import Case, case_seed, columns_of
from meanfield.sweeps.plan import Task, Work

_Caught = tuple[type[BaseException], ...]
_States = tuple[Any, ...]  # of the generators of torch, NumPy, Python and CUDA
# How many cases, the values of each variable or why there are none, and what the values mean.
_Outcome = tuple[int, Mapping[str, Any] | str, Task]
_MESSAGE_LENGTH = 400
_CAUGHT: _Caught = (Exception, SystemExit)
_INFERRED = {"b": "bool", "f": "float64", "i": "float64", "u": "float64", "U": "str"}


@dataclass(frozen=True)
class Batch:
    """Finished units, and the labels of their values, declared or inferred."""

    n_units: int
    columns: dict[str, np.ndarray]
    labels: Labels
    interrupt: BaseException | None = None


def run_batch(
    work: Work,
    units: Sequence[list[Case]],
    seconds: float,
    begin: Callable[[int], bool] = lambda number: True,
    caught: _Caught = _CAUGHT,
) -> Batch:
    """Run units, given by their cases, until the time is up.

    `begin` is called with the number of each unit before it runs, and with -1 after the last;
    the batch ends if it returns false. What is raised and not `caught`, such as Ctrl-C, ends the
    batch as well: it is in its `interrupt`, and the units before it are kept. Where no variables
    are declared, the last unit says what they are.
    """
    done: list[list[_Outcome]] = []
    n_cases, interrupt = 0, None
    end = time.monotonic() + seconds
    try:
        with _GLOBAL_GENERATORS:
            for number, cases in enumerate(units):
                if not begin(number):
                    break
                done.append(_outcomes(work, cases, caught))
                n_cases += len(cases)
                if n_cases >= work.most_cases or time.monotonic() > end:
                    break
    except BaseException as error:
        interrupt = error
    begin(-1)
    task = done[-1][-1][2] if done else work.task
    columns = _collect(task, [outcome for unit in done for outcome in unit])
    return Batch(len(done), columns, task.labels, interrupt)


class _GlobalGenerators:
    """The generators of torch, NumPy and Python themselves, seeded by the first case of a call.

    New processes all begin at the same numbers: what a case draws would not be its own. When the
    last batch of a process ends they go on as if nothing had been drawn, and so they do in a case
    when a sweep that it has run in its own thread ends.
    """

    def __init__(self) -> None:
        self._lock, self._batches = threading.Lock(), 0
        self._first: _States = ()
        self._here = threading.local()  # `states`: one for each batch, inside of the one before

    def __enter__(self) -> None:
        with self._lock:
            numpy = np.random.get_state()  # noqa: NPY002
            cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
            states = torch.get_rng_state(), numpy, random.getstate(), cuda
            vars(self._here).setdefault("states", []).append(states)
            if self._batches == 0:
                self._first = states
            self._batches += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._batches -= 1
            states = self._here.states.pop()
            if self._batches == 0 or self._here.states:
                torch_state, numpy, python, cuda = states if self._here.states else self._first
                torch.set_rng_state(torch_state)
                np.random.set_state(numpy)  # noqa: NPY002
                random.setstate(python)
                torch.cuda.set_rng_state_all(cuda)

    @staticmethod
    def seed(seed: int) -> None:
        """Of several threads at once each seeds those of all."""
        if torch.cuda.is_available():
            torch.manual_seed(seed)  # a hundred times slower: of all devices, started or not
        else:
            torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        random.seed(seed)


_GLOBAL_GENERATORS = _GlobalGenerators()


def failed_batch(task: Task, message: str) -> Batch:
    """The batch of one case that has ended its process."""
    return Batch(1, _collect(task, [(1, message, task)]), task.labels)


def _outcomes(work: Work, cases: Sequence[Case], caught: _Caught) -> list[_Outcome]:
    """The checked values of a call; a vectorised one that fails is retried case by case."""
    try:
        seed = case_seed(cases[0], work.seed)
        arguments = _arguments(work, cases, seed)
        _GLOBAL_GENERATORS.seed(seed)
        returned = work.task.function(**arguments)
        values, task = _values(work.task, returned, len(cases))
        return [(len(cases), values, task)]
    except caught as error:
        if len(cases) == 1:
            return [(1, _message(error), work.task)]
        return [outcome for case in cases for outcome in _outcomes(work, [case], caught)]


def _collect(task: Task, found: Sequence[_Outcome]) -> dict[str, np.ndarray]:
    """The columns of some outcomes: variables, `status` and `message`."""
    columns = task.labels.blank(sum(n for n, _, _ in found))
    status, start = columns["status"], 0
    for n, values, _ in found:
        here, start = slice(start, start + n), start + n
        if isinstance(values, str):
            columns["message"][here], status[here] = values, FAILED
            continue
        for name, value in values.items():
            columns[name][here] = value
    status[status != FAILED] = OK
    for variable in task.variables or ():
        if variable.name.endswith("_converged") and variable.dtype == "bool":
            flags = columns[variable.name]
            loose = ~flags.all(axis=tuple(range(1, flags.ndim)))
            status[loose & (status == OK)] = NOT_CONVERGED
    return columns


def _named(returned: Any, known: Container[str] | None) -> Any:
    """By name the arrays of what is labelled by xarray; anything else as it is.

    With an array come the coordinates beside its axes, of those variables that are known.
    """
    if isinstance(returned, xr.DataArray):
        returned = {str(returned.name or "value"): returned}
    if isinstance(returned, Mapping) and not isinstance(returned, xr.Dataset):
        beside = {
            str(name): of
            for array in returned.values()
            if isinstance(array, xr.DataArray)
            for name, of in array.coords.items()
            if name not in array.dims and of.dims and of.dtype.kind in _INFERRED
        }
        return {n: c for n, c in beside.items() if known is None or n in known} | {**returned}
    if isinstance(returned, xr.Dataset):  # with the coordinates that stand beside its arrays
        return {str(n): returned[n] for n in returned.variables if n not in returned.dims}
    return returned


def _infer(task: Task, returned: Any) -> Task:
    """The task with the variables and coordinates of what the function returned."""
    if not isinstance(returned, Mapping) or not returned:
        raise TypeError(
            f"fn: expected it to return a mapping from name to number, got {returned!r:.80}; "
            "one number as {'name': value}, arrays as a DataArray or Dataset, and an answer of "
            "meanfield, with what proves it, as answer.values('name')"
        )
    variables, coords = [], dict(task.coords)
    for name, value in returned.items():
        labelled = isinstance(value, xr.DataArray)
        array = array_of(value.values.tolist() if labelled else value)
        dims, attrs = (tuple(map(str, value.dims)), value.attrs) if labelled else ((), {})
        kind = array.dtype.kind
        if array.ndim > len(dims) or kind not in _INFERRED or np.ma.isMaskedArray(value):
            raise TypeError(
                f"{name}: expected a number, a truth value or a text, got {value!r:.80}; for "
                "arrays declare variables and dimensions, sweep(Task(fn, [Variable(...)], "
                "coords=...), ...), or return an xarray.DataArray(values, dims=...)"
            )
        if str(name).endswith("_converged") and kind != "b":
            raise TypeError(
                f"{name}: expected a truth value, which becomes the status of the case, got "
                f"{value!r:.80}; give it as a bool, or another name"
            )
        words, units = attrs.get("long_name", str(name).replace("_", " ")), attrs.get("units", "1")
        variables.append(Variable(str(name), words, units, dims, _INFERRED[kind]))
        coords |= {dim: value[dim].values for dim in dims}
    return dataclasses.replace(task, variables=variables, coords=coords)


def _arguments(work: Work, cases: Sequence[Case], seed: int) -> dict[str, Any]:
    """Parameters, settings, and the random numbers that the function takes and was not given."""
    task = work.task
    given: dict[str, Any] = cases[0]
    if task.batched:  # of one type in every call, whatever cases share it
        given = {n: of.astype(work.dtypes[n], copy=False) for n, of in columns_of(cases).items()}
    arguments = work.settings() | given
    missing = task.arguments - arguments.keys()
    if task.batched:
        if "seeds" in missing:
            seeds = [case_seed(case, work.seed) for case in cases]
            arguments["seeds"] = np.array(seeds, dtype=np.int64)
        return arguments
    if "seed" in missing:
        arguments["seed"] = seed
    if "generator" in missing:
        arguments["generator"] = torch.Generator().manual_seed(seed)
    return arguments


def _message(error: BaseException) -> str:
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:
        text = "its text raises an error itself"
    return printable(f"{name}: {text}")[:_MESSAGE_LENGTH]


def _values(task: Task, returned: Any, n_cases: int) -> tuple[dict[str, Any], Task]:
    """What the function returned, if it has the declared names, shapes and types, and these."""
    returned = _named(returned, None if task.variables is None else task.labels.shapes)
    task = _infer(task, returned) if task.variables is None else task
    shapes, leading = task.labels.shapes, (n_cases,) if task.batched else ()
    if not isinstance(returned, Mapping) or returned.keys() != shapes.keys():
        got = sorted(map(str, returned)) if isinstance(returned, Mapping) else type(returned)
        raise TypeError(
            f"{task.label}: expected a mapping with exactly {sorted(shapes)}, got {got}"
        )
    return {
        v.name: fitting(v, _along(task, v, returned[v.name]), (*leading, *shapes[v.name]))
        for v in task.variables or ()
    }, task


def _along(task: Task, variable: Variable, value: Any) -> Any:
    """An array that is labelled by xarray along the dimensions of the task, at the same places."""
    if not isinstance(value, xr.DataArray):
        return value
    for dim in map(str, value.dims):
        found, known = value[dim].values, task.coords.get(dim)
        kind = found.dtype.kind
        missing = kind in "fmM" and kind == np.asarray(known).dtype.kind  # NaN, or NaT
        same = known is not None and np.array_equal(found, known, equal_nan=missing)
        if not same:
            raise ValueError(
                f"{dim}: expected the coordinates of the first case in every one, "
                f"{known}, got {found}"
            )
    return value.transpose(*variable.dims).values
