"""Variables and what labels them: name, meaning, units, dimensions, type."""

from __future__ import annotations

import copy
import decimal
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from meanfield.checks import is_tensor, to_host

if TYPE_CHECKING:
    import xarray as xr

_DIGITS, _MOST_DIGITS = 6, 17  # of a number in words
_TEXT_LENGTH = 2**16  # characters; in netCDF all texts of a variable are as wide as the longest
_FITS = {"float64": "fiu", "float32": "fiu", "int64": "iuf", "bool": "b", "str": "O"}
_FILLS: dict[str, Any] = {  # by type
    "float64": np.nan,
    "float32": np.nan,
    "int64": -1,
    "bool": False,
    "str": "",
}


@dataclass(frozen=True)
class Variable:
    """What a number in a Dataset means.

    Args:
        name: a valid identifier, the name in the Dataset.
        long_name: what it is, in words; figures put it on the axis.
        units: "1" if it has none; the attribute is then left out, since xarray would print it
            beside every label as "[1]".
        dims: its own dimensions, besides `case`, singular: ("head",).
        dtype: "float64", "float32", "int64", "bool" or "str".
        symbol: how a formula writes it (LaTeX, without dollars); optional.

    Raises:
        ValueError: a name that is no identifier, a dimension twice, or an unknown dtype.
        TypeError: dims given as one string.

    Example:
        >>> Variable("gain", "Lipschitz constant", symbol="L").attrs
        {'long_name': 'Lipschitz constant', 'symbol': 'L'}
    """

    name: str
    long_name: str
    units: str = "1"
    dims: tuple[str, ...] = ()
    dtype: str = "float64"
    symbol: str | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.name.isidentifier()):
            raise ValueError(f"name: expected an identifier such as 'gain', got {self.name!r}")
        if isinstance(self.dims, str):
            raise TypeError(f"dims: expected a tuple such as ({self.dims!r},), got a string")
        if self.dtype not in (known := tuple(_FILLS)):
            raise ValueError(f"dtype of {self.name}: expected one of {known}, got {self.dtype!r}")
        object.__setattr__(self, "dims", tuple(map(str, self.dims)))
        if len({*self.dims}) < len(self.dims):
            raise ValueError(f"dims of {self.name}: expected different names, got {self.dims}")

    @property
    def attrs(self) -> dict[str, str]:
        """The attributes it carries in a Dataset."""
        units = {} if self.units == "1" else {"units": self.units}
        labels = {"long_name": self.long_name} | units
        return labels | ({"symbol": self.symbol} if self.symbol else {})

    @property
    def fill(self) -> Any:
        """What stands where there is no value: NaN, -1, False or the empty string."""
        return _FILLS[self.dtype]

    @property
    def numpy_dtype(self) -> np.dtype:
        """The type of its array in memory; strings are Python objects."""
        return np.dtype(object if self.dtype == "str" else self.dtype)

    @classmethod
    def unlabelled(cls, name: str) -> Variable:
        """A variable of which nothing but the name is known."""
        return cls(name, name.replace("_", " "))


def dataset(
    variables: Sequence[Variable],
    values: Mapping[str, Any],
    *,
    batch_shape: Sequence[int] = (),
    coords: Mapping[str, tuple[Variable, Any]] | None = None,
    attrs: Mapping[str, str | int | float] | None = None,
) -> xr.Dataset:
    """A Dataset in which every variable is labelled.

    Args:
        variables: what each value means; `dims` are its dimensions behind those of the batch.
        values: array-likes, tensors or scalars by variable name; what is None is left out.
        batch_shape: the axes of the batch, which become one, `case`; none are needed.
        coords: by name, what the coordinate means and its values.
        attrs: attributes of the whole: text and numbers only.

    Raises:
        ValueError: names that were declared and not given, or given and not declared.

    Example:
        >>> gain = Variable("gain", "Lipschitz constant", dims=("case",))
        >>> dataset([gain], {"gain": [1.0, 2.0]})["gain"].long_name
        'Lipschitz constant'
        >>> norm = Variable("norm", "operator norm")
        >>> dataset([norm], {"norm": [[1.0, 2.0], [3.0, 4.0]]}, batch_shape=(2, 2)).sizes["case"]
        4
    """
    import xarray as xr

    declared = {variable.name for variable in variables}
    if declared != set(values):
        raise ValueError(
            f"values: expected exactly {sorted(declared)}, missing "
            f"{sorted(declared - set(values))}, not declared {sorted(set(values) - declared)}"
        )
    front, data = ("case",) if batch_shape else (), {}
    for v in variables:
        if values[v.name] is not None:
            array = np.array(array_of(values[v.name]), v.numpy_dtype)  # its own memory
            array = array.reshape(-1, *array.shape[len(batch_shape) :]) if batch_shape else array
            data[v.name] = ((*front, *v.dims), array, v.attrs)
    return xr.Dataset(
        data,
        coords={
            name: (v.dims, np.array(data, v.numpy_dtype), v.attrs)
            for name, (v, data) in (coords or {}).items()
        },
        attrs=dict(attrs or {}),
    )


