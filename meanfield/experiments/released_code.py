"""What do the scripts published with [CAP24] compute, beside the norm?

Their power iteration takes the value instead of the tangent out of the forward-mode pair and
settles on √‖Df(X)ᵀ f(X)‖. Here both quantities are taken at the same inputs of a random GPT-2
layer: the adversarial configuration of a head, the one of the rows that the scripts take for the
head (the fused weight has heads in blocks of columns), and token clouds of random ids.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import xarray as xr

from meanfield import ParticleMeasure, SelfAttention, sampling
from meanfield.checks import choice
from meanfield.experiments import inputs
from meanfield.experiments.experiment import Experiment
from meanfield.experiments.fitting import with_laws
from meanfield.experiments.settings import over, setting
from meanfield.figures.charts import Chart, Curve, Law
from meanfield.figures.selection import select
from meanfield.lipschitz import LocalLipschitz, local_lipschitz
from meanfield.pretrained import Transformer
from meanfield.results import Variable

__all__ = ["EXPERIMENT", "Settings", "released_quantity"]

_INPUTS = {
    "head": "worst case of head {head}",
    "rows": "their slice in place of a head",
    "tokens": "random token ids",
}


@dataclass(frozen=True)
class Settings(inputs.OfModel):
    """What the sweep runs over.

    The inputs are "head" and "rows" (adversarial, for the head and for the rows that the scripts
    take for it) and "tokens" (what random ids become in the model).
    """

    inputs: tuple[str, ...] = over("input_kind", tuple(_INPUTS), "which inputs")
    n_tokens: tuple[int, ...] = over(
        "n_tokens", tuple(range(2, 98, 5)), "number of tokens n", quick=(2, 7, 17, 32)
    )
    layer: int = setting(6, "attention layer, from 0", quick=1)
    head: int = setting(0, "head whose adversarial configuration is taken")
    radius: float = setting(100.0, "R of the adversarial configuration")


def resolve(s: Settings) -> Settings:
    """Refuse models whose queries and keys are turned by position."""
    inputs.bilinear(s.source())
    pinned: Settings = inputs.pinned(s, layers=[s.layer], n_tokens=s.n_tokens)
    return pinned


def measure(s: Settings, input_kind: str, n_tokens: int) -> dict[str, Any]:
    """Both quantities at one input."""
    choice(input_kind, "input_kind", _INPUTS)
    source = s.source()
    F = source.attention(s.layer)
    if input_kind == "tokens":
        points = inputs.clouds(source, inputs.RANDOM_TEXT, n_tokens, 1, layers=[s.layer])[0, 0]
        mu = ParticleMeasure.from_sequence(points)
    else:
        mu = _pair(source, input_kind, s.layer, s.head).tokens(s.radius, n_tokens)
    constant = local_lipschitz(F, mu, geometry="euclidean", strict=False)
    return {
        **constant.values("constant"),
        "released": float(released_quantity(F, mu)),
        "radius": float(inputs.token_radii(mu.points)[0]),
    }


def released_quantity(F: SelfAttention, mu: ParticleMeasure) -> torch.Tensor:
    """√‖Df(X)ᵀ f(X)‖: what the scripts published with [CAP24] report in place of ‖Df(X)‖.

    Their power iteration takes the value, not the tangent, out of the forward-mode pair, so that
    it settles on this after two steps. It bounds the norm neither from above nor from below.

    Returns:
        One number per measure of the batch.
    """
    pulled = F.linearize(mu).rmatvec(F(mu).points)
    return torch.linalg.vector_norm(pulled, dim=(-2, -1)).sqrt()


@functools.lru_cache(maxsize=4)
def _pair(source: Transformer, kind: str, layer: int, head: int) -> sampling.CriticalPair:
    """Once for all lengths."""
    if kind == "rows":
        return sampling.critical_pair(_row_matrix(source, layer, head))
    return sampling.critical_pair(source.parameters(layer).head(head).A[0])


def _row_matrix(source: Transformer, layer: int, head: int) -> torch.Tensor:
    """A of what the scripts take for the head: a block of rows of the stored weight.

    The weight is stored input × output, so that its rows mix all heads.
    """
    if source.architecture != "gpt2":
        raise ValueError(f'input_kind "rows": expected a GPT-2, got {source.architecture}')
    weight, d = source.model.h[layer].attn.c_attn.weight, source.dim
    width = d // source.n_heads
    rows = slice(head * width, (head + 1) * width)
    query, key, _ = weight.split(d, 1)
    return key[rows].T @ query[rows] / width**0.5


def both_quantities(kind: str) -> Chart:
    """The chart of one kind of inputs."""

    def title(ds: xr.Dataset) -> str:
        what = _INPUTS[kind].format(head=ds.attrs.get("head"))
        place = f"{ds.attrs.get('model')}, layer {ds.attrs.get('layer')}"
        return f"Norm and scripts' quantity: {what}\n{place}"

    released = r"scripts: $\sqrt{\|Df(X)^\top f(X)\|}$"
    return Chart(
        "The norm and the scripts' quantity at the same inputs; fits, 95 % intervals.",
        "n_tokens",
        [
            Curve("constant", r"norm $\|Df(X)\|$", "o", color="tab:blue"),
            Law({"quantity": "constant", "input_kind": kind}, color="tab:blue"),
            Curve("released", released, "o", color="tab:red"),
            Law({"quantity": "released", "input_kind": kind}, color="tab:red"),
        ],
        title,
        rows=lambda ds: select(ds, input_kind=kind),
        log="xy",
        ylabel=r"$\|Df(X)\|$, or the scripts' quantity",
        ticks=True,
    )


EXPERIMENT = Experiment(
    measure,
    Settings(),
    [
        *LocalLipschitz.columns("constant", words="local Lipschitz constant ‖Df(X)‖"),
        Variable("released", "√‖Df(X)ᵀ f(X)‖, as the published scripts"),
        Variable("radius", "root mean square of the token norms"),
    ],
    resolve=resolve,
    attrs=lambda s: {"model": inputs.short_name(s.model), "layer": s.layer, "head": s.head},
    figures={kind: both_quantities(kind) for kind in _INPUTS},
    conclude=partial(with_laws, quantities=("constant", "released"), by=("input_kind",)),
)
