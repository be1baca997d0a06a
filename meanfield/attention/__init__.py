"""Self-attention as a map of measures: F(μ) = (Γ_μ)♯μ, with its tangent."""

# Files, each importing only those before it: `parameters` (the matrices), `kernels` (log-score of
# a pair of points), `rows` (from the scores of a row to its weights), `weights` (P in blocks of
# rows), `streaming` (averages under P, with derivatives of every order), `tangent` (the
# linearisation at a measure), `averaging` (its blocks, for certain bounds at an input), `sinkhorn`
# (plans with both marginals), `input_bounds` and `ball_bounds` (bounds in a ball around an input),
# `normalizations` (the public names), `self_attention`.

from meanfield.attention import kernels, normalizations
from meanfield.attention.parameters import AttentionParameters
from meanfield.attention.self_attention import SelfAttention

__all__ = [
    "AttentionParameters",
    "SelfAttention",
    "kernels",
    "normalizations",
]
