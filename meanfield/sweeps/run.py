"""The sweep: plan, run what is missing, hand back one labelled Dataset."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import xarray as xr

from meanfield.checks import as_bool, as_path, count, describe
from meanfield.habits import with_hints
from meanfield.results.cases import FAILED, NOT_CONVERGED, PENDING, Columns, Labels
from meanfield.results.provenance import with_spec
from meanfield.results.store import Store, description_at, open_store
from meanfield.sweeps.batches import Batch
from meanfield.sweeps.executors import Run, check_executor
from meanfield.sweeps.grid import Grid, case_keys
from meanfield.sweeps.plan import SweepPlan, Task, make_plan, shown_grid

_log = logging.getLogger("meanfield")
_SECONDS_BETWEEN_LINES = 60.0
_PROBES = 16  # cases that are tried to learn the variables, where none are declared
_FILES = {".nc", ".h5", ".csv", ".json", ".npz", ".parquet", ".pkl"}  # kinds that no folder is
_Piece = tuple[list[int], Batch]  # places of cases, and their values


class Progress:
    """Counts finished cases, some of them found in a store, and shows how many there are."""

    def __init__(self, total: int, *, found: int = 0, visible: bool = True) -> None:
        from tqdm import tqdm

        self._total, self._n_done = total, found
        self._start = self._last_line = time.monotonic()
        # None: no bar unless standard error is a terminal, so that logs stay readable.
        disable = None if visible else True
        self._bar: Any = tqdm(total=total, initial=found, unit="case", disable=disable)
        self._lines = visible and self._bar.disable
        if visible and found:
            self._bar.write(f"{found} of {total} cases found", file=sys.stderr)

    def advance(self, n_cases: int) -> None:
        """Count finished cases."""
        self._n_done += n_cases
        self._bar.update(n_cases)
        if time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._say()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()
        self._say()

    def _say(self) -> None:
        if not self._lines:
            return
        self._last_line = time.monotonic()
        elapsed = self._last_line - self._start
        meter = self._bar.format_meter(self._n_done, self._total, elapsed, ncols=79, ascii=True)
        self._bar.write(f"sweep: {meter}", file=sys.stderr)


@with_hints
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
        fixed: settings that are the same in each case, passed by name; in the provenance. Each
            case gets a copy, which it may change, of all that can be copied, but not of objects
            whose class lists what they are as `identified_by`: these no case may change. A large
            model is better loaded by the function, behind `functools.cache`. No generators: a
            case gets its own.
        seed: of the whole. Each case has its own, made from this and the parameters of the case:
            the function gets it as its argument `seed` or `generator`, see `Task`, and what it
            draws from torch's (on CPU and CUDA), NumPy's or Python's own generators begins there
            too, in a vectorised call at that of its first case, unless other threads draw at the
            same time.
        attrs: attributes of the Dataset, text and numbers; the store keeps those of the last call.
        store: a folder that holds finished cases, in files of at most some 20 seconds of work. If
            it exists, only what is missing is run; cases that are not in it yet are added;
            another function, seed or setting is refused. A finished case survives any death of
            the process and of the machine.
        executor: None runs in this process; a number starts as many processes of one thread
            each, and a case that kills its process fails alone; a `concurrent.futures.Executor`
            or `dask.distributed.Client` is used as it is (give its workers one thread each). Only
            this process writes the store.
        shard: (i, k) runs only every k-th case, of a vectorised task every k-th call, from the
            i-th on, 0 ≤ i < k, for array jobs; the rest is pending in the answer. Of a function
            that declares no variables the first case is run as well, which says what they are.
        batch_size: cases after which a batch is stored, by default only after some time; of a
            vectorised task the cases of one call, 1024 by default, fewer where shards need it.
        case_timeout: seconds after which a case is ended and has failed, or a vectorised call is
            ended and its cases are run one at a time; needs a number as `executor`.
        retry_failed: run failed cases of the store again.
        accept_changed_code: take the function of a store for the same, whatever has changed.
            Seen are the function and all of its own module that its names reach: functions,
            classes with their bases, assignments, decorators, and the values of numbers, text,
            lists, dicts, arrays and modules of torch, unless functions write into them (caches,
            counters). A change warns and names them.
            Settings, defaults, arguments of a partial, closures and bound objects count by value:
            a change is refused. Not seen are other modules beyond the names taken from them, what
            other objects hold, data files and the environment.
        progress: a bar on a terminal, a line a minute on standard error elsewhere.

    Returns:
        Dataset with the dimension `case`, the parameters as coordinates along it, the variables,
        `status` (0 pending, 1 ok, 2 not converged, 3 failed) and `message`. A case that raises,
        or returns what does not fit, holds NaN and its message; the others go on. NaN that a case
        returns is a value like any other, with the status ok.
        `results.to_cube` gives one dimension per parameter.

    Raises:
        ValueError, TypeError: a grid or a function that does not fit, a store of another
            configuration (the message names the fields).
        OSError: the store cannot be written; finished batches are kept.
        RuntimeError: no worker process can begin, or the executor is gone.
        KeyboardInterrupt: Ctrl-C; cases under way elsewhere are waited for and kept, after a
            second one they are not.

    Example:
        >>> ds = sweep(lambda x, power: {"y": x**power}, {"x": [2.0, 3.0]}, fixed={"power": 2})
        >>> ds["y"].values
        array([4., 9.])
    """
    check_executor(executor, case_timeout)
    progress = as_bool(progress, "progress")
    retry_failed = as_bool(retry_failed, "retry_failed")
    accept_changed_code = as_bool(accept_changed_code, "accept_changed_code")
    seed = count(seed, "seed", least=-(2**63), most=2**63 - 1)
    _check_settings(store, shard, batch_size)
    # Absolute, for a case may change the folder.
    path = None if store is None else as_path(store, "store").resolve()
    if path is not None and path.suffix in _FILES:
        raise ValueError(
            f"store: expected a folder, which a name in {path.suffix} is not for, got {store}; "
            "write the answer to a file by results.write_dataset(ds, path)"
        )
    stored = None if path is None else description_at(path)
    plan = make_plan(fn, grid, fixed, seed, attrs)
    if path is not None:  # what a store cannot identify is refused before the first case
        _ = plan.identity
    if plan.task.variables is None and stored:
        plan = plan.with_labels(Labels.from_plain(stored))
    run = Run(plan.cases, executor, case_timeout)
    first: list[_Piece] = []
    stopped: KeyboardInterrupt | None = None
    if plan.task.variables is None:
        try:
            plan = _probe(plan, run, first)
        except KeyboardInterrupt as interrupt:  # what was waited for is kept
            if path is None or not first or not first[-1][1].labels.variables:
                raise
            plan, stopped = plan.with_labels(first[-1][1].labels), interrupt
    files = None
    if path is not None:
        description = plan.description | ({} if stored else {"provenance": plan.provenance})
        files = open_store(path, description, stored, accept_changed_code=accept_changed_code)
    table = _Table(plan, files)
    try:
        units = plan.units(table.missing(retry_failed), batch_size, shard or (0, 1))
        for places, batch in first:
            table.keep(places, batch.columns)
        if stopped is not None:
            raise stopped
        own = plan.of_shard(batch_size, shard or (0, 1))
        found = int(own.sum()) - sum(map(len, units))
        with Progress(int(own.sum()), found=found, visible=progress) as bar:
            for unit, _ in first:
                if unit in units:  # else that of another shard
                    units.remove(unit)
                    bar.advance(len(unit))

            def keep(places: list[int], batch: Batch) -> None:
                table.keep(places, batch.columns)
                bar.advance(len(places))

            run(plan.work(batch_size), units, keep)
    except KeyboardInterrupt as interrupt:
        interrupt.add_note(table.kept())
        raise
    if files is not None:
        files.merge_files()
    table.tell_failures(own)
    return table.dataset()


