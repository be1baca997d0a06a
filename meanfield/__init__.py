"""Self-attention as a map of measures: certified optimal transport and Lipschitz constants.

Importing the package loads neither torch nor any other heavy library: each name is fetched from
its module on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meanfield import (
        attention,
        bounds,
        corpora,
        dynamics,
        experiments,
        figures,
        layers,
        linalg,
        lipschitz,
        maps,
        measures,
        pretrained,
        report,
        results,
        sampling,
        sweeps,
        transport,
    )
    from meanfield.attention import AttentionParameters, SelfAttention
    from meanfield.errors import ConvergenceError
    from meanfield.lipschitz import local_lipschitz, secant_ratio
    from meanfield.maps import Map, linearize
    from meanfield.measures import (
        ParticleMeasure,
        disintegrate,
        merge,
        mixture,
        pushforward,
        split,
        stack,
    )
    from meanfield.sweeps import sweep
    from meanfield.transport import conditional_w2, solve_w2, w2

__version__ = "1.0.0"

_HOMES = {
    "AttentionParameters": "meanfield.attention",
    "SelfAttention": "meanfield.attention",
    "ConvergenceError": "meanfield.errors",
    "local_lipschitz": "meanfield.lipschitz",
    "secant_ratio": "meanfield.lipschitz",
    "Map": "meanfield.maps",
    "linearize": "meanfield.maps",
    "ParticleMeasure": "meanfield.measures",
    "disintegrate": "meanfield.measures",
    "merge": "meanfield.measures",
    "mixture": "meanfield.measures",
    "pushforward": "meanfield.measures",
    "split": "meanfield.measures",
    "stack": "meanfield.measures",
    "sweep": "meanfield.sweeps",
    "conditional_w2": "meanfield.transport",
    "solve_w2": "meanfield.transport",
    "w2": "meanfield.transport",
}

__all__ = [
    "AttentionParameters",
    "ConvergenceError",
    "Map",
    "ParticleMeasure",
    "SelfAttention",
    "attention",
    "bounds",
    "conditional_w2",
    "corpora",
    "disintegrate",
    "dynamics",
    "experiments",
    "figures",
    "layers",
    "linalg",
    "linearize",
    "lipschitz",
    "local_lipschitz",
    "maps",
    "measures",
    "merge",
    "mixture",
    "pretrained",
    "pushforward",
    "report",
    "results",
    "sampling",
    "secant_ratio",
    "solve_w2",
    "split",
    "stack",
    "sweep",
    "sweeps",
    "transport",
    "w2",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    if name in __all__:
        return importlib.import_module(f"meanfield.{name}")
    raise AttributeError(f"module 'meanfield' has no attribute {name!r}{_found_below(name)}")


def _found_below(name: str) -> str:
    """Where a name is that lives one module down, or the nearest name here, for a message."""
    if name.startswith("_"):  # asked by tools, in every module
        return ""
    from meanfield.habits import name_hint

    places = [f"meanfield.{package}" for package in __all__ if package not in _HOMES]
    found = [one for one in places if name in importlib.import_module(one).__all__]
    if found:
        return "; it is " + " or ".join(f"{place}.{name}" for place in found)
    return name_hint(name, __all__)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
