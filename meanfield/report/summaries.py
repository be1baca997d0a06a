"""What a Dataset says about itself, as text and tables: variables, troubles, fits, provenance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import xarray as xr

from meanfield.html import table
from meanfield.results import read_provenance
from meanfield.results.shapes import parameters_of

__all__ = ["fits", "outcome", "provenance", "troubles", "variables"]

_BOOKKEEPING = ("status", "message", "case_key")
_TROUBLES = 30  # cases in trouble that are written out


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
        return f"{cases}: {_range(ds['status'])}."
    troubled = sum(bool(words) for words in _not_converged(ds))
    return f"{cases}: {troubled or 'none'} flagged as not converged."


def variables(ds: xr.Dataset) -> str:
    """Each variable with its range, and what is missing or did not converge."""
    # A Zarr folder has no order; sorted, an estimate has its evidence below it.
    names = sorted(map(str, ds.data_vars), key=lambda name: (name in _BOOKKEEPING, name))
    rows = [
        (
            *(name, ds[name].attrs.get("long_name"), ds[name].attrs.get("units")),
            *(_range(ds[name]), _without_value(ds[name]), _unconverged(ds, name)),
        )
        for name in names
        if "fit" not in ds[name].dims  # they have a table of their own
    ]
    header = ("name", "meaning", "units", "range", "no value", "not converged")
    return table("Variables", rows, header=header) if rows else ""


def troubles(ds: xr.Dataset) -> str:
    """The cases that failed, with their messages, and those that did not converge."""
    if "case" not in ds.dims:
        return ""
    names, n = parameters_of(ds), ds.sizes["case"]
    columns = [ds[name].values.tolist() for name in names]
    said = ds["message"].values if "message" in ds else [""] * n
    words = _words(ds["status"]) if "status" in ds else {}
    endings = [words.get(flag, "") for flag in ds["status"].values.tolist()] if words else [""] * n
    rows: list[tuple[object, ...]] = []
    for case, flagged in enumerate(_not_converged(ds)):
        ending = endings[case] if endings[case] not in ("ok", "pending") else ""
        ending = f"not converged: {', '.join(flagged)}" if flagged else ending
        ending = f"failed: {said[case]}" if said[case] else ending
        if ending:
            rows.append((case, *(column[case] for column in columns), ending))
    if not rows:
        return ""
    header = ("case", *names, "what happened")
    more = f"<p>… and {len(rows) - _TROUBLES} more; the Dataset has all of them.</p>"
    listed = table("Cases in trouble", rows[:_TROUBLES], header=header)
    return listed + more * (len(rows) > _TROUBLES)


def fits(ds: xr.Dataset, found: Mapping[str, xr.Dataset]) -> str:
    """Power laws with their intervals: those given, and those that the Dataset has along `fit`."""
    rows = [
        (
            *(what, _with_interval(fit, "constant"), _with_interval(fit, "exponent")),
            *(float(fit["envelope"]) if "envelope" in fit else None, int(fit["n_points"])),
        )
        for what, fit in (*found.items(), *_own_fits(ds))
    ]
    header = ("y ≈ C xᵖ", "C", "p", "envelope", "points")
    return table("Power laws", rows, header=header) if rows else ""


def provenance(record: Mapping[str, Any]) -> str:
    """When, from which source and with which versions."""
    keys = ("created", "commit", "seed", "dtype", "device", "python", "platform")
    rows = [(key, record[key]) for key in keys if record.get(key) is not None]
    rows += [(f"version of {name}", v) for name, v in (record.get("versions") or {}).items()]
    return table("Where the numbers come from", rows) if rows else ""


def _own_fits(ds: xr.Dataset) -> Iterator[tuple[str, xr.Dataset]]:
    if "fit" not in ds.dims:
        return
    own = ds[[name for name in ds.variables if str(name).startswith("fit_")]]
    own = own.rename({name: str(name).removeprefix("fit_") for name in own.variables})
    labels = [name for name in own.coords if own[name].dims == ("fit",)]
    for k in range(own.sizes["fit"]):
        fit = own.isel(fit=k)
        yield ", ".join(f"{name} {_short(fit[name].values.item())}" for name in labels), fit


def _range(variable: xr.DataArray) -> str:
    kind, values = variable.dtype.kind, variable.values
    if "flag_meanings" in variable.attrs:
        counts = [(int((values == flag).sum()), word) for flag, word in _words(variable).items()]
        return ", ".join(f"{n} {word}" for n, word in counts if n)
    if kind == "b":
        return f"true in {int(values.sum())} of {values.size}"
    if kind not in "iuf":
        texts = {str(value) for value in values.reshape(-1)} - {""}
        return f"{len(texts)} different text{'s' * (len(texts) != 1)}"
    finite, infinite = values[np.isfinite(values)], int(np.isinf(values).sum())
    ends = [_short(end(finite).item()) for end in (np.min, np.max)] if finite.size else ["–"]
    return " to ".join(dict.fromkeys(ends)) + (f", {infinite} infinite" if infinite else "")


def _words(variable: xr.DataArray) -> dict[Any, str]:
    """What each value of a variable with flags means; empty if it has none."""
    words = str(variable.attrs.get("flag_meanings", "")).split()
    flags = np.atleast_1d(variable.attrs.get("flag_values", np.arange(len(words))))
    return {f: word.replace("_", " ") for f, word in zip(flags.tolist(), words, strict=True)}


def _flagged(ds: xr.Dataset, name: str) -> xr.DataArray:
    """Where a value is there and its flag says that it has not converged."""
    return ds[name].notnull() & ~ds[f"{name}_converged"].astype(bool)


def _not_converged(ds: xr.Dataset) -> list[list[str]]:
    """For each case the names of the variables that have not converged."""
    found: list[list[str]] = [[] for _ in range(ds.sizes["case"])]
    for name in map(str, ds.data_vars):
        if f"{name}_converged" in ds and "case" in ds[name].dims:
            flagged = _flagged(ds, name).transpose("case", ...).values.reshape(len(found), -1)
            for case in np.flatnonzero(flagged.any(axis=1)):
                found[case].append(name)
    return found


def _unconverged(ds: xr.Dataset, name: str) -> str | None:
    """How many values are flagged, of those that are there."""
    if f"{name}_converged" not in ds:
        return None
    return f"{int(_flagged(ds, name).sum())} of {int(ds[name].notnull().sum())}"


def _without_value(variable: xr.DataArray) -> str | None:
    missing = int(np.isnan(variable.values).sum()) if variable.dtype.kind == "f" else 0
    return f"{missing} of {variable.size}" if missing else None


def _with_interval(fit: xr.Dataset, name: str) -> str:
    value, low, high = (float(fit[f"{name}{end}"]) for end in ("", "_lower", "_upper"))
    if name == "exponent" and fit.attrs.get("exponent_fixed"):
        return f"{value:.4g} (given)"
    interval = f" [{low:.4g}, {high:.4g}]" if np.isfinite([low, high]).all() else ""
    return f"{value:.4g}{interval}"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