def array_of(value: Any) -> np.ndarray:
    """A number, an array or a tensor as an array."""
    return to_host(value) if is_tensor(value) else np.asarray(value)


def printable(text: str) -> str:
    """The text as one line that a terminal shows and does not obey.

    Control characters, line ends and what UTF-8 cannot encode appear as their escapes.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def told_apart(numbers: Iterable[float]) -> list[str]:
    """Texts that differ where the numbers do, with as few digits as that takes, from six on.

    Example:
        >>> told_apart([1.0, 2.5]), told_apart([1.0, 1.0000001])
        (['1', '2.5'], ['1', '1.0000001'])
    """
    numbers, texts = list(numbers), list[str]()
    different = len({x for x in numbers if not math.isnan(x)})
    for digits in range(_DIGITS, _MOST_DIGITS + 1):
        texts = [f"{x:.{digits}g}" for x in numbers]
        if len({*texts} - {"nan"}) == different:
            break
    return texts


def outward(value: float, digits: int, *, up: bool) -> float:
    """The nearest number of so many digits that is not below the value, or not above it.

    Example:
        >>> outward(0.99999, 3, up=True), outward(0.99999, 3, up=False)
        (1.0, 0.999)
    """
    rounding = decimal.ROUND_CEILING if up else decimal.ROUND_FLOOR
    return float(decimal.Context(digits, rounding).plus(decimal.Decimal(float(value))))


def fitting(variable: Variable, value: Any, shape: tuple[int, ...]) -> Any:
    """The value in the type of the variable, an array of its own; a Python float as it is.

    Raises:
        TypeError: another kind of value.
        ValueError: another shape, or values that the type does not hold.
    """
    if type(value) is float and variable.dtype == "float64" and not shape:
        return value  # the most common case, ten times faster than by an array
    if np.ma.isMaskedArray(value) and np.ma.getmaskarray(value).any():
        raise ValueError(f"{variable.name}: expected values, got masked ones")
    value = to_host(value) if is_tensor(value) else value
    # As objects, because NumPy's own texts lose NUL characters at the end.
    array = np.asarray(value, object if variable.dtype == "str" else None)
    if array.shape != shape:
        raise ValueError(f"{variable.name}: expected shape {shape}, got {array.shape}")
    if array.dtype.kind not in _FITS[variable.dtype]:
        raise TypeError(f"{variable.name}: expected {variable.dtype}, got {array.dtype}")
    if variable.dtype == "str":
        return _texts(variable, array)
    with np.errstate(all="ignore"):
        cast = array.astype(variable.numpy_dtype)
        if variable.dtype == "int64":
            lost, cure = cast != array, ""
        elif array.dtype.kind in "iu":  # as floats all of them would be equal
            lost = cast.astype(object) != array.astype(object)
            cure = "; declare it with dtype='int64'"
        else:
            lost, cure = np.isinf(cast) & np.isfinite(array), ""
    if np.any(lost):
        raise ValueError(
            f"{variable.name}: expected {variable.dtype}, which does not hold "
            f"{array[lost].flat[0]}{cure}"
        )
    return cast


def _texts(variable: Variable, array: np.ndarray) -> np.ndarray:
    for text in array.flat:
        if not isinstance(text, str):
            raise TypeError(f"{variable.name}: expected texts, got {type(text).__name__}")
        if len(text) > _TEXT_LENGTH:
            raise ValueError(
                f"{variable.name}: expected a text of at most {_TEXT_LENGTH} characters, got "
                f"{len(text)}; write it to a file and return its name"
            )
        if "\0" in text or text != text.encode("utf-8", "replace").decode():
            raise ValueError(f"{variable.name}: expected text in UTF-8, got {text!r:.80}")
    return array.copy()[()]  # without dimensions: the text itself


def copied(value: Any, memo: dict[int, Any]) -> Any:
    """A deep copy; tensors that are computed in a graph, which torch refuses to copy, cloned."""
    memo |= {id(one): one.clone() for one in _in_a_graph(value)}
    made = memo[id(value)] = object.__new__(type(value))
    made.__dict__.update(copy.deepcopy(vars(value), memo))
    return made


def _in_a_graph(value: Any) -> Iterator[Any]:
    """The tensors below an object that are computed from others that ask for gradients."""
    if getattr(value, "grad_fn", None) is not None:
        yield value
    elif isinstance(value, tuple | list):
        yield from itertools.chain.from_iterable(map(_in_a_graph, value))
    elif is_dataclass(value):
        yield from itertools.chain.from_iterable(map(_in_a_graph, vars(value).values()))
