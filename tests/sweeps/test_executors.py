"""One sweep through every executor: the same Dataset, one thread each, also if workers die.

All tests that need a fork server of this process are here, so that it is started once.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import re
import signal
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pytest
import torch
import xarray as xr

from meanfield import results
from meanfield.results import Variable
from meanfield.sweeps import Task, executors, status, sweep, workers
from meanfield.sweeps.grid import case_seed
from tests.sweeps import sweep_functions as functions

GRID = {"n": [2, 4, 8], "repetition": range(8)}


@pytest.mark.parametrize(
    ("executor", "stored"),
    [
        ("threads", True),
        ("threads", False),
        (2, False),
        pytest.param(2, True, marks=pytest.mark.slow),  # the deaths below are this and more
    ],
)
def test_every_executor_gives_the_same_dataset(tmp_path, executor, stored):
    run = {"store": tmp_path / "s.zarr" if stored else None, "batch_size": 5}
    with ThreadPoolExecutor(3) as threads:
        run["executor"] = threads if executor == "threads" else executor
        ds = sweep(functions.NOISE, GRID, seed=2, **run)
    xr.testing.assert_equal(ds, sweep(functions.NOISE, GRID, seed=2))


def test_what_a_case_draws_from_shared_generators_is_its_own_in_every_process():
    """Worker processes all begin at the same numbers: four cases in one call of each were one."""
    seeds, grid, next_ones = (torch.manual_seed, np.random.seed, random.seed), {"x": range(6)}, []
    for cases in ({}, grid):  # ours go on as if no case had drawn anything
        for seed in seeds:
            seed(5)
        alone = sweep(functions.drawn, cases) if cases else None
        next_ones.append(functions.drawn(0))
    assert next_ones[0] == next_ones[1]
    other = sweep(functions.drawn, grid, seed=1)
    with ThreadPoolExecutor(1) as threads:
        for executor in (2, threads):
            xr.testing.assert_equal(sweep(functions.drawn, grid, executor=executor), alone)
    for name in ("torch", "numpy", "python"):
        assert len(np.unique([alone[name].values, other[name].values])) == 12


@pytest.mark.slow
def test_worker_processes_have_one_thread_and_leave_ours_alone():
    before = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    ds = sweep(functions.THREADS, {"x": [0, 1]}, executor=1)
    assert ds["n_threads"].values.tolist() == [1, 1]
    assert {name: os.environ.get(name) for name in before} == before


def test_sweep_survives_the_death_of_a_worker(tmp_path, caplog):
    trap = tmp_path / "trap"
    trap.touch()
    with caplog.at_level(logging.WARNING, logger="meanfield"):
        ds = sweep(
            functions.DEADLY, {"x": range(12)}, fixed={"trap": str(trap)},
            store=tmp_path / "s.zarr", executor=2, batch_size=1,
        )  # fmt: skip
    assert not trap.exists()
    assert "its process died: signal 9 (SIGKILL) at {'x': 3}; tried once more" in caplog.text
    assert caplog.text.count("tried once more") == 1  # not what its job had not begun
    assert ds["y"].values.tolist() == [2.0 * x for x in range(12)]


def test_a_case_that_breaks_an_executor_of_the_user_is_told_the_way_out(tmp_path):
    run = {"fixed": {"how": "SIGKILL"}, "store": tmp_path / "s", "batch_size": 1}
    with (
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver")) as pool,
        pytest.raises(RuntimeError, match="finished batches are kept.*executor=N runs it in proc"),
    ):
        sweep(functions.POISON, {"x": range(12)}, **run, executor=pool)
    ds = sweep(functions.POISON, {"x": range(12)}, **run, executor=1)
    assert ds["status"].values.tolist() == [3 if x == 3 else 1 for x in range(12)]


class KilledWorker(Exception):
    """What dask says of a job at which several workers have died."""


class Mortal(ThreadPoolExecutor):
    """A job with the case x = 3 dies after a while, and nobody knows at which case."""

    def __init__(self):
        super().__init__(2)
        self.jobs, self.n_beside, self._futures = [], [], []

    def submit(self, run, work, units, seconds):
        def job():
            if 3 in cases:
                time.sleep(0.05)
                raise KilledWorker
            return run(work, units, seconds)

        cases = [case["x"] for unit in units for case in unit]
        self.jobs.append(cases)
        self.n_beside.append(sum(not future.done() for future in self._futures))
        self._futures.append(super().submit(job))
        return self._futures[-1]


def test_each_case_of_a_job_that_died_is_tried_alone_and_once():
    with Mortal() as executor:
        ds = sweep(Task(functions.square, [Variable("y", "y")]), {"x": range(24)},
                   executor=executor)  # fmt: skip
    assert ds["status"].values.tolist() == [3 if x == 3 else 1 for x in range(24)]
    assert [job for job in executor.jobs if 3 in job] == [[3, 4, 5], [3]]
    assert executor.jobs[-3:] == [[3], [4], [5]]  # they come last, and nothing can die with them
    assert executor.n_beside[-3:] == [0, 0, 0]


def test_ctrl_c_before_a_job_has_begun_is_no_complete_answer(tmp_path):
    def interrupt(x):
        time.sleep(0.3 if x else 0.1)  # the first ends first, and all are submitted by then
        if x == 0:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
        return {"y": x}

    task = Task(interrupt, [Variable("y", "y")], name="interrupt")
    with ThreadPoolExecutor(2) as threads, pytest.raises(KeyboardInterrupt) as caught:
        sweep(task, {"x": range(4)}, store=tmp_path / "s", executor=threads)
    assert re.match("[23] of 4 cases are kept", caught.value.__notes__[0])


def interrupted(x):
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.2)
    return {"y": x}


@pytest.mark.parametrize("stored", [True, False])
def test_a_first_case_that_ctrl_c_waits_for_is_kept(tmp_path, stored):
    """No variables are declared, so that the first case runs before the store is opened."""

    store = {"store": tmp_path / "s"} if stored else {}
    with ThreadPoolExecutor(2) as threads, pytest.raises(KeyboardInterrupt) as caught:
        sweep(interrupted, {"x": range(4)}, executor=threads, **store)
    if stored:
        with ThreadPoolExecutor(1) as threads, pytest.raises(KeyboardInterrupt):
            sweep(interrupted, {"x": [1]}, executor=threads, store=tmp_path / "all")
        assert caught.value.__notes__[0].startswith("1 of 4 cases are kept")
        kept = results.read_dataset(tmp_path / "s")
        assert kept["status"].values.tolist() == [1, 0, 0, 0] and float(kept["y"][0]) == 0.0


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"executor": 0}, ValueError, "at least 1 worker"),
        ({"executor": True}, TypeError, "a number of processes"),
        ({"executor": "dask"}, TypeError, "got 'dask'"),
        ({"executor": ProcessPoolExecutor}, TypeError, "got <class"),
        ({"case_timeout": 1.0}, ValueError, "such as executor=1"),
        ({"case_timeout": "5", "executor": 1}, TypeError, "case_timeout: expected a number > 0"),
    ],
)
def test_what_is_no_executor_and_a_limit_that_none_enforces_are_refused(given, error, text):
    with pytest.raises(error, match=text):
        sweep(functions.square, {"x": [1]}, **given)


class Deserted:
    """A client of dask whose workers have all died, as far as it says, but for some."""

    __module__ = "distributed.client"

    def __init__(self, **left):
        self.left = left

    def nthreads(self):
        return self.left

    def get_executor(self, pure):
        return ThreadPoolExecutor(1)


def test_a_cluster_without_workers_is_said_to_have_none(monkeypatch, caplog):
    monkeypatch.setattr(executors, "_PATIENCE", 0.05)
    task = Task(lambda x: time.sleep(0.3) or {"y": x}, [Variable("y", "y")], name="slow")
    assert sweep(task, {"x": [1]}, executor=Deserted())["y"].values.tolist() == [1.0]
    assert "has no worker left" in caplog.text
    caplog.clear()
    with ThreadPoolExecutor(1) as threads:
        for executor in (threads, Deserted(one=1)):
            sweep(task, {"x": [1]}, executor=executor)
    assert "worker" not in caplog.text


class CommClosedError(Exception):
    """What dask says when its scheduler has died."""


class Broken(ThreadPoolExecutor):
    """Its worker, or scheduler, has died between two jobs: the next is refused at once."""

    def submit(self, *arguments, **named):
        raise self.error


@pytest.mark.parametrize("error", [BrokenProcessPool("terminated abruptly"), CommClosedError()])
def test_an_executor_that_is_found_broken_when_it_gets_a_job_is_told_the_way_out(error):
    pool = Broken(1)
    pool.error = error
    with pool, pytest.raises(RuntimeError, match="the scheduler, died.*executor=N runs"):
        sweep(functions.POISON, {"x": range(4)}, fixed={"how": "SIGKILL"}, executor=pool)


OTHERS = [2.0 * x for x in range(12) if x != 3]


def check_only_case_3_failed(ds, message):
    assert ds["status"].values.tolist() == [3 if x == 3 else 1 for x in range(12)]
    assert np.delete(ds["y"].values, 3).tolist() == OTHERS
    assert np.isnan(ds["y"].values[3])
    assert ds["message"].values[3] == message
    assert set(np.delete(ds["message"].values, 3)) == {""}


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("exit", "SystemExit: 5"),
        ("unspeakable", "Unspeakable: its text raises an error itself"),
        ("escape", r"ValueError: \x1b[2Jforged\nline \ud800"),
    ],
)
def test_a_case_that_raises_anything_is_recorded_and_stored(tmp_path, how, message):
    ds = sweep(functions.POISON, {"x": range(12)}, fixed={"how": how}, store=tmp_path / "s")
    check_only_case_3_failed(ds, message)
    check_only_case_3_failed(results.read_dataset(tmp_path / "s"), message)
    assert "\x1b" not in str(status(tmp_path / "s"))


@pytest.mark.parametrize(
    ("task", "how", "n_workers", "message"),
    [
        (functions.POISON, "SIGKILL", 2, "its process died: signal 9 (SIGKILL)"),
        (functions.POISON, "SIGSEGV", 1, "its process died: signal 11 (SIGSEGV)"),
        (functions.POISON, "os._exit", 2, "its process ended: exit code 7"),
        (functions.POISON_BATCHED, "SIGKILL", 1, "its process died: signal 9 (SIGKILL)"),
    ],
)
def test_a_case_that_kills_its_process_fails_alone(tmp_path, task, how, n_workers, message):
    run = {"fixed": {"how": how}, "store": tmp_path / "s", "executor": n_workers}
    check_only_case_3_failed(sweep(task, {"x": range(12)}, **run), message)
    check_only_case_3_failed(sweep(task, {"x": range(12)}, **run), message)  # it is not run again


def test_the_first_case_of_a_plain_function_may_kill_its_process_too(tmp_path):
    run = {"fixed": {"how": "SIGKILL", "at": 0}, "store": tmp_path / "s", "executor": 1}
    ds = sweep(functions.poison, {"x": range(5)}, **run)
    assert ds["status"].values.tolist() == [3, 1, 1, 1, 1]
    assert ds["y"].values[1:].tolist() == [2.0, 4.0, 6.0, 8.0]


def test_a_case_that_takes_too_long_fails_and_the_others_go_on(caplog):
    run = {"fixed": {"how": "sleep"}, "executor": 2, "case_timeout": 1.0}
    start = time.monotonic()
    ds = sweep(functions.POISON, {"x": range(12)}, **run)
    assert time.monotonic() - start < 60
    check_only_case_3_failed(ds, "it took longer than 1 s")
    assert "tried once more" not in caplog.text  # it would take too long again


# distributed's own deprecations and unclosed sockets are not ours to answer for.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_sweep_on_a_cluster_of_dask_is_that_in_process_and_a_case_that_kills_fails_alone(
    tmp_path, request
):
    distributed = pytest.importorskip("distributed")
    with distributed.Client(request.getfixturevalue("cluster")) as client:
        right = sweep(functions.NOISE, GRID, seed=2)
        for store in (tmp_path / "s.zarr", None):
            run = {"store": store, "executor": client, "batch_size": 7}
            xr.testing.assert_equal(sweep(functions.NOISE, GRID, seed=2, **run), right)
        run = {"fixed": {"how": "SIGKILL"}, "store": tmp_path / "s", "executor": client}
        ds = sweep(functions.POISON, {"x": range(12)}, **run)
        assert ds["status"].values.tolist() == [3 if x == 3 else 1 for x in range(12)]


def test_a_cuda_that_has_started_is_seeded_by_each_case_and_then_goes_on(monkeypatch):
    seeds, states = [], []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: ["as it was"])
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", states.append)
    grid = {"x": [1, 2]}
    sweep(lambda x: {"y": float(x)}, grid, progress=False)
    assert seeds == [case_seed({"x": x}) for x in (1, 2)]
    assert states and all(state == ["as it was"] for state in states)


def test_a_function_that_other_processes_cannot_import_is_refused():
    with ProcessPoolExecutor(1) as pool:
        for executor in (1, pool):
            with pytest.raises(TypeError, match="worker processes can import.*got .*lambda"):
                sweep(lambda x: {"y": x}, {"x": [1]}, executor=executor, progress=False)


class Abandoned(BaseException):
    """As `asyncio.CancelledError` or `pytest.fail` are."""


def abandon(x):
    if x == 4:
        raise Abandoned("at four")
    return {"y": float(x)}


def test_what_ends_a_sweep_in_process_drops_nothing_that_is_done(tmp_path):
    task = Task(abandon, [Variable("y", "y")])
    with pytest.raises(Abandoned):
        sweep(task, {"x": range(8)}, store=tmp_path / "s")
    assert status(tmp_path / "s").n_ok == 4
    ds = sweep(task, {"x": range(8)}, store=tmp_path / "s", executor=1)
    assert ds["status"].values.tolist() == [1, 1, 1, 1, 3, 1, 1, 1]
    assert str(ds["message"].values[4]) == "Abandoned: at four"


def test_a_worker_that_cannot_be_started_is_tried_again(monkeypatch):
    left, begin = iter(range(2)), workers._Worker.__init__

    def fail_twice(self, *given):
        if next(left, None) is not None:
            raise EOFError("unexpected EOF")
        begin(self, *given)

    monkeypatch.setattr(workers._Worker, "__init__", fail_twice)
    ds = sweep(Task(abandon, [Variable("y", "y")]), {"x": [1, 2]}, executor=1)
    assert ds["status"].values.tolist() == [1, 1]
    monkeypatch.setattr(workers._Worker, "__init__", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sweep(Task(abandon, [Variable("y", "y")]), {"x": [1, 2]}, executor=1)
