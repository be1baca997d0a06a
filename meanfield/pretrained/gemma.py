"""Gemma and Gemma 2: norms stored about one; Gemma 2 is peri-norm with bounded scores."""

from __future__ import annotations

from typing import Any

from meanfield.attention import SelfAttention
from meanfield.attention.kernels import Kernel, soft_cap
from meanfield.layers import MLP, Chain, Residual, RMSNorm
from meanfield.pretrained.family import Family, Site
from meanfield.pretrained.llama import RANDOM_SIZES, sliding_width
from meanfield.pretrained.weights import (
    attention_parameters,
    feed_forward,
    rms_norm,
    rotary_kernel,
    windowed,
)

__all__ = ["GEMMA", "GEMMA2"]


def _norm(module: Any, config: Any) -> RMSNorm:
    return rms_norm(module, config.rms_norm_eps, around_one=True)


def _read(site: Site, kernel: Kernel) -> SelfAttention:
    own = site.module.self_attn
    parameters = attention_parameters(
        site.config, own.q_proj, own.k_proj, own.v_proj, own.o_proj, scale=own.scaling
    )
    return SelfAttention(parameters, causal=True, kernel=kernel)


def _feed(site: Site, activation: str) -> MLP:
    mlp = site.module.mlp
    return feed_forward(activation, mlp.up_proj, mlp.down_proj, mlp.gate_proj)


def _attention(site: Site) -> SelfAttention:
    return _read(site, rotary_kernel(site))


def _block(site: Site) -> Chain:
    block, config = site.module, site.config
    feed = _feed(site, config.hidden_act)
    return Chain(
        [
            Residual(Chain([_norm(block.input_layernorm, config), _attention(site)])),
            Residual(Chain([_norm(block.post_attention_layernorm, config), feed])),
        ]
    )


def _attention2(site: Site) -> SelfAttention:
    kernel, cap = rotary_kernel(site), site.config.attn_logit_softcapping
    if cap is not None:
        kernel = soft_cap(float(cap), inner=kernel)
    return _read(site, windowed(site, sliding_width(site), inner=kernel))


def _block2(site: Site) -> Chain:
    block, config = site.module, site.config

    def between(before: Any, F: SelfAttention | MLP, after: Any) -> Residual:
        return Residual(Chain([_norm(before, config), F, _norm(after, config)]))

    return Chain(
        [
            between(block.input_layernorm, _attention2(site), block.post_attention_layernorm),
            between(
                block.pre_feedforward_layernorm,
                _feed(site, config.hidden_activation),
                block.post_feedforward_layernorm,
            ),
        ]
    )


def _family(model_type: str, stem: str, attention: Any, block: Any) -> Family:
    return Family(
        model_type,
        stem,
        masks=(True,),
        blocks=lambda model: model.layers,
        attention_module=lambda module: module.self_attn,
        attention=attention,
        block=block,
        last=lambda model: [_norm(model.norm, model.config)],
        needs_length=True,
        random_config=RANDOM_SIZES,
    )


GEMMA = _family("gemma", "Gemma", _attention, _block)
GEMMA2 = _family("gemma2", "Gemma2", _attention2, _block2)
