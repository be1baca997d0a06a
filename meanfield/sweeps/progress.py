"""Progress on standard error: a bar on a terminal, elsewhere a line a minute."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

import numpy as np

from meanfield.results.cases import FAILED, NOT_CONVERGED

_log = logging.getLogger("meanfield")
_log.addHandler(logging.NullHandler())
_SECONDS_BETWEEN_LINES = 60.0


class Progress:
    """Counts finished cases, some of them found in a store, and shows how many there are."""

    def __init__(self, total: int, *, done: int = 0, found: int = 0, visible: bool = True) -> None:
        from tqdm import tqdm

        self._total, self._n_before, self._counts = total, done, np.zeros(4, int)
        self._start = self._last_line = time.monotonic()
        # None: no bar unless standard error is a terminal, so that logs stay readable.
        disable = None if visible else True
        self._bar: Any = tqdm(total=total, initial=done, unit="case", disable=disable)
        self._lines = visible and self._bar.disable
        if visible and found:
            self._bar.write(f"{found} of {total} cases found", file=sys.stderr)

    def advance(self, status: np.ndarray) -> None:
        """Count finished cases by their status."""
        self._counts += np.bincount(status, minlength=4)
        self._bar.update(len(status))
        if time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._say()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._bar.close()
        self._say()
        if kind is None and (self._counts[FAILED] or self._counts[NOT_CONVERGED]):
            _log.warning(
                "%d of %d cases failed and %d did not converge; `status` and `message` say which",
                self._counts[FAILED], self._n_before + self._counts.sum(),
                self._counts[NOT_CONVERGED],
            )  # fmt: skip

    def _say(self) -> None:
        if not self._lines:
            return
        self._last_line = time.monotonic()
        n, elapsed = self._n_before + self._counts.sum(), self._last_line - self._start
        meter = self._bar.format_meter(n, self._total, elapsed, ncols=79, ascii=True)
        self._bar.write(f"sweep: {meter}", file=sys.stderr)
