"""Killed at random moments, a sweep loses nothing it has marked and ends as if never killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import xarray as xr

from meanfield import results
from meanfield.sweeps import sweep
from tests import sweep_functions as functions

GRID = {"n": [2, 4, 8], "repetition": range(40)}
SECONDS = 0.01
SCRIPT = """
import sys
from tests import sweep_functions as f
from meanfield.sweeps import sweep

if __name__ == "__main__":
    store, seconds, executor = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]) or None
    sweep(f.SLOW_NOISE, {"n": [2, 4, 8], "repetition": range(40)}, seed=4, store=store,
          fixed={"seconds": seconds}, executor=executor, batch_size=4)
"""


@pytest.fixture(scope="module")
def uninterrupted():
    return sweep(functions.SLOW_NOISE, GRID, seed=4, fixed={"seconds": SECONDS})


@pytest.fixture
def start(tmp_path):
    """Start the sweep in a process group of its own, so that the whole tree can be killed."""
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}

    def start(store, executor=0):
        command = [sys.executable, str(script), str(store), str(SECONDS), str(executor)]
        return subprocess.Popen(command, env=environment, start_new_session=True)

    return start


def done_batches(store):
    if not (store / "done").exists():
        return set()
    return {int(f.name) for f in (store / "done" / "c").glob("[0-9]*") if f.name.isdigit()}


def wait_for_progress(process, store, n_before):
    """Until the process has finished a batch more than there were, or has ended."""
    deadline = time.monotonic() + 60
    while process.poll() is None and len(done_batches(store)) <= n_before:
        assert time.monotonic() < deadline, "no batch in a minute"
        time.sleep(0.005)


def kill_tree(process):
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def check_what_is_marked(store, uninterrupted, acknowledged):
    """The store opens, all batches that were seen done still are, and no value is wrong."""
    assert acknowledged <= done_batches(store)
    torn = results.read(store)
    finished = torn["status"].values == 1
    assert finished.sum() == 4 * len(done_batches(store))
    for name in ("mean", "profile"):
        np.testing.assert_array_equal(torn[name][finished], uninterrupted[name][finished])


def kill_again_and_again(start, store, uninterrupted, *, executor, kills, seed, whole_tree=True):
    """Kill at random moments after some progress; how many processes were killed at work."""
    rng = np.random.default_rng(seed)
    killed = 0
    for _ in range(kills):
        before = done_batches(store)
        process = start(store, executor)
        wait_for_progress(process, store, len(before))
        time.sleep(rng.uniform(0, 0.15))
        acknowledged = done_batches(store)
        killed += process.poll() is None
        if whole_tree:
            kill_tree(process)
        else:
            process.kill()
            process.wait()
        check_what_is_marked(store, uninterrupted, acknowledged)
    return killed


def check_resumed(store, uninterrupted):
    stamps = {f.name: f.stat().st_mtime_ns for f in (store / "mean" / "c").glob("[0-9]*")}
    done = {str(batch) for batch in done_batches(store)}
    ds = sweep(functions.SLOW_NOISE, GRID, seed=4, store=store, fixed={"seconds": SECONDS})
    xr.testing.assert_equal(ds, uninterrupted)
    xr.testing.assert_equal(results.read(store), uninterrupted)
    after = {f.name: f.stat().st_mtime_ns for f in (store / "mean" / "c").glob("[0-9]*")}
    assert {n: after[n] for n in done} == {n: stamps[n] for n in done}, "did finished work again"


def test_killed_twice_in_process_and_resumed_it_equals_the_uninterrupted_sweep(
    tmp_path, start, uninterrupted
):
    store = tmp_path / "s.zarr"
    killed = kill_again_and_again(start, store, uninterrupted, executor=0, kills=2, seed=0)
    assert killed >= 1
    check_resumed(store, uninterrupted)


def test_when_the_parent_is_killed_its_workers_end_and_the_store_is_whole(
    tmp_path, start, uninterrupted
):
    store = tmp_path / "s.zarr"
    process = start(store, 2)
    wait_for_progress(process, store, 0)
    acknowledged = done_batches(store)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while group_is_alive(process.pid):
        assert time.monotonic() < deadline, "workers outlived their parent"
        time.sleep(0.02)
    check_what_is_marked(store, uninterrupted, acknowledged)
    check_resumed(store, uninterrupted)


def group_is_alive(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize(("executor", "seed"), [(0, 1), (2, 2)])
def test_killed_twenty_times_nothing_is_lost(tmp_path, start, uninterrupted, executor, seed):
    total = rounds = 0
    while total < 20:
        store = tmp_path / f"{rounds}.zarr"
        total += kill_again_and_again(
            start, store, uninterrupted, executor=executor, kills=5, seed=seed + 10 * rounds
        )
        check_resumed(store, uninterrupted)
        rounds += 1
        assert rounds < 12, f"only {total} kills hit a process at work"


@pytest.mark.slow
def test_killed_while_it_makes_the_store_nothing_half_made_is_in_place(
    tmp_path, start, uninterrupted
):
    """Kills spread over the start: a store is absent or whole, and the next sweep is right."""
    rng = np.random.default_rng(3)
    store = tmp_path / "s.zarr"
    for _ in range(8):
        process = start(store)
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".s.zarr-*")) and not store.exists():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.08))
        kill_tree(process)
        if store.exists():
            check_what_is_marked(store, uninterrupted, set())
            store.rename(tmp_path / f"whole-{rng.integers(1 << 40)}")
    check_resumed_from_nothing(store, uninterrupted)


def check_resumed_from_nothing(store, uninterrupted):
    ds = sweep(functions.SLOW_NOISE, GRID, seed=4, store=store, fixed={"seconds": SECONDS})
    xr.testing.assert_equal(ds, uninterrupted)
