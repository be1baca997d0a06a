"""File systems that lack something or are full: calls of the one writer that are refused."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from meanfield.results import atomic
from tests.sweeps.written_files import KINDS, VERSIONS, check, write


def refusing(patch, name, code, when=lambda *given: True):
    """Let a call of the system fail as on a file system that does not know it."""
    usual = getattr(os, name)

    def refuse(*given):
        if when(*given):
            raise OSError(code, os.strerror(code))
        return usual(*given)

    patch.setattr(atomic.os, name, refuse)


def is_folder(descriptor):
    return Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_dir()


def no_links(patch):
    refusing(patch, "link", errno.EPERM)


def no_flush_of_folders(patch):
    refusing(patch, "fsync", errno.EINVAL, is_folder)


def write_all(root, reached):
    for version in range(1, VERSIONS + 1):
        for kind in KINDS:
            write(kind, root / kind, version)
            reached[kind] = version


def check_all(root, reached):
    for kind, version in reached.items():
        assert not [f.name for f in (root / kind).rglob(".*")]
        check(kind, root / kind, version)


@pytest.mark.slow
@pytest.mark.parametrize("lack", [no_links, no_flush_of_folders])
def test_a_file_system_that_lacks_something_holds_every_kind_of_file(tmp_path, monkeypatch, lack):
    reached = dict.fromkeys(KINDS, 0)
    with monkeypatch.context() as patch:
        lack(patch)
        write_all(tmp_path, reached)
        patch.setattr(atomic, "_UNKNOWN", ())
        with pytest.raises(OSError, match=r"not permitted|Invalid argument"):
            write_all(tmp_path / "again", {})
    check_all(tmp_path, reached)


@pytest.mark.parametrize(
    "n_bytes",
    [20_000, *(pytest.param(n, marks=pytest.mark.slow) for n in (100, 3_000, 60_000, 120_000))],
)
def test_a_full_disk_is_an_error_and_what_was_acknowledged_stays(tmp_path, monkeypatch, n_bytes):
    written, reached = [], dict.fromkeys(KINDS, 0)

    def is_full(descriptor, data):
        written.append(len(data))
        return sum(written) > n_bytes

    with monkeypatch.context() as patch:
        refusing(patch, "write", errno.ENOSPC, is_full)
        with pytest.raises(OSError, match="No space left"):
            write_all(tmp_path, reached)
    check_all(tmp_path, reached)


def test_a_full_disk_is_told_with_the_file_that_had_no_room(tmp_path, monkeypatch):
    refusing(monkeypatch, "write", errno.ENOSPC, lambda *_: True)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / 'figure.png'}'"):
        atomic.write_whole(tmp_path / "figure.png", b"...")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("code", [None, errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_with_and_without_hard_links_a_file_is_made_once(tmp_path, monkeypatch, code):
    if code:
        refusing(monkeypatch, "link", code)
    path = tmp_path / "a"
    atomic.write_whole(path, b"first", replace=False)
    with pytest.raises(FileExistsError):
        atomic.write_whole(path, b"second", replace=False)
    assert path.read_bytes() == b"first" and [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("kind", ["nc", "zarr"])
def test_a_folder_that_cannot_be_flushed_is_no_error_and_a_file_or_a_broken_disk_is(
    tmp_path, monkeypatch, kind
):
    with monkeypatch.context() as patch:
        no_flush_of_folders(patch)
        write(kind, tmp_path, 1)
    check(kind, tmp_path, 1)
    for code, when in [(errno.EIO, is_folder), (errno.EINVAL, lambda file: not is_folder(file))]:
        with monkeypatch.context() as patch:
            refusing(patch, "fsync", code, when)
            with pytest.raises(OSError, match=os.strerror(code)):
                atomic.write_whole(tmp_path / "b", b"not sure")
