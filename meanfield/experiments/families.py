"""Do families of transformers differ in how sensitive they are through depth?

Encoders and decoders, trained and drawn at random, are followed through their blocks on windows of
one length, as in ``through-depth``: the constants of the blocks, of the network up to each, and
what the cloud of tokens looks like, side by side over relative depth. Not in the papers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from meanfield.experiments import inputs, through_depth
from meanfield.results import Variable
from meanfield.sweeps import Task, sweep

__all__ = ["FIGURES", "QUICK", "Settings", "measure", "plan", "run"]

FIGURES: dict[str, tuple[str, dict[str, Any]]] = {
    "constants": ("plot_families", {"quantity": "constant"}),
    "network": ("plot_families", {"quantity": "through"}),
    "rank": ("plot_families", {"quantity": "effective_rank"}),
}


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over.

    Attributes:
        models: as in `meanfield.pretrained.load`.
        text: "random" for uniform token ids of each model's vocabulary; "alice" or a path where
            every model has a tokenizer.
        n_tokens: length of a window.
        n_windows: windows of the text.
        dtype: "float32" or "float64".
        depth: number of layers of the random models; 0 for each architecture's own.
        seed: of random weights.
        rtol: relative accuracy of the norms.
    """

    models: tuple[str, ...] = ("minilm", "random:bert", "random:gpt2", "random:llama")
    text: str = "random"
    n_tokens: int = 32
    n_windows: int = 3
    dtype: str = "float32"
    depth: int = 6
    seed: int = 0
    rtol: float = 1e-3


QUICK = Settings(models=("random:llama", "random:gpt_neox"), n_tokens=6, n_windows=2, depth=2)

# What `through_depth.followed` knows of each block, flags aside: those have no NaN for the blocks
# that a shallower model has not got.
_PER_BLOCK = tuple(
    variable
    for variable in through_depth.VARIABLES
    if variable.dims == ("layer",) and variable.dtype != "bool"
)
_VARIABLES = (
    *_PER_BLOCK,
    Variable("converged", "whether every norm did", dtype="bool"),
    Variable("n_layers", "blocks of the model; beyond them the others are NaN", dtype="int64"),
)
_PARAMETERS = (
    Variable("model", "model"),
    Variable("window", "window of the text"),
    Variable("layer", "block, from 0"),
)


def measure(
    model: str,
    window: int,
    *,
    models: Sequence[str],
    revisions: Sequence[str],
    text: str,
    text_sha256: str,
    n_tokens: int,
    n_windows: int,
    dtype: str,
    depth: int,
    model_seed: int,
    rtol: float,
    most_layers: int,
) -> dict[str, Any]:
    """One window through one model; arrays (layer,), NaN beyond the model's last."""
    inputs.check_text(text, text_sha256)
    source = inputs.transformer(
        model,
        seed=model_seed,
        dtype=dtype,
        depth=_depth(model, depth),
        revision=revisions[list(models).index(model)],
    )
    ids = inputs.window_ids(source, text, n_tokens, n_windows)[window]
    found = through_depth.followed(source, ids, rtol)
    rows = {
        variable.name: np.pad(
            np.asarray(found[variable.name], dtype=float),
            (0, most_layers - source.n_layers),
            constant_values=np.nan,
        )
        for variable in _PER_BLOCK
    }
    converged = found["constant_converged"].all() and found["through_converged"].all()
    return rows | {"converged": bool(converged), "n_layers": source.n_layers}


def _depth(model: str, depth: int) -> int:
    return depth if model.startswith("random:") else 0


def plan(settings: Settings) -> dict[str, Any]:
    """The arguments of `meanfield.sweep` that make the experiment."""
    sources = [
        inputs.transformer(
            model,
            seed=settings.seed,
            dtype=settings.dtype,
            depth=_depth(model, settings.depth),
        )
        for model in settings.models
    ]
    for source in sources:
        inputs.check_fit(
            source,
            layers=[],
            n_tokens=[settings.n_tokens],
            text=settings.text,
            n_windows=settings.n_windows,
        )
    text_sha256 = inputs.text_hash(settings.text)
    most_layers = max(source.n_layers for source in sources)
    return {
        "fn": Task(measure, _VARIABLES, _PARAMETERS, coords={"layer": np.arange(most_layers)}),
        "grid": {"model": list(settings.models), "window": range(settings.n_windows)},
        "fixed": {
            "models": list(settings.models),
            "revisions": [source.fingerprint for source in sources],
            "text": settings.text,
            "text_sha256": text_sha256,
            "n_tokens": settings.n_tokens,
            "n_windows": settings.n_windows,
            "dtype": settings.dtype,
            "depth": settings.depth,
            "model_seed": settings.seed,
            "rtol": settings.rtol,
            "most_layers": most_layers,
        },
        "seed": settings.seed,
        "attrs": {
            "experiment": "families",
            "text": inputs.short_name(settings.text),
            "text_sha256": text_sha256,
            "n_tokens": settings.n_tokens,
        },
    }


def run(settings: Settings | None = None, **how: Any) -> xr.Dataset:
    """Run the sweep over models and windows.

    Args:
        settings: what to run over; the whole experiment if None.
        how: as in `meanfield.sweep`: store, executor, …
    """
    return sweep(**plan(settings or Settings()), **how)
