"""Checks at the door: what a public function says about its arguments before it computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "as_float_tensor",
    "check_finite",
    "check_same_kind",
    "is_recorded",
    "is_traced",
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

    Raises:
        TypeError: if a tensor of another dtype is given.
    """
    if isinstance(value, torch.Tensor):
        tensor = value
    elif like is not None:
        tensor = torch.as_tensor(value, dtype=like.dtype, device=like.device)
    else:
        tensor = torch.as_tensor(value)
        keeps_float32 = tensor.dtype == torch.float32 and hasattr(value, "dtype")
        tensor = tensor if keeps_float32 else torch.as_tensor(value, dtype=torch.float64)
    if tensor.dtype not in _FLOATS:
        raise TypeError(
            f"{name}: expected dtype torch.float32 or torch.float64, got {tensor.dtype}; "
            f"convert it first, for example with {name}.double()"
        )
    return tensor


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
