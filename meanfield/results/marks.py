"""Recognise files written by this library by a format-specific mark; digests of what they hold."""

from __future__ import annotations

import hashlib
import json
import mmap
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from meanfield.results.atomic import read_regular

DIGEST = "meanfield_digest"  # attribute or member with the digest of the content
_HTML = rb'<meta name="generator" content="meanfield">'
# By suffix, the bytes of the mark with what stands before and after it in that format, so that the
# word in a text, a path or a history is none.
_MARKS = {
    # An attribute that begins with {.
    ".nc": rb"\0\0\0\x10meanfield_digest\0\0\0\x02.{4}\{",
    ".proof": rb"^meanfield transport proof ",
    ".html": _HTML,
    ".htm": _HTML,
    ".png": rb"tEXtSoftware\0meanfield",
    ".pdf": rb"/Creator \(meanfield\)",
    ".svg": rb"<dc:title>meanfield</dc:title>",
}


def digest_of(arrays: Mapping[str, np.ndarray]) -> str:
    """The SHA-256 of names, types, shapes and values, whatever the order of the names."""
    hashed = hashlib.sha256()
    for name in sorted(arrays):
        array = np.asarray(arrays[name])
        hashed.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        hashed.update(np.ascontiguousarray(array).data if array.size else b"")
    return hashed.hexdigest()


def check_replaceable(path: Path) -> Path:
    """The path with links resolved, if nothing is there or a file of this library.

    Raises:
        FileExistsError: something else is there, or the path is inside the store of a sweep or
            inside a Zarr folder.
    """
    path = path.resolve()
    if any(is_description(folder / "sweep.json") for folder in (path, *path.parents)):
        raise FileExistsError(f"{path}: expected a place outside the store of a sweep")
    if any((folder / "zarr.json").exists() for folder in path.parents):
        raise FileExistsError(f"{path}: expected a place outside a Zarr folder")
    if path.exists() and not (_is_our_folder(path) if path.is_dir() else _is_marked(path)):
        raise FileExistsError(
            f"{path} was not written by this library, or by an older version of it, and is not "
            "replaced; give another name, or remove it"
        )
    return path


def is_description(path: Path) -> bool:
    """Whether a file is the `sweep.json` of a store, perhaps damaged, and not somebody else's."""
    try:
        data = read_regular(path)
    except OSError:
        return False
    try:
        entries = json.loads(data)
    except (ValueError, RecursionError):
        return data.count(b"\0") == len(data) or b'"checksum": ' in data[:200]
    return isinstance(entries, dict) and {"schema", "checksum"} <= entries.keys()


def _is_marked(path: Path) -> bool:
    if not path.stat().st_size:
        return True  # nothing is lost
    mark = _MARKS.get(path.suffix)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return mark is not None and re.search(mark, data, re.DOTALL) is not None


def _is_our_folder(path: Path) -> bool:
    """A Zarr folder that `write_dataset` has made and to which nothing else was added."""
    head = path / "zarr.json"
    known = all(entry == head or (entry / "zarr.json").exists() for entry in path.iterdir())
    try:
        return known and DIGEST in json.loads(head.read_bytes())["attributes"]
    except (OSError, ValueError, LookupError, TypeError):
        return False
