"""Batches: some cases, computed one after the other and stored together when their time is up."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meanfield.sweeps.evaluate import Failure, call_many, collect, outcome
from meanfield.sweeps.grid import Case
from meanfield.sweeps.store import write_cases
from meanfield.sweeps.task import Task

__all__ = ["Batch", "Queue", "Unit", "Work", "failed_batch", "run_batch"]

# A batch ends after a quarter of the time that the sweep has run, so that whoever kills it early
# loses little, and after 20 seconds at the latest; a file takes some 10 ms.
_FIRST, _SHARE, _LONGEST = 1.0, 0.25, 20.0
_MOST_BYTES = 2**27  # held by a batch
_JOBS_PER_WORKER = 4  # of what is left: the last jobs are small, so that workers end together


class Unit(NamedTuple):
    """What is run at once: a case, or the cases of one vectorised call; with their places."""

    places: list[int]
    cases: list[Case]


@dataclass(frozen=True)
class Work:
    """What all batches of a sweep have in common: everything a worker needs."""

    task: Task
    fixed: dict[str, Any]
    seed: int
    most_cases: int | None = None
    store: Path | None = None
    description: Mapping[str, Any] | None = None

    @property
    def limit(self) -> int:
        """Cases after which a batch ends."""
        each = 64 + sum(
            v.numpy_dtype.itemsize * int(np.prod(self.task.shape(v), dtype=int))
            for v in self.task.variables or ()
        )
        return min(self.most_cases or _MOST_BYTES, max(1, _MOST_BYTES // each))


@dataclass(frozen=True)
class Batch:
    """Finished units; the values too, if there is no store or the variables are not known yet."""

    n_units: int
    status: np.ndarray
    columns: dict[str, np.ndarray] | None = None
    outcomes: list[Any] | None = None
    interrupt: BaseException | None = None


class Queue:
    """The units that are left, handed out in jobs; jobs get smaller towards the end."""

    def __init__(self, units: Iterable[Unit], n_workers: int) -> None:
        self._units, self._n_workers = deque(units), n_workers
        self._start = time.monotonic()
        self.suspects: list[Unit] = []  # to be run first and alone: they may kill their process

    def __len__(self) -> int:
        return len(self._units) + len(self.suspects)

    @property
    def seconds(self) -> float:
        """After how long a batch that begins now is to end."""
        return min(_LONGEST, max(_FIRST, _SHARE * (time.monotonic() - self._start)))

    def take(self) -> list[Unit]:
        """The next job, empty if nothing is left."""
        if self.suspects:
            return [self.suspects.pop()]
        share = 1 if self._n_workers == 1 else _JOBS_PER_WORKER * self._n_workers
        return [self._units.popleft() for _ in range(-(-len(self._units) // share))]

    def put_back(self, units: Sequence[Unit]) -> None:
        """Units of a job that were not run, to the front."""
        self._units.extendleft(reversed(units))

    def clear(self) -> None:
        """Nothing is left."""
        self._units.clear()
        self.suspects.clear()


def run_batch(
    work: Work,
    units: Sequence[list[Case]],
    seconds: float,
    begin: Callable[[int], bool] = lambda number: True,
) -> Batch:
    """Run units until the time is up, and store what is finished; the same in every executor.

    Args:
        work: what to compute.
        units: the cases of each unit.
        seconds: when to end: after the unit that is then under way.
        begin: told the number of the unit before it begins, and -1 after the last; false to end.
    """
    done: list[Any] = []
    interrupt, end, n_cases = None, time.monotonic() + seconds, 0
    try:
        for number, cases in enumerate(units):
            if not begin(number):
                break
            done.append(_run_unit(work, cases))
            n_cases += len(cases)
            told = work.task.variables is None and not isinstance(done[-1], Failure)
            if told or n_cases >= work.limit or time.monotonic() > end:
                break
    except KeyboardInterrupt as error:
        interrupt = error
    begin(-1)
    if work.task.variables is None:
        columns = collect(work.task, [d if isinstance(d, Failure) else {} for d in done])
        return Batch(len(done), columns["status"], outcomes=done, interrupt=interrupt)
    cases = [case for unit in units[: len(done)] for case in unit]
    return _finished(work, cases, len(done), _joined(work, done), interrupt)


def failed_batch(work: Work, cases: Sequence[Case], message: str) -> Batch:
    """The batch of a unit that could not end, with the reason."""
    failures = [Failure(message) for _ in cases]
    columns = collect(work.task, failures)
    if work.task.variables is None:
        return Batch(1, columns["status"], outcomes=failures)
    return _finished(work, cases, 1, columns, None)


def _run_unit(work: Work, cases: list[Case]) -> Any:
    if work.task.batched:
        return call_many(work.task, cases, work.fixed, work.seed)
    return outcome(work.task, cases[0], work.fixed, work.seed)


def _joined(work: Work, done: list[Any]) -> dict[str, np.ndarray]:
    if not (work.task.batched and done):
        return collect(work.task, done)
    return {name: np.concatenate([columns[name] for columns in done]) for name in done[0]}


def _finished(
    work: Work,
    cases: Sequence[Case],
    n_units: int,
    columns: dict[str, np.ndarray],
    interrupt: BaseException | None,
) -> Batch:
    if work.store is None or work.description is None:
        return Batch(n_units, columns["status"], columns, interrupt=interrupt)
    if cases:
        write_cases(work.store, work.description, cases, columns)
    return Batch(n_units, columns["status"], interrupt=interrupt)
