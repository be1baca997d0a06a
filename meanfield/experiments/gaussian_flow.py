"""Does a Gaussian stay one, and does its covariance follow its equation?

For μ = N(m, Σ) softmax attention is affine, Γ(x) = V(m + ΣAx), so the flow stays Gaussian with
Σ̇ = VΣAΣ + (VΣAΣ)ᵀ ([SABP22]); so is L2 attention, with (Σ⁻¹ + KᵀK)⁻¹ in place of the first Σ. n
samples follow it with an error of order n^{−1/2}, as long as ‖A‖‖Σ‖ is of order 1: beyond it
e^{⟨Ax,y⟩} is decided by the few largest samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr

from meanfield import AttentionParameters, ParticleMeasure, SelfAttention, dynamics
from meanfield.attention.kernels import dot_product, l2
from meanfield.checks import to_host
from meanfield.dynamics import reduced
from meanfield.experiments.experiment import Experiment
from meanfield.experiments.settings import derived, over, setting
from meanfield.figures import animate_particles
from meanfield.figures.canvas import colours, figure
from meanfield.figures.curves import curve, formula
from meanfield.figures.selection import levels, select
from meanfield.results import Variable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["EXPERIMENT", "Settings"]


_A = ((0.5, 0.3, 0.0), (-0.3, -0.4, 0.2), (0.1, 0.0, -0.8))
_V = ((0.7, 0.0, 0.3), (0.0, 0.9, -0.2), (-0.3, 0.2, 0.8))


@dataclass(frozen=True)
class Settings:
    """Of the kernels "softmax" has the weights e^{⟨Ax,y⟩} and "l2" e^{−½|Ax−y|²}."""

    kernels: tuple[str, ...] = over("kernel", ("softmax", "l2"), "which attention")
    n_particles: tuple[int, ...] = over(
        "n_particles", (30, 100, 300, 1000, 3000), "number of samples n", quick=(50, 500)
    )
    repetitions: int = over("repetition", 8, "number of the draw", quick=2)
    last: float = setting(2.0, "last time")
    n_times: int = setting(21, "number of times that are kept", quick=6)
    std: float = setting(0.5, "σ of the start N(0, σ²I)")
    step: float = setting(0.1, "step of RK4")
    seed: int = setting(0, "seed of the draws")
    n_shown: int = derived(0, "samples that are kept, for the animation")

    def times(self) -> np.ndarray:
        """The times that are kept."""
        return np.linspace(0, self.last, self.n_times)


def measure(
    s: Settings, kernel: str, n_particles: int, repetition: int, generator: torch.Generator
) -> dict[str, Any]:
    """One cloud of samples of N(0, σ²I) beside the equation."""
    del repetition  # the generator of the case depends on it
    A, V = (torch.tensor(matrix, dtype=torch.float64) for matrix in (_A, _V))
    eye, is_l2 = torch.eye(3, dtype=torch.float64), kernel == "l2"
    parameters = AttentionParameters(A, eye, V, scale=0.5 if is_l2 else 1.0)
    F = SelfAttention(parameters, kernel=l2 if is_l2 else dot_product)
    x = s.std * torch.randn(n_particles, 3, generator=generator, dtype=torch.float64)
    ds = dynamics.flow(F, ParticleMeasure(x), s.times(), method="rk4", step=s.step)
    found = torch.stack(
        [dynamics.covariance(dynamics.measure_at(ds, k)) for k in range(s.n_times)]
    )
    _, expected = reduced.gaussian_moments(
        A, V, torch.zeros_like(eye[0]), s.std**2 * eye, s.times(), key=eye if is_l2 else None
    )
    error = torch.linalg.matrix_norm(found - expected) / torch.linalg.matrix_norm(expected)
    return {
        "eigenvalues": to_host(torch.linalg.eigvalsh(found)),
        "expected": to_host(torch.linalg.eigvalsh(expected)),
        "error": to_host(error),
        "points": ds.points.values[:, : s.n_shown],
    }


@figure("eigenvalues", "expected")
def covariance(ds: xr.Dataset, *, ax: Axes, kernel: str = "softmax") -> Axes:
    """Eigenvalues of the covariance against time, samples beside the equation.

    Args:
        ds: of this experiment.
        ax: where to draw; a new figure if None.
        kernel: "softmax" or "l2".
    """
    ds = select(ds, kernel=kernel)
    numbers = levels(ds, "n_particles")
    for k in range(ds.sizes["feature"]):
        label = "covariance equation" if k == 0 else None
        ax.plot(ds.time, ds.expected.isel(case=0, feature=k), "k-", label=label)
    ends = zip(("tab:orange", "tab:blue"), dict.fromkeys((numbers[0], numbers[-1])), strict=False)
    for colour, n in ends:
        rows = select(ds, n_particles=n)
        for k in range(ds.sizes["feature"]):
            label = f"{n} samples" if k == 0 else None
            values = rows.eigenvalues.isel(feature=k)
            ax.plot(ds.time, values.mean("case"), "o", color=colour, markersize=3, label=label)
            low, high = values.min("case"), values.max("case")
            ax.fill_between(ds.time, low, high, color=colour, alpha=0.2, linewidth=0)
    ax.set(yscale="log", xlabel="time t", ylabel="eigenvalues of the covariance")
    ax.set_title(f"Covariance of a Gaussian: {kernel} (band: smallest to largest draw)")
    return ax


@figure("error")
def covariance_error(ds: xr.Dataset, *, ax: Axes) -> Axes:
    """Error of the covariance against the number of samples, beside n^{−1/2}."""
    steps = [0, ds.sizes["time"] // 2, ds.sizes["time"] - 1]
    for kernel, line in (("softmax", "o-"), ("l2", "v--")):
        if kernel not in ds.kernel.values:
            continue
        rows = select(ds, kernel=kernel)[["error"]].drop_vars("kernel")
        middle = rows.groupby("n_particles").median()
        for colour, k in zip(colours(3), steps, strict=True):
            label = f"{kernel}, t = {float(ds.time[k]):g}"
            at = middle.isel(time=k)
            curve(ax, at, "n_particles", "error", line, color=colour, label=label)
    ax.set(xscale="log", yscale="log", xlabel="samples n", ylabel="relative error, median")
    n = ds.n_particles
    formula(ax, lambda x: 2 / np.sqrt(x), n, linewidth=1.4, label=r"$\propto n^{-1/2}$")
    ax.set_title("Distance of samples from the covariance equation")
    return ax


EXPERIMENT = Experiment(
    measure,
    Settings(),
    [
        Variable("eigenvalues", "eigenvalues of the covariance", dims=("time", "feature")),
        Variable("expected", "eigenvalues of the covariance equation", dims=("time", "feature")),
        Variable("points", "some samples", dims=("time", "particle", "feature")),
        Variable("error", "|covariance − its equation|, over the equation's", dims=("time",)),
    ],
    resolve=lambda s: replace(s, n_shown=min(s.n_particles)),
    coords={
        Variable("time", "time t", symbol="t"): Settings.times,
        Variable("particle", "sample"): lambda s: range(s.n_shown),
        Variable("feature", "coordinate"): range(3),
    },
    figures={
        "covariance": covariance,
        "covariance-l2": partial(covariance, kernel="l2"),
        "error": covariance_error,
    },
    animations={kernel: partial(animate_particles, kernel=kernel) for kernel in ("softmax", "l2")},
)
