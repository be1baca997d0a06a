"""Answers: values with their evidence, and what follows from the labels of their fields."""

from __future__ import annotations

import operator as op
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, dataclass_transform

import numpy as np

from meanfield.habits import Hinted
from meanfield.html import html_table, span
from meanfield.results.labels import Variable, array_of, copied, dataset, told_apart

if TYPE_CHECKING:
    import xarray as xr


@dataclass(frozen=True)
class _Label:
    variable: Variable
    name: str | None
    beside: bool
    shown: bool
    attribute: bool


def labelled(
    words: str,
    *,
    units: str = "1",
    dims: tuple[str, ...] = (),
    dtype: str = "float64",
    name: str | None = None,
    beside: bool = False,
    attribute: bool = False,
    shown: bool | None = None,
    default: Any = MISSING,
) -> Any:
    """A field of an `Answer`, with what it means.

    Args:
        words: what the number is; of a field that stands beside the value, without naming that.
        units: "1" if it has none.
        dims: its own dimensions, behind those of the batch.
        dtype: as of `Variable`.
        name: in the Dataset, if not that of the field.
        beside: evidence for the value: stored in tables beside it, as ``<name>_<field>``.
        attribute: one for the whole batch, text or a number: an attribute of the Dataset.
        shown: whether `repr` shows it; by default unless it has dimensions.
        default: of the field; required if there is none.
    """
    variable = Variable(name or "value", words, units, dims, dtype)
    label = _Label(variable, name, beside, not dims if shown is None else shown, attribute)
    return field(default=default, metadata={"label": label})


