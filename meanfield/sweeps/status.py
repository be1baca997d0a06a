"""What is in a store: how far it is, what failed, what it was begun with; and its export."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meanfield.results import read, write
from meanfield.sweeps.store import configuration_of, parts_at
from meanfield.sweeps.task import FAILED, NOT_CONVERGED, OK

__all__ = ["StoreStatus", "export", "status"]

_MESSAGES_SHOWN = 5


@dataclass(frozen=True)
class StoreStatus:
    """Counts of a store; `str` is a paragraph for people."""

    path: Path
    n_cases: int
    n_ok: int
    n_not_converged: int
    n_failed: int
    n_batches: int
    n_batches_done: int
    configuration: dict[str, Any]
    messages: dict[str, int]

    @property
    def n_done(self) -> int:
        """Cases of finished batches, failed ones included."""
        return self.n_ok + self.n_not_converged + self.n_failed

    @property
    def complete(self) -> bool:
        """Whether every batch is finished."""
        return self.n_batches_done == self.n_batches

    def __str__(self) -> str:
        lines = [
            f"{self.path}: {self.configuration.get('function', '?')}, "
            f"seed {self.configuration.get('seed', '?')}",
            f"  {self.n_done} of {self.n_cases} cases done "
            f"({self.n_batches_done} of {self.n_batches} batches): {self.n_ok} ok, "
            f"{self.n_not_converged} not converged, {self.n_failed} failed",
        ]
        shown = list(self.messages.items())[:_MESSAGES_SHOWN]
        lines += [f"  {count} × {message}" for message, count in shown]
        if len(self.messages) > len(shown):
            lines.append(f"  and {len(self.messages) - len(shown)} other messages")
        return "\n".join(lines)


def status(store: str | os.PathLike[str]) -> StoreStatus:
    """How far a store is; it may be in use.

    Raises:
        FileNotFoundError, ValueError: there is nothing, or no store of a sweep, at the path.
    """
    path = Path(store)
    configuration = configuration_of(path)
    parts = parts_at(path)
    ds = read(path)
    counts = np.bincount(ds["status"].values, minlength=4)
    messages = Counter(text for text in ds["message"].values if text)
    return StoreStatus(
        path,
        ds.sizes["case"],
        int(counts[OK]),
        int(counts[NOT_CONVERGED]),
        int(counts[FAILED]),
        sum(part.n_batches for part in parts),
        sum(int(part.done().sum()) for part in parts),
        configuration,
        dict(messages.most_common()),
    )


def export(store: str | os.PathLike[str], path: str | os.PathLike[str]) -> Path:
    """Write what a store holds to one netCDF file (``.nc``) or one plain Zarr folder.

    The file is whole or absent; the store stays. Cases that are not done are pending in it.

    Raises:
        FileNotFoundError, ValueError: there is nothing, or no store of a sweep, at the path.
    """
    configuration_of(Path(store))
    if Path(path).absolute() == Path(store).absolute():
        raise ValueError(f"path: expected another place than the store itself, {store}")
    return write(read(store), path)
