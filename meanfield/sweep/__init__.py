"""A function over a grid of parameters, as one labelled Dataset: resumable and parallel.

>>> from meanfield import sweep
>>> ds = sweep(lambda radius: {"area": 3 * radius**2}, {"radius": [1.0, 2.0]})
>>> ds["area"].values
array([ 3., 12.])

`Task` labels what a function returns, or declares it vectorised over cases. With ``store=`` the
results live in a Zarr folder that survives any death of the process; the same call again does what
is missing. With ``executor=`` the cases are spread over processes or machines.
"""

import sys
from types import ModuleType
from typing import Any

from meanfield.sweep.configuration import override, read_toml
from meanfield.sweep.grid import case_seed, cases_of
from meanfield.sweep.memory import keep_freed_memory
from meanfield.sweep.plan import Estimate, estimate
from meanfield.sweep.run import sweep
from meanfield.sweep.status import StoreStatus, export, status
from meanfield.sweep.task import Task

__all__ = [
    "Estimate",
    "StoreStatus",
    "Task",
    "case_seed",
    "cases_of",
    "estimate",
    "export",
    "keep_freed_memory",
    "override",
    "read_toml",
    "status",
    "sweep",
]


class _CallableModule(ModuleType):
    """The module is the function too.

    `import meanfield.sweep` binds the name `sweep` of the package to this module, whatever the
    package had under it; so ``from meanfield import sweep`` gives the module, and the call that
    everybody writes next must reach the function inside.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return sweep(*args, **kwargs)


_CallableModule.__call__.__doc__ = sweep.__doc__
sys.modules[__name__].__class__ = _CallableModule
