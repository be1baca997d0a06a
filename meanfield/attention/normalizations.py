"""From scores to attention weights: Pᵢⱼ, the attention that row i pays to column j.

`softmax`, `sigmoid`, `exponential` and `sink` are values of `RowWise`, as is any other positive
function of the scores: row i of P depends on row i of the scores alone, so that any block of rows
can be computed by itself. `sinkhorn` is the softmax with a potential added to the log-weights,
fixed before the rows.
"""

from meanfield.attention.rows import (
    RowWise,
    exponential,
    sigmoid,
    sink,
    softmax,
)
from meanfield.attention.sinkhorn import sinkhorn
from meanfield.habits import hint_names

__all__ = [
    "RowWise",
    "exponential",
    "sigmoid",
    "sink",
    "sinkhorn",
    "softmax",
]
hint_names(__name__, __all__)
