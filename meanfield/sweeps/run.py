"""The sweep: plan, run what is missing, hand back one labelled Dataset."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from meanfield.results import Variable, provenance
from meanfield.sweeps.executors import Job, Report, check_executor, n_workers_of, run_jobs
from meanfield.sweeps.grid import Grid, columns_of
from meanfield.sweeps.plan import Plan, choose_batch_size, make_plan
from meanfield.sweeps.progress import Progress
from meanfield.sweeps.store import (
    MESSAGE_ATTRS,
    STATUS_ATTRS,
    Part,
    create_part,
    open_store,
    provenance_of,
    read_values,
)
from meanfield.sweeps.task import Task

__all__ = ["sweep"]


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
    retry_failed: bool = False,
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
        store: a folder that holds finished batches. If it exists, only what is missing is run;
            cases that are not in it yet are added; another function, seed or setting is refused.
        executor: None runs in this process; a number starts as many processes of one thread
            each; any `concurrent.futures.Executor` or `dask.distributed.Client` is used as it
            is (give its workers one thread each; they must see the folder of the store).
        shard: (i, k) runs only the batches i, i + k, i + 2k … of the store, 0 ≤ i < k, for array
            jobs; the rest is pending in the answer.
        batch_size: cases per batch, the unit that is stored or lost as a whole; some seconds of
            work by default, 1024 cases for vectorised tasks. A store keeps what it began with.
        retry_failed: run batches of the store with failed cases again.
        progress: a bar on a terminal, a line a minute in the log "meanfield" elsewhere.

    Returns:
        Dataset with the dimension `case`, the parameters as coordinates along it, the variables,
        `status` (0 pending, 1 ok, 2 not converged, 3 failed) and `message`. A case that raises
        holds NaN and its message; the others go on. `results.to_cube` gives one dimension per
        parameter.

    Raises:
        ValueError, TypeError: a grid or a function that does not fit, results that are not what
            the task declares, a store of another configuration (the message names the fields).
        OSError: the store cannot be written; finished batches are kept.
        RuntimeError: worker processes keep dying; finished batches are kept.

    Example:
        >>> ds = sweep(lambda x, power: {"y": x**power}, {"x": [2.0, 3.0]}, fixed={"power": 2})
        >>> ds["y"].values
        array([4., 9.])
    """
    check_executor(executor)
    _check_settings(store, shard, batch_size)
    plan = make_plan(fn, grid, fixed, seed, attrs)
    n_workers = n_workers_of(executor) * (shard[1] if shard else 1)
    if store is None:
        size = batch_size or choose_batch_size(plan, n_workers)
        values = _run_in_memory(plan, executor, size, progress)
        return _assemble(plan, values, provenance(**plan.record))
    parts = _prepare_store(Path(store).absolute(), plan, batch_size, n_workers)
    if retry_failed:
        for part in parts:
            part.forget_failed()
    _run_missing(parts, plan, executor, shard or (0, 1), progress)
    return _assemble(plan, read_values(parts, plan), provenance_of(parts[0].path))


def _run_in_memory(plan: Plan, executor: Any, size: int, progress: bool) -> dict[str, np.ndarray]:
    values = plan.task.blank(len(plan.cases))
    jobs = [
        Job(plan.task, plan.cases[i : i + size], plan.fixed, plan.seed, i // size, size)
        for i in range(0, len(plan.cases), size)
    ]
    with Progress(len(plan.cases), visible=progress) as bar:

        def keep(report: Report) -> None:
            start = report.job.batch * size
            for name, array in (report.values or {}).items():
                values[name][start : start + len(array)] = array
            bar.advance(report.status)

        run_jobs(jobs, executor, keep)
    return values


def _prepare_store(path: Path, plan: Plan, size: int | None, n_workers: int) -> list[Part]:
    """The parts of the store, which together hold all cases of the plan."""
    parts = open_store(path, plan)
    if not parts:
        create_part(path, plan, size or choose_batch_size(plan, n_workers))
        parts = open_store(path, plan)  # whoever made it: another process may have been first
    stored = np.concatenate([part.keys for part in parts])
    missing = np.flatnonzero(~np.isin(plan.keys, stored))
    if len(missing):
        more = replace(plan, cases=[plan.cases[i] for i in missing])
        parts.append(create_part(path, more, size or choose_batch_size(more, n_workers)))
    return parts


def _run_missing(
    parts: list[Part], plan: Plan, executor: Any, shard: tuple[int, int], progress: bool
) -> None:
    """Run the batches that are not done, hold a case of the plan and belong to this shard."""
    jobs = [job for part in parts for job in _jobs(part, plan, shard)]
    n_missing = sum(len(job.cases) for job in jobs)
    total = max(len(plan.cases) // shard[1], n_missing)
    with Progress(total, done=total - n_missing, visible=progress) as bar:
        run_jobs(jobs, executor, lambda report: bar.advance(report.status))


def _jobs(part: Part, plan: Plan, shard: tuple[int, int]) -> list[Job]:
    wanted = np.isin(part.keys, plan.keys)
    pending = [
        int(batch)
        for batch in np.flatnonzero(~part.done())
        if batch % shard[1] == shard[0] and wanted[part.rows(int(batch))].any()
    ]
    cases = part.cases() if pending else []
    return [
        Job(
            plan.task,
            cases[part.rows(batch)],
            plan.fixed,
            plan.seed,
            batch,
            part.batch_size,
            part.path,
        )
        for batch in pending
    ]


def _assemble(plan: Plan, values: Mapping[str, np.ndarray], record: str) -> xr.Dataset:
    """The labelled Dataset of a sweep from the arrays of all its cases."""
    ds = xr.Dataset(
        {v.name: (("case", *v.dims), values[v.name], v.attrs) for v in plan.task.variables},
        coords=_coordinates(plan),
        attrs={**plan.attrs, "provenance": record},
    )
    ds["status"] = ("case", values["status"], dict(STATUS_ATTRS))
    ds["message"] = ("case", values["message"], dict(MESSAGE_ATTRS))
    return ds


def _coordinates(plan: Plan) -> dict[str, Any]:
    labels = {v.name: v.attrs for v in plan.task.parameters}
    coords: dict[str, Any] = {
        name: ("case", column, labels.get(name, Variable.unlabelled(name).attrs))
        for name, column in columns_of(plan.cases).items()
    }
    for name, column in plan.task.coords.items():
        coords[name] = (name, column, labels.get(name, Variable.unlabelled(name).attrs))
    return coords


def _check_settings(store: object, shard: tuple[int, int] | None, size: int | None) -> None:
    if size is not None and size < 1:
        raise ValueError(f"batch_size: expected at least 1 case, got {size}")
    if shard is None:
        return
    if store is None:
        raise ValueError("shard: expected a store, in which the shards meet, got store=None")
    if not 0 <= shard[0] < shard[1]:
        raise ValueError(f"shard: expected (i, k) with 0 ≤ i < k, got {shard}")
