"""What a family of models has to say about itself to be read as maps of measures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from meanfield.attention import SelfAttention
from meanfield.maps import Map
from meanfield.pretrained.model_inputs import ModelInputs
from meanfield.pretrained.token_ids import TokenIds

# Sizes of random models whose usual ones are large.
SMALL = {
    **{"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4},
    **{"num_hidden_layers": 4, "vocab_size": 8192},
}


class Site(NamedTuple):
    """A layer of a model, and how it is to be read.

    Attributes:
        model: the `torch.nn.Module` of transformers.
        module: the block's.
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
        """The model's configuration."""
        return self.model.config


def eager(model: Any) -> Any:
    """The model with attention written out."""
    model.set_attn_implementation("eager")
    return model


@dataclass(frozen=True, eq=False)
class Family:
    """How one type of model is read.

    A new type is a row of ``decoders.py``; or, of the parts in ``modules.py``, a file beside the
    others and a line of ``registry.py``::

        PHI = Family(
            "phi",
            "Phi",
            masks=(True,),
            blocks=lambda model: model.layers,
            attention_module=lambda block: block.self_attn,
            attention=phi_attention,  # (site: Site) -> SelfAttention
            block=phi_block,  # (site: Site) -> Chain
            last=lambda model: [layer_norm(model.final_layernorm)],
            needs_length=True,
        )

    In a program of your own: ``meanfield.pretrained.registry.FAMILIES["phi"] = PHI``.

    Attributes:
        model_type: of its configuration.
        stem: of its classes in transformers: "Bert" for BertConfig and BertModel.
        masks: the masks that it can have: plain (False), causal (True) or both. A decoder whose
            configuration says ``is_causal: false`` is plain all the same.
        blocks: the modules of the blocks of a model, in the order in which they act.
        attention_module: of a block, the module that the tokens enter for attention.
        attention: the attention of a block, output projection included.
        block: the whole block, or None where attention alone is read.
        last: what follows the last block up to ``last_hidden_state``.
        check: raises ValueError for a configuration that would be read wrongly.
        inputs: from what a user gives (texts, ids, images) to runs of the model.
        sizes: of a model, its number of heads H and the dimension d of its tokens.
        settings: of a model, what is configured besides its arrays, as plain data.
        plainly: the model with attention written out, as its modules say it, and not fused.
        needs_length: whether its layers use distances between positions, so that they need the
            length of the sequence.
        model_arguments: arguments of the model's class.
        random_config: smaller sizes for random models.
    """

    model_type: str
    stem: str
    masks: tuple[bool, ...]
    blocks: Callable[[Any], Sequence[Any]]
    attention_module: Callable[[Any], Any]
    attention: Callable[[Site], SelfAttention]
    block: Callable[[Site], Map] | None
    last: Callable[[Any], Sequence[Map]] = lambda model: ()
    check: Callable[[Any], None] = lambda config: None
    inputs: ModelInputs = field(default_factory=TokenIds)
    sizes: Callable[[Any], tuple[int, int]] = lambda model: (
        int(model.config.num_attention_heads),
        int(model.config.hidden_size),
    )
    plainly: Callable[[Any], Any] = eager
    settings: Callable[[Any], Mapping[str, Any]] = lambda model: model.config.to_dict()
    needs_length: bool = False
    model_arguments: Mapping[str, Any] = field(default_factory=dict)
    random_config: Mapping[str, Any] = field(default_factory=dict)
