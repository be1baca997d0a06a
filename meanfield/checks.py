"""What a public function says about its arguments before it computes.

Each check takes the value and its name, and gives it back in the type that the library computes
with, or raises with what was expected and what came. The checks of plain values load no torch:
the command line and the bookkeeping use them too.
"""

from __future__ import annotations

import difflib
import functools
import math
import numbers
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_WITHOUT_DOUBLE = {"mps"}  # devices
# Entries of a block on a device, half a GiB in float32: fastest on an H200, where constants of
# 16,384 atoms take 1.2 times as long in blocks that fit its cache (2²³) and six times at 2²⁰.
_AT_ONCE_ON_DEVICES = 2**27
# What other libraries call our methods.
_ELSEWHERE = {"rk45": "dopri5", "dopri8": "dop853", "forward_euler": "euler"}
_MOST = 10**12  # of a count: more is a typing error, and would fill any memory


def number(
    value: Any,
    name: str,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
    finite: bool = True,
) -> float:
    """One real number in a range: Python's, NumPy's, or an array or tensor without axes.

    Args:
        value: what came.
        name: of the argument.
        above: it must be more than this.
        least: it must be at least this.
        below: it must be less than this.
        most: it must be at most this.
        finite: whether infinity is refused.

    Raises:
        TypeError: no number; truth values, texts and complex numbers are none.
        ValueError: NaN, or out of the range.
    """
    expected = _range(above, least, below, most)
    found = _plain(value)
    if not _is_real(found):
        raise TypeError(f"{name}: expected {expected}, got {describe(value)}")
    if getattr(value, "requires_grad", False):
        raise TypeError(f"{name}: expected a number without a gradient, as of .item(): it is lost")
    x = float(found)
    good = not math.isnan(x) and not (finite and math.isinf(x))
    good = good and (above is None or x > above) and (least is None or x >= least)
    good = good and (below is None or x < below) and (most is None or x <= most)
    if not good:
        expected = expected.replace("a number", "a finite number") if math.isinf(x) else expected
        raise ValueError(f"{name}: expected {expected}, got {found}")
    return x


def count(value: Any, name: str, *, least: int = 1, most: int = _MOST) -> int:
    """A whole number from `least` to `most`; 3.0 is one, 2.5 and True are not.

    Raises:
        TypeError: no number.
        ValueError: not whole, too small, or too large.
    """
    expected = "a whole number" if least <= -most else f"a whole number ≥ {least}"
    found = _plain(value)
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise TypeError(f"{name}: expected {expected}, got {describe(value)}")
    if found != found or not least <= found <= most or found != int(found):
        end = f" and ≤ {most}" if found > most else ""
        raise ValueError(f"{name}: expected {expected}{end}, got {found}")
    return int(found)


def as_bool(value: Any, name: str) -> bool:
    """True or False, Python's or NumPy's: "False" would count as true, and 0 as a number.

    Raises:
        TypeError: anything else.
    """
    found = _plain(value)
    if not isinstance(found, bool):
        raise TypeError(f"{name}: expected True or False, got {describe(value)}")
    return found


def choice(value: Any, name: str, known: Iterable[str]) -> str:
    """One of several names.

    Raises:
        TypeError: no text.
        ValueError: another name; the message has the nearest one.
    """
    known = tuple(known)
    listed = "one of " + ", ".join(map(repr, known)) if len(known) > 1 else repr(known[0])
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected {listed}, got {describe(value)}")
    if value not in known:
        raise ValueError(f"{name}: expected {listed}, got {value!r}{suggestion(value, known)}")
    return value


def suggestion(word: str, known: Iterable[str]) -> str:
    """The end of a message: a question after the known word that is nearest, or nothing."""
    by_letters = {one.strip().lower(): one for one in known}
    typed = str(word).strip().lower()
    near = difflib.get_close_matches(_ELSEWHERE.get(typed, typed), by_letters, 1)
    return f"; did you mean {by_letters[near[0]]!r}?" if near else ""


