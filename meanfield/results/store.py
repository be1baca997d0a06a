"""The store of a sweep: a folder of small files, each whole, each with its digest.

    sweep.json               what is computed: configuration, labels, provenance, and a checksum
    grid-TIME-NUMBER.npz     cases that were requested, in order
    batch-TIME-NUMBER.npz    finished cases: parameters, values, status, message
    written.txt              the names of these files, so that one that is lost can be named

A file whose content is not what was written, or a folder in its place, is skipped with a warning,
and its cases are pending; the same sweep again appends ``.damaged`` to its name and computes them.
A case may be in several files: a finished one counts before a failed one, and a later file before
an earlier one. Many small files are merged into one, which holds the names of those that it
replaces.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from meanfield.results.atomic import (
    digest,
    is_description,
    make_folder,
    read_regular,
    remove_litter,
    write_whole,
)
from meanfield.results.cases import (
    Columns,
    Labels,
    check_joinable,
    join,
    n_in_common,
    pack,
    unpack,
)
from meanfield.results.labels import printable
from meanfield.results.provenance import versions

SCHEMA = 5
_DESCRIPTION, _JOURNAL = "sweep.json", "written.txt"
_FILE = re.compile(r"(grid|batch)-\d{8}T\d{12}-[0-9a-f]{8}\.npz")
_STRANGE = "of another configuration or function"
_LOADS = 10  # attempts, while another process merges files
_MOST_FILES = 32  # small ones, beyond which they are merged; each costs 1 ms whenever it is read
_SMALL = 2**25  # bytes
_LAST = 10**20 - 1  # the highest time that a name can hold
_log = logging.getLogger("meanfield")


class DamagedError(ValueError):
    """The description of a store is damaged or missing."""


class Store:
    """The store at a path; each file is loaded once.

    Attributes:
        damaged: name of a file -> what is wrong with it.
        missing: the names of files that were written and are not there.
    """

    def __init__(self, path: Path, description: Mapping[str, Any]) -> None:
        self.path, self.description = path, description
        self.labels = Labels.from_plain(description)
        self.damaged: dict[str, str] = {}
        self.missing: list[str] = []
        self._identity = _identity(description)
        self._tables: dict[str, Columns] = {}
        self._replaced: dict[str, list[str]] = {}  # by a merged file
        self.refresh()

    @classmethod
    def at(cls, path: Path) -> Store:
        """The store at a path.

        Raises:
            FileNotFoundError, ValueError, DamagedError: see `_read_description`.
        """
        return cls(path, _read_description(path))

    @property
    def files(self) -> list[str]:
        """The names of the undamaged files, grids first, then by time."""
        return sorted(self._tables, key=lambda name: (name.startswith("batch"), name))

    def refresh(self) -> None:
        """Load new files and forget those that another process has merged."""
        for _ in range(_LOADS):
            # First: a name that is written later may be that of a file merged in the meantime.
            named = self._names_written()
            present = {f.name: f for f in self._files()}
            for obsolete in self._tables.keys() - present.keys():
                del self._tables[obsolete], self._replaced[obsolete]
            for name in present.keys() - self._tables.keys():
                self._load(present[name])
            merged = {name for names in self._replaced.values() for name in names}
            self.missing = sorted(named - self._tables.keys() - self.damaged.keys() - merged)
            if not self.missing:
                return

    def _files(self) -> list[Path]:
        return [f for f in self.path.glob("*.npz") if _FILE.fullmatch(f.name)]

    def _names_written(self) -> set[str]:
        try:
            text = read_regular(self.path / _JOURNAL).decode(errors="replace")
        except OSError:
            return set()
        return {line for line in text.splitlines() if _FILE.fullmatch(line)}

    def _load(self, file: Path) -> None:
        try:
            table, identity, replaced = unpack(file, self.labels)
        except FileNotFoundError:  # merged since the folder was listed
            if file.is_symlink():
                self.damaged[file.name] = "a link that leads nowhere"
        except (OSError, ValueError, LookupError):
            self.damaged[file.name] = "a folder" if file.is_dir() else "damaged"
        else:
            if identity == self._identity:
                self._tables[file.name], self._replaced[file.name] = table, replaced
            else:
                self.damaged[file.name] = _STRANGE

    def rows(self) -> dict[str, np.ndarray]:
        """All cases, each once: `case_key`, parameters, values, `status` and `message`."""
        return join(self.labels, [self._tables[name] for name in self.files])

    @property
    def n_cases(self) -> int:
        """How many cases there are."""
        keys = [table["case_key"] for table in self._tables.values()]
        return len(np.unique(np.concatenate(keys))) if keys else 0

    def parameters(self) -> dict[str, np.ndarray]:
        """The parameters of all cases."""
        rows, others = self.rows(), {"case_key", *self.labels.blank(0)}
        return {name: column for name, column in rows.items() if name not in others}

    def describe(self, changes: Mapping[str, Any]) -> None:
        """Write labels, attrs and provenance anew if they are others than those of the store."""
        then = {name: self.description[name] for name in changes}
        if json.dumps(then, sort_keys=True) == json.dumps(changes, sort_keys=True):
            return
        self.description = {**self.description, **changes}
        self.labels = Labels.from_plain(self.description)
        with contextlib.suppress(OSError):  # of a store that can only be read the values do
            write_whole(self.path / _DESCRIPTION, _pack_description(self.description))

    def rows_of(self, keys: np.ndarray) -> dict[str, np.ndarray]:
        """Values, `status` and `message` of the cases with these keys; pending where unknown."""
        requested = {"case_key": keys, "status": np.zeros(len(keys), np.int8)}
        rows = join(self.labels, [requested, *(self._tables[name] for name in self.files)])
        # Cases come in the order in which they first appear: these before all others.
        return {name: rows[name][: len(keys)] for name in self.labels.blank(0)}

    def dataset(self) -> xr.Dataset:
        """All cases as a labelled Dataset, with one warning if files are damaged or missing."""
        self._warn()
        attrs = {**self.description["attrs"], "provenance": self.description["provenance"]}
        return self.labels.dataset(self.rows(), attrs)

    def write(self, columns: Columns, *, kind: str = "batch") -> None:
        """Write a file of some cases; on return they survive any crash."""
        n_cases = len(columns["case_key"])
        with _explained(self.path, f"does not take a {kind} of {n_cases} cases"):
            self._write(columns, kind)

    def _write(self, columns: Columns, kind: str, replaced: Sequence[str] = ()) -> None:
        # Later than the files that were there, also where the clock has been set back.
        latest = max((f.name.partition("-")[2] for f in self._files()), default="")[:21]
        now = int(f"{datetime.now(UTC):%Y%m%d%H%M%S%f}")
        time = f"{min(max(now, 1 + int(latest.replace('T', '') or 0)), _LAST):020d}"
        name = f"{kind}-{time[:8]}T{time[8:]}-{secrets.token_hex(4)}.npz"
        write_whole(self.path / name, pack(columns, self._identity, replaced))
        # It only serves to name lost files, so an error here is no error of the sweep.
        with (
            contextlib.suppress(OSError),
            (self.path / _JOURNAL).open("a", encoding="utf-8") as journal,
        ):
            journal.write(f"{name}\n")

    def add_cases(
        self, parameters: Columns, make_keys: Callable[[int], np.ndarray]
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Write the cases that are not in the store yet; what identifies each, and `rows_of` it.

        Args:
            parameters: of all cases.
            make_keys: makes what identifies the cases from the n-th on; those before it are the
                first of the store.

        Raises:
            ValueError: parameters that one column with those of the store would not hold.
        """
        rows = self.rows()
        values = {name: rows.pop(name) for name in self.labels.blank(0)}
        check_joinable(parameters, rows)
        stored = rows.pop("case_key")
        n = n_in_common(parameters, rows)
        keys = np.concatenate([stored[:n], make_keys(n)])
        if n == len(keys):  # as they stand there
            return keys, {name: column[:n] for name, column in values.items()}
        if (new := n + np.flatnonzero(~np.isin(keys[n:], stored))).size:
            added = {name: column[new] for name, column in parameters.items()}
            status = np.zeros(new.size, np.int8)
            self.write({"case_key": keys[new], **added, "status": status}, kind="grid")
            self.refresh()
        del rows, values
        return keys, self.rows_of(keys)

    def merge_files(self) -> None:
        """Merge small files if there are many; remove the old ones once the new one is safe.

        An error, such as a full disk, is a warning: nothing is lost by it.
        """
        try:
            sizes = {f.name: f.stat().st_size for f in self.path.glob("*.npz")}
            if sum(size < _SMALL for size in sizes.values()) <= _MOST_FILES:
                return
            self.refresh()
            small = [name for name in self.files if sizes.get(name, _SMALL) < _SMALL]
            joined = join(self.labels, [self._tables[name] for name in small])
            self._write(joined, "grid", small)
            # Journal first: a crash must not report merged files as lost.
            obsolete = {*small, *(name for merged in small for name in self._replaced[merged])}
            self._write_journal(sorted(self._names_written() - obsolete))
            for name in small:
                (self.path / name).unlink(missing_ok=True)
        except FileNotFoundError:  # another process was faster
            return
        except (OSError, MemoryError) as error:
            warnings.warn(
                f"{_shown(self.path)}: its {len(self.files)} files are not merged ({error}); they "
                "are whole and hold everything, and the same sweep again merges them",
                stacklevel=3,
            )

    def put_in_order(self) -> None:
        """Warn of damaged files and rename them; remove temporary files of dead processes."""
        self._warn()
        with _explained(self.path, "cannot be put in order"):
            for name in self.damaged:
                _set_aside(self.path / name)
            if self.damaged or self.missing:  # warned of once
                self.damaged.clear()
                self.missing.clear()
                self._write_journal(self.files)
            remove_litter(self.path)

    def _write_journal(self, names: list[str]) -> None:
        if (self.path / _JOURNAL).is_dir():
            _set_aside(self.path / _JOURNAL)
        write_whole(self.path / _JOURNAL, "".join(f"{name}\n" for name in names).encode())

    def _warn(self) -> None:
        troubles = [f"{n} ({why})" for n, why in self.damaged.items()]
        troubles += [f"{name} (missing)" for name in self.missing]
        if troubles:
            warnings.warn(
                f"{_shown(self.path)}: {', '.join(troubles[:5])}"
                + (f" and {len(troubles) - 5} more" if len(troubles) > 5 else "")
                + ": their cases are pending, unless other files hold them; the same sweep again "
                "computes them",
                stacklevel=4,
            )


