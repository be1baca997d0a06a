"""Linear maps given by their products, and their norms with the evidence."""

# Files, each importing only those before it: `vectors` (lengths), `linear_map` (`LinearMap`),
# `basis` (`Basis`), `bidiagonalisation` (the process), `upper_end` (what it leaves possible),
# `evidence` (`certify`), `solvers` (`NormSolver`), `dense` and `krylov` (two of them), `norms`
# (the choice between the two).

from meanfield.linalg.dense import Dense
from meanfield.linalg.evidence import Candidate, NormEstimate, certify
from meanfield.linalg.krylov import Lanczos
from meanfield.linalg.linear_map import LinearMap
from meanfield.linalg.norms import largest_block_norm, operator_norm
from meanfield.linalg.solvers import NormSolver

__all__ = [
    "Candidate",
    "Dense",
    "Lanczos",
    "LinearMap",
    "NormEstimate",
    "NormSolver",
    "certify",
    "largest_block_norm",
    "operator_norm",
]
