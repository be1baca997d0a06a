"""The store of a sweep of version 0.1, a Zarr group with extensions: it can still be read."""

from __future__ import annotations

import numpy as np
import xarray as xr

from meanfield.results.shapes import parameters_of

__all__ = ["is_old_store", "join_old_store"]

_INTERNAL = ("done", "case_key", "case_json")


def is_old_store(ds: xr.Dataset) -> bool:
    """Whether a Zarr group is the store of a sweep of version 0.1."""
    return "sweep_schema" in ds.attrs


def join_old_store(parts: list[xr.Dataset]) -> xr.Dataset:
    """The finished cases of the first grid and of its extensions; others are pending.

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
    ds.attrs = {**ds.attrs.get("dataset_attrs", {}), "provenance": ds.attrs["provenance"]}
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
