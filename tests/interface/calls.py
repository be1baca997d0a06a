"""Calls of public functions as text, and how each ends.

`right_calls` has well-formed ones, of which one argument at a time is replaced by a mistake of
its kind (`mistakes`); `wrong_calls` has those that are wrong as a whole. `ending` makes a call
and says how it ended: in a clear error of this library, right, in somebody else's error, or in
nonsense.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import numbers
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import xarray as xr

import meanfield
from meanfield import dynamics, layers, linalg, lipschitz, pretrained, report, sweeps, transport
from meanfield.attention import (
    AttentionParameters,
    SelfAttention,
    kernels,
    normalizations,
)
from meanfield.errors import ConvergenceError
from meanfield.lipschitz.secant import euclidean_secant_ratio
from meanfield.maps import Map
from meanfield.measures import ParticleMeasure
from meanfield.sweeps.grid import cases_of
from tests.interface import mistakes, right_calls
from tests.interface.mistakes import KINDS, Mistake

PACKAGE = str(Path(meanfield.__file__).parent)
CLEAR, FOREIGN, RIGHT, NONSENSE = "clear", "somebody else's", "right", "nonsense"
GONE = "is gone from the library: delete what speaks of it from this table"

# ------------------------------------------------------------------ what the calls speak of


def f(radius: float) -> dict[str, float]:
    """A function for sweeps."""
    return {"y": radius}


@functools.cache
def encoder() -> pretrained.Transformer:
    """A small encoder of torch."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).double().eval()
    return pretrained.read(torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


@functools.cache
def names(device: str | None = None) -> dict[str, Any]:
    """Well-formed arguments, and the library: arrays of NumPy, or tensors on a device."""
    arrays = {
        "x": np.array([[1.0, 0.5], [-0.5, 1.0], [0.2, -1.0]]),
        "a": np.array([0.2, 0.3, 0.5]),
        "s": np.array([0.1, 0.5, 1.0]),
        "A": np.array([[-1.0, 0.2], [0.0, 0.5]]),
        "V": np.eye(2),
    }
    arrays["y"] = arrays["x"][::-1] + 0.25
    frames = {"frame_of_x": pd.DataFrame(arrays["x"])}
    axes = ("particle", "feature")
    frames["x_labelled"] = xr.DataArray(arrays["x"], [(axes[0], [0, 1, 2]), (axes[1], [0, 1])])
    frames["y_swapped"] = xr.DataArray(arrays["y"], dims=axes, coords={axes[1]: [1, 0]})
    frames["shuffled"] = pd.Series(arrays["a"], index=[2, 1, 0])
    if device is not None:
        arrays = {name: torch.tensor(one, device=device) for name, one in arrays.items()}
    x, y, A, V = (arrays[name] for name in "xyAV")
    params = AttentionParameters.from_bilinear(A, V)
    F, mu, seq = SelfAttention(params), ParticleMeasure(x), ParticleMeasure.from_sequence(x)
    return {
        **{name: getattr(meanfield, name) for name in meanfield.__all__},
        **{"meanfield": meanfield, "w1": transport.w1, "wp": transport.wp},
        **{"solve_wp": transport.solve_wp, "euclidean_secant_ratio": euclidean_secant_ratio},
        **{"kernels": kernels, "normalizations": normalizations},
        **{"cases_of": cases_of},
        **{"write_report": report.write_report, "encoder": encoder},
        **mistakes.NAMES,
        **arrays,
        **frames,
        **{"F": F, "mu": mu, "seq": seq, "params": params},
        "gamma": F.field(mu),
        "masked_gamma": SelfAttention(params, causal=True).field(seq),
        "tied": AttentionParameters.tied_l2(V, V),
        "growing": layers.contractive(layers.Pointwise(torch.sin), 0.5, constant=1.0),
        "J": linalg.LinearMap.pointwise(torch.ones(1, 2, 2, dtype=torch.float64, device=device)),
        "constant": lipschitz.local_lipschitz(F, mu),
        "C": float(lipschitz.local_lipschitz(F, mu).value),
        "nu": ParticleMeasure(y),
        "light": ParticleMeasure(x, arrays["a"]),
        "later": seq.replace(seq.points + 0.5),
        "flown": dynamics.flow(F, mu, [0.0, 0.5, 1.0], method="rk4", step=0.5, keep_points=True),
        "cases": xr.Dataset({"y": ("case", [3.0, 6.0])}, coords={"x": ("case", [1.0, 4.0])}),
        "ds": sweeps.sweep(f, {"radius": [1.0, 2.0]}, progress=False),
        "f": f,
        "__file__": __file__,
        "sweep": functools.partial(sweeps.sweep, progress=False),
    }


@functools.cache
def _compiled(text: str) -> CodeType:
    return compile(text, text, "eval")


def value_of(text: str, *, device: str | None = None, **known: Any) -> Any:
    """What an expression gives."""
    return eval(_compiled(text), {**names(device), **known})


# ------------------------------------------------------------------ one argument at a time


class Argument(NamedTuple):
    """An argument of a call in a line.

    Attributes:
        line: the call.
        function: the name of the function.
        parameter: its parameter.
        start: where the argument stands in the line.
        end: behind it.
    """

    line: str
    function: str
    parameter: inspect.Parameter
    start: int
    end: int

    @property
    def good(self) -> Any:
        """The well-formed value."""
        return value_of(self.line[self.start : self.end], tmp=Path())

    @property
    def names(self) -> tuple[str, str, str]:
        """What `right_calls.FINE` may call it."""
        name = self.parameter.name
        return name, f"{self.function}.{name}", f"{self.function}.*"

    @property
    def changed(self) -> str:
        """The line with `given` in its place."""
        return f"{self.line[: self.start]}given{self.line[self.end :]}"

    @property
    def mistakes(self) -> list[Mistake]:
        """Those of its kind, without what means something here."""
        annotation = str(self.parameter.annotation)
        fine = {wrong for wrong, place in right_calls.FINE if place in self.names}
        if "None" in annotation or self.parameter.default is None:
            fine.add("None")
        if annotation in ("Any", "object") or "Tensor" in annotation:
            fine |= {one.text for one in mistakes.SEVERAL}
        return [one for one in KINDS[kind_of(self.good)] if one.text not in fine]


def kind_of(value: Any) -> str:
    """Of which kind an argument is, from a well-formed value."""
    kinds = {
        "flag": bool,
        "count": int,
        "number": float,
        "choice": str,
        "generator": torch.Generator,
        "measure": ParticleMeasure,
        "map": Map,
        "array": (np.ndarray, torch.Tensor, list),
        "function": (FunctionType, type(torch.tanh)),
    }
    return next((kind for kind, types in kinds.items() if isinstance(value, types)), "other")


def function_of(call: ast.Call) -> Callable[..., Any]:
    """What is called, which must exist."""
    name = ast.unparse(call.func)
    try:
        found = value_of(name)
    except (AttributeError, NameError):
        raise LookupError(f"{name} {GONE}") from None
    return getattr(found, "func", found)


def arguments(line: str) -> Iterator[Argument]:
    """Those of all calls of this library in a line; of a list of measures or maps each one."""
    for call in ast.walk(ast.parse(line)):
        if not isinstance(call, ast.Call) or isinstance(call.func, ast.Call):
            continue
        function = function_of(call)
        if not inspect.getmodule(function).__name__.startswith("meanfield"):
            continue
        known = inspect.signature(function).parameters
        given = [*zip(known.values(), call.args, strict=False)]
        for word in call.keywords:
            if word.arg not in known:
                raise LookupError(f"{word.arg} of {ast.unparse(call.func)} {GONE}")
            given.append((known[word.arg], word.value))
        for parameter, node in given:
            listed = isinstance(node, ast.List) and isinstance(node.elts[0], ast.Name)
            for one in node.elts if listed else [node]:
                name = ast.unparse(call.func).split(".")[-1]
                found = Argument(line, name, parameter, one.col_offset, one.end_col_offset)
                if not isinstance(found.good, Path):  # where a file would be written
                    yield found


class Case(NamedTuple):
    """One wrong call."""

    argument: Argument
    mistake: Mistake

    def __str__(self) -> str:
        return self.argument.changed.replace("given", f"⟨{self.mistake.text}⟩")


def cases() -> list[Case]:
    """All wrong calls of one mistake each."""
    found = [one for line in right_calls.LINES for one in arguments(line)]
    return [Case(argument, mistake) for argument in found for mistake in argument.mistakes]


def verdict(case: Case, folder: Path) -> tuple[str, str]:
    """How a wrong call ends, and what it said or gave."""
    changed, good = case.argument.changed, case.argument.good
    make = functools.partial(value_of, g=good)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = make(case.mistake.text)
        try:
            found = value_of(changed, given=given, tmp=folder)
        except Exception as error:
            return of_error(error)
        means = case.mistake.means
        if means and alike(found, value_of(changed, given=make(means), tmp=folder)):
            return RIGHT, ""
    return NONSENSE, repr(found)[:200]


# ------------------------------------------------------------------ endings


def ending(call: str, folder: Path) -> tuple[str, str]:
    """How a call ends, and what it said or gave."""
    try:
        return "silent", repr(value_of(call, tmp=folder))[:200]
    except Exception as error:
        if re.match(r"[\w.]+\(\) (missing|takes) |\w+\.\w+\(\) got an ", str(error)):
            return CLEAR, str(error)  # Python's own sentence names function and argument
        return of_error(error)


def of_error(error: Exception) -> tuple[str, str]:
    where = traceback.extract_tb(error.__traceback__)[-1].filename
    ours = where.startswith(PACKAGE) and isinstance(
        error,
        (TypeError, ValueError, LookupError, NotImplementedError, ConvergenceError, OSError),
    )
    text = f"{type(error).__name__}: {error}"
    return (CLEAR if ours and "expected" in str(error) else FOREIGN), text


def alike(a: Any, b: Any) -> bool:
    """Whether two answers say the same; times and identities of functions do not count."""
    if isinstance(a, (torch.Tensor, np.ndarray)) or isinstance(b, (torch.Tensor, np.ndarray)):
        a, b = (
            x.detach().cpu().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)
            for x in (a, b)
        )
        return a.shape == b.shape and np.allclose(a, b, rtol=1e-6, atol=1e-9, equal_nan=True)
    if isinstance(a, (xr.Dataset, xr.DataArray)):
        return bool(a.broadcast_equals(b))
    if isinstance(a, numbers.Real) and isinstance(b, numbers.Real):
        return a == b or math.isclose(a, b, rel_tol=1e-6) or (math.isnan(a) and math.isnan(b))
    if type(a) is not type(b):
        return False
    if is_dataclass(a):
        return all(
            alike(getattr(a, f.name), getattr(b, f.name)) for f in fields(a) if f.name != "seconds"
        )
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(alike(x, y) for x, y in zip(a, b, strict=True))
    return True if isinstance(a, (FunctionType, torch.Generator)) else bool(a == b)
