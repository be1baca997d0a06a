"""Distances between the times of a flow."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from meanfield.checks import count, to_host
from meanfield.dynamics.clocks import TIME
from meanfield.measures import ParticleMeasure
from meanfield.results import Variable
from meanfield.results.labels import dataset
from meanfield.results.shapes import as_dataset
from meanfield.transport import TransportResult, solve_conditional_w2, solve_w2

_ENDS = ("value", "lower", "upper")


def measure_at(ds: xr.Dataset, index: int) -> ParticleMeasure:
    """The measure of a flow at the index-th of its times.

    Args:
        ds: of `flow`, with its points.
        index: of the time; negative ones count from the end.
    """
    last = check_flow(ds).sizes["time"] - 1
    index = count(index, "index", least=-last - 1)
    if index > last:
        raise IndexError(
            f"index: expected one of the {last + 1} times, at most {last}, got {index}"
        )

    def tensor(name: str) -> Tensor:
        return torch.tensor(ds[name].values)

    positions = tensor("positions") if "positions" in ds else None
    points = torch.tensor(ds["points"].values[index])
    return ParticleMeasure(points, log_weights=tensor("log_weights"), positions=positions)


def check_flow(ds: object) -> xr.Dataset:
    """The Dataset of a flow with its points; anything else is refused."""
    flow = as_dataset(ds)
    if "points" not in flow or "time" not in flow:
        raise ValueError(
            "ds: expected the Dataset of a flow with its points, keep_points=True, got one with "
            f"{list(flow.variables)}"
        )
    return flow


def displacements(
    ds: xr.Dataset,
    to: str | ParticleMeasure = "start",
    *,
    conditional: bool = False,
    **solver: Any,
) -> xr.Dataset:
    """W₂ from each time of a flow to its start, to the time before, or to a measure.

    Beside it, for the flow's own times, how far the particles themselves have gone,
    (Σᵢ aᵢ|xᵢ(t) − xᵢ(s)|²)^½: the identity coupling. It is optimal where the two agree; their
    difference is what a relabelling of the particles would save.

    Args:
        ds: of `flow`, with its points.
        to: "start", "previous" (0 at the first time), or a measure.
        conditional: conditional W₂ of positioned measures, in place of W₂.
        solver: settings of `transport.solve_w2`.

    Returns:
        Dataset along `time` (and `case`): `w2` with `w2_lower` and `w2_upper`, and `identity`,
        NaN for a measure.
    """
    if not isinstance(to, ParticleMeasure) and to not in ("start", "previous"):
        raise ValueError(f"to: expected 'start', 'previous' or a measure, got {to!r}")
    along = [measure_at(ds, k) for k in range(check_flow(ds).sizes["time"])]
    if isinstance(to, ParticleMeasure):
        others, words = [to] * len(along), "to μ"
        own = [torch.full(mu.batch_shape, torch.nan) for mu in along]
    else:
        others = [along[0], *(along[:-1] if to == "previous" else along[:1] * (len(along) - 1))]
        words = "to the start" if to == "start" else "to the time before"
        own = [
            (mu.weights * (mu.points - nu.points).square().sum(-1)).sum(-1).sqrt()
            for mu, nu in zip(along, others, strict=True)
        ]
    solve = solve_conditional_w2 if conditional else solve_w2
    rows = [
        solve(mu, nu, **solver).values("w2", *_ENDS) for mu, nu in zip(along, others, strict=True)
    ]
    dims = ("time", "case") if along[0].batch_shape else ("time",)
    words = f"{'conditional ' if conditional else ''}W₂ {words}"
    text = "root mean square of the particles' own displacements"
    variables = [
        *TransportResult.columns("w2", *_ENDS, words=words, dims=dims),
        Variable("identity", text, dims=dims),
    ]
    values = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    values["identity"] = to_host(torch.stack(own))
    return dataset(variables, values, coords={"time": (TIME, ds["time"].values)})
