"""GPT-NeoX and Pythia: pre-norm in parallel, part of each head turned by position."""

from __future__ import annotations

from meanfield.attention import SelfAttention
from meanfield.layers import Chain, Residual, Sum
from meanfield.maps import Map
from meanfield.pretrained.family import SMALL, Family, Site
from meanfield.pretrained.modules import (
    Linear,
    attention_parameters,
    feed_forward,
    layer_norm,
    linear,
    rotary_gain,
    rotary_kernel,
)


def _attention(site: Site) -> SelfAttention:
    own, H = site.module.attention, int(site.config.num_attention_heads)
    weight, bias = (
        [None] * 3 if t is None else t.unflatten(0, (H, 3, -1)).transpose(0, 1).flatten(1, 2)
        for t in linear(own.query_key_value)  # rows are heads, in each its queries, keys, values
    )
    query, key, value = (Linear(*parts) for parts in zip(weight, bias, strict=True))
    scale = (site.config.hidden_size // H) ** -0.5 * rotary_gain(site)
    parameters = attention_parameters(site.config, query, key, value, own.dense, scale=scale)
    return SelfAttention(parameters, causal=site.causal, kernel=rotary_kernel(site))


def _block(site: Site) -> Map:
    block, mlp = site.module, site.module.mlp
    feed = feed_forward(site.config.hidden_act, mlp.dense_h_to_4h, mlp.dense_4h_to_h)
    attention = Chain([layer_norm(block.input_layernorm), _attention(site)])
    forward = Chain([layer_norm(block.post_attention_layernorm), feed])
    if block.use_parallel_residual:
        return Residual(Sum([attention, forward]))
    return Chain([Residual(attention), Residual(forward)])


GPT_NEOX = Family(
    "gpt_neox",
    "GPTNeoX",
    masks=(True,),
    blocks=lambda model: model.layers,
    attention_module=lambda block: block.attention,
    attention=_attention,
    block=_block,
    last=lambda model: [layer_norm(model.final_layer_norm)],
    needs_length=True,
    random_config=SMALL,
)
