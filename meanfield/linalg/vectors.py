"""Long vectors, their lengths over the whole number range; forward derivatives."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from meanfield.checks import is_host

# Entries whose squares one accumulator may take. On the CPU it is of the vectors' own precision:
# over 10⁷ entries of single precision it would lose a thousandth of their length.
_CHUNK = 1024
# torch (2.13) has one level of forward derivatives, and one set of switches of fused attention,
# for all threads: two threads at once get wrong numbers, without an error. A map that waits for
# another thread, which differentiates, would wait for ever.
one_thread = threading.RLock()
if os.name == "posix":  # a process that is forked off while a thread holds it has no such thread
    os.register_at_fork(after_in_child=one_thread._at_fork_reinit)  # type: ignore[attr-defined]


def lengths(vectors: Tensor) -> Tensor:
    """Euclidean lengths of (..., size), also where squares leave the number range."""
    if not is_host(vectors.device):  # scaled without a look
        return normalised(vectors)[1]
    length = lengths_in_range(vectors)
    if are_in_range(length):
        return length
    least, most = _range(length.dtype)
    scaled = ~((least < length) & (length < most))  # these alone, such as vectors that are 0
    return length.masked_scatter(scaled, normalised(vectors[scaled])[1])


def are_in_range(length: Tensor) -> bool:
    """Whether the squares of all these lengths keep their digits; of NaN they do not."""
    if length.numel() == 0:
        return True
    least, most = _range(length.dtype)
    shortest, longest = torch.stack(length.aminmax()).tolist()
    return least < shortest and longest < most


def _range(dtype: torch.dtype) -> tuple[float, float]:
    """Between these the squares of lengths keep their digits."""
    kind = torch.finfo(dtype)
    return kind.tiny**0.5 / kind.eps, kind.max**0.5


def normalised(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Unit vectors and lengths of (..., size); 0 stays 0.

    Scaled first, since squares may leave the number range.
    """
    peak = vectors.abs().amax(-1, keepdim=True)
    kind = torch.finfo(vectors.dtype)
    size = peak.clamp(kind.tiny, kind.max)  # lengths 0 and ∞ stay what they are
    scaled = vectors / size
    length = lengths_in_range(scaled)[..., None]
    unit = scaled / torch.where(length > 0, length, 1.0)
    return unit, (length * size)[..., 0]


def power_of_two(size: Tensor) -> Tensor:
    """The power of two at or below each size: division by it is exact; ½ for 0."""
    return torch.ldexp(torch.ones_like(size), torch.frexp(size).exponent - 1)


def units(vectors: Tensor, least: float = 0.0) -> Tensor:
    """A power of two near the largest entry of each of (..., size), at least `least`: (..., 1).

    Vectors divided by it keep their digits, and their squares stay in the number range.
    """
    least = max(least, torch.finfo(vectors.dtype).tiny)
    return power_of_two(vectors.detach().abs().amax(-1, keepdim=True).clamp_min(least))


def lengths_in_range(vectors: Tensor) -> Tensor:
    """Euclidean lengths of (..., size) whose squares stay in the number range."""
    size = vectors.shape[-1]
    whole = size - size % _CHUNK
    if size <= 4 * _CHUNK or not is_host(vectors.device):  # a device adds in a tree
        return torch.linalg.vector_norm(vectors, dim=-1)
    parts = torch.linalg.vector_norm(vectors[..., :whole].unflatten(-1, (-1, _CHUNK)), dim=-1)
    rest = torch.linalg.vector_norm(vectors[..., whole:], dim=-1, keepdim=True)
    of_parts = torch.cat([parts, rest], -1).double()
    return torch.linalg.vector_norm(of_parts, dim=-1).to(vectors.dtype)


def finite(values: Tensor, what: str = "a product with the linear map") -> Tensor:
    """The values.

    Raises:
        OverflowError: one is not finite.
    """
    # The sum first: it is finite nearly always, and needs no second tensor.
    if not math.isfinite(values.sum().item()) and not bool(values.isfinite().all()):
        raise OverflowError(
            f"{what} leaves the range of {values.dtype}: its norm cannot be represented; use less "
            "extreme weights or a smaller radius"
        )
    return values


def normal_like(like: Tensor, generator: torch.Generator) -> Tensor:
    """Normal numbers of the shape, dtype and device of a tensor, drawn where the generator is."""
    device = generator.device
    draw = torch.randn(like.shape, generator=generator, dtype=torch.float64, device=device)
    return draw.to(like)


def beside(constant: Tensor, moving: Tensor) -> Tensor:
    """The constant; with a derivative of 0 written out, if the other carries a forward one.

    torch has none of a constant, and asks its Python for the shape of each sum and product with
    that: 0.3 and 0.6 ms, where those of two derivatives take 0.01 (16 × 8 numbers, torch 2.13).

    Args:
        constant: ``(..., a, b)``, with or without a derivative of its own.
        moving: ``(..., n, k)``, whose leading axes broadcast with those of the constant.
    """
    if forward_ad.unpack_dual(moving).tangent is None:
        return constant
    nowhere = torch.zeros((), dtype=torch.bool, device=moving.device)
    return torch.where(nowhere, moving[..., :1, :1], constant)


def pushed_forward(
    function: Callable[[Tensor], Any], at: Tensor, along: Tensor
) -> tuple[Any, Any]:
    """A function's value, and its derivative along a displacement, by one thread at a time."""
    with one_thread:
        value, tangent, *_ = torch.func.jvp(function, (at,), (along,))
    return value, tangent


def slopes_of(function: Callable[[Tensor], Tensor], at: Tensor) -> tuple[Tensor, Tensor]:
    """The values of a function that acts on each entry alone, and its slopes there."""
    values, pull, *_ = torch.func.vjp(function, at)
    (slopes,) = pull(torch.ones_like(values))
    return values, slopes