def describe(value: Any) -> str:
    """What came, in a few words: a text or a number as it is, anything else by its type."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    if isinstance(value, type):
        return f"the class {value.__name__} and no instance of it"
    shape = getattr(value, "shape", None)
    of = f" of shape {tuple(shape)}" if isinstance(shape, tuple) and shape else ""
    return f"{type(value).__name__}{of}"


def name_of(F: object) -> str:
    """The name of a function or of the class of an object, for messages."""
    return getattr(F, "__name__", None) or type(F).__name__


def called(function: Any, arguments: tuple[Any, ...], expected: str, hint: str = "") -> Any:
    """The result of a user's function; its type errors say what kind of function was expected."""
    try:
        return function(*arguments)
    except (TypeError, AttributeError) as error:
        text = str(error)
        if text.partition(":")[2].startswith(" expected") or "expected a" in text:
            raise  # the function has said it clearly itself
        raise TypeError(
            f"{expected}, got {name_of(function)}, which raised {type(error).__name__}: "
            f"{text}{hint}"
        ) from error
    except RuntimeError as error:
        if re.search(r"numpy\(\)|have storage", str(error)):
            raise TypeError(
                f"{expected}, got {name_of(function)}, which leaves torch, where derivatives do "
                "not follow; write it with functions of torch, not of NumPy"
            ) from error
        if not re.search("dtype|scalar type", str(error)):
            raise
        raise TypeError(
            f"{expected} in its precision, got {name_of(function)}, which raised: {error}; take "
            "module.double(), or mu.to(torch.float32) for a module in single precision"
        ) from error


def as_floats(values: Any, name: str = "value", *, finite: bool = False) -> np.ndarray:
    """A float64 array of at least one number, from numbers, lists, arrays, tensors, data frames.

    Raises:
        TypeError: text, truth values, complex numbers, objects.
        ValueError: nothing at all, rows of different lengths, masked entries, and NaN or
            infinity if `finite`.
    """
    if is_tensor(values):
        values = to_host(as_float_tensor(values, name).double())
    array = _as_array(values, name)
    if not array.size:
        raise ValueError(f"{name}: expected at least one number, got none")
    if finite and not np.isfinite(array).all():
        bad = array[~np.isfinite(array)]
        raise ValueError(f"{name}: expected finite numbers, got {bad.flat[0]}")
    return array.astype(float, copy=False)


def is_tensor(value: object) -> bool:
    """Whether it is a tensor of torch, which need not be imported."""
    return hasattr(value, "detach")


def to_host(values: Tensor) -> np.ndarray:
    """The values of a tensor as an array, without its derivative; one tensor waits for the device.

    The only place where tensors become arrays: a search for its name finds everything that does
    not run on a device.
    """
    return values.detach().cpu().resolve_conj().resolve_neg().numpy()


def as_tensor(values: Tensor | np.ndarray) -> Tensor:
    """A tensor as it is, an array on the CPU; torch's own would go to its default device."""
    import torch

    return values if isinstance(values, torch.Tensor) else torch.from_numpy(np.asarray(values))


def is_host(device: torch.device) -> bool:
    """Whether values are at hand, so that a look at them costs nothing."""
    return device.type == "cpu"


def at_once(entries: int, device: torch.device) -> int:
    """Entries of a block where so many are right on the host."""
    return entries if is_host(device) else max(entries, _AT_ONCE_ON_DEVICES)


def is_traced(tensor: Tensor) -> bool:
    """Whether values cannot be looked at: in a `torch.func` transform, compiled, or on meta."""
    import torch

    if tensor.is_meta or torch.compiler.is_compiling():
        return True
    # Private, but there is no public question with this answer (torch 2.4 to 2.13).
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def is_recorded(tensor: Tensor) -> bool:
    """Whether control flow must not depend on values: traced, or under `torch.func.linearize`."""
    import torch

    # Private as well.
    return is_traced(tensor) or torch._C._len_torch_dispatch_stack() > 0


def is_differentiated(*tensors: Tensor) -> bool:
    """Whether a derivative in any of them may be asked for, in any mode of torch."""
    import torch

    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return True
    # Private, as in `is_traced`: the derivatives of `torch.func` nest on a stack.
    inside = torch._C._functorch.peek_interpreter_stack() is not None
    return inside or torch.autograd.forward_ad._current_level >= 0 or is_recorded(tensors[0])


def carries_derivative(tensor: Tensor) -> bool:
    """Whether a derivative in this very tensor may be asked for, in any mode of torch."""
    import torch

    if is_recorded(tensor) or (torch.is_grad_enabled() and tensor.requires_grad):
        return True
    return torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None


