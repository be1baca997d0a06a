"""Calls of public functions, plausible mistakes in their arguments, and how each call ends.

A `Call` is a public function with well-formed arguments and, for some of them, of what kind each
is. `KINDS` has the mistakes for each kind: most must be refused; some mean something (a list in
place of a tensor, big-endian numbers), and then the answer must be that of the well-formed value,
or an error. `verdict` makes one wrong call and says how it ended.
"""

from __future__ import annotations

import datetime
import decimal
import fractions
import math
import pathlib
import random
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
import xarray as xr

import meanfield
from meanfield import bounds, dynamics, layers, linalg, lipschitz, results, sampling, sweeps
from meanfield.attention import (
    AttentionParameters,
    CrossAttention,
    SelfAttention,
    kernels,
    normalizations,
)
from meanfield.errors import ConvergenceError
from meanfield.lipschitz.secant import euclidean_secant_ratio
from meanfield.maps import linearize
from meanfield.measures import (
    ParticleMeasure,
    disintegrate,
    merge,
    pushforward,
    split,
    stack,
)
from meanfield.sweeps.grid import cases_of
from meanfield.transport import (
    certify,
    conditional_sinkhorn_divergence,
    conditional_w2,
    sinkhorn_divergence,
    solve_conditional_w2,
    solve_w2,
    solve_wp,
    w1,
    w2,
    wp,
)

PACKAGE = str(pathlib.Path(meanfield.__file__).parent)

CLEAR, FOREIGN, RIGHT, NONSENSE = "clear", "somebody else's", "right", "nonsense"


class Wrong(NamedTuple):
    """A mistake: from the well-formed value to the wrong one; `means` is what it stands for."""

    make: Callable[[Any], Any]
    means: Callable[[Any], Any] | None = None


def _same(good: Any) -> Any:
    return good


# --- what people put where something else belongs ---

_THINGS: dict[str, Any] = {
    "none": None,
    "text": "abc",
    "empty text": "",
    "bytes": b"abc",
    "dict": {"a": 1.0},
    "set": {1.0, 2.0},
    "object": object(),
    "function": lambda *a, **k: None,
    "class": dict,
    "module": math,
    "path": pathlib.Path("points.npy"),
    "date": datetime.date(2020, 1, 1),
    "ellipsis": ...,
    "slice": slice(None),
}
_THING = {name: Wrong(lambda good, value=value: value) for name, value in _THINGS.items()}


def _frame(values: Any) -> Any:
    import pandas as pd

    return pd.DataFrame(np.atleast_2d(values))


def _with(bad: float) -> Callable[[Any], Any]:
    def make(good: Any) -> Any:
        array = np.array(good, float)
        array.flat[0] = bad
        return array

    return make


def _a(good: Any) -> np.ndarray:
    return np.array(good, float)


def _t(good: Any) -> torch.Tensor:
    return torch.tensor(_a(good))


def _sparse(good: Any) -> Any:
    from scipy.sparse import csr_array

    return csr_array(np.atleast_2d(_a(good)))


_ARRAY = _THING | {
    "number": Wrong(lambda g: 3.0),
    "number as text": Wrong(lambda g: "1.0"),
    "ragged list": Wrong(lambda g: [[1.0, 2.0], [3.0]]),
    "empty list": Wrong(lambda g: []),
    "list of none": Wrong(lambda g: [None, None]),
    "list of texts": Wrong(lambda g: np.asarray(g).astype(str).tolist()),
    "nan": Wrong(_with(math.nan)),
    "inf": Wrong(_with(math.inf)),
    "minus inf": Wrong(_with(-math.inf)),
    "nan in a tensor": Wrong(lambda g: torch.tensor(_with(math.nan)(g))),
    "inf in a list": Wrong(lambda g: _with(math.inf)(g).tolist()),
    "array of truth values": Wrong(lambda g: _a(g) > 0),
    "complex array": Wrong(lambda g: _a(g) + 1j),
    "complex tensor": Wrong(lambda g: _t(g) + 1j),
    "tensor of integers": Wrong(lambda g: _t(g).long(), lambda g: _a(_t(g).long())),
    "tensor of truth values": Wrong(lambda g: _t(g) > 0),
    "half precision": Wrong(lambda g: _t(g).half(), lambda g: _a(_t(g).half())),
    "bfloat16": Wrong(lambda g: _t(g).bfloat16(), lambda g: _a(_t(g).bfloat16().double())),
    "text array": Wrong(lambda g: _a(g).astype(str)),
    "dates": Wrong(lambda g: np.full(np.shape(g), "2020-01-01", "datetime64[D]")),
    "structured array": Wrong(lambda g: np.zeros(np.shape(g), [("x", float), ("y", float)])),
    "objects": Wrong(lambda g: np.full(np.shape(g), None, object)),
    "masked": Wrong(
        lambda g: np.ma.masked_array(_a(g), np.arange(_a(g).size).reshape(np.shape(g)) == 0)
    ),
    "masked, nothing hidden": Wrong(lambda g: np.ma.masked_array(_a(g)), _a),
    "sparse tensor": Wrong(lambda g: _t(g).to_sparse()),
    "sparse array": Wrong(_sparse),
    "data frame": Wrong(lambda g: _frame(_a(g)), _a),
    "data frame of texts": Wrong(lambda g: _frame(_a(g)).astype(str)),
    "data array": Wrong(lambda g: xr.DataArray(_a(g)), _a),
    "dataset": Wrong(lambda g: xr.Dataset({"x": ("n", [1.0, 2.0])})),
    "big-endian": Wrong(lambda g: _a(g).astype(">f8"), _a),
    "reversed strides": Wrong(lambda g: _a(g)[::-1].copy()[::-1], _a),
    "Fortran order": Wrong(lambda g: np.asfortranarray(_a(g)), _a),
    "integers": Wrong(lambda g: np.ones(np.shape(g), int), lambda g: np.ones(np.shape(g))),
    "list": Wrong(lambda g: _a(g).tolist(), _a),
    "generator": Wrong(lambda g: (row for row in _a(g))),
    "range": Wrong(lambda g: range(3)),
    "0-d": Wrong(lambda g: np.array(2.0)),
    "no rows": Wrong(lambda g: np.zeros((0, *np.shape(g)[1:]))),
    "no columns": Wrong(lambda g: np.zeros((*np.shape(g)[:-1], 0))),
    "another last axis": Wrong(lambda g: np.ones((*np.shape(g)[:-1], np.shape(g)[-1] + 1))),
    "measure": Wrong(lambda g: MU),
    "map": Wrong(lambda g: F),
    "list of tensors with gradient": Wrong(lambda g: [x.requires_grad_() for x in _t(g)]),
    "tensor of single precision beside double": Wrong(lambda g: _t(g).float()),
}

