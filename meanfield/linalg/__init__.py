"""Linear maps given by their products, and their norms with the evidence."""

# Files, each importing only those before it: `vectors` (lengths), `blocks` (the blocks of a map of
# tokens), `linear_map` (`LinearMap`), `bidiagonalisation` (the process and its bases), `upper_end`
# (what it leaves possible), `certain` (bounds from blocks), `evidence` (`certify`), `solvers`
# (`NormSolver`), `dense`, `krylov` and `row_weights` (three of them), `norms` (the choice).

from meanfield.habits import hint_names
from meanfield.linalg.dense import Dense
from meanfield.linalg.evidence import Candidate, NormEstimate, certify
from meanfield.linalg.krylov import Lanczos
from meanfield.linalg.linear_map import LinearMap
from meanfield.linalg.norms import operator_norm
from meanfield.linalg.row_weights import Certified
from meanfield.linalg.solvers import NormSolver

__all__ = [
    "Candidate",
    "Certified",
    "Dense",
    "Lanczos",
    "LinearMap",
    "NormEstimate",
    "NormSolver",
    "certify",
    "operator_norm",
]
hint_names(__name__, __all__)
