"""Which cases of a Dataset a figure shows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xarray as xr

from meanfield.errors import NoCases
from meanfield.figures.canvas import colours, literal
from meanfield.results.cases import unless_nan
from meanfield.results.labels import told_apart


def select(ds: xr.Dataset, **wanted: Any) -> xr.Dataset:
    """The cases, or what else stands along a dimension, whose labels have these values.

    Raises:
        NoCases: there are none.
    """
    for name, value in wanted.items():
        values = ds[name].values
        same = values == value if unless_nan(value) is not None else values != values
        keep = np.flatnonzero(same)
        if not len(keep):
            asked = ", ".join(f"{name}={value}" for name, value in wanted.items())
            raise NoCases(f"the Dataset has no case with {asked}")
        ds = ds.isel({ds[name].dims[0]: keep})
    return ds


def attribute(ds: xr.Dataset, name: str) -> Any:
    """What the experiment has kept as an attribute of the Dataset.

    Raises:
        NoCases: it is not there.
    """
    if name not in ds.attrs:
        raise NoCases(
            f"the Dataset has no attribute {name!r}: it was dropped on the way (xarray keeps "
            "attributes with keep_attrs=True), or the run is older than the figure"
        )
    return ds.attrs[name]


def listed(values: np.ndarray) -> list[Any]:
    """The entries as Python has them; dates, which it would have as integers, as they are."""
    return list(values) if values.dtype.kind in "mM" else values.tolist()


def levels(ds: xr.Dataset, name: str) -> list[Any]:
    """The values that a parameter has: numbers from small to large, words as the cases come."""
    values = ds[name].values
    in_words = values.dtype.kind in "OU"
    return list(dict.fromkeys(values.tolist())) if in_words else listed(np.unique(values))


def spelled(values: Sequence[Any]) -> list[str]:
    """Values of a parameter as figures show them: those of floats differ where these do."""
    in_floats = all(isinstance(value, float) for value in values)
    return told_apart(values) if in_floats else [literal(str(value)) for value in values]


def by_level(ds: xr.Dataset, *names: str) -> Iterator[tuple[Any, ...]]:
    """The cases with each value of a parameter, or each place along a dimension.

    Of several parameters the cases with each of the values that they have together: (colour,
    value, value, …, cases).
    """
    columns = (map(unless_nan, listed(ds[name].values)) for name in names)
    there = set(zip(*columns, strict=True))
    every = itertools.product(*(levels(ds, name) for name in names))
    places = [place for place in every if tuple(map(unless_nan, place)) in there]
    for colour, place in zip(colours(len(places)), places, strict=True):
        found = select(ds, **dict(zip(names, place, strict=True)))
        yield colour, *place, found.isel({name: 0 for name in names if name in ds.dims})


def own_mask(ds: xr.Dataset) -> xr.Dataset:
    """The plain cases; where there are none, as of a decoder, the masked ones."""
    return select(ds, causal=False not in levels(ds, "causal"))


def best(rows: xr.Dataset, name: str, *, over: str) -> xr.Dataset:
    """Of the cases with each value of the parameter `over`, the one where a column is largest.

    Raises:
        NoCases: it has no values.
    """
    known = rows.isel(case=np.flatnonzero(rows[name].notnull()))
    if not known.sizes["case"]:
        raise NoCases(f"no case of the Dataset has a value of {name}")
    return known.groupby(over).map(lambda one: one.isel(case=int(one[name].values.argmax())))


def fits_of(ds: xr.Dataset, **labels: Any) -> xr.Dataset:
    """The fits with these labels; none if the Dataset has no fits."""
    if "fit" not in ds.sizes:
        return xr.Dataset(coords={"fit": np.arange(0)})
    keep = np.ones(ds.sizes["fit"], dtype=bool)
    for name, value in labels.items():
        keep &= ds[f"fit_{name}"].values == value
    return ds.isel(fit=np.flatnonzero(keep))


def model_and_text(ds: xr.Dataset) -> str:
    """The line of a title that names the model and the text."""
    known = (name for name in ("model", "text") if name in ds.attrs)
    return ", ".join(literal(f"{name} {ds.attrs[name]}") for name in known)
