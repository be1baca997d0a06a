"""Where batches run: in this process, in worker processes, in any executor, on dask."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    as_completed,
    wait,
)
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from meanfield.checks import number
from meanfield.sweeps.batches import Batch, failed_batch, run_batch
from meanfield.sweeps.grid import Case
from meanfield.sweeps.plan import Unit, Work
from meanfield.sweeps.workers import DiedError, Processes, check_sent

_log = logging.getLogger("meanfield")
_PATIENCE = 60.0  # seconds without an end of a job, after which a cluster is asked for workers
_WINDOW = 2  # jobs submitted per worker of a foreign executor: enough to keep it busy
_JOBS_PER_WORKER = 4  # of the units left: the last jobs are small, so that workers end together
# A batch ends after a quarter of the time that the sweep has run, so that an early kill loses
# little, and after 20 seconds at the latest; a file takes some 8 ms, of the first 0.4 %.
_FIRST, _SHARE, _LONGEST = 2.0, 0.25, 20.0
_Handle = Callable[[list[int], Batch], None]


class Run:
    """How cases are run. The first Ctrl-C ends it after the cases under way, the second at once.

    In this process the case under way ends with it.
    """

    def __init__(self, cases: Sequence[Case], executor: Any, case_timeout: float | None) -> None:
        self._cases, self._executor, self._case_timeout = cases, executor, case_timeout
        self._stop, self._start = threading.Event(), time.monotonic()

    def __call__(self, work: Work, units: Sequence[Unit], handle: _Handle) -> None:
        """Run units and hand over the places of their cases and the batches as they finish.

        A job that killed its worker is retried at the end, case by case and with nothing beside
        it. An interrupt is raised after the finished units are handed over.
        """
        ours = self._executor is None or isinstance(self._executor, int)
        opened, n_workers = self._opened(work, max(1, len(units)))
        n_jobs = n_workers if ours else _WINDOW * n_workers
        n_shares = _JOBS_PER_WORKER * n_workers if self._executor else 1
        with self._watched(), opened as executor, _explained():
            jobs = _Jobs(work, self._cases, handle, deque(units), n_shares)
            self._spread(jobs, executor, n_jobs)
            again, n_again = deque(jobs.suspects), len(jobs.suspects)
            alone = _Jobs(work, self._cases, handle, again, n_again, last_chance=True)
            self._spread(alone, executor, 1)

    def _spread(self, jobs: _Jobs, executor: Any, n_jobs: int) -> None:
        """Run `n_jobs` jobs at once until no unit is left."""
        try:
            while jobs.units or jobs.running:
                if self._stop.is_set():
                    raise KeyboardInterrupt
                while jobs.units and len(jobs.running) < n_jobs:
                    seconds = _SHARE * (time.monotonic() - self._start)
                    jobs.submit(executor, min(_LONGEST, max(_FIRST, seconds)))
                ended = wait(jobs.running, _PATIENCE, FIRST_COMPLETED).done
                for future in ended:
                    jobs.finish(future)
                if not ended and _is_client(self._executor) and not self._executor.nthreads():
                    # Of an adaptive cluster they may come; those whose nannies gave up do not.
                    _log.warning("sweep: waits for dask, which has no worker left; Ctrl-C ends it")
        except KeyboardInterrupt:
            self._stop.set()
            if jobs.running:
                _log.warning("sweep: ends after the running cases; once more ends it at once")
            for future in as_completed([f for f in jobs.running if not f.cancel()]):
                jobs.finish(future)
            raise
        finally:
            for future in jobs.running:
                future.cancel()

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Note a Ctrl-C beside raising it: what is raised in a destructor is dropped."""
        default = signal.default_int_handler
        main = threading.current_thread() is threading.main_thread()
        if not main or signal.getsignal(signal.SIGINT) is not default:
            yield
            return

        def note(number: int, frame: FrameType | None) -> None:
            self._stop.set()
            default(number, frame)

        signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, default)

    def _opened(self, work: Work, n_units: int) -> tuple[AbstractContextManager[Any], int]:
        """The executor, and how many batches it runs at once; ours ends with the context."""
        given = self._executor
        if given is None:
            return _Here(self._stop), 1
        if isinstance(given, int):
            n_workers = min(given, n_units)
            return Processes(work, n_workers, self._case_timeout, self._stop), n_workers
        if isinstance(given, ProcessPoolExecutor):
            check_sent(work)
        n_workers = getattr(given, "_max_workers", None) or os.cpu_count() or 1
        if _is_client(given):
            n_workers = max(1, sum(given.nthreads().values()))
            given = given.get_executor(pure=False)
        return contextlib.nullcontext(given), min(n_workers, n_units)


