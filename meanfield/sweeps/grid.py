"""Grids: lists of cases, what identifies each, and its seed."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import xarray as xr

from meanfield.checks import describe
from meanfield.results.cases import check_doubles
from meanfield.results.labels import printable
from meanfield.sweeps.values import canonical, to_json

Case = dict[str, Any]
Grid = Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]]


def cases_of(grid: Grid) -> list[Case]:
    """The cases of a grid: all combinations of a mapping, or the given list.

    Args:
        grid: parameter name -> values, the last name running fastest; or a list of dicts, whose
            names may differ (a ragged grid).

    Raises:
        ValueError: no cases, the same case twice, NaN or a masked entry as a value.
        TypeError: values other than numbers, truth values and text.

    Example:
        >>> cases_of({"a": [1, 2], "b": ["u"]})
        [{'a': 1, 'b': 'u'}, {'a': 2, 'b': 'u'}]
    """
    if isinstance(grid, Mapping) and not isinstance(grid, xr.Dataset):
        axes: dict[str, list[Any]] = {}
        for name, values in grid.items():
            unordered = isinstance(values, (str, bytes, Set, Mapping))
            if unordered or not isinstance(values, Iterable) or getattr(values, "ndim", 1) == 0:
                raise TypeError(
                    f"grid[{name!r}]: expected a sequence of values, in an order that is the same "
                    f"in every process, got {values!r:.80}"
                )
            axes[str(name)] = [_plain(str(name), value) for value in values]
            _refuse_twins([{name: value} for value in axes[str(name)]])  # then cases differ too
        cases = [dict(zip(axes, row, strict=True)) for row in itertools.product(*axes.values())]
    else:
        is_dataset = isinstance(grid, xr.Dataset)
        table = "; its table is ds.to_dataframe().reset_index()" if is_dataset else ""
        listed = isinstance(grid, Sequence) and not isinstance(grid, (str, bytes))
        if not listed or not all(isinstance(case, Mapping) for case in grid):
            raise TypeError(
                "grid: expected a dict from parameter name to values, or a list of dicts, as of "
                f'table.to_dict("records"), got {describe(grid)}{table}'
            )
        cases = [{str(n): _plain(str(n), v) for n, v in case.items()} for case in grid]
        _refuse_twins(cases)
    if not cases or not all(cases):
        raise ValueError(
            "grid: expected at least one case, and in each at least one parameter, got none"
        )
    return cases


def case_seed(case: Mapping[str, Any], seed: int = 0) -> int:
    """The seed of a case, in [0, 2⁶³): from its parameters and the user's seed by SHA-256.

    The position in the grid plays no part, so extending a grid changes no existing case. Numbers
    that are equal count as equal: 2 and 2.0 give one seed, "2.0" gives another.

    Example:
        >>> case_seed({"radius": 2, "n": 8}) == case_seed({"n": 8, "radius": 2.0})
        True
    """
    return _hashed(to_json({"case": canonical(dict(case)), "seed": int(seed)}))


def case_keys(cases: Iterable[Case]) -> np.ndarray:
    """What identifies each case: 63 bits of the SHA-256 of its parameters, int64."""
    spelled = (",".join(_spelled(name, case[name]) for name in sorted(case)) for case in cases)
    return np.array([_hashed(f"{{{text}}}") for text in spelled], dtype=np.int64)


@functools.lru_cache(2**16, typed=True)  # the values of a product grid are spelled once
def _spelled(name: str, value: Any) -> str:
    return to_json({name: canonical(value)})[1:-1]


def columns_of(cases: Sequence[Case]) -> dict[str, np.ndarray]:
    """The values of each parameter over the cases; NaN or "" where a case has none."""
    names = dict.fromkeys(name for kind in dict.fromkeys(map(tuple, cases)) for name in kind)
    return {name: _column(name, [case.get(name) for case in cases]) for name in names}


def _plain(name: str, value: Any) -> Any:
    """A parameter as a Python number, truth value or text."""
    if value is np.ma.masked:  # whose item is 0.0
        raise ValueError(f"parameter {name!r}: expected a value, got a masked one")
    is_time = isinstance(value, (np.datetime64, np.timedelta64))
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 and not is_time:
        value = value.item()
    if not isinstance(value, (bool, int, float, str)) or value == "":
        raise TypeError(
            f"parameter {name!r}: expected a number, a truth value or a text, got {value!r}; "
            "put other data into `fixed`, or number them and look them up in the function"
        )
    # Of an enumeration too: its members are other values to `canonical`.
    if isinstance(value, str):
        value = str.__str__(value)
    elif not isinstance(value, bool):
        value = int.__int__(value) if isinstance(value, int) else float.__float__(value)
    if isinstance(value, str) and printable(value) != value:
        raise ValueError(f"parameter {name!r}: expected text that can be shown, got {value!r}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"parameter {name!r}: expected an integer of 64 bits, got {value}")
    if isinstance(value, float) and math.isnan(value):
        raise ValueError(f"parameter {name!r}: expected a value, got NaN, which marks absence")
    return 0.0 if value == 0 and isinstance(value, float) else value  # −0.0 is the same case


def _column(name: str, values: list[Any]) -> np.ndarray:
    kinds = {type(value) for value in values} - {type(None)}
    absent = None in values
    if kinds == {str}:
        return np.array([value or "" for value in values], dtype=object)
    if kinds == {bool} and not absent:
        return np.array(values, dtype=bool)
    if kinds == {int} and not absent:
        return np.array(values, dtype=np.int64)
    if len(kinds) > 1 and not kinds <= {int, float}:
        raise TypeError(
            f"parameter {name!r}: expected numbers, truth values or texts, got a mixture"
        )
    if int in kinds:
        check_doubles(name, values)
    return np.array(values, dtype=float)  # None becomes NaN


def _refuse_twins(cases: list[Case]) -> None:
    seen: set[frozenset[tuple[str, bool, Any]]] = set()
    for i, case in enumerate(cases):
        # 1 and 1.0 are one case, True is another.
        seen.add(frozenset((n, isinstance(v, bool), v) for n, v in case.items()))
        if len(seen) == i:
            raise ValueError(
                f"grid: expected different cases, got {case} twice; to repeat a case with other "
                'random numbers add a parameter such as "repetition": range(10)'
            )


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
