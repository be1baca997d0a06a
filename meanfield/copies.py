"""Copies of tensors that come in, and gradients to tensors that have changed since."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meanfield.checks import as_float_tensor, is_traced

_CHECKED = "changes are looked for"  # on the node of a copy, whose own hook does so


def own_tensor(
    value: Any, name: str, dims: tuple[str, ...], *, like: Tensor | None = None
) -> Tensor:
    """`as_float_tensor` in memory of its own: the owner of an array may go on with it.

    An array of xarray with all of these dimensions has them last, in this order.

    Raises:
        ValueError: an array of xarray whose dimensions have names, but not these.
    """
    names = [str(one) for one in getattr(value, "dims", ())]
    if set(dims) <= set(names):
        value = value.transpose(..., *dims)
    elif not all(one.removeprefix("dim_").isdigit() for one in names):  # xarray's own say nothing
        raise ValueError(
            f"{name}: expected the dimensions {', '.join(dims)} of an array of xarray, got "
            f"{', '.join(names)}; rename them, or give its .values, whose axes go by place"
        )
    tensor = as_float_tensor(value, name, like=like)
    return own_copy(tensor, "ParticleMeasure") if isinstance(value, Tensor) else tensor


def own_copy(tensor: Tensor, who: str) -> Tensor:
    """A copy, which refuses gradients to tensors that were changed since it was made of them.

    What is made once, before a loop of training, would stay that of the first step in silence.
    """
    copy = tensor.clone()
    if not copy.requires_grad or is_traced(copy):
        return copy
    made_of = [(leaf, leaf._version) for leaf in _leaves(copy)]
    node: Any = copy.grad_fn
    node.metadata[_CHECKED] = True

    @torch.utils.hooks.unserializable_hook  # one read from a file has no leaves
    def check(gradient: Tensor) -> None:
        if any(leaf._version != version for leaf, version in made_of):
            raise RuntimeError(
                f"{who}: expected tensors as they were when it was made, got some changed since, "
                "as by a step of an optimiser; make it anew at each step: it keeps a copy"
            )

    copy.register_hook(check)
    return copy


def _leaves(tensor: Tensor) -> list[Tensor]:
    """The tensors that gradients of this one go to, but for those behind another such copy."""
    found, seen, nodes = [], set(), [tensor.grad_fn]
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen or node.metadata.get(_CHECKED):
            continue
        seen.add(node)
        if node.name().endswith("AccumulateGrad"):
            found.append(node.variable)
        nodes += [each for each, _ in node.next_functions]
    return found
