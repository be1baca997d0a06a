"""What is in a store: how far it is, what failed, what is damaged; and its export."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meanfield.results import read, write
from meanfield.results.labels import printable
from meanfield.results.stores import Store, read_description
from meanfield.sweeps.task import FAILED, NOT_CONVERGED, OK

__all__ = ["StoreStatus", "export", "status"]

_MESSAGES_SHOWN = 5


@dataclass(frozen=True)
class StoreStatus:
    """Counts of a store; `str` is a paragraph for people.

    Attributes:
        damaged: names of files whose content is not what was written.
        missing: names of files that were written and are not there.
    """

    path: Path
    n_cases: int
    n_ok: int
    n_not_converged: int
    n_failed: int
    n_files: int
    damaged: tuple[str, ...]
    missing: tuple[str, ...]
    configuration: dict[str, Any]
    messages: dict[str, int]

    @property
    def n_done(self) -> int:
        """Finished cases, failed ones included."""
        return self.n_ok + self.n_not_converged + self.n_failed

    @property
    def complete(self) -> bool:
        """Whether every case is finished."""
        return self.n_done == self.n_cases

    def __str__(self) -> str:
        lines = [
            f"{self.path}: {self.configuration.get('function', '?')}, "
            f"seed {self.configuration.get('seed', '?')}",
            f"  {self.n_done} of {self.n_cases} cases done ({self.n_files} files): {self.n_ok} "
            f"ok, {self.n_not_converged} not converged, {self.n_failed} failed",
        ]
        lines += [f"  damaged: {name}" for name in self.damaged]
        lines += [f"  missing: {name}" for name in self.missing]
        shown = list(self.messages.items())[:_MESSAGES_SHOWN]
        lines += [f"  {count} × {message}" for message, count in shown]
        if len(self.messages) > len(shown):
            lines.append(f"  and {len(self.messages) - len(shown)} other messages")
        return "\n".join(map(printable, lines))


def status(store: str | os.PathLike[str]) -> StoreStatus:
    """How far a store is; it may be in use. Every file is read and its checksum compared.

    Raises:
        FileNotFoundError, ValueError: there is nothing, or no store of a sweep, at the path.
    """
    path = Path(store)
    description = read_description(path)
    files = Store(path, description)
    rows = files.rows()
    counts = np.bincount(rows["status"], minlength=4)
    messages = Counter(str(text) for text in rows["message"] if text)
    return StoreStatus(
        path,
        len(rows["status"]),
        int(counts[OK]),
        int(counts[NOT_CONVERGED]),
        int(counts[FAILED]),
        len(files.files),
        tuple(files.damaged),
        tuple(files.missing),
        description["configuration"],
        dict(messages.most_common()),
    )


def export(store: str | os.PathLike[str], path: str | os.PathLike[str]) -> Path:
    """Write what a store holds to one netCDF file (``.nc``) or one plain Zarr folder.

    The file is whole or absent; the store stays. Cases that are not done are pending in it.

    Raises:
        FileNotFoundError, ValueError: there is nothing, or no store of a sweep, at the path.
        FileExistsError: something that this library has not written is at the new path.
    """
    return write(read(store), path)
