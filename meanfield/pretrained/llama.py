"""Llama and what is built like it: Mistral, Qwen2, Qwen3.

Pre-norm by RMSNorm, gated, grouped heads, rotary positions; Mistral and Qwen may see a window
only, and Qwen3 normalises queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meanfield.attention import SelfAttention
from meanfield.attention.kernels import Kernel, qk_norm
from meanfield.layers import MLP, Chain, RMSNorm
from meanfield.pretrained.family import Family, Site
from meanfield.pretrained.modules import (
    attention_parameters,
    feed_forward,
    pre_norm,
    rms_norm,
    rotary_kernel,
    windowed,
)

_RANDOM_SIZES = {
    **{"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "vocab_size": 8192},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32},
}

Norm = Callable[[Any, Any], RMSNorm]  # of a module and the model's configuration


def decoder_attention(site: Site, kernel: Kernel, width: int | None = None) -> SelfAttention:
    """The attention of a block with this kernel, `width` tokens back or all of them."""
    own = site.module.self_attn
    parameters = attention_parameters(
        site.config, own.q_proj, own.k_proj, own.v_proj, own.o_proj, scale=own.scaling
    )
    seen = windowed(site, width, inner=kernel)
    return SelfAttention(parameters, causal=site.causal, kernel=seen)


def rotary_attention(site: Site) -> SelfAttention:
    """With queries and keys turned by their positions."""
    return decoder_attention(site, rotary_kernel(site))


def sliding_width(site: Site) -> int | None:
    """Tokens that a layer sees, or None for all, where the configuration has a kind for each."""
    kind = site.config.layer_types[site.layer]
    if kind not in ("full_attention", "sliding_attention"):
        raise ValueError(
            f"layer {site.layer}: expected full_attention or sliding_attention, got {kind!r}"
        )
    width: int | None = site.config.sliding_window
    return None if kind == "full_attention" else width


def gated(site: Site, activation: str) -> MLP:
    """The feed-forward layer of a block."""
    mlp = site.module.mlp
    return feed_forward(activation, mlp.up_proj, mlp.down_proj, mlp.gate_proj)


def decoder(
    model_type: str,
    stem: str,
    attention: Callable[[Site], SelfAttention] = rotary_attention,
    *,
    norm: Norm | None = None,
    block: Callable[[Site], Chain] | None = None,
) -> Family:
    """A family whose models have Llama's modules.

    Args:
        model_type: see `Family`.
        stem: see `Family`.
        attention: of a block.
        norm: how its norms are read; as Llama's if None.
        block: the whole block; two pre-norm layers if None.
    """
    norm = norm or (lambda module, config: rms_norm(module, config.rms_norm_eps))

    def pre_norm_block(site: Site) -> Chain:
        first, second = site.module.input_layernorm, site.module.post_attention_layernorm
        feed = gated(site, site.config.hidden_act)
        attended = pre_norm(norm(first, site.config), attention(site))
        return Chain([attended, pre_norm(norm(second, site.config), feed)])

    return Family(
        model_type,
        stem,
        masks=(True,),
        blocks=lambda model: model.layers,
        attention_module=lambda module: module.self_attn,
        attention=attention,
        block=block or pre_norm_block,
        last=lambda model: [norm(model.norm, model.config)],
        needs_length=True,
        random_config=_RANDOM_SIZES,
    )


# Llama has no window whatever its configuration says, Mistral one width for all layers, Qwen and
# Gemma 2 a kind for each layer: so do their classes in transformers.


def _normalised_attention(site: Site) -> SelfAttention:
    own, eps = site.module.self_attn, float(site.config.rms_norm_eps)
    normalised = qk_norm(own.q_norm.weight.detach(), own.k_norm.weight.detach(), eps=eps)
    return decoder_attention(site, rotary_kernel(site, inner=normalised), sliding_width(site))


LLAMA = decoder("llama", "Llama")
MISTRAL = decoder(
    "mistral",
    "Mistral",
    lambda site: decoder_attention(site, rotary_kernel(site), site.config.sliding_window),
)
QWEN2 = decoder(
    "qwen2",
    "Qwen2",
    lambda site: decoder_attention(site, rotary_kernel(site), sliding_width(site)),
)
QWEN3 = decoder("qwen3", "Qwen3", _normalised_attention)
