"""What the composed maps share: the parts that stay with each atom, and what parts declare."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from meanfield.capabilities import (
    HasLocalUpper,
    HasNearby,
    Nearby,
    declared_dim,
    is_particlewise,
)
from meanfield.checks import describe
from meanfield.layers.particlewise import expanded_radii, scaled_radii
from meanfield.linalg import LinearMap
from meanfield.linearisation import Linearisation, factored_constant
from meanfield.measures import MeasureMap, ParticleMeasure, check_map

__all__ = ["checked_maps", "dim_of", "identity", "name_of", "nearby_of", "upper_of"]


def identity(mu: ParticleMeasure) -> Linearisation:
    """The linearisation of μ ↦ μ: atoms of weight 0 are absent from it, as from any other."""
    present = (mu.log_weights > -math.inf)[..., None].to(mu.dtype).expand(mu.points.shape)
    return Linearisation(LinearMap.diagonal(present), LinearMap.diagonal(present.unsqueeze(-2)))


def checked_maps(maps: Sequence[MeasureMap], name: str) -> tuple[MeasureMap, ...]:
    """The maps as a tuple, at least one."""
    if not isinstance(maps, Iterable):
        raise TypeError(f"{name}: expected a list of maps of measures, got {describe(maps)}")
    found = tuple(maps)
    if not found:
        raise ValueError(f"{name}: expected at least one map of measures, got none")
    for place, each in enumerate(found):
        check_map(each, f"{name}, place {place}")
    return found


def name_of(F: MeasureMap) -> str:
    """For messages."""
    return getattr(F, "__name__", type(F).__name__)


def dim_of(maps: Sequence[MeasureMap]) -> int:
    """d, of the first of the maps that says it.

    Raises:
        AttributeError: none of them does.
    """
    for each in maps:
        dim = declared_dim(each)
        if dim is not None:
            return dim
    raise AttributeError(f"dim: not declared by {', '.join(name_of(each) for each in maps)}")


def upper_of(F: MeasureMap, mu: ParticleMeasure) -> Tensor:
    """The bound of the local constant that F declares.

    Raises:
        NotImplementedError: it declares none.
    """
    if not isinstance(F, HasLocalUpper):
        raise NotImplementedError(
            f"local_upper: expected maps that declare a bound, got {name_of(F)}; give it a method "
            "local_upper(mu)"
        )
    return torch.as_tensor(F.local_upper(mu))


def nearby_of(
    F: MeasureMap, mu: ParticleMeasure, radii: Tensor | float, splitting: bool
) -> Nearby:
    """What F declares near μ, with the constant at μ itself where it can be factored.

    Raises:
        NotImplementedError: it declares nothing.
    """
    if not isinstance(F, HasNearby):
        raise NotImplementedError(
            f"nearby: expected maps that declare bounds near an input, got {name_of(F)}; give it "
            "a method nearby(mu, radii, *, splitting=True)"
        )
    found, constant = F.nearby(mu, radii, splitting=splitting), factored_constant(F, mu)
    if constant is None:
        return found
    found = found.at_most(constant)
    if not is_particlewise(F):
        return found
    moved = scaled_radii(found.upper[..., None], expanded_radii(mu, radii))
    return replace(found, displacement=found.displacement.minimum(moved))
