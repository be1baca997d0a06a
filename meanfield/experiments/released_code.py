"""What do the scripts published with [CAP24] compute, beside the norm?

Their power iteration takes the value instead of the tangent out of the forward-mode pair and
settles on √‖Dg(X)ᵀ g(X)‖. It is √‖g(X)‖ times the root of ‖Dgᵀg‖/‖g‖, and grows as n^1/4 where
tokens of the output are of one size, whatever attention does. Nor is g the attention of the paper
everywhere: on text it is LayerNorm(x + attention) for BERT, at the worst case of a head the heads
of BERT before the output matrix, both without the mask of the decoder; the rows of GPT-2's fused
weight stand for a head; and the random GPT-2 has its dropout on, and the embedding of word 0 in
every token. A run is one panel of Figures 1 and 4: g as theirs, beside the norm of the paper.
"""

from __future__ import annotations

import functools
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor
from torch.linalg import matrix_norm

from meanfield import ParticleMeasure, SelfAttention, linearize, sampling
from meanfield.attention import AttentionParameters
from meanfield.checks import choice, to_host
from meanfield.experiments import inputs
from meanfield.experiments.experiment import Experiment
from meanfield.experiments.settings import over, setting
from meanfield.figures.canvas import literal
from meanfield.figures.charts import Chart, Curve, Formula, Law
from meanfield.figures.plots import exponents
from meanfield.figures.selection import levels, select
from meanfield.layers import Chain
from meanfield.lipschitz import LocalLipschitz, local_lipschitz
from meanfield.measures import MeasureMap
from meanfield.pretrained import Transformer
from meanfield.results import Variable
from meanfield.results.fits import with_laws

__all__ = ["EXPERIMENT", "Settings", "released_quantity"]

_INPUTS = {
    "text": "Text {text}",
    "head": "Worst case of head {head}, R = {radius:.15g}",
    "rows": "Worst case of the rows taken for head {head}, R = {radius:.15g}",
}
_MAPS = ("scripts", "attention")


@dataclass(frozen=True)
class Settings(inputs.OfText):
    """What the sweep runs over: one panel."""

    model: str = setting(
        "random:gpt2",
        "model, as in `meanfield.pretrained.load`",
        quick=inputs.with_random_weights,
    )
    seed: int = setting(320, "seed of random weights, and of dropout")
    dtype: str = setting("float64", "'float32' or 'float64'")
    layers: tuple[int, ...] = over("layer", (6,), "attention layer, from 0", quick=(1,))
    n_tokens: tuple[int, ...] = over(
        "n_tokens", tuple(range(2, 98, 5)), "number of tokens n", quick=(2, 3, 4, 6, 8)
    )
    causal: bool | None = setting(None, "whether the model is masked; as it is if None")
    inputs: str = setting(
        "rows", "'text'; 'head': the worst case of a head; 'rows': of what the scripts take for it"
    )
    head: int = setting(0, "head whose worst case is taken")
    radius: float = setting(100.0, "R of the worst case")
    map: str = setting("scripts", "'scripts': the map that they take; 'attention': the paper's")
    dropout: bool = setting(False, "whether the dropout of a GPT-2 is on, on text")
    drawn_constant: float = setting(0.92, "C of the authors' curve C nᵖ; 0 for none", quick=0.0)
    drawn_exponent: float = setting(0.5, "p of the authors' curve")
    rtol: float = setting(1e-4, "relative accuracy of the norms", quick=1e-3)


def resolve(s: Settings) -> Settings:
    """All layers if none is named; one window, and no text, at the worst case of a head."""
    choice(s.inputs, "inputs", _INPUTS)
    choice(s.map, "map", _MAPS)
    source = inputs.bilinear(s.source(s.causal))
    known = {"bert": s.inputs != "rows" and not s.dropout, "gpt2": True}
    if not known.get(source.architecture, s.map == "attention" and s.inputs != "rows"):
        raise ValueError(
            f"model: expected a GPT-2, or a BERT without rows and dropout, got "
            f"{source.architecture}; the scripts know no others (map='attention' takes any)"
        )
    if s.inputs != "text":
        if s.head not in range(source.n_heads):
            raise ValueError(f"head: expected one of 0..{source.n_heads - 1}, got {s.head}")
        s = replace(s, text=inputs.RANDOM_TEXT, n_windows=1, dropout=False)
    return inputs.pinned(s, causal=source.causal)


