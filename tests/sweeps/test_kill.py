"""A sweep killed at random moments loses no finished case, and ends with the same Dataset.

MEANFIELD_KILLS sets how many kills the slow campaign makes in all, 200 by default.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from meanfield import results
from meanfield.results import store as storing
from meanfield.results.store import Store
from meanfield.sweeps import sweep
from tests.sweeps import sweep_functions as functions
from tests.sweeps.crash_worker import REPETITIONS, SEED, N, run, settings

KILLS = int(os.environ.get("MEANFIELD_KILLS", "200"))
GRID = {"n": N, "repetition": range(REPETITIONS)}
# Which part of the kills each mode has; those that start processes of their own cost more.
SHARES = {
    "here": 0.30, "extension": 0.20, "retry": 0.12, "making": 0.10, "end": 0.10, "workers": 0.06,
    "pool": 0.05, "dask-client": 0.04, "worker": 0.015, "dask-worker": 0.01,
    "dask-scheduler": 0.005,
}  # fmt: skip
dask = pytest.mark.filterwarnings("ignore")  # distributed's own are not ours to answer for


def kills_of(mode):
    return max(1, round(SHARES[mode] * KILLS))


def rng_of(mode):
    return np.random.default_rng([*SHARES].index(mode))


@functools.cache
def uninterrupted():
    return sweep(functions.NOISE, GRID, seed=SEED, progress=False)


@functools.cache
def right():
    """(mean, profile) by case, of a sweep that nobody has killed."""
    return cases_of(uninterrupted())


def cases_of(ds):
    columns = (ds[name].values.tolist() for name in ("n", "repetition", "mean", "profile"))
    return {(n, i): (mean, tuple(profile)) for n, i, mean, profile in zip(*columns, strict=True)}


def batches(store):
    return {f.name for f in store.glob("batch-*.npz")}


def wait_for_progress(child, store):
    """Until another batch is finished, or the sweep has ended."""
    before, deadline = batches(store), time.monotonic() + 60
    while child.alive() and batches(store) <= before:
        assert time.monotonic() < deadline, "no batch in a minute"
        time.sleep(0.002)


class Known:
    """What was seen of a store: it may only grow."""

    def __init__(self):
        self.finished, self.n_reported = set(), 0

    def check(self, store, mode):
        """The store opens, nothing is damaged, wrong, or gone that was seen or reported."""
        reported = Path(f"{store}.reported")
        n_new = sum(map(int, reported.read_text().split())) if reported.exists() else 0
        reported.unlink(missing_ok=True)
        if not (store / "sweep.json").exists():
            assert not self.finished and n_new == 0
            return
        assert not Store.at(store).damaged
        found = results.read_dataset(store)
        done = np.flatnonzero(found["status"] == 1)
        finished = cases_of(found.isel(case=done)) if done.size else {}
        assert finished.items() <= right().items(), "wrong"
        finished = finished.keys()
        assert self.finished <= finished, "lost what was finished"
        assert len(finished) >= len(self.finished) + n_new, "reported before it was safe"
        if mode != "retry":
            assert set(found["status"].values.tolist()) <= {0, 1}
        self.finished = finished


def prepare(mode, store):
    """The state in which the sweeps of a mode begin."""
    if mode == "retry":  # a third has failed
        with contextlib.suppress(FileNotFoundError):
            Path(f"{store}.cure").unlink()
        sweep(grid=GRID, **(settings(mode, store)), store=store, progress=False)
        Path(f"{store}.cure").touch()
    if mode == "end":
        sweep(grid=GRID, **(settings(mode, store)), store=store, batch_size=8, progress=False)
        with pytest.MonkeyPatch.context() as patch:  # `run` sets it, for a process of its own
            patch.setattr(storing, "_MOST_FILES", 1)
            run("end", store)


def wait_for_the_moment(child, store, mode, rng):
    """The moment of the kill: soon after a batch, or any time at all."""
    if mode == "making":
        deadline = time.monotonic() + 60
        while not store.exists():
            assert time.monotonic() < deadline
        time.sleep(rng.uniform(0, 0.02))
    elif mode == "end" or (mode in ("here", "extension", "retry") and rng.random() < 0.3):
        time.sleep(rng.uniform(0, 0.3))
    else:
        wait_for_progress(child, store)
        time.sleep(rng.uniform(0, 0.08))


def check_exports(store):
    """A file is the old or the new one; a folder may be gone for the instant of its exchange."""
    expected = results.read_dataset(store).drop_attrs(deep=False)
    for path in (store.with_suffix(".nc"), store.with_suffix(".zarr")):
        if path.suffix == ".nc" or path.exists():
            xr.testing.assert_identical(
                results.read_dataset(path).drop_attrs(deep=False), expected
            )


def check_resumed(start, store, mode, address=""):
    """Without a kill the sweep ends well, is complete and right, and leaves no litter."""
    assert start(mode, store, address).wait() == 0
    known = Known()
    known.check(store, "here")
    assert known.finished == right().keys()
    assert not list(store.glob(".*")), "litter"


def kill_again_and_again(start, folder, mode, kills, rng, address=""):
    """Kills of processes that were at work, on as many stores as they need."""
    n_killed, n_stores = 0, 0
    while n_killed < kills:
        store, known = folder / f"{mode}-{n_stores}", Known()
        prepare(mode, store)
        known.check(store, mode)
        n_stores += 1
        while n_killed < kills:
            child = start(mode, store, address)
            wait_for_the_moment(child, store, mode, rng)
            killed = child.alive()
            child.kill()
            n_killed += killed
            known.check(store, mode)
            if mode == "end":
                check_exports(store)
            if mode == "making" or (mode != "end" and known.finished == right().keys()):
                break
        assert n_stores <= kills + 5, f"only {n_killed} kills hit a process at work"
        if mode != "making" or n_killed == kills:
            check_resumed(start, store, mode, address)
        shutil.rmtree(store)


def test_killed_in_process_it_loses_nothing_and_does_nothing_twice(tmp_path, start, monkeypatch):
    store, known, rng = tmp_path / "s", Known(), np.random.default_rng(0)
    for _ in range(5):
        child = start("here", store)
        wait_for_the_moment(child, store, "here", rng)
        child.kill()
        known.check(store, "here")
    monkeypatch.setattr(storing, "_MOST_FILES", 10**6)  # so that what is done again would be seen
    old = batches(store)
    ds = sweep(grid=GRID, **settings("here", store), store=store, progress=False)
    xr.testing.assert_equal(ds, uninterrupted())
    assert old <= batches(store)
    new = (np.load(store / name) for name in batches(store) - old)
    again = sum(len(arrays["numbers case_key"]) for arrays in new)
    assert again == len(right()) - len(known.finished), "did finished work again"
    assert not list(store.glob(".*")), "litter"


def test_when_the_parent_is_killed_its_workers_end_and_the_store_is_whole(tmp_path, start):
    store, known = tmp_path / "s", Known()
    child = start("workers", store)
    wait_for_progress(child, store)
    child.kill(whole_tree=False)
    deadline = time.monotonic() + 10
    while group_is_alive(child.pid):
        assert time.monotonic() < deadline, "workers outlived their parent"
        time.sleep(0.02)
    known.check(store, "workers")
    check_resumed(start, store, "here")


def group_is_alive(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
@dask
@pytest.mark.parametrize(
    "mode", ["here", "extension", "retry", "making", "end", "workers", "pool", "dask-client"]
)
def test_killed_many_times_nothing_is_lost(tmp_path, start, mode, request):
    address = ""
    if mode == "dask-client":
        address = request.getfixturevalue("cluster").scheduler_address
    kill_again_and_again(start, tmp_path, mode, kills_of(mode), rng_of(mode), address)


@pytest.mark.slow
@dask
@pytest.mark.parametrize("mode", ["worker", "dask-worker"])
def test_workers_killed_at_random_cost_no_case(tmp_path, start, mode, request):
    """The sweep ends by itself, in one run, however many of its workers are killed."""
    cluster = request.getfixturevalue("cluster") if mode == "dask-worker" else None
    rng, killed, n_stores = rng_of(mode), 0, 0
    while killed < kills_of(mode):
        store, n_here = tmp_path / f"{n_stores}", 0
        n_stores += 1
        child = start(mode, store, cluster.scheduler_address if cluster else "")
        while child.alive() and n_here < (3 if cluster else kills_of(mode)):
            wait_for_progress(child, store)
            time.sleep(rng.uniform(0, 0.1))
            pids = workers_of_dask(cluster) if cluster else workers_of(child)
            if pids and child.alive():
                os.kill(int(rng.choice(pids)), signal.SIGKILL)
                n_here += 1
        killed += n_here
        assert child.wait() == 0
        # A case at which two workers of ours were killed has failed, and says so; dask gives a
        # task up after three deaths.
        assert {*results.read_dataset(store)["status"].values.tolist()} <= (
            {1} if cluster else {1, 3}
        )
        again = sweep(grid=GRID, **settings(mode, store), store=store, retry_failed=True)
        xr.testing.assert_equal(again, uninterrupted())


def workers_of(child):
    return [pid for server in children(child.pid) for pid in children(server)]


def workers_of_dask(cluster):
    """All of them, if all are there: one that is killed while it starts is given up."""
    nannies = [n for n in cluster.workers.values() if n.process]
    started = [n.pid for n in nannies if n.process.status.name == "running"]
    return started if len(cluster.scheduler.workers) == 2 else []


def children(pid):
    """Of all its threads: each of ours waits for a process that it has started."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended
            found += map(int, file.read_text().split())
    return found


