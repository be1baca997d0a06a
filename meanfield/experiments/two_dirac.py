"""How sensitive is attention to two unbalanced clusters?

A light atom at R u and a heavy crowd at −R u, for an eigenpair A u = −γ u (V = I): the
configuration in which [CAP24] prove √n growth (Proposition 3.4) and, with extreme weights,
growth exponential in R² (Proposition 3.6). Each case is one configuration. For it the sweep has
the local Wasserstein constant with both components, the Euclidean constant of the n-token
sequence where the ratio of weights is 1/(n−1), secant ratios at shrinking steps, and the bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xarray as xr

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, bounds, sampling, stack
from meanfield.bounds.diracs import two_dirac_entry
from meanfield.checks import number
from meanfield.errors import NoCases
from meanfield.experiments.experiment import Experiment
from meanfield.experiments.settings import along, over, setting
from meanfield.figures.canvas import kind
from meanfield.figures.charts import Chart, Curve, Drawn, Formula, Key
from meanfield.figures.plots import secants
from meanfield.figures.selection import best, by_level, select
from meanfield.lipschitz import LocalLipschitz, SecantRatio, local_lipschitz
from meanfield.lipschitz.comparison import oriented, secants_along, split_secants
from meanfield.results import Variable
from meanfield.results.labels import outward

__all__ = ["EXPERIMENT", "Settings"]

_ENDS = ("value", "lower", "upper")
_OFFSETS = (
    *(-40.0, -30.0, -22.0, -16.0, -12.0, -9.0, -7.0, -5.0, -4.0, -3.0, -2.0, -1.0, -0.5, 0.0),
    *(0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 7.0, 9.0, 12.0, 15.0),
)


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over.

    Of u the eigenvalue of A is −γ; the others are in [−γ/2, γ/2]. `offsets` are relative to the
    best log-ratio of the weights for the radius, log(t/(1−t)) − 2γR² (about e^{−2γR²}/3).
    """

    radii: tuple[float, ...] = over(
        "radius",
        (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0),
        "radius R of the ball",
        quick=(0.5, 1.0, 1.5, 2.0),
        symbol="R",
    )
    n_tokens: tuple[int, ...] = over(
        "n_tokens",
        (2, 3, 5, 8, 13, 22, 36, 60, 100, 170, 280, 460),
        "number of tokens n (0: a weighted pair only)",
        quick=(2, 5, 13, 36, 100),
    )
    dims: tuple[int, ...] = over("dim", (1, 2, 8), "dimension d", quick=(1, 2), symbol="d")
    offsets: tuple[float, ...] = over(
        "",
        _OFFSETS,
        "log-ratios of the weights besides those of sequences, relative to the best one",
        quick=(-12.0, -7.0, -4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0, 7.0),
    )
    log_ratios: tuple[float, ...] = over(
        "log_ratio",
        (0.0, -100.0, -300.0, -900.0),
        "log(light weight / heavy weight)",
        quick=(0.0, -900.0),
    )
    split_radii: tuple[float, ...] = over(
        "",
        (0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0, 11.0),
        "R of the pairs with the crowd at the origin",
        quick=(0.5, 1.0, 2.0, 4.0, 8.0),
    )
    masks: tuple[bool, ...] = over("causal", (False, True), "masked attention")
    scales: int = setting(
        60, "positions at which light and heavy atoms are interleaved (masked)", quick=30
    )
    gamma: float = setting(1.0, "−γ is the eigenvalue of A along u")
    steps: tuple[float, ...] = along(
        "step",
        (1.0, 0.5, 0.2, 0.1, 0.03, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6),
        "root-mean-square displacement over R",
        quick=(1.0, 0.3, 0.1, 1e-2, 1e-4, 1e-6),
    )
    secant_tokens: tuple[int, ...] = setting(
        (2, 5, 13, 36), "the sequence lengths that get secants", quick=(2, 13)
    )
    seed: int = setting(0, "seed of A's other eigenvectors")


