"""One process that has imported everything and forks the children that tests of sweeps run."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest


class Child:
    """A sweep that is running, in a session of its own."""

    def __init__(self, parent):
        self._parent, self.pid = parent, int(parent.stdout.readline())
        self._code = None

    def alive(self):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, 0)
            return True
        return False

    def kill(self, *, whole_tree=True):
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if whole_tree else os.kill)(self.pid, signal.SIGKILL)
        self.wait()

    def wait(self, seconds=300):
        if self._code is None:
            assert select.select([self._parent.stdout], [], [], seconds)[0], "it does not end"
            self._code = int(self._parent.stdout.readline())
        return self._code


class Done(NamedTuple):
    """How a script has ended and what it has printed."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def start():
    """Start the sweep of a mode of `crash_worker`, or a script."""
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    environment["PYTHONHASHSEED"] = "1"  # another one than that of the tests
    parent = subprocess.Popen(
        [sys.executable, "-m", "tests.sweeps.crash_worker"], env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    last = []

    def start(mode, store, address=""):
        for child in last:  # of a test that failed
            child.kill()
        parent.stdin.write(json.dumps([mode, str(store), address]) + "\n")
        parent.stdin.flush()
        last[:] = [Child(parent)]
        return last[0]

    yield start
    for child in last:
        child.kill()
    parent.stdin.close()
    parent.wait()
    parent.stdout.close()


@pytest.fixture
def script(start, tmp_path):
    """Write and run a script."""

    def script(name, text):
        path = tmp_path / name
        path.write_text(text)
        code = start("script", path).wait()
        return Done(code, *(Path(f"{path}.{kind}").read_text() for kind in ("out", "err")))

    return script


@pytest.fixture
def cluster(tmp_path):
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None,
        local_directory=str(tmp_path / "dask"),
    ) as cluster:  # fmt: skip
        yield cluster
