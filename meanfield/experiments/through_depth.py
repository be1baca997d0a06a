"""How sensitive is a whole transformer to its tokens, block by block and end to end?

A text is cut into windows and followed through the blocks of a model. At every depth the sweep
has the local Wasserstein constant of the block, of the network up to there, and the product that
one would have from the blocks; a bound of all constants as every token moves by ε, from a ball
that is followed from block to block, ∞ once it overflows; how far the tokens move in W₂ beside how
far they move one by one; and what the cloud looks like. None of it is in the papers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr

from meanfield.checks import to_host
from meanfield.experiments import inputs
from meanfield.experiments.experiment import Experiment
from meanfield.experiments.settings import setting
from meanfield.figures.canvas import figure
from meanfield.figures.curves import curve
from meanfield.figures.selection import attribute, model_and_text, reduced
from meanfield.layers import Chain
from meanfield.lipschitz import LocalLipschitz, local_lipschitz
from meanfield.maps import BallBounds
from meanfield.maps.map import ball_bounds, constant_upper
from meanfield.measures import MeasureMap, ParticleMeasure
from meanfield.pretrained import Transformer
from meanfield.results import Variable
from meanfield.transport import solve_w2

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["EXPERIMENT", "PARAMETERS", "VARIABLES", "Settings", "derived", "measure"]


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over."""

    model: str = setting(
        "minilm", "model, as in `meanfield.pretrained.load`", quick="random:llama"
    )
    text: str = setting(
        "alice", "'alice', a path, or 'random' for uniform token ids", quick="random"
    )
    n_tokens: int = setting(64, "length of a window", quick=10)
    n_windows: int = setting(5, "windows of the text", quick=2)
    causal: bool | None = setting(None, "whether attention is masked; as the model has it if None")
    dtype: str = setting("float64", "'float32' or 'float64'")
    depth: int = setting(
        0, "number of layers of a random model; 0 for the architecture's own", quick=2
    )
    seed: int = setting(0, "seed of random weights")
    rtol: float = setting(1e-4, "relative accuracy of the norms", quick=1e-3)
    epsilons: tuple[float, ...] = setting(
        (1e-15, 1e-12, 1e-9, 1e-6, 1e-3),
        "how far tokens may move in the bounds over balls, relative to their root mean square "
        "norm at the start",
    )


_DIMS = ("layer",)
_BALLS = ("layer", "epsilon")
VARIABLES = (
    *LocalLipschitz.columns("constant", words="local W₂ constant of the block", dims=_DIMS),
    Variable("splitting", "splitting component of the block's constant", dims=_DIMS),
    Variable(
        "upper", "certain upper bound of the block's constant (NaN: none proved)", dims=_DIMS
    ),
    *LocalLipschitz.columns(
        "through", words="local constant of the network up to this block", dims=_DIMS
    ),
    Variable("product", "product of the blocks' constants up to this block", dims=_DIMS),
    Variable(
        "product_upper",
        "product of the blocks' upper bounds up to here (NaN: none proved)",
        dims=_DIMS,
    ),
    Variable(
        "ball", "certain bound of it while tokens move by epsilon, layer by layer", dims=_BALLS
    ),
    Variable(
        "ball_measured",
        "the same with what was measured, but for the probability that `through_upper` has",
        dims=_BALLS,
    ),
    Variable("ball_radius", "no token is moved by more after this block", dims=_BALLS),
    Variable("moved", "W2 distance of the tokens before and after the block", dims=_DIMS),
    Variable("moved_lower", "lower end of that distance", dims=_DIMS),
    Variable("moved_upper", "upper end of that distance", dims=_DIMS),
    Variable("displacement", "root mean square of what each token moves by", dims=_DIMS),
    Variable("arc_length", "sum of the W2 distances up to this block", dims=_DIMS),
    Variable("radius", "root mean square of the token norms after the block", dims=_DIMS),
    Variable("effective_rank", "exp of the entropy of the covariance's spectrum", dims=_DIMS),
    *LocalLipschitz.columns(
        "network", words="local constant of the whole network, final norm included"
    ),
    Variable("converged", "whether every norm did", dtype="bool"),
    Variable("n_layers", "blocks of the model; beyond them the others are NaN", dtype="int64"),
)
PARAMETERS = (
    Variable("model", "model"),
    Variable("window", "window of the text"),
    Variable("layer", "block, from 0"),
    Variable("epsilon", "how far tokens may move, relative to their root mean square norm"),
)


