"""Where batches run: in this process, in worker processes, in any executor, on dask."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    wait,
)
from typing import Any

from meanfield.sweeps.batches import Batch, failed_batch, run_batch
from meanfield.sweeps.grid import Case
from meanfield.sweeps.plan import Unit, Work
from meanfield.sweeps.workers import DiedError, Processes

_log = logging.getLogger("meanfield")
_WINDOW = 2  # jobs submitted per worker of a foreign executor: enough to keep it busy
_JOBS_PER_WORKER = 4  # of the units left: the last jobs are small, so that workers end together
# A batch ends after a quarter of the time that the sweep has run, so that an early kill loses
# little, and after 20 seconds at the latest; a file takes some 8 ms, of the first 0.4 %.
_FIRST, _SHARE, _LONGEST = 2.0, 0.25, 20.0
_Submit = Callable[[list[list[Case]], float], "Future[Batch]"]
_Handle = Callable[[list[int], Batch], None]


class _Queue:
    """The units that are left, handed out in jobs of a fixed share of them."""

    def __init__(self, units: Iterable[Unit], n_shares: int) -> None:
        self._units, self._n_shares = deque(units), n_shares
        self._start = time.monotonic()

    def __len__(self) -> int:
        return len(self._units)

    @property
    def seconds(self) -> float:
        """How long a batch that begins now may last."""
        return min(_LONGEST, max(_FIRST, _SHARE * (time.monotonic() - self._start)))

    def take(self) -> list[Unit]:
        """The next job."""
        return [self._units.popleft() for _ in range(-(-len(self) // self._n_shares))]

    def put_back(self, units: Sequence[Unit]) -> None:
        """Put back units of a job that were not run, first in line."""
        self._units.extendleft(reversed(units))


class Run:
    """How cases are run. The first Ctrl-C ends it after the cases under way, the second at once.

    In this process the case under way ends with it.
    """

    def __init__(self, cases: Sequence[Case], executor: Any, case_timeout: float | None) -> None:
        self._cases, self._executor, self._case_timeout = cases, executor, case_timeout
        self._stop = threading.Event()

    def __call__(self, work: Work, units: Sequence[Unit], handle: _Handle) -> None:
        """Run units and hand over the places of their cases and the batches as they finish.

        A job that killed its worker is retried at the end, case by case; where it is not known
        which case did it, with nothing beside it. An interrupt is raised after the finished units
        are handed over.
        """
        ours = self._executor is None or isinstance(self._executor, int)
        n_workers = min(_n_workers(self._executor), max(1, len(units)))
        n_jobs, n_alone = (n_workers, n_workers) if ours else (_WINDOW * n_workers, 1)
        n_shares = _JOBS_PER_WORKER * n_workers if self._executor else 1
        with self._submitting(work, n_workers) as submit, _explained():
            suspects = self._spread(work, _Queue(units, n_shares), handle, submit, n_jobs)
            alone = _Queue(suspects, len(suspects))
            self._spread(work, alone, handle, submit, n_alone, last_chance=True)

    def _spread(
        self,
        work: Work,
        queue: _Queue,
        handle: _Handle,
        submit: _Submit,
        n_jobs: int,
        last_chance: bool = False,
    ) -> list[Unit]:
        """Run `n_jobs` jobs at once until no unit is left; returns the units to be retried."""
        suspects: list[Unit] = []
        with contextlib.closing(self._finished(queue, submit, n_jobs)) as finished:
            for units, ended in finished:
                if isinstance(ended, Batch):
                    queue.put_back(units[ended.n_units :])
                    handle([p for unit in units[: ended.n_units] for p in unit], ended)
                    if ended.interrupt is not None:
                        raise ended.interrupt
                    continue
                suspected, others = ended.divided(units)
                queue.put_back(others)
                for unit in suspected:
                    if len(unit) == 1 and (last_chance or ended.certain):
                        handle(unit, failed_batch(work.task, ended.cause))
                    else:
                        suspects += [[place] for place in unit]
                        case = self._cases[unit[0]]
                        _log.warning("sweep: %s at %s; tried once more", ended.cause, case)
        return suspects

    def _finished(
        self, queue: _Queue, submit: _Submit, n_jobs: int
    ) -> Generator[tuple[list[Unit], Batch | DiedError], None, None]:
        """Jobs as they finish; after an interrupt those under way, then it is raised."""
        running: dict[Future[Batch], list[Unit]] = {}
        interrupt: KeyboardInterrupt | None = None
        try:
            while running or (queue and interrupt is None):
                try:
                    while queue and len(running) < n_jobs and interrupt is None:
                        units = queue.take()
                        cases = [[self._cases[place] for place in unit] for unit in units]
                        running[submit(cases, queue.seconds)] = units
                    done = wait(running, return_when=FIRST_COMPLETED).done
                except KeyboardInterrupt as signalled:
                    if interrupt is not None:
                        raise
                    interrupt = signalled
                    self._stop.set()
                    _log.warning("sweep: ends after the running cases; once more ends it at once")
                    running = {f: units for f, units in running.items() if not f.cancel()}
                    continue
                for future in done:
                    yield running.pop(future), _result(future)
        finally:
            for future in running:
                future.cancel()
        if interrupt is not None:
            raise interrupt

    @contextlib.contextmanager
    def _submitting(self, work: Work, n_workers: int) -> Iterator[_Submit]:
        """The function that submits a job to the executor."""
        if self._executor is None:
            yield functools.partial(_run_here, work)
        elif isinstance(self._executor, int):
            with Processes(work, n_workers, self._case_timeout, self._stop) as processes:
                yield processes.submit
        else:
            client = _is_client(self._executor)
            executor = self._executor.get_executor(pure=False) if client else self._executor
            yield functools.partial(executor.submit, run_batch, work)


def check_executor(executor: Any, case_timeout: float | None) -> None:
    """Refuse what is no executor, and a time limit that cannot be enforced."""
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


def _n_workers(executor: Any) -> int:
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


def _run_here(work: Work, units: Sequence[list[Case]], seconds: float) -> Future[Batch]:
    future: Future[Batch] = Future()
    future.set_result(run_batch(work, units, seconds))
    return future


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
