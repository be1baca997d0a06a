"""A loss of power while any kind of file is written, after any of the calls that write it.

Every write, flush, rename and deletion is recorded, and the disk is put together as it may be
after a crash, on the weakest file system that POSIX allows: of a file what was flushed is there,
and of what was written later nothing, a part, zeros, or all; of a folder the names that were there
at its last flush, and of later changes any subset, each whole.

MEANFIELD_CRASHES sets how many crashes the slow test takes.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from meanfield.results import atomic, store
from tests.sweeps.written_files import KINDS, VERSIONS, check, write

FEW, CRASHES = 60, int(os.environ.get("MEANFIELD_CRASHES", "700"))


class Call(NamedTuple):
    """A call of the system below the root, or the acknowledged version of a kind of file."""

    kind: str
    path: str
    other: str = ""
    data: bytes = b""


def recorded(root: Path) -> list[Call]:
    """What writing all versions of every kind does to the files below the root.

    What is written past the one writer is not recorded, and so is missing after every crash.
    """
    recorder = Recorder(root)
    with pytest.MonkeyPatch.context() as patch:
        for module in (atomic, store):
            patch.setattr(module, "os", recorder)
        patch.setattr(shutil, "rmtree", recorder.around(shutil.rmtree, "unlink"))
        for name in ("mkdir", "rename", "unlink"):
            patch.setattr(Path, name, recorder.around(getattr(Path, name), name))
        patch.setattr(Path, "open", recorder.appending(Path.open))
        patch.setattr(store, "_MOST_FILES", 2)  # so that files are merged
        for version in range(1, VERSIONS + 1):
            for kind in KINDS:
                write(kind, root / kind, version)
                recorder.log.append(Call("print", kind, str(version)))
    return recorder.log


class Recorder:
    """The module `os` and methods of paths, carried out and remembered in order."""

    def __init__(self, root):
        self.root, self.log, self.open_files = root, [], {}

    def __getattr__(self, name):
        return getattr(os, name)

    def note(self, kind, *paths, data=b""):
        if all(Path(path).is_relative_to(self.root) for path in paths):
            self.log.append(Call(kind, *(os.path.relpath(p, self.root) for p in paths), data=data))

    def around(self, usual, kind):
        def call(path, *other, **more):
            existed = path.exists()
            usual(path, *other, **more)
            if existed != (kind == "mkdir"):
                self.note(kind, path, *other[: kind == "rename"])

        return call

    def appending(self, usual):
        def call(path, mode="r", **more):
            file = usual(path, mode, **more)
            if mode == "a":
                self.note("create", path)
                write, file.write = file.write, lambda text: noted(path, text, write)
            return file

        def noted(path, text, write):
            self.note("write", path, data=text.encode())
            return write(text)

        return call

    def getpid(self):
        return 2**22 + 1  # of no process: after the loss the one that wrote is dead

    def open(self, path, flags, mode=0o777):
        descriptor = os.open(path, flags, mode)
        self.open_files[descriptor] = path
        if flags & os.O_CREAT:
            self.note("create", path)
        return descriptor

    def write(self, descriptor, data):
        n = os.write(descriptor, data)
        self.note("write", self.open_files[descriptor], data=bytes(data[:n]))
        return n

    def fsync(self, descriptor):
        os.fsync(descriptor)
        self.note("fsync", self.open_files[descriptor])

    def replace(self, source, target):
        os.replace(source, target)
        self.note("rename", source, target)

    def link(self, source, target):
        os.link(source, target)
        self.note("link", source, target)

    def unlink(self, path):
        os.unlink(path)
        self.note("unlink", path)


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
        folder, name = self.at(call.path)
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
        elif call.kind in ("rename", "link"):
            other, there = self.at(call.other)
            assert other is folder
            folder.change({name: node if call.kind == "link" else None, there: node})

    def at(self, path: str) -> tuple[Folder, str]:
        folder, parts = self.root, [part for part in path.split("/") if part != "."]
        for part in parts[:-1]:
            folder = folder.now[part]
        return folder, parts[-1] if parts else ""


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    found = recorded(tmp_path_factory.mktemp("root"))
    assert {call.path.split("/")[0] for call in found} == {".", *KINDS}
    return found


def crashes(calls, times, folder, *, ways=("none", "all", "some", "some"), keep=None):
    """What goes wrong: kind -> how often, of as many crashes after each call as `times` says."""
    rng, disk, wrong = np.random.default_rng(0), Disk(), Counter()
    reached = dict.fromkeys(KINDS, 0)
    for number, call in enumerate(calls):
        if call.kind == "print":
            reached[call.path] = int(call.other)
        elif keep is None or keep(call, disk):
            disk.apply(call)
        if call.path != ".":
            kind = call.path.split("/")[0]
        for _ in range(times[number]):
            how = ways[rng.integers(len(ways))]
            wrong[kind] += not survives(disk, kind, reached[kind], folder, rng, how)
    return +wrong


def survives(disk, kind, version, folder, rng, how):
    shutil.rmtree(folder, ignore_errors=True)
    disk.root.build(folder, rng, how)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check(kind, folder / kind, version)
    except (AssertionError, ValueError, OSError, KeyError):
        return False
    return True


def drawn(calls, count):
    return Counter(np.random.default_rng(0).integers(len(calls), size=count).tolist())


@pytest.mark.parametrize("count", [FEW, pytest.param(CRASHES, marks=pytest.mark.slow)])
def test_what_was_acknowledged_survives_a_loss_of_power_at_any_point(calls, tmp_path, count):
    assert crashes(calls, drawn(calls, count), tmp_path / "disk") == Counter()


def test_what_is_acknowledged_is_on_the_disk_though_nothing_later_is(calls, tmp_path):
    """A crash at that very moment, with what is flushed and nothing else."""
    times = Counter(i for i, call in enumerate(calls) if call.kind == "print")
    assert crashes(calls, times, tmp_path / "disk", ways=["none"]) == Counter()


def no_flush_of_files(call: Call, disk: Disk) -> bool:
    folder, name = disk.at(call.path)
    return call.kind != "fsync" or not isinstance(folder.now.get(name), File)


def no_flush_of_folders(call: Call, disk: Disk) -> bool:
    return call.kind != "fsync" or not no_flush_of_files(call, disk)


@pytest.mark.parametrize("mutant", [no_flush_of_files, no_flush_of_folders])
def test_without_one_of_the_flushes_every_kind_of_file_is_lost_somewhere(calls, tmp_path, mutant):
    """The harness has teeth."""
    times = Counter(i for i, call in enumerate(calls) if call.kind == "print")
    assert {*crashes(calls, times, tmp_path / "disk", ways=["none"], keep=mutant)} == {*KINDS}
