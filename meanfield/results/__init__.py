"""Results: labelled answers and Datasets, their provenance, files, shapes and fits.

Every variable carries `long_name`, and `units` if it has any; dimensions are singular and
few; an estimate has its evidence beside it under the suffixes `_residual`, `_lower`, `_upper` and
`_converged`. Answers know no measure and no tensor; importing them loads neither torch nor xarray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from meanfield.habits import name_hint
from meanfield.results.labels import Variable
from meanfield.results.provenance import read_provenance

if TYPE_CHECKING:
    from meanfield.results.files import read_dataset, write_dataset
    from meanfield.results.fits import fit_power
    from meanfield.results.shapes import numbers, to_cube

# Fetched on first use, because they load xarray.
_HOMES = {
    "fit_power": "fits",
    "numbers": "shapes",
    "read_dataset": "files",
    "to_cube": "shapes",
    "write_dataset": "files",
}

__all__ = [
    "Variable",
    "fit_power",
    "numbers",
    "read_dataset",
    "read_provenance",
    "to_cube",
    "write_dataset",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        hint = name_hint(name, __all__)
        raise AttributeError(f"module 'meanfield.results' has no attribute {name!r}{hint}")
    value = getattr(importlib.import_module(f"meanfield.results.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
