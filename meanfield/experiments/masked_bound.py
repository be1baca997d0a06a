"""Can the mean-field bound of plain attention hold for masked attention?

No: at A = 0 masked attention is a running mean, whose norm tends to Hardy's 2 and not to 1. Over
n and the size c = ‖A‖R² this sweep has the largest local constant found on masked sequences and
weighted masked clouds, beside the unmasked constants, ‖V‖(1+3c)e^{2c} ([CAP24] Theorem 3.5) and
the sharp one, and the masked bounds (this package): for all measures, and for n uniform tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import xarray as xr

from meanfield import bounds, sampling
from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.experiments.experiment import Experiment
from meanfield.experiments.settings import setting
from meanfield.figures.canvas import FORMULA, figure, ticks_at
from meanfield.figures.curves import curve
from meanfield.figures.selection import by_level
from meanfield.lipschitz import LocalLipschitz, local_lipschitz
from meanfield.measures import ParticleMeasure
from meanfield.results import Variable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["EXPERIMENT", "Settings"]


@dataclass(frozen=True)
class Settings:
    """What the sweep runs over."""

    n_tokens: tuple[int, ...] = setting(
        (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024), "numbers of atoms", quick=(2, 8, 32, 128)
    )
    sizes: tuple[float, ...] = setting(
        (0.0, 0.01, 0.05, 0.1, 0.2, 0.5), "c = ‖A‖R², with R = 1 and V = I", quick=(0.0, 0.05, 0.2)
    )
    clouds: int = setting(10, "random weighted clouds per case", quick=3)
    dim: int = setting(2, "dimension d")
    seed: int = setting(0, "seed of the clouds")


_VARIABLES = (
    *LocalLipschitz.columns("largest", words="largest local constant found, masked"),
    Variable("unmasked_bound", "the constant of Theorem 3.5, plain attention"),
    Variable("unmasked_sharp", "the sharp constant of plain attention"),
    Variable("hardy_bound", "upper bound, masked, all measures"),
    Variable("tokens_bound", "upper bound, masked, n uniform tokens"),
)
_PARAMETERS = (
    Variable("n_tokens", "number of atoms n"),
    Variable("size", "c = ‖A‖R²"),
)


def largest_masked(
    n_tokens: int, size: float, *, clouds: int, dim: int, generator: torch.Generator
) -> dict[str, Any]:
    """The largest local constant of masked attention found at n atoms in the unit ball."""
    draw = torch.randn(dim, dim, generator=generator, dtype=torch.float64)
    A = size * draw / torch.linalg.matrix_norm(draw, 2)
    parameters = AttentionParameters.from_bilinear(A, torch.eye(dim, dtype=torch.float64))
    F = SelfAttention(parameters, causal=True)
    points = sampling.ball(n_tokens, dim, batch_shape=(clouds + 1,), generator=generator)
    logs = torch.randn(clouds + 1, n_tokens, generator=generator, dtype=torch.float64)
    logs[0] = 0.0  # the uniform sequence, which tends to Hardy's constant at A = 0
    positions = torch.arange(1, n_tokens + 1, dtype=torch.float64) / n_tokens
    mu = ParticleMeasure(points, log_weights=logs.log_softmax(-1), positions=positions)
    found = local_lipschitz(F, mu, rtol=1e-3, strict=False)
    k = int(found.value.argmax())
    row = {name: column[k] for name, column in found.values("largest").items()}
    return {
        **row,
        "largest_converged": bool(found.converged.all()),
        "unmasked_bound": bounds.theorem_3_5(size, 1.0, 1.0),
        "unmasked_sharp": bounds.mean_field(size, 1.0, 1.0),
        "hardy_bound": bounds.masked_mean_field(size, 1.0, 1.0),
        "tokens_bound": bounds.tokens(size, 1.0, 1.0, n_tokens, causal=True),
    }


@figure("largest", "largest_converged")
def hardy(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Masked constants against n: above the bound of plain attention, below the masked one."""
    ax.set(xscale="log", yscale="log", xlabel="number of atoms n", ylabel="local constant, masked")
    for colour, size, rows in by_level(ds, "size"):
        label = rf"$\|A\|R^2$ = {size:g}"
        curve(ax, rows, "n_tokens", "largest", color=colour, label=label)
        ax.axhline(bounds.theorem_3_5(size, 1, 1), color=colour, linestyle="-.", gid=FORMULA)
        # That for n uniform tokens would not hold for the weighted clouds.
        style: Any = {"color": colour, "linewidth": 0.9, "gid": FORMULA}
        ax.axhline(bounds.masked_mean_field(size, 1, 1), linestyle="--", **style)
    ax.plot([], [], "k-.", label="upper bound of plain attention, Thm 3.5")
    ax.plot([], [], "k--", linewidth=0.9, label="upper bound, masked: this package")
    ticks_at(ax, ds.n_tokens)
    ax.set_title("Masked attention beside the bound of plain attention")
    return ax


EXPERIMENT = Experiment(
    largest_masked,
    Settings(),
    grid=lambda s: {"n_tokens": s.n_tokens, "size": s.sizes},
    variables=_VARIABLES,
    parameters=_PARAMETERS,
    figures={"hardy": hardy},
)
