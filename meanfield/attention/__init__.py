"""Self-attention as a map of measures: F(μ) = (Γ_μ)♯μ, with its tangent."""

# Files, each importing only those before it: `parameters` (the matrices), `kernels` (what two
# particles say to each other), `normalizations` (from scores to transition probabilities),
# `streaming` (averages under them in blocks of rows), `sight` (who sees whom), `tangent` (the
# linearisation at a measure), `balancing` (Sinkhorn's potentials), `upper` (a bound of its norm),
# `self_attention` (`SelfAttention`).

from meanfield.attention import kernels, normalizations
from meanfield.attention.balancing import Plan
from meanfield.attention.kernels import Features as Features
from meanfield.attention.kernels import Kernel as Kernel
from meanfield.attention.kernels import dot_product, l2
from meanfield.attention.normalizations import sigmoid, sinkhorn, softmax
from meanfield.attention.parameters import AttentionParameters
from meanfield.attention.self_attention import SelfAttention
from meanfield.attention.tangent import AttentionTangent

__all__ = [
    "AttentionParameters",
    "AttentionTangent",
    "Plan",
    "SelfAttention",
    "dot_product",
    "kernels",
    "l2",
    "normalizations",
    "sigmoid",
    "sinkhorn",
    "softmax",
]
