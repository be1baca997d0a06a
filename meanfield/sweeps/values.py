"""Values as plain data for a store: equal exactly when they mean the same."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import functools
import hashlib
import json
import math
import sys
from collections import defaultdict
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path, PurePath
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodType,
    ModuleType,
    NoneType,
    SimpleNamespace,
)
from typing import Any

import numpy as np
import torch

from meanfield.checks import to_host
from meanfield.results.atomic import digest

# Made once, because `json.dumps` with these settings makes an encoder in each call.
to_json = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode
# What counts by its name; functions and classes of the sweep's module are looked through besides.
NAMED = (FunctionType, BuiltinFunctionType, type, np.ufunc, functools._lru_cache_wrapper)
_BY_TEXT = (complex, bytes, range, Fraction, PurePath, np.dtype, torch.dtype, torch.device)
# Where a model of transformers lies and what has written it; what `torch.compile` counts.
_WITHOUT_EFFECT = {
    "name_or_path",
    "_name_or_path",
    "transformers_version",
    "_torchdynamo_wrapper_id",
}


class _Plain:
    """Objects as large as this one hold nothing besides their `__dict__`."""


def canonical(value: Any, name: str = "value", named: list[Any] | None = None) -> Any:
    """Plain data that are equal exactly when the values mean the same, for JSON.

    Arrays and tensors count by content, lists as tuples and 1 as 1.0; dataclasses by type and
    fields; modules of torch by their state and those of their attributes that can be compared,
    hooks aside; methods by what they are bound to; other objects by the attributes that their
    class lists in ``identified_by``. Functions and classes count by name and go into `named`.

    Raises:
        TypeError: anything else.
    """
    named = [] if named is None else named
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Enum):
        named.append(type(value))
        return {"type": name_in_store(type(value)), "name": value.name}
    if isinstance(value, str):
        # Numbers are spelled as texts: a text that reads as a number is marked as a text.
        return {"text": value} if _reads_as_number(value) else value
    if isinstance(value, (int, float)):
        # One spelling per number, with all digits beyond those that every float keeps.
        large = 2**53 <= abs(value) < math.inf
        return repr(int(value)) if large else repr(float(value) + 0.0)  # -0.0 is 0.0
    if isinstance(value, defaultdict):
        parts: dict[str, Any] = {"default": value.default_factory, "items": dict(value)}
        found = {n: canonical(part, f"{name}.{n}", named) for n, part in parts.items()}
        return {"type": "defaultdict"} | found
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: canonical(value[key], f"{name}.{key}", named) for key in sorted(value)}
        return {"": sorted((canonical(item, name, named) for item in value.items()), key=to_json)}
    if isinstance(value, (list, tuple)):
        return [canonical(item, f"{name}[{i}]", named) for i, item in enumerate(value)]
    if isinstance(value, (set, frozenset)):
        return {"set": sorted(to_json(canonical(item, name, named)) for item in value)}
    if isinstance(value, MethodType):
        parts = {"function": value.__func__, "self": value.__self__}
        return {n: canonical(part, f"{name}.{n}", named) for n, part in parts.items()}
    if isinstance(value, NAMED):
        named.append(value)
        owner = value.__self__ if isinstance(value, BuiltinFunctionType) else None
        found = {"name": name_in_store(value)}
        if isinstance(owner, (ModuleType, type, NoneType)):
            return found
        return found | {"self": canonical(owner, f"{name}.self", named)}  # such as `table.get`
    return {"type": name_in_store(type(value))} | _content(value, name, named)


def name_in_store(value: Any) -> str:
    """The module of a function or a class, of a script the name of its file, and its name."""
    if isinstance(value, MethodType) and isinstance(value.__self__, type):
        return f"{name_in_store(value.__self__)}.{value.__name__}"
    module, main = getattr(value, "__module__", None), sys.modules["__main__"]
    if module == "__main__" and main.__spec__ is not None:  # python -m
        module = main.__spec__.name
    elif module == "__main__":
        module = Path(getattr(main, "__file__", None) or "interactive").stem
    return f"{module}:{getattr(value, '__qualname__', '<no name>')}"


def _reads_as_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _content(value: Any, name: str, named: list[Any]) -> dict[str, Any]:
    """What an object holds, besides its type."""
    kind = type(value)
    if isinstance(value, _BY_TEXT):
        return {"text": repr(value)}
    if isinstance(value, (np.ndarray, torch.Tensor)):
        array, dtype = _numbers(value)
        if array.dtype.kind not in "biufcmMUS":
            raise TypeError(
                f"{name}: expected an array of numbers, texts or dates, got one of {dtype}"
            )
        mask = {"mask": canonical(value.mask)} if isinstance(value, np.ma.MaskedArray) else {}
        about = {"shape": [*np.shape(value)], "dtype": str(dtype)}
        return {"array": hashlib.sha256(array.tobytes()).hexdigest(), **about, **mask}
    names = getattr(kind, "identified_by", None)
    if names is None and isinstance(value, torch.nn.Module):
        return _content_of_module(value, name, named)
    named.append(kind)
    if names is None and dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    elif isinstance(value, functools.partial):
        names = ("func", "args", "keywords")
    elif isinstance(value, (SimpleNamespace, argparse.Namespace)):
        names = vars(value)
    elif names is None and _is_empty(value):
        names = ()
    if names is None:
        raise TypeError(
            f"{name}: expected numbers, text, lists, dicts, arrays, tensors, functions or "
            f"dataclasses of these, got {kind.__name__}; a store must be able to tell whether it "
            "changed: list in its class, as `identified_by`, the attributes that say what it is"
        )
    return {"fields": {n: canonical(getattr(value, n), f"{name}.{n}", named) for n in names}}


def _is_empty(value: Any) -> bool:
    """Whether an object holds nothing: no attributes, no slots, no items of a container."""
    kind = type(value)
    slots = any(vars(base).get("__slots__") for base in kind.__mro__)
    plain = kind.__basicsize__ == _Plain.__basicsize__
    return getattr(value, "__dict__", None) == {} and plain and not slots


def _numbers(value: Any) -> tuple[np.ndarray, Any]:
    """The array of an array or a tensor, and its dtype; bytes where NumPy does not have that."""
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value), value.dtype
    if value.is_floating_point() and value.dtype not in (torch.half, torch.float, torch.double):
        return to_host(value.contiguous().reshape(-1).view(torch.uint8)), value.dtype
    array = np.ascontiguousarray(to_host(value))
    return array, array.dtype


def _content_of_module(module: Any, name: str, named: list[Any]) -> dict[str, Any]:
    """Of it and of all modules in it the class, the attributes, the parameters and buffers."""
    if any(one is module for one in named):  # it holds itself
        return {}
    named.append(module)
    try:
        state = {**module.state_dict(), **dict(module.named_buffers())}
        content = [canonical(state, name, named)]
        skipped = (vars(torch.nn.Module()).keys() - {"training"}) | _WITHOUT_EFFECT
        for place, one in module.named_modules():
            held = {
                n: _held(v, f"{name}.{n}", named) for n, v in vars(one).items() if n not in skipped
            }
            content.append([place, canonical(type(one), name, named), held])
    finally:
        named.remove(module)
    return {"text": repr(module), "digest": digest(to_json(content))}


def _held(value: Any, name: str, named: list[Any]) -> Any:
    """An attribute of a module of torch; what cannot be compared, as a lock, by its type."""
    with contextlib.suppress(Exception):  # objects raise what they like
        if hasattr(value, "to_dict") and not isinstance(value, type):  # a configuration
            value = {n: v for n, v in value.to_dict().items() if n not in _WITHOUT_EFFECT}
        return canonical(value, name, named)
    return {"type": name_in_store(type(value))}
