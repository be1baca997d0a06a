"""Worker processes: a case that kills its process, or takes too long, fails alone.

A worker writes to shared memory which unit it runs and since when, so that its death is traced to
a unit. Processes come from a fork server, which imports the libraries once: a worker then starts
in some hundredths of a second.

Other pools do not serve: in those of the standard library and of loky one death ends the jobs of
all workers, and in pebble's the others may wait for a lock that a dead one held.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from typing import Any

import torch

from meanfield.sweeps.batches import Batch, run_batch
from meanfield.sweeps.grid import Case
from meanfield.sweeps.plan import Work

_TICK = 0.1  # seconds between checks of the clock and of `stop`
_STOPPED = 1.0  # seconds between two of them: Ctrl-Z, or the machine slept
_PATIENCE = 5.0  # seconds that a worker without work has to end
_FRUITLESS = 5  # workers in a row that die before they begin
_LOCK = threading.RLock()  # while the environment or `multiprocessing`'s lists change
_ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
)


@dataclass(eq=False)
class DiedError(Exception):
    """A job ended its process.

    Attributes:
        cause: in words.
        number: of the unit under way; None if that is not known.
        certain: whether the unit would end its process again.
    """

    cause: str
    number: int | None = None
    certain: bool = False


def check_sent(work: Work) -> None:
    """Refuse a function that other processes cannot import, or settings that cannot be sent."""
    try:
        pickle.dumps(work)
    except Exception as error:
        raise TypeError(
            f"fn: expected a function that worker processes can import, defined at the top of "
            f"a module, and settings that can be pickled; got {work.task.label} ({error})"
        ) from error


class Processes:
    """Processes of one thread each, and for each a thread of this process that waits for it.

    A unit that takes longer than `timeout` seconds is ended with its process; when `stop` is set,
    jobs end after the unit under way.
    """

    def __init__(
        self, work: Work, n_workers: int, timeout: float | None, stop: threading.Event
    ) -> None:
        check_sent(work)
        self._work, self._timeout, self._stop = work, timeout, stop
        self._threads = ThreadPoolExecutor(n_workers, initializer=_block_ctrl_c)
        self._workers: dict[int, _Worker] = {}  # by thread
        self._over = False

    def submit(
        self, _: Callable[..., Batch], work: Work, units: Sequence[list[Case]], seconds: float
    ) -> Future[Batch]:
        """Run a batch in a process; if that ends, the future raises a `DiedError`."""
        return self._threads.submit(self._run, units, seconds)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with _LOCK:
            self._over = True
            for worker in self._workers.values() if kind else ():
                worker.process.kill()
        self._threads.shutdown()
        for worker in self._workers.values():
            worker.pipe.close()  # upon which it ends by itself
        for worker in self._workers.values():
            worker.end()

    def _run(self, units: Sequence[list[Case]], seconds: float) -> Batch:
        cause = ""
        for _ in range(_FRUITLESS):
            try:
                return self._worker().run(units, seconds)
            except (EOFError, OSError) as error:  # the fork server has died; another one starts
                cause = f"{type(error).__name__}: {error}"
            except DiedError as death:
                if death.number is not None:
                    raise
                cause = death.cause
                if death.certain:  # its traceback is above
                    break
        raise RuntimeError(
            f"sweep: worker processes end before their first case ({cause}). Is the sweep of a "
            "script inside `if __name__ == '__main__':`, and can its module be imported?"
        )

    def _worker(self) -> _Worker:
        """That of this thread; another one if it has ended."""
        thread = threading.get_ident()
        with _LOCK:
            worker = self._workers.get(thread)
            if worker is None or worker.pipe.closed:
                if self._over:
                    raise RuntimeError("the sweep has ended")
                self._workers[thread] = worker = _Worker(self._work, self._timeout, self._stop)
            return worker


class _Worker:
    """A process, the pipe to it, and the unit that it runs."""

    def __init__(self, work: Work, timeout: float | None, stop: threading.Event) -> None:
        self._timeout, self._stop, context = timeout or math.inf, stop, _context()
        self.pipe, theirs = context.Pipe()
        # The unit under way (-1 for none), since when, and whether to end after it.
        self.at = context.RawArray("d", [-1.0, 0.0, 0.0])
        before = dict(os.environ)
        self.process = context.Process(target=_serve, args=(theirs, self.at, work, before))
        os.environ.update(_ONE_THREAD)  # before libraries are loaded, in the fork server as well
        try:
            self.process.start()
        finally:
            for name in _ONE_THREAD:
                del os.environ[name]
            os.environ.update(before)
        theirs.close()

    def run(self, units: Sequence[list[Case]], seconds: float) -> Batch:
        """The batch of a job; a `DiedError` has no number if no unit had begun."""
        with contextlib.suppress(OSError):  # it has died: the sentinel is ready
            self.pipe.send((units, seconds))
        now = time.monotonic()
        while True:
            ready = wait([self.pipe, self.process.sentinel], timeout=_TICK)
            now, before = time.monotonic(), now
            if now - before > _STOPPED and self.at[1] < before:
                self.at[1] += now - before  # no time of the case
            if self._stop.is_set():
                self.at[2] = 1.0
            if self.pipe in ready:  # first: it may answer and then end
                with contextlib.suppress(EOFError, OSError):
                    answer = self.pipe.recv()
                    if isinstance(answer, Exception):
                        raise answer
                    return answer
            number = int(self.at[0])
            if ready:
                self.end()
                code = self.process.exitcode
                if number < 0:  # code 1: an error while it was importing
                    raise DiedError(_cause(code), certain=code == 1)
                raise DiedError(_cause(code), number)
            if number >= 0 and now - self.at[1] > self._timeout:
                self.end(0)
                cause = f"it took longer than {self._timeout:.15g} s"
                raise DiedError(cause, number, certain=True)

    def end(self, patience: float = _PATIENCE) -> None:
        """Wait a while for the process to end, then kill it."""
        with _LOCK:
            self.process.join(patience)
            self.process.kill()
            self.process.join()
            self.pipe.close()


def _serve(pipe: Any, at: Any, work: Work, environment: dict[str, str]) -> None:
    """The worker: runs batches until the pipe is closed."""
    _prepare(environment)

    def begin(number: int) -> bool:
        at[1] = time.monotonic()
        at[0] = number
        return not at[2]

    with contextlib.suppress(EOFError, OSError):
        while True:
            units, seconds = pipe.recv()
            try:
                # Whatever a case raises is its own: Ctrl-C does not reach a worker.
                answer: Any = run_batch(work, units, seconds, begin, (BaseException,))
            except Exception as error:
                answer = RuntimeError(f"sweep: {type(error).__name__}: {error}")
            pipe.send(answer)


def _prepare(environment: dict[str, str]) -> None:
    """Use one thread; end when the parent ends, for whose jobs a worker would wait for ever."""
    # Ctrl-C reaches the whole process group; the parent lets the case under way finish.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(environment | _ONE_THREAD)  # that of the fork server may be older
    torch.set_num_threads(1)
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
    context.set_forkserver_preload([__name__])
    return context


def _cause(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"its process died: signal {-code} ({signal.Signals(-code).name})"
    return f"its process ended: exit code {code}"


def _block_ctrl_c() -> None:
    """Block Ctrl-C in this thread and in all that it starts, also while they import."""
    if hasattr(signal, "pthread_sigmask"):
        # First: if the fork server had to start it, it would remove the block.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
