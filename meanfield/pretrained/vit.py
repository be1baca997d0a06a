"""Vision transformers: pre-norm and plain; tokens are patches of an image and a class token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from meanfield.checks import as_float_tensor, check_finite
from meanfield.pretrained.encoders import Parts, encoder
from meanfield.pretrained.family import Site
from meanfield.pretrained.model_inputs import ModelInputs, Runs
from meanfield.pretrained.modules import layer_norm


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
        return torch.randn(patches.num_channels, *patches.image_size, generator=generator)

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
