"""What a Dataset says about itself, as rows of text: variables, troubles, fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from meanfield.results import read_provenance
from meanfield.results.shapes import parameters_of

__all__ = ["Table", "fits", "outcome", "provenance", "troubles", "variables"]

_BOOKKEEPING = ("status", "message", "case_key")


class Table(NamedTuple):
    """A title, the names of the columns (or none), and rows of cells."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[object, ...]]


def outcome(ds: xr.Dataset) -> str:
    """One sentence: how many cases there are and how they ended."""
    created = str(read_provenance(ds).get("created", ""))[:10]
    when = f", computed on {created}" if created else ""
    if "case" not in ds.dims:
        sizes = ", ".join(f"{size} along {name}" for name, size in ds.sizes.items())
        return f"{len(ds.data_vars)} variables{f' with {sizes}' if sizes else ''}{when}."
    n, names = ds.sizes["case"], parameters_of(ds)
    cases = f"{n} case{'s' * (n != 1)} of {len(names)} parameter{'s' * (len(names) != 1)}{when}"
    if "status" in ds and "flag_meanings" in ds["status"].attrs:
        return f"{cases}: {_flags(ds['status'])}."
    troubled = int(sum(bool(words) for words in _not_converged(ds)))
    return f"{cases}: {troubled or 'none'} flagged as not converged."


def variables(ds: xr.Dataset) -> Table:
    """Each variable with its range, and what is missing or did not converge."""
    rows: list[tuple[object, ...]] = [
        (
            name,
            _meaning(ds[name]),
            _units(ds[name]),
            _together(_range(ds[name])),
            _together(_without_value(ds[name])),
            _together(_unconverged(ds, name)),
        )
        # A Zarr folder has no order; sorted, an estimate has its evidence below it.
        for name in sorted(map(str, ds.data_vars), key=lambda name: (name in _BOOKKEEPING, name))
        if "fit" not in ds[name].dims  # they have a table of their own
    ]
    header = ("name", "meaning", "units", "range", "no value", "not converged")
    return Table("Variables", header, rows)


def troubles(ds: xr.Dataset) -> Table:
    """The cases that failed, with their messages, and those that did not converge."""
    if "case" not in ds.dims:
        return Table("Cases in trouble", (), [])
    names = parameters_of(ds)
    message = ds["message"].values if "message" in ds else np.full(ds.sizes["case"], "")
    what = [
        f"failed: {said}" if said else f"not converged: {', '.join(flagged)}" if flagged else word
        for said, flagged, word in zip(message, _not_converged(ds), _endings(ds), strict=True)
    ]
    columns = [ds[name].values.tolist() for name in names]
    rows: list[tuple[object, ...]] = [
        (case, *(column[case] for column in columns), words)
        for case, words in enumerate(what)
        if words
    ]
    return Table("Cases in trouble", ("case", *names, "what happened"), rows)


def fits(ds: xr.Dataset, found: Mapping[str, xr.Dataset]) -> Table:
    """Power laws with their intervals: those given, and those that the Dataset has along `fit`."""
    rows: list[tuple[object, ...]] = [
        (
            what,
            _with_interval(fit, "constant"),
            _with_interval(fit, "exponent"),
            float(fit["envelope"]),
            int(fit["n_points"]),
        )
        for what, fit in found.items()
    ]
    own = ds[[n for n in ds.variables if str(n).startswith("fit_")]] if "fit" in ds.dims else None
    if own is not None:
        own = own.rename({n: str(n).removeprefix("fit_") for n in own.variables})
        labels = [str(n) for n in own.coords if own[n].dims == ("fit",) and n != "fit"]
        for k in range(own.sizes["fit"]):
            fit = own.isel(fit=k)
            what = ", ".join(f"{name} {_short(fit[name].values.item())}" for name in labels)
            ends = (_with_interval(fit, name) for name in ("constant", "exponent"))
            rows.append((what, *ends, None, int(fit["n_points"])))
    return Table("Power laws", ("y ≈ C xᵖ", "C", "p", "envelope", "points"), rows)


