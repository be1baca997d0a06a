"""How a result was made, as one JSON string: netCDF attributes hold no bool, None or dict."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import meanfield

if TYPE_CHECKING:
    import xarray as xr

PACKAGES = ("torch", "numpy", "scipy", "POT", "geomloss", "xarray", "zarr")


def provenance(
    spec: Mapping[str, Any] | None = None,
    *,
    seed: int | None = None,
    dtype: object = None,
    device: object = None,
) -> str:
    """What is needed to make a result again, as one line of JSON.

    Args:
        spec: what was computed, as plain data (text, numbers, lists, dicts); anything else is
            written as its `str`.
        seed: the seed the user gave.
        dtype: of the computation, such as ``torch.float64``.
        device: of the computation, such as ``"cpu"``.

    Example:
        >>> record = json.loads(provenance({"radius": 2.0}, seed=7))
        >>> record["spec"], record["seed"]
        ({'radius': 2.0}, 7)
    """
    record = {
        "spec": dict(spec or {}),
        "seed": seed,
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "device": None if device is None else str(device),
        "versions": versions(),
        "python": platform.python_version(),
        "platform": f"{platform.system()}-{platform.machine()}",
        "commit": _commit(),
        "command": _command(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return _line(record)


def with_spec(line: str, changes: Mapping[str, Any]) -> str:
    """A provenance with other entries in its `spec`."""
    record = json.loads(line)
    return _line(record | {"spec": record.get("spec", {}) | changes})


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, sort_keys=True, default=str, ensure_ascii=False)


def read_provenance(ds: xr.Dataset) -> dict[str, Any]:
    """The provenance of a Dataset, decoded; empty if it has none.

    Raises:
        ValueError: what it has is not that of this library.
    """
    from meanfield.results.shapes import as_dataset  # loads xarray

    text = as_dataset(ds).attrs.get("provenance", "{}")
    try:
        return dict(json.loads(text))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"ds: expected a provenance of this library, one line of JSON, got {text!r:.80}"
        ) from error


def versions() -> dict[str, str]:
    """The versions of this library and of its dependencies."""
    found = {"meanfield": meanfield.__version__, **{name: _version(name) for name in PACKAGES}}
    return {package: version for package, version in found.items() if version}


@functools.cache  # 4 ms each, in every sweep
def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache  # what was imported is what ran, whatever changes later
def _commit() -> str | None:
    """The commit of the source tree, with "-dirty" if tracked files were changed."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():  # installed, perhaps inside another project's repository
        return None
    always_the_hash = ("--always", "--abbrev=40", "--exclude=*")
    command = ["git", "-C", str(root), "describe", *always_the_hash, "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _quoted(argument: str) -> str:
    """An argument for a shell, which knows "~/" where it stands first and is not quoted."""
    home = str(Path.home()) + "/"
    if argument.startswith(home):
        return "~/" + shlex.quote(argument.removeprefix(home))
    return '"$HOME"/'.join(map(shlex.quote, argument.split(home)))


def _command() -> str:
    program = Path(sys.argv[0] or "python")
    # Without its folder: results are shared, and home folders are private.
    words = ["python", program.name] if program.suffix == ".py" else [program.name]
    if program.name == "__main__.py":
        words = ["python", "-m", program.parent.name]
    command = " ".join([*map(shlex.quote, words), *map(_quoted, sys.argv[1:])])
    return command.encode(errors="backslashreplace").decode()  # names of files may not be UTF-8
