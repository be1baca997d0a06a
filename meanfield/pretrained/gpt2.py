"""GPT-2: pre-norm, always masked, matrices stored input × output."""

from __future__ import annotations

from typing import Any

from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.layers import Chain
from meanfield.pretrained.family import Family, Site
from meanfield.pretrained.modules import feed_forward, layer_norm, pre_norm

__all__ = ["GPT2"]


class _Transposed:
    """A Conv1D module, y = xW + b, as a linear one."""

    def __init__(self, module: Any) -> None:
        self.weight, self.bias = module.weight.T, module.bias


def _attention(site: Site) -> SelfAttention:
    own, config = site.module.attn, site.config
    H, d = int(config.num_attention_heads), int(config.hidden_size)
    # The heads are blocks of columns.
    weight, bias = own.c_attn.weight.detach(), own.c_attn.bias.detach()
    query, key, value = (part.T.reshape(H, -1, d) for part in weight.split(d, 1))
    query_bias, key_bias, value_bias = (part.reshape(H, -1) for part in bias.split(d))
    scale = query.shape[1] ** -0.5 if config.scale_attn_weights else 1.0
    if config.scale_attn_by_inverse_layer_idx:
        scale /= site.layer + 1
    parameters = AttentionParameters(
        query,
        key,
        value,
        own.c_proj.weight.detach().reshape(H, -1, d).mT,
        query_bias=query_bias,
        key_bias=key_bias,
        value_bias=value_bias,
        output_bias=own.c_proj.bias.detach(),
        scale=scale,
    )
    return SelfAttention(parameters, causal=True)


def _block(site: Site) -> Chain:
    block, mlp = site.module, site.module.mlp
    feed = feed_forward(
        site.config.activation_function, _Transposed(mlp.c_fc), _Transposed(mlp.c_proj)
    )
    return Chain(
        [
            pre_norm(layer_norm(block.ln_1), _attention(site)),
            pre_norm(layer_norm(block.ln_2), feed),
        ]
    )


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
