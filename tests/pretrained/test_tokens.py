"""Tokens as people have them: texts, ids, what tokenizers return, texts of several lengths."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from meanfield import ParticleMeasure, pretrained
from meanfield.measures import split
from meanfield.pretrained.token_ids import WORDS, numbering_of
from meanfield.pretrained.verification import InFloat64
from meanfield.sweeps import sweep

pytest.importorskip("transformers")
from transformers import BatchEncoding, BertTokenizer

from tests.pretrained.small_models import small

IDS = torch.arange(3, 10)
_WORDS = ["a", "cloud", "of", "tokens", "is", "measure"]


@pytest.fixture(scope="module")
def sources():
    return {name: small(name) for name in ("bert", "gpt2", "llama", "qwen2, windows")}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("words") / "vocab.txt"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_WORDS]
    path.write_text("\n".join(words))
    return BertTokenizer(str(path))


def same(mu, nu):
    assert torch.equal(mu.points, nu.points)
    assert torch.equal(mu.positions, nu.positions)
    assert torch.equal(mu.log_weights, nu.log_weights)


def _sums(source, text):
    return {"sum": float(source.embeddings(text).points.sum())}


def test_stores_tell_models_with_other_tokenizers_apart(tokenizer, tmp_path):
    words = tmp_path / "vocab.txt"
    words.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_WORDS[::-1]]))
    model = small("bert").model
    tokenizers = [tokenizer, BertTokenizer(str(words)), "words"]
    first, *others = (pretrained.read(model, tokenizer=each) for each in tokenizers)
    settings = {"store": tmp_path / "store", "progress": False}
    ds = sweep(_sums, {"text": ["a cloud"]}, fixed={"source": first}, **settings)
    tokenizer.save_pretrained(tmp_path / "saved")
    again = pretrained.read(model, tokenizer=BertTokenizer.from_pretrained(tmp_path / "saved"))
    assert sweep(_sums, {"text": ["a cloud"]}, fixed={"source": again}, **settings).equals(ds)
    for other in others:
        with pytest.raises(ValueError, match=r"another configuration \(fixed\.source"):
            sweep(_sums, {"text": ["a cloud"]}, fixed={"source": other}, **settings)


def test_what_is_no_tokenizer_is_refused():
    for given in (5, "bert-base"):
        with pytest.raises(TypeError, match="tokenizer: expected a tokenizer"):
            pretrained.read(small("bert").model, tokenizer=given)


@pytest.mark.parametrize("kinds", [[0, 0, 2], [-1, 0, 0]])
def test_token_types_that_a_model_does_not_have_are_refused(sources, kinds):
    with pytest.raises(ValueError, match=r"token_type_ids: expected numbers in 0\.\.1, got"):
        sources["bert"].embeddings({"input_ids": [1, 2, 3], "token_type_ids": kinds})


@pytest.mark.parametrize(
    "given",
    [
        IDS.tolist(),
        tuple(IDS.tolist()),
        IDS.numpy(),
        IDS.to(torch.uint8),
        IDS.int(),
        {"input_ids": IDS},
        BatchEncoding({"input_ids": IDS.tolist(), "attention_mask": [1] * 7}),
    ],
    ids=lambda given: type(given).__name__,
)
def test_ids_are_taken_in_any_form(sources, given):
    source = sources["llama"]
    same(source.embeddings(given), source.embeddings(IDS))
    assert torch.equal(source.attention_inputs(given), source.attention_inputs(IDS))


def test_a_text_is_its_ids_and_a_list_of_texts_is_a_batch(sources, tokenizer):
    bert = sources["bert"]
    source = pretrained.read(bert.model, tokenizer=tokenizer)
    text, other = "a cloud of tokens", "a measure is a cloud"
    same(source.embeddings(text), source.embeddings(source.encode(text)))
    assert source.encode(text).tolist() == [5, 6, 7, 8]
    whole = source.embeddings([text, text])
    assert whole.batch_shape == (2,)
    same(whole[1], source.embeddings(text))
    padded = source.embeddings([text, other])
    assert padded.points.shape == (2, 5, 24)
    assert padded.log_weights[0].tolist()[-1] == -math.inf


def texts():
    return [torch.arange(3, 3 + n) for n in (4, 7, 5)]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["bert", "llama", "qwen2, windows", "gpt2"])
def test_texts_of_several_lengths_are_each_what_the_model_makes_of_them_alone(sources, name, side):
    source = sources[name]
    before = [(7 - len(ids) if side == "left" else 0) for ids in texts()]
    ids, mask = torch.zeros(2, 3, 7, dtype=torch.int64)
    for row, (text, start) in enumerate(zip(texts(), before, strict=True)):
        ids[row, start : start + len(text)] = text
        mask[row, start : start + len(text)] = 1
    encoded = BatchEncoding({"input_ids": ids, "attention_mask": mask})
    mu = source.embeddings(encoded)
    same(mu, source.embeddings(texts()))
    found = source.network(length=7)(mu).points
    for row, text in enumerate(texts()):
        with torch.no_grad(), InFloat64():
            alone = source.model(input_ids=text[None], use_cache=False).last_hidden_state[0]
        assert float((found[row, : len(text)] - alone).abs().max()) <= 1e-12 * alone.abs().max()


def test_texts_of_two_threads_are_each_those_of_one(sources):
    """Both runs of the model begin when both threads listen to it."""
    source, met = sources["bert"], threading.Barrier(2, timeout=60)
    given = IDS, IDS + 9
    alone = [source.attention_inputs(ids) for ids in given]

    def wait(*arguments):
        met.wait()

    hook = source.model.register_forward_pre_hook(wait)
    with ThreadPoolExecutor(2) as executor:
        found = list(executor.map(source.attention_inputs, given))
    hook.remove()
    assert all(map(torch.equal, found, alone))


def test_token_types_reach_the_model(sources):
    source = sources["bert"]
    types = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    mu = source.embeddings(BatchEncoding({"input_ids": IDS, "token_type_ids": types}))
    with torch.no_grad(), InFloat64():
        run = source.model(input_ids=IDS[None], token_type_ids=types[None])
    assert torch.allclose(source.network()(mu).points, run.last_hidden_state[0], atol=1e-12)
    assert not torch.allclose(mu.points, source.embeddings(IDS).points)


def test_a_short_text_in_a_long_sequence_stands_at_its_own_places(sources):
    source = sources["llama"]
    mu = source.embeddings(IDS, length=20)
    assert torch.allclose(mu.positions, torch.arange(1, 8).double() / 20, atol=1e-15)
    there = source.network(length=20)(mu).points
    assert torch.allclose(there, source.network(length=7)(source.embeddings(IDS)).points)
    with pytest.raises(ValueError, match="at least 7"):
        source.embeddings(IDS, length=6)


@pytest.mark.parametrize("length", [8, 64, 33, 31])
def test_a_length_that_is_not_that_of_the_positions_is_refused(sources, length):
    source = sources["llama"]
    mu = ParticleMeasure.from_sequence(torch.zeros(32, 24, dtype=torch.float64))
    for F in (source.attention(0, length=length), source.network(length=length)):
        with pytest.raises(ValueError, match="length: expected positions"):
            F(mu)


def test_many_places_in_single_precision_are_whole(sources):
    """From 33,334 tokens on i/n times n is off by a thousandth in float32."""
    mu = ParticleMeasure.from_sequence(torch.zeros(100_000, 1))
    sources["llama"].attention(0, length=100_000).kernel.check(mu)
    with pytest.raises(ValueError, match="off by"):
        sources["llama"].attention(0, length=99_999).kernel.check(mu)


def test_places_that_are_taken_apart_or_given_up_stay_places(sources):
    source = sources["qwen2, windows"]
    F = source.network(length=7)
    mu = source.embeddings(IDS)
    expected = F(mu).points
    assert torch.allclose(F(split(mu)).points[::2], expected, atol=1e-12)
    # Every second token is lost: those that are left keep their places.
    logs = mu.log_weights.clone()
    logs[::2] = -math.inf
    light = ParticleMeasure(mu.points, log_weights=logs.log_softmax(-1), positions=mu.positions)
    kept = ParticleMeasure(mu.points[1::2], positions=mu.positions[1::2])
    lost = F(light).points[1::2]
    with pytest.raises(ValueError, match=r"multiples of 2/7"):
        F(kept)
    fine = ParticleMeasure(
        torch.cat([mu.points[1::2], mu.points[:1]]),
        weights=[1 / 3, 1 / 3, 1 / 3, 0.0],
        positions=torch.cat([mu.positions[1::2], mu.positions[:1]]),
    )
    assert torch.allclose(F(fine).points[:3], lost, atol=1e-12)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (None, TypeError, "what a tokenizer returns"),
        ([[3, 4], "a"], TypeError, "what a tokenizer returns"),
        ([["a"]], TypeError, "what a tokenizer returns"),
        ({"input_ids": [3], "pixel_values": [0]}, ValueError, "answer with.*got.*pixel_values"),
        ({"attention_mask": [1]}, ValueError, "got attention_mask"),
        ({}, ValueError, "got nothing"),
        ({"input_ids": [3, 4], "attention_mask": [1]}, ValueError, "one shape"),
        ({"input_ids": [3, 4, 5], "attention_mask": [1, 0, 1]}, ValueError, "one after another"),
        ({"input_ids": [3, 4], "attention_mask": [0, 0]}, ValueError, "one after another"),
        ({"input_ids": [3, 4], "attention_mask": [2, 2]}, ValueError, "one after another"),
        ("", ValueError, "at least one token"),
        (["a", ""], ValueError, "at least one token"),
        ([True, False], ValueError, "truth values"),
        ([[3, 4], [3, 4, 50]], ValueError, r"0\.\.49"),
        (np.zeros((2, 2, 2), int), ValueError, "shape"),
    ],
)
def test_what_is_no_text_is_refused_with_what_one_is(sources, given, error, message):
    with pytest.raises(error, match=message):
        sources["bert"].embeddings(given)


def test_one_tensor_holds_texts_of_one_length(sources):
    with pytest.raises(ValueError, match="one length"):
        sources["bert"].attention_inputs(texts())
    with pytest.raises(TypeError, match="call encode on each"):
        sources["bert"].encode(["a", "b"])


def test_the_numbering_is_that_of_words_and_rules_and_not_of_the_last_call(tokenizer, tmp_path):
    first = numbering_of(tokenizer)
    tokenizer(["a cloud", "of"], padding=True, truncation=True, max_length=1)
    assert numbering_of(tokenizer) == first
    cased = BertTokenizer(vocab=dict(tokenizer.get_vocab()), do_lower_case=False)
    assert numbering_of(cased) != first
    assert numbering_of(None) is None and numbering_of(WORDS) == "words"
    assert numbering_of(str.split) == numbering_of(str.upper) != first  # by their type alone


@pytest.mark.parametrize("kinds", [[0, 3, 1], [49, 2, 0]])
def test_token_types_of_a_model_without_them_are_words(sources, kinds):
    given = {"input_ids": [1, 2, 3], "token_type_ids": kinds}
    assert sources["gpt2"].embeddings(given).n_particles == 3
