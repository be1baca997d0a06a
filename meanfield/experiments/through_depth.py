"""How sensitive is a whole transformer to its tokens, block by block and end to end?

A text is cut into windows and followed through the blocks of models, trained or drawn at random.
At every depth the sweep has the local Wasserstein constant of the block, of the network up to
there, and the product that one would have from the blocks; a bound of all constants as every
token moves by ε, from a ball that is followed from block to block, ∞ once it overflows; how far
the tokens move in W₂ beside how far they move one by one; and what the cloud looks like. Several
models stand side by side over relative depth. None of it is in the papers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import xarray as xr

from meanfield import ParticleMeasure
from meanfield.checks import as_bool, to_host
from meanfield.experiments import inputs
from meanfield.experiments.experiment import Experiment
from meanfield.experiments.settings import along, derived, over, setting
from meanfield.figures.canvas import literal
from meanfield.figures.charts import Chart, Curve
from meanfield.figures.selection import attribute, levels, select
from meanfield.layers import Chain
from meanfield.lipschitz import LocalLipschitz, local_lipschitz
from meanfield.maps import BallBounds
from meanfield.maps.map import ball_bounds, constant_upper
from meanfield.measures import MeasureMap
from meanfield.pretrained import Transformer
from meanfield.results import Variable
from meanfield.transport import TransportResult, solve_w2

__all__ = ["EXPERIMENT", "Settings"]

_ENDS = ("value", "lower", "upper")
_BALLS = ("ball", "ball_measured", "ball_radius")
_CONSTANT, _THROUGH = "local W₂ constant of the block", "local W₂ constant up to the block"


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over."""

    models: tuple[str, ...] = over(
        "model", ("minilm",), "model, as in `meanfield.pretrained.load`", quick=("random:llama",)
    )
    text: str = setting(
        "alice",
        "'alice', a path, or 'random' for uniform token ids of each model's vocabulary",
        quick="random",
    )
    n_tokens: int = setting(64, "length of a window", quick=10)
    n_windows: int = over("window", 5, "window of the text", quick=2)
    causal: bool | None = setting(None, "whether attention is masked; as the model has it if None")
    dtype: str = setting("float64", "'float32' or 'float64'")
    depth: int = setting(
        0, "number of layers of random models; 0 for each architecture's own", quick=2
    )
    seed: int = setting(0, "seed of random weights")
    rtol: float = setting(1e-4, "relative accuracy of the norms", quick=1e-3)
    epsilons: tuple[float, ...] = along(
        "epsilon",
        (1e-15, 1e-12, 1e-9, 1e-6, 1e-3),
        "how far tokens may move in the bounds over balls, relative to their root mean square "
        "norm at the start",
    )
    loading: Mapping[str, inputs.OfText] = derived(None, "each model with the text")
    most_layers: int = derived(0, "blocks of the deepest model")


def resolve(s: Settings) -> Settings:
    """Settings with what tells the models and the text from others."""
    if s.causal is not None:
        as_bool(s.causal, "causal")
    every: Any = {"text": s.text, "n_windows": s.n_windows, "n_tokens": s.n_tokens}
    every |= {"seed": s.seed, "dtype": s.dtype}
    loading = {
        name: inputs.pinned(
            inputs.OfText(name, depth=s.depth if name.startswith("random:") else 0, **every)
        )
        for name in s.models
    }
    most_layers = max((len(one.layers) for one in loading.values()), default=0)
    return replace(s, loading=loading, most_layers=most_layers)


def measure(s: Settings, model: str, window: int) -> dict[str, Any]:
    """One window through one model; arrays (layer,) and (layer, epsilon).

    Beyond the last block of the model numbers are NaN, and flags true.
    """
    source = s.loading[model].source(s.causal)
    ids = s.loading[model].ids(source, s.n_tokens)[window]
    found = _followed(source, ids, s.rtol, s.epsilons)
    flags = [np.all(value) for name, value in found.items() if name.endswith("_converged")]
    padded = {name: _padded(value, s.most_layers) for name, value in found.items()}
    return padded | {"converged": all(flags), "n_layers": source.n_layers}


def _padded(values: Any, n_layers: int) -> Any:
    """Values of the blocks continued to so many blocks; what has no blocks as it is."""
    if not np.ndim(values):
        return values
    blank = True if values.dtype == bool else np.nan
    after = [(0, n_layers - len(values))] + [(0, 0)] * (values.ndim - 1)
    return np.pad(values, after, constant_values=blank)


