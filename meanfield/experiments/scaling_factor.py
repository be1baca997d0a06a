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
from meanfield.experiments.settings import over, setting
from meanfield.figures.charts import Chart, Curve, Formula
from meanfield.figures.selection import model_and_text
from meanfield.lipschitz import LocalLipschitz, local_lipschitz
from meanfield.results import Variable

__all__ = ["EXPERIMENT", "Settings"]


@dataclass(frozen=True)
class Settings(inputs.OfText):
    """What the sweep runs over."""

    layers: tuple[int, ...] = over(
        "layer", (), "attention layer, from 0; all if there are none", quick=()
    )
    n_tokens: int = setting(64, "length of the windows", quick=8)
    n_windows: int = setting(5, "windows over which radius and constants are averaged", quick=2)
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


def _heads(column: str) -> Curve:
    """A number of each head above its layer; γ = 0 has no logarithm."""

    def label(ds: xr.Dataset) -> str:
        nowhere = int((ds[column].median("window") == 0).sum())
        words = f" ({nowhere} at 0 are not drawn)" if nowhere else ""
        return f"a head, median of {ds.sizes['window']} windows{words}"

    return Curve(column, label, "o", along="window", color="tab:blue", alpha=0.6)


EXPONENTS = Chart(
    "γR² of every head at the root mean square radius of its tokens, per layer.",
    "layer",
    [
        _heads("exponent"),
        Formula(
            lambda layer, at: np.log(at["n_tokens"]) / 2,
            r"$\log(n)/2$: above, $e^{-2\gamma R^2} < 1/n$",
            "k:",
            flat=True,
        ),
    ],
    lambda ds: f"$\\gamma R^2$ of each head at the radius of its tokens\n{model_and_text(ds)}",
    log="y",
    ticks=True,
    xlabel="layer",
    ylabel=r"$\gamma R^2$",
)
CONSTANTS = Chart(
    "Constant of every head alone, median of windows, per layer.",
    "layer",
    [_heads("head_constant")],
    lambda ds: f"Constant of each head alone, {ds.n_tokens} tokens\n{model_and_text(ds)}",
    log="y",
    ticks=True,
    xlabel="layer",
    ylabel=r"local constant $\|Df(X)\|$ of the head alone",
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
        Variable("window", "window of the text"): lambda s: range(s.n_windows),
    },
    attrs=inputs.labels,
    figures={"heads": EXPONENTS, "constants": CONSTANTS},
)
