"""What a whole flow did: distances between its times, the length and straightness of paths."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from meanfield.checks import count, describe
from meanfield.measures import ParticleMeasure
from meanfield.results import Variable
from meanfield.results.labels import dataset
from meanfield.transport import solve_conditional_w2, solve_w2

__all__ = ["displacements", "measure_at", "path_lengths"]


def measure_at(ds: xr.Dataset, index: int) -> ParticleMeasure:
    """The measure of a flow at the index-th of its times.

    Args:
        ds: of `flow`, with its points.
        index: of the time; negative ones count from the end.
    """
    if not isinstance(ds, xr.Dataset) or "points" not in ds:
        raise ValueError(
            f"ds: expected a flow with its points, got {describe(ds)} without them; run it with "
            "keep_points=True"
        )
    last = ds.sizes["time"] - 1
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
    solve = solve_conditional_w2 if conditional else solve_w2
    rows = []
    for k in range(ds.sizes["time"]):
        mu = measure_at(ds, k)
        nu = to
        if not isinstance(nu, ParticleMeasure):
            nu = measure_at(ds, 0 if nu == "start" else max(k - 1, 0))
        found = solve(mu, nu, **solver)
        own = _identity(mu, nu) if isinstance(to, str) else torch.full_like(found.value, torch.nan)
        rows.append([t.numpy() for t in (found.value, found.lower, found.upper, own)])
    dims = ("time", *(("case",) if "case" in ds["points"].dims else ()))
    kind = "conditional W₂" if conditional else "W₂"
    target = f"the {to}" if to == "start" else "the time before" if to == "previous" else "μ"
    variables = [
        Variable("w2", f"{kind} to {target}", dims=dims),
        Variable("w2_lower", f"{kind} to {target} is at least this", dims=dims),
        Variable("w2_upper", f"{kind} to {target} is at most this", dims=dims),
        Variable("identity", "root mean square of the particles' own displacements", dims=dims),
    ]
    values = {v.name: np.stack([row[i] for row in rows]) for i, v in enumerate(variables)}
    time = Variable("time", "time, or depth in layers", dims=("time",))
    return dataset(variables, values, coords={"time": (time, ds["time"].values)})


def path_lengths(ds: xr.Dataset) -> xr.Dataset:
    """Length and straightness of each particle's path through the times of a flow.

    Lᵢ = Σₖ |xᵢ(tₖ₊₁) − xᵢ(tₖ)| and |xᵢ(T) − xᵢ(0)|/Lᵢ, which is 1 for a straight path, and for a
    particle that does not move. The times are as fine as the Dataset has them: L is a lower bound.

    Returns:
        Dataset along `particle` (and `case`): `arc_length`, `straightness`.
    """
    points = ds["points"].values
    steps = np.linalg.norm(np.diff(points, axis=0), axis=-1)
    arc = steps.sum(0)
    chord = np.linalg.norm(points[-1] - points[0], axis=-1)
    straight = np.divide(chord, arc, out=np.ones_like(arc), where=arc > 0)
    dims = tuple(str(d) for d in ds["points"].dims[1:-1])
    variables = [
        Variable("arc_length", "length of the path", dims=dims),
        Variable("straightness", "distance of the ends over the length of the path", dims=dims),
    ]
    return dataset(variables, {"arc_length": arc, "straightness": straight})


def _identity(mu: ParticleMeasure, nu: ParticleMeasure) -> Tensor:
    squares = (mu.points - nu.points).square().sum(-1)
    return (mu.weights * squares).sum(-1).sqrt()
