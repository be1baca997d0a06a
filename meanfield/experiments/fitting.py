"""Power laws against n, one row per curve, put into the Dataset that they are fitted to."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from meanfield.results import fit_power

# Exponent of each law; None is fitted. [CAP24] draw n^1/4 and n^1/2.
LAWS: Mapping[str, float | None] = {"free": None, "1/4": 0.25, "1/2": 0.5}
_LEAST = 5  # different n that a law is fitted to
_BEND = 0.1  # two exponents that differ by less are one


def with_laws(
    ds: xr.Dataset,
    quantities: Sequence[str],
    *,
    by: Sequence[str],
    along: str | None = None,
    groups: str | None = None,
) -> xr.Dataset:
    """The Dataset with power laws of quantities against n; as it is if there is no curve.

    Points whose ``..._converged`` is false and NaN are left out, and curves with fewer than five
    values of n at the others.

    Args:
        ds: with ``n_tokens`` along `case`.
        quantities: the variables to fit.
        by: parameters; each combination of their values has a curve of its own.
        along: a dimension, each of whose places has one.
        groups: a dimension whose places are the groups of the jackknife.
    """
    curves = []
    for place in itertools.product(*(np.unique(ds[name]).tolist() for name in by)):
        labels: dict[str, Any] = dict(zip(by, place, strict=True))
        keep = np.all([ds[name].values == value for name, value in labels.items()], axis=0)
        rows = ds.isel(case=np.flatnonzero(keep))
        for quantity in quantities:
            for at in rows[along].values.tolist() if along else [None]:
                here = {along: at} if along else {}
                curve = _curve(rows.sel(here), quantity, groups)
                if curve is not None:
                    curves.append(({"quantity": quantity, **labels, **here}, *curve))
    return ds.merge(fit_laws(curves)) if curves else ds


def _curve(rows: xr.Dataset, quantity: str, groups: str | None) -> tuple[Any, ...] | None:
    """n, values, groups and whether each has converged; None if there is nothing to fit."""
    y, flag = rows[quantity], f"{quantity}_converged"
    good = (rows[flag] if flag in rows else y.notnull()).astype(bool)
    n, y, good = xr.broadcast(rows.n_tokens, y, good)
    if len(np.unique(n.values[good & y.notnull()])) < _LEAST:
        return None
    group = xr.broadcast(y, rows[groups])[1].values if groups else None
    return n.values, y.values, group, good.values


def fit_laws(curves: Sequence[tuple[Mapping[str, Any], Any, Any, Any, Any]]) -> xr.Dataset:
    """Fit every law of `LAWS` to every curve.

    Args:
        curves: (labels, n, y, groups, converged) each; labels are the coordinates of the curve,
            the same names in each; groups are left out as a whole, None for points of their own;
            points that have not converged are excluded, None if all have.

    Returns:
        Dataset with the dimension `fit`, one entry per curve and law: the labels, `law`, and the
        variables fit_exponent, fit_constant with intervals, fit_rms, fit_n_points,
        fit_n_excluded; fit_exponent_small, fit_exponent_large of the smaller and the larger half
        of n, and fit_holds: whether they differ by less than 0.1, or, of groups, their intervals
        meet.
    """
    fits = [
        fit_power(n, y, exponent=exponent, groups=groups, converged=converged)
        .drop_vars("n_groups")
        .assign(halves(n, y, groups, converged))
        .assign_coords({name: ((), value, {"long_name": name}) for name, value in place.items()})
        for labels, n, y, groups, converged in curves
        for law, exponent in LAWS.items()
        for place in [{**labels, "law": law}]
    ]
    found = xr.concat(fits, "fit", combine_attrs="drop_conflicts").drop_attrs(deep=False)
    for variable in found.data_vars.values():
        words = str(variable.attrs["long_name"])
        words = words.replace("y ≈ C xᵖ", "C nᵖ").replace("C xᵖ", "C nᵖ")
        variable.attrs["long_name"] = words.replace("jackknife", "95 % jackknife")
    texts = {name: of.astype(object) for name, of in found.coords.items() if of.dtype.kind == "U"}
    found = found.assign_coords(texts)  # texts of one length have no place in a file
    return found.rename({str(name): f"fit_{name}" for name in found.variables})


def halves(n: Any, y: Any, groups: Any, converged: Any) -> dict[str, Any]:
    """The exponents of the smaller and of the larger half of n, and whether they are one.

    A power law may be fitted to anything; where the two differ it says nothing of the curve.
    """
    n, y = np.asarray(n, float), np.asarray(y, float)
    good = np.isfinite(y) & (True if converged is None else np.asarray(converged, bool))
    middle = np.median(np.unique(n[good]))
    ends = [
        fit_power(n, y, groups=groups, converged=good & half)
        for half in (n <= middle, n >= middle)
    ]
    small, large = ends
    gap = abs(float(large.exponent - small.exponent))
    # Without groups an interval is of the points about the law, and wide because that bends.
    width = 0.0 if groups is None else sum(float(o.exponent_upper - o.exponent) for o in ends)
    words = "exponent of the {} half of n alone"
    return {
        "exponent_small": small.exponent.assign_attrs(long_name=words.format("smaller")),
        "exponent_large": large.exponent.assign_attrs(long_name=words.format("larger")),
        "holds": ((), gap <= max(_BEND, width), {"long_name": "whether the two agree"}),
    }
