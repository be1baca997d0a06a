"""Experiments: one question per file, with its settings, its measurement and its figures.

Listing them loads none of them.

>>> from meanfield import experiments
>>> growth = experiments.get("kernel-growth")
>>> growth.quick.radii
(0.5, 1.0, 2.0)

``growth.run(settings)`` returns the Dataset, and ``growth.figures["growth"](ds)`` draws it.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from meanfield.checks import choice
from meanfield.habits import hint_names, with_hints

if TYPE_CHECKING:
    from meanfield.experiments.experiment import Experiment

__all__ = ["EXPERIMENTS", "get"]
hint_names(__name__, __all__)


# By name, in the order of the list: what each shows of the papers, if anything. The name of the
# file has "_" for "-".
EXPERIMENTS = {
    "two-dirac": "[CAP24] Prop. 3.4, 3.6",
    "lemma-3-2": "[CAP24] Lemmas 3.2, 4.2",
    "sharpness": "[CAP24] Thm 3.3, 3.5",
    "kernel-growth": "[KPM21] Thm 3.1, 3.2",
    "masked-bound": "[CAP24] Thm 4.4",
    "real-text": "[CAP24] Fig. 1, 4, 5, 6",
    "through-depth": "",
    "released-code": "[CAP24] scripts of Fig. 1, 4",
    "scaling-factor": "[CAP24] Fig. 2",
    "quadratic-growth": "[CAP24] Fig. 3, Thm 3.3",
    "inversion": "[KPM21] Sec. 4, 5.2",
    "l2-tightness": "[KPM21] Thm 3.2, Sec. 5.1",
    "large-radius": "[CAP24] Thm 3.7, 4.5",
    "clustering": "",
    "mean-field-limit": "",
}


def question_of(name: str) -> str:
    """What an experiment asks: the first line of its file, which is read and not loaded."""
    file = Path(__file__).with_name(f"{name.replace('-', '_')}.py")
    return file.read_text(encoding="utf-8").removeprefix('"""').partition("\n")[0]


@with_hints
def get(name: str) -> Experiment:
    """The experiment of this name, see `experiment.Experiment`.

    Raises:
        ValueError: if there is none of that name.
    """
    choice(name, "experiment", EXPERIMENTS)
    module = importlib.import_module(f"meanfield.experiments.{name.replace('-', '_')}")
    experiment: Experiment = module.EXPERIMENT
    return experiment
