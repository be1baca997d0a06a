"""Kernels: from points to queries, keys and values, and from pairs of these to scores.

`dot_product` and `l2` are complete; `cosine`, `qk_norm`, `soft_cap`, `rotary`, `alibi` and
`window` change another kernel, ``inner``, so that they combine:
``soft_cap(50.0, inner=rotary(dim=64, length=n))``. To add one, subclass `Kernel` and give
`features`; `push` and `pull` (the derivative and its transpose) are optional. Base classes of
kernels that change another one, as `soft_cap` does, are in ``kernel.py``.
"""

from meanfield.attention.kernels.bilinear import dot_product, l2
from meanfield.attention.kernels.cosine import cosine, qk_norm
from meanfield.attention.kernels.kernel import Features, Kernel
from meanfield.attention.kernels.rotary import rotary
from meanfield.attention.kernels.score_changes import alibi, soft_cap, window
from meanfield.habits import hint_names

__all__ = [
    "Features",
    "Kernel",
    "alibi",
    "cosine",
    "dot_product",
    "l2",
    "qk_norm",
    "rotary",
    "soft_cap",
    "window",
]
hint_names(__name__, __all__)
