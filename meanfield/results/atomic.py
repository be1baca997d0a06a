"""Files that are whole or absent, whatever happens to the process or to the machine.

A file is written under a temporary name, flushed to the disk and renamed; its folder is flushed
before `write_whole` returns. Temporary names hold host and process, so that leftovers of dead
processes can be removed.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import mmap
import os
import re
import secrets
import shutil
import socket
import time
import zlib
from pathlib import Path

__all__ = ["check_replaceable", "hidden_name", "remove_litter", "sync", "write_whole"]

_HIDDEN = re.compile(r"\..*\.([0-9a-f]{8})\.(\d+)\.[0-9a-f]{6}\.tmp")
_DAY = 86400.0  # seconds after which a temporary file of another machine is a leftover
_MARK = b"meanfield"  # in every file that this library writes


def write_whole(path: Path, data: bytes | memoryview, *, replace: bool = True) -> None:
    """Write a file. It has its name only once it is whole; on return it is on the disk.

    Raises:
        FileExistsError: there is one, and it is not to be replaced.
        OSError: it cannot be written; nothing is left behind.
    """
    hidden = hidden_name(path)
    try:
        _write(hidden, data)
        if replace:
            os.replace(hidden, path)
        else:
            os.link(hidden, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(hidden)
    sync(path.parent)


def sync(folder: Path) -> None:
    """Flush the names in a folder to the disk, where the system can."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def hidden_name(path: Path) -> Path:
    """A temporary name beside `path` with the machine and the process that it belongs to."""
    owner = f"{_machine()}.{os.getpid()}.{secrets.token_hex(3)}"
    return path.with_name(f".{path.name[:100]}.{owner}.tmp")


def remove_litter(folder: Path, name: str = "") -> None:
    """Remove temporary files of dead processes for names that begin with `name`."""
    for leftover in folder.glob(f".{glob.escape(name[:100])}*.tmp"):
        owner = _HIDDEN.fullmatch(leftover.name)
        with contextlib.suppress(OSError):  # another process was faster
            if owner and _is_dead(owner[1], int(owner[2]), leftover.stat().st_mtime):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


def check_replaceable(path: Path) -> Path:
    """The path with links resolved, if nothing is there or a file of this library.

    Raises:
        FileExistsError: something else is there, or the path is inside the store of a sweep or
            inside a Zarr folder.
    """
    path = path.resolve()
    if any((folder / "sweep.json").exists() for folder in (path, *path.parents)):
        raise FileExistsError(f"{path}: expected a place outside the store of a sweep")
    if any((folder / "zarr.json").exists() for folder in path.parents):
        raise FileExistsError(f"{path}: expected a place outside a Zarr folder")
    if path.exists() and not (_is_our_folder(path) if path.is_dir() else _is_marked(path)):
        raise FileExistsError(
            f"{path} was not written by this library, or is the store of a sweep of version 0.1, "
            "and is not replaced; give another name, or remove it"
        )
    return path


def _write(path: Path, data: bytes | memoryview) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"


def _is_marked(path: Path) -> bool:
    if not path.stat().st_size:
        return True  # what an older version left of a file when it was killed
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.find(_MARK) >= 0


def _is_our_folder(path: Path) -> bool:
    """A Zarr folder that `write_dataset` has made and to which nothing else was added."""
    head = path / "zarr.json"
    text = head.read_bytes() if head.is_file() else b""
    known = all(entry == head or (entry / "zarr.json").exists() for entry in path.iterdir())
    return known and _MARK in text and b"sweep_schema" not in text
