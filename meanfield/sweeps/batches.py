"""Batches: some cases, computed one after the other and kept together when their time is up."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meanfield.results import Variable
from meanfield.sweeps.evaluate import Failure, call_many, collect, infer, outcome
from meanfield.sweeps.grid import Case
from meanfield.sweeps.task import Task

__all__ = ["Batch", "Queue", "Unit", "Work", "run_batch"]

# A batch ends after a quarter of the time that the sweep has run, so that whoever kills it early
# loses little, and after 20 seconds at the latest; a file takes some 10 ms.
_FIRST, _SHARE, _LONGEST = 1.0, 0.25, 20.0
_MOST_BYTES = 2**27  # held by a batch

Unit = list[int]  # what is run at once: the place of a case, or those of one vectorised call


@dataclass(frozen=True)
class Work:
    """What all batches of a sweep have in common: everything a worker needs."""

    task: Task
    fixed: dict[str, Any]
    seed: int
    most_cases: int | None = None

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
    """Finished units, and the variables of their function, if they were not declared."""

    n_units: int
    columns: dict[str, np.ndarray]
    variables: Sequence[Variable] | None
    interrupt: BaseException | None = None


class Queue:
    """The units that are left, handed out in jobs: always the same share of what is left.

    A unit that has killed its process is a suspect: its cases come last, each in a job of its own.
    """

    def __init__(self, cases: Sequence[Case], units: Iterable[Unit], n_shares: int = 1) -> None:
        self._cases, self._units, self._n_shares = cases, deque(units), n_shares
        self._suspects: deque[Unit] = deque()
        self._tried: set[int] = set()
        self._start = time.monotonic()

    def __len__(self) -> int:
        return len(self._units) + len(self._suspects)

    @property
    def seconds(self) -> float:
        """After how long a batch that begins now is to end."""
        return min(_LONGEST, max(_FIRST, _SHARE * (time.monotonic() - self._start)))

    @property
    def only_suspects(self) -> bool:
        """Whether all that is left may kill its process."""
        return not self._units

    def take(self) -> list[Unit]:
        """The next job."""
        if self.only_suspects:
            return [self._suspects.popleft()]
        return [self._units.popleft() for _ in range(-(-len(self._units) // self._n_shares))]

    def cases_of(self, units: Sequence[Unit]) -> list[list[Case]]:
        """The cases of each unit."""
        return [[self._cases[place] for place in unit] for unit in units]

    def first_of(self, unit: Unit) -> Case:
        """The first case of a unit, for messages."""
        return self._cases[unit[0]]

    def put_back(self, units: Sequence[Unit]) -> None:
        """Units of a job that were not run, to the front."""
        for unit in reversed(units):
            (self._suspects if self.is_suspect(unit) else self._units).appendleft(unit)

    def suspect(self, unit: Unit) -> None:
        """A unit that is to be run again, case by case."""
        self._tried.update(unit)
        self._suspects.extend([place] for place in unit)

    def is_suspect(self, unit: Unit) -> bool:
        """Whether this is the case's second chance."""
        return unit[0] in self._tried

    def clear(self) -> None:
        """Nothing is left."""
        self._units.clear()
        self._suspects.clear()


def run_batch(
    work: Work,
    units: Sequence[list[Case]],
    seconds: float,
    begin: Callable[[int], bool] = lambda number: True,
) -> Batch:
    """Run units, given by their cases, until the time is up; the same in every executor.

    `begin` is told the number of each unit before it begins, and -1 after the last; it returns
    false to end. Where no variables are declared, the first unit that does not fail is the last.
    """
    task, n_cases, interrupt = work.task, 0, None
    done: list[Any] = []
    end, limit = time.monotonic() + seconds, work.limit
    try:
        for number, cases in enumerate(units):
            if not begin(number):
                break
            if task.batched:
                done.append(call_many(task, cases, work.fixed, work.seed))
            else:
                done.append(outcome(task, cases[0], work.fixed, work.seed))
            n_cases += len(cases)
            if task.variables is None and not isinstance(done[-1], Failure):
                task = dataclasses.replace(task, variables=infer(done[-1]))
                break
            if n_cases >= limit or time.monotonic() > end:
                break
    except KeyboardInterrupt as error:
        interrupt = error
    begin(-1)
    return Batch(len(done), _joined(task, done), task.variables, interrupt)


def _joined(task: Task, done: list[Any]) -> dict[str, np.ndarray]:
    if not (task.batched and done):
        return collect(task, done)
    return {name: np.concatenate([columns[name] for columns in done]) for name in done[0]}
