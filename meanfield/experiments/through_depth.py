"""How sensitive is a whole transformer to its tokens, block by block and end to end?

A text is cut into windows and followed through the blocks of a model. At every depth the sweep
has the local Wasserstein constant of the block, of the network up to there, and the product that
one would have from the blocks; a bound of all constants as every token moves by ε, from a ball
that is followed from block to block, ∞ once it overflows; how far the tokens move in W₂ beside how
far they move one by one; and what the cloud looks like. None of it is in the papers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xarray as xr

from meanfield.experiments import inputs
from meanfield.layers import Chain
from meanfield.lipschitz import LocalLipschitz, local_lipschitz
from meanfield.maps import BallBounds, ball_bounds
from meanfield.measures import MeasureMap, ParticleMeasure
from meanfield.pretrained import Transformer
from meanfield.results import Variable
from meanfield.sweeps import Task, sweep
from meanfield.transport import solve_w2

__all__ = ["FIGURES", "QUICK", "VARIABLES", "Settings", "followed", "measure", "plan", "run"]

FIGURES: dict[str, tuple[str, dict[str, Any]]] = {
    "constants": ("plot_constants_through_depth", {}),
    "displacement": ("plot_displacement_through_depth", {}),
}


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over.

    Attributes:
        model: as in `meanfield.pretrained.load`.
        text: "alice", a path, or "random" for uniform token ids.
        n_tokens: length of a window.
        n_windows: windows of the text.
        causal: masked or not, where the model can be both.
        dtype: "float32" or "float64".
        depth: number of layers of a random model; 0 for the architecture's own.
        seed: of random weights.
        rtol: relative accuracy of the norms.
        epsilons: how far tokens may move in the bounds over balls, relative to their root mean
            square norm at the start.
    """

    model: str = "minilm"
    text: str = "alice"
    n_tokens: int = 64
    n_windows: int = 5
    causal: bool | None = None
    dtype: str = "float64"
    depth: int = 0
    seed: int = 0
    rtol: float = 1e-4
    epsilons: tuple[float, ...] = (1e-15, 1e-12, 1e-9, 1e-6, 1e-3)


QUICK = Settings(model="random:llama", text="random", n_tokens=10, n_windows=2, depth=2, rtol=1e-3)

_DIMS = ("layer",)
_BALLS = ("layer", "epsilon")
VARIABLES = (
    Variable("constant", "local Wasserstein constant of the block", dims=_DIMS),
    Variable("constant_residual", "relative residual of the constant", dims=_DIMS),
    Variable("constant_upper", "it is at most this, with probability 0.999", dims=_DIMS),
    Variable("constant_converged", "whether it converged", dims=_DIMS, dtype="bool"),
    Variable("splitting", "splitting component of the block's constant", dims=_DIMS),
    Variable("upper", "certain upper bound of the block's constant, if one is known", dims=_DIMS),
    Variable("through", "local constant of the network up to this block", dims=_DIMS),
    Variable("through_residual", "relative residual of the constant up to here", dims=_DIMS),
    Variable("through_upper", "it is at most this, with probability 0.999", dims=_DIMS),
    Variable("through_converged", "whether it converged", dims=_DIMS, dtype="bool"),
    Variable("product", "product of the blocks' constants up to this block", dims=_DIMS),
    Variable("product_upper", "product of the blocks' upper bounds up to this one", dims=_DIMS),
    Variable(
        "ball", "certain bound of it while tokens move by epsilon, layer by layer", dims=_BALLS
    ),
    Variable("ball_999", "the same with what was measured, with probability 0.999", dims=_BALLS),
    Variable("ball_radius", "no token is moved by more after this block", dims=_BALLS),
    Variable("moved", "W2 distance of the tokens before and after the block", dims=_DIMS),
    Variable("moved_lower", "lower end of that distance", dims=_DIMS),
    Variable("moved_upper", "upper end of that distance", dims=_DIMS),
    Variable("displacement", "root mean square of what each token moves by", dims=_DIMS),
    Variable("arc_length", "sum of the W2 distances up to this block", dims=_DIMS),
    Variable("radius", "root mean square of the token norms after the block", dims=_DIMS),
    Variable("effective_rank", "exp of the entropy of the covariance's spectrum", dims=_DIMS),
    Variable("network", "local constant of the whole network, final norm included"),
    Variable("network_residual", "relative residual of the network's constant"),
    Variable("network_upper", "it is at most this, with probability 0.999"),
    Variable("network_converged", "whether it converged", dtype="bool"),
)
_PARAMETERS = (
    Variable("window", "window of the text"),
    Variable("layer", "block, from 0"),
    Variable("epsilon", "how far tokens may move, relative to their root mean square norm"),
)