def layer(dim: int, gamma: float, seed: int) -> AttentionParameters:
    """V = I and a symmetric A with one eigenvalue −γ and the others in [−γ/2, γ/2]."""
    generator = torch.Generator().manual_seed(seed + dim)
    draw = torch.randn(dim, dim, generator=generator, dtype=torch.float64)
    Q = torch.linalg.qr(draw)[0]
    others = gamma * (torch.rand(dim, generator=generator, dtype=torch.float64) - 0.5)
    others[0] = -gamma
    eye = torch.eye(dim, dtype=torch.float64)
    return AttentionParameters.from_bilinear(Q @ torch.diag(others) @ Q.mT, eye)


def cases(s: Settings) -> list[dict[str, Any]]:
    """The configurations: sequences, weighted pairs, and pairs with the crowd at the origin.

    Raises:
        ValueError: a sequence of one token, which is no pair; a dimension below 1; γ or a radius
            that is not positive.
    """
    number(s.gamma, "gamma", above=0)
    for radius in (*s.radii, *s.split_radii):
        number(radius, "radii, split_radii", above=0)
    if flat := [d for d in s.dims if d < 1]:
        raise ValueError(f"dims: expected whole numbers ≥ 1, got {flat[0]}")
    if unfit := [n for n in s.n_tokens if n != 0 and n < 2]:
        raise ValueError(f"n_tokens: expected 0, or 2 and more, got {unfit[0]}; leave it out")
    pairs = []
    for radius in s.radii:
        best = float(bounds.two_dirac_best_log_ratio(s.gamma, radius))
        weighted = {best + offset for offset in s.offsets} | set(s.log_ratios)
        lone = [(-math.log(n - 1), n) for n in s.n_tokens if n]
        lone += [(z, 0) for z in sorted(weighted, reverse=True) if z <= 0]
        pairs += [(radius, -1.0, z, n) for z, n in lone]
    # From a crowd at the origin the light atom then gets attention 1/(1 + γR²).
    pairs += [(R, 0.0, -math.log(s.gamma * R**2), 0) for R in s.split_radii]
    names = ("radius", "dim", "causal", "crowd", "log_ratio", "n_tokens")
    return [
        dict(zip(names, (float(radius), dim, causal, crowd, z, n), strict=True))
        for dim in s.dims
        for causal in s.masks
        for radius, crowd, z, n in pairs
    ]


def measure(
    s: Settings,
    radius: np.ndarray,
    dim: np.ndarray,
    causal: np.ndarray,
    crowd: np.ndarray,
    log_ratio: np.ndarray,
    n_tokens: np.ndarray,
) -> dict[str, np.ndarray]:
    """Everything that is measured and bounded in many configurations."""
    found = {
        # What stands where a configuration has no sequence or no secants.
        v.name: np.full(
            (len(radius), len(s.steps))[: 1 + len(v.dims)], True if v.dtype == "bool" else math.nan
        )
        for v in _VARIABLES
    }
    for (d, masked), of_layer in _alike(np.arange(len(radius)), dim, causal):
        parameters = layer(d, s.gamma, s.seed)
        F = SelfAttention(parameters, causal=masked)
        pair = sampling.critical_pair(parameters.A[0], branch="negative")
        for (R,), cases in _alike(of_layer, radius):
            _put(found, cases, _bounds(s.gamma, R, masked))
        for (at,), cases in _alike(of_layer, crowd):
            R, z = radius[cases], log_ratio[cases]
            mu = sampling.two_diracs(R, z, pair.direction, heavy_at=at, positioned=masked)
            constant = local_lipschitz(F, mu)
            parts = {"particle": constant.particle, "splitting": constant.splitting}
            _put(found, cases, {**parts, **constant.values("value")})
            if at == 0:
                _put(found, cases, {"splitting_secant": _split(s, F, mu, constant, R)})
            elif at == -1:
                _put(found, cases, {"two_dirac_entry": two_dirac_entry(s.gamma, R, z)})
                best = z == bounds.two_dirac_best_log_ratio(s.gamma, R)
                if masked and best.any():
                    every = sampling.interleaved_diracs(
                        R[best], z[best], pair.direction, scales=s.scales, growth=1.5
                    )
                    _put(found, cases[best], local_lipschitz(F, every).values("interleaved"))
        for (n,), cases in _alike(of_layer[n_tokens[of_layer] > 0], n_tokens):
            tokens = stack([pair.tokens(R, n) for R in radius[cases].tolist()])
            _put(found, cases, _sequences(s, F, tokens, radius[cases]))
    return found


