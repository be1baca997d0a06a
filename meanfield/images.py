"""F(μ) for a function F of the user: if F is no map of measures, the error says what one is."""

from __future__ import annotations

import torch
from torch import Tensor

from meanfield.checks import called, describe, is_traced, name_of
from meanfield.habits import is_function
from meanfield.measures import MeasureMap, ParticleMeasure

_HINT = (
    "return mu.replace(points), or pushforward(T, mu) for a map of points T; "
    "AttentionParameters.from_module reads torch's attention, pretrained.read whole encoders"
)


def check_map(F: object, name: str = "F") -> None:
    """Raise TypeError unless F is callable (its return value is checked at the call)."""
    where = type(F).__module__
    is_layer = where.startswith("torch.nn.modules.") and not where.endswith(".container")
    if is_layer and type(F).__name__ != "Identity":  # which maps measures too, as containers may
        raise TypeError(
            f"{name}: expected a map of measures, got torch's {type(F).__name__}; {_HINT}"
        )
    if is_function(F):
        return
    made = "; SelfAttention(parameters) makes one" if hasattr(F, "query") else ""
    made = "; source.attention(layer) makes one" if hasattr(F, "attention") else made
    raise TypeError(f"{name}: expected a map of measures (a function), got {describe(F)}{made}")


def image_of(F: MeasureMap, mu: ParticleMeasure, name: str = "F") -> ParticleMeasure:
    """F(μ), or an error that says what a map of measures is.

    Raises:
        TypeError: F does not take a measure, or does not return one.
    """
    check_map(F, name)
    before = _versions(mu)
    image = called(F, (mu,), f"{name}: expected a map that takes a ParticleMeasure", f"; {_HINT}")
    if not isinstance(image, ParticleMeasure):
        raise TypeError(
            f"{name}: expected a map that returns a ParticleMeasure, got {name_of(F)}, which "
            f"returned {describe(image)}; {_HINT}"
        )
    if _versions(mu) != before:
        raise RuntimeError(
            f"{name}: expected a map that leaves the measure that it is given, got one that "
            "writes into its points or weights, as relu_ or += do, so that it is another one now; "
            "let it write into mu.points.clone()"
        )
    return image


def kept_atoms(image: ParticleMeasure, mu: ParticleMeasure, name: str) -> ParticleMeasure:
    """The image, if it has the atoms, the weights and the positions of μ.

    Raises:
        ValueError: it has others.
        TypeError: it is in another dtype.
    """
    if image.dtype != mu.dtype:
        raise TypeError(
            f"{name}: expected an image in the dtype of the measure, {mu.dtype}, got "
            f"{image.dtype}; take module.double(), or mu.to(torch.float32)"
        )
    lost = mu.positions is not None and image.positions is None
    pairs = [(image.log_weights, mu.log_weights)]
    if mu.positions is not None and image.positions is not None:
        pairs.append((image.positions, mu.positions))
    if lost or not all(one is other or _same(one, other) for one, other in pairs):
        got = "one without positions" if lost else "a measure with others"
        raise ValueError(
            f"{name}: expected a map that keeps the atoms, their weights and positions, got "
            f"{got}; move points alone: mu.replace(points), or pushforward(T, mu)"
        )
    return image


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or is_traced(one) or is_traced(other):
        return one.shape == other.shape
    room = 1e3 * torch.finfo(other.dtype).eps
    return bool(torch.allclose(one, other, rtol=room, atol=room))


def _versions(mu: ParticleMeasure) -> list[int]:
    """How often each tensor of a measure was written into, where torch counts it."""
    held = [t for t in (mu.points, mu.log_weights, mu.positions) if t is not None]
    return [t._version for t in held if not (is_traced(t) or t.is_inference())]
