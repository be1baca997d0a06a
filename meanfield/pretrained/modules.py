"""From modules of transformers to layers: matrices, norms, feed-forward layers, kernels.

Everything that the files of the families have in common. A module is looked at for its tensors
only and never called.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.attention.kernels import Kernel, dot_product, rotary, window
from meanfield.layers import MLP, Chain, LayerNorm, Residual, RMSNorm
from meanfield.pretrained.family import Site

__all__ = [
    "attention_parameters",
    "check_absolute_positions",
    "feed_forward",
    "layer_norm",
    "post_norm",
    "pre_norm",
    "rms_norm",
    "rotary_kernel",
    "windowed",
]

# Names of activations in transformers -> in `meanfield.layers.mlp.ACTIVATIONS`.
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "quick_gelu": "quick_gelu",
    "tanh": "tanh",
}
# Frequencies that do not depend on the text, without a factor on the scores.
_ROPE_TYPES = ("default", "linear", "llama3")


def attention_parameters(
    config: Any, query: Any, key: Any, value: Any, output: Any, *, scale: float | None = None
) -> AttentionParameters:
    """Matrices and biases of linear modules whose rows are heads side by side.

    Args:
        config: of the model: its numbers of heads.
        query: module of the queries.
        key: of the keys; fewer rows are grouped heads.
        value: of the values.
        output: of the projection that follows, whose columns are heads.
        scale: of the scores; 1/√k if None.
    """
    H = int(config.num_attention_heads)
    width = query.weight.shape[0] // H
    G = key.weight.shape[0] // width
    out = output.weight.detach()
    return AttentionParameters(
        _heads(query.weight, H),
        _heads(key.weight, G),
        _heads(value.weight, G),
        # (d, H·v): the columns of a head belong together.
        out.reshape(len(out), H, -1).movedim(0, 1),
        query_bias=_bias(query, H),
        key_bias=_bias(key, G),
        value_bias=_bias(value, G),
        output_bias=None if output.bias is None else output.bias.detach(),
        scale=scale,
    )


def _heads(weight: Tensor, heads: int) -> Tensor:
    return weight.detach().reshape(heads, -1, weight.shape[-1])


def _bias(module: Any, heads: int) -> Tensor | None:
    return None if module.bias is None else module.bias.detach().reshape(heads, -1)


def layer_norm(module: Any) -> LayerNorm:
    """Of a `torch.nn.LayerNorm`."""
    bias = None if module.bias is None else module.bias.detach()
    return LayerNorm(module.weight.detach(), bias, module.eps)


def rms_norm(module: Any, eps: float, *, around_one: bool = False) -> RMSNorm:
    """Of a module with a weight γ, or with γ − 1 where it is stored so (`around_one`)."""
    weight = module.weight.detach()
    return RMSNorm(1 + weight if around_one else weight, float(eps))


def pre_norm(norm: LayerNorm | RMSNorm, F: SelfAttention | MLP) -> Residual:
    """x + F(norm(x))."""
    return Residual(Chain([norm, F]))


def post_norm(norm: LayerNorm, F: SelfAttention | MLP) -> Chain:
    """norm(x + F(x))."""
    return Chain([Residual(F), norm])


def feed_forward(activation: Any, inner: Any, outer: Any, gate: Any = None) -> MLP:
    """Of linear modules.

    Args:
        activation: its name in the configuration.
        inner: first module.
        outer: second module.
        gate: beside the first, or None.

    Raises:
        ValueError: an activation that is not known.
    """
    if activation not in _ACTIVATIONS:
        raise ValueError(
            f"expected an activation among {', '.join(_ACTIVATIONS)}, got {activation!r}"
        )

    def tensors(module: Any) -> tuple[Tensor, Tensor | None]:
        return module.weight.detach(), None if module.bias is None else module.bias.detach()

    (W1, b1), (W2, b2) = tensors(inner), tensors(outer)
    G, c = (None, None) if gate is None else tensors(gate)
    return MLP(W1, W2, b1, b2, _ACTIVATIONS[activation], G, c)


def length_of(site: Site) -> int:
    """n, which the layer has to know.

    Raises:
        ValueError: it was not given.
    """
    if site.length is None:
        raise ValueError(
            f"length: expected the number of tokens n, got None; the layers of {_type(site)} "
            "look at distances between positions, and those of a measure lie in [0, 1]: give "
            "length=n for the sequence whose tokens are at i/n"
        )
    if int(site.length) != site.length or site.length < 1:
        raise ValueError(f"length: expected a number of tokens ≥ 1, got {site.length}")
    return int(site.length)


def rotary_kernel(site: Site, *, inner: Kernel = dot_product) -> Kernel:
    """Queries and keys turned by the model's own frequencies, rounded to float32 as it has them.

    Raises:
        ValueError: no length, or frequencies that are scaled in a way that is not known.
    """
    length, turns = length_of(site), site.model.rotary_emb
    rope = str(site.config.rope_parameters.get("rope_type", "default"))
    if rope not in _ROPE_TYPES or float(turns.attention_scaling) != 1.0:
        raise ValueError(
            f"expected rotary positions of type {', '.join(_ROPE_TYPES)}, got rope_type="
            f"{rope!r} with a factor {turns.attention_scaling} on the scores"
        )
    frequencies = turns.inv_freq.detach().to(torch.float64).tolist()
    return rotary(length=length, frequencies=frequencies, inner=inner)


def windowed(site: Site, width: int | None, *, inner: Kernel) -> Kernel:
    """A kernel that sees the last `width` tokens, the query's own included; all if None."""
    length = length_of(site)
    if width is None or width >= length:
        return inner
    # Half a step keeps clear of rounding.
    return window((width - 0.5) / length, inner=inner)


def check_absolute_positions(config: Any) -> None:
    """Refuse scores that depend on distances."""
    # Configurations written for transformers before version 5 have the field, newer ones do not.
    kind = getattr(config, "position_embedding_type", None)
    if kind not in (None, "absolute"):
        raise ValueError(
            f"expected absolute positions, got position_embedding_type={kind!r}, whose scores "
            "are not ⟨Ax, y⟩"
        )


def _type(site: Site) -> str:
    return str(site.config.model_type)
