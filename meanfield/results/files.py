"""Datasets in files, Zarr v3 folders and netCDF: written whole, checked when they are read."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from meanfield.checks import as_path
from meanfield.habits import with_hints
from meanfield.results.atomic import (
    DIGEST,
    check_replaceable,
    digest_of,
    make_folder,
    remove_litter,
    whole,
    write_new,
)
from meanfield.results.encoding import STORED_AS, TEXT, check_dataset, decode, netcdf
from meanfield.results.store import Store, is_store

_CHUNK = 2**30  # bytes; Zstandard takes at most twice as many
_BEGIN = '{"": "'  # of the attribute with the digests
# Attributes of a variable by which xarray or `decode` reads other numbers, or keeps notes.
_TAKEN = (
    *("coordinates", "dtype", "_FillValue", "missing_value", STORED_AS),
    *("scale_factor", "add_offset", "_Unsigned", "_Encoding"),
)


@with_hints
def write_dataset(ds: xr.Dataset, path: str | os.PathLike[str]) -> Path:
    """Write a Dataset to a Zarr v3 folder (``.zarr``) or a netCDF file (``.nc``).

    The data are written under another name, flushed to the disk, and put in place in one step: on
    return they survive a loss of power. netCDF is version 3 (64 bit), which SciPy can read and
    which holds 2 GiB a variable; truth values are int8 there and integers beyond 2⁵³ texts. The
    attribute `meanfield_digest` holds a digest of each variable, which `read_dataset` checks, and
    marks the file as one that this function may replace.

    Args:
        ds: real numbers, truth values and text; attributes are text and numbers.
        path: the suffix gives the format; a file that this library has written is replaced.

    Returns:
        The path.

    Raises:
        ValueError: another suffix, names with "/", attributes that say how numbers are stored,
            such as ``scale_factor``, and what netCDF 3 does not have.
        TypeError: variables of complex numbers, or of floats of other than 32 and 64 bits,
            attributes that are neither text nor real numbers.
        FileExistsError: something that this library has not written is there, or the path is
            inside the store of a sweep or a Zarr folder.
        OSError: the folder cannot be written or the disk is full; nothing is left behind.
    """
    path = as_path(path)
    if path.suffix not in (".zarr", ".nc"):
        raise ValueError(f"path: expected a name that ends in .zarr or .nc, got {path.name!r}")
    # Before anything is touched: a Dataset that the format cannot hold is refused here.
    check_dataset(ds)
    _check_free("ds", ds.attrs, ["coordinates"])
    for name, variable in ds.variables.items():
        _check_free(name, variable.attrs, _TAKEN)
    signed = ds.drop_encoding().assign_attrs({DIGEST: json.dumps(_digests(ds))})
    packed = netcdf(signed) if path.suffix == ".nc" else _zarr(signed)
    target = check_replaceable(path)
    make_folder(target.parent)
    remove_litter(target.parent, target.name)
    with whole(target) as hidden:
        if not isinstance(packed, dict):
            write_new(hidden, packed)
        else:
            for name, content in packed.items():
                (hidden / name).parent.mkdir(parents=True, exist_ok=True)
                write_new(hidden / name, content.to_bytes())
    return path


@with_hints
def read_dataset(path: str | os.PathLike[str]) -> xr.Dataset:
    """Read a Dataset that `write_dataset` or `sweep` has written, into memory.

    Args:
        path: a netCDF file (``.nc``), a Zarr folder, or the store of a sweep. Of a store all
            cases that were asked for are read, pending ones with `status` 0; one warning names
            files that are damaged or missing.

    Raises:
        FileNotFoundError: there is nothing at the path.
        ValueError: what is there is neither netCDF nor Zarr nor a store, or it is damaged: the
            message names the variables that are lost or not what was written.
    """
    path = as_path(path)
    if not path.exists():
        remove_litter(path.parent, path.name)  # puts back what a crash has left without a name
    if not path.exists():
        raise FileNotFoundError(f"path: expected a Dataset or a store, got nothing at {path}")
    if is_store(path):
        return Store.at(path).dataset()
    load = _load_zarr if path.is_dir() else _load_netcdf
    if path.is_dir() and not (path / "zarr.json").exists():
        inside = sorted(f.name for kind in ("sweep", "zarr", "nc") for f in path.glob(f"*.{kind}"))
        meant = f"; it holds {', '.join(inside)}: give one of these" if inside else ""
        raise ValueError(f"path: expected a Zarr v3 folder, got {path} without zarr.json{meant}")
    try:
        ds = load(path)
    except Exception as error:  # damaged bytes may raise anything
        kind = "Zarr v3 folder" if path.is_dir() else "netCDF file"
        raise ValueError(
            f"path: expected a whole {kind}, got {path}: {str(error).partition(chr(10))[0]}"
        ) from error
    return check_digests(ds, path)


def check_digests(ds: xr.Dataset, path: Path) -> xr.Dataset:
    """The Dataset without the attribute of its digests; one that has none is taken as it is.

    Raises:
        ValueError: a variable is lost, or is not what was written; the message names it.
    """
    attrs = dict(ds.attrs)
    if (text := attrs.pop(DIGEST, None)) is None:
        renamed = [name for name, value in attrs.items() if str(value).startswith(_BEGIN)]
        if renamed:
            raise ValueError(f"{path} is damaged: {DIGEST} is called {renamed[0]!r}")
        return ds
    ds = xr.Dataset(ds.variables, attrs=attrs).set_coords(list(ds.coords))
    try:
        then = dict(json.loads(text))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: its digests cannot be read ({error})") from error
    now = _digests(ds)
    troubles = [
        f"{name or 'an attribute'} ({'not what was written' if name in now else 'lost'})"
        for name in then
        if now.get(name) != then[name]
    ] + [f"{name} (was not written)" for name in now if name not in then]
    if troubles:
        raise ValueError(
            f"{path} is damaged, or was changed by another program: {', '.join(troubles)}; "
            "xarray opens it as it is"
        )
    return ds


def _digests(ds: xr.Dataset) -> dict[str, str]:
    """By name of a variable; by the empty name that of the attributes of the Dataset."""
    about = {str(name): _of_variable(variable) for name, variable in ds.variables.items()}
    attrs = {name: value for name, value in ds.attrs.items() if name != DIGEST}
    return {"": digest_of({"": _bytes(_plain(attrs))})[:16], **about}


def _of_variable(variable: xr.Variable) -> str:
    values = np.asarray(variable.values)
    about = [*map(str, variable.dims), _plain(variable.attrs)]
    if values.dtype.kind in "OUT":
        values = _bytes([values.shape, values.astype(object).tolist()])
    native = values.astype(values.dtype.newbyteorder("="), copy=False)
    return digest_of({"values": native, "about": _bytes(about)})[:16]


def _bytes(plain: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(plain).encode(), np.uint8)


def _plain(attrs: Mapping[Any, Any]) -> list[Any]:
    """Attributes in a form that does not depend on the file's own types."""
    return sorted(
        [str(name), value if isinstance(value, str) else np.asarray(value, float).tolist()]
        for name, value in attrs.items()
    )


