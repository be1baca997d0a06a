"""BERT and what is built like it, GPT-2 and ViT: their blocks by the names of the modules in them.

Each projection is a module, positions are added to the tokens, norms are LayerNorm. Tokens of ViT
are patches of an image and a class token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meanfield.attention import SelfAttention
from meanfield.checks import as_float_tensor, check_finite
from meanfield.layers import Chain
from meanfield.pretrained.family import SMALL, Family, Site, eager
from meanfield.pretrained.model_inputs import ModelInputs, Runs
from meanfield.pretrained.modules import (
    Linear,
    attention_parameters,
    check_absolute_positions,
    feed_forward,
    layer_norm,
    linear,
    post_norm,
    pre_norm,
)
from meanfield.pretrained.token_ids import TokenIds


class Parts(NamedTuple):
    """What a block consists of.

    Attributes:
        projections: modules of queries, keys, values and of the output.
        feed: name of the activation, the inner and the outer module.
        norms: of attention and of the feed-forward layer.
        scale: of the scores; 1/√k if None.
    """

    projections: tuple[Any, Any, Any, Any]
    feed: tuple[Any, Any, Any]
    norms: tuple[Any, Any]
    scale: float | None = None


def encoder(
    model_type: str, stem: str, parts: Callable[[Site], Parts], *, pre: bool = False, **more: Any
) -> Family:
    """A family by the parts of its blocks; norms stand before attention if `pre`, else behind."""
    around = pre_norm if pre else post_norm

    def attention(site: Site) -> SelfAttention:
        own = parts(site)
        parameters = attention_parameters(site.config, *own.projections, scale=own.scale)
        return SelfAttention(parameters, causal=site.causal)

    def block(site: Site) -> Chain:
        own = parts(site)
        first, second = map(layer_norm, own.norms)
        return Chain([around(first, attention(site)), around(second, feed_forward(*own.feed))])

    return Family(model_type, stem, attention=attention, block=block, **more)


def _bert(site: Site) -> Parts:
    block, own, after = site.module, site.module.attention.self, site.module.attention.output
    return Parts(
        (own.query, own.key, own.value, after.dense),
        (site.config.hidden_act, block.intermediate.dense, block.output.dense),
        (after.LayerNorm, block.output.LayerNorm),
    )


def _like_bert(model_type: str, stem: str, **more: Any) -> Family:
    return encoder(
        model_type,
        stem,
        _bert,
        masks=(False, True),
        blocks=lambda model: model.encoder.layer,
        attention_module=lambda block: block.attention.self,
        check=check_absolute_positions,
        **more,
    )


def _albert(site: Site) -> Parts:
    block, own = site.module, site.module.attention
    return Parts(
        (own.query, own.key, own.value, own.dense),
        (site.config.hidden_act, block.ffn, block.ffn_output),
        (own.LayerNorm, block.full_layer_layer_norm),
    )


def _albert_blocks(model: Any) -> Sequence[Any]:
    """The weights of a group are those of all its layers."""
    layers, groups = int(model.config.num_hidden_layers), int(model.config.num_hidden_groups)
    # As the model does: layer l uses group ⌊l · groups / layers⌋.
    chosen = [int(layer / (layers / groups)) for layer in range(layers)]
    return [model.encoder.albert_layer_groups[group].albert_layers[0] for group in chosen]


def _check_albert(config: Any) -> None:
    if config.inner_group_num != 1:
        raise ValueError(
            f"expected one layer per group, got inner_group_num={config.inner_group_num}"
        )


def _distilbert(site: Site) -> Parts:
    block, own = site.module, site.module.attention
    return Parts(
        (own.q_lin, own.k_lin, own.v_lin, own.out_lin),
        (site.config.activation, block.ffn.lin1, block.ffn.lin2),
        (block.sa_layer_norm, block.output_layer_norm),
    )


def _gpt2(site: Site) -> Parts:
    """Matrices are stored input × output, those of queries, keys and values side by side."""
    block, own, config = site.module, site.module.attn, site.config
    fused = linear(own.c_attn)
    assert fused.bias is not None
    query, key, value = map(Linear, fused.weight.chunk(3), fused.bias.chunk(3))
    scale = (len(query.weight) // config.num_attention_heads) ** -0.5
    scale = scale if config.scale_attn_weights else 1.0
    return Parts(
        (query, key, value, own.c_proj),
        (config.activation_function, block.mlp.c_fc, block.mlp.c_proj),
        (block.ln_1, block.ln_2),
        scale / (site.layer + 1 if config.scale_attn_by_inverse_layer_idx else 1),
    )


def _gpt2_plainly(model: Any) -> Any:
    """Without the scores in float32 whatever the weights that a configuration can ask for."""
    for block in model.h:
        block.attn.reorder_and_upcast_attn = False
    return eager(model)


_NO_POOLING = {"add_pooling_layer": False}
# The first positions belong to the padding token and to nobody.
_ROBERTA_TOKENS = TokenIds(
    lambda config: int(config.max_position_embeddings) - int(config.pad_token_id) - 1
)
ENCODERS = (
    _like_bert("bert", "Bert", model_arguments=_NO_POOLING),
    *(
        _like_bert(name, stem, model_arguments=_NO_POOLING, inputs=_ROBERTA_TOKENS)
        for name, stem in (("roberta", "Roberta"), ("xlm-roberta", "XLMRoberta"))
    ),
    encoder(
        "distilbert", "DistilBert", _distilbert, masks=(False,),
        blocks=lambda model: model.transformer.layer,
        attention_module=lambda block: block.attention,
    ),
    _like_bert("electra", "Electra"),
    encoder(
        "albert", "Albert", _albert, masks=(False,), blocks=_albert_blocks,
        attention_module=lambda block: block.attention, check=_check_albert,
        model_arguments=_NO_POOLING, random_config=SMALL,
    ),
    encoder(
        "gpt2", "GPT2", _gpt2, pre=True, masks=(True,), blocks=lambda model: model.h,
        attention_module=lambda block: block.attn,
        last=lambda model: [layer_norm(model.ln_f)], plainly=_gpt2_plainly,
    ),
)  # fmt: skip


class _Pixels(ModelInputs):
    """Images of the model's own size, or what an image processor returns."""

    def runs(self, model: Any, tokenizer: Any, given: Any) -> Runs:
        """One run of images ``(channels, height, width)`` or ``(batch, …)``."""
        if isinstance(given, Mapping):
            if set(given) != {"pixel_values"}:
                raise ValueError(f"images: expected pixel_values alone, got {', '.join(given)}")
            given = given["pixel_values"]
        own = next(model.parameters())
        pixels = as_float_tensor(given, "images", like=own).to(own)
        if not torch.as_tensor(given).is_floating_point():
            raise ValueError(
                "images: expected floats as the model's image processor scales them, got integers"
            )
        patches = model.embeddings.patch_embeddings
        size = (patches.num_channels, *patches.image_size)
        if pixels.ndim not in (3, 4) or tuple(pixels.shape[-3:]) != size or 0 in pixels.shape:
            raise ValueError(
                f"images: expected shape {size}, channels first, or (batch, {size[0]}, "
                f"{size[1]}, {size[2]}), got {tuple(pixels.shape)}"
            )
        check_finite(pixels, "images")
        single = pixels.ndim == 3
        return Runs([{"pixel_values": pixels[None] if single else pixels}], single)

    def sample(self, model: Any) -> Tensor:
        """Normal pixels."""
        patches = model.embeddings.patch_embeddings
        generator = torch.Generator().manual_seed(0)
        return torch.randn(
            patches.num_channels, *patches.image_size, generator=generator, device=generator.device
        )

    def max_tokens(self, model: Any) -> int:
        """The patches and the class token: no more, and no fewer."""
        return int(model.embeddings.position_embeddings.shape[1])


def _parts(site: Site) -> Parts:
    block, own = site.module, site.module.attention
    return Parts(
        (own.q_proj, own.k_proj, own.v_proj, own.o_proj),
        (site.config.hidden_act, block.mlp.fc1, block.mlp.fc2),
        (block.layernorm_before, block.layernorm_after),
        own.scaling,
    )


VIT = encoder(
    "vit",
    "ViT",
    _parts,
    pre=True,
    masks=(False,),
    blocks=lambda model: model.layers,
    attention_module=lambda block: block.attention,
    last=lambda model: [layer_norm(model.layernorm)],
    inputs=_Pixels(),
    model_arguments={"add_pooling_layer": False},
    random_config={
        **{"hidden_size": 192, "intermediate_size": 768, "num_attention_heads": 3},
        **{"num_hidden_layers": 4, "image_size": 64},
    },
)
