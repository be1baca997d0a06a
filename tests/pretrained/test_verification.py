"""Models that are built oddly do what transformers does to 1e-12, or are refused by name."""

from __future__ import annotations

import json

import pytest
import torch

from meanfield import pretrained
from meanfield.pretrained.verification import InFloat64

pytest.importorskip("transformers")

from tests.pretrained.odd_models import built, campaign, oracle_of, saved

_WINDOWS = {"use_sliding_window": True, "sliding_window": 3}
_ROPE = {"rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
PLAIN = {"is_causal": False}

# The odd fields of config.json; names begin with the type.
RIGHT = {
    "llama, plain": PLAIN,
    "llama, a window that it has not": {"sliding_window": 3},
    "llama, kinds of layers that it has not": {
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 3,
    },
    "llama, another eps": {"rms_norm_eps": 1e-2},
    "bert, another eps": {"layer_norm_eps": 1e-2},
    "llama, linear rope": {"rope_parameters": _ROPE | {"rope_type": "linear"}},
    "mistral, plain with a window": PLAIN | {"sliding_window": 2},
    "mistral, kinds of layers that it has not": {
        "layer_types": ["full_attention"] * 2,
        "sliding_window": 3,
    },
    "qwen2, plain with windows": PLAIN
    | _WINDOWS
    | {"layer_types": ["full_attention", "sliding_attention"]},
    "qwen2, kinds of layers": _WINDOWS | {"layer_types": ["sliding_attention", "full_attention"]},
    "qwen2, a window that is off": {"sliding_window": 3},
    "qwen3, plain": PLAIN,
    "gemma, plain": PLAIN,
    "gemma2, plain, windows everywhere": PLAIN
    | {"layer_types": ["sliding_attention"] * 2, "sliding_window": 2},
    "gpt2, plain": PLAIN,
    "gpt_neox, plain": PLAIN,
    "bert, a decoder that is plain": PLAIN | {"is_decoder": True},
    "albert, plain": PLAIN,
    "bert, its type in bfloat16": {"dtype": "bfloat16"},
    "llama, attention of a hub": {"attn_implementation": "nobody/kernel"},
    "llama, private attention": {"_attn_implementation": "nobody/kernel"},
}
REFUSED = {
    "gemma, two-sided": ({"use_bidirectional_attention": True}, "is_causal"),
    "bert, is_causal and no decoder": ({"is_causal": True}, "masks .* fused attention"),
    "mistral, no window": ({"sliding_window": 0}, "sliding_window ≥ 1"),
    "qwen2, chunks": ({"layer_types": ["chunked_attention"] * 2}, "chunked_atten"),
    "gemma2, kinds": ({"layer_types": ["sideways"] * 2}, "layer_types"),
    "llama, yarn in part": (
        {"rope_parameters": _ROPE | {"rope_type": "yarn", "partial_rotary_factor": 0.5}},
        "0.5 of each head",
    ),
    "bert, an activation": ({"hidden_act": "mish"}, "activation.*'mish'"),
    "albert, groups": ({"inner_group_num": 2}, "inner_"),
}


IDS = torch.arange(3, 10)


def own_output(model):
    with torch.no_grad(), InFloat64():
        return model(input_ids=IDS[None]).last_hidden_state[0]


def agrees(source, expected):
    mu = source.embeddings(IDS)
    found = source.network(length=len(IDS))(mu).points
    assert float((found - expected).abs().max()) <= 1e-12 * float(expected.abs().max())


@pytest.mark.parametrize("case", list(RIGHT))
def test_an_odd_configuration_is_read_as_transformers_reads_it(tmp_path, case):
    kind = case.partition(",")[0]
    folder = saved(tmp_path, kind, RIGHT[case])
    source = pretrained.load(folder)
    oracle = oracle_of(folder, kind)
    agrees(source, own_output(oracle))
    assert source.causal == bool(is_masked(oracle))
    assert source.causal in source.masks


def is_masked(model):
    """Whether the first token is blind to the second."""
    other = IDS.clone()
    other[1] = 20
    with torch.no_grad(), InFloat64():
        a, b = (model(input_ids=ids[None]).last_hidden_state[0, 0] for ids in (IDS, other))
    return float((a - b).abs().max()) < 1e-9


@pytest.mark.parametrize("factor", [1 + 1e-4, float("nan")])
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_a_change_by_a_ten_thousandth_is_noticed(kind, factor):
    """A hook that the reader cannot know of."""
    model = built(kind)
    name = "layers.1.self_attn.o_proj" if kind == "llama" else "encoder.layer.1.attention.self"
    pretrained.read(model)

    def changed(module, inputs, output):
        first = output[0] if isinstance(output, tuple) else output
        moved = first * factor
        return (moved, *output[1:]) if isinstance(output, tuple) else moved

    model.get_submodule(name).register_forward_hook(changed)
    with pytest.raises(ValueError, match="the two differ by"):
        pretrained.read(model)


@pytest.mark.parametrize("case", list(REFUSED))
def test_a_configuration_that_is_not_read_is_refused_at_load(tmp_path, case):
    odd, message = REFUSED[case]
    folder = saved(tmp_path, case.partition(",")[0], odd)
    for verify in (True, False):
        with pytest.raises(ValueError, match=message):
            pretrained.load(folder, verify=verify)


def test_a_mask_that_is_asked_for_is_put_on_whatever_the_configuration_says(tmp_path):
    folder = saved(tmp_path, "bert", PLAIN | {"is_decoder": True})
    assert not pretrained.load(folder).causal
    source = pretrained.load(folder, causal=True)
    assert source.causal
    agrees(source, own_output(source.model))
    assert is_masked(source.model)


def test_a_head_with_tied_weights_is_left_out(tmp_path):
    model = built("llama", {"tie_word_embeddings": True}, head="ForCausalLM")
    model.save_pretrained(tmp_path)
    agrees(pretrained.load(tmp_path), own_output(model.model))
    agrees(pretrained.read(model), own_output(model.model))


class Adapter(torch.nn.Module):
    """An adapter whose `weight` is that of the layer which it changes, as peft's are."""

    def __init__(self, base):
        super().__init__()
        self.base, self.weight, self.bias = base, base.weight, base.bias
        generator = torch.Generator().manual_seed(3)
        out, inner = base.weight.shape
        self.a = torch.nn.Parameter(torch.randn(inner, 2, generator=generator).double())
        self.b = torch.nn.Parameter(torch.randn(2, out, generator=generator).double())

    def forward(self, x):
        return self.base(x) + x @ self.a @ self.b


def adapt(name):
    def change(model):
        parent, _, child = name.rpartition(".")
        place = model.get_submodule(parent)
        setattr(place, child, Adapter(getattr(place, child)))

    return change


def replace_forward(model):
    module = model.layers[0].self_attn.v_proj
    module.forward = lambda x: 2 * torch.nn.functional.linear(x, module.weight)


def widen_scores(model):
    model.layers[0].self_attn.scaling *= 1.0 + 1e-6


def hook(model):
    model.layers[1].self_attn.register_forward_hook(lambda m, i, out: (2 * out[0], *out[1:]))


def between_blocks(model):
    model.layers[1].register_forward_pre_hook(lambda m, args: (args[0] + 1.0, *args[1:]))


def replace_norm(model):
    model.norm = torch.nn.LayerNorm(24).double()


def replace_activation(model):
    model.layers[0].mlp.act_fn = torch.nn.Mish()


CHANGES = {
    "an adapter of queries": (adapt("layers.0.self_attn.q_proj"), "got Adapter.*merge"),
    "an adapter of the feed-forward layer": (adapt("layers.1.mlp.down_proj"), "got Adapter"),
    "a forward put into an object": (replace_forward, "got Linear, one whose forward was repl"),
    "a hook at attention": (hook, r"at block 1 \(LlamaDecoderLayer\) the two differ"),
    "a hook between blocks": (between_blocks, "differ"),
    "another last norm": (replace_norm, "what follows the last block"),
    "another activation": (replace_activation, "at block 0"),
}


@pytest.mark.parametrize("case", list(CHANGES))
def test_a_module_that_was_changed_is_refused(case):
    change, message = CHANGES[case]
    model = built("llama")
    change(model)
    with pytest.raises(ValueError, match=message):
        pretrained.read(model)


def test_verification_can_be_left_out_and_structure_is_looked_at_all_the_same():
    model = built("llama")
    replace_activation(model)
    assert pretrained.read(model, verify=False).n_layers == 2
    adapt("layers.0.self_attn.q_proj")(model)
    with pytest.raises(ValueError, match="got Adapter"):
        pretrained.read(model, verify=False)


def test_what_is_read_from_a_module_and_not_from_its_configuration_is_believed():
    model = built("llama")
    widen_scores(model)
    agrees(pretrained.read(model), own_output(model))


def test_a_parametrised_layer_computes_with_its_present_weights():
    model = built("llama")
    torch.nn.utils.parametrizations.spectral_norm(model.layers[0].self_attn.q_proj)
    model.eval()
    agrees(pretrained.read(model), own_output(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_model_of_another_dtype_is_read_with_its_own_weights(dtype):
    model = built("bert").to(dtype)
    source = pretrained.read(model.train())
    assert model.training  # left as it was
    expected = torch.float32 if dtype == torch.float32 else torch.float64
    assert source.block(0)(source.embeddings(IDS)).points.dtype == expected
    assert torch.equal(
        source.parameters(1).query.flatten(0, 1).double(),
        model.encoder.layer[1].attention.self.query.weight.double(),
    )


def test_weights_of_several_dtypes_are_refused_by_name():
    model = built("llama")
    model.norm.bfloat16()
    with pytest.raises(ValueError, match=r"float64 \(embed_tokens.*bfloat16 \(norm\.weight\)"):
        pretrained.read(model)


def test_a_checkpoint_is_read_in_its_own_precision_whatever_its_configuration_says(tmp_path):
    folder = saved(tmp_path, "bert", {"dtype": "bfloat16", "torch_dtype": "float16"})
    weight = built("bert").encoder.layer[0].attention.self.query.weight
    for verify in (True, False):
        query = pretrained.load(folder, verify=verify).parameters(0).query
        assert torch.equal(query.flatten(0, 1), weight)


@pytest.mark.parametrize(
    "outside", ["../model.safetensors", "/etc/hostname", "a/b.safetensors", ".."]
)
def test_an_index_that_points_outside_its_folder_is_refused(tmp_path, outside):
    folder = saved(tmp_path, "bert", {})
    index = {"metadata": {}, "weight_map": {"embeddings.LayerNorm.weight": outside}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="names of files beside it"):
        pretrained.load(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    with pytest.raises(ValueError, match="expected a weight_map"):
        pretrained.load(folder)


def test_an_adapter_beside_the_weights_is_refused(tmp_path):
    folder = saved(tmp_path, "bert", {})
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="merge it first"):
        pretrained.load(folder)


def test_shards_of_a_checkpoint_are_read(tmp_path):
    model = built("bert")
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    agrees(pretrained.load(tmp_path), own_output(model))


@pytest.mark.slow
def test_random_models_with_odd_configurations_are_right_or_refused():
    counts, wrong = campaign(200, seed=7)
    assert wrong == []
    assert sum(number for (_, ending), number in counts.items() if ending == "right") > 100
