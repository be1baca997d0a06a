"""A transformer read as maps of measures: its attention layers, blocks and the whole network."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.checks import as_bool, check_finite, count, to_host, without_autocast
from meanfield.habits import Hinted, with_hints
from meanfield.layers import Chain
from meanfield.maps import Map
from meanfield.measures import ParticleMeasure, stack
from meanfield.pretrained.constants import Place, constants_of
from meanfield.pretrained.family import Family, Site
from meanfield.pretrained.token_ids import numbering_of
from meanfield.pretrained.verification import InFloat64, recorded

if TYPE_CHECKING:
    import xarray as xr

# Of the settings of a model, what its results do not depend on: where it is from, its precision,
# its heads, what it returns beside them, and how it is trained.
_NAMES = re.compile(
    ".*name_or_path|transformers_version|architectures|auto_map|(torch_)?dtype|return_dict|use_cache"
    "|id2label|label2id|num_labels|problem_type|output_.*|tokenizer_class|(bos|eos|sep|cls)_token_id"
    "|.*drop(out)?(_.*)?|.*_pdrop|initializer_.*|gradient_checkpointing|task_specific_params"
    "|reorder_and_upcast_attn"
)


@dataclass(frozen=True, eq=False, repr=False)
class Transformer(Hinted):
    """A model read as attention layers, blocks and a network, in the mode that it is in.

    All of them are maps of measures; the tokens are the uniform measure with token i of n at
    position i/n. Layers that use distances between positions (rotary positions, windows) need n:
    `needs_length` says so, and ``length=n`` gives it. They are then maps of measures on
    [0, 1] × R^d like any other, and do not change when atoms split. Their matrices are copies
    without gradients to the weights of the model. A constant that is a penalty in training is that
    of the module itself, with ``geometry="euclidean"``: for an encoder of torch
    ``lambda mu: mu.replace(encoder(mu.points[None])[0])``.

    Attributes:
        name: as given to `meanfield.pretrained.load`.
        family: how models of its type are read.
        causal: whether the layers are masked.
        model: the `torch.nn.Module` of transformers.
        tokenizer: of the checkpoint; "words", see `read`; or None.
    """

    # What tells it from others in the store of a sweep.
    identified_by: ClassVar[tuple[str, ...]] = ("name", "causal", "model", "numbering")

    name: str
    family: Family
    causal: bool
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
        return self.family.masks if self.causal in self.family.masks else (self.causal,)

    @property
    def needs_length(self) -> bool:
        """Whether layers have to know the number of tokens."""
        return self.family.needs_length

    @property
    def n_layers(self) -> int:
        """Number of blocks, each with one attention layer."""
        return len(self.family.blocks(self.model))

    @property
    def n_heads(self) -> int:
        """H, of queries."""
        return self.family.sizes(self.model)[0]

    @property
    def dim(self) -> int:
        """d, of the tokens."""
        return self.family.sizes(self.model)[1]

    @property
    def max_tokens(self) -> int:
        """Longest sequence that the model has positions for."""
        return self.family.inputs.max_tokens(self.model)

    @property
    def vocabulary(self) -> int:
        """How many token ids the model knows."""
        return self.family.inputs.vocabulary(self.model)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return next(self.model.parameters()).dtype

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the model as it is now: its weights, as float64, and its settings."""
        settings = self.family.settings(self.model)
        told = {n: v for n, v in settings.items() if not (v is None or _NAMES.fullmatch(n))}
        digest = hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode())
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(f"{name} {tuple(tensor.shape)}\n".encode())
            digest.update(to_host(tensor.double().contiguous()).data)
        return f"sha256 {digest.hexdigest()}"

    @property
    def numbering(self) -> str | None:
        """How its tokenizer numbers words, for a store; see `token_ids.numbering_of`."""
        return numbering_of(self.tokenizer)

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

    @with_hints
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

    @with_hints
    def block(self, layer: int, *, length: int | None = None) -> Map:
        """Attention and feed-forward layer with their residuals and norms, for the model as it is.

        When the model changes ask for it anew: layers keep copies of its matrices.

        Args:
            layer: 0 is the first.
            length: as in `attention`.

        Raises:
            IndexError: there is no such layer.
            ValueError: of a mixture of experts attention alone is read.
        """
        make = self.family.block
        if make is None:
            raise ValueError(
                f"{self.name}: expected a model whose blocks are read, got one of type "
                f"{self.architecture}, whose feed-forward layers choose experts, which is not "
                "continuous; its attention is read: attention(layer), constants(tokens)"
            )
        with torch.no_grad():
            return make(self._site(layer, length))

    @with_hints
    def network(self, *, length: int | None = None) -> Chain:
        """All blocks one after another, and what follows the last one, such as a norm.

        It sends what `embeddings` returns to the model's ``last_hidden_state``.

        Args:
            length: as in `attention`.
        """
        blocks = [self.block(layer, length=length) for layer in range(self.n_layers)]
        with torch.no_grad():
            return Chain([*blocks, *self.family.last(self.model)])

    # --- its inputs ---

    @with_hints
    def embeddings(self, tokens: Any, *, length: int | None = None) -> ParticleMeasure:
        """The tokens as they enter the first block: a uniform measure, token i at i/length.

        Several texts give a batch of measures; shorter ones are padded with atoms of weight 0,
        which are absent. Token i of every text stands at i/length, so that one
        ``network(length=…)`` takes them all.

        Args:
            tokens: a text, without special tokens; a list of texts; ids, shape (n,) or
                (batch, n), or a list of them; or what a tokenizer returns, whose padding is left
                out. Of a model of images these, ``(channels, height, width)`` or a batch.
            length: of the sequence whose places are [0, 1]; of the longest text if None.

        Raises:
            ValueError: see `attention_inputs`, or a length below that of a text.
        """
        mu, *_ = self._measures(list(self.family.blocks(self.model)), tokens, length)
        return mu

    @with_hints
    def attention_inputs(self, tokens: Any, *, layers: Sequence[int] | None = None) -> Tensor:
        """The token clouds X that enter the attention layers, by the model itself.

        If a norm precedes attention, X is its output. The scripts published with [CAP24] give
        GPT-2 ``token_type_ids`` of 0 beside the ids, which adds the embedding of word 0 to every
        token; so does ``{"input_ids": ids, "token_type_ids": zeros}`` here.

        Args:
            tokens: as in `embeddings`, of one length.
            layers: which ones, in the order wanted; all if None.

        Returns:
            Shape (layers, n, d) or (layers, batch, n, d).

        Raises:
            ValueError: no sequence, several lengths, longer than the model allows, or ids it
                does not have.
            TypeError: no tokens at all.
            IndexError: there is no such layer.
        """
        chosen = self._check_layers(range(self.n_layers) if layers is None else layers)
        runs = self.family.inputs.runs(self.model, self.tokenizer, tokens)
        modules = [self.family.attention_module(b) for b in self.family.blocks(self.model)]
        found = [torch.stack(self._entering(modules, run, chosen)) for run in runs.arguments]
        if len({clouds.shape[-2] for clouds in found}) > 1:
            raise ValueError(
                "tokens: expected texts of one length, since one tensor holds them all, got "
                "several; call attention_inputs on each"
            )
        return found[0][:, 0] if runs.single else torch.cat(found, 1)

    @with_hints
    def constants(
        self,
        tokens: Any,
        *,
        layers: Sequence[int] | None = None,
        bounds: bool = True,
        length: int | None = None,
        rtol: float = 1e-3,
        progress: bool = True,
    ) -> xr.Dataset:
        """Local Wasserstein constants of attention layers, blocks and the network at a text.

        Args:
            tokens: as in `embeddings`; several texts lie along ``text``.
            layers: which ones, without the network; all of them and the network if None. Of a
                mixture of experts there is attention alone.
            bounds: whether certain bounds are computed too, which takes most of the time (of a
                layer of MiniLM and 96 tokens 51 of 55 s).
            length: as in `embeddings`.
            rtol: as of `meanfield.lipschitz.local_lipschitz`.
            progress: a bar on a terminal.

        Returns:
            A Dataset of ``attention`` and ``block`` (layer) and ``network``, each with its
            evidence: ``_upper`` with the probability ``_miss`` that it fails, ``_error``,
            ``_residual``, ``_converged``; and of `bounds` ``_bound``, which is certain, NaN where
            none is proved. `meanfield.figures.plot_constants` draws it. Its attribute
            ``training`` is 1 where the model is in training mode: its tokens have dropout then.

        Raises:
            ValueError: see `embeddings`.
            IndexError: there is no such layer.

        Example:
            >>> from meanfield.pretrained import read
            >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16).double()
            >>> ds = read(layer).constants(torch.eye(8)[:5])
            >>> ds.block.sizes["layer"], bool(ds.block_upper >= ds.block)
            (1, True)
        """
        chosen = self._check_layers(range(self.n_layers) if layers is None else layers)
        blocks = list(self.family.blocks(self.model))
        modules = [self.family.attention_module(block) for block in blocks]
        entering = self._measures(blocks, tokens, length)
        inner = self._measures(modules, tokens, length)
        n = entering[0].n_particles if length is None else length
        places = [Place("attention", self.attention(i, length=n), inner[i]) for i in chosen]
        if self.family.block is not None:
            places += [Place("block", self.block(i, length=n), entering[i]) for i in chosen]
            if layers is None:
                places.append(Place("network", self.network(length=n), entering[0]))
        return constants_of(
            places,
            chosen,
            rtol=rtol,
            bounds=as_bool(bounds, "bounds"),
            progress=as_bool(progress, "progress"),
            attrs={
                "model": self.name,
                "architecture": self.architecture,
                "causal": int(self.causal),
                "length": n,
                "training": int(self.model.training),
                "weights": self.fingerprint,
            },
        )

    @with_hints
    def encode(self, text: str) -> Tensor:
        """Token ids of a text, without special tokens, int64.

        Of random weights, which have no tokenizer, these are numbers of the words in order of
        appearance, modulo the vocabulary; of trained weights without one as well, with a warning.
        """
        return self.family.inputs.encode(self.model, self.tokenizer, text)

    # --- inside ---

    def _site(self, layer: int, length: int | None) -> Site:
        (layer,) = self._check_layers([layer])
        module = self.family.blocks(self.model)[layer]
        return Site(self.model, module, layer, self.causal, length)

    def _measures(
        self, modules: list[Any], tokens: Any, length: int | None
    ) -> list[ParticleMeasure]:
        """What enters each of the modules, one for each layer, as measures."""
        runs = self.family.inputs.runs(self.model, self.tokenizer, tokens)
        layers = range(self.n_layers)
        clouds = [self._entering(modules, run, layers) for run in runs.arguments]
        longest = max(cloud.shape[-2] for cloud, *_ in clouds)
        places = longest if length is None else count(length, "length")
        if places < longest:
            raise ValueError(f"length: expected at least {longest} places, got {places}")
        return [_joined(each, places, runs.single) for each in zip(*clouds, strict=True)]

    @without_autocast
    def _entering(
        self, modules: list[Any], run: Mapping[str, Tensor], layers: Iterable[int]
    ) -> list[Tensor]:
        """The hidden states ``(batch, n, d)`` that enter the modules of layers, in one run."""
        exact = InFloat64() if self.dtype == torch.float64 else nullcontext()
        try:
            with torch.no_grad(), exact, recorded(modules) as calls:
                self.family.inputs.run(self.model, run, self.causal)
        except RuntimeError as error:
            if self.family.block is not None:
                raise
            raise ValueError(
                f"{self.name}: its experts cannot be run in this dtype and size ({error}); call "
                "model.set_experts_implementation('eager') first"
            ) from error
        clouds = []
        for layer in layers:
            clouds.append(calls[layer].entered)
            check_finite(clouds[-1], f"{self.name}: tokens that enter layer {layer}")
        return [cloud if cloud.ndim == 3 else cloud[None] for cloud in clouds]

    def _check_layers(self, layers: Sequence[int]) -> list[int]:
        if not isinstance(layers, Iterable) or isinstance(layers, str):
            raise TypeError(f"layers: expected numbers such as [0, 1], got {layers!r}")
        layers = [count(i, "layer", least=-(10**12)) for i in layers]
        if not layers or not all(0 <= i < self.n_layers for i in layers):
            raise IndexError(f"layer: expected one of 0..{self.n_layers - 1}, got {layers}")
        return layers


def _joined(clouds: Sequence[Tensor], length: int, single: bool) -> ParticleMeasure:
    """One measure, or a batch of measures of possibly several lengths; token i at i/length."""
    if single:
        return _placed(clouds[0][0], length)
    if len({cloud.shape[-2] for cloud in clouds}) == 1:
        # 200 small images take 0.06 s so, their run included, and 0.9 s as measures of their own.
        return _placed(torch.cat(list(clouds)), length)
    return stack([_placed(cloud[0], length) for cloud in clouds])


def _placed(cloud: Tensor, length: int) -> ParticleMeasure:
    """Uniform, token i at i/length."""
    mu = ParticleMeasure.from_sequence(cloud)
    places = torch.arange(1, mu.n_particles + 1, dtype=mu.dtype, device=mu.device)
    return ParticleMeasure(mu.points, positions=places / length)