def _alike(
    places: np.ndarray, *columns: np.ndarray
) -> Iterator[tuple[tuple[Any, ...], np.ndarray]]:
    """The values that columns have together at these places, and the places that have them."""
    rows = list(zip(*(column[places].tolist() for column in columns), strict=True))
    for values in dict.fromkeys(rows):
        yield values, places[[row == values for row in rows]]


def _put(found: dict[str, np.ndarray], cases: np.ndarray, values: dict[str, Any]) -> None:
    for name, value in values.items():
        found[name][cases] = value


def _bounds(gamma: float, radius: float, causal: bool) -> dict[str, Any]:
    """What holds for all measures in the ball."""
    upper = bounds.masked_mean_field if causal else bounds.mean_field
    lower = bounds.masked_two_dirac_lower if causal else bounds.two_dirac_lower
    return {
        "two_dirac_lower": lower(gamma, radius),
        "mean_field_bound": upper(gamma, 1.0, radius),
        "theorem_3_5": math.nan if causal else bounds.theorem_3_5(gamma, 1.0, radius),
    }


def _split(
    s: Settings, F: SelfAttention, mu: ParticleMeasure, constant: LocalLipschitz, radius: Any
) -> np.ndarray:
    """Secants with the worst atom split; NaN where no splitting moves anything (masked)."""
    size, atom, apart = constant.splitting, constant.splitting_atom, constant.splitting_direction
    assert size is not None and atom is not None and apart is not None
    found = np.full((len(radius), len(s.steps)), math.nan)
    for k in np.flatnonzero(size > 0):
        secants = split_secants(F, mu[k], atom[k], apart[k], [h * radius[k] for h in s.steps])
        found[k] = secants.wasserstein.value
    return found


def _sequences(
    s: Settings, F: SelfAttention, tokens: ParticleMeasure, radius: np.ndarray
) -> dict[str, Any]:
    """The discrete map at one light token and n − 1 others (masked: at positions i/n)."""
    n = tokens.n_particles
    tokens = tokens if F.causal else ParticleMeasure(tokens.points)
    constant = local_lipschitz(F, tokens, geometry="euclidean", rtol=1e-8)
    found = constant.values("euclidean") | {
        "general_bound": bounds.theorem_3_3(s.gamma, 1.0, radius, n),
        "general_lower": bounds.proposition_3_4(s.gamma, radius, n),
    }
    if n in s.secant_tokens:
        each = [
            secants_along(F, tokens[k], oriented(constant.direction[k]), [h * R for h in s.steps])
            for k, R in enumerate(radius)
        ]
        rows = [one.wasserstein.values("wasserstein_secant", *_ENDS) for one in each]
        found |= {name: [row[name] for row in rows] for name in rows[0]}
        found["euclidean_secant"] = [one.euclidean for one in each]
    return found


_VARIABLES = (
    Variable("particle", "local Wasserstein constant, atoms moved as a whole"),
    Variable("splitting", "local Wasserstein constant, one atom split"),
    *LocalLipschitz.columns("value", words="local Wasserstein constant of the two-atom measure"),
    # Converged where there is no sequence.
    *LocalLipschitz.columns("euclidean", words="Euclidean constant of the sequence of n tokens"),
    Variable("euclidean_secant", "Euclidean secant along the worst direction", dims=("step",)),
    *SecantRatio.columns(
        "wasserstein_secant",
        *_ENDS,
        words="Wasserstein secant along the worst direction",
        dims=("step",),
    ),
    Variable(
        "splitting_secant",
        "Wasserstein secant, the worst atom split into halves at ± step · R",
        dims=("step",),
    ),
    Variable("two_dirac_entry", "heavy-light entry, lower bound of the particle component"),
    *LocalLipschitz.columns(
        "interleaved", words="local constant with atoms at many scales of position (masked)"
    ),
    Variable("two_dirac_lower", "what two Diracs reach at least (masked: a limit of scales)"),
    Variable("mean_field_bound", "upper bound over all measures in the ball"),
    Variable(
        "theorem_3_5", "upper bound over all measures in the ball, Theorem 3.5 (NaN: masked)"
    ),
    Variable("general_bound", "upper bound over n tokens in the ball, Theorem 3.3"),
    Variable("general_lower", "what n tokens in the ball reach at least, Proposition 3.4"),
)


