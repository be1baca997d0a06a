"""Linear maps given by their products, their norms and singular values with the evidence.

Files, each importing only those before it: `vectors` (lengths), `maps` (`LinearMap`), `basis`
(`Basis`), `bidiagonalisation` (the process), `ritz` and `coarse` (a cheap model of a map),
`davidson` (what it corrects), `evidence` (`NormEstimate`), `dense` (by factorisation), `lanczos`
(by products), `norms` and `singular` (the choice between the two).
"""

from meanfield.linalg.evidence import NormEstimate
from meanfield.linalg.maps import CoarseSpace, LinearMap
from meanfield.linalg.norms import largest_block_norm, operator_norm
from meanfield.linalg.singular import SingularValues, largest_singular_values

__all__ = [
    "CoarseSpace",
    "LinearMap",
    "NormEstimate",
    "SingularValues",
    "largest_block_norm",
    "largest_singular_values",
    "operator_norm",
]
