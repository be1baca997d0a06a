"""Every kind of file on file systems that lack something, by a library that refuses calls."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sweeps.written_files import KINDS, VERSIONS, check

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    built = tmp_path_factory.mktemp("faults") / "faults.so"
    source = Path(__file__).with_name("faults.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", built, source, "-ldl"], check=True)
    return built


def write_all(root, library, faults):
    environment = {**os.environ, "LD_PRELOAD": str(library), "FAULTS": faults}
    environment |= {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.sweeps.written_files", str(root)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("faults", ["link", "sync", "exchange", "link sync exchange"])
def test_a_file_system_that_lacks_something_holds_every_kind_of_file(tmp_path, library, faults):
    done = write_all(tmp_path, library, faults)
    assert done.returncode == 0, done.stderr
    for kind in KINDS:
        assert not [f.name for f in (tmp_path / kind).rglob(".*")]
        check(kind, tmp_path / kind, VERSIONS)


@pytest.mark.parametrize("n_bytes", [100, 3_000, 20_000, 60_000, 90_000, 120_000])
def test_a_full_disk_is_an_error_and_what_was_acknowledged_stays(tmp_path, library, n_bytes):
    done = write_all(tmp_path, library, f"full {n_bytes}")
    assert done.returncode == 1 and "No space left on device" in done.stderr
    reached = dict.fromkeys(KINDS, 0)
    for line in done.stdout.splitlines():
        reached[line.split()[1]] = int(line.split()[2])
    for kind in KINDS:
        assert not [f.name for f in (tmp_path / kind).rglob(".*")]
        check(kind, tmp_path / kind, reached[kind])


def test_the_library_is_at_work(tmp_path, library):
    """Without the ways around, what lacks something holds nothing."""
    code = (
        "import sys; from meanfield.results import atomic; from tests.sweeps import written_files;"
        f"atomic._UNKNOWN = set(); sys.argv = ['', {str(tmp_path)!r}]; written_files.main()"
    )
    for faults in ("link", "sync"):
        environment = {**os.environ, "LD_PRELOAD": str(library), "FAULTS": faults}
        environment["PYTHONPATH"] = os.getcwd()
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment, capture_output=True, check=False)
        assert done.returncode == 1
