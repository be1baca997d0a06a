"""How long a sweep would take, from a sample of its cases."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from meanfield.sweeps.batches import run_batch
from meanfield.sweeps.grid import Grid
from meanfield.sweeps.plan import Task, make_plan

_SAMPLE_SECONDS, _LARGEST_SAMPLE = 0.05, 32


@dataclass(frozen=True)
class Estimate:
    """What a sweep would take, from a sample of its cases; `failure` is the first, if any."""

    n_cases: int
    seconds_per_case: float
    seconds: float
    failure: str | None = None


def estimate(
    fn: Task | Callable[..., Mapping[str, Any]],
    grid: Grid,
    *,
    fixed: Mapping[str, Any] | None = None,
    seed: int = 0,
    attrs: Mapping[str, Any] | None = None,
    n_workers: int = 1,
) -> Estimate:
    """Cases and time of a sweep, from timing its first cases; nothing is written.

    Cases of a grid often grow: if the first are the cheapest, the time is an underestimate.
    """
    plan = make_plan(fn, grid, fixed, seed, attrs)
    units = plan.units(np.ones(len(plan.cases), bool))
    seconds, each, messages = 0.0, 0.0, []
    # The first pays for imports, models that are loaded and caches that are filled.
    for sample in (units[:1], units[1:_LARGEST_SAMPLE]):
        if not sample or seconds > 60 * _SAMPLE_SECONDS:
            break
        start = time.perf_counter()
        cases = [[plan.cases[place] for place in unit] for unit in sample]
        batch = run_batch(plan.work(), cases, _SAMPLE_SECONDS)
        if batch.interrupt is not None:
            raise batch.interrupt
        plan = plan.with_variables(batch.variables)
        seconds = time.perf_counter() - start
        each = seconds / len(batch.columns["status"])
        messages += [text for text in batch.columns["message"] if text]
    total = each * len(plan.cases) / n_workers
    return Estimate(len(plan.cases), each, total, messages[0] if messages else None)
