"""A long flow on disk: one file a time, a state to go on from, and what flow it is."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from meanfield.results.atomic import remove_litter, write_whole

__all__ = ["Checkpoints"]

_STATE, _IDENTITY = "state.npz", "flow.npz"


class Checkpoints:
    """A folder with the records of a flow, whole or absent whenever the process dies.

    The state, which says how many records count, is written after them.

    Args:
        folder: made if it is not there.
        description: what the flow is, as plain data; compared exactly.
        probe: arrays that stand for what has no description, such as a map; compared to 1e-6.

    Raises:
        ValueError: the folder holds another flow; the message names the fields.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        description: Mapping[str, Any],
        probe: Mapping[str, np.ndarray],
    ) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        remove_litter(self._folder)
        text = json.dumps(description, sort_keys=True)
        if (self._folder / _IDENTITY).exists():
            self._compare(text, probe)
        else:
            self._write(_IDENTITY, {**probe, "description": np.array(text)})

    def load(self) -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]] | None:
        """The state and the records up to it; None if there is no state yet."""
        if not (self._folder / _STATE).exists():
            return None
        state = self._read(_STATE)
        return state, [self._read(_record(k)) for k in range(int(state["index"]) + 1)]

    def save(
        self, index: int, record: Mapping[str, np.ndarray], state: Mapping[str, np.ndarray]
    ) -> None:
        """Keep the record of a time, then the state that goes on from it."""
        self._write(_record(index), record)
        self._write(_STATE, {**state, "index": np.array(index)})

    def _compare(self, text: str, probe: Mapping[str, np.ndarray]) -> None:
        found = self._read(_IDENTITY)
        then, now = json.loads(str(found["description"])), json.loads(text)
        changed = [k for k in sorted({*then, *now}) if then.get(k) != now.get(k)]
        for name, array in probe.items():
            same = name in found and found[name].shape == array.shape
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


def _record(index: int) -> str:
    return f"time-{index:06d}.npz"
