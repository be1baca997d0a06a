"""Can residual attention be inverted by its fixed point? L2 attention always, dot products not.

[KPM21] Section 5.2. The layer is x + c f(x)/L with the Euclidean constant L of tied L2 attention
(`bounds.l2_attention_2`); dot-product attention of the same matrices gets the same L, which is no
constant of it. The tokens are one at the origin and the others normal of standard deviation
`spread`: where it is large, the query at the origin sees all the others alike, and its derivative
is their covariance. Shown is the largest error over a batch against the number of iterations,
beside what `layers.invert` certifies, and how many iterations the bound, the measured constant at
the input and the residual itself ask for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from meanfield import bounds
from meanfield.attention import AttentionParameters, SelfAttention, kernels
from meanfield.experiments.experiment import Experiment
from meanfield.experiments.settings import setting
from meanfield.figures.canvas import figure
from meanfield.figures.curves import curve, formula
from meanfield.figures.selection import by_level, select
from meanfield.layers import Residual, contractive, invert
from meanfield.lipschitz import local_lipschitz
from meanfield.measures import ParticleMeasure
from meanfield.results import Variable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["EXPERIMENT", "Settings"]


_KERNELS = {"l2": kernels.l2, "dot product": kernels.dot_product}
_STEPS = 60
_RTOL = 1e-12


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over."""

    factors: tuple[float, ...] = setting((0.5, 0.7, 0.9), "contraction factors c")
    spreads: tuple[float, ...] = setting((1.0, 30.0), "standard deviations of the tokens")
    n_tokens: int = setting(64, "number of tokens n", quick=16)
    dim: int = setting(16, "dimension d", quick=4)
    n_heads: int = setting(4, "number of heads H", quick=1)
    batch: int = setting(16, "inputs per case", quick=4)
    seed: int = setting(0, "seed of the matrices and the inputs")


_VARIABLES = (
    Variable("error", "largest relative error of the preimage after k steps", dims=("step",)),
    Variable("certified", "largest certified relative error (infinite where refuted)"),
    Variable("true_error", "largest relative error of that answer"),
    Variable("steepness", "largest steepness seen, over the constant used"),
    Variable("constant", "constant L that the layer is scaled by"),
    Variable("measured", "largest local Euclidean constant at the inputs"),
    Variable("steps_bound", "steps to 1e-12 that c predicts"),
    Variable("steps_measured", "steps to 1e-12 that the measured constant predicts"),
    Variable("steps_taken", "steps to 1e-12 by the certified residual (NaN if never)"),
)
_PARAMETERS = (
    Variable("kernel", "score"),
    Variable("spread", "standard deviation of the tokens"),
    Variable("factor", "contraction factor c"),
    Variable("step", "steps k"),
)


def layer(dim: int, n_heads: int, seed: int) -> AttentionParameters:
    """A tied L2 layer with normal matrices, in the paper's form."""
    generator = torch.Generator().manual_seed(seed)
    k = dim // n_heads
    W, V = torch.randn(2, n_heads, dim, k, generator=generator, dtype=torch.float64) / dim**0.5
    output = torch.randn(dim, dim, generator=generator, dtype=torch.float64) / dim**0.5
    return AttentionParameters.tied_l2(W.mT, V.mT, output.unflatten(0, (n_heads, k)).mT)


def tokens(spread: float, n: int, dim: int, batch: int, seed: int) -> Tensor:
    """One token at the origin and n − 1 normal ones, (batch, n, d)."""
    generator = torch.Generator().manual_seed(seed + 1)
    X = spread * torch.randn(batch, n, dim, generator=generator, dtype=torch.float64)
    X[:, 0] = 0.0
    return X


