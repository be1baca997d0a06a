"""Arrays in one file with a digest: batches of cases, and what a long computation goes on from."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from meanfield.results.atomic import remove_litter, write_whole
from meanfield.results.marks import DIGEST, check_replaceable


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> str:
    """Write arrays to an ``.npz`` file by the one writer; on return it survives any crash.

    Returns:
        The digest of the arrays, which the file holds as well.

    Raises:
        FileExistsError: a file that this library has not written is there.
        OSError: it cannot be written; the file that was there before is whole.
    """
    remove_litter(path.parent, path.name)
    write_whole(check_replaceable(path), pack_arrays(arrays))
    return digest_of(arrays)


def pack_arrays(arrays: Mapping[str, np.ndarray]) -> memoryview:
    """The content of such a file."""
    content = io.BytesIO()
    np.savez(content, allow_pickle=False, **{DIGEST: np.array(digest_of(arrays))}, **arrays)
    return content.getbuffer()


def read_arrays(path: Path, digest: str | None = None) -> dict[str, np.ndarray]:
    """The arrays of a file that `write_arrays` has written.

    Args:
        path: of the file.
        digest: what `write_arrays` returned, if the file must be that very one.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged, another one than that asked for, or not one of these files.
    """
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as stored:
            arrays = dict(stored)
        own = str(arrays.pop(DIGEST))
        trouble = "" if own == digest_of(arrays) else "its content is not what was written"
    except FileNotFoundError:
        raise
    except KeyError:
        trouble = "it was not written by this library"
    except Exception as error:  # a damaged archive may raise anything
        trouble = f"{type(error).__name__}: {error}"
    if not trouble and digest not in (None, own):
        trouble = "it is not the one that was written for this place"
    if trouble:
        raise ValueError(f"{path} cannot be read: {trouble}; remove it to begin again")
    return arrays


def digest_of(arrays: Mapping[str, np.ndarray]) -> str:
    """The SHA-256 of names, types, shapes and values, whatever the order of the names."""
    hashed = hashlib.sha256()
    for name in sorted(arrays):
        array = np.asarray(arrays[name])
        hashed.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        hashed.update(np.ascontiguousarray(array).data if array.size else b"")
    return hashed.hexdigest()
