"""Decoders with Llama's modules, as rows of a table: what their attention and blocks have of it.

Grouped heads, rotary positions, RMS norms, gated feed-forward layers. Mistral, Qwen, Gemma and Phi
may see a window only; Qwen 3 and Gemma 3 normalise queries and keys head by head, OLMo 2 all heads
together; Gemma's norms are stored about one. Of mixtures of experts attention alone is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meanfield.attention import SelfAttention
from meanfield.attention.kernels import Kernel, qk_norm, soft_cap
from meanfield.attention.normalizations import RowWise, sink, softmax
from meanfield.layers import MLP, Chain, Residual
from meanfield.maps import Map
from meanfield.pretrained.family import Family, Site, eager
from meanfield.pretrained.modules import (
    Linear,
    attention_parameters,
    feed_forward,
    length_of,
    linear,
    rms_norm,
    rotary_gain,
    rotary_kernel,
    windowed,
)

_RANDOM_SIZES = {
    **{"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "vocab_size": 8192},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32},
    "pad_token_id": None,  # words are numbered from 0; the embedding of padding is the origin
}
_FEW_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# The norms before and after attention, and those of the feed-forward layer, by module.
_PRE = (("input_layernorm", None), ("post_attention_layernorm", None))
_POST = ((None, "post_attention_layernorm"), (None, "post_feedforward_layernorm"))
_PERI = (
    ("input_layernorm", "post_attention_layernorm"),
    ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)


_Projections = tuple[Any, Any, Any]  # modules or matrices of queries, keys and values


# --- windows, as the classes in transformers have them ---


def _one_width(site: Site) -> int | None:
    """One for all layers, or none."""
    width: int | None = site.config.sliding_window
    return width


def _width_of_kind(site: Site) -> int | None:
    """Where the configuration has a kind for each layer."""
    kind = site.config.layer_types[site.layer]
    if kind not in ("full_attention", "sliding_attention"):
        raise ValueError(
            f"layer {site.layer}: expected full_attention or sliding_attention, got {kind!r}"
        )
    return None if kind == "full_attention" else _one_width(site)


# --- projections, kernels, feed-forward layers ---


def _apart(site: Site) -> _Projections:
    own = site.module.self_attn
    return own.q_proj, own.k_proj, own.v_proj


def _fused(site: Site) -> _Projections:
    """Phi's: one matrix, heads of queries first."""
    weight = linear(site.module.self_attn.qkv_proj).weight
    H, G = site.config.num_attention_heads, site.config.num_key_value_heads
    size = len(weight) // (H + 2 * G)
    parts = weight.split([H * size, G * size, G * size])
    query, key, value = (Linear(part, None) for part in parts)
    return query, key, value


def _joint(site: Site) -> _Projections:
    """OLMo's: every head has the queries of all, and the keys, so that they are normalised so.

    A head of k coordinates becomes one of H k, in which its own have gains and the others 0 (see
    `_joint_kernel`): the first halves of all heads and then the second, as rotations pair them.
    Keys that heads share are repeated, which leaves their mean square. Queries and keys take H
    times the memory.
    """
    own, H = site.module.self_attn, int(site.config.num_attention_heads)
    query, key, value = (linear(m) for m in (own.q_proj, own.k_proj, own.v_proj))
    G = len(key.weight) * H // len(query.weight)

    def wide(part: Linear, groups: int) -> Linear:
        weight, bias = (
            t if t is None else torch.cat([_halves_first(t, groups, H)] * groups) for t in part
        )
        assert weight is not None
        return Linear(weight, bias)

    return wide(query, H), wide(key, G), value


