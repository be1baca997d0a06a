"""What a file system may hold after a loss of power, from a trace of system calls.

The weakest file system that POSIX allows: of a file what was flushed is there, and of what was
written later nothing, a part, zeros, or all; of a folder the names that were there at its last
flush, and of later changes any subset, each whole.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

CALLS = (
    "openat,write,pwrite64,fsync,fdatasync,rename,renameat,renameat2,link,linkat,unlink,"
    "unlinkat,mkdir,mkdirat,rmdir,ftruncate"
)
_LINE = re.compile(r"^\d+ +(\w+)\((.*)\) += (-?\d+)", re.DOTALL)
_TEXT = re.compile(r'<((?:\\x[0-9a-f]{2})*)>|"((?:\\x[0-9a-f]{2})*)"')
_HALF = re.compile(r"^(\d+) +(\w+\(.*) <unfinished \.\.\.>$")
_REST = re.compile(r"^(\d+) +<\.\.\. \w+ resumed>(.*)$")


class Call(NamedTuple):
    """A system call below the root, or a line that the process printed."""

    kind: str
    path: str
    other: str = ""
    data: bytes = b""


def trace(arguments: list[str], root: Path) -> list[Call]:
    """Run ``python *arguments`` and record what it does to the files below the root."""
    record = root.parent / "trace.txt"
    command = ["strace", "-f", "-qq", "-y", "-xx", "-s", "100000000", "-e", f"trace={CALLS}"]
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, "-o", str(record), sys.executable, *arguments], env=environment, check=True
    )
    halves: dict[str, str] = {}
    calls = []
    for line in record.read_text().splitlines():
        if half := _HALF.match(line):
            halves[half[1]] = half[2]
            continue
        rest = _REST.match(line)
        matched = _LINE.match(f"{rest[1]} {halves.pop(rest[1])}{rest[2]}" if rest else line)
        if matched and int(matched[3]) >= 0:
            calls += _read(matched[1], matched[2], int(matched[3]), root)
    return calls


def _read(name: str, arguments: str, result: int, root: Path) -> list[Call]:
    texts = [bytes.fromhex((a or b).replace(r"\x", "")) for a, b in _TEXT.findall(arguments)]
    if name == "write" and arguments.startswith("1<"):
        return [Call("print", "", data=texts[-1])]
    data = texts.pop()[:result] if name in ("write", "pwrite64") else b""
    # A name is relative to the folder whose descriptor stands before it, if one does.
    names = [os.fsdecode(text) for text in texts]
    if name in ("unlinkat", "openat", "mkdirat"):
        names = [os.path.join(*names[:2])]
    elif name in ("renameat", "renameat2", "linkat"):
        names = [os.path.join(*names[:2]), os.path.join(*names[2:4])]
    if not all(Path(name).is_relative_to(root) for name in names):
        return []
    paths = [os.path.relpath(name, root) for name in names]
    if name == "openat":
        return [Call("create", *paths)] if "O_CREAT" in arguments else []
    kind = "exchange" if "RENAME_EXCHANGE" in arguments else re.sub("at2?$|64$", "", name)
    kind = {"fdatasync": "fsync", "pwrite": "write", "rmdir": "unlink"}.get(kind, kind)
    return [Call(kind, *paths, data=data)]


@dataclass
class File:
    """Its content, and how much of it has been flushed."""

    data: bytes = b""
    flushed: int = 0

    def build(self, path: Path, rng, how: str) -> None:
        loose = self.data[self.flushed :]
        end = int(rng.integers(len(loose) + 1))
        parts = {"all": loose, "none": b""}
        kept = parts.get(how, (b"", loose[:end], bytes(len(loose)), loose)[rng.integers(4)])
        path.write_bytes(self.data[: self.flushed] + kept)


@dataclass
class Folder:
    """Its names now, those at its last flush, and the changes since."""

    now: dict = field(default_factory=dict)
    flushed: dict = field(default_factory=dict)
    pending: list = field(default_factory=list)

    def change(self, names: dict) -> None:
        self.pending.append(names)
        self.now.update(names)

    def flush(self) -> None:
        for names in self.pending:
            self.flushed.update(names)
        self.pending = []

    def build(self, path: Path, rng, how: str) -> None:
        names = dict(self.flushed)
        for change in self.pending:
            if how == "all" or (how == "some" and rng.random() < 0.5):
                names.update(change)
        path.mkdir(exist_ok=True)
        for name, node in names.items():
            if node is not None:
                node.build(path / name, rng, how)


class Disk:
    """A file system to which calls are applied one by one."""

    def __init__(self) -> None:
        self.root = Folder()

    def apply(self, call: Call) -> None:
        if call.kind == "print":
            return
        folder, name = self._at(call.path)
        node = folder.now.get(name) if name else self.root
        if call.kind == "create" and node is None:
            folder.change({name: File()})
        elif call.kind == "mkdir":
            folder.change({name: Folder()})
        elif call.kind == "write":
            node.data += call.data
        elif call.kind == "fsync" and isinstance(node, File):
            node.flushed = len(node.data)
        elif call.kind == "fsync":
            node.flush()
        elif call.kind == "unlink":
            folder.change({name: None})
        elif call.kind in ("rename", "link", "exchange"):
            other, there = self._at(call.other)
            assert other is folder
            left = {"rename": None, "link": node, "exchange": folder.now.get(there)}[call.kind]
            folder.change({name: left, there: node})

    def _at(self, path: str) -> tuple[Folder, str]:
        folder, parts = self.root, [part for part in path.split("/") if part != "."]
        for part in parts[:-1]:
            folder = folder.now[part]
        return folder, parts[-1] if parts else ""
