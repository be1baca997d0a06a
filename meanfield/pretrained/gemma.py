"""Gemma and Gemma 2: norms stored about one; Gemma 2 is peri-norm with bounded scores."""

from __future__ import annotations

from typing import Any

from meanfield.attention import SelfAttention
from meanfield.attention.kernels import soft_cap
from meanfield.layers import MLP, Chain, Residual, RMSNorm
from meanfield.pretrained.family import Site
from meanfield.pretrained.llama import (
    decoder,
    decoder_attention,
    gated,
    rotary_attention,
    sliding_width,
)
from meanfield.pretrained.modules import rms_norm, rotary_kernel


def _norm(module: Any, config: Any) -> RMSNorm:
    return rms_norm(module, config.rms_norm_eps, around_one=True)


def _capped_attention(site: Site) -> SelfAttention:
    kernel, cap = rotary_kernel(site), site.config.attn_logit_softcapping
    capped = kernel if cap is None else soft_cap(float(cap), inner=kernel)
    return decoder_attention(site, capped, sliding_width(site))


def _peri_norm_block(site: Site) -> Chain:
    block, config = site.module, site.config

    def between(before: Any, F: SelfAttention | MLP, after: Any) -> Residual:
        return Residual(Chain([_norm(before, config), F, _norm(after, config)]))

    attention, feed = _capped_attention(site), gated(site, config.hidden_activation)
    return Chain(
        [
            between(block.input_layernorm, attention, block.post_attention_layernorm),
            between(block.pre_feedforward_layernorm, feed, block.post_feedforward_layernorm),
        ]
    )


GEMMA = decoder("gemma", "Gemma", rotary_attention, norm=_norm)
GEMMA2 = decoder("gemma2", "Gemma2", _capped_attention, norm=_norm, block=_peri_norm_block)
