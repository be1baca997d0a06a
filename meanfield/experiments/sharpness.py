"""How far are the bounds from what exists?

For A = −I and V = I on balls of growing radius: the largest local constant that a search over
atoms and weights finds, plain and masked, beside what two Diracs reach by their formula, this
package's upper bound and [CAP24] Theorem 3.5; the same for n uniform tokens, beside Theorem 3.3;
and for the orders p = 1, 2, ∞ of the distance, at the measures that reach them.

The ascents are also evidence for a conjecture: for A = −γI and ‖A‖R² ≳ 1 no measure exceeds two
Diracs in W₂. `extremality` is the found constant over the best one of two Diracs, `ascents` how
many starts stand behind it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from meanfield import bounds, sampling
from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.experiments.ascent import climb
from meanfield.lipschitz import LocalLipschitz, local_lipschitz, worst_case
from meanfield.measures import ParticleMeasure
from meanfield.results import Variable
from meanfield.sweeps import Task, sweep

__all__ = ["FIGURES", "QUICK", "Settings", "measure", "order_norm", "plan", "run"]

FIGURES: dict[str, tuple[str, dict[str, Any]]] = {
    "gap": ("plot_sharpness", {}),
    "gap-tokens": ("plot_token_sharpness", {}),
}
ORDERS = (1.0, 2.0, math.inf)

_ANGLES = 720  # directions of the plane over which the norms of orders 1 and ∞ are maximised
_WEIGHTS = 2401  # ratios of weights of the two Diracs, about the best one for large radii


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over.

    Attributes:
        radii: R, so that c = R².
        n_atoms: numbers of atoms of the searches, and of uniform tokens.
        dims: dimensions d.
        masks: plain (False), masked (True) or both.
        starts: random starts of each search, besides the structured ones.
        steps: steps of ascent.
        scales: positions of the masked family, with `growth` the ratio of their masses.
        growth: see `sampling.interleaved_diracs`.
        seed: of the starts.
    """

    radii: tuple[float, ...] = (0.1, 0.5, 0.7, 1.0, 1.4, 2.0, 2.5, 3.0, 3.5)
    n_atoms: tuple[int, ...] = (2, 4, 12, 40)
    dims: tuple[int, ...] = (1, 2)
    masks: tuple[bool, ...] = (False, True)
    starts: int = 24
    steps: int = 100
    scales: int = 200
    growth: float = 1.3
    seed: int = 0


QUICK = Settings(
    radii=(0.1, 1.0, 2.0, 3.0),
    n_atoms=(2, 6),
    dims=(1,),
    starts=8,
    steps=40,
    scales=30,
    growth=1.6,
)

_ORDER: dict[str, Any] = {"dims": ("order",)}
VARIABLES = (
    Variable("found", "largest local constant found"),
    Variable("found_residual", "its relative residual"),
    Variable("found_converged", "whether it converged", dtype="bool"),
    Variable("two_dirac_lower", "what two Diracs reach at least (masked: interleaved)"),
    Variable("upper", "upper bound, this package"),
    Variable("theorem_3_5", "upper bound, Theorem 3.5 (NaN where masked)"),
    Variable("extremality", "largest constant found over the best of two Diracs (plain)"),
    Variable("ascents", "starts of the search", dtype="int64"),
    Variable("tokens_found", "largest Euclidean constant found on n tokens"),
    Variable("tokens_converged", "whether it converged", dtype="bool"),
    Variable("tokens_upper", "upper bound for n tokens, this package"),
    Variable("theorem_3_3", "upper bound for n tokens, Theorem 3.3"),
    Variable("order_found", "constant of order p at the measure that is to reach it", **_ORDER),
    Variable("order_upper", "upper bound of order p, this package", **_ORDER),
)
PARAMETERS = (
    Variable("radius", "radius R of the ball", symbol="R"),
    Variable("n_atoms", "number of atoms or tokens n", dtype="int64"),
    Variable("dim", "dimension d", dtype="int64", symbol="d"),
    Variable("causal", "masked attention", dtype="bool"),
    Variable("order", "order p of the distance", symbol="p"),
)


def measure(
    radius: float,
    n_atoms: int,
    dim: int,
    causal: bool,
    *,
    starts: int,
    steps: int,
    scales: int,
    growth: float,
    generator: torch.Generator,
) -> dict[str, Any]:
    """Everything that is found and bounded in one configuration."""
    eye = torch.eye(dim, dtype=torch.float64)
    F = SelfAttention(AttentionParameters.from_bilinear(-eye, eye), causal=causal)
    _, found = worst_case(
        F, radius, n_atoms=n_atoms, starts=starts, steps=steps, generator=generator
    )
    pairs = _two_diracs(radius, eye[0])
    upper = bounds.masked_mean_field if causal else bounds.mean_field
    lower = bounds.masked_two_dirac_lower if causal else bounds.two_dirac_lower
    extremality = math.nan
    if causal:
        found = _larger(found, _interleaved(F, radius, eye[0], scales, growth))
    else:
        best = float(local_lipschitz(F, pairs).value.max())
        extremality = float(found.value) / best
    return {
        "found": float(found.value),
        "found_residual": float(found.residual),
        "found_converged": bool(found.converged),
        "two_dirac_lower": lower(1.0, radius),
        "upper": upper(1.0, 1.0, radius),
        "theorem_3_5": math.nan if causal else bounds.theorem_3_5(1.0, 1.0, radius),
        "extremality": extremality,
        "ascents": starts,
        **_tokens(F, radius, n_atoms, steps, generator),
        "order_found": [_order_found(F, radius, p) for p in ORDERS],
        "order_upper": upper(1.0, 1.0, radius, p=np.array(ORDERS)),
    }


