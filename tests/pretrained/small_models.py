"""Small models of every family with all parameters random, and their modules as oracles."""

from __future__ import annotations

import copy
import functools

import torch

from meanfield import pretrained
from meanfield.pretrained.verification import InFloat64, recorded

_COMMON = {"vocab_size": 50, "num_hidden_layers": 3}
_ENCODER = {
    **_COMMON,
    **{"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4},
    **{"max_position_embeddings": 32, "pad_token_id": 0},
}
_DECODER = _ENCODER | {"num_key_value_heads": 2, "head_dim": 6}
# Of configurations that have no head_dim.
_WIDE = {k: v for k, v in _DECODER.items() if k != "head_dim"}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_WINDOWED = {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}

# Name of a case -> (model type, changes to its configuration).
CASES = {
    "bert": ("bert", _ENCODER),
    "bert, masked": ("bert", _ENCODER | {"is_decoder": True}),
    "bert, relu": ("bert", _ENCODER | {"hidden_act": "relu"}),
    "roberta": ("roberta", _ENCODER),
    "roberta, masked": ("roberta", _ENCODER | {"is_decoder": True}),
    "distilbert": (
        "distilbert",
        {**_COMMON, "dim": 24, "hidden_dim": 40, "n_heads": 4, "max_position_embeddings": 32}
        | {"n_layers": 3},
    ),
    "electra": ("electra", _ENCODER | {"embedding_size": 10}),
    "electra, masked": ("electra", _ENCODER | {"is_decoder": True}),
    "albert": ("albert", _ENCODER | {"embedding_size": 10}),
    "albert, two groups": ("albert", _ENCODER | {"embedding_size": 10, "num_hidden_groups": 2}),
    "gpt2": ("gpt2", {"n_layer": 3, "n_head": 4, "n_embd": 24, "n_positions": 32} | _COMMON),
    "gpt2, scaled by depth": (
        "gpt2",
        {"n_layer": 3, "n_head": 4, "n_embd": 24, "n_positions": 32, "vocab_size": 50}
        | {"scale_attn_by_inverse_layer_idx": True},
    ),
    "gpt_neox": (
        "gpt_neox",
        _ENCODER | {"rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.5}
                    | {"rope_type": "default"}},
    ),
    "gpt_neox, in sequence": (
        "gpt_neox",
        _ENCODER | {"use_parallel_residual": False, "attention_bias": False}
        | {"rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 1.0}
           | {"rope_type": "default"}},
    ),
    "llama": ("llama", _DECODER),
    "llama, biased": ("llama", _DECODER | {"attention_bias": True, "mlp_bias": True}),
    "llama, long": (
        "llama",
        _DECODER
        | {
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0}
            | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
            | {"original_max_position_embeddings": 16}
        },
    ),
    "llama, yarn": (
        "llama",
        _DECODER | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0}
                    | {"original_max_position_embeddings": 16}},
    ),
    "mistral": ("mistral", _DECODER | {"sliding_window": 4}),
    "mistral, no window": ("mistral", _DECODER | {"sliding_window": None}),
    "qwen2": ("qwen2", _WIDE),
    "qwen2, windows": ("qwen2", _WIDE | _WINDOWED),
    "qwen3": ("qwen3", _DECODER | {"head_dim": 8}),
    "gemma": ("gemma", _DECODER | {"head_dim": 8}),
    "gemma2": (
        "gemma2",
        _DECODER | {"head_dim": 8, "query_pre_attn_scalar": 5, "sliding_window": 4}
        | {"attn_logit_softcapping": 1.5},
    ),
    "gemma3_text": (
        "gemma3_text",
        _DECODER | {"head_dim": 8, "query_pre_attn_scalar": 5, "sliding_window": 4}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "olmo2": ("olmo2", _WIDE),
    "olmo2, biased": (
        "olmo2",
        _ENCODER | {"attention_bias": True},
    ),
    "phi3": ("phi3", _WIDE | {"sliding_window": 4}),
    "phi3, in part": (
        "phi3",
        _WIDE | {"rope_parameters": {"rope_theta": 100.0}
                    | {"partial_rotary_factor": 0.5, "rope_type": "default"}},
    ),
    "xlm-roberta": ("xlm-roberta", _ENCODER),
}  # fmt: skip
# Mixtures of experts, of which attention is read.
EXPERTS = {
    "gpt_oss": ("gpt_oss", _DECODER | _EXPERTS | {"sliding_window": 4}),
    "mixtral": ("mixtral", _DECODER | _EXPERTS | {"sliding_window": 4}),
    "qwen3_moe": ("qwen3_moe", _WIDE | {"num_experts": 4, "num_experts_per_tok": 2}
                  | {"moe_intermediate_size": 16}),
}  # fmt: skip


def small(case, *, seed=1, causal=None, dtype=torch.float64, **changes):
    """A small model all of whose parameters are random, and a copy of its own for each test."""
    return copy.deepcopy(_made(case, seed, causal, dtype, tuple(changes.items())))


@functools.cache
def _made(case, seed, causal, dtype, changes):
    architecture, config = (CASES | EXPERTS)[case]
    config = config | dict(changes)
    masked = config.pop("is_decoder", causal)
    source = pretrained.load(f"random:{architecture}", causal=masked, dtype=dtype, config=config)
    drawn_again(source.model, torch.Generator().manual_seed(seed))
    return source


@torch.no_grad()
def drawn_again(model, generator, spread=0.3):
    """All parameters at random, gains about 1: zero biases would hide mistakes."""
    for name, parameter in model.named_parameters():
        draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        one = float(name.endswith("weight") and parameter.ndim == 1)
        parameter.copy_(one + spread * draw)


# Where the output projection of attention is in a block, by model type.
_OUTPUTS = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "electra"), "attention.output.dense"),
    **{"distilbert": "attention.out_lin", "albert": "attention.dense"},
    **{"gpt2": "attn.c_proj", "gpt_neox": "attention.dense"},
}


class Run:
    """One run of the model of transformers: what enters and leaves its modules, in order."""

    def __init__(self, source, tokens):
        output = _OUTPUTS.get(source.architecture, "self_attn.o_proj")
        blocks = source.family.blocks(source.model)
        outputs = [block.get_submodule(output) for block in blocks]
        with (
            InFloat64(),
            torch.no_grad(),
            recorded(outputs) as self.attention,
            recorded(blocks) as self.blocks,
        ):
            run = source.model(input_ids=tokens, use_cache=False)
        self.last = run.last_hidden_state
