"""One theorem applied to one layer: a number, or why there is none."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meanfield.bounds.layer import Layer, raised

if TYPE_CHECKING:
    from meanfield.measures import ParticleMeasure

OURS = "this package"

Words = tuple[str, str, str, str, str]  # name, side, of, assumption, source


@dataclass(frozen=True)
class BoundRow:
    """One theorem applied to one layer.

    Attributes:
        name: of the statement.
        value: the number, or None where the statement does not apply.
        side: "upper" or "lower" bound of the constant, or "limit": an upper bound of the local
            constant at λX as λ → ∞.
        of: of which constant.
        assumption: under what.
        source: "[CAP24] …", or "this package" for what is not in the papers.
        reason: why it does not apply, or None.
    """

    name: str
    value: float | None
    side: str
    of: str
    assumption: str
    source: str
    reason: str | None = None

    @property
    def applicable(self) -> bool:
        """Whether there is a number."""
        return self.value is not None

    def __float__(self) -> float:
        if self.value is None:
            raise ValueError(f"{self.name}: expected a statement that applies, got {self.reason}")
        return self.value

    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        shown = f"{self.value:.6g}" if self.value is not None else f"not applicable: {self.reason}"
        return (self.name, shown, self.side, self.of, self.assumption, self.source)


def statement(words: Words, value: Callable[[], float], reason: str | None) -> BoundRow:
    """The row of a theorem; `value` is computed where no reason speaks against it."""
    name, side, of, assumption, source = words
    number = None if reason is not None else float(value())
    return BoundRow(name, number, side, of, assumption, source, reason)


@dataclass(frozen=True, eq=False)
class Question:
    """A layer, where its points are, and why statements do not apply, or None.

    Attributes:
        layer: attention, the gain of a norm before it absorbed.
        radius: of the points that enter attention.
        n: number of tokens, if it is given.
        points: those that enter the whole map, if they are given.
        slope: Lipschitz constant of the norm before attention; 1 without one.
    """

    layer: Layer
    radius: float
    n: int | None
    points: ParticleMeasure | None
    slope: float

    @classmethod
    def of(
        cls, layer: Layer, radius: float, n: int | None, points: ParticleMeasure | None
    ) -> Question:
        """With a norm before it, attention sees the ball of radius √d R/√(R² + dε) at most.

        The slope of the norm is 1/σ for the least spread σ of the points, or 1/√ε without points.
        """
        norm = layer.norm
        if norm is None:
            return cls(layer, radius, n, points, 1.0)
        dim = layer.parameters.dim
        inner = math.sqrt(dim) * radius / math.hypot(radius, math.sqrt(dim * norm.eps))
        anywhere = raised(norm.eps**-0.5) if norm.eps > 0 else math.inf
        slope = anywhere if points is None else float(norm.unit.local_upper(points))
        return cls(layer, inner, n, points, slope)

    def upper(self, words: Words, value: Callable[[], float], reason: str | None) -> BoundRow:
        """An upper bound of attention, times the slope of the norm before it."""
        if self.layer.norm is None:
            return statement(words, value, reason)
        name, side, of, assumption, source = words
        where = "at the points" if self.points is not None else "anywhere"
        words = (name, side, of, f"{assumption}, times 1/σ {where}", source)
        blow_up = None if self.slope < math.inf else "the norm has ε = 0: give points="
        return statement(words, lambda: self.slope * value(), reason or blow_up)

    @property
    def kind(self) -> str:
        """Of the scores; bare matrices are A and V of dot products."""
        return "dot product" if self.layer.score is None else self.layer.score.kind

    @property
    def kernel(self) -> str | None:
        """Whether scores are dot products."""
        bilinear = self.kind == "dot product"
        return None if bilinear else "the kernel is not the dot product under the softmax"

    @property
    def plain(self) -> str | None:
        """Whether there may be no mask."""
        return "the layer is masked" if self.layer.causal else None

    @property
    def masked(self) -> str | None:
        """Whether there may be a mask."""
        return "the layer is not masked" if self.layer.causal is False else None

    @property
    def counted(self) -> str | None:
        """Whether n is given."""
        return None if self.n is not None else "the number of tokens is not given"

    @property
    def bare(self) -> str | None:
        """Whether attention comes first."""
        return None if self.layer.norm is None else "a norm comes before attention"

    @property
    def normalised(self) -> str | None:
        """Whether a norm comes first, and leaves points room to move along a sphere."""
        norm = self.layer.norm
        if norm is None:
            return "no norm comes before attention"
        dim = self.layer.parameters.dim - norm.centred
        return None if dim >= 2 else "there is no circle on the line"

    @property
    def placed(self) -> str | None:
        """Whether points are given."""
        return None if self.points is not None else "no points are given"
