"""Killed at random moments, a sweep loses nothing that is finished and ends as if never killed.

MEANFIELD_KILLS sets how many kills each slow test makes, 15 by default.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from meanfield import results
from meanfield.results.stores import Store, read_description
from meanfield.sweeps import store as writing
from meanfield.sweeps import sweep
from tests import sweep_functions as functions

KILLS = int(os.environ.get("MEANFIELD_KILLS", "15"))
GRID = {"n": [2, 4, 8], "repetition": range(40)}
RUN = {"seed": 4, "fixed": {"seconds": 0.01}}
SCRIPT = """
import sys
from concurrent.futures import ProcessPoolExecutor
from tests import sweep_functions as f
from meanfield.sweeps import sweep

if __name__ == "__main__":
    store, mode = sys.argv[1:]
    run = {"seed": 4, "fixed": {"seconds": 0.01}, "store": store, "batch_size": 4}
    if mode == "extension":  # ever more cases
        for count in range(1, 41, 3):
            sweep(f.SLOW_NOISE, {"n": [2, 4, 8], "repetition": range(count)}, **run)
    elif mode == "pool":
        with ProcessPoolExecutor(2) as pool:
            sweep(f.SLOW_NOISE, {"n": [2, 4, 8], "repetition": range(40)}, executor=pool, **run)
    else:
        executor = 2 if mode == "workers" else None
        sweep(f.SLOW_NOISE, {"n": [2, 4, 8], "repetition": range(40)}, executor=executor, **run)
