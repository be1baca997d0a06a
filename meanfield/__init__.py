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
    from meanfield.linalg import LinearMap, NormEstimate, operator_norm
    from meanfield.maps import Linearisation, Map, linearize
    from meanfield.measures import (
        ParticleMeasure,
        disintegrate,
        merge,
        pushforward,
        split,
        stack,
    )
    from meanfield.sweeps import sweep

__version__ = "0.1.0"

_MODULES = (
    "attention",
    "bounds",
    "corpora",
    "dynamics",
    "experiments",
    "figures",
    "layers",
    "linalg",
    "lipschitz",
    "measures",
    "pretrained",
    "report",
    "results",
    "sampling",
    "sweeps",
    "transport",
)

_HOMES = {
    "AttentionParameters": "meanfield.attention",
    "SelfAttention": "meanfield.attention",
    "ConvergenceError": "meanfield.errors",
    "LinearMap": "meanfield.linalg",
    "NormEstimate": "meanfield.linalg",
    "operator_norm": "meanfield.linalg",
    "Linearisation": "meanfield.maps",
    "Map": "meanfield.maps",
    "linearize": "meanfield.maps",
    "ParticleMeasure": "meanfield.measures",
    "disintegrate": "meanfield.measures",
    "merge": "meanfield.measures",
    "pushforward": "meanfield.measures",
    "split": "meanfield.measures",
    "stack": "meanfield.measures",
    "sweep": "meanfield.sweeps",
}

__all__ = [
    "AttentionParameters",
    "ConvergenceError",
    "LinearMap",
    "Linearisation",
    "Map",
    "NormEstimate",
    "ParticleMeasure",
    "SelfAttention",
    "attention",
    "bounds",
    "corpora",
    "disintegrate",
    "dynamics",
    "experiments",
    "figures",
    "layers",
    "linalg",
    "linearize",
    "lipschitz",
    "measures",
    "merge",
    "operator_norm",
    "pretrained",
    "pushforward",
    "report",
    "results",
    "sampling",
    "split",
    "stack",
    "sweep",
    "sweeps",
    "transport",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"meanfield.{name}")
    raise AttributeError(f"module 'meanfield' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
