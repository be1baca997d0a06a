"""Worker processes of our own: a case that kills one, or takes too long, is that case's failure.

A worker says in shared memory which unit it is at and since when. So when it dies the parent knows
whose fault it was: the unit is run once more, alone; if that worker dies too, the unit has failed,
and everything else goes on. Processes come from a fork server, which imports the libraries once:
a worker then starts in some hundredths of a second.
"""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from typing import Any

from meanfield.sweeps.batches import Batch, Queue, Unit, Work, failed_batch, run_batch
from meanfield.sweeps.memory import keep_freed_memory

__all__ = ["run_in_workers"]

_log = logging.getLogger("meanfield")
_TICK = 0.1  # seconds between looks at the clock, where cases have a time limit
_PATIENCE = 5.0  # seconds for a worker without work to end
_FRUITLESS = 5  # workers in a row that die before they begin
_ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
)
_Handle = Callable[[Sequence[Unit], Batch], None]


def run_in_workers(
    work: Work,
    queue: Queue,
    handle: _Handle,
    stop: threading.Event,
    *,
    n_workers: int,
    case_timeout: float | None,
) -> None:
    """Run the queue in processes of one thread each; `handle` is given every finished batch.

    Raises:
        TypeError: the function or the settings cannot be pickled.
        RuntimeError: workers die before they begin.
    """
    _check_importable(work)
    crew = _Crew(work, queue, handle, case_timeout)
    try:
        while crew.give(n_workers, wanted=not stop.is_set()):
            crew.listen(stop)
    finally:
        crew.dismiss()


class _Worker:
    """A process, the pipe to it, and what it is at."""

    def __init__(self, work: Work) -> None:
        context = _context()
        self.pipe, theirs = context.Pipe()
        self.at = context.RawArray(
            "d", [-1.0, 0.0, 0.0]
        )  # unit under way, since when, whether to end
        arguments = (theirs, self.at, work, dict(os.environ))
        self.process = context.Process(target=_serve, args=arguments)
        with _environment(_ONE_THREAD):  # must stand before libraries are loaded
            self.process.start()
        theirs.close()
        self.units: list[Unit] = []

    def give(self, units: list[Unit], seconds: float) -> None:
        self.units = units
        self.at[0] = -1.0
        with contextlib.suppress(OSError):  # it is dead, which `listen` will see
            self.pipe.send(([unit.cases for unit in units], seconds))

    def answer(self) -> Any:
        """What it has sent, or None if it died."""
        with contextlib.suppress(EOFError, OSError):
            if self.pipe.poll():
                return self.pipe.recv()
        return None

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class _Crew:
    """The workers of a sweep."""

    def __init__(
        self, work: Work, queue: Queue, handle: _Handle, case_timeout: float | None
    ) -> None:
        self._work, self._queue, self._handle = work, queue, handle
        self._timeout = case_timeout or math.inf
        self._workers: list[_Worker] = []
        self._blamed: set[int] = set()  # id of units that a worker has died at
        self._fruitless = 0

    def give(self, n_workers: int, *, wanted: bool) -> bool:
        """Give work to whoever has none; whether anybody is at work."""
        idle = [worker for worker in self._workers if not worker.units]
        while wanted and self._queue:
            if not idle and len(self._workers) >= n_workers:
                break
            if not idle:
                self._workers.append(_Worker(self._work))
                idle = [self._workers[-1]]
            idle.pop().give(self._queue.take(), self._queue.seconds)
        return any(worker.units for worker in self._workers)

    def listen(self, stop: threading.Event) -> None:
        """Wait until something happens: an answer, a death, a case that takes too long."""
        busy = [worker for worker in self._workers if worker.units]
        wait([end for w in busy for end in (w.pipe, w.process.sentinel)], timeout=_TICK)
        for worker in busy:
            if stop.is_set():
                worker.at[2] = 1.0
            dead = not worker.process.is_alive()  # asked first: an answer may be its last
            answer = worker.answer()
            if isinstance(answer, BaseException):
                raise answer
            if answer is not None:
                self._finish(worker, answer)
            elif dead:
                self._bury(worker, _cause(worker.process.exitcode))
            elif worker.at[0] >= 0 and time.monotonic() - worker.at[1] > self._timeout:
                self._bury(worker, f"it took longer than {self._timeout:g} s", certain=True)

    def dismiss(self) -> None:
        """End all workers; those that have no work in peace."""
        for worker in self._workers:
            if not worker.units:
                with contextlib.suppress(OSError):
                    worker.pipe.send(None)
        for worker in self._workers:
            if not worker.units:
                worker.process.join(_PATIENCE)
            worker.end()

    def _finish(self, worker: _Worker, batch: Batch) -> None:
        units, worker.units = worker.units, []
        self._fruitless = 0
        self._queue.put_back(units[batch.n_units :])
        self._handle(units[: batch.n_units], batch)

    def _bury(self, worker: _Worker, cause: str, *, certain: bool = False) -> None:
        """A worker is dead or has to be: its unit is suspect, the others are run again."""
        worker.end()
        self._workers.remove(worker)
        units, number = worker.units, int(worker.at[0])
        if number < 0:
            self._fruitless += 1
            if self._fruitless > _FRUITLESS:
                raise RuntimeError(_never_began(cause))
            self._queue.put_back(units)
            return
        self._queue.put_back(units[:number] + units[number + 1 :])
        suspect = units[number]
        if not (certain or id(suspect) in self._blamed):
            self._blamed.add(id(suspect))
            self._queue.suspects.append(suspect)
            _log.warning("sweep: %s at %s; tried once more", cause, suspect.cases[0])
        elif len(suspect.cases) > 1:  # of a vectorised call: which case was it?
            self._queue.put_back([Unit([p], [c]) for p, c in zip(*suspect, strict=True)])
        else:
            self._handle([suspect], failed_batch(self._work, suspect.cases, cause))


