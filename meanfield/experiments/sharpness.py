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

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, bounds, sampling
from meanfield.experiments.ascent import climb
from meanfield.experiments.experiment import Experiment
from meanfield.experiments.settings import over, setting
from meanfield.figures.canvas import kind
from meanfield.figures.charts import Chart, Curve, Formula, Key
from meanfield.figures.selection import best, select
from meanfield.lipschitz import LocalLipschitz, local_lipschitz, local_order, worst_case
from meanfield.results import Variable

__all__ = ["EXPERIMENT", "Settings"]

ORDERS = (1.0, 2.0, math.inf)

_WEIGHTS = 2401  # ratios of weights of the two Diracs, about the best one for large radii


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
    found = [climb(F, tokens, radius, steps=min(steps, 40))[1] for tokens in sequences]
    best = max(found, key=float)
    return {
        "tokens_found": float(best.value),
        "tokens_converged": bool(best.converged),
        "tokens_upper": bounds.tokens(1.0, 1.0, radius, n, causal=F.causal),
        "theorem_3_3": bounds.theorem_3_3(1.0, 1.0, radius, n),
    }


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


def _gaps(ds: xr.Dataset) -> xr.Dataset:
    """The best case of every radius, with how far the bounds are above what is known."""
    rows = best(ds, "found", over="radius")
    # The measure behind the lower bound exists, whether the search found it or not.
    known = np.maximum(rows.found, rows.two_dirac_lower)
    return rows.assign(
        upper_over_known=rows.upper / known - 1,
        upper_over_found=(rows.upper / rows.found - 1).where(rows.causal.astype(bool)),
        paper_over_known=rows.theorem_3_5 / known - 1,
    )


def _gap_of_paper(ds: xr.Dataset) -> str:
    """The label of the curve that leaves the figure."""
    last = _gaps(ds).isel(radius=-1)
    return f"[CAP24] Thm 3.5 (at c = {float(last.c):.3g}: {float(last.paper_over_known):,.0f})"


_ONE = Formula(lambda c, at: 1.0, fmt="k-", flat=True, once=True, linewidth=0.8)
GAP = Chart(
    "Upper bounds over the largest constant known, less 1, against c = R²: 0 would be sharp.",
    "c",
    [
        Curve(
            "upper_over_known",
            "{kind}: this package",
            rows=_gaps,
            of="upper/found|two_dirac_lower",
            flag="found_converged",
        ),
        Curve(
            "upper_over_found",
            "masked: the same over what the search found",
            "s:",
            rows=_gaps,
            of="upper/found",
            flag="",
            fillstyle="none",
        ),
        Curve(
            "paper_over_known",
            _gap_of_paper,
            "D-.",
            rows=_gaps,
            of="theorem_3_5/found|two_dirac_lower",
            color="tab:red",
        ),
    ],
    "How far upper bounds are above the largest constants known",
    by="causal",
    rows=_with_c,
    log="y",
    ylabel="upper bound / largest known − 1",
    ylim=(1e-11, 1e3),  # Theorem 3.5 leaves it, being e^c above
)


def _gaps_of_tokens(ds: xr.Dataset) -> xr.Dataset:
    rows = best(ds, "tokens_found", over="radius")
    found = rows.tokens_found
    return rows.assign(ratio=rows.tokens_upper / found, paper=rows.theorem_3_3 / found)


def gap_of_tokens(causal: bool) -> Chart:
    """The chart of the plain or the masked cases."""
    return Chart(
        "Upper bounds for n uniform tokens over the largest constant found, against c = R².",
        "c",
        [
            Curve(
                "ratio",
                "n = {n_atoms}",
                rows=_gaps_of_tokens,
                of="tokens_upper/tokens_found",
                flag="tokens_converged",
            ),
            Curve(
                "paper",
                fmt="o--",
                rows=_gaps_of_tokens,
                of="theorem_3_3/tokens_found",
                linewidth=0.9,
                markersize=2.5,
            ),
            Key("this package", "-"),
            Key("[CAP24] Thm 3.3", "--", linewidth=0.9),
            _ONE,
        ],
        f"Upper bounds for n uniform tokens over the largest found ({kind(causal)})",
        by="n_atoms",
        rows=lambda ds: _with_c(select(ds, causal=causal)),
        log="y",
        ylabel="upper bound / largest found",
    )


def _over_e_to_the_c(name: str, f: Any, fmt: str, colour: str, width: float) -> Formula:
    return Formula(lambda c, at: f(c) * np.exp(-c), name, fmt, color=colour, linewidth=width)


BALL_AND_SPHERE = Chart(
    "What a norm before attention buys: constants on the ball and along the sphere, over e^c.",
    "c",
    [
        # For small c the upper bounds are one, and the thin line lies on the thick one.
        _over_e_to_the_c(
            "ball: upper bound",
            lambda c: bounds.mean_field(c, 1.0, 1.0),
            "-",
            "tab:blue",
            2.6,
        ),
        _over_e_to_the_c(
            "ball: two Diracs", lambda c: bounds.two_dirac_lower(c, 1.0), "--", "tab:blue", 0.9
        ),
        _over_e_to_the_c(
            "sphere: upper bound",
            lambda c: bounds.sphere_mean_field(c, 1.0, 1.0),
            "-",
            "tab:green",
            0.9,
        ),
        _over_e_to_the_c(
            "sphere: two Diracs",
            lambda c: bounds.sphere_two_dirac_lower(c, 1.0),
            "--",
            "tab:green",
            0.9,
        ),
    ],
    "Attention of measures on a ball, and behind a normalisation",
    rows=lambda ds: _with_c(ds).assign(c=lambda ds: ds.c.clip(0.05)),
    log="xy",
    xlabel=r"$c = \|A\|R^2$",
    ylabel="constant over $e^c$",
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
    figures={
        "gap": GAP,
        "gap-tokens": gap_of_tokens(causal=False),
        "ball-and-sphere": BALL_AND_SPHERE,
    },
)