def measure(s: Settings, layer: int, n_tokens: int) -> dict[str, Any]:
    """The norms of attention and of the map taken, and the scripts' quantity; arrays (window,)."""
    source = s.source(s.causal)
    if s.dropout:
        source = replace(source, model=deepcopy(source.model).train())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(s.seed)
        X = _points(s, source, layer, n_tokens)
        F, mu = source.attention(layer), ParticleMeasure.from_sequence(X)
        g = F if s.map == "attention" else _taken(s, layer)
        value = g(mu).points
        pulled = linearize(g, mu).atoms.rmatvec(value)
        if s.dropout:
            value, pulled = _with_dropout(source.model.h[layer].attn, X)
    how: Any = {"geometry": "euclidean", "rtol": s.rtol, "strict": False}
    constant = local_lipschitz(F, mu, **how)
    own = constant if g is F else local_lipschitz(g, mu, **how)
    found = {"released": matrix_norm(pulled).sqrt(), "size": matrix_norm(value).sqrt()}
    found["radius"] = inputs.token_radii(X)[0]
    return {
        **constant.values("constant"),
        **own.values("map_constant"),
        **{name: to_host(values) for name, values in found.items()},
    }


def released_quantity(F: MeasureMap, mu: ParticleMeasure) -> Tensor:
    """√‖Df(X)ᵀ f(X)‖: what the scripts published with [CAP24] report in place of ‖Df(X)‖.

    Their power iteration takes the value, not the tangent, out of the forward-mode pair, so that
    it settles on this after two steps. It bounds the norm neither from above nor from below.

    Returns:
        One number per measure of the batch.
    """
    return matrix_norm(linearize(F, mu).atoms.rmatvec(F(mu).points)).sqrt()


def _points(s: Settings, source: Transformer, layer: int, n: int) -> Tensor:
    """What enters the layer, (window, n, d)."""
    if s.inputs != "text":
        return _pair(source, s.inputs, layer, s.head).tokens(s.radius, n).points[None]
    ids: Any = s.ids(source, n)
    if source.architecture == "gpt2" and s.map == "scripts":
        ids = {"input_ids": ids, "token_type_ids": torch.zeros_like(ids)}
    return source.attention_inputs(ids, layers=[layer])[0]


def _taken(s: Settings, layer: int) -> MeasureMap:
    """The map that the scripts differentiate."""
    source = s.source(s.causal)
    if source.architecture == "gpt2":
        return source.attention(layer)
    source = s.source(False)  # called alone, their decoder has no mask
    if s.inputs == "text":
        return Chain(source.block(layer).maps[:2])  # type: ignore[attr-defined]
    par = source.parameters(layer)
    eye = torch.eye(par.dim, dtype=par.value.dtype).unflatten(1, (par.n_heads, -1)).movedim(1, 0)
    biases = {"query_bias": par.query_bias, "value_bias": par.value_bias}
    own = AttentionParameters(par.query, par.key, par.value, eye, scale=par.scale, **biases)
    return SelfAttention(own)


def _with_dropout(attention: Any, X: Tensor) -> tuple[Tensor, Tensor]:
    """f and Jᵀf of GPT-2's own module in training mode, J and f with two draws of its dropout.

    In their loop J has one draw for good and the value a new one in each step.
    """
    n = X.shape[-2]
    mask = torch.full((n, n), -torch.inf, dtype=X.dtype).triu(1)
    X = X.clone().requires_grad_()
    with torch.enable_grad():
        value = attention(X, attention_mask=mask)[0].detach()
        (pulled,) = torch.autograd.grad((attention(X, attention_mask=mask)[0] * value).sum(), X)
    return value, pulled


