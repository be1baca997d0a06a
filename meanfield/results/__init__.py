"""Results: labelled Datasets, their provenance, files, shapes and fits.

Every variable carries `long_name`, and `units` if it has any; dimensions are singular and
few; an estimate has its evidence beside it under the suffixes `_residual`, `_lower`, `_upper` and
`_converged`.
"""

from meanfield.results.files import read, write
from meanfield.results.fits import fit_power
from meanfield.results.labels import Variable, batched, dataset, describe
from meanfield.results.provenance import provenance, read_provenance
from meanfield.results.shapes import to_cube

__all__ = [
    "Variable",
    "batched",
    "dataset",
    "describe",
    "fit_power",
    "provenance",
    "read",
    "read_provenance",
    "to_cube",
    "write",
]
