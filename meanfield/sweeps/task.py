"""A function with the labels of what it returns, and its evaluation over a batch of cases."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from meanfield.results import Variable
from meanfield.sweeps.grid import Case, case_seed, columns_of

__all__ = [
    "BOOKKEEPING",
    "FAILED",
    "NOT_CONVERGED",
    "OK",
    "PENDING",
    "RESERVED",
    "Task",
    "compute",
    "infer_task",
]

PENDING, OK, NOT_CONVERGED, FAILED = range(4)
BOOKKEEPING = ("status", "message")
RESERVED = (*BOOKKEEPING, "case", "case_key", "batch", "done")
_MESSAGE_LENGTH = 400
# Cases that may raise before one does not, where the variables are taken from what is returned.
_PROBES = 16


@dataclass(frozen=True)
class Task:
    """What a sweep computes for a case, and what it means.

    Args:
        function: called with the parameters of a case and the fixed settings by name; returns a
            mapping from variable name to a number, a truth value, a text or an array. If it has
            an argument `seed` (an int) or `generator` (a `torch.Generator` on the CPU, seeded
            with it), it is given the random numbers of the case. For parallel sweeps it must be
            importable: defined at the top of a module.
        variables: the meaning of each value returned. A truth value `..._converged` that comes
            back false gives the case the status "not converged".
        parameters: the meaning of parameters and of coordinates; others are labelled with their
            name.
        coords: values along the variables' own dimensions, which fix their sizes.
        batched: call the function once for a whole batch of cases: each parameter is an array of
            shape (n,), `seeds` (if it has this argument) are n seeds, int64, and all results have
            a leading axis of length n. When a batch raises, its cases are tried one at a time.
        name: what identifies the function in a store; its module and name by default.

    Raises:
        ValueError: names used twice or reserved, a dimension without coordinates.

    Example:
        >>> area = Task(lambda radius: {"area": 3 * radius**2}, [Variable("area", "area", "m²")])
        >>> area.variables[0].units
        'm²'
    """

    function: Callable[..., Mapping[str, Any]]
    variables: Sequence[Variable]
    parameters: Sequence[Variable] = ()
    coords: Mapping[str, Any] = field(default_factory=dict)
    batched: bool = False
    name: str | None = None

    def __post_init__(self) -> None:
        names = [v.name for v in self.variables]
        bad = {n for n in names if names.count(n) > 1 or n in RESERVED}
        if bad or not names:
            raise ValueError(
                f"variables: expected different names, at least one, none of {RESERVED}; "
                f"got {names}"
            )
        coords = {str(n): np.asarray(values) for n, values in self.coords.items()}
        missing = {dim for v in self.variables for dim in v.dims} - set(coords)
        if missing:
            raise ValueError(
                f"coords: expected values along {sorted(missing)}, which the variables have as "
                "dimensions; give for example coords={'head': range(12)}"
            )
        object.__setattr__(self, "variables", tuple(self.variables))
        object.__setattr__(self, "parameters", tuple(self.parameters))
        object.__setattr__(self, "coords", coords)

    @property
    def identity(self) -> str:
        """What identifies the function in a store: its module and name.

        Raises:
            TypeError: a function that has no name of its own, and none was given.
        """
        if self.name is not None:
            return self.name
        name = getattr(self.function, "__qualname__", "<no name>")
        if "<" in name:
            raise TypeError(
                f"fn: expected a named function, by which the store is recognised, got "
                f"{self.function!r}; define it at the top of a module or give Task(..., name=...)"
            )
        return f"{self.function.__module__}:{name}"

    @cached_property
    def arguments(self) -> frozenset[str]:
        """The names of the arguments that the function takes."""
        return frozenset(inspect.signature(self.function).parameters)

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of the variables."""
        return frozenset(variable.name for variable in self.variables)

    @property
    def label(self) -> str:
        """The function in messages."""
        return self.name or str(getattr(self.function, "__qualname__", self.function))

    def shape(self, variable: Variable) -> tuple[int, ...]:
        """The shape of one case of a variable."""
        return tuple(len(self.coords[dim]) for dim in variable.dims)

    def blank(self, n_cases: int) -> dict[str, np.ndarray]:
        """Arrays for so many cases, all pending."""
        arrays = {
            v.name: np.full((n_cases, *self.shape(v)), v.fill, dtype=v.numpy_dtype)
            for v in self.variables
        }
        arrays["status"] = np.zeros(n_cases, np.int8)
        arrays["message"] = np.full(n_cases, "", dtype=object)
        return arrays


def compute(
    task: Task, cases: Sequence[Case], fixed: Mapping[str, Any], seed: int
) -> dict[str, np.ndarray]:
    """The arrays of a batch: one per variable, with `status` and `message`, leading axis n.

    A case that raises keeps its fill values, the status "failed" and the message.

    Raises:
        TypeError, ValueError: if what the function returns is not what the task declares; this
            is a fault of the program and not of a case.
    """
    if not task.batched:
        return _assemble(task, [_one(task, case, fixed, seed) for case in cases])
    outcome = _guarded(task, _batch_arguments(task, cases, fixed, seed))
    if isinstance(outcome, str):
        if len(cases) == 1:
            return _assemble(task, [outcome])
        # Which case was it? One at a time, the others keep their results.
        single = [compute(task, [case], fixed, seed) for case in cases]
        return {name: np.concatenate([part[name] for part in single]) for name in single[0]}
    arrays = task.blank(len(cases))
    _check_names(task, outcome)
    for variable in task.variables:
        arrays[variable.name][...] = _checked(task, variable, outcome, (len(cases),))
    arrays["status"][...] = _status(task, arrays)
    return arrays


