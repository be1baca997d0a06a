"""From the long form (one row per case) to the cube (one dimension per parameter)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import xarray as xr

from meanfield.checks import describe
from meanfield.habits import with_hints
from meanfield.results.cases import NOT_CONVERGED, OK, has_status, unless_nan


def as_dataset(ds: object) -> xr.Dataset:
    """The Dataset; anything else is refused."""
    if not isinstance(ds, xr.Dataset):
        raise TypeError(f"ds: expected an xarray.Dataset, got {describe(ds)}")
    return ds


def parameters_of(ds: xr.Dataset) -> list[str]:
    """The names of the parameters: the coordinates along `case`."""
    return [str(name) for name in ds.coords if ds[name].dims == ("case",) and name != "case"]


@with_hints
def to_cube(ds: xr.Dataset, *, parameters: Sequence[str] | None = None) -> xr.Dataset:
    """A product grid in long form as a cube: dimension `case` becomes one per parameter.

    The value at (p₁, …, p_k) is that of the case with these parameters. Values of a parameter
    keep the order in which they first appear.

    Args:
        ds: Dataset with dimension `case` and parameters as coordinates along it.
        parameters: the new dimensions; all parameters by default. One that is left out becomes a
            variable.

    Raises:
        ValueError: the cases are no product grid: some are missing or occur twice.

    Example:
        >>> long = xr.Dataset(
        ...     {"y": ("case", [1.0, 2.0, 3.0, 4.0])},
        ...     coords={"a": ("case", [0, 0, 1, 1]), "b": ("case", ["u", "v", "u", "v"])},
        ... )
        >>> float(to_cube(long)["y"].sel(a=1, b="u"))
        3.0
    """
    as_dataset(ds)
    if "case" not in ds.dims:
        raise ValueError(f"ds: expected the dimension 'case', got {tuple(ds.dims)}")
    names = list(parameters_of(ds) if parameters is None else parameters)
    if isinstance(parameters, str):
        names = [parameters]
    absent = [name for name in names if name not in ds.coords or ds[name].dims != ("case",)]
    if absent or not names or len({*names}) < len(names):
        raise ValueError(
            f"parameters: expected different coordinates along 'case' of {parameters_of(ds)}, "
            f"got {absent or names}"
        )
    levels, codes = zip(*(coded(ds[name].values) for name in names), strict=True)
    shape = tuple(len(level) for level in levels)
    position = np.asarray(np.ravel_multi_index(codes, shape))
    _check_product(position, dict(zip(names, shape, strict=True)))
    rows = ds.reset_coords([p for p in parameters_of(ds) if p not in names])
    rows = rows.isel(case=np.argsort(position)).drop_vars([*names, "case"], errors="ignore")
    cube = xr.Dataset(attrs=ds.attrs).assign_coords(
        {n: (n, level, ds[n].attrs) for n, level in zip(names, levels, strict=True)}
    )
    unfolded = {n: _unfold(v, names, shape) for n, v in rows.variables.items()}
    return cube.assign(unfolded).set_coords([n for n in rows.coords if n in unfolded])


def coded(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The different values in order of appearance, and for each place the index of its value."""
    places: dict[object, int] = {}
    levels = map(unless_nan, values.tolist())
    codes = np.array([places.setdefault(level, len(places)) for level in levels], int)
    return np.array(list(places), dtype=values.dtype), codes


def _check_product(position: np.ndarray, shape: dict[str, int]) -> None:
    expected = math.prod(shape.values())
    different = len(np.unique(position))
    if different == len(position) == expected:
        return
    raise ValueError(
        f"ds: expected a product grid of {shape}, {expected} cases, got {len(position)} cases of "
        f"which {different} are different; select a full grid first, or name its `parameters`"
    )


def _unfold(variable: xr.Variable, names: list[str], shape: tuple[int, ...]) -> xr.Variable:
    if "case" not in variable.dims:
        return variable
    rows = variable.transpose("case", ...)
    return xr.Variable(
        (*names, *rows.dims[1:]), rows.values.reshape(*shape, *rows.shape[1:]), rows.attrs
    )


def numbers(ds: xr.Dataset) -> dict[str, float]:
    """The numbers of a Dataset by name and place, as loggers of training take them.

    Flags become 0 and 1; text, NaN and what cases without an answer hold are left out. Where
    coordinates repeat, places are counted.

    Args:
        ds: of any dimensions, the fewer the better: each number becomes an entry.

    Example:
        >>> import xarray as xr
        >>> ds = xr.Dataset({"block": ("layer", [2.0, 3.5]), "loss": 0.5}, {"layer": [0, 2]})
        >>> numbers(ds)
        {'block/layer0': 2.0, 'block/layer2': 3.5, 'loss': 0.5}
    """
    found = {}
    ds = as_dataset(ds).compute()  # what xarray has opened may wait to be read
    done = ds["status"].isin((OK, NOT_CONVERGED)) if has_status(ds) else None
    for name, column in ds.data_vars.items():
        if column.dtype.kind not in "biuf":
            continue
        if done is not None and name != "status" and {*done.dims} <= {*column.dims}:
            column = column.astype(float).where(done)  # of integers and flags NaN is none
        named = {dim for dim, index in column.indexes.items() if index.is_unique}
        for place in np.ndindex(column.shape):
            at = column[place]
            keys = [
                f"{dim}{at[dim].item() if dim in named else i}"
                for dim, i in zip(column.dims, place, strict=True)
            ]
            if not np.isnan(at.item()):
                found["/".join([str(name), *keys])] = float(at)
    return found
