"""Settings of experiments: their fields, TOML files, single values overridden by text."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import field, fields, replace
from pathlib import Path
from typing import Any

from meanfield.checks import choice

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


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The values of a TOML file.

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


def override(settings: Any, changes: Mapping[str, Any], texts: Iterable[str] = ()) -> Any:
    """The settings with some values changed, and then with those of ``key=value`` texts.

    A text's value is read as TOML: numbers, true, false, [lists]; what is no TOML is text.

    Raises:
        ValueError: a text without "=", no such setting, a value of another type.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Settings:
        ...     radii: tuple[float, ...] = (1.0, 2.0)
        ...     seed: int = 0
        >>> override(Settings(), {"seed": 7}, ["radii=[1, 4]"])
        Settings(radii=(1.0, 4.0), seed=7)
    """
    changes = dict(changes)
    for text in texts:
        key, equals, value = (piece.strip() for piece in text.partition("="))
        if not (key and equals):
            raise ValueError(f"setting: expected key=value, got {text!r}")
        changes[key] = _value(key, value)
    known = vars(settings)
    fitting = {
        key: _fitting(key, value, known[choice(key, "setting", known)])
        for key, value in changes.items()
    }
    return replace(settings, **fitting)


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


def _fitting(key: str, value: Any, current: Any) -> Any:
    """The value converted to the type of the current one, or an error with what is expected."""
    if isinstance(current, tuple):
        in_words = any(isinstance(item, str) for item in current)
        if isinstance(value, str) and "," in value and not in_words:
            raise ValueError(
                f"setting {key!r}: expected a list in brackets, such as "
                f"--set '{key}=[{value.strip('() ')}]', got {value!r}"
            )
        items = value if isinstance(value, list) else [value]
        return tuple(_fitting(key, item, current[0]) if current else item for item in items)
    if isinstance(current, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if current is not None and type(value) is not type(current):
        raise ValueError(
            f"setting {key!r}: expected {type(current).__name__} such as {current!r}, "
            f"got {value!r}"
        )
    return value
