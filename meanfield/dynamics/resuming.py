"""A long flow on disk: one file a time, a state to go on from, and which flow it is."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from meanfield.checks import to_host
from meanfield.dynamics.constraints import constraint_at
from meanfield.dynamics.trajectories import FlowProblem, State
from meanfield.measures import ParticleMeasure
from meanfield.results.arrays import digest_of, read_arrays, write_arrays
from meanfield.results.atomic import make_folder, remove_litter

_STATE, _IDENTITY = "state.npz", "flow.npz"


class Checkpoints:
    """A folder with the records of a flow, whole or absent whenever the process dies.

    Each file has a digest of its own, and the state those of the records up to it and of the flow,
    so that a file that was damaged, exchanged or taken from another flow is refused by name.

    Args:
        folder: made if it is not there.
        problem: the flow.
        kept: what is recorded of it, as plain data.
        observables: by name, the functions whose values are recorded.

    Raises:
        ValueError: the folder holds another flow; the message names the fields.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        problem: FlowProblem,
        kept: Mapping[str, Any],
        observables: Mapping[str, Callable[[ParticleMeasure], Any]],
    ) -> None:
        self._folder, self._problem = Path(folder), problem
        make_folder(self._folder)
        remove_litter(self._folder)
        self._digests: list[str] = []
        probe = dict(_probe(problem, observables))
        text = json.dumps({**description(problem), **kept}, sort_keys=True)
        if (self._folder / _IDENTITY).exists():
            self._flow = self._compare(text, probe)
        else:
            identity = {**probe, "description": np.array(text)}
            self._flow = write_arrays(self._folder / _IDENTITY, identity)

    def load(self) -> tuple[State | None, list[dict[str, np.ndarray]]]:
        """The last state, None if there is none yet, and the records up to it."""
        if not (self._folder / _STATE).exists():
            return None, []
        saved = self._read(_STATE)
        if str(saved.get("flow")) != self._flow:
            raise ValueError(f"store {self._folder}: {_STATE} is that of another flow")
        self._digests = [str(digest) for digest in saved["records"]]
        records = [self._read(_record(k), digest) for k, digest in enumerate(self._digests)]
        device, noise = self._problem.start.device, self._problem.noise
        if noise is not None:
            noise.generator.set_state(torch.as_tensor(saved["generator"]))
        labels = torch.as_tensor(saved["labels"], device=device) if "labels" in saved else None
        step = float(saved["step"])
        state = State(
            float(saved["time"]),
            torch.as_tensor(saved["points"], device=device),
            labels,
            int(saved["evaluations"]),
            None if math.isnan(step) else step,
        )
        return state, records

    def save(self, record: Mapping[str, np.ndarray], state: State) -> None:
        """Keep the record of the next time, then the state to go on from, which counts it."""
        saved = {"flow": np.array(self._flow), "time": np.array(state.time)}
        saved["points"] = to_host(state.points)
        saved["evaluations"] = np.array(state.evaluations)
        saved["step"] = np.array(math.nan if state.step is None else state.step)
        if state.labels is not None:
            saved["labels"] = to_host(state.labels)
        if self._problem.noise is not None:
            saved["generator"] = to_host(self._problem.noise.generator.get_state())
        name = _record(len(self._digests))
        self._digests.append(write_arrays(self._folder / name, record))
        write_arrays(self._folder / _STATE, {**saved, "records": np.array(self._digests)})

    def _compare(self, text: str, probe: Mapping[str, np.ndarray]) -> str:
        """The digest of the flow that the folder holds, if it is this one."""
        found = self._read(_IDENTITY)
        then, now = json.loads(str(found.get("description", "{}"))), json.loads(text)
        changed = [k for k in sorted({*then, *now}) if then.get(k) != now.get(k)]
        for name, array in probe.items():
            same = name in found and found[name].shape == array.shape
            # Another machine may round images differently.
            close = same and np.allclose(found[name], array, rtol=1e-6, atol=1e-12, equal_nan=True)
            if not close:
                changed.append(name)
        if changed:
            raise ValueError(
                f"store {self._folder} holds another flow: {', '.join(changed)} differ; give "
                "another folder, or delete this one"
            )
        return digest_of(found)

    def _read(self, name: str, digest: str | None = None) -> dict[str, np.ndarray]:
        try:
            return read_arrays(self._folder / name, digest)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"store {self._folder}: {name} cannot be read ({error}); delete the folder and "
                "begin again"
            ) from error


def _probe(
    problem: FlowProblem, observables: Mapping[str, Callable[[ParticleMeasure], Any]]
) -> Iterator[tuple[str, np.ndarray]]:
    """What stands for functions, which have no description: their values at two measures.

    At the start alone maps may agree: the images of equal particles do not depend on the scores.
    """
    start = problem.start
    scatter = np.random.default_rng(0).standard_normal(tuple(start.points.shape))
    moved = start.points + torch.as_tensor(scatter).to(start.points)
    onto = constraint_at(problem.constraint, start.points)
    for name, mu in (("", start), (" scattered", start.replace(onto.retract(moved)))):
        for k, F in enumerate(problem.layers.maps):
            yield f"F[{k}]{name}", to_host(F(mu).points)
        for observed, function in observables.items():
            yield f"observe {observed}{name}", to_host(torch.as_tensor(function(mu)))


def description(problem: FlowProblem) -> dict[str, Any]:
    """What the flow is but for its maps, as plain data; large arrays by their digests."""
    noise, mu = problem.noise, problem.start
    arrays = (mu.points, mu.log_weights, mu.positions)
    return {
        "times": problem.times.tolist(),
        "method": str(problem.integrator),
        "constraint": problem.constraint,
        "coalesce": problem.coalesce,
        "temperature": None if noise is None else noise.temperature,
        "layers": None if problem.layers.shared else len(problem.layers.maps),
        "dtype": str(mu.dtype).removeprefix("torch."),
        "start": _digest([None if a is None else to_host(a) for a in arrays]),
        "generator": None if noise is None else _digest([to_host(noise.generator.get_state())]),
    }


def _digest(arrays: Sequence[np.ndarray | None]) -> str:
    hashed = hashlib.sha256()
    for array in arrays:
        hashed.update(b"none" if array is None else repr(array.shape).encode())
        hashed.update(b"" if array is None else np.ascontiguousarray(array).tobytes())
    return hashed.hexdigest()


def _record(index: int) -> str:
    return f"time-{index:06d}.npz"