class _Table:
    """The values of a plan's cases: in memory and, if there is one, in a store."""

    def __init__(self, plan: SweepPlan, store: Store | None) -> None:
        self._plan, self._store, self._labels = plan, store, plan.task.labels
        if store is None:
            self._provenance, self._rows = plan.provenance, self._labels.blank(len(plan.cases))
        else:
            self._keys, self._rows = store.add_cases(
                plan.columns, lambda n: case_keys(plan.cases[n:])
            )
            self._provenance = with_spec(store.description["provenance"], shown_grid(plan.columns))
            # It may have grown, and what it holds may have other labels than at first.
            every = plan.columns if store.n_cases == len(plan.cases) else store.parameters()
            whole = with_spec(store.description["provenance"], shown_grid(every))
            store.describe({**self._labels.plain, "attrs": plan.attrs, "provenance": whole})

    def missing(self, retry_failed: bool) -> np.ndarray:
        """Which cases are to be run."""
        status = self._rows["status"]
        return (status == PENDING) | (retry_failed & (status == FAILED))

    def keep(self, places: list[int], columns: Columns) -> None:
        """Keep finished cases; when this returns, those of a store are safe from any crash."""
        if not places:
            return
        columns = {**self._labels.blank(len(places)), **columns}
        if self._store is not None:
            parameters = {name: column[places] for name, column in self._plan.columns.items()}
            self._store.write({"case_key": self._keys[places], **parameters, **columns})
        for name, column in columns.items():
            self._rows[name][places] = column

    def tell_failures(self, own: np.ndarray) -> None:
        """Log how many of one's own cases have failed or not converged, found ones with them."""
        counts = np.bincount(self._rows["status"][own], minlength=4)
        if counts[FAILED] or counts[NOT_CONVERGED]:
            _log.warning(
                "%d of %d cases failed and %d did not converge; `status` and `message` say which",
                counts[FAILED], counts.sum(), counts[NOT_CONVERGED],
            )  # fmt: skip

    def kept(self) -> str:
        """How many cases are kept, for the message after an interrupt."""
        if self._store is None:
            return "nothing is kept: the sweep has no store"
        self._store.refresh()  # a signal may have come between the file and our own rows
        n_kept = int((self._store.rows_of(self._keys)["status"] != PENDING).sum())
        return (
            f"{n_kept} of {len(self._plan.cases)} cases are kept in {self._store.path}; run the "
            "same sweep again to go on"
        )

    def dataset(self) -> xr.Dataset:
        """All cases; pending where they were not run."""
        attrs = {**self._plan.attrs, "provenance": self._provenance}
        return self._labels.dataset(self._plan.columns | self._rows, attrs)


