"""Datasets in the types that Zarr and netCDF can hold, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import xarray as xr

from meanfield.results.shapes import as_dataset

STORED_AS = "stored_from"  # attribute: the type in memory, where that of the file differs
TEXT = np.dtype("O", metadata={"element_type": str})  # by which xarray knows texts, if none too
_MOST_BYTES = 2**31 - 4  # of a variable in netCDF 3


def netcdf(ds: xr.Dataset) -> memoryview:
    """The Dataset as a netCDF file of version 3 (64 bit).

    Raises:
        ValueError: names, attributes, texts or dimensions of length 0 that netCDF 3 does not
            have, more than 2 GiB in a variable.
    """
    for attrs in (ds.attrs, *(variable.attrs for variable in ds.variables.values())):
        check_names(attrs, ascii_only=True)
        for name, value in attrs.items():
            if isinstance(value, (int, np.integer)) and not -(2**31) <= value < 2**31:
                raise ValueError(
                    f"attribute {name!r}: expected an integer of 32 bits, which is what netCDF 3 "
                    f"has, got {value}; give it as a float or a text"
                )
    check_names([*ds.variables, *ds.dims], ascii_only=True)
    # Assigned at once: each change of a Dataset compares all its variables.
    encoded = ds.drop_encoding().assign({n: _narrow(ds[n].variable, n) for n in ds.variables})
    for name, variable in encoded.variables.items():
        if 0 in variable.shape[1:]:
            raise ValueError(
                f"{name}: expected a dimension of length 0 in front of all others, where alone "
                f"netCDF 3 has one, got {dict(variable.sizes)}; a path that ends in .zarr takes it"
            )
        if _width(variable) * variable.size > _MOST_BYTES:
            raise ValueError(
                f"{name}: expected at most 2 GiB in a variable, which is what netCDF 3 holds, got "
                f"{_width(variable) * variable.size:,} bytes; a path that ends in .zarr takes more"
            )
    nothing = {str(name): {"_FillValue": None} for name in encoded.variables}
    return encoded.to_netcdf(engine="scipy", format="NETCDF3_64BIT", encoding=nothing)


def decode(ds: xr.Dataset) -> xr.Dataset:
    """A Dataset that was read as it was before it was written."""
    return ds.drop_encoding().assign({n: _decode_variable(ds[n].variable) for n in ds.variables})


def check_dataset(ds: xr.Dataset) -> None:
    """Refuse what files cannot hold.

    Raises:
        ValueError: names with "/".
        TypeError: no Dataset; variables other than real numbers, truth values and texts,
            attributes other than text and real numbers.
    """
    check_names([*as_dataset(ds).variables, *ds.dims])
    beside = [str(name) for name in ds.coords if name not in ds.dims]
    if spaced := [name for name in beside if len(name.split()) != 1]:
        raise ValueError(
            f"expected names of coordinates without spaces, which files would lose, got {spaced}"
        )
    for owner, attrs in [("ds", ds.attrs), *((str(n), v.attrs) for n, v in ds.variables.items())]:
        check_names(attrs)
        check_attrs(attrs, owner)
    for name, variable in ds.variables.items():
        kind, got = variable.dtype.kind, str(variable.dtype)
        if kind == "O":
            others = [one for one in variable.values.flat if not isinstance(one, str)]
            if not others:
                continue
            got = f"{others[0]!r:.80} among objects"
        if kind not in "biufUT" or (variable.dtype.itemsize not in (4, 8) and kind == "f"):
            raise TypeError(
                f"{name}: expected real numbers, truth values or text, got {got}; store complex "
                "numbers as two real variables, fillna('') what xarray's where and merge have "
                "left of texts, and reset_index an index of several levels"
            )


def check_names(names: Iterable[Any], *, ascii_only: bool = False) -> None:
    """Refuse names that files cannot hold."""
    for name in map(str, names):
        if not name.isprintable() or "/" in name or not name or (ascii_only > name.isascii()):
            kind = "ASCII characters" if ascii_only else "printable characters"
            raise ValueError(f"expected names of {kind} without '/', got {name!r}")


def check_attrs(attrs: Mapping[Any, Any], owner: str) -> None:
    """Refuse attributes other than text and numbers, which not every format takes."""
    for name, value in attrs.items():
        flags = isinstance(value, (np.ndarray, list)) and name == "flag_values"
        real = isinstance(value, (str, int, float, np.integer, np.floating))
        if not flags and (not real or isinstance(value, bool)):
            raise TypeError(
                f"attribute {name!r} of {owner}: expected text or a number, got "
                f"{type(value).__name__}; put it into the provenance, which is one JSON string"
            )


def _narrow(variable: xr.Variable, name: Any) -> xr.Variable:
    """The variable without types that netCDF 3 does not have.

    Integers are int32 or, beyond it, the floats that equal them, or texts. Truth values are left
    to xarray, which has a convention for them.
    """
    values, attrs = variable.values, dict(variable.attrs)
    if values.dtype.kind in "OUT":
        if any("\0" in text for text in values.flat):
            raise ValueError(f"{name}: expected texts without NUL, which netCDF loses")
        return xr.Variable(variable.dims, values.astype(TEXT), attrs)
    if values.dtype.kind in "fb" or values.dtype in (np.int8, np.int16, np.int32):
        return variable
    low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
    attrs[STORED_AS] = str(values.dtype)
    if -(2**31) <= low <= high < 2**31:
        values = values.astype(np.int32)
    elif -(2**53) <= low <= high <= 2**53:
        values = values.astype(float)
    else:
        values = values.astype(str).astype(object)
    return xr.Variable(variable.dims, values, attrs)


def _width(variable: xr.Variable) -> int:
    """Bytes of each value in netCDF 3, where texts are as wide as the longest."""
    if variable.dtype.kind != "O":
        return variable.dtype.itemsize
    return max((len(text.encode("utf-8", "replace")) for text in variable.values.flat), default=1)


def _decode_variable(variable: xr.Variable) -> xr.Variable:
    attrs, values = dict(variable.attrs), variable.values
    if values.dtype.kind in "UTO":
        values = values.astype(object)
    values = values.astype(attrs.pop(STORED_AS, values.dtype))
    # netCDF returns big-endian numbers, and attributes as arrays.
    values = values.astype(values.dtype.newbyteorder("="), copy=False)
    for name, value in attrs.items():
        if isinstance(value, (np.generic, np.ndarray)) and value.size == 1:
            attrs[name] = value.item()
    if "flag_values" in attrs:  # Zarr keeps a list of numbers without their type
        attrs["flag_values"] = np.asarray(attrs["flag_values"], values.dtype)
    return xr.Variable(variable.dims, values, attrs)
