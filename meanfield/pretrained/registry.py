"""The families that are read."""

from __future__ import annotations

import copyreg

from meanfield.pretrained.decoders import DECODERS
from meanfield.pretrained.encoders import ENCODERS, VIT
from meanfield.pretrained.family import Family
from meanfield.pretrained.gpt_neox import GPT_NEOX
from meanfield.pretrained.torch_encoder import TORCH_ENCODER

FAMILIES: dict[str, Family] = {
    family.model_type: family for family in (*ENCODERS, GPT_NEOX, *DECODERS, VIT)
}

# Models that have one of these inside.
_INSIDE = {
    "gemma3": "read(model.base_model.language_model) reads what is text in it, a gemma3_text"
}


def family_of(model_type: object, name: str) -> Family:
    """The family of a model type.

    Raises:
        ValueError: it is not read.
    """
    if model_type not in FAMILIES:
        nearest = _INSIDE.get(
            str(model_type),
            "of another model's attention, AttentionParameters(query, key, value, output) of the "
            "weights of one module are read by SelfAttention",
        )
        raise ValueError(
            f"{name}: expected a model of type {', '.join(FAMILIES)}, got {model_type!r}; "
            f"{nearest}"
        )
    return FAMILIES[str(model_type)]


def _unpickled(model_type: str) -> Family:
    if model_type == TORCH_ENCODER.model_type:
        return TORCH_ENCODER
    return family_of(model_type, "a pickle")


# A transformer in a process of a sweep: its family has functions without a name.
copyreg.pickle(Family, lambda family: (_unpickled, (family.model_type,)))