def as_float_tensor(value: object, name: str, *, like: Tensor | None = None) -> Tensor:
    """The value as a float32 or float64 tensor; anything else becomes `like` or float64.

    Tensors of integers and of half precision, arrays, data frames and lists of numbers are taken.
    Numbers that an array hides or has not got (masks, missing ones, complex parts) are refused
    and not guessed.

    Raises:
        TypeError: no real numbers, or a tensor of another layout.
        ValueError: rows of different lengths, or masked entries.
    """
    import torch

    if not isinstance(value, torch.Tensor):
        array = _as_array(value, name)
        if array.dtype != np.float32 or not hasattr(value, "dtype"):
            array = array.astype(np.float64, copy=False)
        kind: Any = {} if like is None else {"dtype": like.dtype, "device": like.device}
        return torch.tensor(array, **kind)  # a copy: its owner may go on with the array
    if value.is_complex() or value.is_quantized or value.dtype == torch.bool:
        raise TypeError(
            f"{name}: expected real numbers, such as dtype torch.float32 or torch.float64, "
            f"got {value.dtype}"
        )
    if value.device.type in _WITHOUT_DOUBLE:
        raise TypeError(
            f"{name}: expected a tensor on the CPU or on a device with double precision, in which "
            f"evidence is computed, got one on {value.device}; use .cpu()"
        )
    if value.layout is not torch.strided or value.is_nested:
        raise TypeError(f"{name}: expected a dense tensor, got {value.layout}; use .to_dense()")
    if value.dtype in (torch.float32, torch.float64):
        return value
    return value.to(torch.float64 if like is None else like.dtype)


def is_single(value: Any) -> bool:
    """Whether it is an array or a tensor in single precision."""
    return str(getattr(value, "dtype", "")).removeprefix("torch.") == "float32"


def length_rounding(points: Any) -> float:
    """How much longer than they are, relatively, rounding may make points of a sphere."""
    return 8 * float(np.finfo(np.float32).eps) if is_single(points) else 1e-9


def as_path(value: Any, name: str = "path") -> Path:
    """The path that a text or an `os.PathLike` names; "~" is the user's own folder.

    Raises:
        TypeError: anything else.
    """
    try:
        return Path(os.path.expanduser(value))  # that of `Path` refuses "~x" of no user
    except TypeError:
        raise TypeError(f"{name}: expected a path, got {describe(value)}") from None


def as_dtype(value: Any, name: str = "dtype") -> torch.dtype:
    """float32 or float64, as torch's dtype.

    Raises:
        TypeError: anything else, its name too.
    """
    import torch

    if value not in (torch.float32, torch.float64):
        raise TypeError(f"{name}: expected torch.float32 or torch.float64, got {value!r}")
    return value


_Called = TypeVar("_Called", bound=Callable[..., Any])


def without_autocast(function: _Called) -> _Called:
    """The function with autocast off: what it says is about the numbers that come in."""

    @functools.wraps(function)
    def plainly(*args: Any, **kwargs: Any) -> Any:
        import torch

        if not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
            return function(*args, **kwargs)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*args, **kwargs)

    return plainly  # type: ignore[return-value]


def as_generator(value: Any) -> torch.Generator:
    """The generator given, a new one of the seed given, or torch's own for None.

    Raises:
        TypeError: anything else.
        ValueError: a seed that is not a whole number from 0 to 2⁶⁴ − 1.
    """
    import torch

    if value is None:
        return torch.default_generator
    if isinstance(value, torch.Generator):
        return value
    if not _is_real(_plain(value)):
        raise TypeError(
            f"generator: expected a torch.Generator, a seed or None, got {describe(value)}"
        )
    return torch.Generator().manual_seed(count(value, "generator", least=0, most=2**64 - 1))


