"""Stability of a flow: local constants, exponents, and Grönwall's bound from the velocities."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import xarray as xr

from meanfield.checks import to_host, without_autocast
from meanfield.dynamics.constraints import Velocity, constraint_at
from meanfield.dynamics.flow_map import FlowMap
from meanfield.dynamics.integrators import Adaptive
from meanfield.dynamics.trajectories import TIME, checked_times
from meanfield.habits import with_hints
from meanfield.layers.composition import identity_at
from meanfield.lipschitz import one_sided
from meanfield.lipschitz.constant import LocalLipschitz, constant_of
from meanfield.maps import Linearisation
from meanfield.measures import MeasureMap, ParticleMeasure, check_single
from meanfield.results import Variable
from meanfield.results.labels import dataset
from meanfield.results.provenance import provenance

# Up to this many coordinates a derivative is kept as a matrix: 512² numbers are 2 MB.
_DENSE = 512
# Singular values below this share of the largest are rounding: seen up to 1e-7 in float32.
_LOST = {torch.float64: 1e-12, torch.float32: 1e-5}
# Fields of the local constants that are kept.
_CONSTANT = ("value", "particle", "splitting", "upper", "miss", "converged")
_RATE = ("value", "upper", "miss", "converged")


@with_hints
@torch.no_grad()
@without_autocast
def stability(
    F: MeasureMap,
    mu: ParticleMeasure,
    times: Any,
    *,
    method: str | Adaptive = "dopri5",
    step: float | None = None,
    constraint: str | None = None,
) -> xr.Dataset:
    """Local constants of the flow maps Φ_t at μ, their exponents, and Grönwall's bound.

    With Φ_t the flow from the first time to t and D = diag(aᵢ): ‖D^½ DΦ_t D^−½‖ when atoms move
    as a whole, maxᵢ ‖D_xΦ_t(xᵢ)‖ when one splits, and the larger of the two, the local Lipschitz
    constant in W₂. The derivatives are those of the scheme, multiplied along the flow. Grönwall's
    inequality bounds the constant by e^{∫ω}, with ω(t) the one-sided constant of the velocity at
    μ_t (`lipschitz.one_sided`), below 0 where the flow contracts; the integral is by the
    trapezoidal rule over the times.

    Args:
        F: as in `flow`.
        mu: one measure, without batch axes.
        times: increasing, the first is the start.
        method: as in `flow`.
        step: as in `flow`.
        constraint: as in `flow`.

    Returns:
        Dataset along `time`: `constant` and, as fields of `lipschitz.LocalLipschitz`,
        `constant_particle`, `constant_splitting`, `constant_upper`, `constant_miss` and
        `constant_converged`; ω as `rate` with its own upper end, miss and converged; `growth`
        e^{∫ω}. While n·d ≤ 512 also `exponents` (time, mode): (1/(t − t₀)) log σₖ of
        all singular values σₖ of D^½DΦD^−½, decreasing; NaN at the start and where σₖ is below
        1e-12 of the largest, 1e-5 in float32, which is rounding; below 1e-10 they have errors of
        the steps of the flow (4 % were seen), unless its tolerances are smaller than the default.

    Raises:
        ValueError: a batch, or arguments that `flow` refuses.

    Example:
        >>> from meanfield import AttentionParameters, SelfAttention
        >>> F = SelfAttention(AttentionParameters.from_bilinear([[0.0]], [[1.0]]))
        >>> stability(F, ParticleMeasure([[1.0], [3.0]]), [0.0, 1.0]).constant.values
        array([1.    , 2.71828...])
    """
    check_single(mu)
    clock = checked_times(times)
    small = mu.n_particles * mu.dim <= _DENSE
    measure, whole, rows = mu, identity_at(mu), []
    for k, t in enumerate(clock):
        if k:
            span = float(t - clock[k - 1])
            Phi = FlowMap(F, span, method=method, step=step, constraint=constraint)
            moved, measure = Phi.followed(measure, "wasserstein")
            whole = moved @ whole
            if small:  # as matrices: later products then cost no evaluations of F
                whole = Linearisation(whole.atoms.assembled(), whole.field.assembled())
        velocity = Velocity(F, constraint_at(constraint, measure))
        found = constant_of(whole, strict=False).values("constant", *_CONSTANT)
        speed = one_sided(velocity, measure, strict=False)
        rows.append(found | speed.values("rate", *_RATE))
        if small:
            sigma = torch.linalg.svdvals(whole.atoms.to_dense())
            seen = (sigma > _LOST[mu.dtype] * sigma[0]) & (k > 0)
            logs = torch.where(seen, sigma.log() / float(t - clock[0]), torch.nan)
            rows[-1]["exponents"] = to_host(logs)
    variables = [
        *LocalLipschitz.columns(
            "constant", *_CONSTANT, words="local W₂ constant of the flow map", dims=("time",)
        ),
        *LocalLipschitz.columns(
            "rate",
            *_RATE,
            words="one-sided constant of the velocity",
            dims=("time",),
        ),
    ]
    if small:
        text = "(1/t) log of the singular values of the flow map's derivative"
        variables.append(Variable("exponents", text, dims=("time", "mode")))
    values = {v.name: np.stack([row[v.name] for row in rows]) for v in variables}
    rates = values["rate"]
    areas = (rates[1:] + rates[:-1]) / 2 * np.diff(clock)
    with np.errstate(over="ignore"):  # infinite beyond the number range
        values["growth"] = np.exp(np.concatenate([[0.0], np.cumsum(areas)]))
    variables.append(Variable("growth", "e^{∫ rate}", dims=("time",)))
    spec = {"method": str(method), "step": step, "constraint": constraint}
    record = provenance(spec, dtype=mu.dtype, device=mu.device)
    return dataset(variables, values, coords={"time": (TIME, clock)}, attrs={"provenance": record})
