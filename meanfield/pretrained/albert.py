"""ALBERT: BERT's block, the same weights in every layer of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meanfield.attention import SelfAttention
from meanfield.layers import Chain
from meanfield.pretrained.family import Family, Site
from meanfield.pretrained.modules import attention_parameters, feed_forward, layer_norm, post_norm


def _blocks(model: Any) -> Sequence[Any]:
    layers, groups = int(model.config.num_hidden_layers), int(model.config.num_hidden_groups)
    # As the model does: layer l uses group ⌊l · groups / layers⌋.
    chosen = [int(layer / (layers / groups)) for layer in range(layers)]
    return [model.encoder.albert_layer_groups[group].albert_layers[0] for group in chosen]


def _attention(site: Site) -> SelfAttention:
    own = site.module.attention
    parameters = attention_parameters(site.config, own.query, own.key, own.value, own.dense)
    return SelfAttention(parameters, causal=site.causal)


def _block(site: Site) -> Chain:
    block = site.module
    feed = feed_forward(site.config.hidden_act, block.ffn, block.ffn_output)
    attended = post_norm(layer_norm(block.attention.LayerNorm), _attention(site))
    return Chain([attended, post_norm(layer_norm(block.full_layer_layer_norm), feed)])


def _check(config: Any) -> None:
    if config.inner_group_num != 1:
        raise ValueError(
            f"expected one layer per group, got inner_group_num={config.inner_group_num}"
        )


ALBERT = Family(
    "albert",
    "Albert",
    masks=(False,),
    blocks=_blocks,
    attention_module=lambda block: block.attention,
    attention=_attention,
    block=_block,
    check=_check,
    model_arguments={"add_pooling_layer": False},
    random_config={
        **{"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4},
        **{"num_hidden_layers": 4, "vocab_size": 8192},
    },
)
