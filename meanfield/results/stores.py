"""The store of a sweep on the disk: a folder of small files, each whole, each with its checksum.

    sweep.json               what is computed: configuration, labels, provenance, and a checksum
    grid-TIME-DIGEST.nc      cases that were asked for, in order
    batch-TIME-DIGEST.nc     finished cases: parameters, values, status, message
    written.txt              the names of these files, so that one that is lost can be named

Any netCDF reader opens them. A file whose content does not have the digest of its name is passed
over, with one warning, and its cases are pending. A case may be in several files: what is done
wins over what failed, and the later file over the earlier one. The next sweep sets a damaged file
aside, under its name and ``.damaged``.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import warnings
from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from meanfield.results.encoding import encode
from meanfield.results.labels import Variable

__all__ = [
    "DESCRIPTION",
    "JOURNAL",
    "SCHEMA",
    "DamagedError",
    "Store",
    "assemble",
    "blank",
    "digest",
    "is_store",
    "pack_cases",
    "pack_description",
    "read_description",
    "read_store",
    "variables_of",
]

DESCRIPTION, JOURNAL = "sweep.json", "written.txt"
SCHEMA = 2
_FILE = re.compile(r"(grid|batch)-\d{8}T\d{12}-([0-9a-f]{16})\.nc")
_RANK = np.array([0, 2, 2, 1])  # of pending, ok, not converged, failed
_OWN = ("case_key", "status")
_LOADS = 10  # attempts, while another process merges files
_STATUS = {
    "long_name": "how the case ended",
    "flag_values": np.arange(4, dtype=np.int8),
    "flag_meanings": "pending ok not_converged failed",
}
_MESSAGE = Variable("message", "why it failed", dtype="str")
_KEY = {"long_name": "SHA-256 of the parameters, 63 bits in two halves", "units": "1"}


class DamagedError(ValueError):
    """The description of a store is damaged or missing."""


def is_store(path: Path) -> bool:
    """Whether there is the store of a sweep, whole or not."""
    return path.is_dir() and (
        (path / DESCRIPTION).exists() or any(_FILE.fullmatch(f.name) for f in path.glob("*.nc"))
    )


def digest(data: bytes | memoryview) -> str:
    """The checksum of a file: 64 bits of SHA-256."""
    return hashlib.sha256(data).hexdigest()[:16]


def pack_description(description: Mapping[str, Any]) -> bytes:
    """The content of `sweep.json`, one line per entry."""
    entries = {"checksum": _checksum(description), **description}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(entries[name])}" for name in entries)
    return f"{{\n{lines}\n}}\n".encode()


def read_description(path: Path) -> dict[str, Any]:
    """What the store computes.

    Raises:
        FileNotFoundError: there is nothing at the path.
        ValueError: no store, or one of another version.
        DamagedError: the description is damaged or missing.
    """
    if not path.exists():
        raise FileNotFoundError(f"store: nothing at {path}")
    if not is_store(path):
        raise ValueError(
            f"store: expected the store of a sweep or nothing, got {path}, which is something else"
        )
    try:
        description = json.loads((path / DESCRIPTION).read_bytes())
        whole = description.pop("checksum") == _checksum(description)
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        whole = False
    if not whole:
        raise DamagedError(
            f"store {path}: {DESCRIPTION} is damaged or missing; the same sweep again writes it "
            "anew and keeps the finished cases"
        )
    if description["schema"] != SCHEMA:
        raise ValueError(
            f"store {path}: expected schema {SCHEMA}, got {description['schema']}: it belongs to "
            "another version of this library"
        )
    return description


def variables_of(description: Mapping[str, Any]) -> tuple[Variable, ...]:
    """The variables that a description declares."""
    return tuple(Variable(**{**v, "dims": tuple(v["dims"])}) for v in description["variables"])


def blank(
    variables: Sequence[Variable], coords: Mapping[str, Sized], n_cases: int
) -> dict[str, np.ndarray]:
    """Values, `status` and `message` of so many cases, all pending."""
    rows = {
        v.name: np.full((n_cases, *(len(coords[d]) for d in v.dims)), v.fill, v.numpy_dtype)
        for v in variables
    }
    return rows | {
        "status": np.zeros(n_cases, np.int8), "message": np.full(n_cases, "", object)
    }  # fmt: skip


def assemble(description: Mapping[str, Any], rows: Mapping[str, np.ndarray]) -> xr.Dataset:
    """The labelled Dataset of some cases: `rows` are parameters, values, status and message."""
    variables = [*variables_of(description), _MESSAGE]
    own = {"case_key", "status", *(v.name for v in variables)}
    labels = description["parameters"]
    coords: dict[str, Any] = {
        name: ("case", column, labels.get(name, Variable.unlabelled(name).attrs))
        for name, column in rows.items()
        if name not in own
    }
    for name, column in description["coords"].items():
        values = np.array(column["values"], column["dtype"])
        coords[name] = (name, values, labels.get(name, Variable.unlabelled(name).attrs))
    data: dict[str, Any] = {
        v.name: (("case", *v.dims), rows[v.name], v.attrs) for v in variables if v.name in rows
    }
    data["status"] = ("case", rows["status"], dict(_STATUS))
    attrs = {**description["attrs"], "provenance": description["provenance"]}
    return xr.Dataset(data, coords=coords, attrs=attrs)


def pack_cases(description: Mapping[str, Any], rows: Mapping[str, np.ndarray]) -> bytes:
    """The content of a file of cases; without values it is a grid."""
    ds = assemble(description, rows)
    halves = rows["case_key"].astype("<i8").view("<i4").reshape(-1, 2).astype(np.int32)
    ds["case_key"] = (("case", "half"), halves, dict(_KEY))
    ds.attrs = {"configuration": configuration_digest(description), "source": "meanfield sweep"}
    encoded = encode(ds, netcdf=True)
    nothing = {str(name): {"_FillValue": None} for name in encoded.variables}
    written = encoded.to_netcdf(engine="scipy", format="NETCDF3_64BIT", encoding=nothing)
    with written:  # a view that lives on is an error where Python 3.13 collects what is behind it
        return bytes(written)


def read_store(path: Path) -> xr.Dataset:
    """All cases of a store, those that are not done as pending."""
    description = read_description(path)
    store = Store(path, description)
    store.warn()
    return assemble(description, store.rows())


def configuration_digest(description: Mapping[str, Any]) -> str:
    """What the files of a store have in common."""
    return _checksum(description["configuration"])


def _checksum(data: Any) -> str:
    return digest(json.dumps(data, sort_keys=True).encode())


class Store:
    """The files of a store, loaded once each; `refresh` looks for new ones."""

    def __init__(self, path: Path, description: Mapping[str, Any]) -> None:
        self.path, self.description = path, description
        self.damaged: dict[str, str] = {}  # name of the file -> what is wrong with it
        self._tables: dict[str, dict[str, np.ndarray]] = {}
        self.refresh()

    @property
    def files(self) -> list[str]:
        """The names of the whole files, grids first, then by time."""
        return sorted(self._tables, key=lambda name: (name.startswith("batch"), name))

    @property
    def missing(self) -> list[str]:
        """The names of files that were written and are not there."""
        try:
            text = (self.path / JOURNAL).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return []
        named = {line for line in text.splitlines() if _FILE.fullmatch(line)}
        return sorted(named - set(self._tables) - set(self.damaged))

    def refresh(self) -> None:
        """Load what is new and forget what another process has merged into a larger file."""
        for attempt in range(_LOADS):
            present = {f.name: f for f in self.path.glob("*.nc") if _FILE.fullmatch(f.name)}
            self._tables = {name: t for name, t in self._tables.items() if name in present}
            try:
                for name in present.keys() - self._tables.keys():
                    self._load(present[name])
                return
            except FileNotFoundError:  # merged since the folder was listed
                if attempt == _LOADS - 1:
                    raise

    def warn(self) -> None:
        """One warning that names what is damaged or missing, if anything is."""
        missing = self.missing
        if missing and (self.rows()["status"] != 0).all():
            missing = []
        troubles = [f"{n} ({why})" for n, why in self.damaged.items()]
        troubles += [f"{name} (missing)" for name in missing]
        if troubles:
            warnings.warn(
                f"store {self.path}: {', '.join(troubles[:5])}"
                + (f" and {len(troubles) - 5} more" if len(troubles) > 5 else "")
                + ": their cases are pending, unless other files hold them; the same sweep again "
                "computes them",
                stacklevel=3,
            )

    def rows(self) -> dict[str, np.ndarray]:
        """The columns over all cases, each case once: `case_key`, `status`, parameters, values."""
        tables = [self._tables[name] for name in self.files]
        if not tables:
            return self.blank(0) | {"case_key": np.zeros(0, np.int64)}
        keys, status = (np.concatenate([t[name] for t in tables]) for name in _OWN)
        chosen = _chosen(keys, status)
        sizes = [len(table["case_key"]) for table in tables]
        starts = np.cumsum([0, *sizes])
        rows = self.blank(len(chosen))
        for table, start, end in zip(tables, starts, starts[1:], strict=False):
            here = np.flatnonzero((chosen >= start) & (chosen < end))
            for name in rows.keys() & table.keys():
                rows[name][here] = table[name][chosen[here] - start]
        rows["case_key"] = keys[chosen]
        parameters = dict.fromkeys(n for table in tables for n in table if n not in rows)
        return rows | {n: _joined([t.get(n) for t in tables], sizes)[chosen] for n in parameters}

    def blank(self, n_cases: int) -> dict[str, np.ndarray]:
        """So many cases with the variables of the store, all pending."""
        coords = {name: of["values"] for name, of in self.description["coords"].items()}
        return blank(variables_of(self.description), coords, n_cases)

    def _load(self, file: Path) -> None:
        data = file.read_bytes()
        matched = _FILE.fullmatch(file.name)
        if matched is None or digest(data) != matched[2]:
            self.damaged[file.name] = "damaged"
            return
        table, configuration = _table(data)
        if configuration == configuration_digest(self.description):
            self._tables[file.name] = table
        else:
            self.damaged[file.name] = "of another configuration"


def _table(data: bytes) -> tuple[dict[str, np.ndarray], str]:
    """The columns along `case` of a file, and the digest of its configuration."""
    from scipy.io import netcdf_file

    with netcdf_file(io.BytesIO(data)) as file:
        columns = {
            name: _column(variable)
            for name, variable in file.variables.items()
            if variable.dimensions[:1] == ("case",)
        }
        configuration = file.configuration.decode()
    columns["case_key"] = columns["case_key"].astype("<i4").view("<i8")[:, 0].astype(np.int64)
    return columns, configuration


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
    order = np.lexsort((_RANK[status], keys))  # which leaves equal ones in their order
    ordered = keys[order]
    starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    first, last = np.minimum.reduceat(order, starts), order[np.append(starts[1:], len(order)) - 1]
    return last[np.argsort(first)]


def _joined(pieces: Sequence[np.ndarray | None], sizes: Sequence[int]) -> np.ndarray:
    """One column out of those of all files; "" or NaN where a file does not have it."""
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
