"""How fast does the constant grow with n at the inputs built to be the worst?

[CAP24] Figure 1, second row. For a head with bilinear form A_h, Proposition 3.4 puts one token at
R u and n − 1 at −R u or R u/2, for a real eigenpair (γ, u) of A_h; with V = I the constant grows
like √n. Here the same inputs enter the whole layer, for every head and radius wanted; the head
alone is beside it, because what grows may be other heads, for which the inputs were not built.
Where wanted, ascent over the tokens in B_R starts from there and finds worse ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from meanfield import bounds, sampling
from meanfield.bounds.layer import Layer
from meanfield.checks import count
from meanfield.experiments import inputs
from meanfield.experiments.ascent import climb
from meanfield.experiments.experiment import Experiment
from meanfield.experiments.fitting import with_laws
from meanfield.experiments.settings import setting
from meanfield.figures.canvas import FORMULA, figure, ticks_at
from meanfield.figures.curves import curve, formula, law, mark_unconverged
from meanfield.figures.selection import attribute, by_level, fits_of, select
from meanfield.lipschitz import LocalLipschitz, local_lipschitz
from meanfield.pretrained import Transformer
from meanfield.results import Variable
from meanfield.results.cases import answered

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["EXPERIMENT", "Settings"]


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over."""

    model: str = setting("random:gpt2", "model, as in `meanfield.pretrained.load`")
    seed: int = setting(320, "seed of random weights; 320 in the published scripts")
    layer: int | None = setting(None, "attention layer, from 0; the middle one if None", quick=1)
    heads: tuple[int, ...] = setting(
        (), "heads whose configurations are taken; all if empty", quick=(0, 1)
    )
    radii: tuple[float, ...] = setting((100.0,), "radii R")
    n_tokens: tuple[int, ...] = setting(
        (2, 4, 8, 16, 32, 64, 97), "numbers of tokens n", quick=(2, 6, 18)
    )
    search_tokens: tuple[int, ...] = setting(
        (2, 8, 32), "lengths at which a worse input is searched for", quick=(6,)
    )
    search_steps: int = setting(20, "steps of that search", quick=5)
    causal: bool = setting(False, "whether the layer is masked; GPT-2 always is")
    depth: int = setting(
        0, "number of layers of a random model; 0 for the architecture's own", quick=2
    )
    dtype: str = setting("float64", "'float32' or 'float64'")


_SEARCHED = ("value", "residual")
_VARIABLES = (
    *LocalLipschitz.columns("constant", words="local Lipschitz constant ‖Df(X)‖ of the layer"),
    *LocalLipschitz.columns("head_constant", words="the same of the head alone"),
    *LocalLipschitz.columns("searched", *_SEARCHED, words="largest that ascent in B_R found"),
    Variable("gamma", "scaling factor γ of the head"),
    Variable("general_lower", "what the head would reach with V = I, Proposition 3.4"),
    Variable("general_bound", "upper bound, Theorem 3.3 summed over heads"),
)
_PARAMETERS = (
    Variable("head", "head whose configuration it is"),
    Variable("radius", "radius R of the configuration"),
    Variable("n_tokens", "number of tokens n"),
)


def measure(
    head: int,
    radius: float,
    n_tokens: int,
    *,
    model: str,
    model_revision: str,
    model_seed: int,
    layer: int,
    search_tokens: Sequence[int],
    search_steps: int,
    causal: bool,
    depth: int,
    dtype: str,
) -> dict[str, Any]:
    """The layer and the head alone at the adversarial configuration of the head."""
    source = inputs.bilinear_transformer(
        model, causal, seed=model_seed, depth=depth, dtype=dtype, revision=model_revision
    )
    F = source.attention(layer)
    pair = _pair(source, layer, head)
    mu = pair.tokens(radius, n_tokens)
    whole = local_lipschitz(F, mu, geometry="euclidean", strict=False)
    alone = type(F)(F.parameters.head(head), causal=F.causal)
    single = local_lipschitz(alone, mu, geometry="euclidean", strict=False)
    searched = {"searched": math.nan, "searched_residual": math.nan}
    if n_tokens in search_tokens:
        searched = climb(F, mu, radius, steps=search_steps)[1].values("searched", *_SEARCHED)
    return {
        **whole.values("constant"),
        **single.values("head_constant"),
        **searched,
        "gamma": pair.scaling,
        "general_lower": bounds.proposition_3_4(pair.scaling, radius, n_tokens),
        "general_bound": Layer.of(F).theorem_3_3(radius, n_tokens),
    }


