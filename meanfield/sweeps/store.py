"""The store of a sweep: a Zarr v3 folder that any process may die over.

Long form: one dimension `case`. A batch of cases is one chunk in every variable and the unit of
work; its data are written first and its entry of the mask `done`, a chunk of its own, last. Zarr
writes each chunk under another name and renames it, so a chunk is whole or absent, and a batch
that is not marked is done again with the same seeds. The folder itself is made under another name
and renamed. Metadata never change afterwards: cases that are added later live in groups
``extension-…`` of the same form, which keeps every step atomic without locks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meanfield.results import Variable, provenance
from meanfield.results.stores import DATASET_ATTRS
from meanfield.sweeps.grid import Case, columns_of
from meanfield.sweeps.plan import Plan
from meanfield.sweeps.task import FAILED, Task

__all__ = [
    "Part",
    "configuration_of",
    "create_part",
    "open_store",
    "parts_at",
    "provenance_of",
    "read_values",
    "write_batch",
]

_log = logging.getLogger("meanfield")
SCHEMA = 1
STATUS_ATTRS = {
    "long_name": "how the case ended",
    "units": "1",
    "flag_values": np.arange(4, dtype=np.int8),
    "flag_meanings": "pending ok not_converged failed",
}
MESSAGE_ATTRS = {"long_name": "why it failed", "units": "1"}
_STALE_SECONDS = 3600.0  # a leftover this old belongs to no living process


@dataclass(frozen=True)
class Part:
    """A group of the store: the first grid, or cases that were added to it at one time."""

    path: Path
    keys: np.ndarray
    batch_size: int

    @property
    def n_batches(self) -> int:
        """How many chunks there are along `case`."""
        return math.ceil(len(self.keys) / self.batch_size)

    def rows(self, batch: int) -> slice:
        """The cases of a batch."""
        return slice(batch * self.batch_size, min((batch + 1) * self.batch_size, len(self.keys)))

    def done(self) -> np.ndarray:
        """Which batches are finished."""
        return np.asarray(_group(self.path)["done"][:], dtype=bool)

    def cases(self) -> list[Case]:
        """The parameters of its cases, exactly as they were given."""
        return [json.loads(text) for text in _group(self.path)["case_json"][:]]

    def forget_failed(self) -> None:
        """Mark batches with failed cases as not done, so that they are run again."""
        group = _group(self.path, mode="r+")
        failed = np.flatnonzero(group["status"][:] == FAILED) // self.batch_size
        for batch in np.unique(failed):
            group["done"][int(batch)] = False


def open_store(path: Path, plan: Plan) -> list[Part]:
    """The parts of the store at `path`; none if nothing is there.

    Raises:
        ValueError: what is there is no store of a sweep, or one of another configuration; the
            message names the fields that differ.
    """
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return []
    stored = configuration_of(path)
    mine = plan.configuration
    differing = [n for n in {**stored, **mine} if stored.get(n) != mine.get(n)]
    if differing:
        changes = "; ".join(
            f"{n}: stored {_short(stored.get(n))}, now {_short(mine.get(n))}" for n in differing
        )
        raise ValueError(
            f"store {path} holds a sweep of another configuration ({changes}). Give another "
            "path, or the configuration it was begun with"
        )
    _remove_leftovers(path)
    _note_other_versions(path)
    return parts_at(path)


def parts_at(path: Path) -> list[Part]:
    """The parts of the store at `path`."""
    return [_part(folder) for folder in (path, *sorted(path.glob("extension-*")))]


def provenance_of(path: Path) -> str:
    """The provenance that the store was begun with, JSON."""
    return str(_group(path).attrs["provenance"])


def configuration_of(path: Path) -> dict[str, Any]:
    """The configuration that a store was begun with.

    Raises:
        FileNotFoundError: there is nothing at the path.
        ValueError: what is there is no store of a sweep.
    """
    if not path.exists():
        raise FileNotFoundError(f"store: nothing at {path}")
    try:
        attrs = json.loads((path / "zarr.json").read_text())["attributes"]
        schema, configuration = attrs["sweep_schema"], json.loads(attrs["configuration"])
    except (OSError, KeyError, TypeError, ValueError):
        raise ValueError(
            f"store: expected the store of a sweep or nothing, got {path}, which is something else"
        ) from None
    if schema != SCHEMA:
        raise ValueError(f"store {path}: expected schema {SCHEMA}, got {schema}")
    return configuration


def create_part(path: Path, plan: Plan, size: int) -> Part:
    """Make a store for the plan, or an extension of one.

    It is made under another name and renamed into place: of processes that do so at once the
    first wins, and the others open what it has made.
    """
    target = path
    if path.exists() and any(path.iterdir()):
        digest = hashlib.sha256(np.sort(plan.keys).tobytes()).hexdigest()[:16]
        target = path / f"extension-{digest}"
    hidden = target.with_name(f".{target.name}-{secrets.token_hex(4)}.tmp")
    with _explained(path, "cannot be made"):
        hidden.parent.mkdir(parents=True, exist_ok=True)
        try:
            _initialise(hidden, plan, size)
            with contextlib.suppress(FileExistsError):
                _rename(hidden, target)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
    if target == path:
        configuration_of(path)
    return _part(target)


def write_batch(path: Path, batch: int, size: int, values: Mapping[str, np.ndarray]) -> None:
    """Write a finished batch: the data first, the mark that it is done last."""
    with _explained(path, f"does not take batch {batch}"):
        group = _group(path, mode="r+")
        rows = slice(batch * size, batch * size + len(values["status"]))
        for name, array in values.items():
            group[name][rows] = array
        group["done"][batch] = True


def read_values(parts: list[Part], plan: Plan) -> dict[str, np.ndarray]:
    """The arrays of the plan's cases, in its order; pending where a batch is not done."""
    values = plan.task.blank(len(plan.cases))
    place = {int(key): i for i, key in enumerate(plan.keys)}
    for part in parts:
        group = _group(part.path)
        finished = np.repeat(part.done(), part.batch_size)[: len(part.keys)]
        rows = [i for i in np.flatnonzero(finished) if int(part.keys[i]) in place]
        to = [place[int(part.keys[i])] for i in rows]
        for name, array in values.items():
            array[to] = np.asarray(group[name][:])[rows]
    return values