def _two_diracs(radius: float, u: Tensor) -> ParticleMeasure:
    """A batch over ratios of weights."""
    best = bounds.two_dirac_best_log_ratio(1.0, radius)
    ratios = best + torch.linspace(-8.0, 8.0, _WEIGHTS, dtype=torch.float64)
    return sampling.two_diracs(radius, ratios, u)


def _interleaved(
    F: SelfAttention, radius: float, u: Tensor, scales: int, growth: float
) -> LocalLipschitz:
    ratio = bounds.two_dirac_best_log_ratio(1.0, radius)
    mu = sampling.interleaved_diracs(radius, ratio, u, scales=scales, growth=growth)
    return local_lipschitz(F, mu, strict=False)


def _larger(one: LocalLipschitz, other: LocalLipschitz) -> LocalLipschitz:
    return one if float(one.value) >= float(other.value) else other


def _tokens(
    F: SelfAttention, radius: float, n: int, steps: int, generator: torch.Generator
) -> dict[str, Any]:
    """Ascents at uniform weights, the best of several starts.

    From the sequence of Proposition 3.4, from a crowd at both ends with one token between them,
    and from random ones.
    """
    u, d = torch.eye(F.parameters.dim, dtype=torch.float64)[0], F.parameters.dim
    ends = torch.where(torch.arange(n) % 2 == 0, 1.0, -1.0).to(torch.float64)
    ends[-1] = 0.0 if n > 2 else -1.0
    random = sampling.sphere(n, d, radius=radius, batch_shape=(2,), generator=generator)
    sequences = [
        sampling.adversarial(F.parameters.A[0], radius, n),
        *map(ParticleMeasure.from_sequence, (radius * ends[:, None] * u, *random)),
    ]
    found = [climb(F, tokens, radius, steps=min(steps, 40))[1] for tokens in sequences]
    best = max(found, key=lambda one: float(one.value))
    return {
        "tokens_found": float(best.value),
        "tokens_converged": bool(best.converged),
        "tokens_upper": bounds.tokens(1.0, 1.0, radius, n, causal=F.causal),
        "theorem_3_3": bounds.theorem_3_3(1.0, 1.0, radius, n),
    }


def _order_found(F: SelfAttention, radius: float, p: float) -> float:
    """The norm of order p at the measure that reaches the bound, or comes near; plain only."""
    if F.causal:
        return math.nan
    d = F.parameters.dim
    if p == math.inf and d > 1:
        # Two keys of equal mass, and a light query across: reached exactly.
        eye = torch.eye(d, dtype=torch.float64)
        points = radius * torch.stack([eye[0], -eye[0], eye[1]])
        logs = torch.tensor([0.0, 0.0, -30.0], dtype=torch.float64).log_softmax(-1)
        return order_norm(F, ParticleMeasure(points, log_weights=logs), p)
    ratio = bounds.two_dirac_best_log_ratio(1.0, radius, p=p)
    # p = 1: the supremum is a limit, and a derivative of e⁻¹⁸ still has half its digits.
    ratio = max(ratio, -18.0 - 2 * radius**2)
    if ratio == math.inf:
        ratio = 0.0
    return order_norm(F, sampling.two_diracs(radius, ratio, torch.eye(d)[0].double()), p)


def order_norm(F: SelfAttention, mu: ParticleMeasure, p: float) -> float:
    """‖J‖ in L^p(μ) for p = 1, 2, ∞ at an input on the line or in the plane, from below.

    p = 1: maxⱼ sup_e Σᵢ (aᵢ/aⱼ)|Jᵢⱼe|; p = ∞: maxᵢ sup_e Σⱼ |Jᵢⱼᵀe|, both over a grid of e.

    Args:
        F: a map of measures.
        mu: a measure of few atoms, d ≤ 2.
        p: 1, 2 or ∞.
    """
    J = torch.func.jacrev(lambda x: F(mu.replace(x)).points)(mu.points).permute(0, 2, 1, 3)
    n, d = mu.points.shape
    logs = mu.log_weights
    if p == 2:
        half = 0.5 * (logs[:, None] - logs)[..., None, None]
        matrix = (half.exp() * J).permute(0, 2, 1, 3).reshape(n * d, n * d)
        return float(torch.linalg.matrix_norm(matrix, 2))
    angle = torch.linspace(0, math.pi, _ANGLES + 1, dtype=J.dtype)
    e = torch.stack([angle.cos(), angle.sin()])[:d]  # on the line: |cos| ≤ 1, reached at 0
    if p == 1:
        lengths = torch.linalg.vector_norm(torch.einsum("ijab,be->ijae", J, e), dim=2)
        return float((lengths * (logs[:, None] - logs).exp()[..., None]).sum(0).max())
    lengths = torch.linalg.vector_norm(torch.einsum("ijab,ae->ijbe", J, e), dim=2)
    return float(lengths.sum(1).max())


def plan(settings: Settings) -> dict[str, Any]:
    """The arguments of `meanfield.sweep` that make the experiment."""
    task = Task(measure, VARIABLES, parameters=PARAMETERS, coords={"order": list(ORDERS)})
    return {
        "fn": task,
        "grid": {
            "radius": settings.radii,
            "n_atoms": settings.n_atoms,
            "dim": settings.dims,
            "causal": settings.masks,
        },
        "fixed": {
            "starts": settings.starts,
            "steps": settings.steps,
            "scales": settings.scales,
            "growth": settings.growth,
        },
        "seed": settings.seed,
        "attrs": {"experiment": "sharpness"},
    }


def run(settings: Settings | None = None, **how: Any) -> xr.Dataset:
    """Run the sweep; further arguments (store, executor, …) are those of `meanfield.sweep`."""
    return sweep(**plan(settings or Settings()), **how)