@functools.lru_cache(maxsize=64)
def _pair(source: Transformer, layer: int, head: int) -> sampling.CriticalPair:
    """Once for all lengths and radii."""
    return sampling.critical_pair(source.parameters(layer).head(head).A[0])


def _conclude(ds: xr.Dataset) -> xr.Dataset:
    """The finished sweep with its best head and its power laws."""
    known = answered(ds)
    best = np.lexsort((known.constant, known.radius, known.n_tokens))[-1]
    ds = ds.assign_attrs(best_head=int(known["head"][best]))
    return with_laws(ds, ("constant", "head_constant"), by=("head", "radius"))


@figure(
    *("constant", "constant_converged", "head_constant", "head_constant_converged"),
    "searched",
)
def growth(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Constant of the layer against n at the worst case of the best head, at every radius."""
    head = attribute(ds, "best_head")
    rows = select(ds, head=head)
    for colour, radius, line in by_level(rows, "radius"):
        of_layer, of_head = (
            law(fits_of(ds, law="free", quantity=quantity, head=head, radius=radius))
            for quantity in ("constant", "head_constant")
        )
        label = f"layer, R = {radius:g}: {of_layer}"
        curve(ax, line, "n_tokens", "constant", color=colour, label=label)
        hollow: Any = {"color": colour, "fillstyle": "none", "label": f"head alone: {of_head}"}
        curve(ax, line, "n_tokens", "head_constant", "s--", **hollow)
        found = line.isel(case=np.flatnonzero(np.isfinite(line.searched.values)))
        curve(ax, found, "n_tokens", "searched", "x", color=colour, markersize=8)
    ax.set(xscale="log", yscale="log", xlabel="number of tokens n")
    ax.set_ylabel(r"local constant $\|Df(X)\|$")
    ax.plot([], [], "kx", markersize=8, label="found by ascent in $B_R$")
    formula(ax, np.sqrt, rows.n_tokens, linewidth=1.4, label=r"$\sqrt{n}$")
    ticks_at(ax, rows.n_tokens)
    ax.set_title(f"Worst case of head {head}\n{_place(ds)}")
    return ax


@figure("constant", "constant_converged", "head_constant", "head_constant_converged")
def choice_of_head(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Constant of the layer at the worst case of each head, at the largest n and R."""
    n = int(ds.n_tokens.max())
    radius = float(ds.radius.max())
    rows = select(ds, n_tokens=n, radius=radius)
    heads = rows["head"].values
    for shift, name, label in ((-0.2, "constant", "layer"), (0.2, "head_constant", "head alone")):
        ax.bar(heads + shift, rows[name], 0.4, label=label)
        mark_unconverged(ax, heads + shift, rows[name], rows[f"{name}_converged"])
    ax.axhline(n**0.5, color="black", linestyle=":", label=r"$\sqrt{n}$", gid=FORMULA)
    ax.set(xlabel="head whose worst case it is", ylabel=r"local constant $\|Df(X)\|$")
    ax.set_xticks(heads)
    what = f"Layer and head at the worst case of each head, n = {n}, R = {radius:g}"
    ax.set_title(f"{what}\n{_place(ds)}")
    ax.grid(visible=False, axis="x")
    return ax


def _place(ds: xr.Dataset) -> str:
    """The line of a title that names the model and the layer."""
    return f"{attribute(ds, 'model')}, layer {attribute(ds, 'layer')}"


def _layer(s: Settings) -> int:
    if s.layer is None:
        return inputs.source_of(s).n_layers // 2
    return count(s.layer, "layer", least=0)


def _derived(s: Settings) -> dict[str, Any]:
    source = inputs.bilinear(inputs.source_of(s))
    return {
        "layer": _layer(s),
        "causal": s.causal or source.causal,
        **inputs.pinned(s, layers=[_layer(s)], n_tokens=s.n_tokens),
    }


EXPERIMENT = Experiment(
    measure,
    Settings(),
    grid=lambda s: {
        "head": s.heads or tuple(range(inputs.source_of(s).n_heads)),
        "radius": s.radii,
        "n_tokens": s.n_tokens,
    },
    variables=_VARIABLES,
    parameters=_PARAMETERS,
    derived=_derived,
    attrs=lambda s: {"model": inputs.short_name(s.model), "layer": _layer(s)},
    figures={"growth": growth, "heads": choice_of_head},
    conclude=_conclude,
)