"""


@pytest.fixture(scope="module")
def uninterrupted():
    return sweep(functions.SLOW_NOISE, GRID, **RUN)


@pytest.fixture
def start(tmp_path):
    """Start the sweep in a process group of its own, so that the whole tree can be killed."""
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}

    def start(store, mode="here"):
        command = [sys.executable, str(script), str(store), mode]
        quiet = subprocess.DEVNULL  # what a pool says when its workers are killed
        return subprocess.Popen(command, env=environment, start_new_session=True, stderr=quiet)

    return start


def batches(store):
    return {f.name for f in store.glob("batch-*.nc")}


def wait_for_progress(process, store, n_before):
    """Until the process has finished a batch more than there were, or has ended."""
    deadline = time.monotonic() + 60
    while process.poll() is None and len(batches(store)) <= n_before:
        assert time.monotonic() < deadline, "no batch in a minute"
        time.sleep(0.005)


def kill_tree(process):
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def check_what_is_finished(store, uninterrupted, acknowledged):
    """The store opens, all batches that were seen are whole, and no value is wrong."""
    files = Store(store, read_description(store))
    assert acknowledged <= set(files.files)
    assert not files.damaged
    found = results.read(store)
    finished = found.isel(case=np.flatnonzero(found["status"] == 1))
    n_known = sum(xr.open_dataset(store / name).sizes["case"] for name in acknowledged)
    assert finished.sizes["case"] >= n_known
    if not finished.sizes["case"]:
        return
    expected = uninterrupted.set_index(case=["n", "repetition"])
    for name in ("mean", "profile"):
        rows = zip(finished["n"].values, finished["repetition"].values, strict=True)
        right = expected[name].sel(case=list(rows))
        np.testing.assert_array_equal(finished[name], right)


def kill_again_and_again(start, store, uninterrupted, *, mode, kills, seed, whole_tree=True):
    """Kill at random moments after some progress; how many processes were killed at work."""
    rng = np.random.default_rng(seed)
    killed = 0
    for _ in range(kills):
        process = start(store, mode)
        wait_for_progress(process, store, len(batches(store)))
        time.sleep(rng.uniform(0, 0.15))
        acknowledged = batches(store)
        killed += process.poll() is None
        if whole_tree:
            kill_tree(process)
        else:
            process.kill()
            process.wait()
        check_what_is_finished(store, uninterrupted, acknowledged)
    return killed


def check_resumed(store, uninterrupted, monkeypatch):
    monkeypatch.setattr(writing, "_MOST_FILES", 10**6)  # so that what is done again would be seen
    before = results.read(store)
    old = batches(store)
    ds = sweep(functions.SLOW_NOISE, GRID, **RUN, store=store)
    xr.testing.assert_equal(ds, uninterrupted)
    assert old <= batches(store)
    again = sum(xr.open_dataset(store / name).sizes["case"] for name in batches(store) - old)
    assert again == 120 - int((before["status"] == 1).sum()), "did finished work again"
    assert not list(store.glob(".*")), "litter"


def test_killed_twice_in_process_and_resumed_it_equals_the_uninterrupted_sweep(
    tmp_path, start, uninterrupted, monkeypatch
):
    store = tmp_path / "s"
    killed = kill_again_and_again(start, store, uninterrupted, mode="here", kills=2, seed=0)
    assert killed >= 1
    check_resumed(store, uninterrupted, monkeypatch)


def test_when_the_parent_is_killed_its_workers_end_and_the_store_is_whole(
    tmp_path, start, uninterrupted, monkeypatch
):
    store = tmp_path / "s"
    process = start(store, "workers")
    wait_for_progress(process, store, 0)
    acknowledged = batches(store)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while group_is_alive(process.pid):
        assert time.monotonic() < deadline, "workers outlived their parent"
        time.sleep(0.02)
    check_what_is_finished(store, uninterrupted, acknowledged)
    check_resumed(store, uninterrupted, monkeypatch)


def group_is_alive(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "seed"), [("here", 1), ("workers", 2), ("extension", 3), ("pool", 4)]
)
def test_killed_many_times_nothing_is_lost(
    tmp_path, start, uninterrupted, mode, seed, monkeypatch
):
    total = rounds = 0
    while total < KILLS:
        store = tmp_path / str(rounds)
        total += kill_again_and_again(
            start, store, uninterrupted, mode=mode, kills=5, seed=seed + 10 * rounds
        )
        check_resumed(store, uninterrupted, monkeypatch)
        rounds += 1
        assert rounds < KILLS, f"only {total} kills hit a process at work"


@pytest.mark.slow
def test_killed_while_it_makes_the_store_nothing_half_made_is_in_place(
    tmp_path, start, uninterrupted
):
    """Kills spread over the start: a description is absent or whole, and the next sweep right."""
    rng = np.random.default_rng(3)
    for number in range(KILLS):
        store = tmp_path / str(number)
        process = start(store)
        deadline = time.monotonic() + 60
        while not store.exists():
            assert time.monotonic() < deadline
            time.sleep(0.0005)
        time.sleep(rng.uniform(0, 0.02))
        kill_tree(process)
        if (store / "sweep.json").exists():
            check_what_is_finished(store, uninterrupted, set())
    ds = sweep(functions.SLOW_NOISE, GRID, **RUN, store=store)
    xr.testing.assert_equal(ds, uninterrupted)


@pytest.mark.slow
def test_workers_killed_at_random_cost_no_case(tmp_path, start, uninterrupted, monkeypatch):
    """The sweep ends by itself, in one run, however many of its workers are killed."""
    store = tmp_path / "s"
    rng = np.random.default_rng(5)
    process = start(store, "workers")
    killed = 0
    while process.poll() is None and killed < KILLS:
        wait_for_progress(process, store, len(batches(store)))
        time.sleep(rng.uniform(0, 0.1))
        pids = [pid for server in children(process.pid) for pid in children(server)]
        if pids:
            os.kill(int(rng.choice(pids)), signal.SIGKILL)
            killed += 1
    assert process.wait(timeout=120) == 0
    assert killed >= 1
    ds = results.read(store)
    # A case at which two workers were killed has failed, and says so.
    assert set(ds["status"].values) <= {1, 3}
    again = sweep(functions.SLOW_NOISE, GRID, **RUN, store=store, retry_failed=True)
    xr.testing.assert_equal(again, uninterrupted)


def children(pid):
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # it has ended
        return []
