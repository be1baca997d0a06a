"""Batches: some cases, computed one after the other and kept together when their time is up."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from meanfield.results import Variable
from meanfield.sweeps.evaluate import Failure, Outcome, Work, collect, infer, outcomes
from meanfield.sweeps.grid import Case

__all__ = ["Batch", "Queue", "Unit", "run_batch"]

# A batch ends after a quarter of the time that the sweep has run, so that whoever kills it early
# loses little, and after 20 seconds at the latest; a file takes some 8 ms, of the first 0.4 %.
_FIRST, _SHARE, _LONGEST = 2.0, 0.25, 20.0

Unit = list[int]  # what is run at once: the place of a case, or those of one vectorised call


@dataclass(frozen=True)
class Batch:
    """Finished units, and the variables of their function, declared or inferred."""

    n_units: int
    columns: dict[str, np.ndarray]
    variables: Sequence[Variable] | None
    interrupt: BaseException | None = None


class Queue:
    """The units that are left, handed out in jobs: always the same share of what is left."""

    def __init__(self, units: Iterable[Unit], n_shares: int) -> None:
        self._units, self._n_shares = deque(units), n_shares
        self._start = time.monotonic()

    def __len__(self) -> int:
        return len(self._units)

    @property
    def seconds(self) -> float:
        """After how long a batch that begins now is to end."""
        return min(_LONGEST, max(_FIRST, _SHARE * (time.monotonic() - self._start)))

    def take(self) -> list[Unit]:
        """The next job."""
        return [self._units.popleft() for _ in range(-(-len(self) // self._n_shares))]

    def put_back(self, units: Sequence[Unit]) -> None:
        """Units of a job that were not run, to the front."""
        self._units.extendleft(reversed(units))


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
    done: list[list[Outcome]] = []
    task, n_cases, interrupt = work.task, 0, None
    end = time.monotonic() + seconds
    try:
        for number, cases in enumerate(units):
            if not begin(number):
                break
            done.append(outcomes(work, cases))
            values, n_cases = done[-1][0][1], n_cases + len(cases)
            if task.variables is None and not isinstance(values, Failure):
                task = dataclasses.replace(task, variables=infer(values))
                break
            if n_cases >= work.most_cases or time.monotonic() > end:
                break
    except KeyboardInterrupt as error:
        interrupt = error
    begin(-1)
    columns = collect(task, [outcome for unit in done for outcome in unit])
    return Batch(len(done), columns, task.variables, interrupt)