def _followed(
    source: Transformer, ids: torch.Tensor, rtol: float, epsilons: Sequence[float]
) -> dict[str, Any]:
    """The tokens through all blocks of a model, see the variables."""
    n = ids.shape[-1]
    mu = source.embeddings(ids)
    start, rows, blocks, ball = mu, [], [], _Ball(mu, epsilons)
    for layer in range(source.n_layers):
        block = source.block(layer, length=n)
        image = block(mu)
        blocks.append(block)
        here = local_lipschitz(block, mu, rtol=rtol, strict=False)
        through = local_lipschitz(Chain(blocks), start, rtol=rtol, strict=False)
        rows.append(
            here.values("constant")
            | through.values("through")
            | {"splitting": float(here.splitting)}  # type: ignore[arg-type]
            | ball.after(block, mu, through)
            | _moved(mu, image)
            | _shape(image)
        )
        mu = image
    whole = local_lipschitz(source.network(length=n), start, rtol=rtol, strict=False)
    found = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    return {
        **found,
        "product": np.cumprod(found["constant"]),
        "product_upper": np.cumprod(found["upper"]),
        "arc_length": np.cumsum(found["moved"]),
        **whole.values("network"),
    }


class _Ball:
    """Bounds of the network up to a block while tokens move, and how far they may have moved."""

    def __init__(self, mu: ParticleMeasure, epsilons: Sequence[float]) -> None:
        relative = torch.tensor(epsilons, dtype=mu.dtype, device=mu.device)
        size = float(inputs.token_radii(mu.points)[0])
        self.radii = (size * relative)[:, None].expand(-1, mu.n_particles)
        self.near: BallBounds | None = None
        self.known = len(epsilons) > 0  # of all blocks so far

    def after(
        self, block: MeasureMap, mu: ParticleMeasure, through: LocalLipschitz
    ) -> dict[str, np.ndarray]:
        if self.known:
            near = _declared(ball_bounds, block, mu, self.radii, splitting=False)
            self.known = near is not None
        if not self.known:
            upper = _declared(constant_upper, block, mu)
            blank = {name: np.full(len(self.radii), np.nan) for name in _BALLS}
            return blank | {"upper": np.array(np.nan) if upper is None else to_host(upper)}
        self.near = near if self.near is None else near.after(self.near)
        self.radii = near.displacement
        measured = self.near.at_most(through.upper).upper
        found = (self.near.upper, measured, near.displacement.amax(-1))
        by_name = {name: to_host(one) for name, one in zip(_BALLS, found, strict=True)}
        return by_name | {"upper": to_host(near.constant[0])}


def _declared(bound: Callable[..., Any], *arguments: Any, **how: Any) -> Any:
    try:
        return bound(*arguments, **how)
    except NotImplementedError:  # the map declares none
        return None


def _moved(mu: ParticleMeasure, image: ParticleMeasure) -> dict[str, Any]:
    before, after = (ParticleMeasure(m.points) for m in (mu, image))
    distance = solve_w2(before, after, strict=False).values("moved", *_ENDS)
    steps = (after.points - before.points).square().sum(-1)
    return distance | {"displacement": float(steps.mean().sqrt())}


def _shape(mu: ParticleMeasure) -> dict[str, float]:
    spread = torch.linalg.svdvals(mu.points - mu.mean()).square()
    share = spread[spread > 0] / spread.sum()
    return {
        "radius": float(inputs.token_radii(mu.points)[0]),
        "effective_rank": float((-(share * share.log()).sum()).exp()),
    }


def _first(ds: xr.Dataset) -> xr.Dataset:
    """The cases of the first model, and its blocks."""
    rows = select(ds, model=levels(ds, "model")[0])
    return rows.isel(layer=slice(int(rows.n_layers[0])))


def _near(ds: xr.Dataset) -> xr.Dataset:
    """The bound of the largest ball that somewhere says more than the product of bounds."""
    better = ds.ball_measured.median("case") < ds.product_upper.median("case")
    bound = ds.ball_measured.where(better)
    seen = np.flatnonzero(bound.notnull().any(("case", "layer")))
    return ds.assign(ball_measured=bound).isel(epsilon=seen[-1:])


def _titled(what: str) -> Callable[[xr.Dataset], str]:
    def title(ds: xr.Dataset) -> str:
        models = levels(ds, "model")
        of = f"model {inputs.short_name(models[0])}, " if len(models) == 1 else ""
        text = f"{of}text {attribute(ds, 'text')}, {attribute(ds, 'n_tokens')} tokens"
        return f"{what}\n{literal(text)}"

    return title


