"""The cases of a sweep as columns: what labels them, one file of them, and many files joined.

Columns are arrays over cases: parameters, values, `status` and `message`, and in files `case_key`,
which identifies a case.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xarray as xr

from meanfield.results.encoding import netcdf
from meanfield.results.labels import Variable

__all__ = [
    "FAILED", "NOT_CONVERGED", "OK", "PENDING", "RESERVED", "Columns", "Labels", "join", "pack",
    "unpack",
]  # fmt: skip

Columns = Mapping[str, np.ndarray]
PENDING, OK, NOT_CONVERGED, FAILED = range(4)
RESERVED = ("status", "message", "case", "case_key", "half")
_RANK = np.array([0, 2, 2, 1])  # of a status: of the rows of a case the highest is taken
_STATUS = {
    "long_name": "how the case ended",
    "flag_values": np.arange(4, dtype=np.int8),
    "flag_meanings": "pending ok not_converged failed",
}
_MESSAGE = Variable("message", "why it failed", dtype="str")
_KEY = {"long_name": "SHA-256 of the parameters, 63 bits in two halves", "units": "1"}


@dataclass(frozen=True)
class Labels:
    """What the columns of a sweep mean.

    Attributes:
        variables: the values of a case; their `dims` are those beside `case`.
        parameters: attributes of parameters and of coordinates, by name; others have their name.
        coords: values along the dimensions of the variables.
    """

    variables: Sequence[Variable]
    parameters: Mapping[str, Mapping[str, str]]
    coords: Mapping[str, np.ndarray]

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Labels:
        """The inverse of `plain`."""
        variables = [Variable(**{**v, "dims": tuple(v["dims"])}) for v in plain["variables"]]
        coords = {n: np.array(of["values"], of["dtype"]) for n, of in plain["coords"].items()}
        return cls(tuple(variables), plain["parameters"], coords)

    @property
    def plain(self) -> dict[str, Any]:
        """The labels in types that JSON has."""
        return {
            "variables": [dataclasses.asdict(v) for v in self.variables],
            "parameters": self.parameters,
            "coords": {
                name: {"values": v.tolist(), "dtype": "O" if v.dtype.kind == "U" else v.dtype.str}
                for name, v in self.coords.items()
            },
        }

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of one case of each variable, by name."""
        return {v.name: tuple(len(self.coords[d]) for d in v.dims) for v in self.variables}

    def blank(self, n_cases: int) -> dict[str, np.ndarray]:
        """Values, `status` and `message` of `n_cases` pending cases."""
        columns = {
            v.name: np.full((n_cases, *self.shapes[v.name]), v.fill, v.numpy_dtype)
            for v in self.variables
        }
        status, message = np.zeros(n_cases, np.int8), np.full(n_cases, "", object)
        return columns | {"status": status, "message": message}

    def dataset(self, columns: Columns, attrs: Mapping[str, Any]) -> xr.Dataset:
        """The labelled Dataset of some cases; without the variables that `columns` lacks."""
        variables = [*self.variables, _MESSAGE]
        own = {"case_key", "status", *(v.name for v in variables)}
        along = {name: ("case", of) for name, of in columns.items() if name not in own}
        for name, of in self.coords.items():
            along[name] = (name, of.astype(object) if of.dtype.kind == "U" else of)
        coords = {
            name: (dim, of, self.parameters.get(name, Variable.unlabelled(name).attrs))
            for name, (dim, of) in along.items()
        }
        data: dict[str, Any] = {
            v.name: (("case", *v.dims), columns[v.name], v.attrs)
            for v in variables
            if v.name in columns
        }
        data["status"] = ("case", columns["status"], dict(_STATUS))
        return xr.Dataset(data, coords=coords, attrs=attrs)


