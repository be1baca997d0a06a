"""The cases of a sweep as columns: what labels them, one file of them, and many files joined.

Columns are arrays over cases: parameters, values, `status` and `message`, and in files `case_key`,
which identifies a case.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from meanfield.results.atomic import DIGEST, digest_of, read_regular
from meanfield.results.labels import Variable, printable

Columns = Mapping[str, np.ndarray]
PENDING, OK, NOT_CONVERGED, FAILED = range(4)
RESERVED = ("status", "message", "case", "case_key")
_RANK = np.array([0, 2, 2, 1])  # of a status: of the rows of a case the highest is taken
_STATUS = {
    "long_name": "how the case ended",
    "flag_values": np.arange(4, dtype=np.int8),
    "flag_meanings": "pending ok not_converged failed",
}
_MESSAGE = Variable("message", "why it failed", dtype="str")


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
        coords = {}
        for name, of in self.coords.items():
            # Dates are numbers of their unit, whatever that is.
            plain = of.astype(np.int64) if of.dtype.kind in "mM" else of
            kind = "O" if of.dtype.kind == "U" else of.dtype.str
            coords[name] = {"values": plain.tolist(), "dtype": kind}
        variables = [dataclasses.asdict(v) for v in self.variables]
        return {"variables": variables, "parameters": self.parameters, "coords": coords}

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


def unless_nan(value: Any) -> Any:
    """The value of a parameter; None for NaN, which says that a case has none."""
    return value if value == value else None


def first_message(ds: xr.Dataset) -> str:
    """What the first failed case says, behind a semicolon; "" if none has failed."""
    messages = ds["message"].values[ds["status"].values == FAILED]
    return f"; the first says: {printable(str(messages[0]))}" if len(messages) else ""


def is_true(flags: Any) -> Any:
    """Where truth values of an array hold; of one that is NaN nothing is known."""
    return flags == True  # noqa: E712


def has_status(ds: xr.Dataset) -> bool:
    """Whether it holds the status of a sweep, along whatever axes, as of a cube or of one case."""
    status = ds.variables.get("status")
    return status is not None and status.attrs.get("flag_meanings") == _STATUS["flag_meanings"]


def is_sweep(ds: xr.Dataset) -> bool:
    """Whether its cases have the status of a sweep."""
    return has_status(ds) and ds["status"].dims == ("case",)


def answered(ds: xr.Dataset) -> xr.Dataset:
    """The cases that have an answer, neither pending nor failed; all of what is no sweep."""
    if not is_sweep(ds):
        return ds
    finished = np.isin(ds["status"].values, (OK, NOT_CONVERGED))
    return ds if finished.all() else ds.isel(case=np.flatnonzero(finished))


def pack(columns: Columns, identity: str, replaced: Sequence[str] = ()) -> bytes:
    """Cases as the content of an ``.npz`` file, with their digest.

    Args:
        columns: the cases; texts are kept as UTF-8 with a zero byte between them.
        identity: the digest of what has computed them.
        replaced: the names of files in whose place this one comes.
    """
    about = {"identity": identity, "replaced": " ".join(replaced)}
    arrays = {name: np.array(text) for name, text in about.items()}
    for name, column in columns.items():
        if column.dtype == object:
            joined = "\0".join(column.flat).encode()
            arrays[f"texts {name}"] = np.frombuffer(joined, np.uint8)
        else:
            arrays[f"numbers {name}"] = column
    content = io.BytesIO()
    np.savez(content, allow_pickle=False, **{DIGEST: np.array(digest_of(arrays))}, **arrays)
    return content.getvalue()


def unpack(file: Path, labels: Labels) -> tuple[dict[str, np.ndarray], str, list[str]]:
    """The columns of a file, the digest of what has computed them, and the names of `pack`.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged, or not one of these files.
    """
    columns, arrays = {}, _arrays(file)
    identity, replaced = (str(arrays.pop(name)) for name in ("identity", "replaced"))
    n_cases = len(arrays["numbers case_key"])
    for place, array in arrays.items():
        kind, _, name = place.partition(" ")
        if kind == "texts":
            shape = (n_cases, *labels.shapes.get(name, ()))
            texts = array.tobytes().decode().split("\0")[: math.prod(shape)]
            columns[name] = np.array(texts, object).reshape(shape)
        else:
            columns[name] = array
    return columns, identity, replaced.split()


def _arrays(file: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(io.BytesIO(read_regular(file)), allow_pickle=False) as stored:
            # Of a compressed member a few bytes may become more than fits into memory.
            if any(member.compress_type for member in stored.zip.filelist):
                raise ValueError("it is compressed")
            arrays = dict(stored)
        whole = str(arrays.pop(DIGEST)) == digest_of(arrays)
    except FileNotFoundError:
        raise
    except Exception as error:  # a damaged archive may raise anything
        raise ValueError(f"{file}: expected a whole archive of arrays, got {error!r}") from error
    if not whole:
        raise ValueError(f"{file}: its content is not what was written")
    return arrays


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


def check_joinable(given: Columns, stored: Columns) -> None:
    """Refuse parameters that one column with those of a store would not hold as they are."""
    words = {"O": "texts", "b": "truth values"}
    names = {*given, *stored} - {"case_key"} if len(stored["case_key"]) else ()
    for name in names:
        pieces = [of[name] for of in (stored, given) if name in of]
        then, *now = (words.get(piece.dtype.kind, "numbers") for piece in pieces)
        if [then] * len(now) != now and not all(map(_are_flags, pieces)):
            raise ValueError(f"parameter {name!r}: the store holds {then}, got {now[0]}")
        whole = [piece for piece in pieces if piece.dtype.kind == "i"]
        if len(whole) < 2:  # they become floats
            for piece in whole:
                check_doubles(name, piece[abs(piece) > 2**53].tolist())


def _are_flags(column: np.ndarray) -> bool:
    """Whether they are truth values; with absences these are 0, 1 and NaN."""
    if column.dtype.kind != "f":
        return column.dtype == bool
    there = column[~np.isnan(column)]
    return there.size < column.size and bool(np.isin(there, (0, 1)).all())


def check_doubles(name: str, values: Sequence[Any]) -> None:
    """Refuse integers of a parameter that become others as floats."""
    if lost := [i for i in values if isinstance(i, int) and float(i) != i]:
        raise ValueError(
            f"parameter {name!r}: expected integers that doubles hold, as other cases have a "
            f"fraction or none, got {lost[0]}"
        )


def n_in_common(given: Columns, stored: Columns) -> int:
    """How many cases two tables of parameters begin with, if one begins with the other; else 0.

    Also 0 where columns alone do not say: of 0, 1 and NaN whether they are truth values.
    """
    n = min(len(next(iter(of.values()), ())) for of in (given, stored))
    same = given.keys() == stored.keys() and all(
        (column.dtype == bool) == (stored[name].dtype == bool)
        and np.array_equal(column[:n], stored[name][:n], equal_nan=column.dtype.kind == "f")
        and not any(of.dtype.kind == "f" and _are_flags(of) for of in (column, stored[name]))
        for name, column in given.items()
    )
    return n if same else 0


def _chosen(keys: np.ndarray, status: np.ndarray) -> np.ndarray:
    """For each case the row to take, in the order in which the cases first appear."""
    order = np.lexsort((_RANK[status], keys))  # stable: equal rows keep their order
    ordered = keys[order]
    starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    first, last = np.minimum.reduceat(order, starts), order[np.append(starts[1:], len(order)) - 1]
    return last[np.argsort(first)]


def _joined(pieces: Sequence[np.ndarray | None], sizes: Sequence[int]) -> np.ndarray:
    """One parameter of all files together; "" or NaN for files that lack it."""
    texts = any(piece is not None and piece.dtype == object for piece in pieces)
    blank, kind = ("", object) if texts else (np.nan, float)
    return np.concatenate(
        [
            np.full(size, blank, kind) if piece is None else piece
            for piece, size in zip(pieces, sizes, strict=True)
        ]
    )
