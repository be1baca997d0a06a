"""Is the R² of the general bound ever reached? A configuration whose constant grows as R².

[CAP24] Figure 3. Theorem 3.3 bounds the constant by a multiple of R²√n. The tokens
X = (R u, −R u, 0) reach R²: the query at 0 sees all three with weight 1/3, whatever A, and the
covariance of what it sees is (2/3)R² uuᵀ. When it moves, with its own key, its output moves by
V(1/3 + (2/3)R² uuᵀA), so that

    ‖Df(X)‖ ≥ (2/3) R² ‖V u‖ ‖Aᵀ u‖ − ‖V‖/3.

It stands last, so that the same holds masked. (The choice of tokens is ours.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import xarray as xr

from meanfield import bounds
from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.experiments.experiment import Experiment
from meanfield.experiments.settings import setting
from meanfield.figures.canvas import figure, kind
from meanfield.figures.curves import curve, formula
from meanfield.figures.selection import attribute, by_mask
from meanfield.lipschitz import LocalLipschitz, local_lipschitz
from meanfield.measures import ParticleMeasure
from meanfield.results import Variable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["EXPERIMENT", "Settings"]


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over."""

    dim: int = setting(16, "dimension d", quick=4)
    radii: tuple[float, ...] = setting(
        tuple(round(2.0**k, 4) for k in range(-3, 8)), "radii R", quick=(0.5, 2.0, 8.0, 32.0)
    )
    masks: tuple[bool, ...] = setting((False, True), "plain (False), masked (True) or both")
    seed: int = setting(0, "seed of A and V")


_VARIABLES = (
    *LocalLipschitz.columns("constant", words="local Lipschitz constant ‖Df(X)‖"),
    Variable("quadratic_lower", "lower bound (2/3) R² ‖V u‖ ‖Aᵀ u‖ − ‖V‖/3"),
    Variable("general_bound", "upper bound, Theorem 3.3"),
)
_PARAMETERS = (
    Variable("radius", "radius R of the configuration"),
    Variable("causal", "whether attention is masked"),
)


def layer(dim: int, seed: int) -> AttentionParameters:
    """A random head with ‖A‖ and ‖V‖ of order one."""
    generator = torch.Generator().manual_seed(seed)
    A, V = torch.randn(2, dim, dim, generator=generator, dtype=torch.float64) / math.sqrt(dim)
    return AttentionParameters.from_bilinear(A, V)


def measure(radius: float, causal: bool, *, dim: int, layer_seed: int) -> dict[str, Any]:
    """The constant at (R u, −R u, 0), between its bounds; u maximises ‖Aᵀu‖."""
    parameters = layer(dim, layer_seed)
    u = _direction(parameters)
    X = torch.stack([radius * u, -radius * u, torch.zeros_like(u)])
    F = SelfAttention(parameters, causal=causal)
    mu = ParticleMeasure.from_sequence(X)
    constant = local_lipschitz(F, mu, geometry="euclidean", strict=False)
    sizes = _sizes(parameters)
    return {
        **constant.values("constant"),
        "quadratic_lower": max(_lower(radius, sizes), 0.0),
        "general_bound": _general(radius, sizes),
    }


def _direction(parameters: AttentionParameters) -> torch.Tensor:
    return torch.linalg.svd(parameters.A[0])[0][:, 0]


def _sizes(parameters: AttentionParameters) -> dict[str, float]:
    """What the bounds depend on besides R: ‖A‖, ‖V‖ and ‖V u‖ ‖Aᵀ u‖."""
    A, V, u = parameters.A[0], parameters.V[0], _direction(parameters)
    norm_A, norm_V = (float(torch.linalg.matrix_norm(matrix, 2)) for matrix in (A, V))
    reached = torch.linalg.vector_norm(V @ u) * torch.linalg.vector_norm(A.mT @ u)
    return {"norm_A": norm_A, "norm_V": norm_V, "reached": float(reached)}


def _lower(radius: Any, sizes: Mapping[str, float]) -> Any:
    return 2 / 3 * radius**2 * sizes["reached"] - sizes["norm_V"] / 3


def _general(radius: Any, sizes: Mapping[str, float]) -> Any:
    return bounds.theorem_3_3(sizes["norm_A"], sizes["norm_V"], radius, 3)


@figure("constant", "constant_converged")
def growth(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Constant against R at (R u, −R u, 0), between R² from below and Theorem 3.3."""
    ax.set(xscale="log", yscale="log", xlabel="radius R", ylabel="local constant")
    for colour, causal, rows in by_mask(ds):
        label = f"local constant, {kind(causal)}"
        curve(ax, rows, "radius", "constant", "x" if causal else "o", color=colour, label=label)
    # Below its zero it says nothing.
    zero = (attribute(ds, "norm_V") / (2 * attribute(ds, "reached"))) ** 0.5
    above = [max(float(ds.radius.min()), 1.02 * zero), float(ds.radius.max())]
    if above[0] < above[1]:
        formula(ax, partial(_lower, sizes=ds.attrs), above, label=r"lower bound, $R^2$")
    upper: Any = {"linewidth": 1.4, "label": "upper bound, Thm 3.3"}
    formula(ax, partial(_general, sizes=ds.attrs), ds.radius, "k--", **upper)
    ax.set_title("Constant at the three tokens $(Ru, -Ru, 0)$")
    return ax


EXPERIMENT = Experiment(
    measure,
    Settings(),
    grid=lambda s: {"causal": s.masks, "radius": s.radii},
    variables=_VARIABLES,
    parameters=_PARAMETERS,
    derived=lambda s: {"layer_seed": s.seed},
    attrs=lambda s: _sizes(layer(s.dim, s.seed)),
    figures={"growth": growth},
)
