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
from typing import Any

import numpy as np
import xarray as xr

from meanfield import bounds, sampling
from meanfield.bounds.layer import Layer
from meanfield.checks import count
from meanfield.experiments import inputs
from meanfield.experiments.ascent import climb
from meanfield.experiments.fitting import fit_laws, fittable
from meanfield.lipschitz import local_lipschitz
from meanfield.measures import ParticleMeasure
from meanfield.pretrained import Transformer
from meanfield.results import Variable
from meanfield.sweeps import Task, sweep

__all__ = ["FIGURES", "QUICK", "Settings", "finish", "measure", "plan", "run"]

# File name of each figure -> function of `meanfield.figures` and its arguments.
FIGURES: dict[str, tuple[str, dict[str, Any]]] = {
    "growth": ("plot_adversarial", {}),
    "heads": ("plot_adversarial_heads", {}),
}


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over; every field can be set from the command line.

    Attributes:
        model: as in `meanfield.pretrained.load`.
        seed: of random weights; 320 is that of the published scripts.
        layer: attention layer, from 0; the middle one if None.
        heads: whose configurations; empty for all.
        radii: R.
        n_tokens: lengths n.
        search_tokens: lengths at which a worse input is searched for.
        search_steps: steps of that search.
        causal: whether the layer is masked; GPT-2 always is.
        depth: number of layers of a random model; 0 for the architecture's own.
        dtype: "float32" or "float64".
    """

    model: str = "random:gpt2"
    seed: int = 320
    layer: int | None = None
    heads: tuple[int, ...] = ()
    radii: tuple[float, ...] = (100.0,)
    n_tokens: tuple[int, ...] = (2, 4, 8, 16, 32, 64, 97)
    search_tokens: tuple[int, ...] = (2, 8, 32)
    search_steps: int = 20
    causal: bool = False
    depth: int = 0
    dtype: str = "float64"


QUICK = Settings(
    layer=1, heads=(0, 1), n_tokens=(2, 6, 18), depth=2, search_tokens=(6,), search_steps=5
)

_VARIABLES = (
    Variable("constant", "local Lipschitz constant ‖Df(X)‖ of the layer"),
    Variable("constant_residual", "relative residual of the constant"),
    Variable("constant_upper", "the constant is at most this, with probability 0.999"),
    Variable("constant_converged", "whether the constant converged", dtype="bool"),
    Variable("head_constant", "the same of the head alone"),
    Variable("head_constant_residual", "relative residual of the head's constant"),
    Variable("head_constant_upper", "the head's constant is at most this, with probability 0.999"),
    Variable("head_constant_converged", "whether the head's converged", dtype="bool"),
    Variable("released", "√‖Df(X)ᵀ f(X)‖, as the published scripts"),
    Variable("searched", "the largest that ascent of the layer's constant found in B_R"),
    Variable("searched_residual", "relative residual of the searched constant"),
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
    # As `sampling.adversarial` builds it, without a new eigendecomposition for each length.
    points = radius * pair.heavy_at * pair.direction.expand(n_tokens, -1).clone()
    points[0] = radius * pair.direction
    mu = ParticleMeasure.from_sequence(points)
    whole = local_lipschitz(F, mu, geometry="euclidean", strict=False)
    alone = type(F)(F.parameters.head(head), causal=F.causal)
    single = local_lipschitz(alone, mu, geometry="euclidean", strict=False)
    searched = climb(F, mu, radius, steps=search_steps)[1] if n_tokens in search_tokens else None
    return {
        "constant": float(whole.value),
        "constant_residual": float(whole.residual),
        "constant_upper": float(whole.upper),
        "constant_converged": bool(whole.converged),
        "head_constant": float(single.value),
        "head_constant_residual": float(single.residual),
        "head_constant_upper": float(single.upper),
        "head_constant_converged": bool(single.converged),
        "released": float(inputs.released_quantity(F, mu)),
        "searched": math.nan if searched is None else float(searched.value),
        "searched_residual": math.nan if searched is None else float(searched.residual),
        "gamma": pair.scaling,
        "general_lower": bounds.proposition_3_4(pair.scaling, radius, n_tokens),
        "general_bound": Layer.of(F).theorem_3_3(radius, n_tokens),
    }


@functools.lru_cache(maxsize=64)
def _pair(source: Transformer, layer: int, head: int) -> sampling.CriticalPair:
    return sampling.critical_pair(source.parameters(layer).head(head).A[0])


def plan(settings: Settings) -> dict[str, Any]:
    """The arguments of `meanfield.sweep` that make the experiment."""
    source = inputs.bilinear_transformer(
        settings.model, seed=settings.seed, depth=settings.depth, dtype=settings.dtype
    )
    layer = (
        source.n_layers // 2 if settings.layer is None else count(settings.layer, "layer", least=0)
    )
    inputs.check_fit(source, layers=[layer], n_tokens=settings.n_tokens)
    heads = settings.heads or tuple(range(source.n_heads))
    return {
        "fn": Task(measure, _VARIABLES, _PARAMETERS),
        "grid": {"head": heads, "radius": settings.radii, "n_tokens": settings.n_tokens},
        "fixed": {
            "model": settings.model,
            "model_revision": source.fingerprint,
            "model_seed": settings.seed,
            "layer": layer,
            "search_tokens": list(settings.search_tokens),
            "search_steps": settings.search_steps,
            "causal": settings.causal or source.causal,
            "depth": settings.depth,
            "dtype": settings.dtype,
        },
        "seed": settings.seed,
        "attrs": {
            "experiment": "adversarial",
            "model": inputs.short_name(settings.model),
            "layer": layer,
        },
    }


def finish(ds: xr.Dataset) -> xr.Dataset:
    """The finished sweep with its best head and its power laws."""
    if np.isfinite(ds.constant.values).any():
        far = (ds.n_tokens == ds.n_tokens.max()) & (ds.radius == ds.radius.max())
        best = int(np.nanargmax(np.where(far.values, ds.constant.values, -np.inf)))
        ds = ds.assign_attrs(best_head=int(ds["head"].values[best]))
    return ds.merge(fit_laws(_curves(ds))) if len(np.unique(ds.n_tokens)) > 1 else ds


def run(settings: Settings | None = None, **how: Any) -> xr.Dataset:
    """Run the sweep and fit the power laws.

    Args:
        settings: what to run over; the whole experiment if None.
        how: as in `meanfield.sweep`: store, executor, …

    Returns:
        Dataset with the attribute `best_head`: whose configuration gives the layer the largest
        constant at the largest n and R.
    """
    return finish(sweep(**plan(settings or Settings()), **how))


def _curves(ds: xr.Dataset) -> list[tuple[dict[str, Any], Any, Any, Any, Any]]:
    curves = []
    for head in np.unique(ds["head"].values):
        for radius in np.unique(ds.radius.values):
            chosen = (ds["head"].values == head) & (ds.radius.values == radius)
            rows = ds.isel(case=np.flatnonzero(chosen))
            for quantity in ("constant", "head_constant", "released"):
                y = rows[quantity].values
                labels = {"quantity": quantity, "head": int(head), "radius": float(radius)}
                flag = f"{quantity}_converged"
                good = rows[flag].values if flag in rows else np.isfinite(y)
                if fittable(y, good):
                    curves.append((labels, rows.n_tokens.values, y, None, good))
    return curves
