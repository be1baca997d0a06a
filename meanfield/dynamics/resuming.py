"""A long flow on disk: one file a time, a state to go on from, and which flow it is."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from meanfield.dynamics.trajectories import FlowProblem, State
from meanfield.results.atomic import remove_litter, write_whole

__all__ = ["Checkpoints", "description"]

_STATE, _IDENTITY = "state.npz", "flow.npz"


class Checkpoints:
    """A folder with the records of a flow, whole or absent whenever the process dies.

    Args:
        folder: made if it is not there.
        problem: the flow.
        kept: what is recorded of it, as plain data.

    Raises:
        ValueError: the folder holds another flow; the message names the fields.
    """

    def __init__(
        self, folder: str | os.PathLike[str], problem: FlowProblem, kept: Mapping[str, Any]
    ) -> None:
        self._folder, self._problem = Path(folder), problem
        self._folder.mkdir(parents=True, exist_ok=True)
        remove_litter(self._folder)
        # A map of measures has no description: its image of the start stands for it.
        images = (F(problem.start).points.cpu().numpy() for F in problem.layers.maps)
        probe = {f"F[{k}]": image for k, image in enumerate(images)}
        text = json.dumps({**description(problem), **kept}, sort_keys=True)
        if (self._folder / _IDENTITY).exists():
            self._compare(text, probe)
        else:
            self._write(_IDENTITY, {**probe, "description": np.array(text)})

    def load(self) -> tuple[State | None, list[dict[str, np.ndarray]]]:
        """The last state, None if there is none yet, and the records up to it."""
        if not (self._folder / _STATE).exists():
            return None, []
        saved = self._read(_STATE)
        records = [self._read(_record(k)) for k in range(int(saved["index"]) + 1)]
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

    def save(self, index: int, record: Mapping[str, np.ndarray], state: State) -> None:
        """Keep the record of a time, then the state to go on from, which says that it counts."""
        saved = {"index": np.array(index), "time": np.array(state.time)}
        saved["points"] = state.points.cpu().numpy()
        saved["evaluations"] = np.array(state.evaluations)
        saved["step"] = np.array(math.nan if state.step is None else state.step)
        if state.labels is not None:
            saved["labels"] = state.labels.cpu().numpy()
        if self._problem.noise is not None:
            saved["generator"] = self._problem.noise.generator.get_state().numpy()
        self._write(_record(index), record)
        self._write(_STATE, saved)

    def _compare(self, text: str, probe: Mapping[str, np.ndarray]) -> None:
        found = self._read(_IDENTITY)
        then, now = json.loads(str(found["description"])), json.loads(text)
        changed = [k for k in sorted({*then, *now}) if then.get(k) != now.get(k)]
        for name, array in probe.items():
            same = name in found and found[name].shape == array.shape
            # Another machine may round images differently.
            if not (same and np.allclose(found[name], array, rtol=1e-6, atol=1e-12)):
                changed.append(name)
        if changed:
            raise ValueError(
                f"store {self._folder} holds another flow: {', '.join(changed)} differ; give "
                "another folder, or delete this one"
            )

    def _read(self, name: str) -> dict[str, np.ndarray]:
        path = self._folder / name
        try:
            with np.load(path, allow_pickle=False) as data:
                return dict(data)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(
                f"store {self._folder}: {name} cannot be read ({error}); delete the folder and "
                "begin again"
            ) from error

    def _write(self, name: str, arrays: Mapping[str, np.ndarray]) -> None:
        content = io.BytesIO()
        np.savez(content, **arrays)  # type: ignore[arg-type]
        write_whole(self._folder / name, content.getbuffer())


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
        "start": _digest([None if a is None else a.cpu().numpy() for a in arrays]),
        "generator": None if noise is None else _digest([noise.generator.get_state().numpy()]),
    }


def _digest(arrays: Sequence[np.ndarray | None]) -> str:
    hashed = hashlib.sha256()
    for array in arrays:
        hashed.update(b"none" if array is None else repr(array.shape).encode())
        hashed.update(b"" if array is None else np.ascontiguousarray(array).tobytes())
    return hashed.hexdigest()


def _record(index: int) -> str:
    return f"time-{index:06d}.npz"
