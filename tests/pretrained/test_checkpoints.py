"""Incomplete checkpoints are refused, and weights have a fingerprint."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch

from meanfield import pretrained
from meanfield.sweeps import sweep

pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file

from tests.pretrained.small_models import small

_ONE = {"num_hidden_layers": 1, "hidden_size": 24, "vocab_size": 50}
KEY = "encoder.layer.1.attention.self.query.weight"
_ADAPTER = "bert.encoder.layer.0.output.adapter.down.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    small("bert").model.save_pretrained(folder)
    return folder


@pytest.fixture
def changed(whole, tmp_path):
    """A copy of the checkpoint whose weights and configuration are changed."""

    def make(weights=None, config=None):
        folder = tmp_path / "copy"
        shutil.copytree(whole, folder, dirs_exist_ok=True)
        file = folder / "model.safetensors"
        if weights is not None:
            save_file(weights(load_file(file)), file, metadata={"format": "pt"})
        if config is not None:
            settings = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(config(settings)))
        return folder

    return make


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        (lambda w: {k: v for k, v in w.items() if k != KEY}, f"lacks {KEY}$"),
        (
            lambda w: {"model." + k: v for k, v in w.items()},
            r"lacks embeddings.*does not know: model\.embeddings",
        ),
        (
            lambda w: w | {KEY: w[KEY][:, :-1].contiguous()},
            r"query\.weight \(24, 23\) for \(24, 24\)",
        ),
        (
            lambda w: w | {KEY.replace("weight", "lora_A"): torch.ones(2, 24)},
            r"left out: encoder\.layer\.1\.attention\.self\.query\.lora_A; .*adapter is merged",
        ),
        (
            lambda w: {f"bert.{k}": v for k, v in w.items()} | {_ADAPTER: torch.ones(2, 24)},
            f"left out: {_ADAPTER}",
        ),
        (
            lambda w: w | {"embeddings.LayerNorm.scale": torch.ones(24)},
            r"left out: embeddings\.LayerNorm\.scale",
        ),
        (lambda w: w | {KEY: w[KEY].to(torch.int8)}, rf"16 bits or more, got {KEY} \(I8\)"),
        (lambda w: w | {KEY: w[KEY].to(torch.float8_e4m3fn)}, rf"got {KEY} \(F8_E4M3\)"),
    ],
    ids=["missing", "misnamed", "another shape", "lora", "adapter", "norm", "int8", "fp8"],
)
def test_weights_that_are_not_the_models_are_refused_by_name(changed, weights, text):
    with pytest.raises(ValueError, match=text):
        pretrained.load(changed(weights))


@pytest.mark.parametrize("other", ["a.safetensors", "z.safetensors"])
def test_integers_are_refused_whatever_lies_beside_them(changed, whole, other):
    folder = changed(lambda w: w | {KEY: w[KEY].to(torch.int8)})
    shutil.copy(whole / "model.safetensors", folder / other)
    with pytest.raises(ValueError, match=rf"16 bits or more, got {KEY} \(I8\)"):
        pretrained.load(folder)


def test_a_truncated_file_is_refused(changed):
    folder = changed()
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="cannot be read"):
        pretrained.load(folder)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ("[" * 100_000, r"config\.json cannot be read"),
        ('{"model_type": "be', r"config\.json cannot be read"),
        ({"num_hidden_layers": 2}, r"configuration has, 2, but.*layer\.2"),
        *(({"model_type": kind}, "expected a model") for kind in ("opt", "t5", None)),
        ({"num_attention_heads": 0}, "cannot be read .ZeroDivisionError"),
        ({"pad_token_id": 60}, "cannot be read .AssertionError.*Padding_idx"),
        ({"vocab_size": 0}, "cannot be read .IndexError"),
        ({"num_hidden_layers": 10**9}, "got 1000000000 in config.json beside \\d+ arrays"),
        ({"num_hidden_layers": 0}, "expected 1 to .* layers.* got 0"),
        ({"num_hidden_layers": -1}, "expected 1 to .* layers.* got -1"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "of a quantization_config"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused_at_once(changed, config, text):
    if isinstance(config, str):
        folder = changed()
        (folder / "config.json").write_text(config)
    else:
        folder = changed(config=lambda settings: settings | config)
    with pytest.raises(ValueError, match=text):
        pretrained.load(folder)


def test_a_pipe_in_the_place_of_weights_is_refused(changed):
    folder = changed()
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(ValueError, match="expected a file, got a folder, a pipe or a device"):
        pretrained.load(folder)


def test_a_folder_without_weights_is_refused(changed):
    folder = changed()
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="safetensors"):
        pretrained.load(folder)


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "BertForSequenceClassification", "BertModel"])
def test_heads_that_are_not_the_models_are_left_out(tmp_path, kind):
    import transformers

    source = small("bert")
    model = getattr(transformers, kind)(source.model.config).double()
    body = model if kind == "BertModel" else model.bert
    body.load_state_dict(source.model.state_dict(), strict=False)
    model.save_pretrained(tmp_path)
    assert pretrained.load(tmp_path).fingerprint == source.fingerprint


@pytest.mark.parametrize("halves", [torch.float16, torch.bfloat16])
def test_arrays_that_a_model_makes_anew_are_left_out_and_halves_are_taken(changed, halves):
    made = {"embeddings.position_ids": torch.arange(512)[None]}
    made |= {"encoder.layer.0.attention.masked_bias": torch.tensor(-1e4)}
    source = pretrained.load(changed(lambda w: {k: v.to(halves) for k, v in w.items()} | made))
    assert source.dtype == torch.float64


def test_a_bias_that_the_configuration_has_forgotten_is_not_left_out(tmp_path):
    from transformers import LlamaConfig, LlamaModel

    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaModel(LlamaConfig(**sizes, attention_bias=True)).save_pretrained(tmp_path)
    assert pretrained.load(tmp_path).n_layers == 2
    file = tmp_path / "config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({k: v for k, v in settings.items() if k != "attention_bias"}))
    with pytest.raises(ValueError, match=r"left out: layers\.0\.self_attn\.k_proj\.bias"):
        pretrained.load(tmp_path)


def test_code_that_a_checkpoint_names_is_not_run_and_that_is_said(changed):
    named = {"AutoConfig": "own.Config", "AutoModel": "own.Model"}
    with pytest.warns(UserWarning, match=r"code of its own \(own\.Model\), which is not run"):
        pretrained.load(changed(config=lambda c: c | {"auto_map": named}))


def test_weights_of_a_compression_are_refused(changed):
    with pytest.raises(ValueError, match="got those of a compression_config"):
        pretrained.load(changed(config=lambda c: c | {"compression_config": {"format": "int"}}))


def test_layers_that_share_their_weights_may_be_many(tmp_path):
    from transformers import AlbertConfig, AlbertModel

    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    config = AlbertConfig(**sizes, embedding_size=8, vocab_size=50, num_hidden_layers=30)
    AlbertModel(config).save_pretrained(tmp_path)
    assert pretrained.load(tmp_path).n_layers == 30


def test_a_configuration_that_wants_tuples_is_run_all_the_same(changed):
    source = pretrained.load(changed(config=lambda c: c | {"return_dict": False}))
    assert source.embeddings([1, 2, 3]).n_particles == 3


def test_the_fingerprint_tells_models_apart_and_nothing_else(whole, changed):
    same = pretrained.load(whole).fingerprint
    assert len(same) == len("sha256 ") + 64
    assert pretrained.load(whole, causal=True).fingerprint != same
    assert (
        pretrained.load(changed(config=lambda c: c | {"layer_norm_eps": 0.5})).fingerprint != same
    )
    other = changed(lambda w: w | {KEY: 3 * w[KEY]})
    assert pretrained.load(other).fingerprint != same
    swapped = changed(
        lambda w: w | {KEY: w[KEY.replace("query", "key")], KEY.replace("query", "key"): w[KEY]}
    )
    assert pretrained.load(swapped).fingerprint != same
    drawn = pretrained.load("random:bert", config=_ONE, dtype=torch.float32)
    there = pretrained.load("random:bert", config=_ONE)
    assert drawn.fingerprint == there.fingerprint


def test_weights_that_were_trained_are_told_from_those_before(tmp_path):
    source = small("bert")
    before, store = source.fingerprint, tmp_path / "store"
    settings = {"fixed": {"source": source}, "store": store, "progress": False}
    sweep(_first_entry, {"row": [0, 1]}, **settings)
    source.model.embeddings.word_embeddings.weight.data[0] += 1.0  # no counter of torch sees this
    assert source.fingerprint != before
    with pytest.raises(ValueError, match="source"):
        sweep(_first_entry, {"row": [0, 1]}, **settings)


def _first_entry(source, row):
    return {"entry": float(source.model.embeddings.word_embeddings.weight[row, 0])}


@pytest.mark.parametrize(
    "extra",
    [
        {"v_head.norm.weight": torch.ones(2)},
        {"mtp.layers.0.query.weight": torch.ones(2)},
        {"head.encoder.weight": torch.ones(2)},
        {"embeddings.mask_token": torch.ones(1, 1, 24)},
        {"encoder.layer.0.attention.self.rotary_emb.cos_cached": torch.ones(2)},
        {"pooler.dense.weight": torch.ones(24, 24)},
        {"loss.class_weight": torch.ones(2).long()},
        {"myencoder.layer.0.weight": torch.ones(2)},
    ],
    ids=lambda extra: next(iter(extra)),
)
@pytest.mark.parametrize("head", [False, True])
def test_what_belongs_to_a_head_is_left_out(changed, extra, head):
    def with_it(w):
        return {f"bert.{k}" if head else k: v for k, v in w.items()} | extra

    assert pretrained.load(changed(with_it)).n_layers == 3


@pytest.mark.parametrize("name", ["final_norm.weight", "encoder.norm.weight"])
def test_a_norm_that_the_configuration_does_not_know_is_not_left_out(changed, name):
    def with_it(w):
        return {f"bert.{k}": v for k, v in w.items()} | {f"bert.{name}": torch.ones(24)}

    with pytest.raises(ValueError, match=f"left out: bert.{name}"):
        pretrained.load(changed(with_it))


def test_what_changes_no_result_changes_no_fingerprint(whole, changed):
    same = pretrained.load(whole).fingerprint
    harmless = {"id2label": {"0": "x"}, "problem_type": "regression", "output_attentions": True}
    harmless |= {"hidden_dropout_prob": 0.7, "transformers_version": "4.0", "use_cache": False}
    harmless |= {"return_dict": False, "dtype": "float16", "auto_map": None}
    harmless |= {"quantization_config": None, "tokenizer_class": "Other"}
    assert pretrained.load(changed(config=lambda c: c | harmless)).fingerprint == same
