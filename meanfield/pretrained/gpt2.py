"""GPT-2: pre-norm, always masked, matrices stored input × output."""

from __future__ import annotations

from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.layers import Chain
from meanfield.pretrained.family import Family, Site
from meanfield.pretrained.modules import (
    columns_of_heads,
    feed_forward,
    layer_norm,
    linear,
    pre_norm,
)


def _attention(site: Site) -> SelfAttention:
    own, config = site.module.attn, site.config
    H = int(config.num_attention_heads)
    fused, out = linear(own.c_attn), linear(own.c_proj)
    query, key, value = fused.weight.unflatten(0, (3, H, -1))
    assert fused.bias is not None
    query_bias, key_bias, value_bias = fused.bias.unflatten(0, (3, H, -1))
    scale = query.shape[1] ** -0.5 if config.scale_attn_weights else 1.0
    if config.scale_attn_by_inverse_layer_idx:
        scale /= site.layer + 1
    parameters = AttentionParameters(
        query,
        key,
        value,
        columns_of_heads(out.weight, H),
        query_bias=query_bias,
        key_bias=key_bias,
        value_bias=value_bias,
        output_bias=out.bias,
        scale=scale,
    )
    return SelfAttention(parameters, causal=site.causal)


def _block(site: Site) -> Chain:
    block, mlp = site.module, site.module.mlp
    feed = feed_forward(site.config.activation_function, mlp.c_fc, mlp.c_proj)
    attended = pre_norm(layer_norm(block.ln_1), _attention(site))
    return Chain([attended, pre_norm(layer_norm(block.ln_2), feed)])


GPT2 = Family(
    "gpt2",
    "GPT2",
    masks=(True,),
    blocks=lambda model: model.h,
    attention_module=lambda block: block.attn,
    attention=_attention,
    block=_block,
    last=lambda model: [layer_norm(model.ln_f)],
)
