"""What a family of models has to say about itself to be read as maps of measures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from meanfield.attention import SelfAttention
from meanfield.measures import MeasureMap

__all__ = ["Family", "Site"]


class Site(NamedTuple):
    """A layer of a model, and how it is to be read.

    Attributes:
        model: the `torch.nn.Module` of transformers.
        module: of the block.
        layer: its number, from 0.
        causal: whether attention is masked.
        length: n, of the sequence whose positions i/n the measure has, or None.
    """

    model: Any
    module: Any
    layer: int
    causal: bool
    length: int | None

    @property
    def config(self) -> Any:
        """Of the model."""
        return self.model.config


def _no_maps(model: Any) -> Sequence[MeasureMap]:
    return ()


def _no_objection(config: Any) -> None:
    return None


def _positions(config: Any) -> int:
    return int(config.max_position_embeddings)


@dataclass(frozen=True, eq=False)
class Family:
    """How one type of model is read.

    Attributes:
        model_type: of its configuration.
        stem: of its classes in transformers: "Bert" for BertConfig and BertModel.
        masks: the masks that it can have: plain (False), causal (True) or both.
        blocks: the modules of the blocks of a model, in the order in which they act.
        attention_module: of a block, the module that the tokens enter for attention.
        attention: the attention of a block, output projection included.
        block: the whole block.
        last: what follows the last block up to ``last_hidden_state``.
        check: raises ValueError for a configuration that is not read right.
        max_tokens: longest sequence, of a configuration.
        needs_length: whether its layers look at positions beyond their order, so that they have
            to know the length of the sequence.
        model_arguments: of the model's class.
        random_config: sizes of a random model where the type's own are too large to draw.
    """

    model_type: str
    stem: str
    masks: tuple[bool, ...]
    blocks: Callable[[Any], Sequence[Any]]
    attention_module: Callable[[Any], Any]
    attention: Callable[[Site], SelfAttention]
    block: Callable[[Site], MeasureMap]
    last: Callable[[Any], Sequence[MeasureMap]] = _no_maps
    check: Callable[[Any], None] = _no_objection
    max_tokens: Callable[[Any], int] = _positions
    needs_length: bool = False
    model_arguments: Mapping[str, Any] = field(default_factory=dict)
    random_config: Mapping[str, Any] = field(default_factory=dict)
