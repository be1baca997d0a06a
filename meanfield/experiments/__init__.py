"""Experiments: one question per file, each a function ``run`` that returns a Dataset.

Listing them loads none of them.
"""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["EXPERIMENTS", "load"]

EXPERIMENTS = {
    "two-dirac": "how sensitive two unbalanced clusters are: radius, light weight, n, masking",
    "lemma-3-2": "discrete Euclidean against Wasserstein secants as the step shrinks",
    "regimes": "over (n, R): worst constants found against every theorem",
    "masked-bound": "masked attention exceeds the unmasked mean-field bound",
}


def load(name: str) -> ModuleType:
    """The module of an experiment.

    Raises:
        ValueError: if there is none of that name.
    """
    if name not in EXPERIMENTS:
        known = ", ".join(EXPERIMENTS)
        raise ValueError(f"no experiment named {name!r}; there are: {known}")
    return importlib.import_module(f"meanfield.experiments.{name.replace('-', '_')}")
