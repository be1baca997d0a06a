"""The store of a sweep, read as a Dataset, whether it is finished or not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xarray as xr

from meanfield.results.shapes import parameters_of

__all__ = ["DATASET_ATTRS", "is_store", "join_parts", "parts_of"]

DATASET_ATTRS = "dataset_attrs"  # the attribute of a store with those of its Dataset
_INTERNAL = ("done", "case_key", "case_json")


def is_store(ds: xr.Dataset) -> bool:
    """Whether a Zarr group is a part of the store of a sweep."""
    return "sweep_schema" in ds.attrs


def parts_of(path: Path) -> list[Path]:
    """The groups of a store: the first grid, and cases that were added later."""
    return [path, *sorted(path.glob("extension-*"))]


def join_parts(parts: list[xr.Dataset]) -> xr.Dataset:
    """All cases of a store; those of unfinished batches are pending, whatever is there of them.

    A case may be in two parts, if two processes added it at once; it is taken where it is done.
    """
    finished = [_only_finished(part) for part in parts]
    ds = finished[0]
    if len(finished) > 1:
        parameters = dict.fromkeys(name for part in finished for name in parameters_of(part))
        ds = xr.concat(
            [part.reset_coords(parameters_of(part)) for part in finished], "case",
            data_vars="all", coords="minimal", compat="override", join="override",
            combine_attrs="override",
        ).set_coords(parameters)  # fmt: skip
        for name in parameters:  # absent from some parts: NaN, and for texts ""
            if ds[name].dtype.kind == "O":
                ds[name] = ds[name].fillna("")
        pending_last = np.argsort(ds["status"].values == 0, kind="stable")
        _, first = np.unique(ds["case_key"].values[pending_last], return_index=True)
        ds = ds.isel(case=np.sort(pending_last[first]))
    ds = ds.drop_vars(_INTERNAL, errors="ignore")
    ds.attrs = {**ds.attrs.get(DATASET_ATTRS, {}), "provenance": ds.attrs["provenance"]}
    return ds


def _only_finished(part: xr.Dataset) -> xr.Dataset:
    """Without what a process that died has left of a batch."""
    size = int(part.attrs["batch_size"])
    done = np.repeat(part["done"].values.astype(bool), size)[: part.sizes["case"]]
    part = part.drop_dims("batch")
    for name, variable in part.data_vars.items():
        if name in _INTERNAL or "case" not in variable.dims or done.all():
            continue
        values = variable.values.copy()
        values[~done] = _blank(values.dtype) if name != "status" else 0
        part[name] = (variable.dims, values, variable.attrs)
    return part


def _blank(dtype: np.dtype) -> object:
    return {"f": np.nan, "i": -1, "b": False}.get(dtype.kind, "")
