"""The fixed settings of a sweep as each case gets them: its own, without copying large arrays."""

from __future__ import annotations

import contextlib
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
        kinds = (list, dict, set, tuple, np.ndarray)
        found = {}
        for name, value in self._values.items():
            if isinstance(value, kinds) or _is_tensor(value) or dataclasses.is_dataclass(value):
                with contextlib.suppress(Exception):  # objects raise what they like
                    found[name] = _copier(value)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {"_values": self._values}


class _Pickler(pickle.Pickler):
    """Leaves the content of arrays aside, also that of tensors."""

    def reducer_override(self, value: Any) -> Any:
        if _is_tensor(value):
            with contextlib.suppress(TypeError, RuntimeError):  # of a type that NumPy has not
                return sys.modules["torch"].from_numpy, (to_host(value.contiguous()),)
        return NotImplemented


def _is_tensor(value: Any) -> bool:
    return "torch" in sys.modules and type(value) is sys.modules["torch"].Tensor


def _copier(value: Any) -> Callable[[], Any]:
    """The function that makes a value anew."""
    content = io.BytesIO()
    arrays: list[pickle.PickleBuffer] = []
    _Pickler(content, protocol=5, buffer_callback=arrays.append).dump(value)
    buffers = [_opener(array.raw()) for array in arrays]
    return lambda: pickle.loads(content.getvalue(), buffers=[opened() for opened in buffers])


def _opener(data: memoryview) -> Callable[[], Any]:
    """The function that gives these bytes to a case, which may write into them."""
    return _Mapped(data) if data.nbytes >= _LARGE else partial(bytearray, bytes(data))


class _Mapped:
    """Bytes in a temporary file; each call maps them anew."""

    def __init__(self, data: memoryview) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  open as long as this is there
        weakref.finalize(self, self._file.close)
        self._file.write(data)
        self._file.flush()

    def __call__(self) -> mmap.mmap:
        return mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)
