"""What the experiments on transformers share: models, inputs, quantities beside the norm."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meanfield import bounds, corpora, pretrained
from meanfield.attention import AttentionParameters
from meanfield.bounds.layer import Layer
from meanfield.checks import to_host
from meanfield.experiments.settings import derived, setting
from meanfield.pretrained import Transformer

RANDOM_TEXT = "random"  # uniform token ids in place of a text
_RANDOM_LENGTH = 50_000


def with_random_weights(model: str) -> str:
    """A model of the same kind that needs no file."""
    if model.startswith("random:"):
        return model
    return "random:gpt2" if "gpt2" in Path(model).name else "random:bert"


@dataclass(frozen=True)
class OfModel:
    """Settings that name a model."""

    model: str = setting(
        "random:gpt2", "model, as in `meanfield.pretrained.load`", quick=with_random_weights
    )
    seed: int = setting(320, "seed of random weights; 320 in the published scripts")
    depth: int = setting(
        0, "number of layers of a random model; 0 for the architecture's own", quick=2
    )
    dtype: str = setting("float64", "'float32' or 'float64'")
    model_revision: str | None = derived(None, "fingerprint of the weights")

    def source(self, causal: bool | None = None) -> Transformer:
        """The model; the weights are those of `model_revision`, if it is known."""
        how: Any = {"seed": self.seed, "dtype": self.dtype, "depth": self.depth}
        return transformer(self.model, causal, revision=self.model_revision, **how)


@dataclass(frozen=True)
class OfText(OfModel):
    """Settings that name a model and a text."""

    model: str = setting(
        "minilm", "model, as in `meanfield.pretrained.load`", quick=with_random_weights
    )
    text: str = setting(
        "alice", "'alice', a path, or 'random' for uniform token ids", quick="random"
    )
    n_windows: int = setting(10, "windows of the text", quick=2)
    dtype: str = setting("float32", "'float32' or 'float64'")
    seed: int = setting(0, "seed of random weights")
    text_sha256: str | None = derived(None, "SHA-256 of the text")


@functools.lru_cache(maxsize=3)
def _loaded(
    model: str, causal: bool | None, seed: int, dtype: str, depth: int
) -> pretrained.Transformer:
    if depth and not model.startswith("random:"):
        raise ValueError(
            f"depth: expected 0 for the checkpoint {model!r}, got {depth}: only random models can "
            "be given another number of layers, as --quick gives them; add --set depth=0"
        )
    field = "n_layer" if model == "random:gpt2" else "num_hidden_layers"
    return pretrained.load(
        model,
        causal=causal,
        seed=seed,
        config={field: depth} if depth else None,
        dtype=getattr(torch, dtype),
    )


def transformer(
    model: str,
    causal: bool | None = None,
    *,
    seed: int = 0,
    dtype: str = "float64",
    depth: int = 0,
    revision: str | None = None,
) -> Transformer:
    """The model, loaded once per process.

    Args:
        model: as in `meanfield.pretrained.load`.
        causal: masked or not; None: as the architecture has it.
        seed: of random weights.
        dtype: "float32" or "float64".
        depth: number of layers of a random model; 0 for the architecture's own.
        revision: the fingerprint that its weights have to have, if it is known.

    Raises:
        ValueError: they have another: the model has changed, or is not drawn alike here.
    """
    usual = _loaded(model, None, seed, dtype, depth)
    if revision is not None and usual.fingerprint != revision:
        raise ValueError(
            f"{model}: expected weights of {revision}, got {usual.fingerprint}: it has changed"
        )
    if causal is None or causal == usual.causal:
        return usual
    return _loaded(model, causal, seed, dtype, depth)


def check_fit(
    source: Transformer,
    *,
    layers: Sequence[int],
    n_tokens: Sequence[int],
    text: str = RANDOM_TEXT,
    n_windows: int = 1,
) -> None:
    """Raise before the first case what would fail in every case.

    Raises:
        ValueError: layers or lengths that the model does not have, too short a text.
    """
    if unknown := [layer for layer in layers if not 0 <= layer < source.n_layers]:
        raise ValueError(f"layers: expected some of 0..{source.n_layers - 1}, got {unknown}")
    longest = source.max_tokens
    if unfit := [n for n in n_tokens if not 1 <= n <= longest]:
        raise ValueError(f"n_tokens: expected lengths from 1 to {longest}, got {unfit}")
    if n_windows < 1:
        raise ValueError(f"n_windows: expected at least 1, got {n_windows}")
    corpora.windows(_tokens(source, text), max(n_tokens), n_windows)


@functools.lru_cache(maxsize=8)
def _tokens(source: Transformer, text: str) -> Tensor:
    if text == RANDOM_TEXT:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(source.vocabulary, (_RANDOM_LENGTH,), generator=generator)
    return source.encode(corpora.corpus(text).text)


def clouds(
    source: Transformer, text: str, n_tokens: int, n_windows: int, *, layers: Sequence[int]
) -> Tensor:
    """Token clouds that enter the layers, one run of the model per length; (layer, window, n, d).

    A prefix of a longer run would not do: in a plain model its tokens have seen the rest.
    """
    ids = window_ids(source, text, n_tokens, n_windows)
    return source.attention_inputs(ids, layers=list(layers))


def window_ids(source: Transformer, text: str, n_tokens: int, n_windows: int) -> Tensor:
    """Token ids of windows of a text, (window, n)."""
    return corpora.windows(_tokens(source, text), n_tokens, n_windows)


def text_hash(text: str) -> str:
    """SHA-256 of the file of a text; of random ids, their name."""
    return RANDOM_TEXT if text == RANDOM_TEXT else corpora.corpus(text).sha256


def check_text(text: str, text_sha256: str | None) -> None:
    """Refuse a text that is not the one a sweep began with."""
    if text_hash(text) != text_sha256:
        raise ValueError(f"{text}: expected SHA-256 {text_sha256}; the text has changed")


def short_name(place: str) -> str:
    """The name of a model or text, for titles: of a path its last part."""
    return Path(place).name if Path(place).expanduser().exists() else place


def masks_of(source: Transformer, masks: Sequence[bool]) -> list[bool]:
    """The masks wanted that the model can have; its own if it has none of them."""
    wanted = [bool(mask) for mask in masks]
    return [mask for mask in wanted if mask in source.masks] or [source.causal]


def bilinear(source: Transformer) -> Transformer:
    """The same model.

    Raises:
        ValueError: its scores are not ⟨Ax, y⟩, but depend on positions too.
    """
    if source.needs_length:
        raise ValueError(
            f"model: expected one with scores ⟨Ax, y⟩ (BERT, GPT-2 and their like), got "
            f"{source.architecture}, whose queries and keys are turned by position"
        )
    return source


def layers_of(settings: Any) -> tuple[int, ...]:
    """The layers that an experiment's settings name; all if they name none."""
    return settings.layers or tuple(range(settings.source().n_layers))


