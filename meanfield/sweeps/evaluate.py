"""One case, or a call for many: a misstep of a case is its own failure and stops nothing else."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meanfield.results import Variable
from meanfield.results.labels import printable
from meanfield.sweeps.grid import Case, case_seed, columns_of
from meanfield.sweeps.task import FAILED, NOT_CONVERGED, OK, Task

__all__ = ["Failure", "call_many", "collect", "infer", "outcome"]

_MESSAGE_LENGTH = 400
_FITS = {"float64": "fiu", "float32": "fiu", "int64": "iuf", "bool": "b", "str": "O"}
_INFERRED = {"b": "bool", "f": "float64", "i": "float64", "u": "float64", "U": "str"}


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a case has no values."""

    message: str


def outcome(
    task: Task, case: Case, fixed: Mapping[str, Any], seed: int
) -> Mapping[str, Any] | Failure:
    """The values of a case, checked, or why there are none."""
    try:
        returned = task.function(**_arguments(task, [case], case, fixed, seed))
        if task.variables is None:
            infer(returned)
            return returned
        return _checked(task, returned, ())
    except (Exception, SystemExit) as error:
        return Failure(_message(error))


def call_many(
    task: Task, cases: Sequence[Case], fixed: Mapping[str, Any], seed: int
) -> dict[str, np.ndarray]:
    """The columns of a vectorised call; if it fails, its cases are tried one at a time."""
    n = len(cases)
    try:
        returned = task.function(**_arguments(task, cases, columns_of(cases), fixed, seed))
        values = _checked(task, returned, (n,))
    except (Exception, SystemExit) as error:
        if n == 1:
            return collect(task, [Failure(_message(error))])
        single = [call_many(task, [case], fixed, seed) for case in cases]
        return {name: np.concatenate([part[name] for part in single]) for name in single[0]}
    return values | {"status": _status(task, values, n), "message": np.full(n, "", object)}


def collect(task: Task, outcomes: Sequence[Mapping[str, Any] | Failure]) -> dict[str, np.ndarray]:
    """The columns of some outcomes: one per variable, `status` and `message`."""
    n = len(outcomes)
    columns = {
        v.name: np.full((n, *task.shape(v)), v.fill, dtype=v.numpy_dtype)
        for v in task.variables or ()
    }
    message, failed = np.full(n, "", dtype=object), np.zeros(n, bool)
    for i, found in enumerate(outcomes):
        if isinstance(found, Failure):
            message[i], failed[i] = found.message, True
            continue
        for name, column in columns.items():
            column[i] = found[name]
    status = np.where(failed, FAILED, _status(task, columns, n)).astype(np.int8)
    return columns | {"status": status, "message": message}


def infer(returned: Any) -> tuple[Variable, ...]:
    """The variables of a function that declares none; an error unless they are plain values."""
    if not isinstance(returned, Mapping) or not returned:
        raise TypeError(
            f"fn: expected it to return a mapping from name to number, got {returned!r:.80}"
        )
    variables = []
    for name, value in returned.items():
        array = np.asarray(value)
        if array.ndim or array.dtype.kind not in _INFERRED or np.ma.isMaskedArray(value):
            raise TypeError(
                f"{name}: expected a number, a truth value or a text, got {value!r:.80}; for "
                "arrays declare variables and dimensions: sweep(Task(fn, [Variable(...)], "
                "coords=...), ...)"
            )
        variables.append(Variable.unlabelled(str(name), dtype=_INFERRED[array.dtype.kind]))
    return tuple(variables)


def _arguments(
    task: Task,
    cases: Sequence[Case],
    given: Mapping[str, Any],
    fixed: Mapping[str, Any],
    seed: int,
) -> dict[str, Any]:
    """Parameters, settings, and the random numbers that the function takes and was not given."""
    arguments = {**_fresh(fixed), **given}
    wanted = task.arguments - arguments.keys()
    if task.batched:
        if "seeds" in wanted:
            seeds = [case_seed(case, seed) for case in cases]
            arguments["seeds"] = np.array(seeds, dtype=np.int64)
        return arguments
    if "seed" in wanted:
        arguments["seed"] = case_seed(cases[0], seed)
    if "generator" in wanted:
        import torch

        arguments["generator"] = torch.Generator().manual_seed(case_seed(cases[0], seed))
    return arguments


def _fresh(fixed: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as they were given, whatever the case before did to a list or an array."""
    fresh = dict(fixed)
    for name, value in fixed.items():
        mutable = isinstance(value, (list, dict, set, tuple, np.ndarray))
        if mutable or hasattr(value, "detach") or dataclasses.is_dataclass(value):
            with contextlib.suppress(Exception):  # holds something that cannot be copied: shared
                fresh[name] = copy.deepcopy(value)
    return fresh


def _message(error: BaseException) -> str:
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:
        text = "its text raises an error itself"
    return printable(f"{name}: {text}")[:_MESSAGE_LENGTH]


def _status(task: Task, columns: Mapping[str, np.ndarray], n_cases: int) -> np.ndarray:
    converged = np.ones(n_cases, dtype=bool)
    for variable in task.variables or ():
        if variable.name.endswith("_converged") and variable.dtype == "bool":
            flags = columns[variable.name]
            converged &= flags.all(axis=tuple(range(1, flags.ndim)))
    return np.where(converged, OK, NOT_CONVERGED).astype(np.int8)


def _checked(task: Task, returned: Any, leading: tuple[int, ...]) -> dict[str, Any]:
    """What the function returned, in the declared names, shapes and types, or an error."""
    if not isinstance(returned, Mapping) or returned.keys() != task.names:
        got = sorted(map(str, returned)) if isinstance(returned, Mapping) else type(returned)
        raise TypeError(
            f"{task.label}: expected a mapping with exactly {sorted(task.names)}, got {got}"
        )
    variables = task.variables or ()
    return {v.name: _fitting(v, returned[v.name], (*leading, *task.shape(v))) for v in variables}


def _fitting(variable: Variable, value: Any, shape: tuple[int, ...]) -> np.ndarray | float:
    if type(value) is float and variable.dtype == "float64" and not shape:
        return value  # the usual case, ten times faster than an array of one number
    if np.ma.isMaskedArray(value) and np.ma.getmaskarray(value).any():
        raise ValueError(f"{variable.name}: expected values, got masked ones")
    value = value.detach().cpu() if hasattr(value, "detach") else value
    # As objects, because NumPy's own texts lose NUL characters at the end.
    array = np.asarray(value, object if variable.dtype == "str" else None)
    if array.shape != shape:
        raise ValueError(f"{variable.name}: expected shape {shape}, got {array.shape}")
    if array.dtype.kind not in _FITS[variable.dtype]:
        raise TypeError(f"{variable.name}: expected {variable.dtype}, got {array.dtype}")
    if variable.dtype == "str":
        return _texts(variable, array)
    with np.errstate(all="ignore"):
        cast = array.astype(variable.numpy_dtype)
    lost = cast != array if variable.dtype == "int64" else np.isinf(cast) & np.isfinite(array)
    if np.any(lost):
        raise ValueError(
            f"{variable.name}: expected {variable.dtype}, which does not hold "
            f"{array[lost].flat[0]}"
        )
    return cast


def _texts(variable: Variable, array: np.ndarray) -> np.ndarray:
    for text in array.flat:
        if not isinstance(text, str):
            raise TypeError(f"{variable.name}: expected texts, got {type(text).__name__}")
        if "\0" in text or text != text.encode("utf-8", "replace").decode():
            raise ValueError(f"{variable.name}: expected text in UTF-8, got {text!r:.80}")
    return array[()]  # of no dimension: the text itself
