"""The sweep: plan, run what is missing, hand back one labelled Dataset."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from meanfield.options import count, shown
from meanfield.results.stores import Store, assemble, blank, variables_of
from meanfield.sweeps.batches import JOBS_PER_WORKER, Batch, Queue, Unit, Work
from meanfield.sweeps.evaluate import Failure, collect, infer
from meanfield.sweeps.executors import check_executor, n_workers_of, run_queue
from meanfield.sweeps.grid import Grid, columns_of
from meanfield.sweeps.plan import VECTORISED, Plan, make_plan
from meanfield.sweeps.progress import Progress
from meanfield.sweeps.store import description_at, merge, open_store, write_cases
from meanfield.sweeps.task import FAILED, PENDING, Task

__all__ = ["sweep"]

_log = logging.getLogger("meanfield")
_PROBES = 16  # cases that may fail before one does not, where the variables are not declared


def sweep(
    fn: Task | Callable[..., Mapping[str, Any]],
    grid: Grid,
    *,
    fixed: Mapping[str, Any] | None = None,
    seed: int = 0,
    attrs: Mapping[str, Any] | None = None,
    store: str | os.PathLike[str] | None = None,
    executor: Any = None,
    shard: tuple[int, int] | None = None,
    batch_size: int | None = None,
    case_timeout: float | None = None,
    retry_failed: bool = False,
    accept_changed_code: bool = False,
    progress: bool = True,
) -> xr.Dataset:
    """f(case) for every case of a grid, as one labelled Dataset in long form.

    Args:
        fn: called with the parameters of a case by name; returns a mapping from variable name to
            value. A plain function returns numbers; a `Task` adds labels, arrays, vectorisation.
        grid: parameter name -> values (all combinations, the last name fastest), or a list of
            dicts (a ragged grid).
        fixed: settings that are the same in each case, passed by name; in the provenance.
        seed: of the whole. Each case has its own, see `case_seed`, from this and its parameters.
        attrs: attributes of the Dataset, text and numbers; kept in the store.
        store: a folder that holds finished cases, in files of at most some 20 seconds of work. If
            it exists, only what is missing is run; cases that are not in it yet are added;
            another function, seed or setting is refused. A finished case survives any death of
            the process and of the machine.
        executor: None runs in this process; a number starts as many processes of one thread
            each, and a case that kills its process fails alone; any `concurrent.futures.Executor`
            or `dask.distributed.Client` is used as it is (give its workers one thread each; they
            must see the folder of the store).
        shard: (i, k) runs only every k-th case, from the i-th on, 0 ≤ i < k, for array jobs; the
            rest is pending in the answer.
        batch_size: cases after which a batch is stored, by elapsed time alone by default; of
            vectorised tasks the cases of one call, 1024 by default.
        case_timeout: seconds after which a case is ended and has failed, or a vectorised call is
            ended and its cases are tried one at a time; with a number as `executor`.
        retry_failed: run failed cases of the store again.
        accept_changed_code: no warning if the source of the function is not what the store was
            begun with.
        progress: a bar on a terminal, a line a minute in the log "meanfield" elsewhere.

    Returns:
        Dataset with the dimension `case`, the parameters as coordinates along it, the variables,
        `status` (0 pending, 1 ok, 2 not converged, 3 failed) and `message`. A case that raises,
        or returns what does not fit, holds NaN and its message; the others go on.
        `results.to_cube` gives one dimension per parameter.

    Raises:
        ValueError, TypeError: a grid or a function that does not fit, a store of another
            configuration (the message names the fields).
        OSError: the store cannot be written; finished batches are kept.
        RuntimeError: no worker process can begin, or the executor is gone.
        KeyboardInterrupt: Ctrl-C, after the running cases; a second one ends at once.

    Example:
        >>> ds = sweep(lambda x, power: {"y": x**power}, {"x": [2.0, 3.0]}, fixed={"power": 2})
        >>> ds["y"].values
        array([4., 9.])
    """
    check_executor(executor, case_timeout)
    seed = count(seed, "seed", least=-(2**63), most=2**63 - 1)
    if not isinstance(fn, Task) and not callable(fn):
        raise TypeError(f"fn: expected a function or a Task, got {shown(fn)}")
    _check_settings(store, shard, batch_size)
    path = None if store is None else Path(store).resolve()  # before a case changes the folder
    stored = None if path is None else description_at(path)
    plan = make_plan(fn, grid, fixed, seed, attrs)
    if path is not None:
        _ = plan.configuration  # what a store does not take is said before the first case
    how = _How(executor, case_timeout, batch_size, shard or (0, 1), progress)
    with _ending_gently() as stop:
        first: dict[int, Any] = {}
        if plan.task.variables is None and stored:
            plan = plan.with_variables(variables_of(stored))
        elif plan.task.variables is None:
            plan, first = _probe(plan, how, stop)
        if path is None:
            return _run_in_memory(plan, how, first, stop)
        files = open_store(path, plan, stored, accept_changed_code=accept_changed_code)
        if first:
            columns = collect(plan.task, [*first.values()])
            write_cases(path, files.description, [plan.cases[i] for i in first], columns)
        return _run_in_store(plan, how, files, stop, retry_failed)


@dataclasses.dataclass(frozen=True)
class _How:
    """Settings of a sweep that change no number."""

    executor: Any
    case_timeout: float | None
    batch_size: int | None
    shard: tuple[int, int]
    progress: bool

    def work(self, plan: Plan, files: Store | None = None) -> Work:
        most = None if plan.task.batched else self.batch_size
        place = (None, None) if files is None else (files.path, files.description)
        return Work(plan.task, plan.fixed, plan.seed, most, *place)

    def units(self, plan: Plan, missing: np.ndarray) -> list[Unit]:
        """What is missing and belongs to this shard, in units.

        A vectorised call has the cases that it has in the whole grid, whoever runs it, because
        the last digits of linear algebra depend on them.
        """
        size = (self.batch_size or VECTORISED) if plan.task.batched else 1
        index, count = self.shard
        units = []
        for start in range(index * size, len(plan.cases), count * size):
            places = [start] if size == 1 else list(range(start, min(start + size, len(missing))))
            places = [place for place in places if missing[place]]
            if places:
                units.append(Unit(places, [plan.cases[place] for place in places]))
        return units


def _probe(plan: Plan, how: _How, stop: threading.Event) -> tuple[Plan, dict[int, Any]]:
    """The first cases until one does not fail, whose variables are those of all."""
    outcomes: dict[int, Any] = {}  # by the place of the case
    units = [Unit([i], [case]) for i, case in enumerate(plan.cases[:_PROBES])]
    queue = Queue(units, 1)

    def keep(units: Sequence[Unit], batch: Batch) -> None:
        found = batch.outcomes or []
        outcomes.update(zip([unit.places[0] for unit in units], found, strict=True))
        if found and not isinstance(found[-1], Failure):
            queue.clear()

    run_queue(
        how.work(plan), queue, how.executor, keep, stop,
        case_timeout=how.case_timeout, one_job=True,
    )  # fmt: skip
    if stop.is_set():
        raise KeyboardInterrupt
    last = [*outcomes.values()][-1]
    if isinstance(last, Failure):
        raise ValueError(
            f"fn: failed at each of the first {len(outcomes)} cases, so that its variables are "
            "unknown; declare them: sweep(Task(fn, [Variable(...)]), ...). The first says: "
            f"{outcomes[0].message}"
        )
    return plan.with_variables(infer(last)), outcomes


def _run_in_memory(
    plan: Plan, how: _How, first: dict[int, Any], stop: threading.Event
) -> xr.Dataset:
    labels = plan.labels | {"provenance": plan.provenance}
    rows = blank(labels, len(plan.cases))

    def keep(units: Sequence[Unit], columns: Mapping[str, np.ndarray]) -> None:
        places = [place for unit in units for place in unit.places]
        for name, column in columns.items():
            rows[name][places] = column

    if first:
        keep([Unit([*first], [])], collect(plan.task, [*first.values()]))
    missing = rows["status"] == PENDING
    _run(plan, how, missing, stop, lambda units, batch: keep(units, batch.columns or {}))
    return assemble(labels, columns_of(plan.cases) | rows)


def _run_in_store(
    plan: Plan, how: _How, files: Store, stop: threading.Event, retry_failed: bool
) -> xr.Dataset:
    files.refresh()
    status = _rows_of(plan, files)["status"]
    missing = (status == PENDING) | (retry_failed & (status == FAILED))
    _run(plan, how, missing, stop, lambda units, batch: None, files)
    merge(files)
    labels = plan.labels | {"provenance": files.description["provenance"]}
    return assemble(labels, columns_of(plan.cases) | _rows_of(plan, files))


def _rows_of(plan: Plan, files: Store) -> dict[str, np.ndarray]:
    """The values that the store has of the plan's cases, in the plan's order."""
    rows, own = files.rows(), blank(files.description, len(plan.cases))
    order = np.argsort(rows["case_key"])
    places = np.searchsorted(rows["case_key"], plan.keys, sorter=order)
    places = order[np.minimum(places, len(order) - 1)]
    there = rows["case_key"][places] == plan.keys  # another one is lost since the store was opened
    for name, column in own.items():
        column[there] = rows[name][places[there]]
    return own


def _run(
    plan: Plan,
    how: _How,
    missing: np.ndarray,
    stop: threading.Event,
    keep: Callable[[Sequence[Unit], Batch], None],
    files: Store | None = None,
) -> None:
    """Run what is missing, say how far it is, and what is kept if it does not end."""
    units = how.units(plan, missing)
    n_missing = sum(len(unit.cases) for unit in units)
    total = max(len(plan.cases) // how.shard[1], n_missing)
    queue = Queue(units, JOBS_PER_WORKER * n_workers_of(how.executor) if how.executor else 1)
    with Progress(total, done=total - n_missing, visible=how.progress) as bar:

        def handle(units: Sequence[Unit], batch: Batch) -> None:
            keep(units, batch)
            bar.advance(batch.status)

        try:
            run_queue(
                how.work(plan, files), queue, how.executor, handle, stop,
                case_timeout=how.case_timeout,
            )  # fmt: skip
            if queue:
                raise KeyboardInterrupt
        except KeyboardInterrupt as interrupt:
            interrupt.add_note(_kept(plan, files))
            raise


def _kept(plan: Plan, files: Store | None) -> str:
    if files is None:
        return "nothing is kept: the sweep has no store"
    files.refresh()  # the files know better than we do, if a signal came while one was written
    n_kept = int((_rows_of(plan, files)["status"] != PENDING).sum())
    return (
        f"{n_kept} of {len(plan.cases)} cases are kept in {files.path}; run the same sweep again "
        "to go on"
    )


@contextlib.contextmanager
def _ending_gently() -> Iterator[threading.Event]:
    """The first Ctrl-C asks to end after the running cases, the second is as always.

    Only where Ctrl-C has its usual meaning: in the main thread, without a handler of the user's.
    """
    stop = threading.Event()
    usual = signal.default_int_handler
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not usual
    ):
        yield stop
        return

    def ask(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, usual)
        stop.set()
        _log.warning("sweep: ends after the running cases; once more ends it at once")

    signal.signal(signal.SIGINT, ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, usual)


def _check_settings(store: object, shard: tuple[int, int] | None, size: int | None) -> None:
    if size is not None:
        count(size, "batch_size")
    if shard is None:
        return
    if store is None:
        raise ValueError("shard: expected a store, in which the shards meet, got store=None")
    if not 0 <= shard[0] < shard[1]:
        raise ValueError(f"shard: expected (i, k) with 0 ≤ i < k, got {shard}")
