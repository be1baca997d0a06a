"""Texts and token ids as inputs of a model."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from meanfield.checks import describe
from meanfield.pretrained.model_files import quiet
from meanfield.pretrained.model_inputs import ModelInputs, Runs

_SAMPLE_LENGTH = 7


class _Words(str):
    """What stands in the place of a tokenizer, and is asked like one."""

    __slots__ = ()

    def __call__(self, *texts: Any, **how: Any) -> NoReturn:
        raise TypeError(f"tokenizer: expected one, got {self!r}; source.encode(text) has the ids")


_CALLED = ("truncation", "padding")
WORDS = _Words("words")  # words are numbered as they appear


def numbering_of(tokenizer: Any) -> str | None:
    """What tells how a tokenizer of transformers numbers words; of any other its type alone."""
    if tokenizer is None or isinstance(tokenizer, str):
        return tokenizer
    from transformers import PreTrainedTokenizerBase

    kind = f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}"
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return kind
    if tokenizer.is_fast:  # calls change how it cuts and pads, which is not asked for here
        rules = json.loads(tokenizer.backend_tokenizer.to_str()) | dict.fromkeys(_CALLED)
    else:
        rules = {n: v for n, v in tokenizer.init_kwargs.items() if "name_or_path" not in n}
    words = [kind, rules, sorted(tokenizer.get_vocab().items())]
    told = json.dumps(words, sort_keys=True, default=str)
    return f"sha256 {hashlib.sha256(told.encode()).hexdigest()}"


# What a tokenizer returns and a model can take here.
_ENCODED = ("input_ids", "attention_mask", "token_type_ids")


@dataclass(frozen=True)
class TokenIds(ModelInputs):
    """Texts, ids, and what a tokenizer returns; several lengths are run one after another.

    Attributes:
        places: of a configuration, the longest sequence.

    Example:
        >>> from types import SimpleNamespace as Bare
        >>> model = Bare(config=Bare(vocab_size=100, max_position_embeddings=32))
        >>> TokenIds().encode(model, "words", "to be or not to be")
        tensor([0, 1, 2, 3, 0, 1])
    """

    places: Callable[[Any], int] = lambda config: int(config.max_position_embeddings)

    def max_tokens(self, model: Any) -> int:
        """As the configuration has it."""
        return self.places(model.config)

    def vocabulary(self, model: Any) -> int:
        """As the configuration has it."""
        return int(model.config.vocab_size)

    def sample(self, model: Any) -> Tensor:
        """A few random ids."""
        n = min(_SAMPLE_LENGTH, self.max_tokens(model))
        generator = torch.Generator().manual_seed(0)
        return torch.randint(
            self.vocabulary(model), (n,), generator=generator, device=generator.device
        )

    def runs(self, model: Any, tokenizer: Any, given: Any) -> Runs:
        """One run of all texts if they have one length, else one of each."""
        rows, single = self._rows(model, tokenizer, given)
        for row in rows:
            self._check(model, row)
        rows = [{k: ids.long().to(model.device) for k, ids in row.items()} for row in rows]
        if len({len(row["input_ids"]) for row in rows}) == 1:
            names = rows[0]
            return Runs(
                [{name: torch.stack([row[name] for row in rows]) for name in names}], single
            )
        return Runs([{name: ids[None] for name, ids in row.items()} for row in rows], single)

    def run(self, model: Any, arguments: Mapping[str, Any], causal: bool) -> Tensor:
        """Without a cache of keys and values."""
        return super().run(model, {**arguments, "use_cache": False}, causal)

    def encode(self, model: Any, tokenizer: Any, text: str) -> Tensor:
        """Without special tokens; of the tokenizer "words", numbers of words as they appear."""
        if not isinstance(text, str):
            raise TypeError(
                f"text: expected a str, got {describe(text)}; for several texts call encode on "
                "each, or pass the list as tokens"
            )
        if tokenizer is None:
            warnings.warn(
                "the model has no tokenizer: words are numbered as they appear, which means "
                "nothing to trained weights; give token ids, or read(model, tokenizer=…), where "
                "'words' stands for such numbers",
                stacklevel=4,
            )
        if tokenizer in (None, WORDS):
            known: dict[str, int] = {}
            numbers = [known.setdefault(word, len(known)) for word in text.split()]
            return torch.tensor(numbers, dtype=torch.int64) % self.vocabulary(model)
        with quiet():
            ids = tokenizer(text, add_special_tokens=False, return_attention_mask=False)
        return torch.tensor(ids["input_ids"], dtype=torch.int64)

    def _rows(
        self, model: Any, tokenizer: Any, given: Any
    ) -> tuple[list[dict[str, Tensor]], bool]:
        """The ids of each text, with what else the model is to be given."""
        if isinstance(given, str):
            return [{"input_ids": self.encode(model, tokenizer, given)}], True
        if isinstance(given, Mapping):
            return _unpadded(given)
        if _is_list(given) and given and all(isinstance(text, str) for text in given):
            return [{"input_ids": self.encode(model, tokenizer, text)} for text in given], False
        rows, single = _split(given, "tokens")
        return [{"input_ids": row} for row in rows], single

    def _check(self, model: Any, row: Mapping[str, Tensor]) -> None:
        ids = row["input_ids"]
        longest, vocabulary = self.max_tokens(model), self.vocabulary(model)
        if ids.dtype == torch.bool:
            raise ValueError("tokens: expected integers, got truth values")
        if not len(ids):
            raise ValueError("tokens: expected at least one token, integers, got none in a text")
        if len(ids) > longest:
            raise ValueError(
                f"tokens: expected at most {longest} per sequence (the positions of the model), "
                f"got {len(ids)}; cut the text into shorter windows"
            )
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocabulary:
            raise ValueError(
                f"tokens: expected ids in 0..{vocabulary - 1}, got a range of [{low}, {high}]; "
                "were they made by another model's tokenizer?"
            )
        kinds = row.get("token_type_ids")
        if kinds is None:
            return
        known = int(model.config.to_dict().get("type_vocab_size") or vocabulary)
        if int(kinds.min()) < 0 or int(kinds.max()) >= known:
            raise ValueError(
                f"token_type_ids: expected numbers in 0..{known - 1}, got a range of "
                f"[{int(kinds.min())}, {int(kinds.max())}]"
            )


def _unpadded(encoded: Mapping[str, Any]) -> tuple[list[dict[str, Tensor]], bool]:
    """The texts of a tokenizer's answer, without what its attention mask calls padding."""
    unknown = sorted(set(encoded) - set(_ENCODED))
    if unknown or "input_ids" not in encoded:
        raise ValueError(
            f"tokens: expected a tokenizer's answer with {', '.join(_ENCODED)}, got "
            f"{', '.join(map(str, encoded)) or 'nothing'}"
        )
    columns = {name: _split(encoded[name], name) for name in encoded}
    (ids, single), shapes = columns["input_ids"], {}
    for name, (rows, _) in columns.items():
        shapes[name] = [len(row) for row in rows]
    if any(shape != shapes["input_ids"] for shape in shapes.values()):
        raise ValueError(f"tokens: expected one shape for all of them, got lengths {shapes}")
    masks = columns.pop("attention_mask", ([torch.ones_like(row) for row in ids], single))[0]
    kept = [_kept(mask) for mask in masks]
    texts = [
        {name: rows[i][kept[i]] for name, (rows, _) in columns.items()} for i in range(len(ids))
    ]
    return texts, single