@functools.lru_cache(maxsize=4)
def _pair(source: Transformer, kind: str, layer: int, head: int) -> sampling.CriticalPair:
    """Once for all lengths."""
    if kind == "rows":
        return sampling.critical_pair(_row_matrix(source, layer, head))
    return sampling.critical_pair(source.parameters(layer).head(head).A[0])


def _row_matrix(source: Transformer, layer: int, head: int) -> Tensor:
    """A of what the scripts take for the head: a block of rows of the stored weight.

    The weight is stored input × output, so that its rows mix all heads.
    """
    weight, d = source.model.h[layer].attn.c_attn.weight, source.dim
    width = d // source.n_heads
    rows = slice(head * width, (head + 1) * width)
    query, key, _ = weight.split(d, 1)
    return key[rows].T @ query[rows] / width**0.5


_QUANTITIES = {
    "constant": r"paper: $\|Df\|$",
    "map_constant": r"scripts' map: $\|Dg\|$",
    "released": r"scripts: $\|Dg^\top g\|^{1/2}$",
    "size": r"$\|g\|^{1/2}$",
}


def _if_different(name: str) -> Any:
    """The cases, without the norm of the map taken where that is the paper's."""
    return lambda ds: ds if name in _different(ds) else ds.assign({name: np.nan * ds[name]})


def _different(ds: xr.Dataset) -> list[str]:
    """The quantities, without the norm of the map taken where that is the paper's."""
    same = ds.map_constant.equals(ds.constant)
    return [name for name in _QUANTITIES if not (same and name == "map_constant")]


def _title(ds: xr.Dataset) -> str:
    what = _INPUTS[ds.attrs["inputs"]].format(**ds.attrs)
    where = f"{ds.attrs['model']}, layer {int(ds.layer[0])}"
    return literal(f"Norms and the scripts' quantity: {what}\n{where}")


GROWTH = Chart(
    "The norms and the scripts' quantity at the same inputs; lines: power laws, where they fit.",
    "n_tokens",
    [
        *(
            one
            for k, (name, label) in enumerate(_QUANTITIES.items())
            for one in (
                Curve(name, label, "o", along="window", rows=_if_different(name), color=f"C{k}"),
                Law(name, color=f"C{k}"),
            )
        ),
        Formula(
            lambda n, at: (at["drawn_constant"] or np.nan) * n ** at["drawn_exponent"],
            "drawn by the authors",
            once=True,
            linewidth=1.4,
        ),
    ],
    _title,
    rows=lambda ds: select(ds, layer=levels(ds, "layer")[0]),
    log="xy",
    ylabel="norm or quantity, median of windows",
    ticks=True,
)

_DIMS = ("window",)
_TOLD = ("inputs", "head", "radius", "map", "drawn_constant", "drawn_exponent")
EXPERIMENT = Experiment(
    measure,
    Settings(),
    [
        *LocalLipschitz.columns("constant", words="‖Df(X)‖, attention of the paper", dims=_DIMS),
        *LocalLipschitz.columns("map_constant", words="‖Dg(X)‖, the map taken", dims=_DIMS),
        Variable("released", "√‖Dg(X)ᵀ g(X)‖, as the published scripts", dims=_DIMS),
        Variable("size", "√‖g(X)‖", dims=_DIMS),
        Variable("radius", "root mean square of the token norms", dims=_DIMS),
    ],
    resolve=resolve,
    attrs=lambda s: {
        name: value
        for name, value in (inputs.labels(s) | {name: getattr(s, name) for name in _TOLD}).items()
        if name != "text" or s.inputs == "text"  # at a worst case there is none
    },
    figures={"growth": GROWTH, "exponents": exponents(_QUANTITIES)},
    conclude=lambda ds: with_laws(
        ds, _different(ds), by=("layer",), groups="window" if ds.sizes["window"] > 1 else None
    ),
)
