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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr

from meanfield import bounds
from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.experiments.experiment import Experiment
from meanfield.experiments.settings import setting
from meanfield.figures.canvas import figure, kind, readable_logs
from meanfield.figures.curves import curve
from meanfield.figures.selection import levels, select
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
    A, V = parameters.A[0], parameters.V[0]
    u = torch.linalg.svd(A)[0][:, 0]
    X = torch.stack([radius * u, -radius * u, torch.zeros_like(u)])
    F = SelfAttention(parameters, causal=causal)
    mu = ParticleMeasure.from_sequence(X)
    constant = local_lipschitz(F, mu, geometry="euclidean", strict=False)
    norm_A, norm_V = (float(torch.linalg.matrix_norm(matrix, 2)) for matrix in (A, V))
    reached = torch.linalg.vector_norm(V @ u) * torch.linalg.vector_norm(A.mT @ u)
    return {
        **constant.values("constant"),
        "quadratic_lower": max(2 / 3 * radius**2 * float(reached) - norm_V / 3, 0.0),
        "general_bound": bounds.theorem_3_3(norm_A, norm_V, radius, 3),
    }


@figure("constant", "constant_converged", "quadratic_lower", "general_bound")
def growth(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Constant against R at (R u, −R u, 0), between R² from below and Theorem 3.3."""
    for causal, colour, marker in ((False, "tab:blue", "o"), (True, "tab:orange", "x")):
        if causal in levels(ds, "causal"):
            rows, label = select(ds, causal=causal), f"local constant, {kind(causal)}"
            curve(ax, rows, "radius", "constant", marker, color=colour, label=label)
    lower = rows.isel(case=np.flatnonzero(rows.quadratic_lower.values > 0))
    thin: Any = {"linewidth": 0.9}
    curve(ax, lower, "radius", "quadratic_lower", "k:", label=r"lower bound, $R^2$", **thin)
    curve(ax, rows, "radius", "general_bound", "k--", label="upper bound, Thm 3.3")
    ax.set(xscale="log", yscale="log", xlabel="radius R", ylabel="local constant")
    ax.set_title("Three tokens $(Ru, -Ru, 0)$ grow as $R^2$")
    readable_logs(ax)
    return ax


EXPERIMENT = Experiment(
    measure,
    Settings(),
    grid=lambda s: {"causal": s.masks, "radius": s.radii},
    variables=_VARIABLES,
    parameters=_PARAMETERS,
    derived=lambda s: {"layer_seed": s.seed},
    figures={"growth": growth},
)
