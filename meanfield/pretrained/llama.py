"""Llama and what is built like it: Mistral, Qwen2, Qwen3.

Pre-norm by RMSNorm, gated, grouped heads, rotary positions; Mistral and Qwen may see a window
only, and Qwen3 normalises queries and keys.
"""

from __future__ import annotations

from typing import Any

from meanfield.attention import SelfAttention
from meanfield.attention.kernels import Kernel, dot_product, qk_norm
from meanfield.layers import Chain, Residual
from meanfield.pretrained.family import Family, Site
from meanfield.pretrained.weights import (
    attention_parameters,
    feed_forward,
    rms_norm,
    rotary_kernel,
    windowed,
)

__all__ = ["LLAMA", "MISTRAL", "QWEN2", "QWEN3", "RANDOM_SIZES", "sliding_width"]

RANDOM_SIZES = {
    **{"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "vocab_size": 8192},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32},
}


def sliding_width(site: Site) -> int | None:
    """Tokens that a layer sees, or None for all: by its type where the layers are of several."""
    types = getattr(site.config, "layer_types", None)
    if types is not None and types[site.layer] == "full_attention":
        return None
    if types is not None and types[site.layer] != "sliding_attention":
        raise ValueError(
            f"layer {site.layer}: expected full_attention or sliding_attention, got "
            f"{types[site.layer]!r}"
        )
    return getattr(site.config, "sliding_window", None)


def _attention(site: Site) -> SelfAttention:
    return _read(site, dot_product)


def _normalised_attention(site: Site) -> SelfAttention:
    own, eps = site.module.self_attn, float(site.config.rms_norm_eps)
    gains = (own.q_norm.weight.detach(), own.k_norm.weight.detach())
    return _read(site, qk_norm(*gains, eps=eps))


def _read(site: Site, kernel: Kernel) -> SelfAttention:
    own = site.module.self_attn
    parameters = attention_parameters(
        site.config, own.q_proj, own.k_proj, own.v_proj, own.o_proj, scale=own.scaling
    )
    turned = rotary_kernel(site, inner=kernel)
    seen = windowed(site, sliding_width(site), inner=turned)
    return SelfAttention(parameters, causal=True, kernel=seen)


def _block_with(site: Site, attention: SelfAttention) -> Chain:
    block, mlp, eps = site.module, site.module.mlp, site.config.rms_norm_eps
    feed = feed_forward(site.config.hidden_act, mlp.up_proj, mlp.down_proj, mlp.gate_proj)
    return Chain(
        [
            Residual(Chain([rms_norm(block.input_layernorm, eps), attention])),
            Residual(Chain([rms_norm(block.post_attention_layernorm, eps), feed])),
        ]
    )


def _family(model_type: str, stem: str, *, normalised: bool = False, **sizes: Any) -> Family:
    attention = _normalised_attention if normalised else _attention
    return Family(
        model_type,
        stem,
        masks=(True,),
        blocks=lambda model: model.layers,
        attention_module=lambda block: block.self_attn,
        attention=attention,
        block=lambda site: _block_with(site, attention(site)),
        last=lambda model: [rms_norm(model.norm, model.config.rms_norm_eps)],
        needs_length=True,
        random_config=RANDOM_SIZES | sizes,
    )


LLAMA = _family("llama", "Llama")
MISTRAL = _family("mistral", "Mistral")
QWEN2 = _family("qwen2", "Qwen2")
QWEN3 = _family("qwen3", "Qwen3", normalised=True)
