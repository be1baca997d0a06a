"""Where batches run: in this process, in worker processes, in any executor, on a dask cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meanfield.sweeps.grid import Case
from meanfield.sweeps.memory import keep_freed_memory
from meanfield.sweeps.store import write_batch
from meanfield.sweeps.task import Task, compute

__all__ = ["Job", "Report", "check_executor", "n_workers_of", "run_batch", "run_jobs"]

_log = logging.getLogger("meanfield")
_REBUILDS = 2  # of the pool, without a single batch finished in between
_WINDOW = 4  # batches submitted per worker: enough to keep it busy, little to hold in memory
_ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
)


@dataclass(frozen=True)
class Job:
    """A batch to do and where to put it: everything a worker needs."""

    task: Task
    cases: Sequence[Case]
    fixed: dict[str, Any]
    seed: int
    batch: int
    batch_size: int
    store: Path | None = None


@dataclass(frozen=True)
class Report:
    """What comes back of a batch: its status, and the values if they were not stored."""

    job: Job
    status: np.ndarray
    values: dict[str, np.ndarray] | None


def run_batch(job: Job) -> tuple[np.ndarray, dict[str, np.ndarray] | None]:
    """Compute a batch and store it; the same function in every executor."""
    values = compute(job.task, job.cases, job.fixed, job.seed)
    if job.store is None:
        return values["status"], values
    write_batch(job.store, job.batch, job.batch_size, values)
    return values["status"], None


def _run_batch_on_cluster(job: Job) -> tuple[np.ndarray, dict[str, np.ndarray] | None]:
    keep_freed_memory()
    return run_batch(job)


def run_jobs(jobs: Sequence[Job], executor: Any, handle: Callable[[Report], None]) -> None:
    """Run the jobs and hand their reports over in the order in which they finish.

    Raises:
        RuntimeError: workers keep dying; what is finished is kept.
    """
    if executor is None:
        for job in jobs:
            handle(Report(job, *run_batch(job)))
    elif isinstance(executor, int):
        _run_in_pool(jobs, executor, handle)
    elif isinstance(executor, Executor):
        with _resumable():
            _drain(executor, dict(enumerate(jobs)), _WINDOW * n_workers_of(executor), handle)
    else:  # a dask client; three more tries, because a batch on a dying worker is not to blame
        futures = executor.get_executor(pure=False, retries=3)
        with _resumable():
            window = _WINDOW * n_workers_of(executor)
            _drain(futures, dict(enumerate(jobs)), window, handle, _run_batch_on_cluster)


def check_executor(executor: Any) -> None:
    """Refuse what is no executor.

    Raises:
        TypeError: not None, an int, a `concurrent.futures.Executor` or a dask client.
        ValueError: fewer than one worker.
    """
    if isinstance(executor, int) and not isinstance(executor, bool):
        if executor < 1:
            raise ValueError(f"executor: expected at least 1 worker process, got {executor}")
    elif isinstance(executor, bool) or not (
        executor is None or isinstance(executor, Executor) or _is_client(executor)
    ):
        raise TypeError(
            "executor: expected None, a number of processes, a concurrent.futures.Executor or a "
            f"dask.distributed.Client, got {executor!r:.80}"
        )


def n_workers_of(executor: Any) -> int:
    """How many batches it runs at once."""
    if executor is None or isinstance(executor, int):
        return executor or 1
    if _is_client(executor):
        return max(1, sum(executor.nthreads().values()))
    return int(getattr(executor, "_max_workers", None) or os.cpu_count() or 1)


def _is_client(executor: Any) -> bool:
    # By name, so that dask need not be installed to ask.
    return type(executor).__module__.split(".")[0] == "distributed" and hasattr(
        executor, "get_executor"
    )


def _run_in_pool(jobs: Sequence[Job], n_workers: int, handle: Callable[[Report], None]) -> None:
    """Worker processes, started afresh when one dies."""
    _check_importable(jobs)
    left = dict(enumerate(jobs))
    fruitless = 0
    while left:
        before = len(left)
        try:
            with _pool(min(n_workers, before)) as pool:
                _drain(pool, left, _WINDOW * n_workers, handle)
        except BrokenExecutor as error:
            fruitless = fruitless + 1 if len(left) == before else 0
            if fruitless > _REBUILDS:
                raise RuntimeError(_died(f"{fruitless} times before any batch ended")) from error
            _log.warning("sweep: a worker process died; %d batches go on in new ones", len(left))


def _drain(
    executor: Any,
    left: dict[int, Job],
    window: int,
    handle: Callable[[Report], None],
    run: Callable[[Job], Any] = run_batch,
) -> None:
    """Run the jobs that are left, a window of them at a time; remove each when it is done."""
    waiting = list(reversed(left))
    running: dict[Future[Any], int] = {}
    try:
        while waiting or running:
            while waiting and len(running) < window:
                number = waiting.pop()
                running[executor.submit(run, left[number])] = number
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                number = running.pop(future)
                report = Report(left[number], *future.result())
                del left[number]
                handle(report)
    finally:
        for future in running:
            future.cancel()


@contextlib.contextmanager
def _pool(n_workers: int) -> Iterator[Executor]:
    """Spawned processes with one thread each; fork and the threads of torch can hang."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(n_workers, mp_context=context, initializer=_prepare_worker)
    with _environment(_ONE_THREAD):  # must stand before a worker loads its libraries
        pool.submit(os.getpid)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def _prepare_worker() -> None:
    """One thread, and an end when the parent ends: an orphan would wait for work for ever."""
    from multiprocessing import connection, parent_process

    # Ctrl-C reaches the whole process group: the parent decides, the batch under way is finished.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep_freed_memory()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    parent = parent_process()
    if parent is None:
        return

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _check_importable(jobs: Sequence[Job]) -> None:
    try:
        pickle.dumps(jobs[:1])
    except Exception as error:
        raise TypeError(
            f"fn: expected a function that worker processes can import, defined at the top of a "
            f"module, and settings that can be pickled; got {jobs[0].task.label} ({error})"
        ) from error


@contextlib.contextmanager
def _resumable() -> Iterator[None]:
    """Deaths of workers in words; other errors pass."""
    try:
        yield
    except Exception as error:
        if isinstance(error, BrokenExecutor) or type(error).__name__ == "KilledWorker":
            raise RuntimeError(_died("and its batch with it")) from error
        raise


def _died(how: str) -> str:
    return (
        f"sweep: a worker process died {how} (out of memory? a crash in compiled code? a script "
        "without `if __name__ == '__main__':` around its sweep?). With a store finished batches "
        "are kept: run the same sweep again to go on"
    )


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
