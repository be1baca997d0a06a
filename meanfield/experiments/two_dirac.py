"""How sensitive is attention to two unbalanced clusters?

A light atom at R u and a heavy crowd at −R u, for an eigenpair A u = −γ u (V = I): the
configuration in which [CAP24] prove √n growth (Proposition 3.4) and, with extreme weights,
growth exponential in R² (Proposition 3.6). Each case is one configuration. For it the sweep has
the local Wasserstein constant with both components, the Euclidean constant of the n-token
sequence where the ratio of weights is 1/(n−1), secant ratios at shrinking steps, and the bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xarray as xr

from meanfield import bounds, sampling
from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.bounds.diracs import two_dirac_entry
from meanfield.lipschitz import local_lipschitz, secants_along, split_secants
from meanfield.measures import ParticleMeasure
from meanfield.results import Variable
from meanfield.sweeps import Task, sweep

__all__ = ["FIGURES", "QUICK", "Settings", "cases", "constants", "layer", "plan", "run"]

# File name of each figure -> function of `meanfield.figures` and its arguments.
FIGURES: dict[str, tuple[str, dict[str, Any]]] = {
    "growth-in-n": ("plot_growth_in_n", {}),
    "growth-in-n-masked": ("plot_growth_in_n", {"causal": True}),
    "growth-in-radius": ("plot_growth_in_radius", {}),
    "light-weight": ("plot_light_weight", {}),
    "lemma-3-2": ("plot_lemma_3_2", {}),
    "lemma-4-2-masked": ("plot_lemma_3_2", {"causal": True}),
    "splitting": ("plot_splitting", {}),
}


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over; every field can be set from the command line.

    Attributes:
        radii: R of the configuration.
        n_tokens: lengths n of the sequences with one light token.
        dims: dimensions d.
        offsets: log-ratios of the weights besides those of sequences, relative to the best one
            for the radius, log(t/(1−t)) − 2γR² (about e^{−2γR²}/3).
        log_ratios: absolute log-ratios of the weights, for the far end.
        split_radii: R of the pairs with the crowd at the origin.
        gamma: −γ is the eigenvalue of A along u; its others are in [−γ/2, γ/2].
        masks: plain (False), masked (True) or both.
        steps: displacements over R of the secants, decreasing.
        secant_tokens: the sequence lengths that get secants.
        seed: of A's other eigenvectors.
    """

    radii: tuple[float, ...] = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0)
    n_tokens: tuple[int, ...] = (2, 3, 5, 8, 13, 22, 36, 60, 100, 170, 280, 460)
    dims: tuple[int, ...] = (1, 2, 8)
    offsets: tuple[float, ...] = (
        *(-40.0, -30.0, -22.0, -16.0, -12.0, -9.0, -7.0, -5.0, -4.0, -3.0, -2.0, -1.0, -0.5, 0.0),
        *(0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 7.0, 9.0, 12.0, 15.0),
    )
    log_ratios: tuple[float, ...] = (0.0, -100.0, -300.0, -900.0)
    split_radii: tuple[float, ...] = (0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0, 11.0)
    gamma: float = 1.0
    masks: tuple[bool, ...] = (False, True)
    steps: tuple[float, ...] = (1.0, 0.5, 0.2, 0.1, 0.03, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
    secant_tokens: tuple[int, ...] = (2, 5, 13, 36)
    seed: int = 0


QUICK = Settings(
    radii=(0.5, 1.0, 1.5, 2.0),
    n_tokens=(2, 5, 13, 36, 100),
    dims=(1, 2),
    offsets=(-12.0, -7.0, -4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0, 7.0),
    log_ratios=(0.0, -900.0),
    split_radii=(0.5, 1.0, 2.0, 4.0, 8.0),
    steps=(1.0, 0.3, 0.1, 1e-2, 1e-4, 1e-6),
    secant_tokens=(2, 13),
)


def layer(dim: int, gamma: float, seed: int) -> AttentionParameters:
    """V = I and a symmetric A with one eigenvalue −γ and the others in [−γ/2, γ/2]."""
    generator = torch.Generator().manual_seed(seed + dim)
    draw = torch.randn(dim, dim, generator=generator, dtype=torch.float64)
    Q = torch.linalg.qr(draw)[0]
    others = gamma * (torch.rand(dim, generator=generator, dtype=torch.float64) - 0.5)
    others[0] = -gamma
    eye = torch.eye(dim, dtype=torch.float64)
    return AttentionParameters.from_bilinear(Q @ torch.diag(others) @ Q.mT, eye)


def cases(settings: Settings) -> list[dict[str, Any]]:
    """The configurations: sequences, weighted pairs, and pairs with the crowd at the origin."""
    pairs = []
    for radius in settings.radii:
        best = float(bounds.two_dirac_best_log_ratio(settings.gamma, radius))
        weighted = {best + offset for offset in settings.offsets} | set(settings.log_ratios)
        lone = [(-math.log(n - 1), n) for n in settings.n_tokens]
        lone += [(z, 0) for z in sorted(weighted, reverse=True) if z <= 0]
        pairs += [(radius, -1.0, z, n) for z, n in lone]
    # From a crowd at the origin the light atom then gets attention 1/(1 + γR²).
    at_origin = [-math.log(settings.gamma * radius**2) for radius in settings.split_radii]
    pairs += [(r, 0.0, z, 0) for r, z in zip(settings.split_radii, at_origin, strict=True)]
    return [
        {
            "radius": float(radius),
            "dim": dim,
            "causal": causal,
            "crowd": crowd,
            "log_ratio": z,
            "n_tokens": n,
        }
        for dim in settings.dims
        for causal in settings.masks
        for radius, crowd, z, n in pairs
    ]


def constants(
    radius: float,
    dim: int,
    causal: bool,
    crowd: float,
    log_ratio: float,
    n_tokens: int,
    *,
    gamma: float,
    steps: Sequence[float],
    secant_tokens: Sequence[int],
    layer_seed: int,
) -> dict[str, Any]:
    """Everything that is measured and bounded in one configuration."""
    parameters = layer(dim, gamma, layer_seed)
    F = SelfAttention(parameters, causal=causal)
    u = sampling.critical_pair(parameters.A[0], branch="negative").direction
    mu = sampling.two_diracs(radius, log_ratio, u, heavy_at=crowd, positioned=causal)
    constant = local_lipschitz(F, mu)
    assert constant.splitting is not None
    found = _nothing(len(steps)) | {
        "particle": float(constant.particle),
        "splitting": float(constant.splitting),
        "value": float(constant.value),
        "value_residual": float(constant.residual),
        "value_converged": bool(constant.converged),
        **_bounds(gamma, radius, causal, crowd, log_ratio, n_tokens),
    }
    if crowd == 0 and float(constant.splitting) > 0:
        secants = split_secants(F, mu, constant, [h * radius for h in steps])
        found["splitting_secant"] = secants.wasserstein.value.numpy()
    if n_tokens:
        with_secants = n_tokens in secant_tokens
        found |= _sequence(F, parameters, radius, n_tokens, steps, with_secants)
    return found


def _bounds(
    gamma: float, radius: float, causal: bool, crowd: float, log_ratio: float, n: int
) -> dict[str, float]:
    upper = bounds.masked_mean_field if causal else bounds.mean_field
    nan = math.nan
    entry = two_dirac_entry(gamma, radius, log_ratio) if crowd == -1 else nan
    return {
        "two_dirac_entry": entry,
        "two_dirac_lower": bounds.two_dirac_lower(gamma, radius),
        "mean_field_bound": upper(gamma, 1.0, radius),
        "theorem_3_5": nan if causal else bounds.theorem_3_5(gamma, 1.0, radius),
        "general_bound": bounds.theorem_3_3(gamma, 1.0, radius, n) if n else nan,
        "general_lower": bounds.proposition_3_4(gamma, radius, n) if n else nan,
    }


def _sequence(
    F: SelfAttention,
    parameters: AttentionParameters,
    radius: float,
    n: int,
    steps: Sequence[float],
    with_secants: bool,
) -> dict[str, Any]:
    """The discrete map at one light token and n − 1 others (masked: at positions i/n)."""
    tokens = sampling.adversarial(parameters.A[0], radius, n, branch="negative")
    if not F.causal:
        tokens = ParticleMeasure(tokens.points)
    constant = local_lipschitz(F, tokens, geometry="euclidean", rtol=1e-8)
    found: dict[str, Any] = {
        "euclidean": float(constant.value),
        "euclidean_residual": float(constant.residual),
        "euclidean_converged": bool(constant.converged),
    }
    if with_secants:
        lengths = [h * radius for h in steps]
        secants = secants_along(F, tokens, constant.direction, lengths)
        found["euclidean_secant"] = secants.euclidean.numpy()
        for name, part in (("", "value"), ("_lower", "lower"), ("_upper", "upper")):
            found[f"wasserstein_secant{name}"] = getattr(secants.wasserstein, part).numpy()
    return found


def _nothing(n_steps: int) -> dict[str, Any]:
    """What stands where a configuration has no sequence or no secants."""
    blank: dict[str, Any] = {"euclidean_converged": True}
    for variable in VARIABLES:
        if variable.dtype == "float64":
            blank[variable.name] = np.full(n_steps, math.nan) if variable.dims else math.nan
    return blank


_SECANT: dict[str, Any] = {"dims": ("step",)}
VARIABLES = (
    Variable("particle", "local Wasserstein constant, atoms moved as a whole"),
    Variable("splitting", "local Wasserstein constant, one atom split"),
    Variable("value", "local Wasserstein constant of the two-atom measure"),
    Variable("value_residual", "relative residual of the local Wasserstein constant"),
    Variable("value_converged", "local Wasserstein constant converged", dtype="bool"),
    Variable("euclidean", "Euclidean constant of the sequence of n tokens"),
    Variable("euclidean_residual", "relative residual of the Euclidean constant"),
    Variable(
        "euclidean_converged",
        "Euclidean constant converged (true where there is no sequence)",
        dtype="bool",
    ),
    Variable("euclidean_secant", "Euclidean secant ratio along the worst direction", **_SECANT),
    Variable("wasserstein_secant", "Wasserstein secant ratio along the same direction", **_SECANT),
    Variable("wasserstein_secant_lower", "certified lower end of that ratio", **_SECANT),
    Variable("wasserstein_secant_upper", "certified upper end of that ratio", **_SECANT),
    Variable("splitting_secant", "Wasserstein secant ratio with the worst atom split", **_SECANT),
    Variable("two_dirac_entry", "heavy-light entry, lower bound of the particle component"),
    Variable("two_dirac_lower", "what two Diracs in the ball reach at least"),
    Variable("mean_field_bound", "upper bound over all measures in the ball"),
    Variable("theorem_3_5", "the same by Theorem 3.5 (NaN where masked)"),
    Variable("general_bound", "upper bound over n tokens in the ball, Theorem 3.3"),
    Variable("general_lower", "what n tokens in the ball reach at least, Proposition 3.4"),
)
PARAMETERS = (
    Variable("radius", "radius R of the ball", symbol="R"),
    Variable("dim", "dimension d", dtype="int64", symbol="d"),
    Variable("causal", "masked attention", dtype="bool"),
    Variable("crowd", "place of the heavy atom, in units of R"),
    Variable("log_ratio", "log(light weight / heavy weight)"),
    Variable("n_tokens", "number of tokens n (0: a weighted pair only)", dtype="int64"),
    Variable("step", "root-mean-square displacement over R"),
)


def plan(settings: Settings) -> dict[str, Any]:
    """The arguments of `meanfield.sweep` that make the experiment: fn, grid, fixed, seed."""
    task = Task(constants, VARIABLES, parameters=PARAMETERS, coords={"step": settings.steps})
    fixed = {
        "gamma": settings.gamma,
        "steps": settings.steps,
        "secant_tokens": settings.secant_tokens,
        "layer_seed": settings.seed,
    }
    return {
        "fn": task,
        "grid": cases(settings),
        "fixed": fixed,
        "seed": settings.seed,
        "attrs": {"experiment": "two-dirac"},
    }


def run(settings: Settings | None = None, **how: Any) -> xr.Dataset:
    """Run the sweep.

    Args:
        settings: what to run over; the default is the full size, `QUICK` the small one.
        **how: for `meanfield.sweep` (store, executor, shard).
    """
    return sweep(**plan(settings or Settings()), **how)
