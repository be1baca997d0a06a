"""Run models of transformers: in float64, and with what enters and leaves their modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class Call(NamedTuple):
    """One call of a module: the hidden states that enter it and those that leave it."""

    entered: Tensor
    left: Tensor


@contextmanager
def recorded(modules: Sequence[Any]) -> Iterator[list[Call]]:
    """The calls of the modules, in order, while the context lasts.

    A module that several layers share is called once for each of them.
    """
    calls: list[Call] = []

    def record(
        module: Any, positional: tuple[Any, ...], named: Mapping[str, Any], output: Any
    ) -> None:
        entered = positional[0] if positional else named["hidden_states"]
        calls.append(Call(entered, output[0] if isinstance(output, tuple) else output))

    hooks = [
        module.register_forward_hook(record, with_kwargs=True) for module in dict.fromkeys(modules)
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


class InFloat64(TorchFunctionMode):
    """While it lasts, nothing in float64 is rounded to float32.

    RMSNorm, the angles of rotary positions and the plain softmax of transformers are computed in
    float32 whatever the dtype of the weights, which leaves seven digits of a model in float64.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """The call, with float64 where it asks for float32."""
        named = dict(kwargs or {})
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        elif func is torch.Tensor.to and (
            args[0].dtype == torch.float64 or not args[0].dtype.is_floating_point
        ):
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            named = {k: torch.float64 if v is torch.float32 else v for k, v in named.items()}
        elif func is functional.softmax:
            named["dtype"] = torch.float64
        return func(*args, **named)
