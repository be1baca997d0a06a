"""Run models of transformers, and compare what was read with what they do themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from meanfield.layers import Chain
from meanfield.maps import Map
from meanfield.measures import ParticleMeasure

if TYPE_CHECKING:
    from meanfield.pretrained.transformer import Transformer

# Largest relative difference of a block's outputs in float64: rounding is near 1e-13.
_ROUNDING = 1e-9


class Call(NamedTuple):
    """One call of a module: the hidden states that enter it and those that leave it."""

    entered: Tensor
    left: Tensor


@contextmanager
def recorded(modules: Sequence[Any]) -> Iterator[list[Call]]:
    """The calls of the modules in this thread, in order, while the context lasts.

    A module that several layers share is called once for each of them.
    """
    calls: list[Call] = []
    thread = threading.get_ident()

    # Another thread that runs the model calls this too, without `named` while it is registered.
    def record(module: Any, positional: tuple[Any, ...], *rest: Any) -> None:
        if threading.get_ident() != thread:
            return
        named, output = rest
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


def check_parity(source: Transformer) -> None:
    """Compare every block with its module, by one run of a model in float64 on a small input.

    Where attention alone is read, it is compared. Each block is given what entered its module, so
    that rounding does not add up, and what leaves one module has to be what enters the next.

    Raises:
        ValueError: they differ by more than rounding; the message names the first place.
    """
    family, model = source.family, source.model
    modules, whole = list(family.blocks(model)), family.block is not None
    if not whole:
        modules = [family.attention_module(block) for block in modules]
    (arguments,) = family.inputs.runs(model, None, family.inputs.sample(model)).arguments
    with torch.no_grad(), InFloat64(), recorded(modules) as calls:
        last = family.inputs.run(model, arguments, source.causal)
    if len(calls) != len(modules):
        raise ValueError(
            f"{source.name}: expected each of its {len(modules)} blocks to be called once, got "
            f"{len(calls)} calls"
        )
    entering = calls[0].entered
    for layer, (entered, left) in enumerate(calls):
        place = f"block {layer} ({type(modules[layer]).__name__})"
        if whole:
            _compare(entering, entered, source.name, f"what enters {place}")
        read = source.block if whole else source.attention
        F = read(layer, length=entered.shape[-2])
        _compare(_image(F, entered), left, source.name, place)
        entering = left
    if not whole:
        return
    ends = family.last(model)
    ours = _image(Chain(ends), entering) if ends else entering
    _compare(ours, last, source.name, "what follows the last block")


def _image(F: Map, cloud: Tensor) -> Tensor:
    return F(ParticleMeasure.from_sequence(cloud)).points


def _compare(ours: Tensor, theirs: Tensor, name: str, place: str) -> None:
    size, off = float(theirs.abs().max()), float((ours - theirs).abs().max())
    if off <= _ROUNDING * size:
        return
    raise ValueError(
        f"{name}: expected maps that do what the model does, but at {place} the two differ by "
        f"{off / (size or 1.0):.1e} of the largest entry; something of the model is not read: a "
        "field of its configuration, an adapter, a hook, a changed forward. verify=False reads "
        "it all the same"
    )
