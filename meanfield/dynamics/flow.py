"""Particles through depth, as a Dataset."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import xarray as xr

from meanfield.checks import as_bool, count, describe, name_of, number, to_host, without_autocast
from meanfield.dynamics.integrators import Adaptive, integrator_of
from meanfield.dynamics.trajectories import TIME, FlowProblem, checked_times
from meanfield.habits import is_function, with_hints
from meanfield.maps.map import as_map
from meanfield.measures import MeasureMap, ParticleMeasure
from meanfield.results import Variable
from meanfield.results.labels import dataset, fitting
from meanfield.results.provenance import provenance
from meanfield.results.shapes import as_dataset

Observables = dict[Variable, Callable[[ParticleMeasure], Any]]

# What the Dataset of a flow has of a measure at one time, and the dimensions behind its batch.
_MEASURED = {
    "points": ("particle", "feature"),
    "log_weights": ("particle",),
    "positions": ("particle",),
}
_EVALUATIONS = Variable(
    "evaluations", "evaluations of the velocity since the start", dims=("time",), dtype="int64"
)


@with_hints
@without_autocast
@torch.no_grad()
def flow(
    F: MeasureMap,
    mu: ParticleMeasure,
    times: Any,
    *,
    method: str | Adaptive = "dopri5",
    step: float | None = None,
    constraint: str | None = None,
    coalesce: float = 0.0,
    observe: Mapping[str | Variable, Callable[[ParticleMeasure], Any]] | None = None,
    keep_points: bool = True,
) -> xr.Dataset:
    """The flow ẋ = P_x Γ_{μ_t}(x), that is ∂μ + div(μ P Γ_μ) = 0, at chosen times.

    Layers of a residual network that share their weights are its Euler steps ([GLPR23], [SABP22]).
    Weights and positions do not change. Memory does not grow with the number of steps. Many small
    clouds, as for a phase diagram, belong in one batch: of 16 atoms a flow in a batch of 1,000
    takes a twentieth to a fiftieth of the time of one alone.

    Args:
        F: Γ as a map of measures, whose image of xᵢ is Γ_μ(xᵢ).
        mu: μ at the first time. Leading axes are a batch.
        times: increasing numbers, the first is the start. Metastable stages last about
            e^β: ``np.append(0, np.geomspace(0.01, 1e4, 40))`` sees them all.
        method: "dopri5" or "dop853", which choose their steps, or `Adaptive` with settings; "rk4"
            (order 4) or "euler" (order 1), whose error is that of their step.
        step: largest step of "rk4" and "euler", which need one; None for the others.
        constraint: None (R^d), or "sphere" (each particle keeps its norm: P_x = I − xxᵀ/|x|²).
        coalesce: atoms that are all within this distance of each other are merged (checked after
            each step); a longer chain stays until it has contracted. Removes the stiffness of
            collapsed clusters; the error is about this distance times the expansion of the flow.
        observe: functions of a measure whose values are kept along the flow, by name, or by a
            `results.Variable` that labels them and names the dimensions of arrays. A value has
            the shape ``(*batch, *dims)``.
        keep_points: whether the particles are kept.

    Returns:
        Dataset: `points` (time, particle, feature), `log_weights` (particle), `positions` if any,
        `evaluations` (time) of the velocity, and what was observed. The axes of a batch become one
        dimension `case`, after `time`.

    Raises:
        ValueError, TypeError: arguments that do not fit.
        OverflowError: particles leave the range of their dtype.
        ConvergenceError: an adaptive method needs too many steps, or steps below rounding.

    Example:
        >>> from meanfield import AttentionParameters, SelfAttention
        >>> F = SelfAttention(AttentionParameters.from_bilinear([[0.0]], [[1.0]]))
        >>> ds = flow(F, ParticleMeasure([[1.0], [3.0]]), [0.0, 1.0])
        >>> ds.points.values[-1, :, 0]  # the mean 2 grows to 2e, gaps stay
        array([4.43656..., 6.43656...])
    """
    clock = checked_times(times)
    problem = FlowProblem(
        mu,
        as_map(F),
        clock,
        integrator_of(method, step),
        constraint,
        number(coalesce, "coalesce", least=0),
    )
    observables = _labelled(observe or {})
    if as_bool(keep_points, "keep_points"):
        kind = str(mu.dtype).removeprefix("torch.")
        points = Variable(
            "points", "where the particles are", dims=("particle", "feature"), dtype=kind
        )
        observables[points] = lambda measure: measure.points
    records = [_record(*state, observables) for state in problem.states()]
    return _assembled(problem, observables, records)


def _labelled(observe: Mapping[str | Variable, Callable[..., Any]]) -> Observables:
    if not isinstance(observe, Mapping):
        raise TypeError(f'observe: expected {{"name": function}}, got {describe(observe)}')
    labelled = {
        Variable.unlabelled(key) if isinstance(key, str) else key: function
        for key, function in observe.items()
    }
    taken = {"points", "log_weights", "positions", "evaluations"}
    taken |= {"time", "case", "particle", "feature"}  # dimensions
    for variable, function in labelled.items():
        if not is_function(function):
            raise TypeError(
                f"observe {variable.name!r}: expected a function of a measure, "
                f"got {describe(function)}"
            )
        if variable.name in taken:
            raise ValueError(f"observe: the name {variable.name!r} is taken; use another")
        taken.add(variable.name)
    return labelled


def _record(
    measure: ParticleMeasure, evaluations: int, observables: Observables
) -> dict[str, np.ndarray]:
    record = {"evaluations": np.array(evaluations)}
    for variable, function in observables.items():
        value = function(measure)
        # A copy: the function may fill its own array anew.
        array = np.asarray(fitting(variable, value, tuple(np.shape(value))))
        if array.ndim != len(measure.batch_shape) + len(variable.dims):
            raise ValueError(
                f"observe {variable.name!r}: expected a value of shape "
                f"{(*measure.batch_shape, *variable.dims)}, got {array.shape}; name the "
                "dimensions of arrays with a results.Variable"
            )
        record[variable.name] = array
    return record


def _assembled(
    problem: FlowProblem, observables: Observables, records: list[dict[str, np.ndarray]]
) -> xr.Dataset:
    mu = problem.start
    case = ("case",) if mu.batch_shape else ()
    kind = str(mu.dtype).removeprefix("torch.")
    fixed = {"log_weights": ("logarithm of the weights", mu.log_weights)}
    if mu.positions is not None:
        fixed["positions"] = ("positions", mu.positions)
    in_time = (replace(v, dims=("time", *case, *v.dims)) for v in observables)
    variables = [_EVALUATIONS, *in_time]
    values = {v.name: np.stack([record[v.name] for record in records]) for v in variables}
    for name, (meaning, tensor) in fixed.items():
        variables.append(Variable(name, meaning, dims=(*case, "particle"), dtype=kind))
        values[name] = to_host(tensor)
    if case:  # batch axes in one
        depth = len(mu.batch_shape)
        for v in variables[1:]:
            array, first = values[v.name], v.dims.index("case")
            shape = (*array.shape[:first], -1, *array.shape[first + depth :])
            values[v.name] = array.reshape(shape)
    spec = {
        "map": name_of(problem.map),
        "method": str(problem.integrator),
        "constraint": problem.constraint,
        "coalesce": problem.coalesce,
    }
    record = provenance(spec, dtype=mu.dtype, device=mu.device)
    coords = {"time": (TIME, problem.times)}
    return dataset(variables, values, coords=coords, attrs={"provenance": record})


@with_hints
def measure_at(ds: xr.Dataset, index: int) -> ParticleMeasure:
    """The measure of a flow at the index-th of its times.

    Args:
        ds: of `flow`, with its points.
        index: of the time; negative ones count from the end.
    """
    held_by = as_dataset(ds).variables
    if not {"points", "log_weights"} <= {*held_by} or "time" not in held_by["points"].dims:
        raise ValueError(
            "ds: expected the Dataset of a flow with its points, keep_points=True, got one with "
            f"{list(ds.variables)} and the dimensions {dict(ds.sizes)}"
        )
    last = ds.sizes["time"] - 1
    index = count(index, "index", least=-last - 1)
    if index > last:
        raise IndexError(
            f"index: expected one of the {last + 1} times, at most {last}, got {index}"
        )
    at, held = ds.isel(time=index), {}
    batch = [d for d in at["points"].dims if d not in _MEASURED["points"]]
    for name, dims in _MEASURED.items():
        if name in at:
            sizes = {d: at.sizes[d] for d in batch if d not in at[name].dims}
            held[name] = torch.tensor(at[name].expand_dims(sizes).transpose(*batch, *dims).values)
    return ParticleMeasure(
        held["points"], log_weights=held["log_weights"], positions=held.get("positions")
    )
