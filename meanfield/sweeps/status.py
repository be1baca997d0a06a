"""What a store holds: how many cases are done, what failed, what is damaged."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meanfield.checks import as_path
from meanfield.results.cases import FAILED, NOT_CONVERGED, OK
from meanfield.results.labels import printable
from meanfield.results.store import Store

_MESSAGES_SHOWN = 5


@dataclass(frozen=True)
class StoreStatus:
    """Counts of a store; `str` gives a paragraph.

    Attributes:
        damaged: names of files whose content is not what was written.
        missing: names of files that were written and are not there.
        messages: how many cases failed with each message.
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
        """Whether every case is finished, and no file that names cases is lost or damaged."""
        lost = any(name.startswith("grid") for name in (*self.damaged, *self.missing))
        return self.n_done == self.n_cases and not lost

    def __str__(self) -> str:
        function, seed = (self.configuration.get(name, "?") for name in ("function", "seed"))
        lines = [
            f"{self.path}: {function}, seed {seed}",
            f"  {self.n_done} of {self.n_cases} cases done ({self.n_files} files): {self.n_ok} "
            f"ok, {self.n_not_converged} not converged, {self.n_failed} failed",
            *(f"  damaged: {name}" for name in self.damaged),
            *(f"  missing: {name}" for name in self.missing),
        ]
        shown = list(self.messages.items())[:_MESSAGES_SHOWN]
        lines += [f"  {count} × {message}" for message, count in shown]
        if len(self.messages) > len(shown):
            lines.append(f"  and {len(self.messages) - len(shown)} other messages")
        return "\n".join(map(printable, lines))


def status(store: str | os.PathLike[str]) -> StoreStatus:
    """Count the cases of a store, which may be in use, and check every file of it.

    Raises:
        FileNotFoundError, ValueError: nothing, or something else, is at the path.
    """
    path = as_path(store, "store")
    files = Store.at(path)
    rows = files.rows()
    counts = np.bincount(rows["status"], minlength=4)
    messages = Counter(str(text) for text in rows["message"] if text)
    return StoreStatus(
        path=path,
        n_cases=len(rows["status"]),
        n_ok=int(counts[OK]),
        n_not_converged=int(counts[NOT_CONVERGED]),
        n_failed=int(counts[FAILED]),
        n_files=len(files.files),
        damaged=tuple(files.damaged),
        missing=tuple(files.missing),
        configuration=files.description["configuration"],
        messages=dict(messages.most_common()),
    )
