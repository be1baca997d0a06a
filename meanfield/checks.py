"""Checks at the door: what a public function says about its arguments before it computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from meanfield.options import shown

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "as_float_tensor",
    "as_generator",
    "check_finite",
    "check_same_kind",
    "is_recorded",
    "is_traced",
    "one_number",
]

_FLOATS = (torch.float32, torch.float64)


def is_traced(tensor: Tensor) -> bool:
    """Whether values cannot be looked at: in a `torch.func` transform, compiled, or on meta."""
    if tensor.is_meta or torch.compiler.is_compiling():
        return True
    # Private, but there is no public question with this answer (torch 2.4 to 2.13).
    functorch = getattr(torch._C, "_functorch", None)
    wrapped = getattr(functorch, "is_functorch_wrapped_tensor", None)
    return bool(wrapped is not None and wrapped(tensor))


def is_recorded(tensor: Tensor) -> bool:
    """Whether values cannot steer: traced, or recorded as by `torch.func.linearize`."""
    # Private, but there is no public question with this answer (torch 2.4 to 2.13).
    return is_traced(tensor) or torch._C._len_torch_dispatch_stack() > 0


def as_float_tensor(value: object, name: str, *, like: Tensor | None = None) -> Tensor:
    """The value as a float32 or float64 tensor; anything but a tensor becomes `like` or float64.

    Arrays, data frames and lists of numbers are taken. Numbers that an array hides or has not got
    (masks, missing ones, complex parts) are refused and not guessed.

    Raises:
        TypeError: no numbers, or a tensor of another dtype or layout.
        ValueError: rows of different lengths, or masked entries.
    """
    if not isinstance(value, torch.Tensor):
        array = _as_array(value, name)
        if array.dtype != np.float32 or not hasattr(value, "dtype"):
            array = array.astype(np.float64, copy=False)
        if like is not None:
            return torch.as_tensor(array, dtype=like.dtype, device=like.device)
        return torch.as_tensor(array)
    if value.dtype not in _FLOATS:
        raise TypeError(
            f"{name}: expected dtype torch.float32 or torch.float64, got {value.dtype}; "
            f"convert it first, for example with {name}.double()"
        )
    if value.layout is not torch.strided or value.is_nested:
        raise TypeError(f"{name}: expected a dense tensor, got {value.layout}; use .to_dense()")
    return value


def as_generator(value: Any, name: str = "generator") -> torch.Generator:
    """The generator given, or a new one of a fixed seed for None.

    Raises:
        TypeError: anything else, a seed for example.
    """
    if value is None:
        return torch.Generator().manual_seed(0)
    if not isinstance(value, torch.Generator):
        seed = value if isinstance(value, int) and not isinstance(value, bool) else 0
        raise TypeError(
            f"{name}: expected a torch.Generator or None, got {shown(value)}; "
            f"torch.Generator().manual_seed({seed}) makes one"
        )
    return value


def one_number(value: Any, what: str) -> float:
    """An answer as a float, where it is one and not a batch.

    Raises:
        TypeError: a batch.
    """
    if value.ndim:
        raise TypeError(
            f"expected {what} of one measure as a float, got a batch of shape "
            f"{tuple(value.shape)}; take one of them, or .value"
        )
    return float(value)


def _as_array(value: Any, name: str) -> np.ndarray:
    """Numbers in a NumPy array of the machine's own byte order that may be written to."""
    if hasattr(value, "to_numpy"):  # pandas, xarray and their like
        value = value.to_numpy()
    if np.ma.isMaskedArray(value):
        if np.ma.is_masked(value):
            hidden = int(np.ma.getmaskarray(value).sum())
            raise ValueError(
                f"{name}: expected an array without masked entries, got {hidden} of them; "
                "leave them out, or give these atoms the weight 0"
            )
        value = value.data
    if isinstance(value, (list, tuple)) and _has_gradient(value):
        raise TypeError(
            f"{name}: expected one tensor where a gradient is wanted, got a "
            f"{type(value).__name__} of tensors; join them with torch.stack({name})"
        )
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ValueError(f"{name}: expected rows of one length, got {error}") from None
    except TypeError:
        raise TypeError(f"{name}: expected an array of numbers, got {shown(value)}") from None
    if array.dtype.kind not in "iuf":
        array = _numbers(array, value, name)
    native = array.dtype.newbyteorder("=")
    # torch warns of what it may not write to, and cannot read backwards.
    return np.require(array, native, "W") if min(array.strides, default=0) >= 0 else array.copy()


def _numbers(array: np.ndarray, value: Any, name: str) -> np.ndarray:
    """Tables whose columns are of several types may hold numbers; anything else is refused."""
    kinds = {"b": "truth values", "c": "complex numbers", "U": "text", "S": "bytes", "M": "dates"}
    if (
        array.dtype.kind == "O"
        and array.size
        and all(
            isinstance(x, (int, float, np.integer, np.floating)) and not isinstance(x, bool)
            for x in array.flat
        )
    ):
        return array.astype(np.float64)
    got = kinds.get(array.dtype.kind, shown(value))
    raise TypeError(f"{name}: expected an array or tensor of real numbers, got {got}")


def _has_gradient(values: Any) -> bool:
    return any(
        value.requires_grad if isinstance(value, torch.Tensor) else _has_gradient(value)
        for value in values
        if isinstance(value, (torch.Tensor, list, tuple))
    )


def check_finite(tensor: Tensor, name: str) -> None:
    """Refuse NaN and infinite entries (skipped where values cannot be looked at)."""
    if is_traced(tensor) or bool(torch.isfinite(tensor).all()):
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
            f"got {tensor.dtype}; convert one of them with .to(dtype)"
        )
    if tensor.device != reference.device:
        raise ValueError(
            f"{name}: expected the device of {reference_name}, {reference.device}, "
            f"got {tensor.device}; move one of them with .to(device)"
        )
