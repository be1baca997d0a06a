"""What a map of measures may declare about itself, beyond sending measures to measures.

A map declares a capability by having the members of the protocol; nothing else is asked of it. All
are optional: whoever needs one that is missing asks its caller, or does without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from meanfield.measures import MeasureMap, ParticleMeasure

__all__ = [
    "HasDim",
    "HasHeads",
    "HasLocalUpper",
    "HasNearby",
    "HasScore",
    "HasScoreMatrices",
    "MayBeCausal",
    "MayBeParticlewise",
    "Nearby",
    "Score",
    "declared_dim",
    "is_causal",
    "is_particlewise",
]


@runtime_checkable
class MayBeCausal(Protocol):
    """A map that says whether it is masked: atoms see only those at earlier or equal positions."""

    @property
    def causal(self) -> bool:
        """Whether it is."""


@runtime_checkable
class MayBeParticlewise(Protocol):
    """A map that says whether it moves every particle by itself."""

    @property
    def particlewise(self) -> bool:
        """Whether it does."""


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


class Score(NamedTuple):
    """What a softmax is taken of.

    Attributes:
        kind: "dot product" ⟨A x, y⟩, "soft cap" τ tanh(⟨A x, y⟩/τ), "l2" −scale |Qx − Ky|², or
            "other", which is also said of whatever is not a softmax.
        tau: τ of the cap.
    """

    kind: str
    tau: float = math.inf


@runtime_checkable
class HasScore(Protocol):
    """Attention that says what its scores are."""

    @property
    def score(self) -> Score:
        """What they are."""


@runtime_checkable
class HasLocalUpper(Protocol):
    """A map with a certain upper bound of its local Wasserstein constant."""

    def local_upper(self, mu: ParticleMeasure) -> Tensor:
        """The bound at μ, ``(*batch,)``."""


@dataclass(frozen=True, eq=False)
class Nearby:
    """What holds for every input near one; ∞ where nothing is known.

    Derivatives are compared as maps of L²(μ), with atoms that have split: the norm of one is the
    larger of the two components of the local constant.

    Attributes:
        constant: no less than the local constant at the input, ``(*batch,)``.
        change: the derivative nearby differs from that at the input by at most this, in norm.
        upper: no local constant nearby exceeds it.
        displacement: the image of atom i, if it has mass, moves by at most this,
            ``(*batch, n)``.
    """

    constant: Tensor
    change: Tensor
    upper: Tensor
    displacement: Tensor

    @classmethod
    def of(cls, constant: Tensor, change: Tensor, upper: Tensor, displacement: Tensor) -> Nearby:
        """With the less of `upper` and `constant` + `change`; what is not a number is not known.

        Overflow leaves ∞ − ∞ and 0 · ∞ behind, and ∞ bounds everything.
        """
        known = Nearby(*(_known(x) for x in (constant, change, upper, displacement)))
        return replace(known, upper=known.upper.minimum(known.constant + known.change))

    def at_most(self, constant: Tensor) -> Nearby:
        """The same with another bound of the local constant at the input, if that is less."""
        return Nearby.of(
            self.constant.minimum(constant), self.change, self.upper, self.displacement
        )

    def after(self, first: Nearby) -> Nearby:
        """Of a composition G∘F: this is G's at F(μ), within F's displacement; the other is F's.

        J′_G J′_F − J_G J_F is (J′_G − J_G)J′_F + J_G(J′_F − J_F), and it is
        (J′_G − J_G)J_F + J′_G(J′_F − J_F).
        """
        one = self.change * first.upper + self.constant * first.change
        other = self.change * first.constant + self.upper * first.change
        return Nearby.of(
            self.constant * first.constant,
            _known(one).minimum(_known(other)),
            self.upper * first.upper,
            self.displacement,
        )


def _known(bound: Tensor) -> Tensor:
    return bound.nan_to_num(nan=math.inf, posinf=math.inf)


@runtime_checkable
class HasNearby(Protocol):
    """A map with certain bounds of what it does near an input."""

    def nearby(
        self, mu: ParticleMeasure, radii: Tensor | float, *, splitting: bool = True
    ) -> Nearby:
        """As atom i moves by radii[..., i] at most, at fixed position.

        Args:
            mu: μ.
            radii: ≥ 0, ``(*batch, n)``, or less; more axes before give bounds for each. What
                absent atoms do does not count.
            splitting: whether atoms may split into parts that move differently.
        """


def declared_dim(F: object) -> int | None:
    """d, if F says it; a composed map has the member and says it only if a part does."""
    try:
        return F.dim if isinstance(F, HasDim) else None
    except AttributeError:  # from Python 3.12 on, `isinstance` does not ask for the value
        return None


def is_causal(F: object) -> bool:
    """Whether F declares that it is masked."""
    return isinstance(F, MayBeCausal) and bool(F.causal)


def is_particlewise(F: object) -> bool:
    """Whether F declares that it moves every particle by itself."""
    return isinstance(F, MayBeParticlewise) and bool(F.particlewise)
