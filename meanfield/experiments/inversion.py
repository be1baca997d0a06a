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
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.linalg import matrix_norm

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, bounds, local_lipschitz
from meanfield.attention import kernels
from meanfield.checks import choice, count, number
from meanfield.experiments.experiment import Experiment
from meanfield.experiments.settings import over, setting
from meanfield.figures.charts import Chart, Curve, Formula
from meanfield.figures.selection import select
from meanfield.layers import Residual, contractive, invert
from meanfield.results import Variable

__all__ = ["EXPERIMENT", "Settings"]

_KERNELS = {"l2": kernels.l2, "dot product": kernels.dot_product}
_STEPS = 60
_RTOL = 1e-12


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over."""

    kernels: tuple[str, ...] = over("kernel", tuple(_KERNELS), "score")
    spreads: tuple[float, ...] = over("spread", (1.0, 30.0), "standard deviation of the tokens")
    factors: tuple[float, ...] = over("factor", (0.5, 0.7, 0.9), "contraction factor c")
    n_tokens: int = setting(64, "number of tokens n", quick=16)
    dim: int = setting(16, "dimension d", quick=4)
    n_heads: int = setting(4, "number of heads H", quick=1)
    batch: int = setting(16, "inputs per case", quick=4)
    seed: int = setting(0, "seed of the matrices and the inputs")


def resolve(s: Settings) -> Settings:
    """The same settings.

    Raises:
        ValueError: heads that do not divide the dimension, no token but the one at the origin, no
            spread, a factor that is not between 0 and 1.
    """
    count(s.n_tokens, "n_tokens", least=2)
    if s.n_heads < 1 or s.dim % s.n_heads:
        raise ValueError(f"n_heads: expected a divisor of dim = {s.dim}, got {s.n_heads}")
    for spread in s.spreads:
        number(spread, "spreads", above=0)
    for factor in s.factors:
        number(factor, "factors", above=0, below=1)
    return s


def layer(s: Settings) -> AttentionParameters:
    """A tied L2 layer with normal matrices, in the paper's form."""
    generator = torch.Generator().manual_seed(s.seed)
    k = s.dim // s.n_heads
    draws = torch.randn(2, s.n_heads, s.dim, k, generator=generator, dtype=torch.float64)
    W, V = draws / s.dim**0.5
    output = torch.randn(s.dim, s.dim, generator=generator, dtype=torch.float64) / s.dim**0.5
    return AttentionParameters.tied_l2(W.mT, V.mT, output.unflatten(0, (s.n_heads, k)).mT)


def tokens(s: Settings, spread: float) -> Tensor:
    """One token at the origin and n − 1 normal ones, (batch, n, d)."""
    generator = torch.Generator().manual_seed(s.seed + 1)
    shape = (s.batch, s.n_tokens, s.dim)
    X = spread * torch.randn(shape, generator=generator, dtype=torch.float64)
    X[:, 0] = 0.0
    return X


def measure(s: Settings, kernel: str, spread: float, factor: float) -> dict[str, Any]:
    """Errors against steps, the certificate, and the steps that each constant asks for."""
    parameters = layer(s)
    F = SelfAttention(parameters, kernel=_KERNELS[choice(kernel, "kernel", _KERNELS)])
    constant = bounds.l2_attention_2(parameters, s.n_tokens)
    G = contractive(F, factor, constant=constant)
    mu = ParticleMeasure(tokens(s, spread))
    nu = G(mu)
    found = invert(G, nu, rtol=_RTOL, max_steps=400, strict=False)
    sizes = matrix_norm(mu.points)
    here = local_lipschitz(F, mu, geometry="euclidean", rtol=1e-2, strict=False)
    local = float(here.value.max())
    first = float((matrix_norm(G(nu).points - nu.points) / sizes).max())
    return {
        "error": _errors(G, mu, nu),
        "certified": float((found.error * s.n_tokens**0.5 / sizes).max()),
        "true_error": float((matrix_norm(found.measure.points - mu.points) / sizes).max()),
        "steepness": float(found.steepness.max()),
        "constant": constant,
        "measured": local,
        "measured_converged": bool(here.converged.all()),
        "steps_bound": _predicted(first, factor),
        "steps_measured": _predicted(first, factor * local / constant),
        "steps_taken": found.n_steps if bool(found.converged.all()) else math.nan,
    }


def _errors(G: Residual, mu: ParticleMeasure, nu: ParticleMeasure) -> list[float]:
    """Largest error over the batch at each step of x ← y − c f(x)/L, from x = y."""
    x, found = nu, []
    for _ in range(_STEPS + 1):
        found.append(float((matrix_norm(x.points - mu.points) / matrix_norm(mu.points)).max()))
        x = nu.replace(nu.points - G.scale * G.map(x).points)
    return found


def _predicted(first: float, factor: float) -> float:
    """k with factorᵏ · first/(1 − factor) = 1e-12; NaN if the factor is no contraction."""
    if not 0 < factor < 1:
        return math.nan
    return math.ceil(math.log(_RTOL * (1 - factor) / first) / math.log(factor))


def _of_kernel(kernel: str, fmt: str) -> Curve:
    """The error of a kernel, if it is there, against the step, as far as it is finite."""

    def rows(ds: Any) -> Any:
        cases = ds.isel(case=np.flatnonzero(ds.kernel == kernel))
        return cases.assign(error=cases.error.where(np.isfinite(cases.error)))

    return Curve("error", f"{kernel.replace('l2', 'L2')}, c = {{factor}}", fmt, rows=rows)


ERRORS = Chart(
    "The error of the preimage against the number of fixed-point steps, of the tokens that are "
    "spread most.",
    "step",
    [
        _of_kernel("l2", "-"),
        _of_kernel("dot product", "-."),
        Formula(lambda k, at: at["factor"] ** k, fmt=":", key=r"$c^k$"),
    ],
    lambda ds: f"Inverting $x + c\\,f(x)/L$, tokens of spread {float(ds.spread.max()):.15g}",
    by="factor",
    rows=lambda ds: select(ds, spread=float(ds.spread.max())),
    log="y",
    xlabel="step k",
    ylabel="largest relative error of the preimage",
)

EXPERIMENT = Experiment(
    measure,
    Settings(),
    [
        Variable("error", "largest relative error of the preimage after k steps", dims=("step",)),
        Variable("certified", "largest certified relative error (infinite where refuted)"),
        Variable("true_error", "largest true relative error of the certified preimage"),
        Variable("steepness", "largest steepness seen, over the constant used"),
        Variable("constant", "constant L that the layer is scaled by"),
        Variable("measured", "largest local Euclidean constant at the inputs"),
        Variable(
            "measured_converged", "whether the constants at the inputs converged", dtype="bool"
        ),
        Variable("steps_bound", "steps to 1e-12 that c predicts"),
        Variable("steps_measured", "steps to 1e-12 that the measured constant predicts"),
        Variable("steps_taken", "steps to 1e-12 by the certified residual (NaN if never)"),
    ],
    resolve=resolve,
    coords={Variable("step", "steps k"): range(_STEPS + 1)},
    figures={"error": ERRORS},
)
