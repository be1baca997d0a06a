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
from typing import TYPE_CHECKING, NamedTuple

from meanfield.checks import choice

if TYPE_CHECKING:
    from meanfield.experiments.experiment import Experiment

__all__ = ["EXPERIMENTS", "get"]


class Listed(NamedTuple):
    """An experiment in the list, which loads none."""

    question: str
    paper: str = ""  # what it shows of the papers, if anything


# In the order of the list; the name of the file has "_" for "-".
EXPERIMENTS = {
    "two-dirac": Listed(
        "how sensitive two unbalanced clusters are: radius, light weight, n, masking",
        "[CAP24] Prop. 3.4, 3.6",
    ),
    "lemma-3-2": Listed(
        "discrete Euclidean against Wasserstein secants as the step shrinks",
        "[CAP24] Lemmas 3.2, 4.2",
    ),
    "sharpness": Listed(
        "how far the bounds are from the worst that is found, plain, masked, tokens",
        "[CAP24] Thm 3.3, 3.5",
    ),
    "kernel-growth": Listed(
        "dot products explode with the radius, L2 attention grows as its square",
        "[KPM21] Thm 3.1, 3.2",
    ),
    "masked-bound": Listed(
        "masked attention exceeds the unmasked mean-field bound", "[CAP24] Thm 4.4"
    ),
    "real-text": Listed(
        "local constant of attention against n on real text, per layer, plain and masked",
        "[CAP24] Fig. 1, 4, 5, 6",
    ),
    "through-depth": Listed(
        "constants of transformers block by block and end to end, side by side, and their tokens"
    ),
    "released-code": Listed(
        "what the published scripts compute, beside the norm", "[CAP24] scripts of Fig. 1, 4"
    ),
    "scaling-factor": Listed("γR² of every head at the real token radius", "[CAP24] Fig. 2"),
    "quadratic-growth": Listed(
        "three tokens whose constant grows as R²", "[CAP24] Fig. 3, Thm 3.3"
    ),
    "inversion": Listed(
        "inverting x + c f(x)/L by its fixed point: L2 against dot-product attention",
        "[KPM21] Sec. 4, 5.2",
    ),
    "l2-tightness": Listed(
        "how close to its bound the infinity norm of L2 attention comes",
        "[KPM21] Thm 3.2, Sec. 5.1",
    ),
    "large-radius": Listed(
        "Theorem 3.7: the limit far out, and the hump near ties", "[CAP24] Thm 3.7, 4.5"
    ),
    "clustering": Listed("tokens through depth, on the sphere and in the plane"),
    "mean-field-limit": Listed("W2 between n tokens and many, at the start and in depth"),
}


def get(name: str) -> Experiment:
    """The experiment of this name, see `experiment.Experiment`.

    Raises:
        ValueError: if there is none of that name.
    """
    choice(name, "experiment", EXPERIMENTS)
    module = importlib.import_module(f"meanfield.experiments.{name.replace('-', '_')}")
    experiment: Experiment = module.EXPERIMENT
    return experiment
