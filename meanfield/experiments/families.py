"""Do families of transformers differ in how sensitive they are through depth?

Encoders and decoders, trained and drawn at random, are followed through their blocks on windows of
one length, as in ``through-depth``: the constants of the blocks, of the network up to each, and
what the cloud of tokens looks like, side by side over relative depth. Not in the papers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from meanfield.experiments import inputs, through_depth
from meanfield.experiments.experiment import Experiment
from meanfield.experiments.settings import setting
from meanfield.figures.canvas import figure, readable_logs
from meanfield.figures.selection import levels, select
from meanfield.pretrained import Transformer
from meanfield.results import Variable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["EXPERIMENT", "Settings"]


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over."""

    models: tuple[str, ...] = setting(
        ("minilm", "random:bert", "random:gpt2", "random:llama"),
        "models, as in `meanfield.pretrained.load`",
        quick=("random:llama", "random:gpt_neox"),
    )
    text: str = setting(
        "random",
        "'random' for uniform token ids of each model's vocabulary; 'alice' or a path where every "
        "model has a tokenizer",
    )
    n_tokens: int = setting(32, "length of a window", quick=6)
    n_windows: int = setting(3, "windows of the text", quick=2)
    dtype: str = setting("float32", "'float32' or 'float64'")
    depth: int = setting(
        6, "number of layers of the random models; 0 for each architecture's own", quick=2
    )
    seed: int = setting(0, "seed of random weights")
    rtol: float = setting(1e-3, "relative accuracy of the norms")


# The numbers that `through_depth.followed` gives for each block. No flags: they have no NaN to
# stand for the blocks that a shallower model lacks.
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


_QUANTITIES = {
    "constant": "local $W_2$ constant of the block",
    "through": "local $W_2$ constant up to the block",
    "product": "product of the blocks' constants",
    "effective_rank": "effective rank of the tokens",
    "radius": "root mean square of the token norms",
}


def _side_by_side(quantity: str) -> Callable[..., Axes]:
    """The figure of one quantity."""

    @figure(quantity)
    def families(ds: xr.Dataset, *, ax: Axes) -> Axes:
        """A quantity of every model over relative depth; medians, and the range over windows."""
        for model, marker in zip(levels(ds, "model"), itertools.cycle("os^Dv*"), strict=False):
            cases = select(ds, model=model)
            n_layers = int(cases.n_layers.max())
            rows = cases[quantity].isel(layer=slice(n_layers))
            depth = (np.arange(n_layers) + 1) / n_layers
            (line,) = ax.plot(
                depth, rows.median("case"), f"{marker}-", label=str(model), markersize=4
            )
            low, high = rows.min("case"), rows.max("case")
            ax.fill_between(depth, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
        ax.set(yscale="log", xlabel="block / number of blocks", ylabel=_QUANTITIES[quantity])
        text = {"random": "random token ids"}.get(ds.attrs["text"], ds.attrs["text"])
        ax.set_title(f"{_QUANTITIES[quantity]}\n{text}, n = {ds.attrs['n_tokens']}")
        readable_logs(ax)
        return ax

    return families


def _sources(s: Settings) -> list[Transformer]:
    how: dict[str, Any] = {"seed": s.seed, "dtype": s.dtype}
    return [inputs.transformer(name, depth=_depth(name, s.depth), **how) for name in s.models]


def _most_layers(s: Settings) -> int:
    return max(source.n_layers for source in _sources(s))


def _derived(s: Settings) -> dict[str, Any]:
    windows: dict[str, Any] = {"text": s.text, "n_windows": s.n_windows}
    for source in _sources(s):
        inputs.check_fit(source, layers=[], n_tokens=[s.n_tokens], **windows)
    return {
        "revisions": [source.fingerprint for source in _sources(s)],
        "text_sha256": inputs.text_hash(s.text),
        "model_seed": s.seed,
        "most_layers": _most_layers(s),
    }


EXPERIMENT = Experiment(
    measure,
    Settings(),
    grid=lambda s: {"model": list(s.models), "window": range(s.n_windows)},
    variables=_VARIABLES,
    parameters=_PARAMETERS,
    coords=lambda s: {"layer": np.arange(_most_layers(s))},
    derived=_derived,
    attrs=lambda s: {
        "text": inputs.short_name(s.text),
        "text_sha256": inputs.text_hash(s.text),
        "n_tokens": s.n_tokens,
    },
    figures={
        "constants": _side_by_side("constant"),
        "network": _side_by_side("through"),
        "rank": _side_by_side("effective_rank"),
    },
)