def is_store(path: Path) -> bool:
    """Whether the store of a sweep is at the path, damaged or not."""
    return path.is_dir() and (
        is_description(path / _DESCRIPTION) or any(_FILE.fullmatch(f.name) for f in path.iterdir())
    )


def description_at(path: Path) -> dict[str, Any] | None:
    """The description of the store at `path`; None without a store, {} if it is damaged."""
    if not path.exists():
        return None
    if path.is_dir() and all(f.name[0] == "." and f.suffix == ".tmp" for f in path.iterdir()):
        return None  # another process makes it, or has died while it did
    try:
        return _read_description(path)
    except DamagedError as error:
        warnings.warn(str(error), stacklevel=4)
        return {}


def open_store(
    path: Path,
    description: Mapping[str, Any],
    stored: Mapping[str, Any] | None,
    *,
    accept_changed_code: bool = False,
) -> Store:
    """The store for a sweep with this description; made if there is none.

    If several processes make it at the same time, all use that of the first.

    Args:
        path: the folder.
        description: "schema", "configuration", what the function has "carried", digests of its
            "source" by name, the labels, "attrs" and "provenance".
        stored: from `description_at`.
        accept_changed_code: do not look at what the function carries, nor at its code.

    Raises:
        ValueError: the store has another configuration.
        OSError: it cannot be made.
    """
    with _explained(path, "cannot be made"):
        if stored == {}:  # damaged
            _set_aside(path / _DESCRIPTION)
        stored = stored or _create(path, description)
    cure = "or the configuration it was begun with"
    _check_same(path, stored["configuration"], description["configuration"], cure)
    _log_other_versions(path, stored)
    if not accept_changed_code:
        _check_function(path, stored, description)
    store = Store(path, stored)
    store.put_in_order()
    return store