_OF_FIRST: Any = {"rows": _first, "xlabel": "block", "ticks": True}
CONSTANTS = Chart(
    "Constants of the blocks of the first model, of the network up to each, and the products; "
    "medians of windows. Beside them what the network's constant is at most while every token "
    "moves by ε, relative to its size, as far as that is below the product of upper bounds.",
    "layer",
    [
        Curve("constant", "block", along="case", color="tab:blue"),
        Curve("through", "network up to the block", "s-", along="case", color="tab:green"),
        Curve("product", "product of the blocks", "^-", along="case", color="tab:orange"),
        Curve("product_upper", "product of upper bounds", "--", along="case", color="tab:red"),
        Curve(
            "ball_measured",
            lambda ds: "bound, tokens within " + ", ".join(f"{e:.15g}" for e in ds.epsilon.values),
            ".:",
            along="case",
            rows=_near,
            color="0.4",
        ),
    ],
    _titled("Local constants through depth"),
    log="y",
    ylabel=r"local $W_2$ constant",
    **_OF_FIRST,
)
DISPLACEMENT = Chart(
    "How far the cloud of the first model moves in W₂, and its tokens one by one, in units of the "
    "radius.",
    "layer",
    [
        Curve("displacement/radius", "each token to its image", along="case"),
        # The two agree where no relabelling of the tokens saves anything.
        Curve("moved/radius", r"$W_2$", "s-", along="case", fillstyle="none", markersize=8),
    ],
    _titled("How far each block moves the tokens"),
    ylabel="distance / radius after the block",
    ylim=(0, None),
    **_OF_FIRST,
)


def _over_depth(ds: xr.Dataset) -> xr.Dataset:
    n_layers = int(ds.n_layers.max())
    depth = (np.arange(n_layers) + 1) / n_layers
    return ds.isel(layer=slice(n_layers)).assign_coords(depth=("layer", depth))


def _side_by_side(quantity: str, what: str) -> Chart:
    """The chart of one quantity for all models."""
    whole = what[0].upper() + what[1:]
    return Chart(
        f"{whole} of every model over relative depth; medians, and the range over windows.",
        "depth",
        [Curve(quantity, "{model}", along="case", rows=_over_depth, markersize=4)],
        _titled(whole),
        by="model",
        log="y",
        xlabel="blocks passed / number of blocks",
        ylabel=what,
    )


_OF_BLOCKS = {
    "splitting": "splitting component of the block's constant",
    "upper": "certain upper bound of the block's constant (NaN: none proved)",
    "product": "product of the blocks' constants up to this block",
    "product_upper": "product of the blocks' upper bounds up to this block (NaN: none proved)",
    "displacement": "root mean square of what each token moves by",
    "arc_length": "sum of the W2 distances up to this block",
    "radius": "root mean square of the token norms after the block",
    "effective_rank": "effective rank of the tokens: exp of the entropy of their spectrum",
}
_OF_BALLS = {
    "ball": "certain bound of `through` while tokens move by epsilon, layer by layer",
    "ball_measured": (
        "bound of `through` while tokens move by epsilon, from what was measured, certain but for "
        "the miss of `through_upper`"
    ),
    "ball_radius": "what a token is moved by at most, after this block",
}
_DIMS = ("layer",)
EXPERIMENT = Experiment(
    measure,
    Settings(),
    [
        *LocalLipschitz.columns("constant", words=_CONSTANT, dims=_DIMS),
        *LocalLipschitz.columns("through", words=_THROUGH, dims=_DIMS),
        *(Variable(name, words, dims=_DIMS) for name, words in _OF_BLOCKS.items()),
        *(Variable(name, words, dims=("layer", "epsilon")) for name, words in _OF_BALLS.items()),
        *TransportResult.columns("moved", *_ENDS, words="W₂ of tokens and images", dims=_DIMS),
        *LocalLipschitz.columns("network", words="local constant of the network, norm included"),
        Variable("converged", "whether every norm did", dtype="bool"),
        Variable("n_layers", "blocks of the model; beyond them the others are NaN", dtype="int64"),
    ],
    resolve=resolve,
    coords={Variable("layer", "block, from 0"): lambda s: range(s.most_layers)},
    attrs=lambda s: {
        "text": inputs.short_name(s.text),
        "text_sha256": inputs.text_hash(s.text),
        "n_tokens": s.n_tokens,
    },
    figures={
        "constants": CONSTANTS,
        "displacement": DISPLACEMENT,
        "models": _side_by_side("constant", _CONSTANT),
        "models-network": _side_by_side("through", _THROUGH),
        "models-rank": _side_by_side("effective_rank", "effective rank of the tokens"),
    },
)
