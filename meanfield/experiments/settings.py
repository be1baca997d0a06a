"""Settings of experiments: their fields, TOML files, single values overridden by text."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import field, fields
from pathlib import Path
from typing import Any


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no TOML; the message names the line.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"configuration: no file at {path}")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"configuration {path}: {error}") from None


def override(
    configuration: Mapping[str, Any], settings: Iterable[str], *, allowed: Iterable[str] = ()
) -> dict[str, Any]:
    """The configuration with ``key=value`` settings applied; it is not changed itself.

    A value is read as TOML: numbers, true, false, [lists]; what is no TOML is text. A dot goes
    into a table.

    Args:
        configuration: tables as `read_toml` gives them.
        settings: texts such as ``"seed=3"`` or ``"grid.radius=[1, 2]"``.
        allowed: the names at the top level that make sense; all if empty.

    Raises:
        ValueError: a setting without "=", or a name that is not allowed.

    Example:
        >>> override({"seed": 0, "grid": {"n": [4]}}, ["seed=3", "grid.n=[4, 8]", "kind=masked"])
        {'seed': 3, 'grid': {'n': [4, 8]}, 'kind': 'masked'}
    """
    changed = {**configuration}
    names = set(allowed)
    for setting in settings:
        key, equals, text = (piece.strip() for piece in setting.partition("="))
        if not (key and equals):
            raise ValueError(f"setting: expected key=value, got {setting!r}")
        *tables, last = key.split(".")
        if names and [*tables, last][0] not in names:
            near = difflib.get_close_matches(key, names, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"setting {key!r}: {hint}expected one of {sorted(names)}")
        table = changed
        for name in tables:
            inner = table.get(name, {})
            if not isinstance(inner, Mapping):
                raise ValueError(f"setting {key!r}: {name!r} holds {inner!r} and is no table")
            table[name] = table = {**inner}
        table[last] = _value(key, text)
    return changed


def _value(key: str, text: str) -> Any:
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError as error:
        if text[0] not in "[{\"'":
            return text
        raise ValueError(f"setting {key!r}: broken TOML, {text}: {error}") from None
    if len(table) > 1:
        raise ValueError(f"setting {key!r}: expected one value, got {text!r}")
    return table["value"]


_SAME: Any = object()


def setting(value: Any, meaning: str, *, quick: Any = _SAME) -> Any:
    """A field of an experiment's settings.

    Args:
        value: what the whole experiment takes.
        meaning: in words.
        quick: what a run of seconds takes; the same value if it is not given.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Settings:
        ...     radii: tuple[float, ...] = setting((1.0, 2.0, 4.0), "R", quick=(1.0,))
        >>> Settings(), quick_of(Settings)
        (Settings(radii=(1.0, 2.0, 4.0)), Settings(radii=(1.0,)))
    """
    quick = value if quick is _SAME else quick
    return field(default=value, metadata={"meaning": meaning, "quick": quick})


def quick_of(kind: Any) -> Any:
    """The settings of this class for a run of seconds."""
    return kind(**{one.name: one.metadata["quick"] for one in fields(kind)})