def _initialise(path: Path, plan: Plan, size: int) -> None:
    """An empty part: parameters are there, all results pending."""
    import zarr

    cases, columns = plan.cases, columns_of(plan.cases)
    group = zarr.open_group(path, mode="w-", zarr_format=3)
    group.attrs.update(_root_attrs(plan, columns, size))
    labels = {v.name: v.attrs for v in plan.task.parameters}
    for name, values in {**columns, **plan.task.coords}.items():
        dims = ("case",) if name in columns else (name,)
        _put(group, name, values, dims, labels.get(name, Variable.unlabelled(name).attrs))
    _put(group, "case_key", plan.keys, ("case",), _internal("SHA-256 of the parameters, 63 bits"))
    texts = np.array([json.dumps(case) for case in cases], dtype=object)
    _put(group, "case_json", texts, ("case",), _internal("the parameters"))
    _reserve(group, plan.task, len(cases), size)
    batches = math.ceil(len(cases) / size)
    _array(group, "done", (batches,), (1,), "bool", False, ("batch",), _internal("batch is done"))


def _root_attrs(plan: Plan, columns: Mapping[str, Any], size: int) -> dict[str, Any]:
    configuration = json.dumps(plan.configuration, sort_keys=True, ensure_ascii=False)
    return {
        "sweep_schema": SCHEMA,
        "configuration": configuration,
        "configuration_key": hashlib.sha256(configuration.encode()).hexdigest(),
        "batch_size": size,
        "coordinates": " ".join(columns),  # xarray reads these as coordinates
        "provenance": provenance(**plan.record),
        DATASET_ATTRS: plan.attrs,
    }


def _reserve(group: Any, task: Task, n_cases: int, size: int) -> None:
    """Arrays for the results, chunk = batch, with nothing in them yet."""
    for v in task.variables:
        shape = task.shape(v)
        _array(
            group, v.name, (n_cases, *shape), (size, *(max(1, k) for k in shape)),
            v.dtype, v.fill, ("case", *v.dims), v.attrs,
        )  # fmt: skip
    _array(group, "status", (n_cases,), (size,), "int8", 0, ("case",), STATUS_ATTRS)
    _array(group, "message", (n_cases,), (size,), "str", "", ("case",), MESSAGE_ATTRS)


def _array(
    group: Any,
    name: str,
    shape: tuple[int, ...],
    chunks: tuple[int, ...],
    dtype: str,
    fill: Any,
    dims: tuple[str, ...],
    attrs: Mapping[str, Any],
) -> Any:
    plain = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in attrs.items()}
    return group.create_array(
        name,
        shape=shape,
        chunks=chunks,
        dtype=str if dtype == "str" else dtype,
        fill_value=fill,
        dimension_names=dims,
        attributes=plain,
        # A chunk of nothing but fill values is no file: most messages are empty.
        config={"write_empty_chunks": False},
    )


def _put(
    group: Any, name: str, values: np.ndarray, dims: tuple[str, ...], attrs: Mapping[str, Any]
) -> None:
    text = values.dtype.kind in "UO"
    fill = "" if text else values.dtype.type(0)
    dtype = "str" if text else str(values.dtype)
    array = _array(group, name, values.shape, values.shape, dtype, fill, dims, attrs)
    array[...] = values.astype(object) if text else values


def _internal(meaning: str) -> dict[str, str]:
    return {"long_name": meaning, "units": "1"}


def _part(path: Path) -> Part:
    group = _group(path)
    return Part(path, np.asarray(group["case_key"][:]), int(group.attrs["batch_size"]))


def _group(path: Path, mode: Any = "r") -> Any:
    import zarr

    return zarr.open_group(path, mode=mode, zarr_format=3, use_consolidated=False)


def _rename(source: Path, target: Path) -> None:
    """Rename a folder; FileExistsError if the target is there, on every system."""
    try:
        os.rename(source, target)
    except OSError as error:
        if target.is_dir() and any(target.iterdir()):
            raise FileExistsError(str(target)) from error
        raise


def _note_other_versions(path: Path) -> None:
    """A line in the log if libraries changed since the store was begun: numbers may, too."""
    then = json.loads(provenance_of(path))["versions"]
    now = json.loads(provenance(command=""))["versions"]
    if changed := [f"{n} {then.get(n)} -> {now.get(n)}" for n in now if then.get(n) != now[n]]:
        _log.warning("store %s was begun with other versions: %s", path, ", ".join(changed))


def _remove_leftovers(path: Path) -> None:
    """What processes that were killed left behind, once it is surely nobody's."""
    unfinished = [*path.rglob("*.partial"), *path.glob(".extension-*.tmp")]
    for leftover in (*unfinished, *path.parent.glob(f".{path.name}-*.tmp")):
        with contextlib.suppress(OSError):
            if time.time() - leftover.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


@contextlib.contextmanager
def _explained(path: Path, what: str) -> Iterator[None]:
    """An error of the file system, with what was being done and what is left."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise type(error)(
            error.errno,
            f"store {path} {what}: {reason}. Finished batches are kept: make room or give a "
            "folder that can be written, and run the same sweep again to go on",
        ) from error


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False) if value is not None else "nothing"
    return text if len(text) <= 60 else text[:57] + "..."
