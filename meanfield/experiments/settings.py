"""Settings of experiments: their fields, TOML files, single values overridden by text."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import Field, field, fields, replace
from typing import Any

from meanfield.checks import as_path, choice

_SAME: Any = object()


def setting(value: Any, meaning: str, *, quick: Any = _SAME, **more: Any) -> Any:
    """A field of an experiment's settings.

    Args:
        value: what the whole experiment takes.
        meaning: in words.
        quick: what a run of seconds takes, or a function of the value that a whole run would
            take; that value if it is not given.
        **more: what `over`, `along` and `derived` note.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Settings:
        ...     radii: tuple[float, ...] = over("radius", (1.0, 2.0, 4.0), "R", quick=(1.0,))
        ...     power: int = setting(2, "exponent")
        >>> Settings(), quick_of(Settings())
        (Settings(radii=(1.0, 2.0, 4.0), power=2), Settings(radii=(1.0,), power=2))
    """
    small = {} if quick is _SAME else {"quick": quick}
    return field(default=value, metadata={"meaning": meaning, **small, **more})


def over(parameter: str, value: Any, meaning: str, *, quick: Any = _SAME, **labels: str) -> Any:
    """A setting that is an axis of the grid: a case has one of its values.

    Args:
        parameter: what a value of it is called in a case and in the Dataset; "" if the
            experiment's `grid` makes cases of it in a way of its own.
        value: a tuple of values, or a number of them, for 0, 1, ….
        meaning: of the parameter.
        quick: as of `setting`.
        **labels: `units` and `symbol` of the parameter, see `results.Variable`.
    """
    return setting(value, meaning, quick=quick, over=parameter, labels=labels)


def along(dim: str, value: Any, meaning: str, *, quick: Any = _SAME, **labels: str) -> Any:
    """A setting that is the coordinate along a dimension of the results; as `over`."""
    return setting(value, meaning, quick=quick, along=dim, labels=labels)


def derived(value: Any, meaning: str) -> Any:
    """A field that the experiment's `resolve` fills in, and nobody else."""
    return setting(value, meaning, derived=True)


def marked(settings: Any, mark: str) -> dict[str, Field[Any]]:
    """The fields made by `over` or `along`, by the name of the parameter or dimension."""
    return {f.metadata[mark]: f for f in fields(settings) if f.metadata.get(mark)}


def values_of(settings: Any, one: Field[Any]) -> Any:
    """The values of such a field."""
    value = getattr(settings, one.name)
    return range(value) if isinstance(value, int) else value


def without_grid(settings: Any) -> Any:
    """The settings as a case gets them: empty where they are the grid's.

    A measurement cannot depend on which other cases there are, and a grid may grow.
    """
    grid = [f.name for f in fields(settings) if "over" in f.metadata]
    return replace(settings, **{name: type(getattr(settings, name))() for name in grid})


def quick_of(settings: Any) -> Any:
    """The settings of a run of seconds: what has a small value takes it, the rest stays."""
    small = {f.name: f.metadata["quick"] for f in fields(settings) if "quick" in f.metadata}
    found = {k: v(getattr(settings, k)) if callable(v) else v for k, v in small.items()}
    return replace(settings, **found)


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The values of a TOML file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no TOML; the message names the line.
    """
    path = as_path(path)
    if not path.is_file():
        raise FileNotFoundError(f"configuration: no file at {path}")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"configuration {path}: expected TOML, got: {error}") from None


def override(settings: Any, changes: Mapping[str, Any], texts: Iterable[str] = ()) -> Any:
    """The settings with some values changed, and then with those of ``key=value`` texts.

    A text's value is read as TOML: numbers, true, false, [lists]; what is no TOML is text, but
    for Python's True and False.

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
    known = {
        one.name: getattr(settings, one.name)
        for one in fields(settings)
        if not one.metadata.get("derived")
    }
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
            return {"True": True, "False": False}.get(text, text)
        raise ValueError(f"setting {key!r}: broken TOML, {text}: {error}") from None
    if len(table) > 1:
        raise ValueError(f"setting {key!r}: expected one value, got {text!r}")
    return table["value"]


def _fitting(key: str, value: Any, current: Any, listed: str = "") -> Any:
    """The value converted to the type of the current one, or an error with what is expected."""
    if isinstance(current, tuple):
        in_words = any(isinstance(item, str) for item in current)
        if isinstance(value, str) and "," in value and not in_words:
            raise ValueError(
                f"setting {key!r}: expected a list in brackets, such as "
                f"--set '{key}=[{value.strip('() ')}]', got {value!r}"
            )
        items = value if isinstance(value, list) else [value]
        listed = "" if isinstance(value, list) else " or a list of them"
        return tuple(
            _fitting(key, item, current[0], listed) if current else item for item in items
        )
    if isinstance(current, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if current is not None and type(value) is not type(current):
        raise ValueError(
            f"setting {key!r}: expected {type(current).__name__} such as {current!r}{listed}, "
            f"got {value!r}"
        )
    return value
