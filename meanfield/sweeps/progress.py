"""Progress by tqdm: its bar on a terminal, its words in the log once a minute elsewhere."""

from __future__ import annotations

import logging
import time
from types import TracebackType
from typing import Any

import numpy as np

from meanfield.sweeps.task import FAILED, NOT_CONVERGED

__all__ = ["Progress"]

_log = logging.getLogger("meanfield")
_log.addHandler(logging.NullHandler())
_SECONDS_BETWEEN_LINES = 60.0


class Progress:
    """Counts cases that are done and says so; a context manager."""

    def __init__(self, total: int, *, done: int = 0, visible: bool = True) -> None:
        from tqdm import tqdm

        self.total, self.done = total, done
        self._trouble = {FAILED: 0, NOT_CONVERGED: 0}
        self._start = self._last_line = time.monotonic()
        # None: no bar unless standard error is a terminal, so that logs stay readable.
        disable = None if visible else True
        self._bar: Any = tqdm(total=total, initial=done, unit="case", disable=disable)

    def __enter__(self) -> Progress:
        return self

    def advance(self, status: np.ndarray) -> None:
        """Count finished cases by their status."""
        self.done += len(status)
        for code in self._trouble:
            self._trouble[code] += int(np.sum(status == code))
        self._bar.update(len(status))
        if self._bar.disable and time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            self._say()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()
        if self._bar.disable:
            self._say()
        failed, not_converged = self._trouble.values()
        if failed + not_converged and kind is None:
            _log.warning(
                "%d of %d cases failed and %d did not converge; `status` and `message` say which",
                failed,
                self.done,
                not_converged,
            )

    def _say(self) -> None:
        elapsed = time.monotonic() - self._start
        meter = self._bar.format_meter(self.done, self.total, elapsed, ncols=79, ascii=True)
        _log.info("sweep: %s", meter)
