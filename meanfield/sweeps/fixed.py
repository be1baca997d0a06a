"""The fixed settings of a sweep as each case gets them: its own, without copying large arrays."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import mmap
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import IO, Any

import numpy as np

_LARGE = 2**20  # bytes beyond which an array is mapped and not copied


class FixedSettings:
    """Settings by name, of which every case gets a copy: it may change a list or an array.

    A large array lies in a temporary file that each case maps for itself: what a case writes stays
    with it, and memory is taken for what it writes alone.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def fresh(self) -> dict[str, Any]:
        """A copy; of what cannot be copied the thing itself."""
        fresh = dict(self._values)
        memo = {place: view() for place, view in self._views.items()}
        for name, value in self._values.items():
            mutable = isinstance(value, (list, dict, set, tuple, np.ndarray))
            if mutable or hasattr(value, "detach") or dataclasses.is_dataclass(value):
                with contextlib.suppress(Exception):  # objects raise what they like
                    fresh[name] = copy.deepcopy(value, dict(memo))
        return fresh

    @cached_property
    def _views(self) -> dict[int, Callable[[], Any]]:
        """By identity of a large array, the function that maps it anew."""
        views = {}
        for array in _large_arrays(self._values.values()):
            with contextlib.suppress(OSError, TypeError, ValueError):  # then it is copied
                file = tempfile.TemporaryFile()  # noqa: SIM115  open as long as it is mapped
                weakref.finalize(self, file.close)
                views[id(array)] = _mapped(array, file)
        return views

    def __getstate__(self) -> dict[str, Any]:
        return {"_values": self._values}


def _large_arrays(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, Mapping):
            yield from _large_arrays(value.values())
        elif isinstance(value, (list, tuple)):
            yield from _large_arrays(value)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from _large_arrays(getattr(value, f.name) for f in dataclasses.fields(value))
        elif type(value) is np.ndarray and value.nbytes >= _LARGE and not value.dtype.hasobject:
            yield value
        elif "torch" in sys.modules and type(value) is sys.modules["torch"].Tensor:
            host = value.device.type == "cpu" and not value.requires_grad
            if host and value.layout == sys.modules["torch"].strided and value.nbytes >= _LARGE:
                yield value


def _mapped(array: Any, file: IO[bytes]) -> Callable[[], Any]:
    """The function that maps the array, written to a file, for one case."""
    is_array = isinstance(array, np.ndarray)
    content = array if is_array else array.contiguous().view(sys.modules["torch"].uint8).numpy()
    file.write(np.ascontiguousarray(content).data)
    file.flush()

    def view() -> Any:
        private = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        if is_array:
            return np.frombuffer(private, array.dtype).reshape(array.shape)
        return sys.modules["torch"].frombuffer(private, dtype=array.dtype).reshape(array.shape)

    return view
