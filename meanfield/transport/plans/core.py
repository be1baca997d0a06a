"""POT's network simplex (``ot.lp.emd_c``, ``emd_c_sparse``): its compiled core, loaded alone.

The module ``ot.lp.emd_wrap`` is loaded from its file, not by ``import ot``: the Python wrapper
around the core costs twenty times the solution of a problem of eight atoms, and importing the
package, which looks for every array library there is, takes longer than torch.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

import numpy as np

_ALONE = "_ot_alone"  # a package that nobody else imports


@functools.cache
def compiled_core() -> Any:
    """The module ``ot.lp.emd_wrap`` if it solves a known problem rightly, otherwise None."""
    try:
        core = sys.modules.get("ot.lp.emd_wrap") or _loaded_alone()
        weights = np.array([0.25, 0.75])
        cost = np.array([[0.0, 1.0], [2.0, 0.5]])
        rows, cols = (t.astype(np.uint64).ravel() for t in np.indices((2, 2)))
        plan, value, f, g, code = core.emd_c(weights, weights, cost, 1000, 1, None, None)
        arcs, start = (rows, cols, cost.ravel()), (np.zeros(2), np.zeros(2))
        *entries, _, u, v, _ = core.emd_c_sparse(weights, weights, *arcs, 1000, *start)
        other = np.zeros_like(plan)
        other[entries[0].astype(int), entries[1].astype(int)] = entries[2]
        right = np.allclose([plan, other], np.diag(weights)) and abs(value - 0.375) < 1e-12
        tight = np.allclose([f + g, u + v], [0.0, 0.5])
        if right and tight and core.check_result(code) is None:
            return core
    except (ImportError, AttributeError, TypeError, ValueError):
        pass
    return None


def _loaded_alone() -> Any:
    """The extension module loaded from its file, under another name.

    While it is loaded it asks its package for `utils.dist`, which only POT's line solver uses. All
    names are removed again, so that a later ``import ot`` finds nothing unusual.
    """
    package = importlib.util.find_spec("ot")
    if package is None:
        return None
    folders = [f"{folder}/lp" for folder in package.submodule_search_locations or ()]
    spec = PathFinder.find_spec(f"{_ALONE}.lp.emd_wrap", folders)
    if spec is None or spec.loader is None:
        return None
    names = [_ALONE, f"{_ALONE}.lp", f"{_ALONE}.utils"]
    try:
        for name in names:
            sys.modules[name] = ModuleType(name)
        vars(sys.modules[names[-1]])["dist"] = None
        core = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(core)
    finally:
        for name in [*names, spec.name, "ot.lp.emd_wrap"]:
            sys.modules.pop(name, None)
    return core
