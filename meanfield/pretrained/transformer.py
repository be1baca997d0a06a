"""A transformer read as maps of measures: its attention layers, blocks and the whole network."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.layers import Chain
from meanfield.maps import Map
from meanfield.measures import ParticleMeasure
from meanfield.pretrained.family import Family, Site
from meanfield.pretrained.model_files import quiet

__all__ = ["Transformer"]


@dataclass(frozen=True, eq=False, repr=False)
class Transformer:
    """A model in evaluation mode, read as attention layers, blocks and a network.

    All of them are maps of measures; the tokens are the uniform measure with token i of n at
    position i/n. Layers that use distances between positions (rotary positions, windows) need n:
    `needs_length` says so, and ``length=n`` gives it. They are then maps of measures on
    [0, 1] × R^d like any other, and do not change when atoms split.

    Attributes:
        name: as given to `meanfield.pretrained.load`.
        family: how models of its type are read.
        causal: whether the layers are masked.
        revision: commit of the checkpoint if it is known, or "seed …" of a random model.
        model: the `torch.nn.Module` of transformers.
        tokenizer: of the checkpoint, or None.
    """

    name: str
    family: Family
    causal: bool
    revision: str
    model: Any
    tokenizer: Any

    # --- what it is ---

    @property
    def architecture(self) -> str:
        """The type of the model, such as "bert", "gpt2" or "llama"."""
        return self.family.model_type

    @property
    def masks(self) -> tuple[bool, ...]:
        """The masks that such a model can have: plain (False), causal (True) or both."""
        return self.family.masks

    @property
    def needs_length(self) -> bool:
        """Whether layers have to know the number of tokens."""
        return self.family.needs_length

    @property
    def n_layers(self) -> int:
        """Number of blocks, each with one attention layer."""
        return int(self.model.config.num_hidden_layers)

    @property
    def n_heads(self) -> int:
        """H, of queries."""
        return int(self.model.config.num_attention_heads)

    @property
    def dim(self) -> int:
        """d, of the tokens."""
        return int(self.model.config.hidden_size)

    @property
    def max_tokens(self) -> int:
        """Longest sequence that the model has positions for."""
        return self.family.max_tokens(self.model.config)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return next(self.model.parameters()).dtype

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the weights and their names, as float64; computed once, at the first use."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(f"{name} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.detach().to("cpu", torch.float64).contiguous().numpy())
        return f"sha256 {digest.hexdigest()}"

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

    # --- its maps ---

    def parameters(self, layer: int) -> AttentionParameters:
        """Matrices and biases of an attention layer, output projection included.

        Args:
            layer: 0 is the first.

        Raises:
            IndexError: there is no such layer.
        """
        # They do not depend on the length.
        return self.attention(layer, length=1).parameters

    def attention(self, layer: int, *, length: int | None = None) -> SelfAttention:
        """The layer as a map of measures: Σ_h W^h f^h + b_O, without residual and norm.

        Args:
            layer: 0 is the first.
            length: number of tokens, see the class; only models that need it look at it.

        Raises:
            IndexError: there is no such layer.
            ValueError: no length where one is needed.
        """
        with torch.no_grad():
            return self.family.attention(self._site(layer, length))

    def block(self, layer: int, *, length: int | None = None) -> Map:
        """Attention and feed-forward layer with their residuals and norms.

        Args:
            layer: 0 is the first.
            length: as in `attention`.
        """
        with torch.no_grad():
            return self.family.block(self._site(layer, length))

    def network(
        self, first: int = 0, last: int | None = None, *, length: int | None = None
    ) -> Chain:
        """Blocks first, …, last − 1 one after another; all from `first` on if `last` is None.

        ``network()`` sends what `embeddings` returns to the model's ``last_hidden_state``. What
        follows the last block (a final norm) is part of it where the last block is.

        Args:
            first: the first block.
            last: where to stop.
            length: as in `attention`.

        Raises:
            IndexError: there are no such blocks.
        """
        stop = self.n_layers if last is None else last
        blocks = [self.block(layer, length=length) for layer in self._range(first, stop)]
        with torch.no_grad():
            ends = self.family.last(self.model) if stop == self.n_layers else ()
        return Chain([*blocks, *ends])

    # --- its inputs ---

    def embeddings(self, tokens: Any) -> ParticleMeasure:
        """The tokens as they enter the first block: a uniform measure with positions.

        There is no padding: every id is a token that the others see. For texts of several
        lengths call it on each and put the measures together by `meanfield.measures.stack`.

        Args:
            tokens: ids, shape (n,) or (batch, n).

        Raises:
            ValueError: see `attention_inputs`.
        """
        ids = self._checked_tokens(tokens)
        (points,) = self._inputs(list(self.family.blocks(self.model)), [0], ids)
        return ParticleMeasure.from_sequence(points)

    def attention_inputs(
        self,
        tokens: Any,
        *,
        layers: Sequence[int] | None = None,
        zero_token_types: bool = False,
    ) -> Tensor:
        """The token clouds X that enter the attention layers, by the model itself.

        If a norm precedes attention, X is its output. Models compute RMSNorm in float32
        whatever the dtype of their weights; the maps here do not.

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
        extra = {"token_type_ids": torch.zeros_like(ids)} if zero_token_types else {}
        modules = [self.family.attention_module(b) for b in self.family.blocks(self.model)]
        return torch.stack(self._inputs(modules, chosen, ids, **extra))

    def encode(self, text: str) -> Tensor:
        """Token ids of a text, without special tokens, int64.

        A model without a tokenizer (random weights) numbers the words in order of appearance,
        modulo its vocabulary.
        """
        if self.tokenizer is None:
            known: dict[str, int] = {}
            numbers = [known.setdefault(word, len(known)) for word in text.split()]
            return torch.tensor(numbers, dtype=torch.int64) % self.model.config.vocab_size
        with quiet():
            ids = self.tokenizer(text, add_special_tokens=False, return_attention_mask=False)
        return torch.tensor(ids["input_ids"], dtype=torch.int64)

    # --- inside ---

    def _site(self, layer: int, length: int | None) -> Site:
        self._check_layers([layer])
        module = self.family.blocks(self.model)[layer]
        return Site(self.model, module, layer, self.causal, length)

    def _range(self, first: int, stop: int) -> range:
        if not 0 <= first < stop <= self.n_layers:
            raise IndexError(
                f"expected blocks first < last among 0..{self.n_layers}, got {first} and {stop}"
            )
        return range(first, stop)

    def _inputs(
        self, modules: list[Any], places: list[int], ids: Tensor, **extra: Tensor
    ) -> list[Tensor]:
        """The hidden states that enter some of the modules in one run of the model."""
        batch = ids if ids.ndim == 2 else ids[None]
        extra = {name: t if t.ndim == 2 else t[None] for name, t in extra.items()}
        with torch.no_grad(), _recorded(modules) as seen:
            self.model(input_ids=batch, use_cache=False, **extra)
        # Layers may share a module; it is then called once for each.
        found = [seen[modules[i]][Counter(modules[:i])[modules[i]]] for i in places]
        return found if ids.ndim == 2 else [cloud[0] for cloud in found]

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


@contextmanager
def _recorded(modules: Sequence[Any]) -> Iterator[dict[Any, list[Tensor]]]:
    """The hidden states that enter the modules, call by call, while the context lasts."""
    seen: dict[Any, list[Tensor]] = {module: [] for module in modules}

    def record(module: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        seen[module].append(positional[0] if positional else named["hidden_states"])

    hooks = [module.register_forward_pre_hook(record, with_kwargs=True) for module in seen]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
