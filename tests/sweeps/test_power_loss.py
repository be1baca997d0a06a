"""A loss of power while any kind of file is written, at points of a trace of the system calls.

MEANFIELD_CRASHES sets how many. That the harness sees a missing flush is tested as well.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections import Counter

import numpy as np
import pytest

from tests.sweeps.power_loss import Call, Disk, File, trace
from tests.sweeps.written_files import KINDS, check

CRASHES = int(os.environ.get("MEANFIELD_CRASHES", "300"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("strace") is None, reason="no strace"),
]


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    root = tmp_path_factory.mktemp("traced") / "root"
    root.mkdir()
    found = trace(["-m", "tests.sweeps.written_files", str(root)], root)
    assert {call.path.split("/")[0] for call in found if call.path} == {".", *KINDS}
    return found


def crashes(calls, count, folder, keep=lambda call: True):
    """What goes wrong: kind -> how often, among `count` crashes, and how many there were."""
    rng, disk, wrong, tried = np.random.default_rng(0), Disk(), Counter(), Counter()
    reached = dict.fromkeys(KINDS, 0)
    points = [i for i, call in enumerate(calls) if call.kind != "print"]
    times = Counter(rng.choice(points, count).tolist())
    for number, call in enumerate(calls):
        if call.kind == "print":
            word, *rest = call.data.decode().split() or [""]
            if word == "wrote":  # other words are those of git, which is asked for the commit
                reached[rest[0]] = int(rest[1])
        elif keep(call, disk):
            disk.apply(call)
        if call.path not in ("", "."):
            kind = call.path.split("/")[0]
        for _ in range(times[number]):
            tried[kind] += 1
            wrong[kind] += not survives(disk, kind, reached[kind], folder, rng)
    return wrong, tried


def survives(disk, kind, version, folder, rng):
    how = ("none", "all", "some", "some")[rng.integers(4)]
    shutil.rmtree(folder, ignore_errors=True)
    disk.root.build(folder, rng, how)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check(kind, folder / kind, version)
    except (AssertionError, ValueError, OSError, KeyError):
        return False
    return True


def everything(call: Call, disk: Disk) -> bool:
    return True


def test_what_was_acknowledged_survives_a_loss_of_power_at_any_point(calls, tmp_path):
    wrong, tried = crashes(calls, CRASHES, tmp_path / "disk", everything)
    assert sum(tried.values()) == CRASHES and {*tried} == {*KINDS}
    assert +wrong == Counter(), tried


def no_flush_of_files(call: Call, disk: Disk) -> bool:
    folder, name = disk._at(call.path)
    return call.kind != "fsync" or not isinstance(folder.now.get(name), File)


def no_flush_of_folders(call: Call, disk: Disk) -> bool:
    return call.kind != "fsync" or not no_flush_of_files(call, disk)


@pytest.mark.parametrize("mutant", [no_flush_of_files, no_flush_of_folders])
def test_without_one_of_the_flushes_every_kind_of_file_is_lost_somewhere(calls, tmp_path, mutant):
    wrong, tried = crashes(calls, CRASHES, tmp_path / "disk", mutant)
    assert {kind for kind in KINDS if not wrong[kind]} == set(), (wrong, tried)