def _calculated(op: Callable[[Any, Any], Any], *, reflected: bool = False) -> Any:
    """An operator on answers, which is that on their values."""

    def method(self: Answer, other: Any) -> Any:
        if isinstance(other, str):
            return NotImplemented
        pair = self._number(), other._number() if isinstance(other, Answer) else other
        return op(*pair[::-1]) if reflected else op(*pair)

    return method


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(labelled, field))
class Answer(Hinted):
    """Base of what comes back from a computation: a value and the evidence for it.

    A subclass is a frozen dataclass (without the decorator) of labelled fields. From the labels
    follow `repr`, the table in a notebook, ``float(answer)``, `to_dataset`, `columns` and
    `values`. An answer compares, calculates, rounds and becomes an array as its value does.
    Fields without a label are not shown and not stored.
    Values are numbers, NumPy arrays or tensors with the batch axes in front, None where there is
    none, or answers themselves.

    Args:
        noun: the name of the value in a Dataset.
        title: what a table of one answer is called.

    Example:
        >>> class Root(Answer, noun="root", title="Root of a polynomial"):
        ...     value: float = labelled("root of the polynomial")
        ...     upper: float = labelled("upper end", beside=True)
        ...     n_steps: int = labelled("steps", attribute=True)
        >>> root = Root(1.4142135, 1.4142136, n_steps=4)
        >>> root
        Root(value=1.4142135, upper=1.4142136, n_steps=4)
        >>> root.values("best")
        {'best': 1.4142135, 'best_upper': 1.4142136}
        >>> Root.columns("best")[1].long_name
        'root of the polynomial: upper end'
        >>> list(root.to_dataset())
        ['root', 'root_upper']
    """

    noun: ClassVar[str]
    title: ClassVar[str]

    def __init_subclass__(cls, *, noun: str, title: str) -> None:
        cls.noun, cls.title = noun, title
        dataclass(frozen=True, eq=False, repr=False)(cls)

    @classmethod
    def _labels(cls) -> dict[str, _Label]:
        found = {f.name: f.metadata.get("label") for f in fields(cls)}  # type: ignore[arg-type]
        return {name: label for name, label in found.items() if label is not None}

    @classmethod
    def columns(
        cls,
        name: str,
        *parts: str,
        words: str | None = None,
        dims: tuple[str, ...] = (),
    ) -> tuple[Variable, ...]:
        """The variables of a table that holds such answers under a name; their numbers: `values`.

        Args:
            name: of the value in that table; its evidence gets ``<name>_<field>``.
            *parts: the fields to keep; the value and what stands beside it if there are none.
            words: what the value means there, if more than its label says.
            dims: dimensions of that table besides `case`.

        Raises:
            ValueError: no such field.
        """
        labels = cls._labels()
        whole = words or (labels["value"].variable.long_name if "value" in labels else cls.title)
        chosen = {part: labels[part] for part in cls._chosen(parts)}
        return tuple(
            replace(
                label.variable,
                name=name if part == "value" else f"{name}_{part}",
                long_name=whole if part == "value" else f"{whole}: {label.variable.long_name}",
                dims=(*dims, *label.variable.dims),
            )
            for part, label in chosen.items()
        )

    def values(self, name: str, *parts: str) -> dict[str, Any]:
        """The values of `columns`, numbers or NumPy arrays; NaN, -1, False or "" for None."""
        found = {}
        for part, column in zip(self._chosen(parts), self.columns(name, *parts), strict=True):
            value = getattr(self, part)
            array = array_of(column.fill if value is None else value)
            found[column.name] = array if array.ndim else array.item()
        return found

    def to_dataset(self) -> xr.Dataset:
        """Everything labelled that is there; a batch lies along `case`."""
        variables: list[Variable] = []
        values: dict[str, Any] = {}
        attrs: dict[str, Any] = {}
        for name, label, value in self._given():
            stored = label.name or name
            if label.attribute:
                attrs[stored] = int(value) if isinstance(value, bool) else value
            elif isinstance(value, Answer):
                variables += value.columns(stored, words=label.variable.long_name)
                values |= value.values(stored)
            elif name == "value" or label.beside:
                variables += self.columns(self.noun, name)
                values[variables[-1].name] = value
            else:
                variables.append(replace(label.variable, name=stored))
                values[stored] = value
        return dataset(variables, values, batch_shape=self._batch_shape(), attrs=attrs)

    @classmethod
    def _chosen(cls, parts: tuple[str, ...]) -> tuple[str, ...]:
        labels = cls._labels()
        if unknown := [part for part in parts if part not in labels]:
            raise ValueError(f"parts: expected some of {list(labels)}, got {unknown}")
        return parts or tuple(n for n, label in labels.items() if n == "value" or label.beside)

    def _number(self) -> Any:
        for name, _, value in self._given():
            if name == "value":
                return value
        raise TypeError(f"expected an answer with one value, got {type(self).__name__}")

    __eq__, __ne__ = map(_calculated, (op.eq, op.ne))
    __lt__, __le__, __gt__, __ge__ = map(_calculated, (op.lt, op.le, op.gt, op.ge))
    __hash__ = object.__hash__
    __add__, __sub__, __mul__ = map(_calculated, (op.add, op.sub, op.mul))
    __truediv__, __pow__ = map(_calculated, (op.truediv, op.pow))
    __radd__, __rsub__, __rmul__, __rtruediv__ = (
        _calculated(one, reflected=True) for one in (op.add, op.sub, op.mul, op.truediv)
    )

    # `torch.tensor` takes what has either of these for a sequence.
    def __getitem__(self, index: Any) -> Any:
        raise self._no_sequence()

    def __len__(self) -> int:
        raise self._no_sequence()

    def _no_sequence(self) -> TypeError:
        names = ", ".join(f".{name}" for name, *_ in self._given())
        return TypeError(
            f"expected one of the members of {type(self).__name__}, {names}; it is no sequence "
            "and no table (several values are .value[i])"
        )

    def __neg__(self) -> Any:
        return -self._number()

    def __abs__(self) -> Any:
        return abs(self._number())

    def __bool__(self) -> bool:
        return bool(float(self))

    def __round__(self, digits: int | None = None) -> Any:
        return round(float(self), digits)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The value, or the values of a batch, without their derivative."""
        return np.array(array_of(self._number()), dtype=dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copied(self, memo)

    def __float__(self) -> float:
        value = self._number()
        if np.ndim(value):
            raise TypeError(
                f"expected one {self.noun} as a float, got several, of shape "
                f"{tuple(np.shape(value))}; take one of them, or .value"
            )
        return float(array_of(value))

    def __format__(self, spec: str) -> str:
        return format(float(self), spec) if spec else str(self)

    def __repr__(self) -> str:
        parts = (f"{name}={text}" for name, text in self._texts().items())
        return f"{type(self).__name__}({', '.join(parts)})"

    def _repr_html_(self) -> str:
        labels, texts = self._labels(), self._texts()
        rows = [(labels[name].variable.long_name, text) for name, text in texts.items()]
        return html_table(self.title, rows)

    def _given(self) -> Iterator[tuple[str, _Label, Any]]:
        """Name, label and value of each labelled field that has a value."""
        for name, label in self._labels().items():
            value = getattr(self, name)
            if value is not None:
                yield name, label, value

    def _batch_shape(self) -> tuple[int, ...]:
        for _, label, value in self._given():
            if not (label.attribute or isinstance(value, Answer)):
                shape = tuple(np.shape(value))
                return shape[: len(shape) - len(label.variable.dims)]
        return ()

    def _texts(self) -> dict[str, str]:
        """What is shown of each field; a value and its ends with the digits that differ."""
        shown = {name: value for name, label, value in self._given() if label.shown}
        ends = {
            name: float(array_of(value))
            for name, value in shown.items()
            if name in ("lower", "value", "upper") and not np.ndim(value)
        }
        distinct = zip(ends, told_apart(ends.values()), strict=True)
        return {n: _text(value) for n, value in shown.items()} | dict(distinct)


def _text(value: Any) -> str:
    if isinstance(value, Answer):
        value = value._number()
    if isinstance(value, str):
        return repr(value)
    array = array_of(value)
    if array.dtype == bool and array.size:
        kept = int(array.sum())
        return str(bool(kept)) if kept in (0, array.size) else f"{kept} of {array.size}"
    return span(array)
