"""BERT and what is built like it, post-norm: RoBERTa, XLM-R, ELECTRA; plain or masked."""

from __future__ import annotations

from typing import Any

from meanfield.attention import SelfAttention
from meanfield.layers import Chain
from meanfield.pretrained.family import Family, Site
from meanfield.pretrained.modules import (
    attention_parameters,
    check_absolute_positions,
    feed_forward,
    layer_norm,
    post_norm,
)
from meanfield.pretrained.token_ids import TokenIds


def _attention(site: Site) -> SelfAttention:
    own, out = site.module.attention.self, site.module.attention.output.dense
    parameters = attention_parameters(site.config, own.query, own.key, own.value, out)
    return SelfAttention(parameters, causal=site.causal)


def _block(site: Site) -> Chain:
    block = site.module
    feed = feed_forward(site.config.hidden_act, block.intermediate.dense, block.output.dense)
    attended = post_norm(layer_norm(block.attention.output.LayerNorm), _attention(site))
    return Chain([attended, post_norm(layer_norm(block.output.LayerNorm), feed)])


def _family(model_type: str, stem: str, **changes: Any) -> Family:
    return Family(
        model_type,
        stem,
        masks=(False, True),
        blocks=lambda model: model.encoder.layer,
        attention_module=lambda block: block.attention.self,
        attention=_attention,
        block=_block,
        check=check_absolute_positions,
        **changes,
    )


def _roberta_tokens(config: Any) -> int:
    # The first positions belong to the padding token and to nobody.
    return int(config.max_position_embeddings) - int(config.pad_token_id) - 1


BERT = _family("bert", "Bert", model_arguments={"add_pooling_layer": False})
ROBERTA, XLM_ROBERTA = (
    _family(
        model_type,
        stem,
        model_arguments={"add_pooling_layer": False},
        inputs=TokenIds(_roberta_tokens),
    )
    for model_type, stem in (("roberta", "Roberta"), ("xlm-roberta", "XLMRoberta"))
)
ELECTRA = _family("electra", "Electra")