def _plain(ds: xr.Dataset, *, sequence: bool) -> xr.Dataset:
    """Cases of the largest d with the heavy atom at −R: sequences of tokens, or weighted pairs."""
    rows = ds.assign_coords(sequence=ds.n_tokens > 0)
    rows = select(rows, causal=False, crowd=-1.0, sequence=sequence)
    return select(rows, dim=int(rows.dim.max()))


GROWTH_IN_N = Chart(
    "Euclidean constant of n tokens against n, and its proved lower bound (plain).",
    "n_tokens",
    [
        Curve("euclidean", "R = {radius}"),
        Curve("particle", fmt="x", key="two weighted atoms", markersize=7),
        Formula(
            lambda n, at: bounds.proposition_3_4(at["gamma"], at["radius"], n),
            fmt=":",
            whole=True,
            key="lower bound, Prop. 3.4",
        ),
        Formula(lambda n, at: np.sqrt(n), r"$\sqrt{n}$", "k--", once=True, alpha=0.5, zorder=1),
    ],
    "Euclidean constant of $n$ tokens in two clusters, plain",
    by="radius",
    rows=lambda ds: _plain(ds, sequence=True),
    log="xy",
    ticks=True,
    legend="ends",
    xlabel="number of tokens n",
    ylabel=r"$\|Df(X)\|$",
    ylim=(0.5, None),
)


def _best(ds: xr.Dataset, name: str) -> xr.Dataset:
    rows = best(ds, name, over="radius")
    return rows.assign_coords(square=rows.radius**2)


_PLAIN = (
    "Best two-Dirac constant against R², plain. The largest constant of all is at least "
    "max_t √(t(1−t)) (1+2(1−t)c) e^c with c = γR², which two Diracs reach, and at most the line "
    "close above; far above is Theorem 3.5 of [CAP24]."
)
_MASKED = (
    "Masked constants against R²: of the best two Diracs, and of light and heavy atoms "
    "interleaved at many scales of position. With ever more scales these tend to the lower line, "
    "2 max_t √(t(1−t)) (1+2(1−t)c) e^c with c = γR², or, where R is small, above it; no constant "
    "is above the upper one."
)


def growth_in_radius(causal: bool) -> Chart:
    """The chart of the plain or the masked cases."""
    at = lambda f, *norms: lambda square, at: f(at["gamma"], *norms, np.sqrt(square))  # noqa: E731
    upper: Any
    if causal:
        upper, lower = bounds.masked_mean_field, bounds.masked_two_dirac_lower
        # Two Diracs at every scale of position are worse than at one.
        every = lambda ds: _best(ds, "interleaved") if ds.interleaved.count() else ds.isel(case=[])  # noqa: E731
        other: Drawn = Curve("interleaved", "many scales", "d", rows=every, color="C4")
        below, told = "limit, at least", _MASKED
    else:
        upper, lower = bounds.mean_field, bounds.two_dirac_lower
        other = Formula(
            at(bounds.theorem_3_5, 1.0), "[CAP24]", "-.", color="tab:red", linewidth=1.4
        )
        below, told = "at least", _PLAIN
    return Chart(
        told,
        "square",
        [
            other,
            Formula(at(upper, 1.0), "at most", "--", color="tab:orange", linewidth=1.4),
            Curve("value", "found", "o", rows=lambda ds: _best(ds, "value"), color="tab:blue"),
            Formula(at(lower), below, ":", color="tab:green", linewidth=1.4),
        ],
        f"Two words of unequal weight pulled apart, {kind(causal)}",
        rows=lambda ds: select(ds.assign_coords(square=ds.radius**2), crowd=-1.0, causal=causal),
        log="y",
        legend="ends",
        xlabel="square of the radius, $R^2$",
        ylabel="local constant",
    )


