"""Models of transformers in float64, where their code asks for float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode


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