_NUMBER = _THING | {
    "number as text": Wrong(lambda g: str(g)),
    "list of one": Wrong(lambda g: [g]),
    "list of two": Wrong(lambda g: [g, g]),
    "empty list": Wrong(lambda g: []),
    "tuple of two": Wrong(lambda g: (g, g)),
    "nan": Wrong(lambda g: math.nan),
    "minus inf": Wrong(lambda g: -math.inf),
    "inf": Wrong(lambda g: math.inf),
    "negative": Wrong(lambda g: -1.0),
    "complex": Wrong(lambda g: complex(g, 1.0)),
    "true": Wrong(lambda g: True),
    "truth value of numpy": Wrong(lambda g: np.bool_(True)),
    "decimal": Wrong(lambda g: decimal.Decimal(str(g)), _same),
    "fraction": Wrong(lambda g: fractions.Fraction(g), _same),
    "0-d array": Wrong(lambda g: np.array(g), _same),
    "0-d tensor": Wrong(lambda g: torch.tensor(g, dtype=torch.float64), _same),
    "array of two": Wrong(lambda g: np.array([g, g])),
    "tensor of two": Wrong(lambda g: torch.tensor([g, g])),
    "data frame": Wrong(lambda g: _frame([[g, g]])),
    "measure": Wrong(lambda g: MU),
    "map": Wrong(lambda g: F),
}
_POSITIVE = _NUMBER | {"zero": Wrong(lambda g: 0.0)}
_COUNT = {k: v for k, v in _NUMBER.items() if k not in ("decimal", "fraction")} | {
    "fraction of one": Wrong(lambda g: g + 0.5),
    "whole float": Wrong(lambda g: float(g), _same),
    "huge": Wrong(lambda g: 10**30),
    "zero": Wrong(lambda g: 0),
}
_FLAG = _THING | {
    "'False'": Wrong(lambda g: "False"),
    "'no'": Wrong(lambda g: "no"),
    "0": Wrong(lambda g: 0, lambda g: False),
    "1": Wrong(lambda g: 1, lambda g: True),
    "2": Wrong(lambda g: 2),
    "nan": Wrong(lambda g: math.nan),
    "empty list": Wrong(lambda g: []),
    "list of one": Wrong(lambda g: [False]),
    "array of two": Wrong(lambda g: np.array([True, False])),
    "tensor of two": Wrong(lambda g: torch.tensor([True, False])),
    "truth value of numpy": Wrong(lambda g: np.bool_(g), _same),
    "truth value of torch": Wrong(lambda g: torch.tensor(g), _same),
    "measure": Wrong(lambda g: MU),
}
_CHOICE = _THING | {
    "typing error": Wrong(lambda g: g[:-1] + "z"),
    "capitals": Wrong(lambda g: g.upper()),
    "blank before": Wrong(lambda g: " " + g),
    "bytes of it": Wrong(lambda g: g.encode()),
    "list of it": Wrong(lambda g: [g]),
    "zero": Wrong(lambda g: 0),
    "true": Wrong(lambda g: True),
    "nan": Wrong(lambda g: math.nan),
    "array of texts": Wrong(lambda g: np.array([g, g])),
    "map": Wrong(lambda g: F),
}
_GENERATOR = {k: v for k, v in _THING.items() if k != "none"} | {
    "seed": Wrong(lambda g: 0),
    "true": Wrong(lambda g: True),
    "generator of numpy": Wrong(lambda g: np.random.default_rng(0)),
    "random.Random": Wrong(lambda g: random.Random(0)),
    "its class": Wrong(lambda g: torch.Generator),
    "state": Wrong(lambda g: torch.Generator().get_state()),
    "nan": Wrong(lambda g: math.nan),
}


def _broken(bad: float) -> Callable[[Any], Any]:
    def make(good: ParticleMeasure) -> ParticleMeasure:
        points = good.points.clone()
        points.view(-1)[0] = bad
        return good.replace(points)

    return make


