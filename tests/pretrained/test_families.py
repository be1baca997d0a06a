"""Every family of models against the modules of transformers, in values and in derivatives."""

from __future__ import annotations

import json
import pickle
from copy import deepcopy

import pytest
import torch

from meanfield import ParticleMeasure, pretrained
from meanfield.maps import linearize
from meanfield.measures import split, stack
from meanfield.pretrained.registry import FAMILIES, family_of
from meanfield.pretrained.verification import InFloat64

pytest.importorskip("transformers")
from tests.pretrained.small_models import CASES, EXPERTS, Run, small

N = 9


def tokens(*shape, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 50, shape, generator=generator)


@pytest.fixture(scope="module")
def models():
    return {}


@pytest.fixture
def source(models, request):
    case = request.param
    if case not in models:
        models[case] = small(case)
    return models[case]


every_case = pytest.mark.parametrize("source", list(CASES), indirect=True)


def close(found, expected, accuracy=1e-12):
    return float((found - expected).abs().max()) <= accuracy * float(expected.abs().max())


@every_case
def test_attention_blocks_and_network_are_those_of_the_model(source):
    ids = tokens(2, N)
    run = Run(source, ids)
    with InFloat64():
        clouds = source.attention_inputs(ids)
        mu = source.embeddings(ids)
    assert len(run.attention) == len(run.blocks) == source.n_layers == 3
    for layer in range(3):
        attention = source.attention(layer, length=N)
        moved = attention(ParticleMeasure.from_sequence(clouds[layer])).points
        assert close(moved, run.attention[layer][1])
        assert attention.causal == source.causal
        entered, left = run.blocks[layer]
        block = source.block(layer, length=N)
        assert close(block(ParticleMeasure.from_sequence(entered)).points, left)
    assert close(mu.points, run.blocks[0][0])
    assert close(source.network(length=N)(mu).points, run.last)


@pytest.mark.parametrize("source", list(EXPERTS), indirect=True)
def test_attention_is_read_of_mixtures_of_experts_and_their_blocks_are_not(source):
    ids = tokens(2, N)
    run = Run(source, ids)
    with InFloat64():
        clouds = source.attention_inputs(ids)
    for layer in range(3):
        mu = ParticleMeasure.from_sequence(clouds[layer])
        F = source.attention(layer, length=N)
        assert close(F(mu).points, run.attention[layer][1], 1e-12)
        dense = linearize(F, ParticleMeasure.from_sequence(clouds[layer][0])).atoms.to_dense()
        x = clouds[layer][0]
        by_torch = torch.func.jacrev(lambda x, F=F: F(ParticleMeasure.from_sequence(x)).points)(x)
        assert close(dense, by_torch.reshape(dense.shape), 1e-9)
    ds = source.constants(ids[0, :4], layers=[1])
    assert float(ds.attention_bound[0]) >= float(ds.attention[0]) > 0
    assert "block" not in ds
    with pytest.raises(ValueError, match="choose experts"):
        source.block(0, length=N)


def test_experts_that_have_no_double_precision_say_what_to_do():
    model = small("mixtral").model
    source = pretrained.read(model)
    expected = source.attention_inputs(tokens(N))
    model.set_experts_implementation("grouped_mm")
    with pytest.raises(ValueError, match=r"model\.set_experts_implementation\('eager'\)"):
        source.attention_inputs(tokens(N))
    model.set_experts_implementation("eager")
    assert torch.equal(source.attention_inputs(tokens(N)), expected)


