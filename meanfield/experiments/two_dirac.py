"""How sensitive is attention to two unbalanced clusters?

A light atom at R u and a heavy crowd at −R u, for an eigenpair A u = −γ u (V = I): the
configuration in which [CAP24] prove √n growth (Proposition 3.4) and, with extreme weights,
growth exponential in R² (Proposition 3.6). Each case is one configuration. For it the sweep has
the local Wasserstein constant with both components, the Euclidean constant of the n-token
sequence where the ratio of weights is 1/(n−1), secant ratios at shrinking steps, and the bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from scipy.special import expit

from meanfield import bounds, sampling
from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.bounds.diracs import two_dirac_entry
from meanfield.checks import to_host
from meanfield.experiments.experiment import Experiment
from meanfield.experiments.settings import setting
from meanfield.figures.canvas import figure, kind, ticks_at
from meanfield.figures.curves import curve, formula
from meanfield.figures.plots import plot_secants
from meanfield.figures.selection import attribute, best, by_level, by_mask, select
from meanfield.lipschitz import LocalLipschitz, local_lipschitz
from meanfield.lipschitz.comparison import oriented, secants_along, split_secants
from meanfield.measures import ParticleMeasure, stack
from meanfield.results import Variable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["EXPERIMENT", "Settings"]


_OFFSETS = (
    *(-40.0, -30.0, -22.0, -16.0, -12.0, -9.0, -7.0, -5.0, -4.0, -3.0, -2.0, -1.0, -0.5, 0.0),
    *(0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 7.0, 9.0, 12.0, 15.0),
)


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over."""

    radii: tuple[float, ...] = setting(
        (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0),
        "R of the configuration",
        quick=(0.5, 1.0, 1.5, 2.0),
    )
    n_tokens: tuple[int, ...] = setting(
        (2, 3, 5, 8, 13, 22, 36, 60, 100, 170, 280, 460),
        "lengths n of the sequences with one light token",
        quick=(2, 5, 13, 36, 100),
    )
    dims: tuple[int, ...] = setting((1, 2, 8), "dimensions d", quick=(1, 2))
    offsets: tuple[float, ...] = setting(
        _OFFSETS,
        "log-ratios of the weights besides those of sequences, relative to the best one for the "
        "radius, log(t/(1−t)) − 2γR² (about e^{−2γR²}/3)",
        quick=(-12.0, -7.0, -4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0, 7.0),
    )
    log_ratios: tuple[float, ...] = setting(
        (0.0, -100.0, -300.0, -900.0),
        "absolute log-ratios of the weights, for the far end",
        quick=(0.0, -900.0),
    )
    split_radii: tuple[float, ...] = setting(
        (0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0, 11.0),
        "R of the pairs with the crowd at the origin",
        quick=(0.5, 1.0, 2.0, 4.0, 8.0),
    )
    scales: int = setting(
        60, "positions at which light and heavy atoms are interleaved (masked)", quick=30
    )
    gamma: float = setting(1.0, "−γ is the eigenvalue of A along u; its others are in [−γ/2, γ/2]")
    masks: tuple[bool, ...] = setting((False, True), "plain (False), masked (True) or both")
    steps: tuple[float, ...] = setting(
        (1.0, 0.5, 0.2, 0.1, 0.03, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6),
        "displacements over R of the secants, decreasing",
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
    radius: np.ndarray,
    dim: np.ndarray,
    causal: np.ndarray,
    crowd: np.ndarray,
    log_ratio: np.ndarray,
    n_tokens: np.ndarray,
    *,
    gamma: float,
    scales: int,
    steps: Sequence[float],
    secant_tokens: Sequence[int],
    layer_seed: int,
) -> dict[str, np.ndarray]:
    """Everything that is measured and bounded in many configurations."""
    found = _nothing(len(radius), len(steps))
    for (d, masked), of_layer in _alike(np.arange(len(radius)), dim, causal):
        parameters = layer(d, gamma, layer_seed)
        F = SelfAttention(parameters, causal=masked)
        pair = sampling.critical_pair(parameters.A[0], branch="negative")
        _put(found, of_layer, _bounds(gamma, radius[of_layer], masked))
        for (at,), cases in _alike(of_layer, crowd):
            R, z = radius[cases], log_ratio[cases]
            mu = sampling.two_diracs(R, z, pair.direction, heavy_at=at, positioned=masked)
            constant = local_lipschitz(F, mu)
            parts = {"particle": constant.particle, "splitting": constant.splitting}
            _put(found, cases, {**parts, **constant.values("value")})
            if at == 0:
                _put(found, cases, {"splitting_secant": _split(F, mu, constant, R, steps)})
            elif at == -1:
                _put(found, cases, {"two_dirac_entry": two_dirac_entry(gamma, R, z)})
                best = z == bounds.two_dirac_best_log_ratio(gamma, R)
                if masked and best.any():
                    every = sampling.interleaved_diracs(
                        R[best], z[best], pair.direction, scales=scales, growth=1.5
                    )
                    _put(found, cases[best], {"interleaved": local_lipschitz(F, every).value})
        for (n,), cases in _alike(of_layer[n_tokens[of_layer] > 0], n_tokens):
            with_steps = steps if n in secant_tokens else ()
            tokens = stack([pair.tokens(R, n) for R in radius[cases].tolist()])
            _put(found, cases, _sequences(F, tokens, gamma, radius[cases], with_steps))
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