def _halves_first(rows: Tensor, groups: int, heads: int) -> Tensor:
    """Rows of each head (those of a group repeated), first halves of all and then the second."""
    halves = rows.unflatten(0, (groups, 2, -1)).repeat_interleave(heads // groups, 0)
    return halves.transpose(0, 1).flatten(0, 2)


def _joint_kernel(site: Site) -> Kernel:
    own, H = site.module.self_attn, int(site.config.num_attention_heads)
    q_gain, k_gain = own.q_norm.weight.detach(), own.k_norm.weight.detach()
    G = len(k_gain) * H // len(q_gain)
    size = len(q_gain) // H
    mask = q_gain.new_zeros(H, 2, H, size // 2)
    for head in range(H):
        mask[head, :, head] = 1
    gains = mask.flatten(1) * _halves_first(q_gain, H, H)
    normalised = qk_norm(
        gains[:, None], _halves_first(k_gain, G, H), eps=float(site.config.rms_norm_eps)
    )
    return rotary_kernel(site, inner=normalised, copies=H)


def _with_sinks(site: Site) -> RowWise:
    """Sinks stand beside tokens that count 1 each, and in a measure of n tokens 1/n."""
    return sink(site.module.self_attn.sinks.detach() - math.log(length_of(site)))


def _normalised(site: Site, *, around_one: bool = False) -> Kernel:
    own, eps = site.module.self_attn, float(site.config.rms_norm_eps)
    gains = (rms_norm(m, eps, around_one=around_one).weight for m in (own.q_norm, own.k_norm))
    return rotary_kernel(site, inner=qk_norm(*gains, eps=eps))


def _capped(site: Site) -> Kernel:
    kernel, cap = rotary_kernel(site), site.config.attn_logit_softcapping
    return kernel if cap is None else soft_cap(float(cap), inner=kernel)


def _gated(site: Site, activation: str = "hidden_act") -> MLP:
    mlp, name = site.module.mlp, getattr(site.config, activation)
    return feed_forward(name, mlp.up_proj, mlp.down_proj, mlp.gate_proj)


def _gated_tanh(site: Site) -> MLP:
    """Gemma's, whose configuration has another word for it."""
    return _gated(site, "hidden_activation")


def _gated_fused(site: Site) -> MLP:
    """Phi's: the gate first."""
    mlp = site.module.mlp
    gate, up = (Linear(part, None) for part in linear(mlp.gate_up_proj).weight.chunk(2))
    return feed_forward(site.config.hidden_act, up, mlp.down_proj, gate)


def _eager(model: Any) -> Any:
    # Those written for speed have no float64.
    model.set_experts_implementation("eager")
    return eager(model)


def decoder(
    model_type: str,
    stem: str,
    *,
    width: Callable[[Site], int | None] = lambda site: None,
    kernel: Callable[[Site], Kernel] = rotary_kernel,
    projections: Callable[[Site], _Projections] = _apart,
    normalization: Callable[[Site], RowWise] = lambda site: softmax,
    norms: tuple[tuple[str | None, str | None], ...] = _PRE,
    around_one: bool = False,
    feed: Callable[[Site], MLP] | None = _gated,
    sizes: dict[str, int] | None = None,
) -> Family:
    """A family whose models have Llama's modules.

    Args:
        model_type: see `Family`.
        stem: see `Family`.
        width: how many tokens back a layer sees, or None for all: Llama's whatever is configured.
        kernel: of attention, without the window.
        projections: of attention.
        normalization: of its scores.
        norms: names of those before and after attention, and of those of the feed-forward layer.
        around_one: whether γ − 1 is stored of a norm.
        feed: the feed-forward layer, None where it chooses experts.
        sizes: of random models, where others than Llama's.
    """

    def attention(site: Site) -> SelfAttention:
        own = site.module.self_attn
        parameters = attention_parameters(
            site.config, *projections(site), own.o_proj, scale=own.scaling * rotary_gain(site)
        )
        seen = windowed(site, width(site), inner=kernel(site))
        return SelfAttention(
            parameters, causal=site.causal, kernel=seen, normalization=normalization(site)
        )

    def part(site: Site, F: Map, names: tuple[str | None, str | None]) -> Residual:
        before, after = (
            [] if name is None else [norm(getattr(site.module, name), site.config)]
            for name in names
        )
        return Residual(Chain([*before, F, *after]))

    def norm(module: Any, config: Any) -> Map:
        return rms_norm(module, config.rms_norm_eps, around_one=around_one)

    def block(site: Site) -> Chain:
        assert feed is not None
        return Chain([part(site, attention(site), norms[0]), part(site, feed(site), norms[1])])

    return Family(
        model_type,
        stem,
        masks=(True,),
        blocks=lambda model: model.layers,
        attention_module=lambda module: module.self_attn,
        attention=attention,
        block=None if feed is None else block,
        last=lambda model: [norm(model.norm, model.config)],
        plainly=_eager if feed is None else eager,
        needs_length=True,
        random_config=_RANDOM_SIZES | (sizes or {}),
    )


DECODERS = (
    decoder("llama", "Llama"),
    decoder("mistral", "Mistral", width=_one_width),
    decoder("qwen2", "Qwen2", width=_width_of_kind),
    decoder("qwen3", "Qwen3", width=_width_of_kind, kernel=_normalised),
    decoder("gemma", "Gemma", around_one=True),
    decoder(
        "gemma2", "Gemma2", width=_width_of_kind, kernel=_capped, norms=_PERI, around_one=True,
        feed=_gated_tanh,
    ),
    # Its class leaves attn_logit_softcapping out.
    decoder(
        "gemma3_text", "Gemma3Text", width=_width_of_kind, norms=_PERI, around_one=True,
        kernel=lambda site: _normalised(site, around_one=True), feed=_gated_tanh,
    ),
    decoder("olmo2", "Olmo2", kernel=_joint_kernel, projections=_joint, norms=_POST),
    decoder("phi3", "Phi3", width=_one_width, projections=_fused, feed=_gated_fused),
    decoder(
        "gpt_oss", "GptOss", width=_width_of_kind, normalization=_with_sinks,
        kernel=lambda site: rotary_kernel(site, all_places=True), feed=None, sizes=_FEW_EXPERTS,
    ),
    decoder("mixtral", "Mixtral", width=_one_width, feed=None, sizes=_FEW_EXPERTS),
    decoder(
        "qwen3_moe", "Qwen3Moe", width=_one_width, kernel=_normalised, feed=None,
        sizes={"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 704},
    ),
)  # fmt: skip
