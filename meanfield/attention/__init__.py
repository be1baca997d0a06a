"""Self-attention as a map of measures: F(μ) = (Γ_μ)♯μ, with its tangent.

Files, each importing only those before it: `parameters` (the matrices), `kernels` (what two
tokens say to each other), `normalization` (from scores to a transition matrix), `streaming`
(averages under it that never store it), `interaction` (who sees whom), `tangent` (the
linearisation at a measure), `upper` (a bound of its norm), `maps` (`SelfAttention`).
"""

from meanfield.attention.kernels import Kernel, dot_product
from meanfield.attention.maps import SelfAttention
from meanfield.attention.normalization import softmax
from meanfield.attention.parameters import AttentionParameters
from meanfield.attention.tangent import AttentionTangent

__all__ = [
    "AttentionParameters",
    "AttentionTangent",
    "Kernel",
    "SelfAttention",
    "dot_product",
    "softmax",
]
