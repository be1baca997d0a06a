"""What a map of measures may declare about itself, beyond sending measures to measures.

A map declares a capability by having the members of the protocol; nothing else is asked of it. All
are optional: whoever needs one that is missing asks its caller, or does without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from meanfield.measures import MeasureMap, ParticleMeasure

__all__ = [
    "HasBallUpper",
    "HasDim",
    "HasHeads",
    "HasLocalUpper",
    "HasScoreMatrices",
    "MayBeCausal",
    "is_causal",
]


@runtime_checkable
class MayBeCausal(Protocol):
    """A map that says whether it is masked: atoms see only those at earlier or equal positions."""

    @property
    def causal(self) -> bool:
        """Whether it is."""


@runtime_checkable
class HasDim(Protocol):
    """A map of measures on R^d that says d."""

    @property
    def dim(self) -> int:
        """d."""


@runtime_checkable
class HasHeads(Protocol):
    """A map whose displacements are the sum of those of several maps, its heads."""

    def single_heads(self) -> Sequence[MeasureMap]:
        """The heads, each as a map."""


@runtime_checkable
class HasScoreMatrices(Protocol):
    """Attention with scores ⟨A x, y⟩: worst cases are known in terms of A."""

    @property
    def score_matrices(self) -> Tensor:
        """A per head, (H, d, d); H may be 0."""


@runtime_checkable
class HasLocalUpper(Protocol):
    """A map with a certain upper bound of its local Wasserstein constant."""

    def local_upper(self, mu: ParticleMeasure) -> Tensor:
        """The bound at μ, ``(*batch,)``."""


@runtime_checkable
class HasBallUpper(Protocol):
    """A map with a certain upper bound of its local constants in a ball round an input."""

    def ball_upper(
        self, mu: ParticleMeasure, epsilon: float | Tensor, *, constant: Tensor | None = None
    ) -> Tensor:
        """The bound over W_∞ distance ε, ``(*batch,)``; `constant` bounds the constant at μ."""


def is_causal(F: object) -> bool:
    """Whether F declares that it is masked."""
    return isinstance(F, MayBeCausal) and bool(F.causal)