_MEASURE = _THING | {
    "points": Wrong(lambda g: g.points),
    "points of numpy": Wrong(lambda g: g.points.numpy()),
    "points in lists": Wrong(lambda g: g.points.tolist()),
    "data frame": Wrong(lambda g: _frame(g.points.numpy())),
    "points and weights": Wrong(lambda g: (g.points, g.weights)),
    "vector": Wrong(lambda g: np.arange(3.0)),
    "number": Wrong(lambda g: 1.0),
    "nan": Wrong(lambda g: math.nan),
    "true": Wrong(lambda g: True),
    "map": Wrong(lambda g: F),
    "class of it": Wrong(lambda g: ParticleMeasure),
    "dataset": Wrong(lambda g: xr.Dataset({"x": ("n", [1.0])})),
    "list of measures": Wrong(lambda g: [g, g]),
    "generator": Wrong(lambda g: (x for x in [g])),
    "complex tensor": Wrong(lambda g: g.points + 1j),
    "nan at an atom": Wrong(_broken(math.nan)),
    "inf at an atom": Wrong(_broken(math.inf)),
}
_OF_MEASURES = (
    *("points", "points of numpy", "points in lists", "data frame", "points and weights"),
    *("complex tensor", "nan at an atom", "inf at an atom", "list of measures", "generator"),
)
_BESIDE_MAP = _MEASURE | {
    "another dimension": Wrong(lambda g: ParticleMeasure(torch.ones(3, 5, dtype=torch.float64))),
    "single precision": Wrong(lambda g: g.to(torch.float32)),
}
_MAP = _THING | {
    "number": Wrong(lambda g: 1.0),
    "matrix": Wrong(lambda g: np.eye(2)),
    "tensor": Wrong(lambda g: torch.eye(2, dtype=torch.float64)),
    "measure": Wrong(lambda g: MU),
    "class of it": Wrong(lambda g: SelfAttention),
    "parameters": Wrong(lambda g: PARAMETERS),
    "torch function": Wrong(lambda g: torch.tanh),
    "module of torch": Wrong(lambda g: torch.nn.Linear(2, 2).double()),
    "map of points": Wrong(lambda g: lambda x: x**2),
    "gives points": Wrong(lambda g: lambda mu: mu.points),
    "gives nothing": Wrong(lambda g: lambda mu: None),
    "takes nothing": Wrong(lambda g: lambda: MU),
    "takes two": Wrong(lambda g: lambda mu, nu: mu),
    "changes the weights": Wrong(
        lambda g: lambda mu: ParticleMeasure(mu.points, torch.softmax(mu.points[..., 0], -1))
    ),
    "drops an atom": Wrong(lambda g: lambda mu: ParticleMeasure(mu.points[..., 1:, :])),
    "true": Wrong(lambda g: True),
}

KINDS: dict[str, dict[str, Wrong]] = {
    "array": _ARRAY,
    "number": {k: v for k, v in _NUMBER.items() if k != "negative"},
    "positive": _POSITIVE,
    "not negative": _NUMBER,
    "count": _COUNT,
    "flag": _FLAG,
    "choice": _CHOICE,
    "generator": _GENERATOR,
    "measure": _MEASURE,
    "beside a map": _BESIDE_MAP,
    "map": _MAP,
}


# --- the calls ---


@dataclass(frozen=True)
class Call:
    """A public function, well-formed arguments, and what kind each argument is.

    Attributes:
        function: the function.
        good: the well-formed arguments, by name; a leading "/" marks those given by place.
        kinds: of which kind each is; those left out are not tried.
        fine: (argument, mistake) pairs that are no mistake here, and what they mean.
    """

    name: str
    function: Callable[..., Any]
    good: dict[str, Any]
    kinds: dict[str, str]
    fine: dict[tuple[str, str], Callable[[Any], Any] | None] = field(default_factory=dict)

    def __call__(self, **changed: Any) -> Any:
        values = self.good | changed
        places = [v for k, v in values.items() if k.startswith("/")]
        return self.function(*places, **{k: v for k, v in values.items() if not k.startswith("/")})


PARAMETERS = AttentionParameters.from_bilinear([[-1.0, 0.2], [0.0, 0.5]], [[1.0, 0.0], [0.3, 1.0]])
F = SelfAttention(PARAMETERS)
MASKED = SelfAttention(PARAMETERS, causal=True)
X = np.array([[1.0, 0.5], [-0.5, 1.0], [0.2, -1.0]])
MU = ParticleMeasure(X)
NU = ParticleMeasure(X[::-1].copy() + 0.25)
SEQ = ParticleMeasure.from_sequence(X)
GEN = torch.Generator
A, V = np.array([[-1.0, 0.2], [0.0, 0.5]]), np.eye(2)
CONSTANT = lipschitz.local_lipschitz(F, MU)
TIED = AttentionParameters.tied_l2(np.eye(2), np.eye(2))
GROWING = layers.contractive(layers.Pointwise(torch.sin), 0.5, constant=1.0)
J = linalg.LinearMap.pointwise(torch.ones(1, 2, 2, dtype=torch.float64))
FLOWED = dynamics.flow(F, MU, [0.0, 0.5, 1.0], method="rk4", step=0.5)
CASES = xr.Dataset({"y": ("case", [3.0, 6.0])}, coords={"x": ("case", [1.0, 4.0])})

# Numbers that may be arrays, which broadcast; a masked or complex one may not.
_BROADCAST = {
    "list of one": None, "list of two": None, "tuple of two": None, "array of two": None,
    "tensor of two": None, "0-d array": _same, "0-d tensor": _same, "data frame": None,
}  # fmt: skip


def _wide(*names: str, **also: Callable[[Any], Any] | None) -> dict[tuple[str, str], Any]:
    """Arguments that broadcast, so that several numbers are as good as one."""
    several = {(n, k): v for n in names for k, v in _BROADCAST.items()}
    return several | {(n, k): v for n in names for k, v in also.items()}


def _atoms(good: Any) -> Any:
    return good


# Clouds that the distances take besides measures.
_CLOUDS = {
    (name, kind): _atoms
    for name in ("/mu", "/nu")
    for kind in (
        "points",
        "points of numpy",
        "points in lists",
        "data frame",
        "points and weights",
    )
}
_LISTED = _CLOUDS | {(name, "list of measures"): None for name in ("/mu", "/nu")}  # a batch
_NO_NONE = None


