"""Where batches run: in this process, in processes of our own, in any executor, on dask."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    wait,
)
from typing import Any

from meanfield.sweeps.batches import Batch, Queue, Unit, Work, run_batch
from meanfield.sweeps.evaluate import Failure, collect
from meanfield.sweeps.memory import keep_freed_memory
from meanfield.sweeps.workers import DiedError, Processes

__all__ = ["check_executor", "n_workers_of", "run_queue"]

_log = logging.getLogger("meanfield")
_WINDOW = 2  # jobs submitted per worker of somebody else's: enough to keep it busy
_Handle = Callable[[list[Unit], Batch], None]


def run_queue(
    work: Work,
    queue: Queue,
    handle: _Handle,
    *,
    executor: Any,
    stop: threading.Event,
    case_timeout: float | None = None,
    one_job: bool = False,
) -> None:
    """Run the queue and hand over its batches as they finish; `stop` ends it after running cases.

    An interrupt of a case is raised after what was finished before it is handed over.
    """
    n_workers = 1 if one_job else n_workers_of(executor)
    if executor is None:
        _run_here(work, queue, handle, stop)
    elif isinstance(executor, int):
        with Processes(work, n_workers, case_timeout, stop) as processes:
            _spread(work, queue, handle, stop, processes.submit, n_workers)
    else:
        run: Callable[..., Batch] = run_batch
        if _is_client(executor):
            executor, run = executor.get_executor(pure=False), _run_on_dask
        n_jobs = 1 if one_job else _WINDOW * n_workers
        submit = functools.partial(executor.submit, run, work)
        _spread(work, queue, handle, stop, submit, n_jobs, n_suspects=1)


def check_executor(executor: Any, case_timeout: float | None) -> None:
    """Refuse what is no executor, and a time limit that nobody can enforce."""
    number = isinstance(executor, int) and not isinstance(executor, bool)
    if number and executor < 1:
        raise ValueError(f"executor: expected at least 1 worker process, got {executor}")
    if not (number or executor is None or isinstance(executor, Executor) or _is_client(executor)):
        raise TypeError(
            "executor: expected None, a number of processes, a concurrent.futures.Executor or a "
            f"dask.distributed.Client, got {executor!r:.80}"
        )
    if case_timeout is not None and not (number and case_timeout > 0):
        raise ValueError(
            "case_timeout: expected a positive number of seconds and processes that can be ended, "
            f"such as executor=1; got {case_timeout} with executor={executor!r:.80}"
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


def _run_here(work: Work, queue: Queue, handle: _Handle, stop: threading.Event) -> None:
    while queue and not stop.is_set():
        units = queue.take()
        batch = run_batch(work, queue.cases_of(units), queue.seconds, lambda _: not stop.is_set())
        _finish(queue, handle, units, batch)
        if batch.interrupt is not None:
            raise batch.interrupt


def _run_on_dask(work: Work, units: list[Any], seconds: float) -> Batch:
    keep_freed_memory()
    return run_batch(work, units, seconds)


def _spread(
    work: Work,
    queue: Queue,
    handle: _Handle,
    stop: threading.Event,
    submit: Callable[..., Future[Batch]],
    n_jobs: int,
    n_suspects: int | None = None,
) -> None:
    """Run so many jobs at once; of suspects only so many, where others may die with them."""
    running: dict[Future[Batch], list[Unit]] = {}
    try:
        while running or (queue and not stop.is_set()):
            while queue and not stop.is_set():
                if len(running) >= ((n_suspects or n_jobs) if queue.only_suspects else n_jobs):
                    break
                units = queue.take()
                running[_submitted(submit, queue.cases_of(units), queue.seconds)] = units
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                units = running.pop(future)
                try:
                    _finish(queue, handle, units, _result(future))
                except DiedError as death:
                    _bury(work, queue, handle, units, death)
            for future in [f for f in running if stop.is_set() and f.cancel()]:
                queue.put_back(running.pop(future))
    finally:
        for future in running:
            future.cancel()


def _finish(queue: Queue, handle: _Handle, units: list[Unit], batch: Batch) -> None:
    queue.put_back(units[batch.n_units :])
    handle(units[: batch.n_units], batch)


def _submitted(submit: Callable[..., Future[Batch]], *arguments: Any) -> Future[Batch]:
    try:
        return submit(*arguments)
    except BrokenExecutor as error:  # by a job before, and it was noticed only here
        broken: Future[Batch] = Future()
        broken.set_exception(error)
        return broken


def _result(future: Future[Batch]) -> Batch:
    try:
        return future.result()
    except (BrokenExecutor, CancelledError) as error:
        raise RuntimeError(
            f"sweep: the executor is gone ({type(error).__name__}: {error}): a worker process, or "
            "the scheduler, died (out of memory? a crash in compiled code? a script without `if "
            "__name__ == '__main__':`?). With a store finished batches are kept: run the same "
            "sweep again to go on; executor=N runs it in processes that a case may kill"
        ) from error
    except Exception as error:
        if type(error).__name__ == "KilledWorker":  # dask's, after the deaths of several workers
            raise DiedError("its process died, and those of the attempts after it") from error
        raise


def _bury(work: Work, queue: Queue, handle: _Handle, units: list[Unit], death: DiedError) -> None:
    """A process is dead: its unit is suspect, or has failed; the others are run again."""
    guilty = units
    if death.number is not None:
        guilty = [units[death.number]]
        queue.put_back(units[: death.number] + units[death.number + 1 :])
    for unit in guilty:
        if len(unit) == 1 and (death.certain or queue.is_suspect(unit)):
            columns = collect(work.task, [Failure(death.cause)])
            handle([unit], Batch(1, columns, work.task.variables))
        else:
            queue.suspect(unit)
            _log.warning("sweep: %s at %s; tried once more", death.cause, queue.first_of(unit))
