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
from collections.abc import Callable
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
from meanfield.experiments.settings import over, setting
from meanfield.figures.canvas import FORMULA, figure
from meanfield.figures.charts import Chart, Curve, Formula
from meanfield.figures.curves import law, mark_unconverged
from meanfield.figures.selection import attribute, fits_of, select
from meanfield.lipschitz import LocalLipschitz, local_lipschitz
from meanfield.pretrained import Transformer
from meanfield.results import Variable
from meanfield.results.cases import answered

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["EXPERIMENT", "Settings"]


@dataclass(frozen=True)
class Settings(inputs.OfModel):
    """What the sweep runs over."""

    layer: int | None = setting(None, "attention layer, from 0; the middle one if None", quick=1)
    heads: tuple[int, ...] = over(
        "head", (), "head whose configuration it is; all if there are none", quick=(0, 1)
    )
    radii: tuple[float, ...] = over("radius", (100.0,), "radius R of the configuration")
    n_tokens: tuple[int, ...] = over(
        "n_tokens", (2, 4, 8, 16, 32, 64, 97), "number of tokens n", quick=(2, 4, 6, 10, 18)
    )
    search_tokens: tuple[int, ...] = setting(
        (2, 8, 32), "lengths at which a worse input is searched for", quick=(6,)
    )
    search_steps: int = setting(20, "steps of that search", quick=5)
    causal: bool = setting(False, "whether the layer is masked; GPT-2 always is")


def resolve(s: Settings) -> Settings:
    """The layer, its heads and its mask."""
    source = inputs.bilinear(s.source())
    layer = source.n_layers // 2 if s.layer is None else count(s.layer, "layer", least=0)
    heads = s.heads or tuple(range(source.n_heads))
    known: Any = {"layer": layer, "heads": heads, "causal": s.causal or source.causal}
    pinned: Settings = inputs.pinned(s, layers=[layer], n_tokens=s.n_tokens, **known)
    return pinned


_SEARCHED = ("value", "residual")


def measure(s: Settings, head: int, radius: float, n_tokens: int) -> dict[str, Any]:
    """The layer and the head alone at the adversarial configuration of the head."""
    assert s.layer is not None
    source = s.source(s.causal)
    F = source.attention(s.layer)
    pair = _pair(source, s.layer, head)
    mu = pair.tokens(radius, n_tokens)
    whole = local_lipschitz(F, mu, geometry="euclidean", strict=False)
    alone = type(F)(F.parameters.head(head), causal=F.causal)
    single = local_lipschitz(alone, mu, geometry="euclidean", strict=False)
    searched = {"searched": math.nan, "searched_residual": math.nan}
    if n_tokens in s.search_tokens:
        searched = climb(F, mu, radius, steps=s.search_steps)[1].values("searched", *_SEARCHED)
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


def _law(quantity: str, words: str) -> Callable[[xr.Dataset], str]:
    """The label of a curve with the power law of its head and radius."""

    def label(rows: xr.Dataset) -> str:
        radius = float(rows.radius[0])
        place = {"head": attribute(rows, "best_head"), "radius": radius}
        return words.format(radius) + law(fits_of(rows, law="free", quantity=quantity, **place))

    return label


GROWTH = Chart(
    "Constant of the layer against n at the worst case of the best head, at every radius.",
    "n_tokens",
    [
        Curve("constant", _law("constant", "layer, R = {:g}: ")),
        Curve("head_constant", _law("head_constant", "head alone: "), "s--", fillstyle="none"),
        Curve(
            "searched",
            fmt="x",
            key="found by ascent in $B_R$",
            rows=lambda ds: ds.isel(case=np.flatnonzero(np.isfinite(ds.searched))),
            markersize=8,
        ),
        Formula(lambda n, at: np.sqrt(n), r"$\sqrt{n}$", once=True, linewidth=1.4),
    ],
    lambda ds: f"Worst case of head {attribute(ds, 'best_head')}\n{_place(ds)}",
    by="radius",
    rows=lambda ds: select(ds, head=attribute(ds, "best_head")),
    log="xy",
    ylabel=r"local constant $\|Df(X)\|$",
    ticks=True,
)


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


EXPERIMENT = Experiment(
    measure,
    Settings(),
    [
        *LocalLipschitz.columns("constant", words="local Lipschitz constant ‖Df(X)‖ of the layer"),
        *LocalLipschitz.columns("head_constant", words="the same of the head alone"),
        *LocalLipschitz.columns("searched", *_SEARCHED, words="largest that ascent in B_R found"),
        Variable("gamma", "scaling factor γ of the head"),
        Variable("general_lower", "what the head would reach with V = I, Proposition 3.4"),
        Variable("general_bound", "upper bound, Theorem 3.3 summed over heads"),
    ],
    resolve=resolve,
    attrs=lambda s: {"model": inputs.short_name(s.model), "layer": s.layer},
    figures={"growth": GROWTH, "heads": choice_of_head},
    conclude=_conclude,
)
