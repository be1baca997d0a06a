"""Random models of every family with odd configurations: read as transformers does, or refused.

python -m tests.pretrained.odd_models --count 300 --seed 0
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
import transformers

from meanfield import pretrained
from meanfield.pretrained.registry import FAMILIES
from meanfield.pretrained.verification import InFloat64
from tests.pretrained.small_models import drawn_again

_DECODERS = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "olmo2",
    "phi3",
)
_ACTIVATIONS = ("gelu", "gelu_new", "relu", "silu", "quick_gelu", "tanh", "mish")
# Where each configuration has its activation.
_ACTIVATION = dict.fromkeys(FAMILIES, "hidden_act") | {
    **{"distilbert": "activation", "gpt2": "activation_function", "gemma": "hidden_activation"},
    **dict.fromkeys(("gemma2", "gemma3_text"), "hidden_activation"),
}


def odd_fields(kind, draw):
    """Fields of config.json, some of which the class ignores or cannot have."""
    fields = {}
    for name, values in {
        "is_causal": (True, False),
        "is_decoder": (True, False),
        "sliding_window": (None, 1, 2, 5, 4096),
        "use_sliding_window": (True, False),
        "layer_types": (
            ["full_attention", "sliding_attention"],
            ["sliding_attention"] * 2,
            ["chunked_attention"] * 2,
        ),
        "tie_word_embeddings": (True, False),
        "dtype": ("bfloat16", "float16", "float32"),
        "attn_implementation": ("sdpa", "nobody/kernel"),
        "use_bidirectional_attention": (True, False),
        "attn_logit_softcapping": (None, 0.7),
        "scale_attn_by_inverse_layer_idx": (True,),
        "layer_norm_eps": (0.1,),
        "rms_norm_eps": (0.1,),
        _ACTIVATION[kind]: _ACTIVATIONS,
    }.items():
        if draw.random() < 0.2:
            fields[name] = draw.choice(values)
    return fields


def sizes(kind, *, groups=2, width=6, biases=True):
    """Of a model of two layers whose heads may be grouped."""
    if kind == "vit":
        return {"hidden_size": 12, "intermediate_size": 20, "num_attention_heads": 3} | {
            **{"num_hidden_layers": 2, "num_channels": 1, "image_size": 4, "patch_size": 2},
            "qkv_bias": biases,
        }
    if kind == "gpt2":
        return {"n_layer": 2, "n_head": 4, "n_embd": 24, "n_positions": 32, "vocab_size": 50}
    if kind == "distilbert":
        return {"n_layers": 2, "n_heads": 4, "dim": 24, "hidden_dim": 17, "vocab_size": 50}
    own = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
    own |= {"intermediate_size": 17, "max_position_embeddings": 32, "pad_token_id": 0}
    if kind in _DECODERS:
        own |= {"num_key_value_heads": groups}
        own |= {} if kind in ("qwen2", "olmo2", "phi3") else {"head_dim": width}
    return own | ({"embedding_size": 10} if kind in ("albert", "electra") else {})


def built(kind, odd=None, *, head="Model", seed=1, **how):
    """A model of transformers all of whose parameters are random."""
    stem = FAMILIES[kind].stem
    with torch.random.fork_rng(devices=[]):
        config = getattr(transformers, f"{stem}Config")(**sizes(kind, **how), **(odd or {}))
        model = getattr(transformers, stem + head)(config).double().eval()
    drawn_again(model, torch.Generator().manual_seed(seed))
    return model.requires_grad_(False)


def saved(folder, kind, odd, **how):
    """A checkpoint of ordinary weights whose config.json has the odd fields."""
    built(kind, **how).save_pretrained(folder)
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | odd))
    return folder


def oracle_of(folder, kind):
    """The model of a checkpoint as transformers has it."""
    loader = getattr(transformers, f"{FAMILIES[kind].stem}Model").from_pretrained
    return loader(folder, dtype=torch.float64, attn_implementation="eager").eval()


def verdict(folder, kind):
    """ "right", "refused" or what is wrong."""
    try:
        source = pretrained.load(folder)
    except ValueError as error:
        return "refused", str(error)
    oracle = oracle_of(folder, kind)
    given = source.family.inputs.sample(source.model)
    (arguments,) = source.family.inputs.runs(source.model, None, given).arguments
    with torch.no_grad(), InFloat64():
        cache = {} if "pixel_values" in arguments else {"use_cache": False}
        expected = oracle(**arguments, **cache).last_hidden_state[0]
    mu = source.embeddings(given)
    found = source.network(length=mu.n_particles)(mu).points
    off = float((found - expected).abs().max() / expected.abs().max())
    return ("right", "") if off <= 1e-12 else ("wrong", f"off by {off:.1e}")


def campaign(count, seed):
    """Verdicts of so many models, and what each wrong one was."""
    draw, counts, wrong = random.Random(seed), Counter(), []
    for _ in range(count):
        kind = draw.choice([kind for kind in FAMILIES if FAMILIES[kind].block])
        how = {"groups": draw.choice((1, 2, 4)), "width": draw.choice((4, 6, 8))}
        how |= {"biases": draw.random() < 0.5, "seed": draw.randrange(2**32)}
        with tempfile.TemporaryDirectory() as folder:
            saved(folder, kind, odd_fields(kind, draw), **how)
            fields = (Path(folder) / "config.json").read_text()
            ending, reason = verdict(folder, kind)
        counts[kind, ending] += 1
        if ending == "wrong":
            wrong.append((kind, reason, fields))
    return counts, wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    counts, wrong = campaign(options.count, options.seed)
    lines = [f"{kind:12} {ending:8} {number}" for (kind, ending), number in sorted(counts.items())]
    sys.stdout.write("\n".join([*lines, *map(str, wrong)]) + "\n")
