"""Values as plain data for a store: equal exactly when they mean the same."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import functools
import hashlib
import json
import math
import sys
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path, PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy as np

from meanfield.checks import to_host

# Made once, because `json.dumps` with these settings makes an encoder in each call.
to_json = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode
# What counts by its name; functions and classes of the sweep's module are looked through besides.
NAMED = (FunctionType, BuiltinFunctionType, type, np.ufunc, functools._lru_cache_wrapper)
_BY_TEXT = (complex, bytes, range, Fraction, PurePath, np.dtype)
_TORCH_BY_TEXT = ("torch:dtype", "torch:device", "torch:Size")


def canonical(value: Any, name: str = "value", named: list[Any] | None = None) -> Any:
    """Plain data that are equal exactly when the values mean the same, for JSON.

    Arrays and tensors count by content, lists as tuples and 1 as 1.0; dataclasses by type and
    fields; modules of torch by their state; other objects by the attributes that their class lists
    in ``identified_by``. Functions and classes count by name, and are put into `named`.

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
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: canonical(v, f"{name}.{key}", named) for key, v in value.items()}
        return {"": sorted((canonical(item, name, named) for item in value.items()), key=to_json)}
    if isinstance(value, (list, tuple)):
        return [canonical(item, f"{name}[{i}]", named) for i, item in enumerate(value)]
    if isinstance(value, (set, frozenset)):
        return {"set": sorted(to_json(canonical(item, name, named)) for item in value)}
    if isinstance(value, NAMED):
        named.append(value)
        return {"name": name_in_store(value)}
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


def digest(text: str) -> str:
    """Sixteen digits of the SHA-256 of a text."""
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


def _reads_as_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _content(value: Any, name: str, named: list[Any]) -> dict[str, Any]:
    """What an object holds, besides its type."""
    kind, torch = type(value), sys.modules.get("torch")
    if isinstance(value, _BY_TEXT) or name_in_store(kind) in _TORCH_BY_TEXT:
        return {"text": repr(value)}
    if isinstance(value, np.ndarray) or (torch and isinstance(value, torch.Tensor)):
        array = np.ascontiguousarray(value if isinstance(value, np.ndarray) else to_host(value))
        if array.dtype.kind not in "biufc":
            raise TypeError(f"{name}: expected an array of numbers, got one of {array.dtype}")
        mask = {"mask": canonical(value.mask)} if isinstance(value, np.ma.MaskedArray) else {}
        about = {"shape": [*np.shape(value)], "dtype": str(array.dtype)}
        return {"array": hashlib.sha256(array.tobytes()).hexdigest(), **about, **mask}
    if torch and isinstance(value, torch.nn.Module):
        state = canonical({"training": value.training, **value.state_dict()}, name)
        return {"text": repr(value), "state": state}
    named.append(kind)
    names = getattr(kind, "identified_by", None)
    if names is None and dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    elif isinstance(value, functools.partial):
        names = ("func", "args", "keywords")
    elif isinstance(value, (SimpleNamespace, argparse.Namespace)):
        names = vars(value)
    elif getattr(value, "__dict__", None) == {}:
        names = ()
    if names is None:
        raise TypeError(
            f"{name}: expected numbers, text, lists, dicts, arrays, tensors, functions or "
            f"dataclasses of these, got {kind.__name__}; a store must be able to tell whether it "
            "changed: list in its class, as `identified_by`, the attributes that say what it is"
        )
    return {"fields": {n: canonical(getattr(value, n), f"{name}.{n}", named) for n in names}}
