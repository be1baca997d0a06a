"""Optimal transport that can be trusted: W₂ and conditional W₂ with certified intervals.

It can be used on its own: ``from meanfield.transport import w2, solve_w2``.

Every answer is an interval lower ≤ W₂ ≤ upper, rounding included, with the coupling and the
method it came from. Weights are logarithms, differences are taken before squares, and each
problem is solved in its own unit: neither scale, translation nor the collapse of clusters
matters.

Conventions, for two points at distance 3:

=====================================  =======  ==========================================
call                                   answer   what it is
=====================================  =======  ==========================================
`w2`, `solve_w2`, `wp`                 3        W₂ (W_p), in the unit of the points
``w2(...) ** 2``                       9        W₂²
`sinkhorn_divergence`                  → 9      tends to W₂² as blur → 0, scaling → 1
``ot.emd2`` (POT, its default cost)    9        W₂²
``ot.wasserstein_1d(p=2)`` (POT)       9        W₂²
``SamplesLoss(p=2)`` (GeomLoss)        4.5      ½ W₂²
``scipy.stats.wasserstein_distance``   3        W₁ on the line
=====================================  =======  ==========================================

NumPy arrays in, NumPy arrays out; everything else comes back as tensors. In the place of
``ot.emd2(a, b, M)`` stands ``w2((x, a), (y, b))`` or ``w2(x, y, weights=(a, b))``.
"""

# Reading order; a file imports only those before it: problem · certificate · plans (c_transform ·
# formulas · core · exact · clusters · columns) · checker · proof · pairs · coupling · result ·
# solve · conditional · gradients · entropic · entropic_plan · foreign · grading · known ·
# submissions.

from __future__ import annotations

from meanfield.habits import hint_names
from meanfield.transport.conditional import solve_conditional_w2
from meanfield.transport.coupling import Coupling
from meanfield.transport.entropic import conditional_sinkhorn_divergence, sinkhorn_divergence
from meanfield.transport.entropic_plan import sinkhorn_plan
from meanfield.transport.gradients import conditional_w2, w1, w2, wp
from meanfield.transport.grading import certify
from meanfield.transport.known import known_problem
from meanfield.transport.result import TransportResult
from meanfield.transport.solve import solve_w2, solve_wp
from meanfield.transport.submissions import grade

__all__ = [
    "Coupling",
    "TransportResult",
    "certify",
    "conditional_sinkhorn_divergence",
    "conditional_w2",
    "grade",
    "known_problem",
    "sinkhorn_divergence",
    "sinkhorn_plan",
    "solve_conditional_w2",
    "solve_w2",
    "solve_wp",
    "w1",
    "w2",
    "wp",
]
hint_names(__name__, __all__)
