"""Are real tokens far enough out for the worst case? γ R² of every head, at the real radius.

[CAP24] Figure 2. The lower bound √(n−1)/(1 + (n−1)e^{−2γR²}) of Proposition 3.4 reaches √n growth
where 2γR² is well above log n. γ = max(−γ_min, γ_max/8) belongs to a head, R to the tokens that
enter its layer; the constant of the head at those tokens, which are no worst case, is beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from meanfield import ParticleMeasure, SelfAttention
from meanfield.checks import to_host
from meanfield.experiments import inputs
from meanfield.experiments.experiment import Experiment
from meanfield.experiments.settings import along, over, setting
from meanfield.figures.charts import Chart, Curve, Formula
from meanfield.figures.selection import attribute, model_and_text
from meanfield.lipschitz import LocalLipschitz, local_lipschitz
from meanfield.results import Variable

__all__ = ["EXPERIMENT", "Settings"]


@dataclass(frozen=True)
class Settings(inputs.OfText):
    """What the sweep runs over. No `layers` stand for all."""

    layers: tuple[int, ...] = over("layer", (), "attention layer, from 0", quick=())
    n_tokens: int = setting(64, "length of the windows", quick=8)
    n_windows: int = along("window", 5, "window of the text", quick=2)
    causal: bool = setting(False, "whether attention is masked; GPT-2 always is")


def resolve(s: Settings) -> Settings:
    """The layers and the mask."""
    return inputs.pinned(s, causal=s.causal or inputs.bilinear(s.source()).causal)


def measure(s: Settings, layer: int) -> dict[str, Any]:
    """All heads of a layer; arrays (head,) and (head, window)."""
    source = s.source(s.causal)
    points = source.attention_inputs(s.ids(source, s.n_tokens), layers=[layer])[0]
    F = source.attention(layer)
    gamma, norm_A, norm_V = inputs.head_spectra(F.parameters)
    radius = to_host(inputs.token_radii(points)[0].double())
    mu = ParticleMeasure.from_sequence(points)
    heads = [SelfAttention(F.parameters.head(h), causal=F.causal) for h in range(source.n_heads)]
    how: Any = {"geometry": "euclidean", "strict": False}
    rows = [local_lipschitz(head, mu, **how).values("head_constant") for head in heads]
    return {
        "gamma": gamma,
        "norm_A": norm_A,
        "norm_V": norm_V,
        "exponent": gamma[:, None] * radius**2,
        "radius": radius,
        **{name: np.stack([row[name] for row in rows]) for name in rows[0]},
    }


def _of_heads(column: str, words: str, quantity: str, *more: Formula) -> Chart:
    """The chart of a number of each head above its layer; γ = 0 has no logarithm."""

    def label(ds: xr.Dataset) -> str:
        nowhere = int((ds[column].median("window") == 0).sum())
        told = f" ({nowhere} at 0 are not drawn)" if nowhere else ""
        return f"a head, median of {ds.sizes['window']} windows{told}"

    return Chart(
        f"{words}, per layer; medians of windows.",
        "layer",
        [Curve(column, label, "o", along="window", color="tab:blue", alpha=0.6), *more],
        lambda ds: f"{words}, n = {attribute(ds, 'n_tokens')}\n{model_and_text(ds)}",
        log="y",
        ticks=True,
        xlabel="layer",
        ylabel=quantity,
    )


_WITHIN_REACH = Formula(
    lambda _, at: np.log(at["n_tokens"]) / 2,
    r"$\log(n)/2$: above, $e^{-2\gamma R^2} < 1/n$",
)
_HEAD, _BOTH = ("head",), ("head", "window")
EXPERIMENT = Experiment(
    measure,
    Settings(),
    [
        Variable("gamma", "scaling factor γ of the head", dims=_HEAD),
        Variable("norm_A", "spectral norm ‖A‖ of the head", dims=_HEAD),
        Variable("norm_V", "spectral norm ‖W V‖ of the head", dims=_HEAD),
        Variable("exponent", "γ R² at the root mean square radius", dims=_BOTH),
        Variable("radius", "root mean square of the token norms", dims=("window",)),
        *LocalLipschitz.columns(
            "head_constant", words="local Lipschitz constant of the head alone", dims=_BOTH
        ),
    ],
    resolve=resolve,
    coords={
        Variable("head", "head, from 0"): lambda s: range(s.source().n_heads),
    },
    attrs=inputs.labels,
    figures={
        "heads": _of_heads(
            "exponent",
            "γR² of each head at the radius of its tokens",
            r"$\gamma R^2$",
            _WITHIN_REACH,
        ),
        "constants": _of_heads(
            "head_constant", "Constant of each head alone", r"local constant $\|Df(X)\|$"
        ),
    },
)