def _optional(*names: str) -> dict[tuple[str, str], Any]:
    return {(name, "none"): None for name in names}


CALLS = [
    Call("ParticleMeasure", ParticleMeasure,
         {"/points": X, "weights": [0.2, 0.3, 0.5]}, {"/points": "array", "weights": "array"},
         _optional("weights") | {("/points", "tensor of single precision beside double"): None,
                                 ("weights", "integers"): None}),
    Call("ParticleMeasure(log_weights, positions)", ParticleMeasure,
         {"/points": X, "log_weights": np.log([0.2, 0.3, 0.5]), "positions": [0.1, 0.5, 1.0]},
         {"log_weights": "array", "positions": "array"},
         _optional("log_weights", "positions")
         | {("positions", "integers"): lambda g: np.ones(3), ("log_weights", "integers"): None}),
    Call("ParticleMeasure.of", ParticleMeasure.of, {"/mu": MU}, {"/mu": "measure"}, _CLOUDS),
    Call("ParticleMeasure.of(points, weights)", ParticleMeasure.of,
         {"/value": X, "/weights": [0.2, 0.3, 0.5]}, {"/value": "array", "/weights": "array"},
         _optional("/weights")
         | {("/value", "tensor of single precision beside double"): None,
            ("/value", "another last axis"): None}),
    Call("ParticleMeasure.from_sequence", ParticleMeasure.from_sequence,
         {"/points": X}, {"/points": "array"},
         {("/points", "tensor of single precision beside double"): None,
          ("/points", "another last axis"): None}),
    Call("replace", MU.replace, {"/points": torch.tensor(X)}, {"/points": "array"},
         {("/points", "another last axis"): None}),
    Call("pushforward", pushforward,
         {"/T": torch.tanh, "/mu": MU, "use_positions": False},
         {"/mu": "measure", "use_positions": "flag", "/T": "map"},
         {("/T", "torch function"): None, ("/T", "map of points"): None,
          ("/T", "module of torch"): None}),
    Call("disintegrate", disintegrate, {"/mu": SEQ}, {"/mu": "measure"}),
    Call("split", split, {"/mu": MU, "/copies": 2}, {"/mu": "measure", "/copies": "count"}),
    Call("merge", merge, {"/mu": MU, "/atol": 0.5}, {"/mu": "measure", "/atol": "not negative"}),
    Call("stack", lambda one, measures: stack([one, measures]), {"/one": MU, "/mu": NU},
         {"/mu": "beside a map"}),
    Call("AttentionParameters", AttentionParameters,
         {"/query": A, "/key": V, "/value": V, "scale": 0.5, "query_bias": [[0.1, 0.2]]},
         {"/query": "array", "/key": "array", "/value": "array", "scale": "number",
          "query_bias": "array"},
         _optional("scale", "query_bias") | _wide("scale")
         | {("/query", "integers"): None}),
    Call("AttentionParameters.from_bilinear", AttentionParameters.from_bilinear,
         {"/bilinear": A, "/value": V}, {"/bilinear": "array", "/value": "array"}),
    Call("AttentionParameters.random", AttentionParameters.random,
         {"/dim": 4, "n_heads": 2, "head_dim": 2, "std": 0.5, "biases": False, "generator": None},
         {"/dim": "count", "n_heads": "count", "head_dim": "count", "std": "positive",
          "biases": "flag", "generator": "generator"},
         _optional("head_dim", "std") | {("std", "zero"): None}),
    Call("AttentionParameters.tied_l2", AttentionParameters.tied_l2,
         {"/query": V, "/value": V}, {"/query": "array", "/value": "array"}),
    Call("SelfAttention", lambda *a, **k: SelfAttention(*a, **k)(SEQ),
         {"/parameters": PARAMETERS, "causal": False, "kernel": kernels.dot_product,
          "normalization": normalizations.softmax},
         {"/parameters": "thing", "causal": "flag", "kernel": "choice thing",
          "normalization": "choice thing"}),
    Call("SelfAttention()", F, {"/mu": MU}, {"/mu": "beside a map"}),
    Call("SelfAttention.field", lambda x: F.field(MU)(x), {"/x": X}, {"/x": "array"}),
    Call("SelfAttention.field, masked", lambda s: MASKED.field(SEQ)(X, s),
         {"/s": [1.0, 1.0, 1.0]}, {"/s": "array"}),
    Call("SelfAttention.tangent", F.linearize, {"/mu": MU, "geometry": "euclidean"},
         {"/mu": "beside a map", "geometry": "choice"}),
    Call("kernels.soft_cap", kernels.soft_cap, {"/tau": 2.0}, {"/tau": "positive"}),
    Call("kernels.cosine", kernels.cosine, {"/temperature": 2.0, "eps": 0.5},
         {"/temperature": "positive", "eps": "not negative"}),
    Call("kernels.rotary", kernels.rotary,
         {"/base": 100.0, "dim": 2, "length": 4.0, "interleaved": False},
         {"/base": "positive", "dim": "count", "length": "positive", "interleaved": "flag"},
         _optional("dim")),
    Call("kernels.window", kernels.window, {"/width": 0.5}, {"/width": "positive"},
         {("/width", "inf"): None}),
    Call("kernels.alibi", kernels.alibi, {"/slopes": [0.5, 0.25], "length": 4.0},
         {"/slopes": "array", "length": "positive"},
         {("/slopes", "range"): None, ("/slopes", "another last axis"): None,
          ("/slopes", "tensor of single precision beside double"): None}),
    Call("normalizations.sink", normalizations.sink, {"/logits": 0.5}, {"/logits": "number"},
         _wide("/logits")),
    Call("normalizations.sinkhorn", normalizations.sinkhorn,
         {"rtol": 1e-6, "max_iterations": 10, "strict": True},
         {"rtol": "positive", "max_iterations": "count", "strict": "flag"},
         {("max_iterations", "zero"): None}),
    Call("linearize", lambda *a, **k: linearize(*a, **k).atoms.to_dense(),
         {"/F": F, "/mu": MU, "geometry": "euclidean"},
         {"/F": "map", "/mu": "beside a map", "geometry": "choice"}),
    Call("operator_norm", linalg.operator_norm,
         {"/J": J, "rtol": 1e-3, "upper_rtol": 0.1, "solver": None, "strict": True},
         {"/J": "map", "rtol": "positive", "upper_rtol": "not negative", "solver": "thing",
          "strict": "flag"},
         {("upper_rtol", "inf"): None} | _optional("solver")),
    Call("Certified", linalg.Certified,
         {"rounds": 2, "group": 2, "deflate": 3, "max_steps": 20},
         {"rounds": "count", "group": "count", "deflate": "count", "max_steps": "count"},
         {("deflate", "zero"): None}),
    Call("Lanczos", linalg.Lanczos,
         {"max_steps": 20, "miss": 1e-3, "generator": None, "max_basis": 4},
         {"max_steps": "count", "miss": "positive",
          "generator": "generator", "max_basis": "count"},
         _optional("max_basis", "miss")),
    Call("local_lipschitz", lipschitz.local_lipschitz,
         {"/F": F, "/mu": MU, "geometry": "wasserstein", "rtol": 1e-3, "upper_rtol": 0.1,
          "solver": None, "strict": True},
         {"/F": "map", "/mu": "beside a map", "geometry": "choice", "rtol": "positive",
          "upper_rtol": "not negative", "solver": "thing", "strict": "flag"},
         {("upper_rtol", "inf"): None} | _optional("solver")),
    Call("secant_ratio", lipschitz.secant_ratio,
         {"/F": F, "/mu": MU, "/nu": NU, "conditional": False},
         {"/F": "map", "/mu": "beside a map", "/nu": "beside a map", "conditional": "flag"},
         _optional("conditional")
         | {("/F", "changes the weights"): None, ("/F", "drops an atom"): None}),
    Call("euclidean_secant_ratio", euclidean_secant_ratio,
         {"/f": lambda x: x**2, "/X": X, "/Y": X + 0.5},
         {"/f": "map", "/X": "array", "/Y": "array"},
         {("/f", "torch function"): None, ("/f", "map of points"): None,
          ("/f", "module of torch"): None}),
    Call("ball_upper", lipschitz.ball_upper, {"/F": F, "/mu": MU, "/epsilon": 0.1},
         {"/F": "map", "/mu": "beside a map", "/epsilon": "not negative"},
         _wide("/epsilon") | {("/epsilon", "empty list"): None}),
    Call("cross_lipschitz", lipschitz.cross_lipschitz,
         {"/cross": CrossAttention(F), "/mu": MU, "/eta": NU, "rtol": 1e-3, "upper_rtol": 0.1,
          "solver": None, "strict": True},
         {"/cross": "thing", "/mu": "beside a map", "/eta": "beside a map", "rtol": "positive",
          "upper_rtol": "not negative", "solver": "thing", "strict": "flag"},
         {("upper_rtol", "inf"): None} | _optional("solver")),
    Call("compression_error", lipschitz.compression_error,
         {"/F": F, "/mu": MU, "/nu": NU, "/queries": X, "/epsilon": 0.1, "positions": None},
         {"/F": "thing", "/mu": "beside a map", "/nu": "beside a map", "/queries": "array",
          "/epsilon": "not negative"}, {("/F", "map"): None}),
    Call("certified_radius", lipschitz.certified_radius,
         {"/F": F, "/readout": lipschitz.Readout(A), "/mu": MU},
         {"/F": "map", "/readout": "thing", "/mu": "beside a map"}),
    Call("worst_case", lipschitz.worst_case,
         {"/F": F, "/radius": 1.0, "n_atoms": 2, "dim": 2, "positioned": False, "starts": 2,
          "steps": 1, "generator": None},
         {"/F": "map", "/radius": "positive", "n_atoms": "count", "dim": "count",
          "positioned": "flag", "starts": "count", "steps": "count", "generator": "generator"},
         _optional("dim", "positioned")),
    Call("localize", lipschitz.localize,
         {"/constant": CONSTANT, "/F": F, "/mu": MU, "component": "particle"},
         {"/constant": "thing", "/F": "map", "/mu": "beside a map", "component": "choice"}),
    Call("compare_lemma_3_2", lipschitz.compare_lemma_3_2,
         {"/F": F, "/X": X, "steps": [0.1], "conditional": False, "generator": None},
         {"/F": "map", "/X": "array", "conditional": "flag", "generator": "generator"},
         _optional("conditional")),
    Call("infinity_norm", lipschitz.infinity_norm, {"/F": F, "/mu": MU},
         {"/F": "map", "/mu": "beside a map"}),
    Call("local_order", lipschitz.local_order, {"/F": F, "/mu": MU, "p": 2.0},
         {"/F": "map", "/mu": "beside a map", "p": "positive"}, {("p", "inf"): None}),
    Call("bounds.mean_field", bounds.mean_field, {"/norm_A": 1.0, "/norm_V": 1.0, "/radius": 1.0},
         dict.fromkeys(["/norm_A", "/norm_V", "/radius"], "not negative"),
         _wide("/norm_A", "/norm_V", "/radius")),
    Call("bounds.masked_mean_field", bounds.masked_mean_field,
         {"/norm_A": 1.0, "/norm_V": 1.0, "/radius": 1.0, "dim": 1},
         {"/norm_A": "not negative", "dim": "count"}, _wide("/norm_A") | _optional("dim")),
    Call("bounds.tokens", bounds.tokens,
         {"/norm_A": 1.0, "/norm_V": 1.0, "/radius": 1.0, "/n": 10, "causal": False, "p": 2.0},
         {"/norm_A": "not negative", "/n": "count", "causal": "flag", "p": "positive"},
         _wide("/norm_A", "/n", "p", inf=None) | {("/norm_A", "inf"): _NO_NONE}),
    Call("bounds.theorem_3_3", bounds.theorem_3_3,
         {"/norm_A": 1.0, "/norm_V": 1.0, "/radius": 1.0, "/n": 10},
         {"/norm_V": "not negative", "/radius": "not negative", "/n": "count"},
         _wide("/norm_V", "/radius", "/n") | {("/n", "inf"): None}),
    Call("bounds.theorem_3_5", bounds.theorem_3_5,
         {"/norm_A": 1.0, "/norm_V": 1.0, "/radius": 1.0},
         {"/norm_A": "not negative", "/norm_V": "not negative"}, _wide("/norm_A", "/norm_V")),
    Call("bounds.two_dirac_lower", bounds.two_dirac_lower, {"/gamma": 1.0, "/radius": 1.0},
         {"/gamma": "not negative", "/radius": "not negative"}, _wide("/gamma", "/radius")),
    Call("bounds.proposition_3_4", bounds.proposition_3_4,
         {"/gamma": 1.0, "/radius": 1.0, "/n": 5}, {"/gamma": "number", "/n": "count"},
         _wide("/gamma", "/n") | {("/n", "inf"): None}),
    Call("bounds.scaling_factor", bounds.scaling_factor, {"/A": A}, {"/A": "array"},
         {("/A", k): None for k in ("tensor of integers", "half precision", "bfloat16",
                                    "tensor of single precision beside double")}),
    Call("bounds.table", bounds.table, {"/layer": PARAMETERS, "/radius": 1.0, "/n": 5,
                                        "causal": False},
         {"/layer": "thing", "/radius": "positive", "/n": "count", "causal": "flag"},
         _optional("/n", "causal") | {("/layer", "map"): None}),
    Call("bounds.sphere_mean_field", bounds.sphere_mean_field,
         {"/norm_A": 1.0, "/norm_V": 1.0, "/radius": 1.0},
         {"/norm_A": "not negative", "/norm_V": "not negative"}, _wide("/norm_A", "/norm_V")),
    Call("bounds.tokens_lower", bounds.tokens_lower,
         {"/norm_A": 1.0, "/radius": 1.0, "/n": 5}, {"/norm_A": "not negative", "/n": "count"},
         _wide("/norm_A", "/n") | {("/n", "inf"): None}),
    Call("bounds.l2_theorem_3_2", bounds.l2_theorem_3_2, {"/layer": TIED, "/n": 5},
         {"/layer": "thing", "/n": "count"}, {("/n", "fraction of one"): None}),
    Call("bounds.l2_attention_2", bounds.l2_attention_2, {"/layer": TIED, "/n": 5},
         {"/layer": "thing", "/n": "count"}, {("/n", "fraction of one"): None}),
    Call("bounds.local_upper", bounds.local_upper, {"/F": F, "/mu": MU},
         {"/F": "map", "/mu": "beside a map"}),
    Call("w2", w2, {"/mu": MU, "/nu": NU, "method": "auto", "rtol": 1e-9},
         {"/mu": "beside a map", "/nu": "beside a map", "method": "choice", "rtol": "positive"},
         _LISTED),
    Call("w1", w1, {"/mu": MU, "/nu": NU, "rtol": 1e-9},
         {"/mu": "beside a map", "/nu": "beside a map", "rtol": "positive"}, _LISTED),
    Call("solve_w2", solve_w2,
         {"/mu": MU, "/nu": NU, "method": "auto", "rtol": 1e-9, "time_limit": 9.0,
          "exact_weights": False, "strict": True},
         {"/mu": "beside a map", "method": "choice", "rtol": "positive", "time_limit": "positive",
          "exact_weights": "flag", "strict": "flag"},
         _LISTED | _optional("time_limit") | {("time_limit", "inf"): None}),
    Call("solve_wp", solve_wp,
         {"/mu": MU, "/nu": NU, "/p": 3, "rtol": 1e-9, "exact_weights": False, "strict": True},
         {"/nu": "beside a map", "rtol": "positive", "exact_weights": "flag", "strict": "flag"},
         _LISTED),
    Call("wp", wp, {"/mu": MU, "/nu": NU, "/p": 1.5, "rtol": 1e-9},
         {"/mu": "beside a map", "/p": "positive", "rtol": "positive"}, _LISTED),
    Call("certify", certify,
         {"/mu": MU, "/nu": NU, "p": 3, "rtol": 1e-9},
         {"/nu": "beside a map", "p": "positive", "rtol": "positive"},
         _CLOUDS),
    Call("solve_conditional_w2", solve_conditional_w2,
         {"/mu": SEQ, "/nu": SEQ.replace(torch.tensor(X) + 0.5), "position_atol": 0.1,
          "method": "auto", "rtol": 1e-9, "strict": True},
         {"/mu": "beside a map", "/nu": "beside a map", "position_atol": "not negative",
          "method": "choice", "rtol": "positive", "strict": "flag"}),
    Call("conditional_w2", conditional_w2,
         {"/mu": SEQ, "/nu": SEQ.replace(torch.tensor(X) + 0.5), "position_atol": 0.1},
         {"/mu": "beside a map", "/nu": "beside a map", "position_atol": "not negative"}),
    Call("sinkhorn_divergence", sinkhorn_divergence,
         {"/mu": MU, "/nu": NU, "blur": 0.5, "scaling": 0.5},
         {"/mu": "beside a map", "blur": "positive", "scaling": "positive"}, _LISTED),
    Call("conditional_sinkhorn_divergence", conditional_sinkhorn_divergence,
         {"/mu": SEQ, "/nu": SEQ.replace(torch.tensor(X) + 0.5), "penalty": 1.0, "blur": 0.5,
          "scaling": 0.5},
         {"/mu": "beside a map", "penalty": "not negative", "blur": "positive",
          "scaling": "positive"},
         {("penalty", k): None for k in ("inf", "none")}),
    Call("sampling.two_diracs", sampling.two_diracs,
         {"/radius": 1.0, "/log_ratio": -2.0, "/direction": [1.0, 0.0], "heavy_at": -1.0,
          "positioned": False},
         {"/radius": "not negative", "/log_ratio": "number", "/direction": "array",
          "heavy_at": "number", "positioned": "flag"},
         _wide("/radius", "/log_ratio")
         | {("/direction", k): None for k in ("another last axis", "range", "map",
                                              "tensor of single precision beside double")}),
    Call("sampling.adversarial", sampling.adversarial,
         {"/A": A, "/radius": 1.0, "/n": 4, "branch": "best"},
         {"/A": "array", "/radius": "positive", "/n": "count", "branch": "choice"},
         {("/A", "tensor of single precision beside double"): None, ("/radius", "zero"): None}),
    Call("sampling.critical_pair", sampling.critical_pair, {"/A": A, "branch": "best"},
         {"/A": "array", "branch": "choice"},
         {("/A", "tensor of single precision beside double"): None}),
    Call("sampling.ball", sampling.ball,
         {"/n": 3, "/dim": 2, "radius": 1.0, "generator": None},
         {"/n": "count", "/dim": "count", "radius": "not negative", "generator": "generator"}),
    Call("layers.LayerNorm", lambda *a, **k: layers.LayerNorm(*a, **k)(MU),
         {"/weight": [1.0, 2.0], "bias": [0.0, 0.5], "eps": 0.1},
         {"/weight": "array", "bias": "array", "eps": "not negative"}, _optional("bias")),
    Call("layers.MLP", lambda *a, **k: layers.MLP(*a, **k)(MU),
         {"/inner": np.ones((3, 2)), "/outer": np.ones((2, 3)), "activation": "gelu"},
         {"/inner": "array", "/outer": "array", "activation": "choice"}),
    Call("layers.Residual", lambda *a, **k: layers.Residual(*a, **k)(MU),
         {"/map": F, "scale": 0.5}, {"/map": "map", "scale": "number"},
         {("/map", "changes the weights"): None}),
    Call("layers.Chain", lambda one: layers.Chain([F, one])(MU), {"/map": F}, {"/map": "map"},
         {("/map", "changes the weights"): None, ("/map", "drops an atom"): None}),
    Call("layers.contractive", layers.contractive,
         {"/F": F, "/factor": 0.5, "constant": 2.0, "norm": "l2"},
         {"/F": "map", "/factor": "positive", "constant": "positive", "norm": "choice"}),
    Call("layers.invert", layers.invert,
         {"/G": GROWING, "/nu": MU, "rtol": 1e-6, "max_steps": 50, "strict": True},
         {"/G": "map", "/nu": "measure", "rtol": "positive", "max_steps": "count",
          "strict": "flag"}),
    Call("dynamics.flow", dynamics.flow,
         {"/F": F, "/mu": MU, "/times": [0.0, 1.0], "method": "rk4", "step": 0.5,
          "constraint": None, "coalesce": 0.0},
         {"/F": "map", "/mu": "beside a map", "/times": "array", "method": "choice",
          "step": "positive", "coalesce": "not negative"},
         _optional("step")
         | {("/times", k): None for k in ("another last axis", "range", "integers")}),
    Call("dynamics.stability", dynamics.stability,
         {"/F": F, "/mu": MU, "/times": [0.0, 1.0], "method": "rk4", "step": 0.5},
         {"/F": "map", "/mu": "beside a map", "method": "choice", "step": "positive"},
         _optional("step")),
    Call("dynamics.measure_at", dynamics.measure_at, {"/ds": FLOWED, "/index": 1},
         {"/ds": "thing", "/index": "count"}, {("/index", "zero"): None,
                                                  ("/index", "negative"): None}),
    Call("dynamics.clusters", dynamics.clusters, {"/mu": MU, "/scale": 0.1},
         {"/mu": "measure", "/scale": "positive"}, {("/scale", "zero"): None}),
    Call("cases_of", cases_of, {"/grid": {"a": [1, 2]}}, {"/grid": "map"}),
    Call("sweep", lambda *a, **k: sweeps.sweep(*a, **k, progress=False),
         {"/fn": lambda x: {"y": x}, "/grid": {"x": [1.0, 2.0]}, "seed": 0, "executor": None,
          "batch_size": 2},
         {"/fn": "function", "/grid": "map", "seed": "seed", "executor": "generator",
          "batch_size": "count"},
         _optional("batch_size", "executor")),
    Call("results.fit_power", results.fit_power,
         {"/x": [1.0, 4.0, 9.0], "/y": [3.0, 6.0, 9.5], "exponent": 0.5, "level": 0.9},
         {"/x": "array", "/y": "array", "exponent": "number", "level": "positive"},
         _optional("exponent")
         | {(a, k): None for a in ("/x", "/y")
            for k in ("nan", "nan in a tensor", "half precision", "bfloat16",
                      "tensor of single precision beside double")}),
    Call("results.to_cube", results.to_cube, {"/ds": CASES}, {"/ds": "thing"}),
    Call("results.write_dataset", lambda ds: results.write_dataset(ds, "/nowhere/at/all.nc"),
         {"/ds": CASES}, {"/ds": "thing"}, {("/ds", "dataset"): None}),
]  # fmt: skip