def measure(
    window: int,
    *,
    model: str,
    model_revision: str,
    text: str,
    text_sha256: str,
    n_tokens: int,
    n_windows: int,
    causal: bool,
    dtype: str,
    depth: int,
    model_seed: int,
    rtol: float,
    epsilons: list[float],
) -> dict[str, Any]:
    """One window through the network; arrays (layer,) and (layer, epsilon)."""
    inputs.check_text(text, text_sha256)
    source = inputs.transformer(
        model, causal, seed=model_seed, dtype=dtype, depth=depth, revision=model_revision
    )
    ids = inputs.window_ids(source, text, n_tokens, n_windows)[window]
    return followed(source, ids, rtol, epsilons)


def followed(
    source: Transformer, ids: torch.Tensor, rtol: float, epsilons: Sequence[float] = ()
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
        through = local_lipschitz(Chain(blocks), start, rtol=rtol, strict=False)
        rows.append(
            _named("constant", local_lipschitz(block, mu, rtol=rtol, strict=False))
            | _named("through", through)
            | {"upper": _upper(block, mu)}
            | (ball.after(block, mu, through) if ball else {})
            | _moved(mu, image)
            | _shape(image)
        )
        mu = image
    whole = local_lipschitz(source.network(length=n), start, rtol=rtol, strict=False)
    found = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    del found["through_splitting"]
    return {
        **{name.replace("constant_splitting", "splitting"): x for name, x in found.items()},
        "product": np.cumprod(found["constant"]),
        "product_upper": np.cumprod(found["upper"]),
        "arc_length": np.cumsum(found["moved"]),
        **{k: v for k, v in _named("network", whole).items() if not k.endswith("splitting")},
    }


def _named(name: str, constant: LocalLipschitz) -> dict[str, Any]:
    assert constant.splitting is not None
    return {
        name: float(constant.value),
        f"{name}_residual": float(constant.residual),
        f"{name}_upper": float(constant.upper),
        f"{name}_converged": bool(constant.converged),
        f"{name}_splitting": float(constant.splitting),
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
        names = ("ball", "ball_999", "ball_radius")
        try:
            near = ball_bounds(block, mu, self.radii, splitting=False)
        except NotImplementedError:  # not proved for its kernel
            return {name: np.full(len(self.radii), np.nan) for name in names}
        self.near = near if self.near is None else near.after(self.near)
        self.radii = near.displacement
        measured = self.near.at_most(through.upper).upper
        found = (self.near.upper, measured, near.displacement.amax(-1))
        return {name: one.cpu().numpy() for name, one in zip(names, found, strict=True)}


def _upper(block: Any, mu: ParticleMeasure) -> float:
    try:
        return float(block.local_upper(mu))
    except NotImplementedError:  # not proved for its kernel
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


def plan(settings: Settings) -> dict[str, Any]:
    """The arguments of `meanfield.sweep` that make the experiment."""
    source = inputs.transformer(
        settings.model,
        settings.causal,
        seed=settings.seed,
        dtype=settings.dtype,
        depth=settings.depth,
    )
    inputs.check_fit(
        source,
        layers=[],
        n_tokens=[settings.n_tokens],
        text=settings.text,
        n_windows=settings.n_windows,
    )
    text_sha256 = inputs.text_hash(settings.text)
    coords = {"layer": np.arange(source.n_layers), "epsilon": np.array(settings.epsilons)}
    return {
        "fn": Task(measure, VARIABLES, _PARAMETERS, coords=coords),
        "grid": {"window": range(settings.n_windows)},
        "fixed": {
            "model": settings.model,
            "model_revision": source.fingerprint,
            "text": settings.text,
            "text_sha256": text_sha256,
            "n_tokens": settings.n_tokens,
            "n_windows": settings.n_windows,
            "causal": source.causal,
            "dtype": settings.dtype,
            "depth": settings.depth,
            "model_seed": settings.seed,
            "rtol": settings.rtol,
            "epsilons": list(settings.epsilons),
        },
        "seed": settings.seed,
        "attrs": {
            "experiment": "through-depth",
            "model": inputs.short_name(settings.model),
            "model_revision": source.fingerprint,
            "text": inputs.short_name(settings.text),
            "text_sha256": text_sha256,
            "n_tokens": settings.n_tokens,
        },
    }


def run(settings: Settings | None = None, **how: Any) -> xr.Dataset:
    """Run the sweep over windows.

    Args:
        settings: what to run over; the whole experiment if None.
        how: as in `meanfield.sweep`: store, executor, …
    """
    return sweep(**plan(settings or Settings()), **how)
