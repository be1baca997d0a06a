"""Do families of transformers differ in how sensitive they are through depth?

Encoders and decoders, trained and drawn at random, are followed through their blocks on windows of
one length, as in ``through-depth``: the constants of the blocks, of the network up to each, and
what the cloud of tokens looks like, side by side over relative depth. Not in the papers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from meanfield.experiments import inputs, through_depth
from meanfield.experiments.experiment import Experiment
from meanfield.experiments.settings import setting
from meanfield.figures.canvas import figure
from meanfield.figures.curves import curve
from meanfield.figures.selection import attribute, levels, reduced, select

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


_QUANTITIES = {
    "constant": "local W₂ constant of the block",
    "through": "local W₂ constant up to the block",
    "effective_rank": "effective rank of the tokens",
}
_MARKERS = "os^Dv*"


def _side_by_side(quantity: str) -> Callable[..., Axes]:
    """The figure of one quantity."""
    what = _QUANTITIES[quantity][0].upper() + _QUANTITIES[quantity][1:]
    flags = [f"{quantity}_converged"] if quantity in ("constant", "through") else []

    @figure(quantity, *flags)
    def families(ds: xr.Dataset, *, ax: Axes) -> Axes:
        """A quantity of every model over relative depth; medians, and the range over windows."""
        for k, model in enumerate(levels(ds, "model")):
            rows, colour, marker = select(ds, model=model), f"C{k}", _MARKERS[k % len(_MARKERS)]
            n_layers = int(rows.n_layers.max())
            blocks = rows.isel(layer=slice(n_layers))
            depth = (np.arange(n_layers) + 1) / n_layers
            middle = reduced(blocks, quantity, along="case").assign(depth=("layer", depth))
            style: Any = {"color": colour, "label": str(model), "markersize": 4}
            curve(ax, middle, "depth", quantity, f"{marker}-", **style)
            low, high = blocks[quantity].min("case"), blocks[quantity].max("case")
            ax.fill_between(depth, low, high, color=colour, alpha=0.15, linewidth=0)
        ax.set(yscale="log", xlabel="block / number of blocks", ylabel=_QUANTITIES[quantity])
        text = attribute(ds, "text")
        text = "random token ids" if text == inputs.RANDOM_TEXT else text
        ax.set_title(f"{what}\n{text}, n = {attribute(ds, 'n_tokens')}")
        return ax

    families.__doc__ = str(families.__doc__).replace("A quantity", what)
    return families


def _derived(s: Settings) -> dict[str, Any]:
    depths = {name: s.depth if name.startswith("random:") else 0 for name in s.models}
    return {"epsilons": ()} | through_depth.derived(s, depths)


EXPERIMENT = Experiment(
    through_depth.measure,
    Settings(),
    grid=lambda s: {"model": list(s.models), "window": range(s.n_windows)},
    variables=[one for one in through_depth.VARIABLES if "epsilon" not in one.dims],
    parameters=through_depth.PARAMETERS,
    coords=lambda s: {"layer": np.arange(_derived(s)["most_layers"])},
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
