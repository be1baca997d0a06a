"""What a theorem asks of a layer, and what it says of it: a number, or why there is none."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from meanfield.bounds.layer import Layer, raised
from meanfield.bounds.theorems import local_upper

if TYPE_CHECKING:
    from meanfield.measures import ParticleMeasure

OURS = "this package"
_BELOW = 1 - 1e-9  # of lower bounds: singular vectors are known to rounding only


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
        reason: why it does not apply, or "".
    """

    name: str
    value: float | None
    side: str
    of: str
    assumption: str
    source: str
    reason: str

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


@dataclass(frozen=True, eq=False)
class Question:
    """A layer, and where its points are.

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

    def joined(self, bound: Callable[..., Any], **settings: Any) -> float:
        """A bound of the layer from ‖A‖, the radius and the query bias of each head."""
        layer = self.layer
        each = bound(layer.norm_A, 1.0, self.radius, shift=layer.shift, **settings)
        return layer.joined(each)

    @property
    def is_uniform(self) -> bool:
        """Whether the points, if any are given, are tokens of equal weight."""
        if self.points is None:
            return True
        logs = self.points.log_weights
        return float(logs.max() - logs.min()) < 1e-5  # in single precision too

    @property
    def tokens(self) -> int:
        """How many there are; asked for behind `counted`."""
        assert self.n is not None
        return self.n

    @cached_property
    def sizes(self) -> Any:
        """Of queries and keys on the ball, None where they are not known."""
        return self.layer.attention.feature_sizes(self.radius)

    @cached_property
    def declared(self) -> Any:
        """What `local_upper` of the map gives at the points, None where it declares nothing."""
        try:
            return local_upper(self.layer.map, self.points)
        except NotImplementedError:
            return None

    @cached_property
    def eigenpairs(self) -> list[tuple[float, np.ndarray]]:
        """The real eigenvalues of the first A but 0, each with a unit vector."""
        values, vectors = np.linalg.eig(self.layer.A[0])
        return [
            (float(value.real), u.real / np.linalg.norm(u.real))
            for value, u in zip(values, vectors.T, strict=True)
            if value.imag == 0 and value.real != 0
        ]


class Ask(NamedTuple):
    """What a theorem asks of a layer.

    Attributes:
        otherwise: why the theorem does not apply where it does not hold.
        holds: whether it holds.
    """

    otherwise: str
    holds: Callable[[Question], bool]


_SLOPED = Ask("the norm has ε = 0: give points=", lambda q: q.slope < math.inf)


@dataclass(frozen=True)
class Statement:
    """A theorem: its words, what it asks of a layer, and its number.

    Attributes:
        words: name, side, of, assumption and source, as in `BoundRow`; {bias} in the source is
            where a query bias is noted, {distance} W₂, or conditional d₂ of kernels that look at
            positions: tokens that change places are apart by 0 in W₂, and their images are not.
        asks: the first that does not hold is the reason why there is no number.
        value: the number, computed where all hold.
        times_slope: whether the number is of attention alone, so that behind a norm it is
            multiplied by the norm's constant.
    """

    words: tuple[str, str, str, str, str]
    asks: Sequence[Ask]
    value: Callable[[Question], float]
    times_slope: bool = False

    def row(self, question: Question) -> BoundRow:
        """The row of this theorem in the table of a layer."""
        (name, side, of, assumption, source), asks, slope = self.words, self.asks, 1.0
        if self.times_slope and question.layer.norm is not None:
            where = "at the points" if question.points is not None else "anywhere"
            assumption = f"{assumption}, times 1/σ {where}"
            asks, slope = (*asks, _SLOPED), question.slope
        reason = next((ask.otherwise for ask in asks if not ask.holds(question)), "")
        value = None if reason else float(slope * self.value(question))
        by_place = question.layer.attention.kernel.needs_positions
        of = of.format(distance="conditional d₂" if by_place else "W₂")
        source = source.format(bias=f"; query bias: {OURS}" * bool(question.layer.shift.any()))
        return BoundRow(name, value, side, of, assumption, source, reason)


# ------------------------------------------------------------ measures and tokens that reach much


def best_pair(question: Question, bound: Callable[[float], float]) -> float:
    """max ‖Vu‖ · bound(γ), γ = −λ or λ/8, over the real eigenpairs (λ, u) of A.

    In the witness of Proposition 3.4 the response to a displacement of the lone atom along u is
    along Vu, whatever V; so ‖Vu‖ times the number for V = I is reached.
    """
    V = question.layer.V[0]
    pairs = [(math.hypot(*(V @ u)), value) for value, u in question.eigenpairs]
    reached = (_BELOW * size * bound(max(-value, value / 8)) for size, value in pairs if size)
    return max(reached, default=0.0)


def far_token(question: Question) -> float:
    """½√(n−1) ‖V(I + ½(y−x)uᵀ)‖: n − 1 tokens at x pay half of their attention to y, u = Ax.

    x is along the first right singular vector of A, and y as far from x as ⟨u, y − x⟩ = ln(n−1)
    allows.
    """
    A, V = question.layer.A[0], question.layer.V[0]
    radius, n = question.radius, question.tokens
    x = radius * np.linalg.svd(A)[2][0]
    u = A @ x
    unit = u / np.linalg.norm(u)
    height = unit @ x + math.log(n - 1) / np.linalg.norm(u)
    across = x - (unit @ x) * unit
    if len(x) > 1 and np.linalg.norm(across) < 1e-6 * radius:
        # x is along u: any direction across it does.
        across = np.linalg.svd(unit[None])[2][-1]
    length = np.linalg.norm(across)
    width = math.sqrt(max(radius**2 - height**2, 0.0))
    y = height * unit - (width / length * across if length > 1e-6 * radius else 0.0)
    block = V @ (np.eye(len(x)) + np.outer(y - x, u) / 2)
    return _BELOW * math.sqrt(n - 1) / 2 * float(np.linalg.norm(block, 2))


def is_far_enough(question: Question) -> bool:
    """Whether one place in the ball can have as much attention as n − 1 tokens elsewhere."""
    A, radius = question.layer.A[0], question.radius
    x = radius * np.linalg.svd(A)[2][0]
    u = A @ x
    size = float(np.linalg.norm(u))
    return size > 0 and math.log(question.tokens - 1) <= size * radius - float(u @ x)
