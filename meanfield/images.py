"""F(μ) for a function F of the user: if F is no map of measures, the error says what one is."""

from __future__ import annotations

from meanfield.checks import called, describe, name_of
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
    image = called(F, (mu,), f"{name}: expected a map that takes a ParticleMeasure", f"; {_HINT}")
    if not isinstance(image, ParticleMeasure):
        raise TypeError(
            f"{name}: expected a map that returns a ParticleMeasure, got {name_of(F)}, which "
            f"returned {describe(image)}; {_HINT}"
        )
    return image