def _serve(pipe: Any, at: Any, work: Work, environment: dict[str, str]) -> None:
    """What a worker does: batches, until it is told to end or its parent is gone."""
    _prepare(environment)

    def begin(number: int) -> bool:
        if at[2]:
            return False
        at[1] = time.monotonic()
        at[0] = number
        return True

    with contextlib.suppress(EOFError, OSError):
        while (job := pipe.recv()) is not None:
            units, seconds = job
            try:
                answer: Any = run_batch(work, units, seconds, begin)
            except Exception as error:
                answer = error if _pickles(error) else RuntimeError(repr(error))
            pipe.send(answer)


def _prepare(environment: dict[str, str]) -> None:
    """One thread, and an end when the parent ends: an orphan would wait for work for ever."""
    # Ctrl-C reaches the whole process group: the parent decides, the case under way is finished.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(environment | _ONE_THREAD)  # the fork server's may be an older one
    keep_freed_memory()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


def _context() -> Any:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    heavy = ["torch"] if "torch" in sys.modules else []
    context.set_forkserver_preload([*heavy, __name__])
    return context


def _cause(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"its process died: signal {-code} ({signal.Signals(-code).name})"
    return f"its process ended: exit code {code}"


def _never_began(cause: str) -> str:
    return (
        f"sweep: worker processes end before their first case ({cause}). Is the sweep of a script "
        "inside `if __name__ == '__main__':`, and can its module be imported?"
    )


def _pickles(value: Any) -> bool:
    try:
        pickle.loads(pickle.dumps(value))
    except Exception:
        return False
    return True


def _check_importable(work: Work) -> None:
    try:
        pickle.dumps(work)
    except Exception as error:
        raise TypeError(
            f"fn: expected a function that worker processes can import, defined at the top of a "
            f"module, and settings that can be pickled; got {work.task.label} ({error})"
        ) from error


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
