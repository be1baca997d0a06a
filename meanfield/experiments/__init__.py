"""Experiments: one question per file, with its settings, its measurement and its figures.

Listing them loads none of them.

>>> from meanfield import experiments
>>> regimes = experiments.get("regimes")
>>> regimes.quick.radii
(0.5, 1.0, 1.5, 2.0, 4.0)

``regimes.run(settings)`` returns the Dataset, and ``regimes.figures["map"](ds)`` draws it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from meanfield.checks import suggestion

if TYPE_CHECKING:
    from meanfield.experiments.experiment import Experiment

__all__ = ["EXPERIMENTS", "get"]

# In the order of the list; the name of the file has "_" for "-".
EXPERIMENTS = {
    "two-dirac": "how sensitive two unbalanced clusters are: radius, light weight, n, masking",
    "lemma-3-2": "discrete Euclidean against Wasserstein secants as the step shrinks",
    "regimes": "over (n, R): worst constants found against every theorem",
    "sharpness": "how far the bounds are from the worst that is found, plain, masked, tokens",
    "kernel-growth": "dot products explode with the radius, L2 attention grows as its square",
    "masked-bound": "masked attention exceeds the unmasked mean-field bound",
    "real-text": "local constant of attention against n on real text, per layer, plain and masked",
    "through-depth": "constants of a transformer block by block and end to end, and its tokens",
    "families": "families of transformers side by side: block by block, and what tokens become",
    "adversarial": "growth in n at the inputs built to be the worst, per head",
    "released-code": "what the published scripts compute, beside the norm",
    "scaling-factor": "γR² of every head at the real token radius",
    "quadratic-growth": "three tokens whose constant grows as R²",
    "inversion": "inverting x + c f(x)/L by its fixed point: L2 against dot-product attention",
    "l2-tightness": "how close to its bound the infinity norm of L2 attention comes",
    "large-radius": "Theorem 3.7: the limit far out, and the hump near ties",
    "clustering": "tokens through depth, on the sphere and in the plane",
    "metastability": "the staircase of meeting clusters, and how many there are first",
    "two-dirac-depth": "two unbalanced clusters through depth, and what layers allow",
    "causal-flow": "masked tokens: leaders, and the first token that all go to",
    "gaussian-flow": "samples of a Gaussian beside its covariance equation",
    "mean-field-limit": "W2 between n tokens and many, at the start and in depth",
    "noise-threshold": "order against coupling: where noise gives way",
    "placement": "how fast tokens collapse with Pre-, Post-, Peri-LN and nGPT",
}


def get(name: str) -> Experiment:
    """The experiment of this name, see `experiment.Experiment`.

    Raises:
        ValueError: if there is none of that name.
    """
    if name not in EXPERIMENTS:
        known = ", ".join(EXPERIMENTS)
        hint = suggestion(name, EXPERIMENTS)
        raise ValueError(f"no experiment named {name!r}; there are: {known}{hint}")
    module = importlib.import_module(f"meanfield.experiments.{name.replace('-', '_')}")
    experiment: Experiment = module.EXPERIMENT
    return experiment
