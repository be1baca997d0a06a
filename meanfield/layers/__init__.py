"""Layers as maps of measures, each with its exact linearisation, and how they compose.

`Pointwise`, `LayerNorm`, `RMSNorm` and `MLP` move every particle by itself, as do subclasses of
`Particlewise`; attention is in `meanfield.attention`. `Chain`, `Residual` and `Sum` combine maps
into blocks and networks, masked or not. All are subclasses of `meanfield.Map` with an exact
derivative, a certain bound of the local constant, and bounds in a ball, where their parts have
them. `contractive` scales a map so that x + c·F(x)/L can be inverted, and `invert` does it with a
certified error.
"""

from meanfield.habits import hint_names
from meanfield.layers.chain import Chain
from meanfield.layers.composition import Residual
from meanfield.layers.composition import Sum as Sum
from meanfield.layers.contraction import Bounded, contractive
from meanfield.layers.inverse import invert
from meanfield.layers.mlp import MLP
from meanfield.layers.normalised import Clip, LayerNorm, RMSNorm
from meanfield.layers.particlewise import Particlewise, Pointwise

# What is imported `as` itself is not in the list, but may be taken from here as well.
__all__ = [
    "MLP",
    "Bounded",
    "Chain",
    "Clip",
    "LayerNorm",
    "Particlewise",
    "Pointwise",
    "RMSNorm",
    "Residual",
    "contractive",
    "invert",
]
hint_names(__name__, __all__)