def infer_task(
    function: Callable[..., Mapping[str, Any]],
    cases: Sequence[Case],
    fixed: Mapping[str, Any],
    seed: int,
) -> Task:
    """A task whose variables are those of one evaluation: numbers, truth values, texts.

    It is that of the first case that does not raise, of the first few.

    Raises:
        TypeError: if the function returns anything else; declare it with a `Task`.
        Exception: what the function raised at the first case, if it did at all that were tried.
    """
    probe = Task(function, [Variable.unlabelled("probe")])
    first: Exception | None = None
    for case in cases[:_PROBES]:
        try:
            result = function(**_case_arguments(probe, case, fixed, seed))
            break
        except Exception as error:
            first = first or error
    else:
        assert first is not None
        first.add_note(
            f"fn: raised at each of the first {min(_PROBES, len(cases))} cases, so that its "
            "variables are unknown; declare them: sweep(Task(fn, [Variable(...)]), ...)"
        )
        raise first
    if not isinstance(result, Mapping):
        raise TypeError(
            f"fn: expected it to return a mapping from name to number, got {result!r:.80}"
        )
    return Task(function, [_infer_variable(str(name), v) for name, v in result.items()])


def _infer_variable(name: str, value: Any) -> Variable:
    array = np.asarray(value)
    dtype = {"b": "bool", "f": "float64", "i": "float64", "u": "float64", "U": "str"}
    if array.ndim or array.dtype.kind not in dtype:
        raise TypeError(
            f"{name}: expected a number, a truth value or a text, got {value!r:.80}; for arrays "
            "declare variables and dimensions: sweep(Task(fn, [Variable(...)], coords=...), ...)"
        )
    return Variable.unlabelled(name, dtype=dtype[array.dtype.kind])


def _one(task: Task, case: Case, fixed: Mapping[str, Any], seed: int) -> Any:
    return _guarded(task, _case_arguments(task, case, fixed, seed))


def _guarded(task: Task, arguments: dict[str, Any]) -> Any:
    """What the function returns, or the message of what it raised."""
    try:
        return task.function(**arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:_MESSAGE_LENGTH]


def _case_arguments(task: Task, case: Case, fixed: Mapping[str, Any], seed: int) -> dict[str, Any]:
    arguments = {**fixed, **case}
    wanted = task.arguments
    if "seed" in wanted and "seed" not in arguments:
        arguments["seed"] = case_seed(case, seed)
    if "generator" in wanted and "generator" not in arguments:
        import torch

        arguments["generator"] = torch.Generator().manual_seed(case_seed(case, seed))
    return arguments


def _batch_arguments(
    task: Task, cases: Sequence[Case], fixed: Mapping[str, Any], seed: int
) -> dict[str, Any]:
    arguments = {**fixed, **columns_of(cases)}
    wanted = task.arguments
    if "seeds" in wanted and "seeds" not in arguments:
        arguments["seeds"] = np.array([case_seed(case, seed) for case in cases], dtype=np.int64)
    return arguments


def _assemble(task: Task, outcomes: Sequence[Any]) -> dict[str, np.ndarray]:
    arrays = task.blank(len(outcomes))
    for i, outcome in enumerate(outcomes):
        if isinstance(outcome, str):
            arrays["message"][i] = outcome
            continue
        _check_names(task, outcome)
        for variable in task.variables:
            arrays[variable.name][i] = _checked(task, variable, outcome, ())
    failed = np.array([isinstance(outcome, str) for outcome in outcomes])
    arrays["status"][...] = np.where(failed, FAILED, _status(task, arrays))
    return arrays


def _status(task: Task, arrays: dict[str, np.ndarray]) -> np.ndarray:
    converged = np.ones(len(arrays["status"]), dtype=bool)
    for variable in task.variables:
        if variable.name.endswith("_converged") and variable.dtype == "bool":
            flags = arrays[variable.name]
            converged &= flags.reshape(len(flags), -1).all(axis=1)
    return np.where(converged, OK, NOT_CONVERGED)


def _check_names(task: Task, outcome: Any) -> None:
    if isinstance(outcome, Mapping) and outcome.keys() == task.names:
        return
    got = sorted(outcome) if isinstance(outcome, Mapping) else type(outcome).__name__
    raise TypeError(
        f"{task.label}: expected a mapping with exactly {sorted(task.names)}, got {got}"
    )


def _checked(
    task: Task, variable: Variable, outcome: Any, leading: tuple[int, ...]
) -> np.ndarray | float:
    """One variable of what the function returned, in the declared shape and a fitting type."""
    value = outcome[variable.name]
    if type(value) is float and variable.dtype == "float64" and not (leading or variable.dims):
        return value  # the usual case, ten times faster than an array of one number
    array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    expected = (*leading, *task.shape(variable))
    if array.shape != expected:
        raise ValueError(
            f"{task.label}: {variable.name}: expected shape {expected}, got {array.shape}"
        )
    if variable.dtype == "bool" and array.dtype.kind != "b":
        raise TypeError(f"{task.label}: {variable.name}: expected truth values, got {array.dtype}")
    return array.astype(variable.numpy_dtype)
