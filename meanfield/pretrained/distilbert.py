"""DistilBERT: BERT's block under other names."""

from __future__ import annotations

from meanfield.attention import SelfAttention
from meanfield.layers import Chain
from meanfield.pretrained.family import Family, Site
from meanfield.pretrained.modules import attention_parameters, feed_forward, layer_norm, post_norm


def _attention(site: Site) -> SelfAttention:
    own = site.module.attention
    parameters = attention_parameters(site.config, own.q_lin, own.k_lin, own.v_lin, own.out_lin)
    return SelfAttention(parameters, causal=site.causal)


def _block(site: Site) -> Chain:
    block = site.module
    feed = feed_forward(site.config.activation, block.ffn.lin1, block.ffn.lin2)
    attended = post_norm(layer_norm(block.sa_layer_norm), _attention(site))
    return Chain([attended, post_norm(layer_norm(block.output_layer_norm), feed)])


DISTILBERT = Family(
    "distilbert",
    "DistilBert",
    masks=(False,),
    blocks=lambda model: model.transformer.layer,
    attention_module=lambda block: block.attention,
    attention=_attention,
    block=_block,
)
