"""Lipschitz constants of maps of measures: local, secant, and how they compare.

Works for any map of measures; one that declares its own linearisation (`meanfield.Map`)
is faster.
"""

# Files, each importing only those before it: `constant`, `differentiable`, `local`, `one_sided`,
# `remainders`, `caches`, `localization`, `search`, `secant`, `comparison`, `ball`, `certified`,
# `orders`.

from meanfield.habits import hint_names
from meanfield.lipschitz.ball import ball_upper
from meanfield.lipschitz.caches import cache_error
from meanfield.lipschitz.certified import Readout, certified_radius
from meanfield.lipschitz.comparison import compare_lemma_3_2
from meanfield.lipschitz.constant import LocalLipschitz
from meanfield.lipschitz.local import local_lipschitz
from meanfield.lipschitz.localization import localize
from meanfield.lipschitz.one_sided import one_sided
from meanfield.lipschitz.orders import infinity_norm, local_order
from meanfield.lipschitz.search import worst_case
from meanfield.lipschitz.secant import SecantRatio, secant_ratio

__all__ = [
    "LocalLipschitz",
    "Readout",
    "SecantRatio",
    "ball_upper",
    "cache_error",
    "certified_radius",
    "compare_lemma_3_2",
    "infinity_norm",
    "local_lipschitz",
    "local_order",
    "localize",
    "one_sided",
    "secant_ratio",
    "worst_case",
]
hint_names(__name__, __all__)