def pack(labels: Labels, columns: Columns, configuration: str, replaced: str = "") -> bytes:
    """Cases as a netCDF file.

    Args:
        labels: what the columns mean.
        columns: the cases.
        configuration: the digest of that to which they belong.
        replaced: the names of files in whose place this one comes.
    """
    attrs = {"configuration": configuration, "source": "meanfield sweep"}
    ds = labels.dataset(columns, attrs | ({"replaced": replaced} if replaced else {}))
    halves = columns["case_key"].astype("<i8").view("<i4").reshape(-1, 2).astype(np.int32)
    ds["case_key"] = (("case", "half"), halves, dict(_KEY))
    return netcdf(ds)


def unpack(data: bytes) -> tuple[dict[str, np.ndarray], str, str]:
    """The columns of a file, the digest of its configuration, and the names of `pack`."""
    from scipy.io import netcdf_file

    with netcdf_file(io.BytesIO(data)) as file:
        columns = {
            name: _column(variable)
            for name, variable in file.variables.items()
            if variable.dimensions[:1] == ("case",)
        }
        attrs = {name: value.decode() for name, value in file._attributes.items()}
    columns["case_key"] = columns["case_key"].astype("<i4").view("<i8")[:, 0].astype(np.int64)
    return columns, attrs["configuration"], attrs.get("replaced", "")


def join(labels: Labels, tables: Sequence[Columns]) -> dict[str, np.ndarray]:
    """The columns of several files in one; of each case the best row, among equals the last."""
    if not tables:
        return labels.blank(0) | {"case_key": np.zeros(0, np.int64)}
    keys, status = (np.concatenate([t[name] for t in tables]) for name in ("case_key", "status"))
    chosen = _chosen(keys, status)
    sizes = [len(table["case_key"]) for table in tables]
    starts = np.cumsum([0, *sizes])
    rows = labels.blank(len(chosen))
    for table, start, end in zip(tables, starts, starts[1:], strict=False):
        here = np.flatnonzero((chosen >= start) & (chosen < end))
        for name in rows.keys() & table.keys():
            rows[name][here] = table[name][chosen[here] - start]
    rows["case_key"] = keys[chosen]
    parameters = dict.fromkeys(n for table in tables for n in table if n not in rows)
    return rows | {n: _joined([t.get(n) for t in tables], sizes)[chosen] for n in parameters}


def _column(variable: Any) -> np.ndarray:
    values, attrs = variable[:], variable._attributes
    if values.dtype.kind == "S":  # texts, as one character per cell
        width = values.shape[-1]
        texts = np.ascontiguousarray(values).view(f"S{width}")[..., 0]
        decoded = np.full(texts.shape, "", dtype=object)
        there = texts != b""
        decoded[there] = [text.decode("utf-8") for text in texts[there]]
        values = decoded
    if attrs.get("flag_meanings") == b"false true":
        return values.astype(bool)
    stored_from = attrs.get("stored_from", b"").decode()
    return values.astype(stored_from or values.dtype.newbyteorder("="))


def _chosen(keys: np.ndarray, status: np.ndarray) -> np.ndarray:
    """For each case the row to take, in the order in which the cases first appear."""
    order = np.lexsort((_RANK[status], keys))  # stable: equal rows keep their order
    ordered = keys[order]
    starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    first, last = np.minimum.reduceat(order, starts), order[np.append(starts[1:], len(order)) - 1]
    return last[np.argsort(first)]


def _joined(pieces: Sequence[np.ndarray | None], sizes: Sequence[int]) -> np.ndarray:
    """One column of all files together; "" or NaN for files that lack it."""
    present = [piece for piece in pieces if piece is not None]
    if len(present) == len(pieces):
        return np.concatenate(present)
    blank = "" if any(piece.dtype == object for piece in present) else np.nan
    tail = present[0].shape[1:]
    return np.concatenate(
        [
            np.full((size, *tail), blank, object if blank == "" else None) if p is None else p
            for p, size in zip(pieces, sizes, strict=True)
        ]
    )
