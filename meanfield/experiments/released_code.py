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
from typing import TYPE_CHECKING, Any

import torch
import xarray as xr

from meanfield import sampling
from meanfield.attention import SelfAttention
from meanfield.checks import choice
from meanfield.experiments import inputs
from meanfield.experiments.experiment import Experiment
from meanfield.experiments.fitting import with_laws
from meanfield.experiments.settings import setting
from meanfield.figures.canvas import figure, ticks_at
from meanfield.figures.curves import curve, law, power_law
from meanfield.figures.selection import fits_of, select
from meanfield.lipschitz import LocalLipschitz, local_lipschitz
from meanfield.measures import ParticleMeasure
from meanfield.pretrained import Transformer
from meanfield.results import Variable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["EXPERIMENT", "Settings", "released_quantity"]


INPUTS = ("head", "rows", "tokens")


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over."""

    model: str = setting("random:gpt2", "a GPT-2, as in `meanfield.pretrained.load`")
    seed: int = setting(320, "seed of random weights; 320 in the published scripts")
    layer: int = setting(6, "attention layer, from 0", quick=1)
    head: int = setting(0, "head whose adversarial configuration is taken")
    radius: float = setting(100.0, "R of the adversarial configuration")
    n_tokens: tuple[int, ...] = setting(
        tuple(range(2, 98, 5)), "numbers of tokens n", quick=(2, 7, 17, 32)
    )
    inputs: tuple[str, ...] = setting(
        INPUTS,
        "'head' and 'rows' (adversarial, for the head and for the rows that the scripts take for "
        "it), 'tokens' (what random ids become in the model)",
    )
    depth: int = setting(
        0, "number of layers of a random model; 0 for the architecture's own", quick=2
    )
    dtype: str = setting("float64", "'float32' or 'float64'")


_VARIABLES = (
    *LocalLipschitz.columns("constant", words="local Lipschitz constant ‖Df(X)‖"),
    Variable("released", "√‖Df(X)ᵀ f(X)‖, as the published scripts"),
    Variable("radius", "root mean square of the token norms"),
)
_PARAMETERS = (
    Variable("input_kind", "which inputs"),
    Variable("n_tokens", "number of tokens n"),
)


def measure(
    input_kind: str,
    n_tokens: int,
    *,
    model: str,
    model_revision: str,
    model_seed: int,
    layer: int,
    head: int,
    input_radius: float,
    depth: int,
    dtype: str,
) -> dict[str, Any]:
    """Both quantities at one input."""
    if input_kind not in INPUTS:
        raise ValueError(f"input_kind: expected one of {INPUTS}, got {input_kind!r}")
    source = inputs.bilinear_transformer(
        model, seed=model_seed, depth=depth, dtype=dtype, revision=model_revision
    )
    F = source.attention(layer)
    if input_kind == "tokens":
        points = inputs.clouds(source, inputs.RANDOM_TEXT, n_tokens, 1, layers=[layer])[0, 0]
        mu = ParticleMeasure.from_sequence(points)
    else:
        mu = _pair(source, input_kind, layer, head).tokens(input_radius, n_tokens)
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


_TITLES = {
    "head": "Norm and scripts' quantity: worst case of head {head}",
    "rows": "Norm and scripts' quantity: their slice in place of a head",
    "tokens": "Norm and scripts' quantity: random token ids",
}


@figure("constant", "constant_converged", "released")
def both_quantities(ds: xr.Dataset, *, ax: Axes, kind: str = "head") -> Axes:
    """The norm and the scripts' quantity at the same inputs; fits, 95 % intervals of exponents.

    Args:
        ds: of this experiment.
        ax: where to draw; a new figure if None.
        kind: which inputs: "head", "rows" or "tokens".
    """
    rows = select(ds, input_kind=choice(kind, "kind", _TITLES))
    ax.set(xscale="log", yscale="log", xlabel="number of tokens n")
    ax.set_ylabel(r"$\|Df(X)\|$, or the scripts' quantity")
    for quantity, colour, label in (
        ("constant", "tab:blue", r"norm $\|Df(X)\|$"),
        ("released", "tab:red", r"scripts: $\sqrt{\|Df(X)^\top f(X)\|}$"),
    ):
        curve(ax, rows, "n_tokens", quantity, "o", color=colour, label=label)
        fits = fits_of(ds, quantity=quantity, input_kind=kind, law="free")
        power_law(ax, fits, rows.n_tokens, color=colour, label=law(fits))
    ticks_at(ax, rows.n_tokens)
    what = _TITLES[kind].format(head=ds.attrs.get("head"))
    ax.set_title(f"{what}\n{ds.attrs.get('model')}, layer {ds.attrs.get('layer')}")
    return ax


def _derived(s: Settings) -> dict[str, Any]:
    inputs.bilinear(inputs.source_of(s))
    pinned = inputs.pinned(s, layers=[s.layer], n_tokens=s.n_tokens)
    return {"input_radius": s.radius, **pinned}


EXPERIMENT = Experiment(
    measure,
    Settings(),
    grid=lambda s: {"input_kind": s.inputs, "n_tokens": s.n_tokens},
    variables=_VARIABLES,
    parameters=_PARAMETERS,
    derived=_derived,
    attrs=lambda s: {"model": inputs.short_name(s.model), "layer": s.layer, "head": s.head},
    figures={kind: partial(both_quantities, kind=kind) for kind in _TITLES},
    conclude=partial(with_laws, quantities=("constant", "released"), by=("input_kind",)),
)
