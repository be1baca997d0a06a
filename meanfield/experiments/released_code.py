"""What do the scripts published with [CAP24] compute, beside the norm?

Their power iteration takes the value instead of the tangent out of the forward-mode pair and
settles on √‖Df(X)ᵀ f(X)‖. Here both quantities are taken at the same inputs of a random GPT-2
layer: the adversarial configuration of a head, the one of the rows that the scripts take for the
head (the fused weight has heads in blocks of columns), and token clouds of random ids.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xarray as xr

from meanfield import sampling
from meanfield.experiments import inputs
from meanfield.experiments.fitting import fit_laws, fittable
from meanfield.lipschitz import local_lipschitz
from meanfield.measures import ParticleMeasure
from meanfield.pretrained import Transformer
from meanfield.results import Variable
from meanfield.sweeps import Task, sweep

__all__ = ["FIGURES", "INPUTS", "QUICK", "Settings", "finish", "measure", "plan", "run"]

# File name of each figure -> function of `meanfield.figures` and its arguments.
FIGURES: dict[str, tuple[str, dict[str, Any]]] = {
    "head": ("plot_released", {"kind": "head"}),
    "rows": ("plot_released", {"kind": "rows"}),
    "tokens": ("plot_released", {"kind": "tokens"}),
}
INPUTS = ("head", "rows", "tokens")


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over; every field can be set from the command line.

    Attributes:
        model: a GPT-2, as in `meanfield.pretrained.load`.
        seed: of random weights; 320 is the scripts'.
        layer: attention layer, from 0.
        head: whose adversarial configuration.
        radius: R of the adversarial configuration.
        n_tokens: lengths n.
        inputs: "head" and "rows" (adversarial, for the head and for the rows that the scripts
            take for it), "tokens" (what random ids become in the model).
        depth: number of layers of a random model; 0 for the architecture's own.
        dtype: "float32" or "float64".
    """

    model: str = "random:gpt2"
    seed: int = 320
    layer: int = 6
    head: int = 0
    radius: float = 100.0
    n_tokens: tuple[int, ...] = tuple(range(2, 98, 5))
    inputs: tuple[str, ...] = INPUTS
    depth: int = 0
    dtype: str = "float64"


QUICK = Settings(n_tokens=(2, 7, 17, 32), layer=1, depth=2)

_VARIABLES = (
    Variable("constant", "local Lipschitz constant ‖Df(X)‖"),
    Variable("constant_residual", "relative residual of the constant"),
    Variable("constant_upper", "the constant is at most this, with probability 0.999"),
    Variable("constant_converged", "whether the constant converged", dtype="bool"),
    Variable("released", "√‖Df(X)ᵀ f(X)‖, as the published scripts"),
    Variable("radius", "root mean square of the token norms"),
)
_PARAMETERS = (
    Variable("input_kind", "which inputs", dtype="str"),
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
        mu = _random_tokens(source, n_tokens, layer)
    else:
        slicing = _head_matrix if input_kind == "head" else _row_matrix
        mu = sampling.adversarial(slicing(source, layer, head), input_radius, n_tokens)
    constant = local_lipschitz(F, mu, geometry="euclidean", strict=False)
    return {
        "constant": float(constant.value),
        "constant_residual": float(constant.residual),
        "constant_upper": float(constant.upper),
        "constant_converged": bool(constant.converged),
        "released": float(inputs.released_quantity(F, mu)),
        "radius": float(inputs.token_radii(mu.points)[0]),
    }


def _random_tokens(source: Transformer, n_tokens: int, layer: int) -> ParticleMeasure:
    points = inputs.clouds(source, inputs.RANDOM_TEXT, n_tokens, 1, layers=[layer])[0, 0]
    return ParticleMeasure.from_sequence(points)


@functools.lru_cache(maxsize=4)
def _head_matrix(source: Transformer, layer: int, head: int) -> torch.Tensor:
    """A of the head."""
    return source.parameters(layer).head(head).A[0]


@functools.lru_cache(maxsize=4)
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


def plan(settings: Settings) -> dict[str, Any]:
    """The arguments of `meanfield.sweep` that make the experiment."""
    source = inputs.bilinear_transformer(
        settings.model, seed=settings.seed, depth=settings.depth, dtype=settings.dtype
    )
    inputs.check_fit(source, layers=[settings.layer], n_tokens=settings.n_tokens)
    return {
        "fn": Task(measure, _VARIABLES, _PARAMETERS),
        "grid": {"input_kind": settings.inputs, "n_tokens": settings.n_tokens},
        "fixed": {
            "model": settings.model,
            "model_revision": source.fingerprint,
            "model_seed": settings.seed,
            "layer": settings.layer,
            "head": settings.head,
            "input_radius": settings.radius,
            "depth": settings.depth,
            "dtype": settings.dtype,
        },
        "seed": settings.seed,
        "attrs": {
            "experiment": "released-code",
            "model": inputs.short_name(settings.model),
            "layer": settings.layer,
            "head": settings.head,
        },
    }


def finish(ds: xr.Dataset) -> xr.Dataset:
    """The finished sweep with its power laws."""
    curves = []
    for kind in dict.fromkeys(ds.input_kind.values):
        rows = ds.isel(case=np.flatnonzero(ds.input_kind.values == kind))
        for quantity in ("constant", "released"):
            labels = {"input_kind": str(kind), "quantity": quantity}
            y, flag = rows[quantity].values, f"{quantity}_converged"
            good = rows[flag].values if flag in rows else np.isfinite(y)
            if fittable(y, good):
                curves.append((labels, rows.n_tokens.values, y, None, good))
    return ds.merge(fit_laws(curves)) if len(np.unique(ds.n_tokens)) > 1 else ds


def run(settings: Settings | None = None, **how: Any) -> xr.Dataset:
    """Run the sweep and fit the power laws.

    Args:
        settings: what to run over; the whole experiment if None.
        how: as in `meanfield.sweep`: store, executor, …
    """
    return finish(sweep(**plan(settings or Settings()), **how))
