"""Is the R² of the general bound ever reached? A configuration whose constant grows as R².

[CAP24] Figure 3. Theorem 3.3 bounds the constant by a multiple of R²√n. The tokens
X = (R u, −R u, 0) reach R²: the query at 0 sees all three with weight 1/3, whatever A, and the
covariance of what it sees is (2/3)R² uuᵀ. When it moves, with its own key, its output moves by
V(1/3 + (2/3)R² uuᵀA), so that

    ‖Df(X)‖ ≥ (2/3) R² ‖V u‖ ‖Aᵀ u‖ − ‖V‖/3.

It stands last, so that the same holds masked. (The choice of tokens is ours.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, bounds
from meanfield.experiments.experiment import Experiment
from meanfield.experiments.settings import over, setting
from meanfield.figures.charts import Chart, Curve, Formula
from meanfield.lipschitz import LocalLipschitz, local_lipschitz
from meanfield.results import Variable

__all__ = ["EXPERIMENT", "Settings"]


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over."""

    masks: tuple[bool, ...] = over("causal", (False, True), "whether attention is masked")
    radii: tuple[float, ...] = over(
        "radius",
        tuple(round(2.0**k, 4) for k in range(-3, 8)),
        "radius R of the configuration",
        quick=(0.5, 2.0, 8.0, 32.0),
    )
    dim: int = setting(16, "dimension d", quick=4)
    seed: int = setting(0, "seed of A and V")


def layer(s: Settings) -> tuple[AttentionParameters, Tensor]:
    """A random head with ‖A‖ and ‖V‖ of order one, and the u that maximises ‖Aᵀu‖."""
    generator = torch.Generator().manual_seed(s.seed)
    A, V = torch.randn(2, s.dim, s.dim, generator=generator, dtype=torch.float64) / s.dim**0.5
    return AttentionParameters.from_bilinear(A, V), torch.linalg.svd(A)[0][:, 0]


def measure(s: Settings, radius: float, causal: bool) -> dict[str, Any]:
    """The constant at (R u, −R u, 0), between its bounds."""
    parameters, u = layer(s)
    mu = ParticleMeasure.from_sequence(radius * torch.stack([u, -u, 0 * u]))
    F = SelfAttention(parameters, causal=causal)
    constant = local_lipschitz(F, mu, geometry="euclidean", strict=False)
    return {
        **constant.values("constant"),
        "quadratic_lower": max(_lower(radius, _sizes(s)), 0.0),
        "general_bound": _general(radius, _sizes(s)),
    }


def _sizes(s: Settings) -> dict[str, float]:
    """What the bounds depend on besides R."""
    parameters, u = layer(s)
    A, V = parameters.A[0], parameters.V[0]
    reached = torch.linalg.vector_norm(V @ u) * torch.linalg.vector_norm(A.mT @ u)
    norms = {"norm_A": torch.linalg.matrix_norm(A, 2), "norm_V": torch.linalg.matrix_norm(V, 2)}
    return {name: float(value) for name, value in {**norms, "reached": reached}.items()}


def _lower(radius: Any, sizes: Mapping[str, float]) -> Any:
    return 2 / 3 * radius**2 * sizes["reached"] - sizes["norm_V"] / 3


def _general(radius: Any, sizes: Mapping[str, float]) -> Any:
    return bounds.theorem_3_3(sizes["norm_A"], sizes["norm_V"], radius, 3)


GROWTH = Chart(
    "Constant against R at (R u, −R u, 0), plain and masked, between the lower bound "
    "(2/3) R² ‖V u‖ ‖Aᵀ u‖ − ‖V‖/3 and Theorem 3.3.",
    "radius",
    [
        Curve("constant", "local constant, {kind}", "o", fillstyle="none", markersize=6),
        Formula(
            lambda R, at: np.where(_lower(R, at) > 0.04 / 3 * at["norm_V"], _lower(R, at), np.nan),
            r"lower bound, $2R^2\|Vu\|\|A^Tu\|/3-\|V\|/3$",
            once=True,
        ),
        Formula(_general, "upper bound, Thm 3.3", "k--", once=True, linewidth=1.4),
    ],
    "Constant at the three tokens $(Ru, -Ru, 0)$",
    by="causal",
    log="xy",
    xlabel="radius R",
    ylabel="local constant",
)

EXPERIMENT = Experiment(
    measure,
    Settings(),
    [
        *LocalLipschitz.columns("constant", words="local Lipschitz constant ‖Df(X)‖"),
        Variable("quadratic_lower", "lower bound (2/3) R² ‖V u‖ ‖Aᵀ u‖ − ‖V‖/3"),
        Variable("general_bound", "upper bound, Theorem 3.3"),
    ],
    attrs=_sizes,
    figures={"growth": GROWTH},
)