# What looks like a mistake and is none, by call; `...` stands for every argument.
_BROKEN_ATOMS = ("nan at an atom", "inf at an atom")
_ANY_MAP = (
    *("function", "torch function", "module of torch", "map of points", "gives points"),
    *("gives nothing", "takes nothing", "takes two", "changes the weights", "drops an atom"),
)
_NUMBERS_OF_ANY_TYPE = (
    *("tensor of integers", "half precision", "bfloat16"),
    *("tensor of single precision beside double",),
)
FINE: dict[str, tuple[str, ...]] = {
    # Any dimension, any number of heads.
    "ParticleMeasure": ("another last axis",),
    "AttentionParameters.tied_l2": ("another last axis",),
    # What a map made is passed on; distances and constants refuse it.
    "replace": ("nan in a tensor",),
    "pushforward": _BROKEN_ATOMS,
    "split": _BROKEN_ATOMS,
    "stack": _BROKEN_ATOMS,
    "SelfAttention()": _BROKEN_ATOMS,
    # One position for all points.
    "SelfAttention.field, masked": ("number", "0-d"),
    # A tolerance of 0 goes on to rounding.
    "operator_norm": ("zero",),
    "local_lipschitz": ("zero",),
    "cross_lipschitz": ("zero",),
    # Bounds at astronomic numbers of tokens are numbers.
    "bounds.tokens": ("huge",),
    "bounds.theorem_3_3": ("huge",),
    "bounds.proposition_3_4": ("huge",),
    "bounds.l2_attention_2": ("huge",),
    "bounds.l2_theorem_3_2": ("huge",),
    "bounds.tokens_lower": ("huge",),
    # An empty batch of radii is an empty batch of measures.
    "sampling.two_diracs": ("empty list",),
    # The map is not called yet: `invert` does, and says so.
    "layers.contractive": _ANY_MAP,
    "dynamics.flow": (*_NUMBERS_OF_ANY_TYPE, "list of tensors with gradient"),
    "results.fit_power": _NUMBERS_OF_ANY_TYPE,
}