def pinned(s: Any, *, layers: Sequence[int], n_tokens: Sequence[int], **known: Any) -> Any:
    """Settings with what tells the model and the text from others, after `check_fit`.

    And with what else has become known of them.
    """
    text: dict[str, Any] = {}
    if isinstance(s, OfText):
        text = {"text": s.text, "n_windows": s.n_windows}
        known["text_sha256"] = text_hash(s.text)
    source = s.source()
    check_fit(source, layers=layers, n_tokens=n_tokens, **text)
    return replace(s, model_revision=source.fingerprint, **known)


def labels(settings: Any) -> dict[str, Any]:
    """Attributes of a Dataset: the model, the text, and n if there is one only."""
    length = {"n_tokens": settings.n_tokens} if isinstance(settings.n_tokens, int) else {}
    return {
        "model": short_name(settings.model),
        "model_revision": settings.source().fingerprint,
        "text": short_name(settings.text),
        "text_sha256": text_hash(settings.text),
        **length,
    }


def token_radii(points: Tensor) -> tuple[Tensor, Tensor]:
    """Root mean square and maximum of the token norms, each of the batch shape."""
    norms = torch.linalg.vector_norm(points, dim=-1)
    return norms.square().mean(-1).sqrt(), norms.amax(-1)


def head_spectra(parameters: AttentionParameters) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """γ_h, ‖A_h‖ and ‖W_h V_h‖ of every head.

    A = scale · KᵀQ has the non-zero eigenvalues of the k × k matrix scale · QKᵀ.
    """
    small = parameters.scale[:, None, None] * (parameters.query @ parameters.key.mT)
    gammas = np.array([bounds.scaling_factor(to_host(matrix)) for matrix in small])
    layer = Layer.of(parameters)
    return gammas, layer.norm_A, layer.norm_V
