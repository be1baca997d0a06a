"""Datasets in the types that Zarr and netCDF can hold, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr

__all__ = ["check_attrs", "decode", "encode", "netcdf"]

_BOOL = "false true"
_STORED_AS = "stored_from"  # attribute: the type in memory, where that of the file differs


def netcdf(ds: xr.Dataset) -> bytes:
    """The Dataset as a netCDF file (version 3, 64 bit)."""
    encoded = encode(ds, narrow=True)
    nothing = {str(name): {"_FillValue": None} for name in encoded.variables}
    written = encoded.to_netcdf(engine="scipy", format="NETCDF3_64BIT", encoding=nothing)
    with written:  # Python 3.13: an error if the buffer is collected before its view
        return bytes(written)


def encode(ds: xr.Dataset, *, narrow: bool = False) -> xr.Dataset:
    """The Dataset in types that files can hold, with attributes to undo it.

    Args:
        ds: real numbers, truth values and text.
        narrow: without integers of 64 bits, which netCDF 3 does not have.
    """
    check_attrs(ds.attrs, "ds")
    encoded = {}  # assigned at once: each change of a Dataset compares all its variables
    for name in ds.variables:
        check_attrs(ds[name].attrs, str(name))
        encoded[name] = _encode_variable(ds[name].variable, str(name), narrow)
    return ds.drop_encoding().assign(encoded)


def decode(ds: xr.Dataset) -> xr.Dataset:
    """Undo `encode`."""
    return ds.drop_encoding().assign({n: _decode_variable(ds[n].variable) for n in ds.variables})


def check_attrs(attrs: Mapping[Any, Any], owner: str) -> None:
    """Refuse attributes other than text and numbers, which not every format takes."""
    for name, value in attrs.items():
        flags = isinstance(value, (np.ndarray, list)) and name == "flag_values"
        number = isinstance(value, (str, int, float, np.number)) and not isinstance(value, bool)
        if not (flags or number):
            raise TypeError(
                f"attribute {name!r} of {owner}: expected text or a number, got "
                f"{type(value).__name__}; put it into the provenance, which is one JSON string"
            )


def _encode_variable(variable: xr.Variable, name: str, narrow: bool) -> xr.Variable:
    kind, values, attrs = variable.dtype.kind, variable.values, dict(variable.attrs)
    if kind == "b":
        attrs |= {"flag_values": np.array([0, 1], np.int8), "flag_meanings": _BOOL}
        return xr.Variable(variable.dims, values.astype(np.int8), attrs)
    if kind in "UT" or (kind == "O" and all(isinstance(v, str) for v in values.flat)):
        return xr.Variable(variable.dims, values.astype(object), attrs)
    if kind not in "iuf" or (variable.dtype.itemsize == 2 and kind == "f"):
        raise TypeError(
            f"{name}: expected real numbers, truth values or text, got {variable.dtype}; "
            "store complex numbers as two real variables"
        )
    if narrow and kind in "iu" and variable.dtype not in (np.int8, np.int16, np.int32):
        return xr.Variable(
            variable.dims, _narrow(values), attrs | {_STORED_AS: str(variable.dtype)}
        )
    return xr.Variable(variable.dims, values, attrs)


def _narrow(values: np.ndarray) -> np.ndarray:
    """Integers of 64 bits as int32 or, beyond it, as the floats that equal them, or as texts."""
    low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
    if -(2**31) <= low <= high < 2**31:
        return values.astype(np.int32)
    if -(2**53) <= low <= high <= 2**53:
        return values.astype(np.float64)
    return values.astype(str).astype(object)


def _decode_variable(variable: xr.Variable) -> xr.Variable:
    attrs, values = dict(variable.attrs), variable.values
    if attrs.get("flag_meanings") == _BOOL:
        del attrs["flag_values"], attrs["flag_meanings"]
        values = values.astype(bool)
    if values.dtype.kind in "UTO":
        values = values.astype(object)
    values = values.astype(attrs.pop(_STORED_AS, values.dtype))
    # netCDF returns big-endian numbers, and attributes as arrays.
    values = values.astype(values.dtype.newbyteorder("="), copy=False)
    attrs = {name: _plain(value) for name, value in attrs.items()}
    if "flag_values" in attrs:  # Zarr keeps a list of numbers without their type
        attrs["flag_values"] = np.asarray(attrs["flag_values"], values.dtype)
    return xr.Variable(variable.dims, values, attrs)


def _plain(value: Any) -> Any:
    return (
        value.item() if isinstance(value, (np.generic, np.ndarray)) and value.size == 1 else value
    )