def _bounds(gamma: float, radius: np.ndarray, causal: bool) -> dict[str, Any]:
    """What holds for all measures in the ball."""
    R, places = np.unique(radius, return_inverse=True)
    upper = bounds.masked_mean_field if causal else bounds.mean_field
    lower = bounds.masked_two_dirac_lower if causal else bounds.two_dirac_lower
    found = {"two_dirac_lower": lower(gamma, R), "mean_field_bound": upper(gamma, 1.0, R)}
    if not causal:
        found["theorem_3_5"] = bounds.theorem_3_5(gamma, 1.0, R)
    return {name: values[places] for name, values in found.items()}


def _split(
    F: SelfAttention,
    mu: ParticleMeasure,
    constant: LocalLipschitz,
    radius: np.ndarray,
    steps: Sequence[float],
) -> np.ndarray:
    """Secants with the worst atom split; NaN where no splitting moves anything (masked)."""
    size, atom, apart = constant.splitting, constant.splitting_atom, constant.splitting_direction
    assert size is not None and atom is not None and apart is not None
    found = np.full((len(radius), len(steps)), math.nan)
    for k in np.flatnonzero(to_host(size) > 0):
        secants = split_secants(F, mu[k], atom[k], apart[k], [h * radius[k] for h in steps])
        found[k] = to_host(secants.wasserstein.value)
    return found


def _sequences(
    F: SelfAttention,
    tokens: ParticleMeasure,
    gamma: float,
    radius: np.ndarray,
    steps: Sequence[float],
) -> dict[str, Any]:
    """The discrete map at one light token and n − 1 others (masked: at positions i/n)."""
    n = tokens.n_particles
    if not F.causal:
        tokens = ParticleMeasure(tokens.points)
    constant = local_lipschitz(F, tokens, geometry="euclidean", rtol=1e-8)
    found = constant.values("euclidean") | {
        "general_bound": bounds.theorem_3_3(gamma, 1.0, radius, n),
        "general_lower": bounds.proposition_3_4(gamma, radius, n),
    }
    if not steps:
        return found
    each = [
        secants_along(F, tokens[k], oriented(constant.direction[k]), [h * R for h in steps])
        for k, R in enumerate(radius)
    ]
    found["euclidean_secant"] = [one.euclidean for one in each]
    for name, part in (("", "value"), ("_lower", "lower"), ("_upper", "upper")):
        found[f"wasserstein_secant{name}"] = [getattr(one.wasserstein, part) for one in each]
    return found


def _nothing(n_cases: int, n_steps: int) -> dict[str, np.ndarray]:
    """What stands where a configuration has no sequence or no secants."""
    shapes = {v.name: (n_cases, n_steps)[: 1 + len(v.dims)] for v in _VARIABLES}
    blank = {v.name: True if v.dtype == "bool" else math.nan for v in _VARIABLES}
    return {name: np.full(shape, blank[name]) for name, shape in shapes.items()}