KINDS["thing"] = {k: v for k, v in _MEASURE.items() if k not in _OF_MEASURES} | {
    "points": Wrong(lambda g: X),
    "tensor": Wrong(lambda g: torch.tensor(X)),
    "lists": Wrong(lambda g: X.tolist()),
    "measure": Wrong(lambda g: MU),
    "data frame": Wrong(lambda g: _frame(X)),
}
KINDS["choice thing"] = _THING | {
    "number": Wrong(lambda g: 1.0),
    "true": Wrong(lambda g: True),
    "list of nothing": Wrong(lambda g: [None]),
    "measure": Wrong(lambda g: MU),
}
KINDS["function"] = {k: v for k, v in _THING.items() if k not in ("function", "class")} | {
    "number": Wrong(lambda g: 1.0),
    "measure": Wrong(lambda g: MU),
}
KINDS["seed"] = {k: v for k, v in _NUMBER.items() if k not in ("negative", "decimal", "fraction")}
KINDS["array pair"] = {k: v for k, v in _THING.items() if k != "none"} | {
    "one of two": Wrong(lambda g: [0.2, 0.3, 0.5]),
    "number": Wrong(lambda g: 1.0),
    "not of mass one": Wrong(lambda g: (np.ones(3), np.ones(3))),
    "negative": Wrong(lambda g: (np.array([-1.0, 1.0, 1.0]), None)),
    "texts": Wrong(lambda g: ("a", "b")),
}