def measure(
    kernel: str,
    spread: float,
    factor: float,
    *,
    n_tokens: int,
    dim: int,
    n_heads: int,
    batch: int,
    layer_seed: int,
) -> dict[str, Any]:
    """Errors against steps, the certificate, and the steps that each constant asks for."""
    parameters = layer(dim, n_heads, layer_seed)
    F = SelfAttention(parameters, kernel=_KERNELS[kernel])
    constant = bounds.l2_attention_2(parameters, n_tokens)
    G = contractive(F, factor, constant=constant)
    mu = ParticleMeasure(tokens(spread, n_tokens, dim, batch, layer_seed))
    nu = G(mu)
    found = invert(G, nu, rtol=_RTOL, max_steps=400, strict=False)
    sizes = _sizes(mu.points)
    here = local_lipschitz(F, mu, geometry="euclidean", rtol=1e-2, strict=False)
    local = float(here.value.max())
    first = float((_sizes(G(nu).points - nu.points) / sizes).max())
    return {
        "error": _errors(G, mu, nu),
        "certified": float((found.error * n_tokens**0.5 / sizes).max()),
        "true_error": float((_sizes(found.measure.points - mu.points) / sizes).max()),
        "steepness": float(found.steepness.max()),
        "constant": constant,
        "measured": local,
        "steps_bound": _predicted(first, factor),
        "steps_measured": _predicted(first, factor * local / constant),
        "steps_taken": found.n_steps if bool(found.converged.all()) else math.nan,
    }


def _errors(G: Residual, mu: ParticleMeasure, nu: ParticleMeasure) -> list[float]:
    """Largest error over the batch at each step of x ← y − c f(x)/L, from x = y."""
    x, found = nu, []
    for _ in range(_STEPS + 1):
        found.append(float((_sizes(x.points - mu.points) / _sizes(mu.points)).max()))
        x = nu.replace(nu.points - G.scale * G.map(x).points)
    return found


def _sizes(points: Tensor) -> Tensor:
    return torch.linalg.vector_norm(points, dim=(-2, -1))


def _predicted(first: float, factor: float) -> float:
    """k with factorᵏ · first/(1 − factor) = 1e-12; NaN if the factor is no contraction."""
    if not 0 < factor < 1:
        return math.nan
    return math.ceil(math.log(_RTOL * (1 - factor) / first) / math.log(factor))


@figure("error")
def errors(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """The error of the preimage against the number of fixed-point steps.

    Of the tokens that are spread most.
    """
    spread = float(ds.spread.max())
    ax.set_yscale("log")
    for colour, factor, rows in by_level(select(ds, spread=spread), "factor"):
        for kernel, line in (("l2", "-"), ("dot product", "-.")):
            error = select(rows, kernel=kernel).error.isel(case=0)
            label = f"{kernel}, c = {factor:g}"
            ax.plot(ds.step, error.where(np.isfinite(error)), line, color=colour, label=label)
        formula(ax, partial(np.power, factor), ds.step, ":", color=colour)
    ax.plot([], [], "k:", linewidth=0.9, label=r"$c^k$")
    ax.set(xlabel="step k", ylabel="largest relative error of the preimage")
    ax.set_title(f"Inverting $x + c\\,f(x)/L$, tokens of spread {spread:g}")
    return ax


@figure("steps_bound", "steps_measured", "steps_taken")
def steps(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Steps to 1e-12: by the bound, by the constant measured at the input, and as certified."""
    names = {
        # No line: it depends on the first step too, and is known at these c only.
        "steps_bound": ("D", "predicted by c"),
        "steps_measured": ("o-", "predicted by the measured constant"),
        "steps_taken": ("x", "taken until the residual certifies it"),
    }
    for colour, spread, rows in by_level(select(ds, kernel="l2"), "spread"):
        for name, (mark, _) in names.items():
            style: Any = {"color": colour, "fillstyle": "none"}
            style |= {"label": f"tokens of spread {spread:g}"} if mark == "o-" else {}
            curve(ax, rows, "factor", name, mark, **style)
    for mark, words in names.values():
        ax.plot([], [], f"k{mark}", fillstyle="none", label=words)
    ax.set(yscale="log", xlabel="contraction factor c", ylabel="steps to a relative 1e-12")
    ax.set_title("L2 attention: steps that each constant asks for")
    return ax


EXPERIMENT = Experiment(
    measure,
    Settings(),
    grid=lambda s: {"kernel": tuple(_KERNELS), "spread": s.spreads, "factor": s.factors},
    variables=_VARIABLES,
    parameters=_PARAMETERS,
    coords=lambda s: {"step": range(_STEPS + 1)},
    derived=lambda s: {"layer_seed": s.seed},
    figures={"error": errors, "steps": steps},
)
