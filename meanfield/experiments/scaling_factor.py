"""Are real tokens far enough out for the worst case? γ R² of every head, at the real radius.

[CAP24] Figure 2. The lower bound √(n−1)/(1 + (n−1)e^{−2γR²}) of Proposition 3.4 reaches √n growth
where 2γR² is well above log n. γ = max(−γ_min, γ_max/8) belongs to a head, R to the tokens that
enter its layer; the constant of the head at those tokens, which are no worst case, is beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xarray as xr

from meanfield.attention import SelfAttention
from meanfield.experiments import inputs
from meanfield.lipschitz import local_lipschitz
from meanfield.measures import ParticleMeasure
from meanfield.results import Variable
from meanfield.sweeps import Task, sweep

__all__ = ["FIGURES", "QUICK", "Settings", "measure", "plan", "run"]

# File name of each figure -> function of `meanfield.figures` and its arguments.
FIGURES: dict[str, tuple[str, dict[str, Any]]] = {
    "heads": ("plot_scaling_factor", {}),
    "constants": ("plot_head_constants", {}),
}


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over; every field can be set from the command line.

    Attributes:
        model: as in `meanfield.pretrained.load`.
        text: "alice", a path, or "random" for uniform token ids.
        n_tokens: length of the windows.
        n_windows: windows over which radius and constants are averaged.
        layers: which; empty for all.
        causal: whether attention is masked; GPT-2 always is.
        depth: number of layers of a random model; 0 for the architecture's own.
        seed: of random weights.
        dtype: "float32" or "float64".
    """

    model: str = "minilm"
    text: str = "alice"
    n_tokens: int = 64
    n_windows: int = 5
    layers: tuple[int, ...] = ()
    causal: bool = False
    depth: int = 0
    seed: int = 0
    dtype: str = "float32"


QUICK = Settings(model="random:bert", text="random", n_tokens=8, n_windows=2, depth=2)

_HEAD, _BOTH = ("head",), ("head", "window")
_VARIABLES = (
    Variable("gamma", "scaling factor γ of the head", dims=_HEAD),
    Variable("norm_A", "spectral norm ‖A‖ of the head", dims=_HEAD),
    Variable("norm_V", "spectral norm ‖W V‖ of the head", dims=_HEAD),
    Variable("exponent", "γ R² at the root mean square radius", dims=_BOTH),
    Variable("radius", "root mean square of the token norms", dims=("window",)),
    Variable("head_constant", "local Lipschitz constant of the head alone", dims=_BOTH),
    Variable("head_constant_residual", "relative residual", dims=_BOTH),
    Variable(
        "head_constant_upper",
        "the head's constant is at most this, with probability 0.999",
        dims=_BOTH,
    ),
    Variable("head_constant_converged", "whether it converged", dims=_BOTH, dtype="bool"),
)
_PARAMETERS = (
    Variable("layer", "attention layer, from 0"),
    Variable("head", "head, from 0"),
    Variable("window", "window of the text"),
)


def measure(
    layer: int,
    *,
    model: str,
    model_revision: str,
    text: str,
    text_sha256: str,
    n_tokens: int,
    n_windows: int,
    causal: bool,
    depth: int,
    model_seed: int,
    dtype: str,
) -> dict[str, Any]:
    """All heads of a layer; arrays (head,) and (head, window)."""
    inputs.check_text(text, text_sha256)
    source = inputs.bilinear_transformer(
        model, causal, seed=model_seed, depth=depth, dtype=dtype, revision=model_revision
    )
    points = inputs.clouds(source, text, n_tokens, n_windows, layers=[layer])[0]
    F = source.attention(layer)
    gamma, norm_A, norm_V = inputs.head_spectra(F.parameters)
    radius = inputs.token_radii(points)[0].cpu().double().numpy()
    mu = ParticleMeasure.from_sequence(points)
    heads = [
        local_lipschitz(
            SelfAttention(F.parameters.head(h), causal=F.causal),
            mu,
            geometry="euclidean",
            strict=False,
        )
        for h in range(source.n_heads)
    ]
    return {
        "gamma": gamma,
        "norm_A": norm_A,
        "norm_V": norm_V,
        "exponent": gamma[:, None] * radius**2,
        "radius": radius,
        "head_constant": torch.stack([head.value for head in heads]),
        "head_constant_residual": torch.stack([head.residual for head in heads]),
        "head_constant_upper": torch.stack([head.upper for head in heads]),
        "head_constant_converged": torch.stack([head.converged for head in heads]),
    }


def plan(settings: Settings) -> dict[str, Any]:
    """The arguments of `meanfield.sweep` that make the experiment."""
    source = inputs.bilinear_transformer(
        settings.model, seed=settings.seed, depth=settings.depth, dtype=settings.dtype
    )
    coords = {"head": np.arange(source.n_heads), "window": np.arange(settings.n_windows)}
    layers = settings.layers or range(source.n_layers)
    inputs.check_fit(
        source,
        layers=layers,
        n_tokens=[settings.n_tokens],
        text=settings.text,
        n_windows=settings.n_windows,
    )
    text_sha256 = inputs.text_hash(settings.text)
    return {
        "fn": Task(measure, _VARIABLES, _PARAMETERS, coords=coords),
        "grid": {"layer": layers},
        "fixed": {
            "model": settings.model,
            "model_revision": source.fingerprint,
            "text": settings.text,
            "text_sha256": text_sha256,
            "n_tokens": settings.n_tokens,
            "n_windows": settings.n_windows,
            "causal": settings.causal or source.causal,
            "depth": settings.depth,
            "model_seed": settings.seed,
            "dtype": settings.dtype,
        },
        "seed": settings.seed,
        "attrs": {
            "experiment": "scaling-factor",
            "model": inputs.short_name(settings.model),
            "model_revision": source.fingerprint,
            "text": inputs.short_name(settings.text),
            "text_sha256": text_sha256,
            "n_tokens": settings.n_tokens,
        },
    }


def run(settings: Settings | None = None, **how: Any) -> xr.Dataset:
    """Run the sweep over layers.

    Args:
        settings: what to run over; the whole experiment if None.
        how: as in `meanfield.sweep`: store, executor, …
    """
    return sweep(**plan(settings or Settings()), **how)
