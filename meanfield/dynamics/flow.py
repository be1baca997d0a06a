"""Particles through depth, as a Dataset."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from meanfield.dynamics.clocks import TIME
from meanfield.dynamics.integrators import Adaptive, Noise
from meanfield.dynamics.resuming import Checkpoints
from meanfield.dynamics.trajectories import FlowProblem, State, flow_problem, states
from meanfield.measures import MeasureMap, ParticleMeasure
from meanfield.results import Variable
from meanfield.results.labels import dataset
from meanfield.results.provenance import provenance

__all__ = ["flow"]

Observables = Mapping[Variable, Callable[[ParticleMeasure], Any]]

_EVALUATIONS = Variable(
    "evaluations", "evaluations of the velocity since the start", dims=("time",), dtype="int64"
)


@torch.no_grad()
def flow(
    F: MeasureMap | Sequence[MeasureMap],
    mu: ParticleMeasure,
    times: Any,
    *,
    method: str | Adaptive = "rk4",
    step: float | None = None,
    constraint: str | None = None,
    noise: Noise | None = None,
    coalesce: float = 0.0,
    observe: Mapping[str | Variable, Callable[[ParticleMeasure], Any]] | None = None,
    keep_points: bool = True,
    store: str | os.PathLike[str] | None = None,
) -> xr.Dataset:
    """The flow ẋ = P_x Γ_{μ_t}(x), that is ∂μ + div(μ P Γ_μ) = 0, at chosen times.

    Layers of a residual network are its Euler steps ([GLPR23], [SABP22]). Weights and positions
    do not change. Memory does not grow with the number of steps.

    Args:
        F: Γ as a map of measures, whose image of xᵢ is Γ_μ(xᵢ); or a sequence of them, of which
            the k-th acts for k ≤ t < k + 1, so that "euler" with step 1 is the network
            x ↦ x + F_k(x).
        mu: μ at the first time. Leading axes are a batch.
        times: increasing numbers, the first is the start; see `log_clock`.
        method: "rk4" (order 4), "euler" (order 1), "dopri5", "dop853", or `Adaptive` with
            settings.
        step: largest step of "rk4" and "euler"; the distance of the times if None.
        constraint: None (R^d); "sphere" (each particle keeps its norm: P_x = I − xxᵀ/|x|²);
            "layer_norm" (besides, its coordinates have mean 0). See `placed`.
        noise: Brownian motion besides, with method "euler".
        coalesce: atoms joined by steps of at most this length become one, which moves for all of
            them; looked for after each time, and after each step of an adaptive method, which
            then takes long steps through metastable stages: inside clusters its stability would
            forbid them. The error is of this length, times what the flow expands.
        observe: functions of a measure to keep along the flow, by name, or by a
            `results.Variable` that labels them and names the dimensions of arrays. Their value
            has the shape ``(*batch, *dims)``.
        keep_points: whether the Dataset has the particles.
        store: a folder to which each time is written when it is reached. The same call again
            goes on where the last was killed and ends with the same bits.

    Returns:
        Dataset: `points` (time, particle, feature), `log_weights` (particle), `positions` if any,
        `evaluations` (time) of the velocity, what was observed. A batch adds the dimension `case`
        after `time`, its axes in one.

    Raises:
        ValueError, TypeError: arguments that do not fit; a store of another flow.
        OverflowError: particles leave the range of their dtype.
        ConvergenceError: an adaptive method does not get on.

    Example:
        >>> from meanfield import AttentionParameters, SelfAttention
        >>> F = SelfAttention(AttentionParameters.from_bilinear([[0.0]], [[1.0]]))
        >>> ds = flow(F, ParticleMeasure([[1.0], [3.0]]), [0.0, 1.0], step=0.1)
        >>> ds.points.values[-1, :, 0]  # the mean 2 grows to 2e, gaps stay
        array([4.4365..., 6.4365...])
    """
    problem = flow_problem(
        F, mu, times, method=method, step=step, constraint=constraint, noise=noise,
        coalesce=coalesce,
    )  # fmt: skip
    observables = _labelled(observe or {})
    checkpoints = None
    records: list[dict[str, np.ndarray]] = []
    reached = None
    if store is not None:
        names = sorted(v.name for v in observables)
        description = _description(problem) | {"observe": names, "keep_points": keep_points}
        checkpoints = Checkpoints(store, description, _probe(problem))
        reached = _resume(problem, checkpoints, records)
    for state in states(problem, reached):
        records.append(_record(problem, state, observables, keep_points))
        if checkpoints is not None:
            checkpoints.save(len(records) - 1, records[-1], _saved(problem, state))
    return _assembled(problem, observables, records, keep_points)


def _labelled(observe: Mapping[str | Variable, Callable[..., Any]]) -> Observables:
    labelled = {
        Variable.unlabelled(key) if isinstance(key, str) else key: function
        for key, function in observe.items()
    }
    taken = {"time", "points", "log_weights", "positions", "evaluations"}
    for variable in labelled:
        if variable.name in taken:
            raise ValueError(f"observe: the name {variable.name!r} is taken; use another")
        taken.add(variable.name)
    return labelled


def _record(
    problem: FlowProblem, state: State, observables: Observables, keep_points: bool
) -> dict[str, np.ndarray]:
    measure = problem.measure_at(state)
    record = {"evaluations": np.array(state.evaluations)}
    if keep_points:
        record["points"] = measure.points.cpu().numpy()
    for variable, function in observables.items():
        value = function(measure)
        array = value.cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
        if array.ndim != len(measure.batch_shape) + len(variable.dims):
            raise ValueError(
                f"observe {variable.name!r}: expected a value of shape "
                f"{(*measure.batch_shape, *variable.dims)}, got {array.shape}; name the "
                "dimensions of arrays with a results.Variable"
            )
        record[variable.name] = array
    return record


# --- what goes to disk and comes back ---


def _description(problem: FlowProblem) -> dict[str, Any]:
    noise = problem.noise
    mu = problem.start
    arrays = (mu.points, mu.log_weights, mu.positions)
    return {
        "times": problem.times.tolist(),
        "method": str(problem.integrator),
        "constraint": problem.constraint,
        "coalesce": problem.coalesce,
        "temperature": None if noise is None else noise.temperature,
        "layers": None if problem.layers.shared else len(problem.layers.maps),
        "dtype": str(mu.dtype).removeprefix("torch."),
        "start": _digest([None if a is None else a.cpu().numpy() for a in arrays]),
        "generator": None if noise is None else _digest([noise.generator.get_state().numpy()]),
    }


def _digest(arrays: Sequence[np.ndarray | None]) -> str:
    hashed = hashlib.sha256()
    for array in arrays:
        hashed.update(b"none" if array is None else repr(array.shape).encode())
        hashed.update(b"" if array is None else np.ascontiguousarray(array).tobytes())
    return hashed.hexdigest()


def _probe(problem: FlowProblem) -> dict[str, np.ndarray]:
    """Each map by its image of the start: a map of measures has no other name."""
    images = (F(problem.start).points.cpu().numpy() for F in problem.layers.maps)
    return {f"F[{k}]": image for k, image in enumerate(images)}


def _saved(problem: FlowProblem, state: State) -> dict[str, np.ndarray]:
    saved = {"time": np.array(state.time), "points": state.points.cpu().numpy()}
    saved["evaluations"] = np.array(state.evaluations)
    saved["step"] = np.array(math.nan if state.step is None else state.step)
    if state.labels is not None:
        saved["labels"] = state.labels.cpu().numpy()
    if problem.noise is not None:
        saved["generator"] = problem.noise.generator.get_state().numpy()
    return saved


def _resume(
    problem: FlowProblem, checkpoints: Checkpoints, records: list[dict[str, np.ndarray]]
) -> State | None:
    """The state a store has come to, its records put into the list."""
    found = checkpoints.load()
    if found is None:
        return None
    saved, stored = found
    records.extend(stored)
    device = problem.start.device
    if problem.noise is not None:
        problem.noise.generator.set_state(torch.as_tensor(saved["generator"]))
    labels = torch.as_tensor(saved["labels"], device=device) if "labels" in saved else None
    step = float(saved["step"])
    return State(
        float(saved["time"]),
        torch.as_tensor(saved["points"], device=device),
        labels,
        int(saved["evaluations"]),
        None if math.isnan(step) else step,
    )


# --- the Dataset ---


def _assembled(
    problem: FlowProblem,
    observables: Observables,
    records: list[dict[str, np.ndarray]],
    keep_points: bool,
) -> xr.Dataset:
    mu = problem.start
    case = ("case",) if mu.batch_shape else ()
    kind = str(mu.dtype).removeprefix("torch.")
    variables = [_EVALUATIONS]
    if keep_points:
        dims = ("time", *case, "particle", "feature")
        variables.append(Variable("points", "where the particles are", dims=dims, dtype=kind))
    for v in observables:
        dims = ("time", *case, *v.dims)
        variables.append(Variable(v.name, v.long_name, v.units, dims, v.dtype, v.symbol))
    batch = len(mu.batch_shape)
    values = {v.name: _stacked(records, v.name, batch) for v in variables}
    fixed = {"log_weights": ("logarithm of the weights", mu.log_weights)}
    if mu.positions is not None:
        fixed["positions"] = ("positions", mu.positions)
    for name, (meaning, tensor) in fixed.items():
        variables.append(Variable(name, meaning, dims=(*case, "particle"), dtype=kind))
        values[name] = _merged(tensor.cpu().numpy()[None], batch)[0]
    spec = {k: v for k, v in _description(problem).items() if k not in ("times", "generator")}
    spec["maps"] = [type(F).__name__ for F in problem.layers.maps]
    record = provenance(spec, dtype=mu.dtype, device=mu.device)
    coords = {"time": (TIME, problem.times)}
    return dataset(variables, values, coords=coords, attrs={"provenance": record})


def _stacked(records: list[dict[str, np.ndarray]], name: str, batch: int) -> np.ndarray:
    stacked = np.stack([record[name] for record in records])
    return stacked if name == "evaluations" else _merged(stacked, batch)


def _merged(array: np.ndarray, batch: int) -> np.ndarray:
    """Batch axes, which follow the first, in one."""
    return array.reshape(array.shape[0], -1, *array.shape[1 + batch :]) if batch else array