def _create(path: Path, description: Mapping[str, Any]) -> Mapping[str, Any]:
    """Write the description; if another process was first, read its own."""
    make_folder(path)
    if (path / _DESCRIPTION).exists():
        return _read_description(path)
    if strangers := [n for n, why in Store(path, description).damaged.items() if why == _STRANGE]:
        raise ValueError(
            f"{_shown(path)}: {_DESCRIPTION} is damaged, and there are files {_STRANGE} than that "
            f"asked for, such as {strangers[0]}; give another path, or what it was begun with"
        )
    with contextlib.suppress(FileExistsError):
        write_whole(path / _DESCRIPTION, _pack_description(description), replace=False)
    return _read_description(path)


def _set_aside(file: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.replace(file, file.with_name(f"{file.name}.damaged"))


def _pack_description(description: Mapping[str, Any]) -> bytes:
    """The content of `sweep.json`, one line per entry."""
    entries = {"checksum": _checksum(description), **description}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(entries[name])}" for name in entries)
    return f"{{\n{lines}\n}}\n".encode()


def _read_description(path: Path) -> dict[str, Any]:
    """What the store holds.

    Raises:
        FileNotFoundError: there is nothing at the path.
        ValueError: no store, or one of another version.
        DamagedError: the description is damaged or missing.
    """
    if not path.exists():
        raise FileNotFoundError(f"store: expected the store of a sweep, got nothing at {path}")
    if not is_store(path):
        inside = sorted(store.name for store in path.glob("*.sweep"))
        meant = f"; it holds {', '.join(inside)}" if inside else ""
        empty = path.is_dir() and not any(path.iterdir())
        what = "an empty folder" if empty else "something else"
        raise ValueError(
            f"store: expected the store of a sweep or nothing, got {path}, which is {what}{meant}"
        )
    try:
        description = json.loads(read_regular(path / _DESCRIPTION))
        whole = description.pop("checksum") == _checksum(description)
        schema = description["schema"]
        if whole and schema == SCHEMA:
            Labels.from_plain(description).blank(0)
            _identity(description), description["attrs"], json.loads(description["provenance"])
    except Exception:  # damaged bytes may raise anything
        whole = False
    if not whole:
        raise DamagedError(
            f"{_shown(path)}: {_DESCRIPTION} is damaged or missing; the same sweep again writes "
            "it anew and keeps the finished cases"
        )
    if schema != SCHEMA:
        raise ValueError(
            f"{_shown(path)}: expected schema {SCHEMA}, got {schema}: it belongs to another "
            "version of this library; give another path"
        )
    return description


