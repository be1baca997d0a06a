"""Memory of processes that are the sweep's own."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import platform

__all__ = ["keep_freed_memory"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt, in glibc's malloc.h
_KEPT = 2**28
_LARGEST_IN_HEAP = 2**25  # the most that glibc takes on 64 bits


@functools.cache
def keep_freed_memory() -> bool:
    """Tell the C library to keep what is freed, up to 256 MB, instead of giving it back.

    By default every temporary beyond 128 kB is mapped and unmapped again, and dask lowers the
    threshold of its workers further: a local constant of 256 particles took 19,000 page faults
    there, and twice the time. Only for processes that do nothing else than sweeps.

    Returns:
        Whether there was anything to tell: glibc only.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        return bool(mallopt(_TRIM_THRESHOLD, _KEPT) and mallopt(_MMAP_THRESHOLD, _LARGEST_IN_HEAP))
    return False
