"""A loss of power while any kind of file is written, after any of the calls that write it.

Every write, flush, rename and deletion is recorded, and the disk is put together as it may be
after a crash (`power_loss`). MEANFIELD_CRASHES sets how many crashes the slow test takes.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections import Counter

import numpy as np
import pytest

from tests.sweeps.power_loss import Call, Disk, File, recorded
from tests.sweeps.written_files import KINDS, check

FEW, CRASHES = 60, int(os.environ.get("MEANFIELD_CRASHES", "700"))


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