def _probe(plan: SweepPlan, run: Run, pieces: list[_Piece]) -> SweepPlan:
    """Run the first cases until one does not fail, into `pieces`; all have its variables."""
    for place in range(min(_PROBES, len(plan.cases))):
        run(plan.work(), [[place]], lambda *piece: pieces.append(piece))
        labels = pieces[-1][1].labels
        if labels.variables:
            return plan.with_labels(labels)
    raise ValueError(
        f"fn: failed at every case that was tried ({len(pieces)}), so that its variables are "
        "unknown; declare them: sweep(Task(fn, [Variable(...)]), ...). The first says: "
        f"{pieces[0][1].columns['message'][0]}"
    )


def _check_settings(store: object, shard: tuple[int, int] | None, size: int | None) -> None:
    if size is not None:
        count(size, "batch_size")
    if shard is None:
        return
    if store is None:
        raise ValueError("shard: expected a store, in which the shards meet, got store=None")
    if not isinstance(shard, (tuple, list)) or len(shard) != 2:
        raise TypeError(f"shard: expected (i, k), two whole numbers, got {describe(shard)}")
    index, parts = (count(each, "shard", least=0) for each in shard)
    if not index < parts:
        raise ValueError(f"shard: expected (i, k) with 0 ≤ i < k, got {shard}")
