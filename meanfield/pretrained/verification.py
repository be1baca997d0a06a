"""Whether a model that was read does what the model itself does."""

from __future__ import annotations

import torch
from torch import Tensor

from meanfield.layers import Chain
from meanfield.maps import Map
from meanfield.measures import ParticleMeasure
from meanfield.pretrained.recording import InFloat64, recorded
from meanfield.pretrained.transformer import Transformer

# Largest relative difference of a block's outputs in float64: rounding is near 1e-13.
_ROUNDING = 1e-9


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
