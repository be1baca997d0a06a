"""GPT-NeoX and Pythia: pre-norm in parallel, part of each head turned by position."""

from __future__ import annotations

from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.layers import Chain, Residual, Sum
from meanfield.maps import Map
from meanfield.pretrained.family import Family, Site
from meanfield.pretrained.modules import (
    columns_of_heads,
    feed_forward,
    layer_norm,
    linear,
    rotary_gain,
    rotary_kernel,
)


def _attention(site: Site) -> SelfAttention:
    own, H = site.module.attention, int(site.config.num_attention_heads)
    fused, out = linear(own.query_key_value), linear(own.dense)
    # Rows are heads, and in each head queries, keys and values in turn.
    query, key, value = fused.weight.unflatten(0, (H, 3, -1)).unbind(1)
    query_bias = key_bias = value_bias = None
    if fused.bias is not None:
        query_bias, key_bias, value_bias = fused.bias.unflatten(0, (H, 3, -1)).unbind(1)
    parameters = AttentionParameters(
        query,
        key,
        value,
        columns_of_heads(out.weight, H),
        query_bias=query_bias,
        key_bias=key_bias,
        value_bias=value_bias,
        output_bias=out.bias,
        scale=query.shape[1] ** -0.5 * rotary_gain(site),
    )
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
    random_config={
        **{"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4},
        **{"num_hidden_layers": 4, "vocab_size": 8192},
    },
)