def check_move(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
    """Refuse arguments of `torch.Tensor.to` that name no device of this machine, or no dtype here.

    Raises:
        ValueError: a device that is not there, or a word that is neither device nor dtype.
        TypeError: a dtype other than float32 and float64.
    """
    import torch

    try:
        dtype = tensor.new_empty(0).to(*args, **kwargs).dtype
    except (AssertionError, RuntimeError, TypeError):
        devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        got = ", ".join(describe(value) for value in (*args, *kwargs.values()))
        raise ValueError(
            "to: expected torch.float32, torch.float64 or a device of this machine "
            f"({', '.join(devices)}), got {got}"
        ) from None
    as_dtype(dtype, "to")


def check_finite(tensor: Tensor, name: str) -> None:
    """Refuse NaN and infinite entries (skipped where values cannot be looked at)."""
    import torch

    if is_recorded(tensor) or bool(torch.isfinite(tensor).all()):
        return
    bad = ~torch.isfinite(tensor)
    first = tuple(int(i) for i in bad.nonzero()[0])
    raise ValueError(
        f"{name}: expected finite numbers, got {int(bad.sum())} NaN or infinite entries "
        f"(the first at index {first})"
    )


def check_same_kind(reference: Tensor, reference_name: str, tensor: Tensor, name: str) -> None:
    """Refuse a dtype or a device other than the reference's."""
    if tensor.dtype != reference.dtype:
        raise TypeError(
            f"{name}: expected the dtype of {reference_name}, {reference.dtype}, "
            f"got {tensor.dtype}; convert one of them with .to(dtype), an array with .astype"
        )
    if tensor.device != reference.device:
        raise ValueError(
            f"{name}: expected the device of {reference_name}, {reference.device}, "
            f"got {tensor.device}; move one of them with .to(device)"
        )


def check_dim(mu: Any, dim: int, name: str = "mu") -> None:
    """Refuse a measure on a space of another dimension."""
    if mu.dim != dim:
        raise ValueError(
            f"{name}: expected points of dimension {dim}, got dimension {mu.dim}; points are "
            "(n, d), and matrices map columns: (outputs, inputs)"
        )


def check_positioned(mu: Any, name: str = "mu", who: str = "") -> Tensor:
    """The positions of a measure; a measure without them is refused."""
    if mu.positions is None:
        why = f", which {who} looks at" if who else ""
        raise ValueError(
            f"{name}: expected a measure with positions{why}, got one without; give positions=, "
            "or take ParticleMeasure.from_sequence(points), where token i of n is at i/n; of "
            "functions that make the measure worst_case takes positioned=True for that, and "
            "compare_lemma_3_2 conditional=True"
        )
    return mu.positions


def check_same_labels(reference: Any, reference_name: str, value: Any, name: str) -> None:
    """Refuse two tables whose rows have other labels: here rows go by their place."""
    labels = [_labels(table, "particle", "iloc", "index") for table in (reference, value)]
    if all(each is not None for each in labels) and not labels[0].equals(labels[1]):
        raise ValueError(
            f"{name}: expected the row labels of {reference_name} in the same order, got others; "
            "rows go by place, so sort them alike, or take .to_numpy() of both"
        )


def check_alongside(reference: Any, reference_name: str, value: Any, name: str) -> None:
    """Refuse numbers of the atoms of a table whose rows or batches are others."""
    check_same_labels(reference, reference_name, value, name)
    check_same_axes(reference, reference_name, value, name)


def check_same_axes(reference: Any, reference_name: str, value: Any, name: str) -> None:
    """Refuse arrays of xarray that share axes of a batch in other places, or with other labels.

    Where the axes of the atoms have names: others go by place, and so do names that xarray gave.
    """
    ours, theirs = (
        list(map(str, getattr(table, "dims", ())))[::-1] for table in (reference, value)
    )
    if "particle" not in ours or "particle" not in theirs:
        return
    ours, theirs = (
        [d for d in dims if d not in ("particle", "feature")] for dims in (ours, theirs)
    )
    for dim in sorted(set(ours) & set(theirs)):
        if dim.removeprefix("dim_").isdigit():
            continue
        labels = [table.indexes.get(dim) for table in (reference, value)]
        sizes = {len(each) for each in labels if each is not None}
        known = all(each is not None for each in labels)
        other = known and len(sizes) == 1 and not labels[0].equals(labels[1])
        if ours.index(dim) != theirs.index(dim) or other:
            raise ValueError(
                f"{name}: expected the axis {dim!r} of {reference_name} in the same place with "
                "the same labels, got another; axes of a batch go by place, from the last one: "
                "transpose and sort them alike, or take .to_numpy() of both"
            )


def _labels(table: Any, axis: str, mark: str, member: str) -> Any:
    """Those that a table of pandas with this mark, or an array of xarray, has along an axis."""
    if hasattr(table, mark):
        return getattr(table, member)
    return getattr(table, "indexes", {}).get(axis)


def check_same_columns(reference: Any, reference_name: str, value: Any, name: str) -> None:
    """Refuse two tables that share columns, but not all in the same places: they go by place."""
    labels = (_labels(table, "feature", "columns", "columns") for table in (reference, value))
    ours, theirs = ([] if each is None else list(each) for each in labels)
    shared = set(map(str, ours)) & set(map(str, theirs))
    if len(ours) == len(theirs) and ours != theirs and shared:
        how = f", as {name}[{ours}]" if hasattr(value, "columns") else ""
        raise ValueError(
            f"{name}: expected the columns of {reference_name} in the same order, {ours}, got "
            f"{theirs}; columns go by place: take the same of both{how}"
        )


def check_coordinates(value: Any, name: str) -> None:
    """Refuse a table of pandas with weights or numbers of rows: all columns are coordinates."""
    for column in {"weight", "weights"}.intersection(getattr(value, "columns", ())):
        raise ValueError(
            f"{name}: expected a table of coordinates, got one with a column {column!r}; leave "
            f"it out of the points and give it as weights=table[{column!r}]"
        )
    if "index" in getattr(value, "columns", ()):
        raise ValueError(
            f"{name}: expected a table of coordinates, got one with a column 'index', which "
            "reset_index() makes of the row labels; take reset_index(drop=True)"
        )


def _as_array(value: Any, name: str) -> np.ndarray:
    """Numbers in a NumPy array of the machine's own byte order that may be written to."""
    if hasattr(value, "to_numpy"):  # pandas, xarray and their like
        value = value.to_numpy()
    if np.ma.isMaskedArray(value):
        if np.ma.is_masked(value):
            hidden = int(np.ma.getmaskarray(value).sum())
            raise ValueError(
                f"{name}: expected an array without masked entries, got {hidden} of them; leave "
                "them out (an atom that is absent has weight 0)"
            )
        value = value.data
    if _has_gradient(value) and not is_tensor(value):
        raise TypeError(
            f"{name}: expected one tensor where a gradient is wanted, got a "
            f"{type(value).__name__} of tensors; torch.stack makes one of them"
        )
    try:
        array = np.asarray(value)
    except ValueError:
        raise ValueError(
            f"{name}: expected rows of one length, got {describe(value)} of several lengths"
        ) from None
    except TypeError:
        points = "; its points are mu.points" if hasattr(value, "log_weights") else ""
        raise TypeError(
            f"{name}: expected an array of numbers, got {describe(value)}{points}"
        ) from None
    if array.dtype.kind not in "iuf":
        array = _numbers(array, value, name)
    native = array.dtype.newbyteorder("=")
    # torch warns of what it may not write to, and cannot read backwards.
    return np.require(array, native, "W") if min(array.strides, default=0) >= 0 else array.copy()


def _numbers(array: np.ndarray, value: Any, name: str) -> np.ndarray:
    """Tables whose columns are of several types may hold numbers; anything else is refused."""
    kinds = {"b": "truth values", "c": "complex numbers", "U": "text", "S": "bytes", "M": "dates"}
    if array.dtype.kind == "O" and array.size and all(map(_is_real, array.flat)):
        return array.astype(np.float64)
    got = kinds.get(array.dtype.kind, describe(value))
    if array.dtype.kind == "O" and array.size:
        got = f"{got} with {next(v for v in array.flat if not _is_real(v))!r} in it"
    raise TypeError(f"{name}: expected an array or tensor of real numbers, got {got}")


def _is_real(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _has_gradient(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_gradient, value))
    return bool(getattr(value, "requires_grad", False))


def _plain(value: Any) -> Any:
    """A number of NumPy or torch without axes as Python's own; anything else as it is."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return value.item()
    return value


def _range(
    above: float | None, least: float | None, below: float | None, most: float | None
) -> str:
    if above == 0 and below == 1:
        return "a number between 0 and 1"
    ends = [
        f"{sign} {end:g}"
        for sign, end in ((">", above), ("≥", least), ("<", below), ("≤", most))
        if end is not None
    ]
    return f"a number {' and '.join(ends)}".strip()
