"""Arrays in one file with a digest."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from meanfield.results.marks import DIGEST


def pack_arrays(arrays: Mapping[str, np.ndarray]) -> memoryview:
    """The content of an ``.npz`` file with these arrays and their digest."""
    content = io.BytesIO()
    np.savez(content, allow_pickle=False, **{DIGEST: np.array(digest_of(arrays))}, **arrays)
    return content.getbuffer()


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of such a file.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged, or not one of these files.
    """
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as stored:
            arrays = dict(stored)
        whole = str(arrays.pop(DIGEST)) == digest_of(arrays)
    except FileNotFoundError:
        raise
    except Exception as error:  # a damaged archive may raise anything
        raise ValueError(f"{path}: expected a whole archive of arrays, got {error!r}") from error
    if not whole:
        raise ValueError(f"{path}: its content is not what was written")
    return arrays


def digest_of(arrays: Mapping[str, np.ndarray]) -> str:
    """The SHA-256 of names, types, shapes and values, whatever the order of the names."""
    hashed = hashlib.sha256()
    for name in sorted(arrays):
        array = np.asarray(arrays[name])
        hashed.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        hashed.update(np.ascontiguousarray(array).data if array.size else b"")
    return hashed.hexdigest()