_SECANT: dict[str, Any] = {"dims": ("step",)}
_VARIABLES = (
    Variable("particle", "local Wasserstein constant, atoms moved as a whole"),
    Variable("splitting", "local Wasserstein constant, one atom split"),
    *LocalLipschitz.columns("value", words="local Wasserstein constant of the two-atom measure"),
    # Converged where there is no sequence.
    *LocalLipschitz.columns("euclidean", words="Euclidean constant of the sequence of n tokens"),
    Variable("euclidean_secant", "Euclidean secant ratio along the worst direction", **_SECANT),
    Variable("wasserstein_secant", "Wasserstein secant ratio along the same direction", **_SECANT),
    Variable("wasserstein_secant_lower", "certified lower end of that ratio", **_SECANT),
    Variable("wasserstein_secant_upper", "certified upper end of that ratio", **_SECANT),
    Variable("splitting_secant", "Wasserstein secant ratio with the worst atom split", **_SECANT),
    Variable("two_dirac_entry", "heavy-light entry, lower bound of the particle component"),
    Variable("interleaved", "local constant with two Diracs at every scale of position (masked)"),
    Variable("two_dirac_lower", "what two Diracs reach at least (masked: at every position)"),
    Variable("mean_field_bound", "upper bound over all measures in the ball"),
    Variable("theorem_3_5", "the same by Theorem 3.5 (NaN where masked)"),
    Variable("general_bound", "upper bound over n tokens in the ball, Theorem 3.3"),
    Variable("general_lower", "what n tokens in the ball reach at least, Proposition 3.4"),
)
_PARAMETERS = (
    Variable("radius", "radius R of the ball", symbol="R"),
    Variable("dim", "dimension d", symbol="d"),
    Variable("causal", "masked attention"),
    Variable("crowd", "place of the heavy atom, in units of R"),
    Variable("log_ratio", "log(light weight / heavy weight)"),
    Variable("n_tokens", "number of tokens n (0: a weighted pair only)"),
    Variable("step", "root-mean-square displacement over R"),
)


@figure("euclidean", "euclidean_converged", "particle")
def growth_in_n(ds: xr.Dataset, *, ax: Axes, causal: bool = False) -> Axes:
    """Euclidean constant of n tokens against n, beside √n and what is proved from below.

    Args:
        ds: of this experiment.
        ax: where to draw; a new figure if None.
        causal: whether to take the masked cases.
    """
    rows = _pairs(ds, causal=causal, sequence=True)
    ax.set(xscale="log", yscale="log", xlabel="number of tokens n", ylabel=r"$\|Df(X)\|$")
    for colour, radius, line in by_level(rows, "radius"):
        curve(ax, line, "n_tokens", "euclidean", color=colour, label=f"R = {radius:g}")
        curve(ax, line, "n_tokens", "particle", "x", color=colour, markersize=7)
        below = partial(bounds.proposition_3_4, attribute(ds, "gamma"), radius)
        formula(ax, below, rows.n_tokens, ":", whole=True, color=colour)
    formula(ax, np.sqrt, rows.n_tokens, "k-", linewidth=2, alpha=0.4, label=r"$\sqrt{n}$")
    ax.plot([], [], "kx", markersize=7, label="two weighted atoms")
    ax.plot([], [], "k:", linewidth=0.9, label="lower bound, Prop. 3.4")
    ax.set_ylim(bottom=0.5)
    ticks_at(ax, rows.n_tokens)
    ax.set_title(f"Euclidean constant of $n$ tokens in two clusters, {kind(causal)}")
    return ax