def _check_same(
    path: Path, stored: Mapping[str, Any], given: Mapping[str, Any], cure: str
) -> None:
    """Refuse entries that differ, or are in one of two alone."""
    given = json.loads(json.dumps(given))
    changes = "; ".join(
        f"{n}: stored {_short(stored, n)}, now {_short(given, n)}"
        for n in {**stored, **given}
        if n not in stored or n not in given or stored[n] != given[n]
    )
    if changes:
        raise ValueError(
            f"{_shown(path)} holds a sweep of another configuration ({changes}). Give another "
            f"path, {cure}"
        )


def _check_function(path: Path, stored: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse a function that carries other values; warn of changed code, and name it."""
    then, now = stored["carried"], given["carried"]
    # Defaults and what is closed over come and go with the source, of which a warning tells.
    compared = {n for n in {**then, **now} if "argument " in n} | (then.keys() & now.keys())
    then, now = ({n: of[n] for n in sorted(compared) if n in of} for of in (then, now))
    cure = "or accept_changed_code=True if it computes the same"
    _check_same(path, then, now, cure)
    then, now = stored["source"], given["source"]
    if changed := {n for n in {**then, **now} if then.get(n) != now.get(n)}:
        warnings.warn(
            f"{_shown(path)}: {given['configuration']['function']}: what the store was begun with "
            f"has changed since in {', '.join(sorted(changed))}; finished cases are kept as they "
            f"are. Give another store, {cure}",
            stacklevel=5,
        )


def _log_other_versions(path: Path, stored: Mapping[str, Any]) -> None:
    """Log changed versions of libraries, with which numbers may change."""
    then = json.loads(stored["provenance"]).get("versions", {})
    now = versions()
    if changed := [f"{n} {then.get(n)} -> {now.get(n)}" for n in now if then.get(n) != now[n]]:
        _log.warning("store %s was begun with other versions: %s", path, ", ".join(changed))


@contextlib.contextmanager
def _explained(path: Path, what: str) -> Iterator[None]:
    """Add to an error of the file system what failed and what is kept."""
    try:
        yield
    except OSError as error:
        raise type(error)(
            error.errno,
            f"{_shown(path)} {what}: {error.strerror or error}. Finished batches are kept: make "
            "room or give a folder that can be written, and run the same sweep again to go on",
        ) from error


def _checksum(data: Any) -> str:
    return digest(json.dumps(data, sort_keys=True))


def _identity(description: Mapping[str, Any]) -> str:
    """The digest of what computes the values, which stands in every file."""
    names = ("configuration", "carried", "source")
    return _checksum([description[name] for name in names])


def _shown(path: Path) -> str:
    return f"store {printable(str(path))}"


def _short(values: Mapping[str, Any], name: str) -> str:
    text = json.dumps(values[name], ensure_ascii=False) if name in values else "nothing"
    return text if len(text) <= 60 else text[:57] + "..."