class Case(NamedTuple):
    """One wrong call."""

    call: Call
    argument: str
    mistake: str

    def __str__(self) -> str:
        return f"{self.call.name}({self.argument.lstrip('/')}: {self.mistake})"


def cases() -> Iterator[Case]:
    """All wrong calls."""
    for call in CALLS:
        for argument, kind in call.kinds.items():
            for mistake in KINDS[kind]:
                if mistake in FINE.get(call.name, ()):
                    continue
                if call.fine.get((argument, mistake), "wrong") is not None:
                    yield Case(call, argument, mistake)


def verdict(case: Case) -> tuple[str, str]:
    """How a wrong call ends, and what it said or gave."""
    call, argument, mistake = case
    good = call.good[argument]
    wrong = KINDS[call.kinds[argument]][mistake]
    means = call.fine.get((argument, mistake), wrong.means)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            value = wrong.make(good)
        except Exception as error:
            raise AssertionError(f"{case}: the harness cannot make it") from error
        try:
            found = call(**{argument: value})
        except Exception as error:
            return of_error(error)
        if means is not None and alike(found, call(**{argument: means(good)})):
            return RIGHT, ""
    return NONSENSE, repr(found)[:200]


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
            x.detach().numpy() if isinstance(x, torch.Tensor) else np.asarray(x) for x in (a, b)
        )
        return a.shape == b.shape and np.allclose(a, b, rtol=1e-6, atol=1e-9, equal_nan=True)
    if isinstance(a, (xr.Dataset, xr.DataArray)):
        return bool(a.broadcast_equals(b))
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return a == b or math.isclose(a, b, rel_tol=1e-6) or (math.isnan(a) and math.isnan(b))
    if is_dataclass(a):
        return all(
            alike(getattr(a, f.name), getattr(b, f.name)) for f in fields(a) if f.name != "seconds"
        )
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(alike(x, y) for x, y in zip(a, b, strict=True))
    return True if isinstance(a, FunctionType) else bool(a == b)
