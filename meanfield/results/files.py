"""Datasets in files: Zarr v3 folders and netCDF, whole or absent, read back exactly."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from meanfield.results.stores import is_store, join_parts, parts_of

__all__ = ["encode", "read", "write"]

_BOOL = "false true"
_STORED_AS = "stored_from"  # the type in memory, where the file's type is another


def write(ds: xr.Dataset, path: str | os.PathLike[str]) -> Path:
    """Write a Dataset to a Zarr v3 folder (``.zarr``) or a netCDF file (``.nc``).

    The data are written under another name and renamed, so that a file of this name is always
    whole. Truth values are stored as int8 with `flag_values` and `flag_meanings`. netCDF is
    written by SciPy (version 3, 64 bit), which every installation can read.

    Args:
        ds: real numbers, truth values and text; attributes are text and numbers.
        path: the suffix says the format; an existing file or Zarr folder is replaced.

    Returns:
        The path.

    Raises:
        ValueError: another suffix, or integers that netCDF cannot hold.
        TypeError: complex or float16 variables, attributes that are neither text nor numbers.
        OSError: the folder cannot be written or the disk is full; nothing is left behind.
    """
    path = Path(path)
    if path.suffix not in (".zarr", ".nc"):
        raise ValueError(f"path: expected a name that ends in .zarr or .nc, got {path.name!r}")
    netcdf = path.suffix == ".nc"
    encoded = encode(ds, netcdf=netcdf)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _under_another_name(path) as hidden:
        if netcdf:
            nothing = {str(name): {"_FillValue": None} for name in encoded.variables}
            encoded.to_netcdf(hidden, engine="scipy", format="NETCDF3_64BIT", encoding=nothing)
        else:
            _write_zarr(encoded, hidden)
    return path


def read(path: str | os.PathLike[str]) -> xr.Dataset:
    """Read a Dataset that `write` or `sweep` has written, into memory.

    Args:
        path: a netCDF file (``.nc``) or a Zarr folder. Of the store of a sweep, cases that were
            added to the first grid are read too; a case is pending where `status` is 0.

    Raises:
        FileNotFoundError: there is nothing at the path.
        ValueError: what is there is neither netCDF nor Zarr.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"path: nothing at {path}")
    if path.is_dir():
        if not (path / "zarr.json").exists():
            raise ValueError(f"path: expected a Zarr v3 folder, got {path} without zarr.json")
        ds = decode(_load_zarr(path))
        if not is_store(ds):
            return ds
        return join_parts([ds, *(decode(_load_zarr(part)) for part in parts_of(path)[1:])])
    with xr.open_dataset(path, engine="scipy") as ds:
        return decode(ds.load())


def encode(ds: xr.Dataset, *, netcdf: bool = False) -> xr.Dataset:
    """The Dataset in types that the file format holds, with what is needed to undo it."""
    _check_attrs(ds.attrs, "ds")
    encoded = ds.drop_encoding().copy()
    for name in ds.variables:
        _check_attrs(ds[name].attrs, str(name))
        encoded[name] = _encode_variable(ds[name].variable, str(name), netcdf)
    return encoded


def decode(ds: xr.Dataset) -> xr.Dataset:
    """Undo `encode`."""
    decoded = ds.drop_encoding()
    for name in ds.variables:
        decoded[name] = _decode_variable(ds[name].variable)
    return decoded


def _encode_variable(variable: xr.Variable, name: str, netcdf: bool) -> xr.Variable:
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
    if netcdf and kind in "iu" and variable.dtype not in (np.int8, np.int16, np.int32):
        return xr.Variable(
            variable.dims, _narrow(values, name), attrs | {_STORED_AS: str(variable.dtype)}
        )
    return xr.Variable(variable.dims, values, attrs)


def _narrow(values: np.ndarray, name: str) -> np.ndarray:
    """Integers of 64 bits as int32 or, beyond it, as the floats that equal them."""
    for dtype in (np.int32, np.float64):
        narrow = values.astype(dtype)
        if np.array_equal(narrow.astype(values.dtype), values):
            return narrow
    raise ValueError(f"{name}: netCDF 3 holds no integers beyond 2^53; write a .zarr folder")


def _decode_variable(variable: xr.Variable) -> xr.Variable:
    attrs, values = dict(variable.attrs), variable.values
    if attrs.get("flag_meanings") == _BOOL:
        del attrs["flag_values"], attrs["flag_meanings"]
        values = values.astype(bool)
    if values.dtype.kind in "UTO":
        values = values.astype(object)
    values = values.astype(attrs.pop(_STORED_AS, values.dtype))
    # netCDF hands numbers back in big-endian order and attributes as arrays.
    values = values.astype(values.dtype.newbyteorder("="), copy=False)
    attrs = {name: _plain(value) for name, value in attrs.items()}
    if "flag_values" in attrs:  # Zarr keeps a list of numbers without their type
        attrs["flag_values"] = np.asarray(attrs["flag_values"], values.dtype)
    return xr.Variable(variable.dims, values, attrs)


def _plain(value: Any) -> Any:
    return (
        value.item() if isinstance(value, (np.generic, np.ndarray)) and value.size == 1 else value
    )


def _check_attrs(attrs: dict[Any, Any], owner: str) -> None:
    for name, value in attrs.items():
        flags = isinstance(value, (np.ndarray, list)) and name == "flag_values"
        number = isinstance(value, (str, int, float, np.number)) and not isinstance(value, bool)
        if not (flags or number):
            raise TypeError(
                f"attribute {name!r} of {owner}: expected text or a number, got "
                f"{type(value).__name__}; put it into the provenance, which is one JSON string"
            )


def _write_zarr(ds: xr.Dataset, path: Path) -> None:
    # One chunk per variable: the number of files is the only cost that bites.
    whole = {
        str(n): {"_FillValue": None} | ({"chunks": v.shape} if v.size else {})
        for n, v in ds.variables.items()
    }
    ds.to_zarr(path, zarr_format=3, consolidated=False, encoding=whole, mode="w")


def _load_zarr(path: Path) -> xr.Dataset:
    with xr.open_zarr(path, consolidated=False, chunks=None, mask_and_scale=False) as ds:
        ds = ds.load()
    # A folder has no order of its own: by name, so that the same data always read the same.
    variables = {name: ds[name].variable for name in sorted(ds.data_vars, key=str)}
    return xr.Dataset(variables, coords=ds.coords, attrs=ds.attrs)


@contextmanager
def _under_another_name(path: Path) -> Iterator[Path]:
    """A hidden path beside `path` that takes its place on success and vanishes on failure."""
    hidden = path.with_name(f".{path.stem}-{secrets.token_hex(4)}.tmp{path.suffix}")
    try:
        yield hidden
        if hidden.is_dir() and path.exists():
            # Folders cannot be replaced in one step; the old one steps aside first.
            old = hidden.with_suffix(".old")
            path.rename(old)
            hidden.rename(path)
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        else:
            os.replace(hidden, path)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.unlink(missing_ok=True) if hidden.is_file() else None
