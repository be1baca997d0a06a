"""Progress: a bar on a terminal, a line of the log a minute elsewhere."""

from __future__ import annotations

import logging
import sys
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
        self._total, self._done, self._at_start = total, done, done
        self._failed = self._not_converged = 0
        self._visible = visible
        self._start = self._last_line = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Progress:
        from tqdm import tqdm

        # None: no bar unless standard error is a terminal, so that logs stay readable.
        disable = None if self._visible else True
        self._bar = tqdm(
            total=self._total, initial=self._done, unit="case", disable=disable, file=sys.stderr
        )
        return self

    def advance(self, status: np.ndarray) -> None:
        """Count a finished batch by the status of its cases."""
        self._done += len(status)
        self._failed += int(np.sum(status == FAILED))
        self._not_converged += int(np.sum(status == NOT_CONVERGED))
        self._bar.update(len(status))
        if self._failed or self._not_converged:
            self._bar.set_postfix(failed=self._failed, not_converged=self._not_converged)
        now = time.monotonic()
        if self._bar.disable and now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
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
        trouble = self._failed + self._not_converged
        if trouble and kind is None:
            _log.warning(
                "%d of %d cases failed and %d did not converge; `status` and `message` say which",
                self._failed,
                self._done - self._at_start,
                self._not_converged,
            )

    def _say(self) -> None:
        elapsed = time.monotonic() - self._start
        speed = (self._done - self._at_start) / max(elapsed, 1e-9)
        left = f"{(self._total - self._done) / speed:.0f} s left" if speed else "no case yet"
        _log.info(
            "sweep: %d of %d cases, %.0f s, %s%s",
            self._done,
            self._total,
            elapsed,
            left,
            f", {self._failed} failed" if self._failed else "",
        )
