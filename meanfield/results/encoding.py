"""Datasets in the types that Zarr and netCDF can hold, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import xarray as xr

__all__ = ["check_attrs", "check_labels", "check_names", "decode", "encode", "netcdf"]

_BOOL = "false true"
_STORED_AS = "stored_from"  # attribute: the type in memory, where that of the file differs
_MOST_BYTES = 2**31 - 4  # of a variable in netCDF 3


def netcdf(ds: xr.Dataset) -> bytes:
    """The Dataset as a netCDF file (version 3, 64 bit)."""
    encoded = encode(ds, narrow=True)
    for name, variable in encoded.variables.items():
        if (n_bytes := _width(variable) * variable.size) > _MOST_BYTES:
            raise ValueError(
                f"{name}: expected at most 2 GiB in one variable of a netCDF file, in which texts "
                f"are as wide as the longest, got {n_bytes / 2**30:.2f} GiB; write a .zarr"
            )
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
    check_labels(ds, narrow=narrow)
    encoded = {}  # assigned at once: each change of a Dataset compares all its variables
    for name in ds.variables:
        encoded[name] = _encode_variable(ds[name].variable, str(name), narrow)
    return ds.drop_encoding().assign(encoded)


def decode(ds: xr.Dataset) -> xr.Dataset:
    """Undo `encode`."""
    return ds.drop_encoding().assign({n: _decode_variable(ds[n].variable) for n in ds.variables})


def check_labels(ds: xr.Dataset, *, narrow: bool = False) -> None:
    """Refuse names and attributes that files cannot hold; `narrow` for netCDF 3.

    Raises:
        ValueError: names with "/", in netCDF other than ASCII; integers that it does not have.
        TypeError: attributes other than text and numbers.
    """
    for owner, attrs in [("ds", ds.attrs), *((str(n), v.attrs) for n, v in ds.variables.items())]:
        check_names(attrs, ascii_only=narrow)
        check_attrs(attrs, owner, narrow=narrow)
    check_names([*ds.variables, *ds.dims], ascii_only=narrow)


def check_names(names: Iterable[Any], *, ascii_only: bool = False) -> None:
    """Refuse names that files cannot hold."""
    for name in map(str, names):
        if not name.isprintable() or "/" in name or not name or (ascii_only > name.isascii()):
            kind = "ASCII characters" if ascii_only else "printable characters"
            raise ValueError(f"expected names of {kind} without '/', got {name!r}")


def check_attrs(attrs: Mapping[Any, Any], owner: str, *, narrow: bool = False) -> None:
    """Refuse attributes other than text and numbers, which not every format takes."""
    for name, value in attrs.items():
        flags = isinstance(value, (np.ndarray, list)) and name == "flag_values"
        number = isinstance(value, (str, int, float, np.number)) and not isinstance(value, bool)
        if not (flags or number):
            raise TypeError(
                f"attribute {name!r} of {owner}: expected text or a number, got "
                f"{type(value).__name__}; put it into the provenance, which is one JSON string"
            )
        if narrow and isinstance(value, (int, np.integer)) and not -(2**31) <= value < 2**31:
            raise ValueError(
                f"attribute {name!r} of {owner}: expected an integer of 32 bits, which is what "
                f"netCDF 3 has, got {value}; give it as a float or a text"
            )


def _width(variable: xr.Variable) -> int:
    """Bytes of each value in netCDF."""
    if variable.dtype.kind != "O":
        return variable.dtype.itemsize
    return max((len(text.encode("utf-8", "replace")) for text in variable.values.flat), default=1)


def _encode_variable(variable: xr.Variable, name: str, narrow: bool) -> xr.Variable:
    kind, values, attrs = variable.dtype.kind, variable.values, dict(variable.attrs)
    if kind == "b":
        attrs |= {"flag_values": np.array([0, 1], np.int8), "flag_meanings": _BOOL}
        return xr.Variable(variable.dims, values.astype(np.int8), attrs)
    if kind in "UT" or (kind == "O" and all(isinstance(v, str) for v in values.flat)):
        if narrow and any("\0" in text for text in values.flat):
            raise ValueError(f"{name}: expected texts without NUL, which netCDF loses")
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
