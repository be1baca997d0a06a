"""What people put where something else belongs: expressions of `g`, the well-formed argument.

One mistake a line. What stands behind `->` is what it means, if it means something (a list in
place of a tensor, big-endian numbers): the answer must then be that of this value, or an error.
Everything else must be refused. They are evaluated among `NAMES` and those of `calls.names`.
"""

from __future__ import annotations

import datetime
import decimal
import fractions
import math
import pathlib
import random
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import xarray as xr

from meanfield import ParticleMeasure

THINGS = """
None
"abc"
""
b"abc"
{"a": 1.0}
{1.0, 2.0}
object()
lambda *a, **k: None
dict
math
pathlib.Path("points.npy")
datetime.date(2020, 1, 1)
...
slice(None)
"""

ARRAYS = """
3.0
"1.0"
[[1.0, 2.0], [3.0]]
[]
[None, None]
np.asarray(g).astype(str).tolist()
spoilt(g, nan)
spoilt(g, inf)
spoilt(g, -inf)
torch.tensor(spoilt(g, nan))
spoilt(g, inf).tolist()
array(g) > 0
array(g) + 1j
tensor(g) + 1j
tensor(g).long() -> array(tensor(g).long())
tensor(g) > 0
tensor(g).half() -> array(tensor(g).half())
tensor(g).bfloat16() -> array(tensor(g).bfloat16().double())
array(g).astype(str)
np.full(np.shape(g), "2020-01-01", "datetime64[D]")
np.zeros(np.shape(g), [("x", float), ("y", float)])
np.full(np.shape(g), None, object)
np.ma.masked_array(array(g), np.arange(array(g).size).reshape(np.shape(g)) == 0)
np.ma.masked_array(array(g)) -> array(g)
tensor(g).to_sparse()
csr_array(np.atleast_2d(array(g)))
frame(array(g)) -> array(g)
frame(array(g)).astype(str)
xr.DataArray(array(g)) -> array(g)
xr.Dataset({"x": ("n", [1.0, 2.0])})
array(g).astype(">f8") -> array(g)
array(g)[::-1].copy()[::-1] -> array(g)
np.asfortranarray(array(g)) -> array(g)
np.ones(np.shape(g), int) -> np.ones(np.shape(g))
array(g).tolist() -> array(g)
(row for row in array(g))
range(3)
np.array(2.0)
np.zeros((0, *np.shape(g)[1:]))
np.zeros((*np.shape(g)[:-1], 0))
np.ones((*np.shape(g)[:-1], np.shape(g)[-1] + 1))
mu
F
[row.requires_grad_() for row in tensor(g)]
tensor(g).float()
"""

# Of numbers and of counts.
NUMBERS = """
str(g)
[]
nan
-inf
inf
-1.0
0
complex(g, 1.0)
True
np.bool_(True)
np.array(g) -> g
tensor(g) -> g
mu
F
"""
ARRAYS_OF_NUMBERS = """
[g]
[g, g]
(g, g)
np.array([g, g])
torch.tensor([g, g])
frame([[g, g]])
"""
FRACTIONS = """
decimal.Decimal(str(g)) -> g
fractions.Fraction(g) -> g
"""
COUNTS = """
g + 0.5
float(g) -> g
10**30
"""

FLAGS = """
"False"
"no"
0 -> False
1 -> True
2
nan
[]
[False]
np.array([True, False])
torch.tensor([True, False])
np.bool_(g) -> g
torch.tensor(g) -> g
mu
"""

CHOICES = """
g[:-1] + "z"
g.upper()
" " + g
g.encode()
[g]
0
True
nan
np.array([g, g])
F
"""

GENERATORS = """
-1
True
np.random.default_rng(0)
random.Random(0)
torch.Generator
torch.Generator().get_state()
nan
"""

MEASURES = """
g.points -> g
g.points.numpy() -> g
g.points.tolist() -> g
frame(g.points.numpy()) -> g
(g.points, g.weights) -> g
np.arange(3.0)
1.0
nan
True
F
ParticleMeasure
xr.Dataset({"x": ("n", [1.0])})
[g, g]
(one for one in [g])
g.points + 1j
broken(g, nan)
broken(g, inf)
"""
# Of a measure beside a map or another measure.
BESIDE = """
ParticleMeasure(torch.ones(3, 5, dtype=torch.float64))
g.to(torch.float32)
"""

MAPS = """
1.0
np.eye(2)
torch.eye(2, dtype=torch.float64)
mu
SelfAttention
params
torch.tanh
torch.nn.Linear(2, 2).double()
lambda x: x**2
lambda mu: mu.points
lambda mu: None
lambda: mu
lambda mu, nu: mu
lambda mu: ParticleMeasure(mu.points, torch.softmax(mu.points[..., 0], -1))
lambda mu: ParticleMeasure(mu.points[..., 1:, :])
True
"""

FUNCTIONS = """
1.0
mu
"""

OTHERS = """
1.0
nan
True
x
tensor(x)
x.tolist()
np.arange(3.0)
frame(x)
xr.Dataset({"x": ("n", [1.0])})
mu
F
ParticleMeasure
"""


class Mistake(NamedTuple):
    """An expression, and the one that it stands for, or None."""

    text: str
    means: str | None


def _of(*texts: str) -> list[Mistake]:
    lines = [line.partition(" -> ") for text in texts for line in text.strip().splitlines()]
    return [Mistake(wrong, means or None) for wrong, _, means in lines]


# None where arguments broadcast.
SEVERAL = _of(ARRAYS_OF_NUMBERS)
KINDS = {
    "array": _of(THINGS, ARRAYS),
    "number": _of(THINGS, NUMBERS, ARRAYS_OF_NUMBERS, FRACTIONS),
    "count": _of(THINGS, NUMBERS, ARRAYS_OF_NUMBERS, COUNTS),
    "flag": _of(THINGS, FLAGS),
    "choice": _of(THINGS, CHOICES),
    "generator": _of(THINGS, GENERATORS),
    "measure": _of(THINGS, MEASURES, BESIDE),
    "map": _of(THINGS, MAPS),
    "function": _of(THINGS, FUNCTIONS),
    "other": _of(THINGS, OTHERS),
}


def array(value: Any) -> np.ndarray:
    """As NumPy's."""
    return np.array(value, float)


def tensor(value: Any) -> torch.Tensor:
    """As torch's."""
    return torch.tensor(array(value))


def frame(value: Any) -> pd.DataFrame:
    """As a table."""
    return pd.DataFrame(np.atleast_2d(value))


def csr_array(value: Any) -> Any:
    """As SciPy's sparse one."""
    from scipy.sparse import csr_array

    return csr_array(value)


def spoilt(value: Any, bad: float) -> np.ndarray:
    """With one number changed."""
    made = array(value)
    made.flat[0] = bad
    return made


def broken(mu: ParticleMeasure, bad: float) -> ParticleMeasure:
    """With one coordinate changed."""
    points = mu.points.clone()
    points.view(-1)[0] = bad
    return mu.replace(points)


NAMES = {
    **{"math": math, "pathlib": pathlib, "datetime": datetime, "decimal": decimal},
    **{"fractions": fractions, "random": random, "np": np, "torch": torch, "pd": pd, "xr": xr},
    **{"array": array, "tensor": tensor, "frame": frame, "csr_array": csr_array},
    **{"spoilt": spoilt, "broken": broken, "nan": math.nan, "inf": math.inf},
}