def _kept(mask: Tensor) -> slice:
    """The part of a row that is no padding."""
    seen = mask.nonzero().flatten()
    if set(mask.tolist()) - {0, 1} or not len(seen) or int(seen[-1] - seen[0]) + 1 != len(seen):
        raise ValueError(
            "attention_mask: expected 1 at the tokens of a text, one after another, and 0 at "
            f"padding before or behind them, got {mask.tolist()}"
        )
    return slice(int(seen[0]), int(seen[-1]) + 1)


def _split(given: Any, name: str) -> tuple[list[Tensor], bool]:
    """Rows of integers, and whether there is one without a batch axis."""
    if _is_list(given) and given and np.ndim(given[0]) and not isinstance(given[0], str):
        return [_integers(row, name, (1,)) for row in given], False
    ids = _integers(given, name, (1, 2))
    return ([ids], True) if ids.ndim == 1 else (list(ids), False)


def _integers(given: Any, name: str, axes: Sequence[int]) -> Tensor:
    try:
        ids = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{name}: expected a text, a list of texts, what a tokenizer returns, or integers of "
            f"shape (n,) or (batch, n), got {describe(given)}"
        ) from error
    if ids.ndim not in axes or 0 in ids.shape or ids.is_floating_point() or ids.is_complex():
        raise ValueError(
            f"{name}: expected integers of shape (n,) or (batch, n), got {ids.dtype} of shape "
            f"{tuple(ids.shape)}"
        )
    return ids


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))