@figure("value", "value_converged", "interleaved")
def growth_in_radius(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Best two-Dirac constant against R², between its bounds, and Theorem 3.5 far above.

    The lower bound is max_t √(t(1−t)) (1+2(1−t)c) e^c with c = γR², twice that where masked.
    """
    rows = select(ds, crowd=-1.0)
    for colour, causal, cases in by_mask(rows):
        part = _squared(best(cases, "value", over="radius"))
        mark: Any = {"color": colour, "label": f"found, {kind(causal)}: best two Diracs"}
        curve(ax, part, "square", "value", "s" if causal else "o", fillstyle="none", **mark)
        if cases.interleaved.notnull().any():  # where masked, at the best ratio of the weights
            every = _squared(best(cases, "interleaved", over="radius"))
            label = "found, masked: at every scale of position"
            curve(ax, every, "square", "interleaved", "d", color=colour, label=label)
        for label, (fmt, of_radius) in _bounds_of_radius(attribute(ds, "gamma"), causal).items():
            of_square = lambda x, bound=of_radius: bound(np.sqrt(x))  # noqa: E731
            style: Any = {"color": "tab:red" if fmt == "-." else colour, "linewidth": 1.4}
            formula(ax, of_square, part.square, fmt, label=label, **style)
    ax.set(yscale="log", xlabel=r"$R^2$", ylabel="local constant, Wasserstein")
    ax.set_title(r"Two unbalanced Diracs: the constant against $R^2$")
    return ax


def _bounds_of_radius(gamma: float, causal: bool) -> dict[str, tuple[str, Callable[..., Any]]]:
    """By their label: the line of each bound, and what it is of R."""
    if causal:
        upper, lower = bounds.masked_mean_field, bounds.masked_two_dirac_lower
        return {
            "upper bound, masked: this package": ("--", partial(upper, gamma, 1.0)),
            "lower bound, masked: twice the plain": (":", partial(lower, gamma)),
        }
    return {
        "upper bound, plain: this package": ("--", partial(bounds.mean_field, gamma, 1.0)),
        "upper bound, [CAP24] Thm 3.5": ("-.", partial(bounds.theorem_3_5, gamma, 1.0)),
        "lower bound, plain": (":", partial(bounds.two_dirac_lower, gamma)),
    }


@figure("particle", "splitting", "value_converged")
def light_weight(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Both components of the two-Dirac constant against the light weight, plain: found as marks.

    The lines are their closed forms.
    """
    rows = _pairs(ds, causal=False, sequence=False)
    rows = rows.isel(case=np.flatnonzero(rows.log_ratio.values > -80))
    for colour, radius, line in by_level(rows, "radius"):
        mark: Any = {"color": colour, "flag": "value_converged", "markersize": 3}
        curve(ax, line, "log_ratio", "particle", "o", label=f"R = {radius:g}", **mark)
        curve(ax, line, "log_ratio", "splitting", "x", **mark)
        for part, fmt in ((0, "-"), (1, "--")):
            case: Any = {"c": attribute(ds, "gamma") * radius**2, "dim": int(rows.dim[0])}
            at = lambda z, part=part, case=case: two_atom_constants(z, **case)[part]  # noqa: E731
            formula(ax, at, line.log_ratio, fmt, color=colour)
    ax.plot([], [], "k-", linewidth=0.9, label="particle")
    ax.plot([], [], "k--", linewidth=0.9, label="splitting")
    ax.set(yscale="log", xlabel="log(light weight / heavy weight)", ylabel="local constant")
    ax.set_ylim(bottom=1e-2)
    ax.set_title("Two Diracs: the constant against the weight of the light one")
    return ax


def two_atom_constants(
    log_ratio: np.ndarray, *, c: float, dim: int
) -> tuple[np.ndarray, np.ndarray]:
    """Particle and splitting component at a light atom at Ru and a heavy one at −Ru, c = γR².

    The first is the largest singular value of √(aᵢ/aₖ) ∂oᵢ/∂xₖ, which is
    Pᵢₖ(1 − c(xₖ − oᵢ)xᵢ) − 4c Pᵢ₁Pᵢ₂ δᵢₖ along u, with x = (1, −1), and Pᵢₖ across it (d > 1); the
    second is the larger of 4c Pᵢ₁Pᵢ₂.
    """
    z, x = log_ratio[..., None], np.array([1.0, -1.0])
    light = expit(z - 2 * c * x)  # what each pays to the light one
    P = np.stack([light, 1 - light], -1)
    o = 2 * light - 1
    variance = 4 * c * light * (1 - light)
    along = P * (1 - c * (x - o[..., None]) * x[:, None]) - variance[..., None] * np.eye(2)
    scale = np.exp(z[..., None] * np.array([[0.0, 0.5], [-0.5, 0.0]]))  # √(aᵢ/aₖ)
    blocks = np.stack([along, P if dim > 1 else along])
    return np.linalg.norm(scale * blocks, 2, axis=(-2, -1)).max(0), variance.max(-1)


@figure("euclidean_secant/euclidean", "wasserstein_secant/euclidean", "euclidean_converged")
def secants(ds: xr.Dataset, *, ax: Axes, causal: bool = False) -> Axes:
    """Discrete Euclidean and Wasserstein secants over the constant, as the step shrinks.

    Args:
        ds: of this experiment.
        ax: where to draw; a new figure if None.
        causal: whether to take the masked cases (conditional distance).
    """
    rows = _pairs(ds, causal=causal, sequence=True)
    rows = rows.isel(case=np.flatnonzero(np.isfinite(rows.euclidean_secant).all("step").values))
    radius = rows.radius.values[np.argmin(np.abs(rows.radius.values - 1.5))]
    plot_secants(select(rows, radius=radius).sortby("n_tokens"), ax=ax)
    return ax


@figure("splitting", "particle", "splitting_secant", "value_converged")
def splitting(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Where splitting an atom beats moving it: heavy atom at the origin, light one at R."""
    rows = select(ds, crowd=0.0, causal=False)
    rows = select(rows, dim=int(rows.dim.min()))
    for name, fmt, label in (
        ("splitting", "o-", r"splitting: $\max_i\|D_x\Gamma_\mu(x_i)\|$"),
        ("particle", "s-", r"particle: $\|D^{1/2}JD^{-1/2}\|$"),
    ):
        curve(ax, rows, "radius", name, fmt, flag="value_converged", label=label)
    label = f"$W_2$ secant, atom split (step {float(ds.step[-1]):.0e})"
    last = rows.isel(step=-1)
    curve(ax, last, "radius", "splitting_secant", "kx", markersize=7, label=label)
    ax.set(xscale="log", yscale="log", xlabel="radius R", ylabel="local constant, Wasserstein")
    ax.xaxis.minorticks_off()
    ax.set_title(f"Heavy atom at 0, light atom at R, d = {int(rows.dim[0])}: splitting and moving")
    return ax


def _pairs(ds: xr.Dataset, *, causal: bool, sequence: bool) -> xr.Dataset:
    """Cases of the largest d with the heavy atom at −R: sequences of tokens, or weighted pairs."""
    rows = ds.assign_coords(sequence=ds.n_tokens > 0)
    rows = select(rows, causal=causal, crowd=-1.0, sequence=sequence)
    return select(rows, dim=int(rows.dim.max()))


def _squared(rows: xr.Dataset) -> xr.Dataset:
    return rows.assign_coords(square=rows.radius**2)


def answer(ds: xr.Dataset) -> list[str]:
    """At the largest R: what was found, and the bounds."""
    rows = select(ds, crowd=-1.0)
    lines = []
    for _, causal, cases in by_mask(rows):
        top = select(cases, radius=cases.radius.values.max())
        # Masked, light and heavy atoms at every scale of position may be worse than two.
        found = float(np.fmax(top.value, top.interleaved).max())
        bound, paper = (float(top[name][0]) for name in ("mean_field_bound", "theorem_3_5"))
        of_paper = "" if causal else f"; of [CAP24], Theorem 3.5: {paper:.3g}"
        lines.append(
            f"{kind(causal)}, R = {float(top.radius[0]):g}: largest constant found {found:,.6g}; "
            f"bound of this package {bound:,.6g}{of_paper}"
        )
    return lines


EXPERIMENT = Experiment(
    constants,
    Settings(),
    grid=cases,
    variables=_VARIABLES,
    parameters=_PARAMETERS,
    coords=lambda s: {"step": s.steps},
    derived=lambda s: {"layer_seed": s.seed},
    attrs=lambda s: {"gamma": s.gamma},
    batched=True,
    figures={
        "growth-in-n": growth_in_n,
        "growth-in-n-masked": partial(growth_in_n, causal=True),
        "growth-in-radius": growth_in_radius,
        "light-weight": light_weight,
        "lemma-3-2": secants,
        "lemma-4-2-masked": partial(secants, causal=True),
        "splitting": splitting,
    },
    answer=answer,
)
