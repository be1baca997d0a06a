"""Digests of a Dataset, variable by variable, in an attribute of it: what is read is checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from meanfield.results.arrays import digest_of
from meanfield.results.marks import DIGEST

_ATTRIBUTES = ""  # in the place of a name: those of the Dataset
_BEGIN = '{"": "'  # of the attribute


def with_digests(ds: xr.Dataset) -> xr.Dataset:
    """The Dataset with the attribute that `check_digests` reads."""
    return ds.assign_attrs({DIGEST: json.dumps(_digests(ds))})


def check_digests(ds: xr.Dataset, path: Path) -> xr.Dataset:
    """The Dataset without that attribute; one that has none is taken as it is.

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
    about = {str(name): _of_variable(variable) for name, variable in ds.variables.items()}
    return {_ATTRIBUTES: digest_of({"": _bytes(_plain(ds.attrs))})[:16], **about}


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
