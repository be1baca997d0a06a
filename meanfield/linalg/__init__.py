"""Linear maps given by their products, and their norms with the evidence."""

# Files, each importing only those before it: `vectors` (lengths), `linear_map` (`LinearMap`),
# `basis` (`Basis`), `bidiagonalisation` (the process), `evidence` (`NormEstimate`),
# `factorisation` (norms of small maps), `krylov` (norms by products), `norms` (the choice between
# the two).

from meanfield.linalg.evidence import NormEstimate
from meanfield.linalg.linear_map import LinearMap
from meanfield.linalg.norms import largest_block_norm, operator_norm

__all__ = ["LinearMap", "NormEstimate", "largest_block_norm", "operator_norm"]