def _check_free(owner: Any, attrs: Mapping[Any, Any], taken: Sequence[str]) -> None:
    for name in taken:
        if name in attrs:
            raise ValueError(
                f"attributes of {owner}: expected none that says how numbers are stored, got "
                f"{name!r}; read_dataset, not xarray, reads a file of this library without it, "
                "and one of your own needs another name"
            )


def _zarr(ds: xr.Dataset) -> dict[str, Any]:
    """The files of a Zarr folder; Zarr's own writing needs hard links."""
    from zarr.codecs import ZstdCodec
    from zarr.storage import MemoryStore

    ds = ds.assign({n: v.astype(TEXT) for n, v in ds.variables.items() if v.dtype.kind in "OUT"})
    # One chunk per variable: the number of files dominates the time.
    encoding: dict[str, dict[str, Any]] = {
        str(n): {"_FillValue": None, "compressors": ZstdCodec(level=0, checksum=True)}
        | ({"chunks": _chunks(v)} if v.size else {})
        for n, v in ds.variables.items()
    }
    files: dict[str, Any] = {}
    with warnings.catch_warnings():  # zarr warns that consolidated metadata are an extension
        warnings.filterwarnings("ignore", message="Consolidated metadata")
        ds.to_zarr(MemoryStore(files), zarr_format=3, consolidated=True, encoding=encoding)
    return files


def _chunks(variable: xr.Variable) -> tuple[int, ...]:
    """The whole variable, or as many of its rows as fit into a chunk."""
    shape, left = list(variable.shape), variable.nbytes
    for axis, size in enumerate(shape):
        shape[axis] = max(1, min(size, size * _CHUNK // left))
        left = left // size * shape[axis]
    return tuple(shape)


def _load_zarr(path: Path) -> xr.Dataset:
    how: Any = {"consolidated": False, "chunks": None, "mask_and_scale": False}
    with xr.open_zarr(path, decode_times=False, **how) as opened:
        ds = decode(opened.load())
    # A folder has no order: sorted, so that the same data always read the same.
    names = [*sorted(ds.data_vars, key=str), *sorted(ds.coords, key=str)]
    variables = {name: ds.variables[name] for name in names}
    return xr.Dataset(variables, attrs=ds.attrs).set_coords(list(ds.coords))


def _load_netcdf(path: Path) -> xr.Dataset:
    with path.open("rb") as file:
        if file.read(4) == b"\x89HDF":
            raise ValueError("it is netCDF 4, which xarray.open_dataset reads")
    with xr.open_dataset(path, engine="scipy", decode_times=False) as opened:
        return decode(opened.load())
