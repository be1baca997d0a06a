"""Writing the store of a sweep; `meanfield.results.stores` says what is in it and reads it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from meanfield.results.atomic import remove_litter, sync, write_whole
from meanfield.results.provenance import versions
from meanfield.results.stores import (
    DESCRIPTION,
    JOURNAL,
    DamagedError,
    Store,
    digest,
    pack_cases,
    pack_description,
    read_description,
)
from meanfield.sweeps.plan import Plan

__all__ = ["description_at", "merge", "open_store", "rows_of", "write_cases"]

_log = logging.getLogger("meanfield")
_MOST_FILES = 32  # beyond which they are merged into one; each costs 1 ms whenever it is read


def description_at(path: Path) -> dict[str, Any] | None:
    """What the store at `path` computes; None if there is none yet, {} if that is lost."""
    if not path.exists() or (path.is_dir() and all(_is_hidden(f) for f in path.iterdir())):
        return None
    try:
        return read_description(path)
    except DamagedError as error:
        warnings.warn(str(error), stacklevel=4)
        return {}


def open_store(
    path: Path, plan: Plan, stored: dict[str, Any] | None, *, accept_changed_code: bool = False
) -> Store:
    """The store for the plan, made if it is not there; all cases of the plan are listed in it.

    Of processes that make it at once the first wins, and the others use what it has made.
    """
    with _explained(path, "cannot be made"):
        if not stored:
            stored = _create(path, plan, replace=stored is not None)
    _check_same(path, stored["configuration"], plan.configuration)
    _note_other_versions(path, stored)
    if stored["code"] != plan.task.code and not accept_changed_code:
        warnings.warn(
            f"store {path}: the source of {plan.task.identity} is not what the store was begun "
            "with, and finished cases are kept as they are; give another store, or "
            "accept_changed_code=True if it computes the same",
            stacklevel=3,
        )
    store = Store(path, stored)
    with _explained(path, "cannot be put in order"):
        _put_in_order(store)
        if (new := np.flatnonzero(~np.isin(plan.keys, store.rows()["case_key"]))).size:
            write_cases(store, plan, new, {"status": np.zeros(new.size, np.int8)}, kind="grid")
            store.refresh()
    return store


def rows_of(store: Store, plan: Plan) -> dict[str, np.ndarray]:
    """The values that the store has of the plan's cases, in the plan's order."""
    rows, own = store.rows(), store.blank(len(plan.cases))
    order = np.argsort(rows["case_key"])
    places = np.searchsorted(rows["case_key"], plan.keys, sorter=order)
    places = order[np.minimum(places, len(order) - 1)]
    there = rows["case_key"][places] == plan.keys  # another is lost since the store was opened
    for name, column in own.items():
        column[there] = rows[name][places[there]]
    return own


def write_cases(
    store: Store,
    plan: Plan,
    places: Sequence[int] | np.ndarray,
    columns: Mapping[str, np.ndarray],
    *,
    kind: str = "batch",
) -> None:
    """Write a file of some cases of the plan; when this returns it is safe from any crash."""
    parameters = {name: column[places] for name, column in plan.columns.items()}
    rows = {"case_key": plan.keys[places], **parameters, **columns}
    with _explained(store.path, f"does not take a {kind} of {len(places)} cases"):
        _write_rows(store, rows, kind)


def merge(store: Store) -> None:
    """Merge the files into one, if there are many; the old ones go when the new one is safe."""
    if len(list(store.path.glob("*.nc"))) <= _MOST_FILES:
        return
    store.refresh()
    old = store.files
    with _explained(store.path, "cannot be merged"):
        name = _write_rows(store, store.rows(), "grid")
        # First, so that none of the old ones is taken for lost if we die before the end.
        write_whole(store.path / JOURNAL, f"{name}\n".encode())
        for merged in old:
            (store.path / merged).unlink(missing_ok=True)


def _write_rows(store: Store, rows: Mapping[str, np.ndarray], kind: str) -> str:
    data = pack_cases(store.description, rows)
    name = f"{kind}-{datetime.now(UTC):%Y%m%dT%H%M%S%f}-{digest(data)}.nc"
    write_whole(store.path / name, data)
    # Only so that a file that is lost can be named; nothing else depends on it.
    with (
        contextlib.suppress(OSError),
        (store.path / JOURNAL).open("a", encoding="utf-8") as journal,
    ):
        journal.write(f"{name}\n")
    return name


def _create(path: Path, plan: Plan, *, replace: bool) -> dict[str, Any]:
    """Write the description, unless another process was first; one that is lost is replaced."""
    description = plan.description
    path.mkdir(parents=True, exist_ok=True)
    sync(path.parent)
    strangers = Store(path, description).damaged
    if "of another configuration" in strangers.values():
        raise ValueError(
            f"store {path}: {DESCRIPTION} is damaged, and there are files of another "
            f"configuration than that asked for, such as {next(iter(strangers))}; give another "
            "path, or the configuration it was begun with"
        )
    try:
        write_whole(path / DESCRIPTION, pack_description(description), replace=replace)
    except FileExistsError:
        return read_description(path)
    return description


def _put_in_order(store: Store) -> None:
    """Say what is damaged and set it aside; remove what dead processes left."""
    store.warn()
    for name in store.damaged:
        with contextlib.suppress(FileNotFoundError):
            os.replace(store.path / name, store.path / f"{name}.damaged")
    if store.damaged or store.missing:  # said once
        store.damaged.clear()
        write_whole(store.path / JOURNAL, "".join(f"{n}\n" for n in store.files).encode())
    remove_litter(store.path)


def _check_same(path: Path, stored: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    mine = json.loads(json.dumps(mine))
    differing = [n for n in {**stored, **mine} if stored.get(n) != mine.get(n)]
    if differing:
        changes = "; ".join(
            f"{n}: stored {_short(stored.get(n))}, now {_short(mine.get(n))}" for n in differing
        )
        raise ValueError(
            f"store {path} holds a sweep of another configuration ({changes}). Give another "
            "path, or the configuration it was begun with"
        )


def _note_other_versions(path: Path, stored: Mapping[str, Any]) -> None:
    """A line in the log if libraries changed since the store was begun: numbers may, too."""
    then = json.loads(stored["provenance"]).get("versions", {})
    now = versions()
    if changed := [f"{n} {then.get(n)} -> {now.get(n)}" for n in now if then.get(n) != now[n]]:
        _log.warning("store %s was begun with other versions: %s", path, ", ".join(changed))


def _is_hidden(file: Path) -> bool:
    return file.name.startswith(".") and file.suffix == ".tmp"


@contextlib.contextmanager
def _explained(path: Path, what: str) -> Iterator[None]:
    """An error of the file system, with what was being done and what is left."""
    try:
        yield
    except OSError as error:
        raise type(error)(
            error.errno,
            f"store {path} {what}: {error.strerror or error}. Finished batches are kept: make "
            "room or give a folder that can be written, and run the same sweep again to go on",
        ) from error


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False) if value is not None else "nothing"
    return text if len(text) <= 60 else text[:57] + "..."
