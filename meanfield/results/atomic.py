"""The one writer: files and folders that are whole or absent, whatever happens to the machine.

What is written gets a hidden name first; its files and then its folders are flushed to the disk,
and only then it is given its own name. On return it survives a loss of power. Hidden
names hold machine, process namespace and process, so that what dead processes left can be told.

A file of this library is recognised by a mark in its format, and nothing else is replaced.

As in SQLite, a file system that cannot flush folders, or has no hard links, is worked with as it
is; an error while the content of a file is flushed is an error.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import glob
import hashlib
import json
import mmap
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

_HIDDEN = re.compile(r"\.(.*)\.([0-9a-f]{8})\.(\d+)\.[0-9a-f]{6}\.(tmp|old)")
_DAY = 86400.0  # seconds after which a temporary file of another machine is a leftover
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
# What a file system says that does not know an operation, such as flushing a folder on CIFS or
# hard links on exFAT; a full or a broken disk says something else.
_UNKNOWN = {
    errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM, errno.EACCES,
    errno.EBADF, errno.EMLINK,
}  # fmt: skip


def write_whole(path: Path, data: bytes | memoryview, *, replace: bool = True) -> None:
    """Write a file. It has its name only once it is whole; on return it is on the disk.

    Raises:
        FileExistsError: there is one, and it is not to be replaced.
        OSError: it cannot be written, the folder is missing, the disk is full; nothing is left.
    """
    with whole(path, replace=replace) as hidden:
        write_new(hidden, data)


@contextlib.contextmanager
def whole(path: Path, *, replace: bool = True) -> Iterator[Path]:
    """The hidden name under which a block writes a file or a folder; then it gets its own.

    The block writes files by `write_new`, which flushes them; folders are flushed here. While a
    folder takes the place of another one the name is absent for an instant; after a crash just
    then `remove_litter` puts the old one back.

    Raises:
        FileExistsError: there is one, and it is not to be replaced.
        OSError: see `write_whole`.
    """
    hidden = hidden_name(path)
    try:
        yield hidden
        if hidden.is_dir():
            for folder, _, _ in os.walk(hidden, topdown=False):
                sync(Path(folder))
            _place_folder(hidden, path)
        elif replace:
            os.replace(hidden, path)
        else:
            _place_new(hidden, path)
        sync(path.parent)
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)  # a full disk is told of a descriptor, which has no name
        raise
    finally:
        _remove(hidden)


def write_new(path: Path, data: bytes | memoryview) -> None:
    """Write a file that is not there yet and flush its content, not its name."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_regular(path: Path) -> bytes:
    """The content of a file; a pipe or a device, which may never end, is refused."""
    if not (path.is_file() or path.is_dir()) and path.exists():
        raise OSError(errno.EINVAL, "expected a file, got a pipe or a device", str(path))
    return path.read_bytes()


def make_folder(folder: Path) -> None:
    """Make a folder and those above it; on return their names are on the disk."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def sync(folder: Path) -> None:
    """Flush the names in a folder to the disk, where the system can."""
    if os.name == "posix":
        try:
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno not in _UNKNOWN:
                raise


def hidden_name(path: Path, kind: str = "tmp") -> Path:
    """A temporary name beside `path` with the machine and the process that it belongs to."""
    owner = f"{_machine()}.{os.getpid()}.{secrets.token_hex(3)}"
    return path.with_name(f".{path.name[:100]}.{owner}.{kind}")


def remove_litter(folder: Path, name: str = "") -> None:
    """Remove what dead processes left for names that begin with `name`.

    A folder that was to be replaced when its process died, and has no successor, is put back.
    """
    for kind in ("old", "tmp"):
        for leftover in folder.glob(f".{glob.escape(name[:100])}*.{kind}"):
            owner = _HIDDEN.fullmatch(leftover.name)
            with contextlib.suppress(OSError):  # another process was faster
                if owner and _is_dead(owner[2], int(owner[3]), leftover.stat().st_mtime):
                    if kind == "old" and not (folder / owner[1]).exists():
                        leftover.rename(folder / owner[1])
                    else:
                        _remove(leftover)


def _place_folder(hidden: Path, path: Path) -> None:
    """Give a folder its name; what had it before has the hidden name then, or is gone."""
    if not path.exists():
        hidden.rename(path)
        return
    old = hidden_name(path, "old")
    path.rename(old)
    try:
        hidden.rename(path)
    except OSError:
        old.rename(path)
        raise
    sync(path.parent)
    old.rename(hidden)  # a half removed folder must not look like one to be put back


def _place_new(hidden: Path, path: Path) -> None:
    try:
        os.link(hidden, path)
    except OSError as error:
        if error.errno not in _UNKNOWN:
            raise
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        os.replace(hidden, path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _is_dead(machine: str, process: int, modified: float) -> bool:
    if machine != _machine():
        return time.time() - modified > _DAY
    try:
        os.kill(process, 0)
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return True
    except OSError:  # of another user, or not on Linux
        return False
    return state == "Z"  # killed, and not yet waited for


@functools.cache
def _machine() -> str:
    """The machine and, because containers share names of machines, the process namespace."""
    with contextlib.suppress(OSError):
        return digest(f"{socket.gethostname()} {os.stat('/proc/self/ns/pid').st_ino}")[:8]
    return digest(socket.gethostname())[:8]


def digest(text: str) -> str:
    """Sixteen digits of the SHA-256 of a text."""
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


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
