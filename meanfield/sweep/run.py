"""The sweep: plan, run what is missing, hand back one labelled Dataset."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import xarray as xr

from meanfield.results import Variable, provenance
from meanfield.sweep.grid import Grid, columns_of
from meanfield.sweep.plan import Plan, batch_size, make_plan
from meanfield.sweep.progress import Progress
from meanfield.sweep.task import Task, compute

__all__ = ["sweep"]

_STATUS = {
    "long_name": "how the case ended",
    "units": "1",
    "flag_values": np.arange(4, dtype=np.int8),
    "flag_meanings": "pending ok not_converged failed",
}


def sweep(
    fn: Task | Callable[..., Mapping[str, Any]],
    grid: Grid,
    *,
    fixed: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> xr.Dataset:
    """f(case) for every case of a grid, as one labelled Dataset in long form.

    Args:
        fn: called with the parameters of a case by name; returns a mapping from variable name to
            value. A plain function returns numbers; a `Task` adds labels, arrays, vectorisation.
        grid: parameter name -> values (all combinations, the last name fastest), or a list of
            dicts (a ragged grid).
        fixed: settings that are the same in each case, passed by name; in the provenance.
        seed: of the whole. Each case has its own, see `case_seed`, from this and its parameters.

    Returns:
        Dataset with the dimension `case`, the parameters as coordinates along it, the variables,
        `status` (0 pending, 1 ok, 2 not converged, 3 failed) and `message`. A case that raises
        holds NaN and its message; the others go on. `results.to_cube` gives one dimension per
        parameter.

    Raises:
        ValueError, TypeError: a grid or a function that does not fit, or results that are not
            what the task declares.

    Example:
        >>> ds = sweep(lambda x, power: {"y": x**power}, {"x": [2.0, 3.0]}, fixed={"power": 2})
        >>> ds["y"].values
        array([4., 9.])
    """
    plan = make_plan(fn, grid, fixed, seed)
    values = plan.task.blank(len(plan.cases))
    size = batch_size(plan, 1)
    with Progress(len(plan.cases)) as progress:
        for start in range(0, len(plan.cases), size):
            part = compute(plan.task, plan.cases[start : start + size], plan.fixed, plan.seed)
            for name, array in part.items():
                values[name][start : start + size] = array
            progress.advance(part["status"])
    return assemble(plan, values)


def assemble(plan: Plan, values: Mapping[str, np.ndarray]) -> xr.Dataset:
    """The labelled Dataset of a sweep from the arrays of all its cases."""
    task = plan.task
    ds = xr.Dataset(
        {v.name: (("case", *v.dims), values[v.name], v.attrs) for v in task.variables},
        coords=_coordinates(plan),
        attrs={"provenance": provenance(plan.configuration, seed=plan.seed)},
    )
    ds["status"] = ("case", values["status"], _STATUS)
    ds["message"] = ("case", values["message"], {"long_name": "why it failed", "units": "1"})
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