@pytest.mark.slow
@dask
def test_killed_schedulers_of_dask_lose_nothing(tmp_path, start):
    pytest.importorskip("distributed")
    rng, store, known = rng_of("dask-scheduler"), tmp_path / "s", Known()
    for _ in range(kills_of("dask-scheduler")):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        programs = [
            ("scheduler", ["--port", str(port), "--host", "127.0.0.1"]),
            ("worker", [f"127.0.0.1:{port}", "--nthreads", "1", "--death-timeout", "20"]),
        ]
        scheduler, worker = (
            subprocess.Popen(
                [sys.executable, "-m", f"distributed.cli.dask_{name}", "--no-dashboard", *more],
                stderr=subprocess.DEVNULL,
            )
            for name, more in programs
        )
        try:
            child = start("dask-scheduler", store, f"127.0.0.1:{port}")
            wait_for_progress(child, store)
            time.sleep(rng.uniform(0, 0.2))
            assert child.alive()
            scheduler.kill()
            assert child.wait() == 1  # an error, and no hanging
        finally:
            for process in (worker, scheduler):
                process.kill()
                process.wait()
        known.check(store, "dask-scheduler")
    assert start("here", tmp_path / "other").wait() == 0
    sweep(grid=GRID, **settings("dask-scheduler", store), store=store, progress=False)
    known.check(store, "here")
    assert known.finished == right().keys()
