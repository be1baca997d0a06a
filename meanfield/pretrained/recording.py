"""What enters and leaves the modules of a model while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor


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