def measure(
    model: str,
    window: int,
    *,
    loading: Mapping[str, Mapping[str, Any]],
    text: str,
    text_sha256: str,
    n_tokens: int,
    n_windows: int,
    dtype: str,
    model_seed: int,
    rtol: float,
    epsilons: Sequence[float],
    most_layers: int,
) -> dict[str, Any]:
    """One window through one model; arrays (layer,) and (layer, epsilon).

    Beyond the last block of the model numbers are NaN, and flags true. `loading` holds what
    `inputs.transformer` takes for each model.
    """
    inputs.check_text(text, text_sha256)
    source = inputs.transformer(model, seed=model_seed, dtype=dtype, **loading[model])
    ids = inputs.window_ids(source, text, n_tokens, n_windows)[window]
    found = _followed(source, ids, rtol, epsilons)
    flags = [np.all(value) for name, value in found.items() if name.endswith("_converged")]
    padded = {name: _padded(value, most_layers) for name, value in found.items()}
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
    """The tokens through all blocks of a model, see the variables; no balls without epsilons."""
    n = ids.shape[-1]
    mu = source.embeddings(ids)
    start, rows, blocks = mu, [], []
    ball = _Ball(mu, epsilons) if epsilons else None
    for layer in range(source.n_layers):
        block = source.block(layer, length=n)
        image = block(mu)
        blocks.append(block)
        here = local_lipschitz(block, mu, rtol=rtol, strict=False)
        through = local_lipschitz(Chain(blocks), start, rtol=rtol, strict=False)
        assert here.splitting is not None
        near: dict[str, Any] = ball.after(block, mu, through) if ball else {}
        if "upper" not in near:
            near["upper"] = _upper(block, mu)
        rows.append(
            here.values("constant")
            | through.values("through")
            | {"splitting": float(here.splitting)}
            | near
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

    def after(
        self, block: MeasureMap, mu: ParticleMeasure, through: LocalLipschitz
    ) -> dict[str, np.ndarray]:
        names = ("ball", "ball_measured", "ball_radius")
        try:
            near = ball_bounds(block, mu, self.radii, splitting=False)
        except NotImplementedError:  # the map declares none
            return {name: np.full(len(self.radii), np.nan) for name in names}
        self.near = near if self.near is None else near.after(self.near)
        self.radii = near.displacement
        measured = self.near.at_most(through.upper).upper
        found = (self.near.upper, measured, near.displacement.amax(-1))
        by_name = {name: to_host(one) for name, one in zip(names, found, strict=True)}
        return by_name | {"upper": to_host(near.constant[0])}


def _upper(block: MeasureMap, mu: ParticleMeasure) -> float:
    try:
        return float(constant_upper(block, mu))
    except NotImplementedError:  # the map declares none
        return float("nan")


def _moved(mu: ParticleMeasure, image: ParticleMeasure) -> dict[str, float]:
    before, after = (ParticleMeasure(m.points) for m in (mu, image))
    distance = solve_w2(before, after, strict=False)
    steps = (after.points - before.points).square().sum(-1)
    return {
        "moved": float(distance.value),
        "moved_lower": float(distance.lower),
        "moved_upper": float(distance.upper),
        "displacement": float(steps.mean().sqrt()),
    }


def _shape(mu: ParticleMeasure) -> dict[str, float]:
    spread = torch.linalg.svdvals(mu.points - mu.mean()).square()
    share = spread[spread > 0] / spread.sum()
    return {
        "radius": float(inputs.token_radii(mu.points)[0]),
        "effective_rank": float((-(share * share.log()).sum()).exp()),
    }


@figure(
    *("constant", "constant_converged", "through", "through_converged"),
    *("product", "product_upper", "ball_measured"),
)
def constants(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Constants of the blocks, of the network up to each, and the products; medians of windows.

    Beside them what the network's constant is at most while every token moves by ε, relative to
    its size. Bounds above the products are not drawn.
    """
    lines = (
        ("constant", "o-", "tab:blue", "block"),
        ("through", "s-", "tab:green", "network up to the block"),
        ("product", "^-", "tab:orange", "product of the blocks"),
        ("product_upper", "--", "tab:red", "product of upper bounds"),
    )
    for name, style, colour, label in lines:
        middle = reduced(ds, name, along="case")
        if not np.isfinite(middle[name]).any():
            continue
        curve(ax, middle, "layer", name, style, color=colour, label=label)
    _draw_balls(ax, ds)
    ax.set(yscale="log", xlabel="block", ylabel=r"local $W_2$ constant")
    ax.set_xticks(ds.layer.values)
    n = attribute(ds, "n_tokens")
    ax.set_title(f"Local constants through depth\n{model_and_text(ds)}, {n} tokens")
    return ax


def _draw_balls(ax: Axes, ds: xr.Dataset) -> None:
    _, top = ax.get_ylim()
    shades = np.linspace(0.75, 0.25, ds.sizes["epsilon"])
    for shade, epsilon in zip(shades, ds.epsilon.values, strict=True):
        middle = ds.ball_measured.sel(epsilon=epsilon).median("case")
        seen = np.isfinite(middle) & (middle <= top)
        if seen.any():
            label = f"bound, tokens within {epsilon:g}"
            ax.plot(ds.layer[seen], middle[seen], ":", marker=".", color=str(shade), label=label)


@figure("displacement/radius", "moved/radius")
def displacement(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """How far the cloud moves in W2, and its tokens one by one, in units of the radius."""
    for name, style, label in (
        ("displacement", "o-", "each token to its image"),
        ("moved", "s-", r"$W_2$"),
    ):
        # The two agree where no relabelling of the tokens saves anything.
        size: Any = {"fillstyle": "none", "markersize": 8} if name == "moved" else {}
        ax.plot(ds.layer, (ds[name] / ds.radius).median("case"), style, label=label, **size)
    ax.set(xlabel="block", ylabel="distance / radius after the block", ylim=(0, None))
    ax.set_xticks(ds.layer.values)
    what = "How far each block moves the tokens"
    ax.set_title(f"{what}\n{model_and_text(ds)}, {attribute(ds, 'n_tokens')} tokens")
    return ax


def derived(s: Any, depths: Mapping[str, int], causal: bool | None = None) -> dict[str, Any]:
    """What `measure` takes besides settings, for models and the depths they are loaded with."""
    loading, most_layers = {}, 0
    for name, depth in depths.items():
        how: dict[str, Any] = {"seed": s.seed, "dtype": s.dtype, "depth": depth}
        source = inputs.transformer(name, **how)
        inputs.check_fit(
            source, layers=[], n_tokens=[s.n_tokens], text=s.text, n_windows=s.n_windows
        )
        mask = inputs.transformer(name, causal, **how).causal
        loading[name] = {"revision": source.fingerprint, "depth": depth, "causal": mask}
        most_layers = max(most_layers, source.n_layers)
    return {
        "loading": loading,
        "model_seed": s.seed,
        "text_sha256": inputs.text_hash(s.text),
        "most_layers": most_layers,
    }


EXPERIMENT = Experiment(
    measure,
    Settings(),
    grid=lambda s: {"model": [s.model], "window": range(s.n_windows)},
    variables=VARIABLES,
    parameters=PARAMETERS,
    coords=lambda s: {
        "layer": np.arange(inputs.source_of(s).n_layers),
        "epsilon": np.array(s.epsilons),
    },
    derived=lambda s: derived(s, {s.model: s.depth}, s.causal),
    attrs=inputs.labels,
    figures={"constants": constants, "displacement": displacement},
)
