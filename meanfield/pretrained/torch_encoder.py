"""Encoders of torch itself: `torch.nn.TransformerEncoder` and its layers."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.checks import as_float_tensor, check_finite
from meanfield.layers import Chain, LayerNorm
from meanfield.pretrained.family import Family, Site
from meanfield.pretrained.model_inputs import ModelInputs, Runs
from meanfield.pretrained.modules import (
    check_forward,
    feed_forward,
    layer_norm,
    post_norm,
    pre_norm,
)

_SAMPLE_LENGTH = 7


class _Points(ModelInputs):
    """Vectors as they are; each cloud runs alone, without a batch axis, in either layout."""

    def runs(self, model: Any, tokenizer: Any, given: Any) -> Runs:
        """Of points ``(n, d)`` or ``(batch, n, d)``."""
        own = next(model.parameters())
        points = as_float_tensor(given, "points", like=own).to(own)
        d = _sizes(model)[1]
        if points.ndim not in (2, 3) or 0 in points.shape or points.shape[-1] != d:
            raise ValueError(
                f"points: expected vectors of shape (n, {d}) or (batch, n, {d}), got "
                f"{tuple(points.shape)}"
            )
        check_finite(points, "points")
        return Runs(
            [{"src": cloud} for cloud in points.reshape(-1, *points.shape[-2:])], points.ndim == 2
        )

    def sample(self, model: Any) -> Tensor:
        """Normal vectors."""
        generator = torch.Generator().manual_seed(0)
        return torch.randn(
            _SAMPLE_LENGTH, _sizes(model)[1], generator=generator, device=generator.device
        )

    def max_tokens(self, model: Any) -> int:
        """There are no positions."""
        return sys.maxsize

    def run(self, model: Any, arguments: Mapping[str, Any], causal: bool) -> Tensor:
        """With torch's own mask if masked, which is said at the call."""
        points, mask = arguments["src"], None
        if causal:
            n = len(points)
            mask = nn.Transformer.generate_square_subsequent_mask(n, dtype=points.dtype)
            mask = mask.to(points.device)
        hidden: Tensor = model(points, mask)
        return hidden


def _blocks(model: Any) -> list[Any]:
    return list(model.layers) if isinstance(model, nn.TransformerEncoder) else [model]


def _sizes(model: Any) -> tuple[int, int]:
    own = _blocks(model)[0].self_attn
    return own.num_heads, own.embed_dim


def _settings(model: Any) -> Mapping[str, Any]:
    kinds = [
        (block.self_attn.num_heads, block.norm_first, _activation(block.activation))
        for block in _blocks(model)
    ]
    eps = [part.eps for part in model.modules() if isinstance(part, nn.LayerNorm)]
    return {"heads, place of norms and activation of each layer": kinds, "ε of norms": eps}


def _attention(site: Site) -> SelfAttention:
    parameters = AttentionParameters.from_module(site.module.self_attn).detach()
    return SelfAttention(parameters, causal=site.causal)


def _block(site: Site) -> Chain:
    block = site.module
    check_forward(block, nn.TransformerEncoderLayer)
    around = pre_norm if block.norm_first else post_norm
    activation = _activation(block.activation)
    _check_fused(block, activation)
    feed = feed_forward(activation, block.linear1, block.linear2)
    attended = around(layer_norm(block.norm1), _attention(site))
    return Chain([attended, around(layer_norm(block.norm2), feed)])


def _check_fused(block: Any, activation: str) -> None:
    """Refuse a layer of which torch computes another map in evaluation mode without gradients.

    Batches of such a layer take a fused path, which knows relu and the exact gelu only, by a
    number that is set when the layer is made.

    Raises:
        ValueError: the number stands for another activation.
    """
    fused = {1: "relu", 2: "gelu"}.get(block.activation_relu_or_gelu, activation)
    if block.self_attn.batch_first and fused != activation:
        raise ValueError(
            f"expected a layer that torch computes alike in all modes, got activation "
            f"{activation}, in whose place its fused path has {fused}; set "
            "layer.activation_relu_or_gelu = 0, which leaves that path out"
        )


def _activation(function: Any) -> str:
    """Its name in the configurations of transformers, as `feed_forward` knows it."""
    kinds = {nn.functional.relu: "relu", nn.functional.gelu: "gelu", nn.functional.silu: "silu"}
    kinds |= {torch.relu: "relu", torch.tanh: "tanh", nn.functional.tanh: "tanh"}
    if isinstance(function, nn.GELU):
        return "gelu" if function.approximate == "none" else "gelu_pytorch_tanh"
    if isinstance(function, nn.Module):
        return {nn.ReLU: "relu", nn.SiLU: "silu", nn.Tanh: "tanh"}.get(
            type(function), type(function).__name__
        )
    return kinds.get(function, repr(function))


def _last(model: Any) -> Sequence[LayerNorm]:
    if not isinstance(model, nn.TransformerEncoder) or model.norm is None:
        return ()
    return [layer_norm(model.norm)]


# Its models have no configuration, and are read from memory only.
TORCH_ENCODER = Family(
    "torch encoder",
    "TransformerEncoder",
    masks=(False, True),
    blocks=_blocks,
    attention_module=lambda block: block.self_attn,
    attention=_attention,
    block=_block,
    last=_last,
    inputs=_Points(),
    sizes=_sizes,
    plainly=lambda model: model,
    settings=_settings,
)
