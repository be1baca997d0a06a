"""From modules of transformers to layers: matrices, norms, feed-forward layers, kernels.

Everything that the files of the families have in common. A module is looked at for its tensors
only and never called.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meanfield.attention import AttentionParameters, SelfAttention
from meanfield.attention.kernels import Kernel, dot_product, rotary, window
from meanfield.checks import as_float_tensor, count
from meanfield.layers import MLP, Chain, LayerNorm, Residual, RMSNorm
from meanfield.pretrained.family import Site
from meanfield.pretrained.places import WholePlaces

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
# Frequencies that do not depend on the text.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


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
    q, k, v, out = (linear(module) for module in (query, key, value, output))
    G = len(k.weight) * H // len(q.weight)
    return AttentionParameters(
        q.weight.unflatten(0, (H, -1)),
        k.weight.unflatten(0, (G, -1)),
        v.weight.unflatten(0, (G, -1)),
        # A head has columns of the projection (d, H·v), which is taken as (H, d, v).
        out.weight.unflatten(1, (H, -1)).movedim(0, 1),
        query_bias=None if q.bias is None else q.bias.unflatten(0, (H, -1)),
        key_bias=None if k.bias is None else k.bias.unflatten(0, (G, -1)),
        value_bias=None if v.bias is None else v.bias.unflatten(0, (G, -1)),
        output_bias=out.bias,
        scale=scale,
    )


class Linear(NamedTuple):
    """x ↦ Wx + b: `weight` W, outputs × inputs, and `bias` b or None."""

    weight: Tensor
    bias: Tensor | None


def linear(module: Any) -> Linear:
    """Of a `torch.nn.Linear`, or of a Conv1D of transformers, which stores W transposed.

    Of what is one already the same.

    Raises:
        ValueError: a module with a forward of its own, such as one with an adapter.
    """
    if isinstance(module, Linear):
        return module
    kinds: list[Any] = [torch.nn.Linear]
    if "transformers" in sys.modules:  # whoever has a module of it has imported it
        from transformers.pytorch_utils import Conv1D

        kinds.append(Conv1D)
    check_forward(module, *kinds)
    weight = module.weight.detach()
    bias = None if module.bias is None else module.bias.detach()
    return Linear(weight if type(module).forward is torch.nn.Linear.forward else weight.mT, bias)


def check_forward(module: Any, *kinds: Any) -> None:
    """Refuse a module that does not compute what one of these classes of modules does.

    Its tensors would be read and the rest of it dropped.
    """
    own = "forward" in vars(module)
    if own or not any(type(module).forward is kind.forward for kind in kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        what = "one whose forward was replaced" if own else "one with a forward of its own"
        raise ValueError(
            f"expected a {names}, got {type(module).__name__}, {what}; an adapter is merged into "
            "the weights first (peft: model.merge_and_unload())"
        )
    for name in {"weight", "bias"} & vars(module).keys():  # no parameter: that of the last call
        raise ValueError(
            f"expected a {type(module).__name__} with a {name} of its own, got one whose {name} "
            "is made before each call, as by pruning; torch.nn.utils.prune.remove(module, "
            f"'{name}'), or remove_weight_norm(module), leaves it as it is"
        )


def layer_norm(module: Any) -> LayerNorm:
    """Of a `torch.nn.LayerNorm`."""
    check_forward(module, torch.nn.LayerNorm)
    bias = None if module.bias is None else module.bias.detach()
    if module.weight is None:
        raise ValueError(
            "expected a LayerNorm with a weight, got one with elementwise_affine=False; a weight "
            "of ones is the same"
        )
    return LayerNorm(module.weight.detach(), bias, module.eps)


def rms_norm(module: Any, eps: float, *, around_one: bool = False) -> RMSNorm:
    """Of a module with a weight γ, or with γ − 1 where it is stored so (`around_one`)."""
    weight = as_float_tensor(module.weight.detach(), "weight")  # in half precision 1 + γ rounds
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
    (W1, b1), (W2, b2) = linear(inner), linear(outer)
    G, c = (None, None) if gate is None else linear(gate)
    return MLP(W1, W2, b1, b2, _ACTIVATIONS[activation], G, c)


def length_of(site: Site) -> int:
    """n, which the layer has to know.

    Raises:
        ValueError: it was not given.
    """
    if site.length is None:
        raise ValueError(
            "length: expected the number of tokens n, got None; the layers of "
            f"{site.config.model_type} look at distances between positions, and those of a "
            "measure lie in [0, 1]: give length=n for the sequence whose tokens are at i/n"
        )
    return count(site.length, "length")


def rotary_kernel(
    site: Site, *, inner: Kernel = dot_product, copies: int = 1, all_places: bool = False
) -> Kernel:
    """Queries and keys turned by the model's own frequencies, rounded to float32 as it has them.

    Each pair of the `inner` kernel's coordinates has one, or as many `copies` of them. With
    `all_places` as in `WholePlaces`.

    Raises:
        ValueError: no length, or frequencies that are scaled in a way that is not known.
    """
    length = length_of(site)
    rope, kind = _rope(site)
    scaling = rope.get("rope_type", "default")
    if scaling not in _ROPE_TYPES:
        raise ValueError(
            f"expected rotary positions of type {', '.join(_ROPE_TYPES)}, got rope_type="
            f"{scaling!r}, whose frequencies depend on the text"
        )
    frequencies = getattr(site.model.rotary_emb, f"{kind}inv_freq").detach().double().tolist()
    turned = rotary(length=length, frequencies=copies * frequencies, inner=inner)
    return WholePlaces(length, turned, all_places)


def rotary_gain(site: Site) -> float:
    """What rotary positions multiply the scores by: the square of their factor.

    Raises:
        ValueError: a part of each head only is turned, and multiplied.
    """
    rope, kind = _rope(site)
    gain = float(getattr(site.model.rotary_emb, f"{kind}attention_scaling")) ** 2
    share = rope.get("partial_rotary_factor", 1.0)
    if gain != 1 and share != 1:
        raise ValueError(
            f"expected rotary positions without a factor where {share:g} of each head is turned, "
            f"got one of {gain**0.5:g}"
        )
    return gain


def _rope(site: Site) -> tuple[dict[str, Any], str]:
    """The parameters of the layer's rotary positions, and how the names of its buffers begin."""
    rope = site.config.rope_parameters
    if "full_attention" not in rope:
        return rope, ""
    kind = site.config.layer_types[site.layer]  # Gemma 3 has one for each
    return rope[kind], f"{kind}_"


