"""What the experiments on transformers share: models, inputs, quantities beside the norm."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from meanfield import bounds, corpora, pretrained
from meanfield.attention import AttentionParameters
from meanfield.bounds.layer import Layer
from meanfield.checks import choice, to_host
from meanfield.experiments.settings import along, derived, setting
from meanfield.pretrained import Transformer

RANDOM_TEXT = "random"  # uniform token ids in place of a text
_RANDOM_LENGTH = 50_000


def with_random_weights(model: str) -> str:
    """A model of the same kind that needs no file."""
    if model.startswith("random:"):
        return model
    return "random:gpt2" if "gpt2" in Path(model).name else "random:bert"


@dataclass(frozen=True)
class OfText:
    """Settings that name a model and a text."""

    model: str = setting(
        "minilm", "model, as in `meanfield.pretrained.load`", quick=with_random_weights
    )
    text: str = setting(
        "alice", "'alice', a path, or 'random' for uniform token ids", quick="random"
    )
    n_windows: int = along("window", 10, "window of the text", quick=2)
    layers: tuple[int, ...] = setting((), "layers, from 0; all if there are none")
    n_tokens: int | tuple[int, ...] = setting(64, "length of the windows")
    seed: int = setting(0, "seed of random weights; 320 in the published scripts")
    depth: int = setting(
        0, "number of layers of a random model; 0 for the architecture's own", quick=2
    )
    width: int = setting(0, "width of a random model; 0 for the architecture's own")
    dtype: str = setting("float32", "'float32' or 'float64'")
    model_revision: str | None = derived(None, "fingerprint of the model and its tokenizer")
    text_sha256: str | None = derived(None, "SHA-256 of the text")

    def source(self, causal: bool | None = None) -> Transformer:
        """The model, masked or not; None: as the architecture has it.

        It is loaded once per process, and again when the files of its folder have changed.

        Raises:
            ValueError: it is not that of `model_revision`, if that is known: the model has
                changed, or is not drawn alike here.
        """
        how = (self.seed, self.dtype, self.depth, self.width, _files(self.model))
        usual = _loaded(self.model, None, *how)
        if self.model_revision not in (None, _revision(usual)):
            raise ValueError(
                f"{self.model}: expected the model of {self.model_revision}, got "
                f"{_revision(usual)}: it has changed"
            )
        return usual if causal in (None, usual.causal) else _loaded(self.model, causal, *how)

    def ids(self, source: Transformer, n_tokens: int) -> Tensor:
        """Token ids of the windows of the text, (window, n).

        Raises:
            ValueError: the text is not that of `text_sha256`, if that is known.
        """
        sha256 = text_hash(self.text)
        if self.text_sha256 not in (None, sha256):
            raise ValueError(f"{self.text}: expected SHA-256 {self.text_sha256}; it has changed")
        return corpora.windows(_tokens(source, self.text, sha256), n_tokens, self.n_windows)


_Settings = TypeVar("_Settings", bound=OfText)


def pinned(s: _Settings, **known: Any) -> _Settings:
    """Settings that name all layers, and tell the model and the text from others.

    Args:
        s: the settings.
        **known: what else has become known of them.

    Raises:
        ValueError: what would fail in every case: layers or lengths that the model does not have,
            too short a text.
    """
    source = s.source()
    layers = s.layers or tuple(range(source.n_layers))
    if unknown := [layer for layer in layers if layer not in range(source.n_layers)]:
        raise ValueError(f"layers: expected some of 0..{source.n_layers - 1}, got {unknown}")
    lengths, longest = np.ravel(s.n_tokens).tolist(), source.max_tokens
    if unfit := [n for n in lengths if not 1 <= n <= longest]:
        raise ValueError(f"n_tokens: expected lengths from 1 to {longest}, got {unfit}")
    if s.n_windows < 1:
        raise ValueError(f"n_windows: expected at least 1, got {s.n_windows}")
    s.ids(source, max(lengths))
    known |= {"model_revision": _revision(source), "text_sha256": text_hash(s.text)}
    return replace(s, layers=layers, **known)


@functools.lru_cache(maxsize=3)
def _loaded(
    model: str,
    causal: bool | None,
    seed: int,
    dtype: str,
    depth: int,
    width: int,
    files: tuple[Any, ...],  # other files are another model
) -> pretrained.Transformer:
    if (depth or width) and not model.startswith("random:"):
        raise ValueError(
            f"depth, width: expected 0 for the checkpoint {model!r}, got {depth} and {width}: "
            "only random models can be given other sizes, as --quick gives them; add "
            "--set depth=0 --set width=0"
        )
    sizes = {"num_hidden_layers": depth, "hidden_size": width}
    changes = {field: size for field, size in sizes.items() if size}
    kind = getattr(torch, choice(dtype, "dtype", ("float32", "float64")))
    return pretrained.load(model, causal=causal, seed=seed, config=changes or None, dtype=kind)


def _files(model: str) -> tuple[Any, ...]:
    """The files of a checkpoint in a folder, and when each was changed; of other models none."""
    folder = Path(model).expanduser()
    return tuple((file.name, file.stat().st_mtime_ns) for file in sorted(folder.glob("*")))


@functools.lru_cache(maxsize=3)
def _revision(source: Transformer) -> str:
    """Once for each model that `_loaded` returned: nobody else has it, so nobody trains it."""
    told = f"{source.fingerprint} {source.numbering}"
    return f"sha256 {hashlib.sha256(told.encode()).hexdigest()}"


@functools.lru_cache(maxsize=8)
def _tokens(source: Transformer, text: str, sha256: str) -> Tensor:
    """Of the text with this hash: the file at a path may become another text."""
    if text == RANDOM_TEXT:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(source.vocabulary, (_RANDOM_LENGTH,), generator=generator)
    return source.encode(corpora.corpus(text).text)


def text_hash(text: str) -> str:
    """SHA-256 of the file of a text; of random ids, their name."""
    return RANDOM_TEXT if text == RANDOM_TEXT else corpora.corpus(text).sha256


def short_name(place: str) -> str:
    """The name of a model or text, for titles: of a path its last part."""
    return Path(place).name if Path(place).expanduser().exists() else place


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


def labels(s: OfText) -> dict[str, Any]:
    """Attributes of a Dataset: the model, the text, and n if there is one only."""
    return {
        "model": short_name(s.model),
        "model_revision": s.model_revision,
        "text": short_name(s.text),
        "text_sha256": s.text_sha256,
        **({"n_tokens": s.n_tokens} if isinstance(s.n_tokens, int) else {}),
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