@dataclass
class _Jobs:
    """Units that are left, those under way, and those that are to be tried once more."""

    work: Work
    cases: Sequence[Case]
    handle: _Handle
    units: deque[Unit]
    n_shares: int  # a job has one of them, of the units that are left
    last_chance: bool = False
    running: dict[Future[Batch], list[Unit]] = field(default_factory=dict)
    suspects: list[Unit] = field(default_factory=list)

    def submit(self, executor: Any, seconds: float) -> None:
        """Give the next job to the executor."""
        job = [self.units.popleft() for _ in range(-(-len(self.units) // self.n_shares))]
        cases = [[self.cases[place] for place in unit] for unit in job]
        self.running[executor.submit(run_batch, self.work, cases, seconds)] = job

    def finish(self, future: Future[Batch]) -> None:
        """Hand over what a job has done, and put back what it has not."""
        job, ended = self.running[future], _result(future)
        if isinstance(ended, DiedError):
            self._sort_out(job, ended)
        else:
            self.units.extendleft(reversed(job[ended.n_units :]))
            self.handle([place for unit in job[: ended.n_units] for place in unit], ended)
        del self.running[future]  # now: what is interrupted before is handed over once more
        if isinstance(ended, Batch) and ended.interrupt is not None:
            raise ended.interrupt

    def _sort_out(self, job: list[Unit], death: DiedError) -> None:
        """Of a job that has killed its process: what may have done it, and what goes on."""
        suspects = job if death.number is None else [job[death.number]]
        self.units.extendleft(unit for unit in reversed(job) if unit not in suspects)
        for unit in suspects:
            if len(unit) == 1 and (self.last_chance or death.certain):
                self.handle(unit, failed_batch(self.work.task, death.cause))
            else:
                self.suspects += [[place] for place in unit]
                case = self.cases[unit[0]]
                _log.warning("sweep: %s at %s; tried once more", death.cause, case)


class _Here(Executor):
    """This process: what is submitted is done, until `stop` is set."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop

    def submit(self, function: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*given, begin=lambda _: not self._stop.is_set(), **named))
        return future


def check_executor(executor: Any, case_timeout: float | None) -> None:
    """Refuse what is no executor, and a time limit that cannot be enforced."""
    processes = isinstance(executor, int) and not isinstance(executor, bool)
    if processes and executor < 1:
        raise ValueError(f"executor: expected at least 1 worker process, got {executor}")
    if not (
        processes or executor is None or isinstance(executor, Executor) or _is_client(executor)
    ):
        raise TypeError(
            "executor: expected None, a number of processes, a concurrent.futures.Executor or a "
            f"dask.distributed.Client, got {executor!r:.80}"
        )
    if case_timeout is not None:
        number(case_timeout, "case_timeout", above=0, finite=False)
    if case_timeout is not None and not processes:
        raise ValueError(
            "case_timeout: expected processes that can be ended, "
            f"such as executor=1, got {case_timeout} with executor={executor!r:.80}"
        )


def _is_client(executor: Any) -> bool:
    # By name, so that dask need not be installed to ask.
    return type(executor).__module__.split(".")[0] == "distributed" and hasattr(
        executor, "get_executor"
    )


def _result(future: Future[Batch]) -> Batch | DiedError:
    try:
        return future.result()
    except DiedError as death:
        return death
    except Exception as error:
        if type(error).__name__ == "KilledWorker":  # of dask, after several workers died
            return DiedError("its process died, and those of the attempts after it")
        raise


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        of_dask = type(error).__name__ == "CommClosedError"  # its scheduler died
        if not (of_dask or isinstance(error, (BrokenExecutor, CancelledError))):
            raise
        raise RuntimeError(
            f"sweep: the executor is gone ({type(error).__name__}: {error}): a worker process, or "
            "the scheduler, died (out of memory? a crash in compiled code? a script without `if "
            "__name__ == '__main__':`?). With a store finished batches are kept: run the same "
            "sweep again to go on; executor=N runs it in processes that a case may kill"
        ) from error
