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
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, bounds, sampling
from meanfield.experiments.experiment import Experiment
from meanfield.experiments.settings import over, setting
from meanfield.figures.canvas import FORMULA, figure, kind
from meanfield.figures.charts import Chart, Curve, Formula, Key
from meanfield.figures.curves import curve, formula
from meanfield.figures.selection import best, select
from meanfield.lipschitz import LocalLipschitz, local_lipschitz, local_order, worst_case
from meanfield.lipschitz.differentiable import recorded_value
from meanfield.measures import stack
from meanfield.results import Variable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["EXPERIMENT", "Settings"]

ORDERS = (1.0, 2.0, math.inf)

_WEIGHTS = 2401  # ratios of weights of the two Diracs, about the best one for large radii
_SMALLEST_STEP = 1e-4  # of the radius


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over."""

    radii: tuple[float, ...] = over(
        "radius",
        (0.1, 0.5, 0.7, 1.0, 1.4, 2.0, 2.5, 3.0, 3.5),
        "radius R of the ball",
        quick=(0.1, 1.0, 2.0, 3.0),
        symbol="R",
    )
    n_atoms: tuple[int, ...] = over(
        "n_atoms", (2, 4, 12, 40), "number of atoms or tokens n", quick=(2, 6)
    )
    dims: tuple[int, ...] = over("dim", (1, 2), "dimension d", quick=(1,), symbol="d")
    masks: tuple[bool, ...] = over("causal", (False, True), "masked attention")
    starts: int = setting(24, "random starts of each search, besides the structured ones", quick=8)
    steps: int = setting(100, "steps of ascent", quick=40)
    scales: int = setting(200, "positions of the masked family", quick=30)
    growth: float = setting(
        1.3,
        "ratio of neighbouring masses of that family, see `sampling.interleaved_diracs`",
        quick=1.6,
    )
    seed: int = setting(0, "seed of the starts")


def measure(
    s: Settings, radius: float, n_atoms: int, dim: int, causal: bool, generator: torch.Generator
) -> dict[str, Any]:
    """Everything that is found and bounded in one configuration."""
    eye = torch.eye(dim, dtype=torch.float64)
    F = SelfAttention(AttentionParameters.from_bilinear(-eye, eye), causal=causal)
    _, found = worst_case(
        F, radius, n_atoms=n_atoms, starts=s.starts, steps=s.steps, generator=generator
    )
    ratio = bounds.two_dirac_best_log_ratio(1.0, radius)
    upper = bounds.masked_mean_field if causal else bounds.mean_field
    lower = bounds.masked_two_dirac_lower if causal else bounds.two_dirac_lower
    extremality = math.nan
    if causal:
        mu = sampling.interleaved_diracs(radius, ratio, eye[0], scales=s.scales, growth=s.growth)
        found = max(found, local_lipschitz(F, mu, strict=False), key=float)
    else:
        ratios = ratio + torch.linspace(-8.0, 8.0, _WEIGHTS, dtype=torch.float64)
        pairs = local_lipschitz(F, sampling.two_diracs(radius, ratios, eye[0]))
        extremality = float(found.value) / float(pairs.value.max())
    return {
        **found.values("found"),
        "two_dirac_lower": lower(1.0, radius),
        "upper": upper(1.0, 1.0, radius),
        "theorem_3_5": math.nan if causal else bounds.theorem_3_5(1.0, 1.0, radius),
        "extremality": extremality,
        "ascents": s.starts,
        **_tokens(F, radius, n_atoms, s.steps, generator),
        "order_found": [_order_found(F, radius, p) for p in ORDERS],
        "order_upper": upper(1.0, 1.0, radius, p=np.array(ORDERS)),
    }


def _tokens(
    F: SelfAttention, radius: float, n: int, steps: int, generator: torch.Generator
) -> dict[str, Any]:
    """Ascents at uniform weights, the best of several starts.

    From the sequence of Proposition 3.4, from a crowd at both ends with one token between them,
    and from random ones.
    """
    d = F.parameters.dim
    u = torch.eye(d, dtype=torch.float64)[0]
    ends = torch.where(torch.arange(n) % 2 == 0, 1.0, -1.0).to(torch.float64)
    ends[-1] = 0.0 if n > 2 else -1.0
    random = sampling.sphere(n, d, radius=radius, batch_shape=(2,), generator=generator)
    sequences = [
        sampling.adversarial(F.parameters.A[0], radius, n),
        *map(ParticleMeasure.from_sequence, (radius * ends[:, None] * u, *random)),
    ]
    _, found = climb(F, stack(sequences), radius, steps=min(steps, 40))
    value, best = found.value.max(0)
    return {
        "tokens_found": float(value),
        "tokens_converged": bool(found.converged[best]),
        "tokens_upper": bounds.tokens(1.0, 1.0, radius, n, causal=F.causal),
        "theorem_3_3": bounds.theorem_3_3(1.0, 1.0, radius, n),
    }


def climb(
    F: SelfAttention, mu: ParticleMeasure, radius: float, *, steps: int
) -> tuple[ParticleMeasure, LocalLipschitz]:
    """Projected ascent of ‖Df(X)‖ over tokens in B_R, at uniform weights.

    A step that does not climb is taken back and halved, so that the answer is never
    below the start. It is a lower bound of the supremum and nothing more;
    `lipschitz.worst_case` searches over weights too, for the Wasserstein constant.

    Args:
        F: the layer.
        mu: uniform measure of a sequence in B_R. Each of a batch climbs by itself.
        radius: R.
        steps: norms to compute at most, for each.

    Returns:
        The best sequence and its constant.
    """
    best = _constant(F, mu)
    value, length = best.value, torch.full_like(best.value, 0.5)
    direction = _gradient(F, mu, best)
    for _ in range(steps):
        rising = (length >= _SMALLEST_STEP) & direction.isfinite().all(-1).all(-1)
        if not bool(rising.any()):
            break
        ahead = mu.points + (length * radius)[..., None, None] * direction
        points = torch.where(rising[..., None, None], ahead, mu.points)
        norms = torch.linalg.vector_norm(points, dim=-1, keepdim=True)
        moved = mu.replace(points * (radius / norms.clamp_min(radius)))
        constant = _constant(F, moved)
        climbed = rising & (constant.value > value) & constant.converged
        if bool(climbed.any()):
            those = climbed[..., None, None]
            mu = mu.replace(torch.where(those, moved.points, mu.points))
            direction = torch.where(those, _gradient(F, moved, constant), direction)
            value = torch.where(climbed, constant.value, value)
        length = torch.where(climbed, (2 * length).clamp_max(1.0), length / 2)
    return mu, _constant(F, mu)


def _constant(F: SelfAttention, mu: ParticleMeasure) -> LocalLipschitz:
    return local_lipschitz(F, mu, geometry="euclidean", strict=False)


@torch.enable_grad()
def _gradient(F: SelfAttention, mu: ParticleMeasure, constant: LocalLipschitz) -> Tensor:
    """Gradients of the norms, scaled so that the token that moves most moves by one."""
    points = mu.points.clone().requires_grad_()
    value = recorded_value(F, mu.replace(points), constant)
    (gradient,) = torch.autograd.grad(value.sum(), points)
    most = torch.linalg.vector_norm(gradient, dim=-1).amax(-1)
    return gradient / most[..., None, None]


def _order_found(F: SelfAttention, radius: float, p: float) -> float:
    """The constant of order p at the measure that is to reach the bound; plain only."""
    if F.causal:
        return math.nan
    eye = torch.eye(F.parameters.dim, dtype=torch.float64)
    if p == math.inf and len(eye) > 1:
        # Two keys of equal mass, and a light query across: reached exactly.
        points = radius * torch.stack([eye[0], -eye[0], eye[1]])
        logs = torch.tensor([0.0, 0.0, -30.0], dtype=torch.float64).log_softmax(-1)
        return float(local_order(F, ParticleMeasure(points, log_weights=logs), p=p).lower)
    ratio = bounds.two_dirac_best_log_ratio(1.0, radius, p=p)
    # p = 1: the supremum is a limit, and a derivative of e⁻¹⁸ still has half its digits.
    ratio = max(ratio, -18.0 - 2 * radius**2)
    if ratio == math.inf:
        ratio = 0.0
    return float(local_order(F, sampling.two_diracs(radius, ratio, eye[0]), p=p).lower)


def _with_c(ds: xr.Dataset) -> xr.Dataset:
    return ds.assign(c=("case", ds.radius.values**2, {"long_name": r"$c = \|A\|R^2$"}))


_NEAR = 1e-9  # up to this distance from 1 the axis of the ratios is linear, then logarithmic


def ratios(causal: bool) -> Callable[..., Axes]:
    """The figure of the plain or the masked cases."""
    upper = bounds.masked_mean_field if causal else bounds.mean_field
    lower = bounds.masked_two_dirac_lower if causal else bounds.two_dirac_lower
    # What is found at finitely many scales of position may be below this.
    below = "limit of interleaved Diracs, at least" if causal else "lower bound of two Diracs"

    @figure("found/two_dirac_lower", "found_converged")
    def draw(ds: xr.Dataset, *, ax: Axes) -> Axes:
        rows = best(_with_c(select(ds, causal=causal)), "found", over="radius")
        around = (lambda r: np.arcsinh((r - 1) / _NEAR), lambda u: 1 + _NEAR * np.sinh(u))
        ax.set_yscale("function", functions=around)
        ratio = lambda c: upper(1.0, 1.0, np.sqrt(c)) / lower(1.0, np.sqrt(c))  # noqa: E731
        formula(ax, ratio, rows.c, "--", color="tab:orange", label="upper bound", linewidth=1.4)
        style: Any = {"color": "tab:blue", "label": "found", "flag": "found_converged"}
        curve(ax, rows, "c", "found/two_dirac_lower", "o", **style)
        ax.axhline(1.0, color="tab:green", linestyle=":", label=below, gid=FORMULA)
        ends = ax.get_ylim()
        ticks = {1 + s * 10.0**k: f"$1 {sign} 10^{{{k}}}$"
                 for s, sign in ((1, "+"), (-1, "-")) for k in range(0, -9, -2)}  # fmt: skip
        ax.set_yticks([1.0, *ticks], ["1", *ticks.values()])
        ax.set_ylim(ends)
        ax.set(xlabel=rows.c.long_name, ylabel=f"over the {below}")
        ax.set_title(f"Bounds and what is found, {kind(causal)}")
        return ax

    draw.__doc__ = (
        f"Upper bound and largest constant found, {kind(causal)}, over the {below}, against "
        "‖A‖R². The axis is logarithmic in the distance from 1, so that 5e-8 can be seen."
    )
    return draw


GAP_OF_TOKENS = Chart(
    "Upper bounds for n uniform tokens over the largest constant found, against c = R².",
    "c",
    [
        Curve(
            "tokens_upper/tokens_found",
            "n = {n_atoms}",
            rows=lambda ds: best(ds, "tokens_found", over="radius"),
            flag="tokens_converged",
        ),
        Curve(
            "theorem_3_3/tokens_found",
            fmt="o--",
            rows=lambda ds: best(ds, "tokens_found", over="radius"),
            linewidth=0.9,
            markersize=2.5,
        ),
        Key("this package", "-"),
        Key("[CAP24] Thm 3.3", "--", linewidth=0.9),
        Formula(lambda c, at: 1.0, fmt="k-", once=True, linewidth=0.8),
    ],
    f"Upper bounds for n uniform tokens over the largest found ({kind(False)})",
    by="n_atoms",
    rows=lambda ds: _with_c(select(ds, causal=False)),
    log="y",
    ylabel="upper bound / largest found",
)

_ORDER: Any = {"dims": ("order",)}
EXPERIMENT = Experiment(
    measure,
    Settings(),
    [
        *LocalLipschitz.columns("found", words="largest local constant found"),
        Variable(
            "two_dirac_lower", "what two Diracs reach at least (masked: interleaved, a limit)"
        ),
        Variable("upper", "upper bound, this package"),
        Variable("theorem_3_5", "upper bound, Theorem 3.5 (NaN where masked)"),
        Variable("extremality", "largest constant found over the best of two Diracs (plain)"),
        Variable("ascents", "starts of the search", dtype="int64"),
        Variable("tokens_found", "largest Euclidean constant found on n tokens"),
        Variable("tokens_converged", "whether it converged", dtype="bool"),
        Variable("tokens_upper", "upper bound for n tokens, this package"),
        Variable("theorem_3_3", "upper bound for n tokens, Theorem 3.3"),
        Variable(
            "order_found", "constant of order p at the measure that is to reach it", **_ORDER
        ),
        Variable("order_upper", "upper bound of order p, this package", **_ORDER),
    ],
    coords={Variable("order", "order p of the distance", symbol="p"): ORDERS},
    figures={"gap": ratios(False), "gap-masked": ratios(True), "gap-tokens": GAP_OF_TOKENS},
)