def test_beside_a_sink_every_token_counts_as_much():
    source = small("gpt_oss")
    F, X = source.attention(0, length=4), torch.randn(4, source.dim, dtype=torch.float64)
    even = ParticleMeasure.from_sequence(X)
    halves, moved = split(even), even.replace(X + 1e-3)
    assert close(F(halves).points[::2], F(even).points, 1e-12) and F(moved).points.isfinite().all()
    for place, weights in (
        (2, [0.3, 0.0, 0.3, 0.4]),
        (3, [0.25, 0.25, 0.26, 0.24]),
        (1, [0.2, 0.26, 0.27, 0.27]),
        (4, [0.28, 0.27, 0.27, 0.18]),
    ):
        uneven = ParticleMeasure(X, weights=weights, positions=even.positions)
        with pytest.raises(ValueError, match=rf"of equal weight, since .* at i = {place};"):
            F(uneven)
        batch = stack([even, uneven])
        with pytest.raises(ValueError, match="of equal weight"):
            F(batch)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_cross_attention_is_not_left_out(name):
    import transformers

    family, small_config = FAMILIES[name], small(name).model.config.to_dict()
    config = getattr(transformers, f"{family.stem}Config")(**small_config)
    config.is_decoder = config.add_cross_attention = True
    with pytest.raises(ValueError, match="without cross-attention"):
        pretrained.read(getattr(transformers, f"{family.stem}Model")(config).double())


def test_beside_a_sink_tokens_count_so_that_the_length_is_that_of_the_text():
    source = small("gpt_oss")
    for given in ({"tokens": tokens(4), "length": 9}, {"tokens": [tokens(4), tokens(3)]}):
        with pytest.raises(ValueError, match="has a sink"):
            source.constants(**given, layers=[0], bounds=False)
    places = torch.arange(1, 5).double() / 4
    weights = torch.tensor([1.0, 1.0, 1.0, 0.0]).double() / 3
    lost = ParticleMeasure(torch.ones(4, source.dim).double(), weights, positions=places)
    with pytest.raises(ValueError, match="has a sink"):
        source.attention(0, length=4)(lost)


def module_map(source, block=None):
    """Points ↦ points by the modules of transformers: one block, or all with the last norm."""
    model = source.model

    def network(x):
        kept = {}

        def replace(module, positional, named):
            if kept:
                return None
            kept["done"] = True
            if positional:
                return (x[None], *positional[1:]), named
            return positional, named | {"hidden_states": x[None]}

        blocks = list(source.family.blocks(model))
        seen = {}

        def keep(module, positional, out):
            seen.setdefault("out", out[0] if isinstance(out, tuple) else out)

        hooks = [blocks[0].register_forward_pre_hook(replace, with_kwargs=True)]
        if block is not None:
            hooks.append(blocks[0].register_forward_hook(keep))
        last = model(input_ids=tokens(1, len(x)), use_cache=False).last_hidden_state
        for hook in hooks:
            hook.remove()
        return (last if block is None else seen["out"])[0]

    return network


# The kernels and layers of the other cases have derivatives of their own, each held to
# automatic differentiation.
@pytest.mark.parametrize(
    "source",
    [
        pytest.param(case, marks=[pytest.mark.slow] if "," in case else [], id=case)
        for case in CASES
    ],
    indirect=True,
)
def test_derivatives_are_those_of_the_model_by_automatic_differentiation(source):
    n = 4
    with InFloat64():
        mu = source.embeddings(tokens(n))
        F, module = source.network(length=n), module_map(source)
        x = mu.points.clone().requires_grad_()
        dense = torch.autograd.functional.jacobian(module, x)
        dense = dense.reshape(n * source.dim, -1)
        assert close(linearize(F, mu).atoms.to_dense(), dense, 1e-8)


@pytest.mark.parametrize(
    "source",
    [
        "bert",
        "gpt2, scaled by depth",
        "gpt_neox",
        "qwen3",
        "gemma",
        "gemma2",
        "olmo2, biased",
        "phi3",
    ],
    indirect=True,
)
def test_weights_in_half_precision_are_read_without_rounding_them_again(source):
    half = deepcopy(source.model).bfloat16()
    exact, read = (
        pretrained.read(model, causal=source.causal, verify=False)
        for model in (deepcopy(half).double(), half)
    )
    mu = exact.embeddings(tokens(N))
    expected = exact.network(length=N)(mu).points
    assert close(read.network(length=N)(mu).points, expected, 1e-14)


@pytest.mark.parametrize("source", ["bert", "gpt_neox", "gemma2"], indirect=True)
def test_without_its_casts_to_float32_the_model_is_off_by_their_rounding_only(source):
    ids = tokens(N)
    with torch.no_grad():
        plain = source.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
    ours = source.network(length=N)(source.embeddings(ids)).points
    assert close(ours, plain, 1e-4)