def windowed(site: Site, width: int | None, *, inner: Kernel) -> Kernel:
    """A kernel that sees `width` tokens back, the query's own included; all if None.

    In a plain layer it sees as many tokens on both sides of the query's own.
    """
    length = length_of(site)
    if width is not None and width < 1:
        raise ValueError(f"expected sliding_window ≥ 1 or None, got {width}")
    if width is None or width >= length:
        return inner
    # Half a step keeps clear of rounding.
    return window((width - 0.5 if site.causal else width + 0.5) / length, inner=inner)


def masked_by(config: Any, default: bool) -> bool:
    """Whether attention is masked in a model that is by default, if its configuration agrees.

    Raises:
        ValueError: the ways in which transformers computes attention read it differently.
    """
    if getattr(config, "use_bidirectional_attention", None):
        raise ValueError(
            "expected a configuration without use_bidirectional_attention, got "
            f"{config.use_bidirectional_attention}: transformers masks such a model with plain "
            "attention and does not with fused; set is_causal=False instead, which both obey"
        )
    # Only files that change it have the field.
    is_causal = bool(getattr(config, "is_causal", default))
    if is_causal > default:
        raise ValueError(
            "expected is_causal=False in the configuration of an encoder, got True: transformers "
            "masks such a model with fused attention and does not with plain"
        )
    return is_causal


def check_absolute_positions(config: Any) -> None:
    """Refuse scores that depend on distances."""
    # Configurations written for transformers before version 5 have the field, newer ones do not.
    kind = getattr(config, "position_embedding_type", None)
    if kind not in (None, "absolute"):
        raise ValueError(
            f"expected absolute positions, got position_embedding_type={kind!r}, whose scores "
            "are not ⟨Ax, y⟩"
        )