def provenance(record: Mapping[str, Any]) -> Table:
    """When, from which source and with which versions."""
    versions = record.get("versions") or {}
    rows: list[tuple[object, ...]] = [
        (key, record[key])
        for key in ("created", "commit", "seed", "dtype", "device", "python", "platform")
        if record.get(key) is not None
    ]
    rows += [(f"version of {name}", version) for name, version in versions.items()]
    return Table("Where the numbers come from", (), rows)


def _meaning(variable: xr.DataArray) -> str:
    return str(variable.attrs.get("long_name", "–"))


def _units(variable: xr.DataArray) -> str:
    return str(variable.attrs.get("units", "–"))


def _range(variable: xr.DataArray) -> str:
    kind, values = variable.dtype.kind, variable.values
    if "flag_meanings" in variable.attrs:
        return _flags(variable)
    if kind == "b":
        return f"true in {int(values.sum())} of {values.size}"
    if kind not in "iuf":
        texts = {str(value) for value in values.reshape(-1)} - {""}
        return f"{len(texts)} different text{'s' * (len(texts) != 1)}"
    finite = values[np.isfinite(values)]
    infinite = int(np.isinf(values).sum())
    tail = f", {infinite} infinite" if infinite else ""
    if not finite.size:
        return "–" + tail
    low, high = _short(finite.min().item()), _short(finite.max().item())
    return (low if low == high else f"{low} to {high}") + tail


def _flags(variable: xr.DataArray) -> str:
    counts = [(int((variable.values == f).sum()), word) for f, word in _words(variable).items()]
    return ", ".join(f"{n} {word}" for n, word in counts if n)


def _words(variable: xr.DataArray) -> dict[Any, str]:
    """What each value of a variable with flags means; empty if it has none."""
    words = str(variable.attrs.get("flag_meanings", "")).split()
    flags = np.atleast_1d(variable.attrs.get("flag_values", np.arange(len(words))))
    return {f: word.replace("_", " ") for f, word in zip(flags.tolist(), words, strict=True)}


def _endings(ds: xr.Dataset) -> list[str]:
    """For each case what its status calls it, where that is no good news."""
    if "status" not in ds:
        return [""] * ds.sizes["case"]
    words = {f: word for f, word in _words(ds["status"]).items() if word not in ("ok", "pending")}
    return [words.get(status, "") for status in ds["status"].values.tolist()]


def _not_converged(ds: xr.Dataset) -> list[list[str]]:
    """For each case the names of the variables that have not converged."""
    found: list[list[str]] = [[] for _ in range(ds.sizes["case"])]
    for name in map(str, ds.data_vars):
        if f"{name}_converged" not in ds or "case" not in ds[name].dims:
            continue
        flagged = _flagged(ds, name).transpose("case", ...).values.reshape(len(found), -1)
        for case in np.flatnonzero(flagged.any(axis=1)):
            found[case].append(name)
    return found


def _flagged(ds: xr.Dataset, name: str) -> xr.DataArray:
    """Where a value is there and its flag says that it has not converged."""
    return ds[name].notnull() & ~ds[f"{name}_converged"].astype(bool)


def _unconverged(ds: xr.Dataset, name: str) -> str:
    """How many values are flagged, of those that are there."""
    if f"{name}_converged" not in ds:
        return "–"
    flagged = _flagged(ds, name)
    return f"{int(flagged.sum())} of {int(ds[name].notnull().sum())}"


def _without_value(variable: xr.DataArray) -> str:
    missing = int(np.isnan(variable.values).sum()) if variable.dtype.kind == "f" else 0
    return f"{missing} of {variable.size}" if missing else "–"


def _with_interval(fit: xr.Dataset, name: str) -> str:
    value, low, high = (float(fit[f"{name}{end}"]) for end in ("", "_lower", "_upper"))
    if name == "exponent" and fit.attrs.get("exponent_fixed"):
        return f"{value:.4g} (given)"
    interval = f" [{low:.4g}, {high:.4g}]" if np.isfinite([low, high]).all() else ""
    return f"{value:.4g}{interval}"


def _together(text: str) -> str:
    """The text without places to break the line, unless it is long."""
    return text.replace(" ", "\N{NO-BREAK SPACE}") if len(text) < 30 else text


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
