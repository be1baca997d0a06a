"""A function over a grid of parameters, as one labelled Dataset: resumable and parallel.

>>> from meanfield import sweep
>>> ds = sweep(lambda radius: {"area": 3 * radius**2}, {"radius": [1.0, 2.0]})
>>> ds["area"].values
array([ 3., 12.])

`Task` labels what a function returns, or declares it vectorised over cases. With ``store=``
finished cases are kept in a folder of files, which survives any death of the process; the same
call again computes what is missing. With ``executor=`` the cases are spread over processes or
machines.
"""

from meanfield.habits import hint_names
from meanfield.sweeps.plan import Task
from meanfield.sweeps.run import sweep
from meanfield.sweeps.status import status

__all__ = ["Task", "status", "sweep"]
hint_names(__name__, __all__)
