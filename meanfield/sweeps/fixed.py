"""The fixed settings of a sweep as each case gets them: its own, without copying large arrays."""

from __future__ import annotations

import contextlib
import copyreg
import dataclasses
import io
import mmap
import pickle
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import numpy as np

from meanfield.checks import to_host

_LARGE = 2**20  # bytes beyond which an array is mapped and not copied


class FixedSettings:
    """Settings by name, of which every case gets a copy: it may change a list or an array.

    A large array lies in a temporary file that each case maps for itself: what a case writes stays
    with it, and memory is taken for what it writes alone. What cannot be pickled is not copied.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def fresh(self) -> dict[str, Any]:
        """The settings for one case."""
        return self._values | {name: copy() for name, copy in self._copies.items()}

    @cached_property
    def _copies(self) -> dict[str, Callable[[], Any]]:
        """By name of a setting that a case might change, the function that makes it anew."""
        kinds = (list, dict, set, tuple, np.ndarray, *_tensors())
        found = {}
        for name, value in self._values.items():
            if isinstance(value, kinds) or dataclasses.is_dataclass(value):
                with contextlib.suppress(Exception):  # objects raise what they like
                    found[name] = _copier(value)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {"_values": self._values}


def _tensors() -> list[Any]:
    return [sys.modules["torch"].Tensor] if "torch" in sys.modules else []


def _copier(value: Any) -> Callable[[], Any]:
    """The function that makes a value anew; the content of arrays and tensors lies aside."""
    content, arrays = io.BytesIO(), list[pickle.PickleBuffer]()
    pickler = pickle.Pickler(content, protocol=5, buffer_callback=arrays.append)
    pickler.dispatch_table = copyreg.dispatch_table | dict.fromkeys(_tensors(), _as_array)
    pickler.dump(value)
    buffers = [_opener(array.raw()) for array in arrays]
    return lambda: pickle.loads(content.getvalue(), buffers=[opened() for opened in buffers])


def _as_array(tensor: Any) -> Any:
    try:
        return sys.modules["torch"].from_numpy, (to_host(tensor.contiguous()),)
    except (TypeError, RuntimeError):  # of a type that NumPy has not
        return tensor.__reduce_ex__(5)


def _opener(data: memoryview) -> Callable[[], Any]:
    """The function that gives these bytes to a case, which may write into them."""
    if data.nbytes < _LARGE:
        return partial(bytearray, bytes(data))
    file = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the function is there
    file.write(data)
    file.flush()

    def mapped() -> mmap.mmap:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    weakref.finalize(mapped, file.close)
    return mapped