@pytest.mark.parametrize("name", ["gpt_neox", "llama", "mistral", "qwen2", "qwen3", "gemma2"])
def test_a_layer_that_looks_at_distances_has_to_know_the_length(name):
    source = small(name)
    assert source.needs_length
    for layer in (source.attention, source.block):
        with pytest.raises(ValueError, match="length=n"):
            layer(0)
    with pytest.raises(ValueError, match="length=n"):
        source.network()
    with pytest.raises(ValueError, match="≥ 1"):
        source.attention(0, length=0)
    assert source.parameters(0).dim == source.dim


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_rotary_positions_that_are_scaled_in_another_way_are_refused(rope):
    parameters = {"rope_type": rope, "rope_theta": 100.0, "factor": 4.0}
    parameters |= {"original_max_position_embeddings": 16}
    if rope == "longrope":
        parameters |= {"short_factor": [1.0] * 3, "long_factor": [2.0] * 3}
    config = CASES["llama"][1] | {"rope_parameters": parameters}
    with pytest.raises(ValueError, match=f"rope_type='{rope}'"):
        pretrained.load("random:llama", config=config)


@pytest.mark.parametrize(("kind", "inside"), [("gemma3", "language_model"), ("t5", "Attention")])
def test_types_that_are_not_read_are_refused_with_what_can_be(kind, inside):
    with pytest.raises(ValueError, match=f"got '{kind}'.*{inside}"):
        family_of(kind, "model")


def test_a_block_that_is_not_there_is_refused():
    with pytest.raises(IndexError, match=r"0\.\.2"):
        small("bert").block(3)


def test_roberta_has_fewer_places_than_positions():
    source = small("roberta")
    assert source.max_tokens == 31
    source.embeddings(tokens(31))
    with pytest.raises(ValueError, match="at most 31"):
        source.embeddings(tokens(32))


def test_the_place_of_padding_is_part_of_a_fingerprint_where_positions_begin_behind_it(tmp_path):
    source = small("roberta")
    source.model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"pad_token_id": 5, "eos_token_id": 7}))
    assert pretrained.load(tmp_path).fingerprint != source.fingerprint
    file.write_text(json.dumps(config | {"eos_token_id": 7}))
    assert pretrained.load(tmp_path).fingerprint == source.fingerprint


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].random_config])
def test_random_models_of_large_kinds_are_small_and_have_no_word_at_the_origin(name):
    """The embedding of padding is the origin, where an RMSNorm stretches by 1/√ε."""
    source = pretrained.load(f"random:{name}", dtype=torch.float32, verify=False)
    assert sum(part.numel() for part in source.model.parameters()) < 2e7
    if name != "vit":
        lengths = source.embeddings("to be or not").points.norm(dim=-1)
        assert float(lengths.min()) > 0.5 * float(lengths.max())


@pytest.mark.parametrize("name", ["distilbert", "albert", "llama", "gpt_neox"])
def test_masks_that_a_family_does_not_have_are_refused(name):
    source = small(name)
    with pytest.raises(ValueError, match="masked"):
        pretrained.load(f"random:{name}", causal=not source.causal, config=CASES[name][1])


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"vit"} - set(EXPERTS)))
def test_every_family_has_a_case_and_a_saved_checkpoint_of_it_loads_as_it_was(tmp_path, name):
    source = small(next(case for case, (kind, _) in CASES.items() if kind == name))
    source.model.save_pretrained(tmp_path)
    loaded = pretrained.load(tmp_path)
    assert loaded.architecture == name
    assert loaded.fingerprint == source.fingerprint
    mu = source.embeddings(tokens(N))
    expected = source.network(length=N)(mu).points
    for one in (loaded, pickle.loads(pickle.dumps(loaded)), deepcopy(loaded)):
        # Not to the last bit: how sums are ordered depends on where the weights lie in memory.
        assert close(one.network(length=N)(mu).points, expected, 1e-13)
    assert loaded.causal == source.causal and loaded.tokenizer is None
