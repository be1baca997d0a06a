"""Datasets in files, Zarr v3 folders and netCDF: written whole, read back exactly."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import xarray as xr

from meanfield.checks import describe
from meanfield.results.atomic import (
    check_replaceable,
    hidden_name,
    remove_litter,
    sync,
    write_whole,
)
from meanfield.results.encoding import decode, encode, netcdf
from meanfield.results.store import Store, is_store

__all__ = ["read_dataset", "write_dataset"]

_WRITER = {"source": "meanfield"}  # marks a file that `write_dataset` may replace


def write_dataset(ds: xr.Dataset, path: str | os.PathLike[str]) -> Path:
    """Write a Dataset to a Zarr v3 folder (``.zarr``) or a netCDF file (``.nc``).

    The data are written under another name and renamed: a netCDF file is always whole; a Zarr
    folder is absent for the instant between the old and the new one. Truth values are stored as
    int8 with `flag_values` and `flag_meanings`. netCDF is version 3 (64 bit), which SciPy can
    read; its integers beyond 2⁵³ are texts. Zarr has consolidated metadata and checksums.

    Args:
        ds: real numbers, truth values and text; attributes are text and numbers.
        path: the suffix gives the format; a file that this library has written is replaced.

    Returns:
        The path.

    Raises:
        ValueError: another suffix.
        TypeError: complex or float16 variables, attributes that are neither text nor numbers.
        FileExistsError: something that this library has not written is there, or the path is
            inside the store of a sweep or a Zarr folder.
        OSError: the folder cannot be written or the disk is full; nothing is left behind.
    """
    if not isinstance(ds, xr.Dataset):
        raise TypeError(f"ds: expected an xarray.Dataset, got {describe(ds)}")
    path = Path(path)
    if path.suffix not in (".zarr", ".nc"):
        raise ValueError(f"path: expected a name that ends in .zarr or .nc, got {path.name!r}")
    marked = ds.assign_attrs({**_WRITER, **ds.attrs})
    # Before anything is touched: a Dataset that the format cannot hold is refused here.
    encoded = netcdf(marked) if path.suffix == ".nc" else encode(marked)
    target = check_replaceable(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_litter(target.parent, target.name)
    if isinstance(encoded, bytes):
        write_whole(target, encoded)
    else:
        _write_folder(encoded, target)
    return path


def read_dataset(path: str | os.PathLike[str]) -> xr.Dataset:
    """Read a Dataset that `write_dataset` or `sweep` has written, into memory.

    Args:
        path: a netCDF file (``.nc``), a Zarr folder, or the store of a sweep. Of a store all
            cases that were asked for are read, pending ones with `status` 0; one warning names
            files that are damaged or missing.

    Raises:
        FileNotFoundError: there is nothing at the path.
        ValueError: what is there is neither netCDF nor Zarr nor a store.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"path: nothing at {path}")
    if is_store(path):
        return Store.at(path).dataset()
    if path.is_dir():
        if not (path / "zarr.json").exists():
            inside = sorted(
                f.name for kind in ("sweep", "zarr", "nc") for f in path.glob(f"*.{kind}")
            )
            meant = f"; it holds {', '.join(inside)}: give one of these" if inside else ""
            raise ValueError(
                f"path: expected a Zarr v3 folder, got {path} without zarr.json{meant}"
            )
        ds = _load_zarr(path)
        if "sweep_schema" in ds.attrs:
            raise ValueError(
                f"path: {path} is the store of a sweep of version 0.1, which is no longer read; "
                "xarray.open_zarr opens it, and its variable `done` says which batches count"
            )
        return _unmarked(ds)
    try:
        with xr.open_dataset(path, engine="scipy") as opened:
            return _unmarked(decode(opened.load()))
    except (TypeError, ValueError) as error:
        raise ValueError(f"path: expected a netCDF file, got {path}: {error}") from error


def _unmarked(ds: xr.Dataset) -> xr.Dataset:
    if _WRITER.items() <= ds.attrs.items():
        ds.attrs = {name: value for name, value in ds.attrs.items() if name not in _WRITER}
    return ds


def _write_folder(ds: xr.Dataset, path: Path) -> None:
    hidden, old = hidden_name(path), hidden_name(path)
    try:
        _write_zarr(ds, hidden)
        for folder, _, _ in os.walk(hidden):
            sync(Path(folder))
        if path.exists():  # a folder cannot be replaced in one step
            path.rename(old)
        hidden.rename(path)
        sync(path.parent)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _write_zarr(ds: xr.Dataset, path: Path) -> None:
    import warnings

    from zarr.codecs import ZstdCodec

    # One chunk per variable: the number of files dominates the time.
    whole: dict[str, dict[str, Any]] = {
        str(n): {"_FillValue": None, "compressors": ZstdCodec(level=0, checksum=True)}
        | ({"chunks": v.shape} if v.size else {})
        for n, v in ds.variables.items()
    }
    with warnings.catch_warnings():  # zarr warns that consolidated metadata are an extension
        warnings.filterwarnings("ignore", message="Consolidated metadata")
        ds.to_zarr(path, zarr_format=3, consolidated=True, encoding=whole, mode="w")


def _load_zarr(path: Path) -> xr.Dataset:
    with xr.open_zarr(path, consolidated=False, chunks=None, mask_and_scale=False) as opened:
        ds = decode(opened.load())
    # A folder has no order: sorted, so that the same data always read the same.
    variables = {name: ds[name].variable for name in sorted(ds.data_vars, key=str)}
    return xr.Dataset(variables, coords=ds.coords, attrs=ds.attrs)
