"""A function with the labels of what it returns, and what identifies it in a store."""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from meanfield.results import Variable
from meanfield.results.stores import blank

__all__ = ["FAILED", "NOT_CONVERGED", "OK", "PENDING", "RESERVED", "Task"]

PENDING, OK, NOT_CONVERGED, FAILED = range(4)
RESERVED = ("status", "message", "case", "case_key", "half")


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
            back false gives the case the status "not converged". None takes names and types from
            the first case that does not fail: numbers, truth values and texts.
        parameters: the meaning of parameters and of coordinates; others are labelled with their
            name.
        coords: values along the variables' own dimensions, which fix their sizes.
        batched: call the function once for many cases: each parameter is an array of shape (n,),
            `seeds` (if it has this argument) are n seeds, int64, and all results have a leading
            axis of length n. When a call raises, its cases are tried one at a time.
        name: what identifies the function in a store; its module and name by default, of a script
            its file.

    Raises:
        ValueError: names used twice or reserved, a dimension without coordinates.

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
        coords = {str(n): np.asarray(values) for n, values in self.coords.items()}
        if self.variables is not None:
            object.__setattr__(self, "variables", tuple(self.variables))
            _check_variables(self.variables, coords)
        elif self.batched:
            raise ValueError("variables: expected those of a batched task, got None")
        object.__setattr__(self, "parameters", tuple(self.parameters))
        object.__setattr__(self, "coords", coords)

    @property
    def identity(self) -> str:
        """What identifies the function in a store: its module and name; it must have one."""
        if self.name is not None:
            return self.name
        name = getattr(self.function, "__qualname__", "<no name>")
        if "<" in name:
            raise TypeError(
                f"fn: expected a named function, by which the store is recognised, got "
                f"{self.function!r}; define it at the top of a module or give Task(..., name=...)"
            )
        return f"{_module_of(self.function)}:{name}"

    @cached_property
    def code(self) -> str:
        """Digest of the function's own source, without comments; "" where it cannot be read."""
        try:
            source = inspect.getsource(inspect.unwrap(self.function))
            plain = ast.unparse(ast.parse(textwrap.dedent(source)))
        except (OSError, TypeError, SyntaxError):
            return ""
        return hashlib.sha256(plain.encode()).hexdigest()[:16]

    @cached_property
    def arguments(self) -> frozenset[str]:
        """The names of the arguments that the function takes."""
        return frozenset(inspect.signature(self.function).parameters)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of one case of each variable, by name."""
        lengths = {name: len(values) for name, values in self.coords.items()}
        return {v.name: tuple(lengths[dim] for dim in v.dims) for v in self.variables or ()}

    @property
    def label(self) -> str:
        """The function in messages."""
        return self.name or str(getattr(self.function, "__qualname__", self.function))

    def blank(self, n_cases: int) -> dict[str, np.ndarray]:
        """So many cases, all pending, see `results.stores.blank`."""
        return blank(self.variables or (), self.coords, n_cases)


def _check_variables(variables: Sequence[Variable], coords: Mapping[str, Any]) -> None:
    names = [v.name for v in variables]
    if not names or len({*names}) < len(names) or {*names} & {*RESERVED, *coords}:
        raise ValueError(
            f"variables: expected different names, at least one, none of {RESERVED} and none of "
            f"a dimension; got {names}"
        )
    if clash := sorted({*RESERVED} & {*coords}):
        raise ValueError(f"coords: expected names other than {RESERVED}, got {clash}")
    missing = {dim for v in variables for dim in v.dims} - set(coords)
    if missing:
        raise ValueError(
            f"coords: expected values along {sorted(missing)}, which the variables have as "
            "dimensions; give for example coords={'head': range(12)}"
        )


def _module_of(function: Callable[..., Any]) -> str:
    """The module as it is imported; of a script the name of its file."""
    if function.__module__ != "__main__":
        return function.__module__
    main = sys.modules["__main__"]
    if main.__spec__ is not None:  # python -m
        return main.__spec__.name
    file = getattr(main, "__file__", None)
    return "interactive" if file is None else Path(file).stem
