"""What identifies a computation: values by content, functions by name, source and what they carry.

A function is more than its name: a method computes with its object, an inner function with what it
closes over, and any function with its defaults and the objects of its module that it reads. Their
contents are carried into the identity. What is not seen: functions of other modules that it calls.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import dis
import functools
import hashlib
import inspect
import json
import math
import pickle
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from meanfield.checks import to_host

# Made once, because `json.dumps` with these settings makes an encoder in each call.
to_json = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode
_LONGEST = 200  # characters of a value that a message can still show; beyond them its digest
_BY_NAME = (ModuleType, type, BuiltinFunctionType)  # what has no content of the user's
_Found = Iterator[tuple[str, Any]]


@dataclass(frozen=True)
class Identity:
    """What a function is.

    Attributes:
        name: its module (of a script: its file) and name; None if it is a lambda or has none.
        code: digest of its source without comments, of that of the functions of its module that
            it calls, and of lists and dicts that it reads; "" if no source can be read.
        carried: what it computes with besides its arguments, by name, as plain data.
        unknown: what it carries and nobody can compare: name -> type.
    """

    name: str | None
    code: str
    carried: dict[str, Any]
    unknown: dict[str, str]


def identity_of(function: Callable[..., Any]) -> Identity:
    """The identity of a function, method, partial or decorated function."""
    seen = _Seen()
    seen.visit(function, "")
    code = _digest(to_json([seen.sources, seen.containers])) if all(seen.sources) else ""
    return Identity(_name_of(function), code, seen.carried, seen.unknown)


def canonical(value: Any, name: str = "value") -> Any:
    """Plain data that are equal exactly when the values mean the same, for JSON.

    Arrays and tensors count by content, dataclasses by type and fields; functions are refused.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        # Numbers are spelled as texts: a text that reads as a number is marked as a text.
        return {"text": value} if _reads_as_number(value) else value
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (int, float)):
        # One spelling per number; an int beyond the reach of floats keeps its digits.
        small = abs(value) < 2**53 or math.inf == abs(value)
        return repr(float(value) + 0.0) if small else repr(value)  # -0.0 is 0.0
    if isinstance(value, Mapping):
        return {str(k): canonical(v, f"{name}.{k}") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [canonical(item, f"{name}[{i}]") for i, item in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {"type": type(value).__qualname__, **canonical(fields, name)}
    return _canonical_array(value, name)


def _reads_as_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _canonical_array(value: Any, name: str) -> dict[str, Any]:
    if hasattr(value, "detach"):  # a torch tensor, without importing torch
        value = to_host(value)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biuf":
        raise TypeError(
            f"{name}: expected numbers, text, lists, dicts, arrays, tensors or dataclasses of "
            f"these, got {type(value).__name__}; a store must be able to tell whether it changed"
        )
    content = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
    return {"array": content, "shape": list(value.shape), "dtype": str(value.dtype)}


@dataclass
class _Seen:
    """What is found while a function and those that it calls are looked through."""

    sources: list[str] = field(default_factory=list)
    containers: dict[str, Any] = field(default_factory=dict)
    carried: dict[str, Any] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    visited: set[Any] = field(default_factory=set)

    def visit(self, function: Any, owner: str) -> None:
        """Look through a function; `owner` stands before the names of what it carries."""
        function = function.__wrapped__ if _is_cached(function) else function
        if isinstance(function, functools.partial):
            self.visit(function.func, owner)
            given = {**{str(i): a for i, a in enumerate(function.args)}, **function.keywords}
            self.take((f"argument {name}", value) for name, value in given.items())
        elif isinstance(function, MethodType):
            self.visit(function.__func__, owner)
            if isinstance(function.__self__, type):
                self.carried[f"{owner}class"] = function.__self__.__qualname__
            else:
                self.take([(f"{owner}self", function.__self__)])
        elif not isinstance(function, FunctionType):
            if isinstance(function.__call__, MethodType):  # an object that can be called
                self.visit(function.__call__, owner)
            else:
                self.sources.append("")
        elif function not in self.visited:
            self.visited.add(function)
            self.sources.append(_source(function))
            self.take(_carried_by(function, owner), function.__module__)
            if inspect.unwrap(function) is not function:
                self.visit(inspect.unwrap(function), owner)

    def take(self, found: Any, module: str = "") -> None:
        """Carry values; look through functions of the module; name what cannot be compared."""
        for name, value in found:
            if isinstance(value, FunctionType) or _is_cached(value):
                if value.__module__ == module or "<locals>" in value.__qualname__:
                    self.visit(value, f"{value.__name__}: ")
            elif isinstance(value, (list, dict, set)):  # perhaps a cache: a change is a warning
                self.containers[name] = _content(value) or type(value).__name__
            elif not isinstance(value, _BY_NAME):
                content = _content(value)
                if content is None:
                    self.unknown[name] = type(value).__name__
                else:
                    self.carried[name] = content


def _carried_by(function: FunctionType, owner: str) -> _Found:
    """Defaults, what it closes over, and objects of its module; not those that it sets itself."""
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    first = len(names) - len(defaults)
    given = {**dict(zip(names[first:], defaults, strict=True)), **(function.__kwdefaults__ or {})}
    yield from ((f"{owner}default {name}", value) for name, value in given.items())
    read, written = _names_in(code)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not bound yet
            if name not in written:
                yield f"{owner}closure {name}", cell.cell_contents
    for name in sorted(read - written):
        if name in function.__globals__ and not name.startswith("__"):
            yield f"{owner}global {name}", function.__globals__[name]


def _names_in(code: CodeType) -> tuple[set[str], set[str]]:
    """The globals that a code reads, and the globals and closed-over names that it sets."""
    read, written = set(), set()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            read.add(str(step.argval))
        elif step.opname in ("STORE_GLOBAL", "STORE_DEREF"):
            written.add(str(step.argval))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            more = _names_in(inner)
            read, written = read | more[0], written | more[1]
    return read, written


def _content(value: Any) -> Any:
    """Plain data of a value, or the digest of its pickle; None if it has neither."""
    try:
        plain = canonical(value)
    except TypeError:
        try:
            return {"pickle": hashlib.sha256(pickle.dumps(value, 4)).hexdigest()[:16]}
        except Exception:  # objects raise what they like when they are pickled
            return None
    text = to_json(plain)
    return plain if len(text) <= _LONGEST else {"digest": _digest(text)}


def _source(function: FunctionType) -> str:
    """The source without comments; "" where it cannot be read, such as in a shell."""
    try:
        return ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(function))))
    except (OSError, TypeError, SyntaxError):
        return ""


def _name_of(function: Callable[..., Any]) -> str | None:
    if isinstance(function, MethodType) and isinstance(function.__self__, type):
        name = f"{function.__self__.__qualname__}.{function.__name__}"
    else:
        name = getattr(function, "__qualname__", "<no name>")
    return None if "<" in name else f"{_module_of(function)}:{name}"


def _module_of(function: Callable[..., Any]) -> str:
    """The module by the name that imports it; of a script the name of its file."""
    if function.__module__ != "__main__":
        return function.__module__
    main = sys.modules["__main__"]
    if main.__spec__ is not None:  # python -m
        return main.__spec__.name
    file = getattr(main, "__file__", None)
    return "interactive" if file is None else Path(file).stem


def _is_cached(function: Any) -> bool:
    return isinstance(function, functools._lru_cache_wrapper)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
