"""Settings as each case gets them: its own, which it may change."""

from __future__ import annotations

import copy
import dataclasses
import sys
import tempfile
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from meanfield.checks import to_host

_LARGE = 100_000_000  # bytes of an array from which on a copy in each case costs too much


def copier(value: Any) -> Callable[[], Any]:
    """The function that makes a setting anew for each case, which may change what it gets.

    Lists, dicts, sets, tuples, arrays, tensors and dataclasses are copied. An array or a tensor of
    more than 100 MB is mapped from a temporary file: what a case writes stays with it, and memory
    is taken for what it writes alone. Anything else, and what refuses to be copied, is shared.
    """
    torch: Any = sys.modules.get("torch")
    tensor = torch is not None and isinstance(value, torch.Tensor)
    if tensor or isinstance(value, np.ndarray):
        if value.nbytes > _LARGE and not (tensor and value.requires_grad):
            mapped = _mapped(to_host(value) if tensor else value)
            return (lambda: torch.from_numpy(mapped())) if tensor else mapped
    elif not (isinstance(value, (list, dict, set, tuple)) or dataclasses.is_dataclass(value)):
        return lambda: value
    try:
        copy.deepcopy(value)
    except Exception:  # objects raise what they like
        return lambda: value
    return partial(copy.deepcopy, value)


def _mapped(array: np.ndarray) -> Callable[[], np.ndarray]:
    file = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the function is there
    file.write(np.ascontiguousarray(array).data)
    file.flush()
    dtype, shape = array.dtype, array.shape

    def mapped() -> np.ndarray:
        return np.memmap(file, dtype, "c", shape=shape).view(np.ndarray)

    weakref.finalize(mapped, file.close)
    return mapped