def _weighted(ds: xr.Dataset) -> xr.Dataset:
    rows = _plain(ds, sequence=False)
    return rows.isel(case=np.flatnonzero(rows.log_ratio.values > -80))


LIGHT_WEIGHT = Chart(
    "Both components of the two-Dirac constant against the light weight, plain.",
    "log_ratio",
    [
        Curve("particle", "R = {radius}", flag="value_converged", markersize=3),
        Curve("splitting", fmt="--", flag="value_converged", linewidth=0.9),
        Key("particle", "-"),
        Key("splitting", "--", linewidth=0.9),
    ],
    "Two Diracs: the constant against the weight of the light one",
    by="radius",
    rows=_weighted,
    log="y",
    xlabel="log(light weight / heavy weight)",
    ylabel="local constant",
    ylim=(1e-2, None),
)


def _with_secants(ds: xr.Dataset) -> xr.Dataset:
    """The plain sequences that have secants, at the radius nearest to 1.5."""
    rows = _plain(ds, sequence=True)
    rows = rows.isel(case=np.isfinite(rows.euclidean_secant).all("step"))
    if not rows.sizes["case"]:
        raise NoCases("no sequence of the Dataset has secants")
    return select(rows, radius=min(rows.radius.values, key=lambda R: abs(R - 1.5)))


SPLITTING = Chart(
    "Where splitting an atom beats moving it: heavy atom at the origin, light one at R.",
    "radius",
    [
        Curve("splitting", r"splitting: $\max_i\|D_x\Gamma_\mu(x_i)\|$", flag="value_converged"),
        Curve("particle", r"particle: $\|D^{1/2}JD^{-1/2}\|$", "s-", flag="value_converged"),
        Curve(
            "splitting_secant",
            lambda ds: f"$W_2$ secant, atom split (step {float(ds.step):.15g})",
            "kx",
            rows=lambda ds: ds.isel(step=-1),
            markersize=7,
        ),
    ],
    lambda ds: f"Heavy atom at 0, light atom at R, d = {int(ds.dim[0])}: splitting and moving",
    rows=lambda ds: select(ds, crowd=0.0, causal=False, dim=int(ds.dim.min())),
    log="xy",
    xlabel="radius R",
    ylabel="local constant, Wasserstein",
)


def answer(ds: xr.Dataset) -> list[str]:
    """At the largest R: what was found, and the bounds."""
    rows = select(ds, crowd=-1.0)
    lines = []
    for _, causal, cases in by_level(rows, "causal"):
        top = select(cases, radius=cases.radius.values.max())
        # Masked, atoms at every scale of position may be worse than two, and n tokens than those.
        of = ("value", "interleaved", "euclidean")
        found = float(np.nanmax([top[name].max() for name in of]))
        where = f"{kind(causal)}, R = {float(top.radius[0]):.15g}"
        ends = zip(("mean_field_bound", "theorem_3_5"), (9, 3), strict=True)
        bound, paper = (outward(float(top[name][0]), digits, up=True) for name, digits in ends)
        of_paper = "" if causal else f"; of [CAP24], Theorem 3.5: {paper:.3g}"
        lines.append(
            f"{where}: largest constant found {found:,.9g}; "
            f"bound of this package {bound:,.9g}{of_paper}"
        )
    return lines


EXPERIMENT = Experiment(
    measure,
    Settings(),
    _VARIABLES,
    grid=cases,
    parameters=[Variable("crowd", "place of the heavy atom, in units of R")],
    attrs=lambda s: {"gamma": s.gamma},
    batched=True,
    figures={
        "growth-in-n": GROWTH_IN_N,
        "growth-in-radius": growth_in_radius(causal=False),
        "growth-in-radius-masked": growth_in_radius(causal=True),
        "light-weight": LIGHT_WEIGHT,
        "lemma-3-2": secants(False, _with_secants),
        "splitting": SPLITTING,
    },
    answer=answer,
)
