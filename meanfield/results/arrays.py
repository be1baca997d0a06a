"""Arrays in one file with a digest."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from meanfield.results.atomic import read_regular
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
        with zipfile.ZipFile(io.BytesIO(read_regular(path))) as stored:
            arrays = {m.filename.removesuffix(".npy"): _member(stored, m) for m in stored.filelist}
        whole = str(arrays.pop(DIGEST)) == digest_of(arrays)
    except FileNotFoundError:
        raise
    except Exception as error:  # a damaged archive may raise anything
        raise ValueError(f"{path}: expected a whole archive of arrays, got {error!r}") from error
    if not whole:
        raise ValueError(f"{path}: its content is not what was written")
    return arrays


def _member(stored: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    # Of a compressed one a few bytes may become more than fits into memory.
    if member.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{member.filename} is compressed")
    with stored.open(member) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def digest_of(arrays: Mapping[str, np.ndarray]) -> str:
    """The SHA-256 of names, types, shapes and values, whatever the order of the names."""
    hashed = hashlib.sha256()
    for name in sorted(arrays):
        array = np.asarray(arrays[name])
        hashed.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        hashed.update(np.ascontiguousarray(array).data if array.size else b"")
    return hashed.hexdigest()
