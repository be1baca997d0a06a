"""The contract of a kernel: how points become queries, keys and values."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meanfield.attention.parameters import AttentionParameters
from meanfield.checks import describe
from meanfield.habits import NoFunction
from meanfield.linalg.vectors import pushed_forward
from meanfield.measures import ParticleMeasure


class Features(NamedTuple):
    """What attention needs of each particle, per head; also a tangent or cotangent of these.

    The score of query i and key j is s(⟨qᵢ, kⱼ + k_centre⟩ + bⱼ), s the kernel's `activation`.

    Attributes:
        q: queries, ``(*batch, H, n, k)``; factors of the score are in them.
        k: keys, ``(*batch, H, n, k)``.
        v: values, ``(*batch, H, n, v)``.
        b: score biases of the keys, ``(*batch, H, n)``; None is 0.
        k_centre: where the keys are measured from, ``(*batch, H, 1, k)``; None is 0. So
            differences between particles that are close together but far from the origin keep
            their digits. The softmax may leave it out: it does not depend on a shift of all keys.
        v_centre: likewise for the values, ``(*batch, H, 1, v)``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    b: Tensor | None = None
    k_centre: Tensor | None = None
    v_centre: Tensor | None = None

    def whole_keys(self) -> Features:
        """The same with the keys measured from the origin."""
        if self.k_centre is None:
            return self
        return self._replace(k=self.k + self.k_centre, k_centre=None)

    def whole(self) -> Features:
        """The same with keys and values measured from the origin."""
        f = self.whole_keys()
        return f if f.v_centre is None else f._replace(v=f.v + f.v_centre, v_centre=None)

    def folded(self, one: float) -> Features:
        """Biases as one coordinate more: ⟨(q, 1), (k, b)⟩, and for tangents ⟨(q̇, 0), (k̇, ḃ)⟩."""
        if self.b is None:
            return self
        q = torch.cat([self.q, torch.full_like(self.q[..., :1], one)], -1)
        return self._replace(q=q, k=torch.cat([self.k, self.b[..., None]], -1))


class At(NamedTuple):
    """Where a kernel is looked at.

    Attributes:
        parameters: the matrices of the layer.
        points: ``(*batch, n, d)``.
        positions: ``(*batch, n)``, or None.
    """

    parameters: AttentionParameters
    points: Tensor
    positions: Tensor | None


class Motion(NamedTuple):
    """How far the queries or the keys of atoms may move, ``(..., *batch, H, n or 1)`` each.

    Attributes:
        moved: no less than |q(x′) − q(x)|.
        steepest: no less than ‖Dq(x′)‖.
        bent: no less than ‖Dq(x′) − Dq(x)‖.
    """

    moved: Tensor
    steepest: Tensor
    bent: Tensor


class Score(NamedTuple):
    """The kind of score that a softmax is taken of, or what is taken of dot products instead.

    Attributes:
        kind: "dot product" ⟨A x, y⟩, "soft cap" τ tanh(⟨A x, y⟩/τ), "l2" −scale |Qx − Ky|²,
            "sink" and "sigmoid" for those normalisations of dot products, or "other".
        tau: τ of the cap.
    """

    kind: str
    tau: float = math.inf


class FeatureSizes(NamedTuple):
    """How large the queries and keys of points in a ball are at most, per head, (H,).

    The score is a function of slope at most 1 of ⟨q, k⟩, and a bias that depends on positions.

    Attributes:
        query: |q|, factors of the score included.
        key: |k|.
        query_slope: Lipschitz constant of x ↦ q.
        key_slope: of y ↦ k.
        bias: the largest bias less the smallest.
    """

    query: Tensor
    key: Tensor
    query_slope: Tensor
    key_slope: Tensor
    bias: Tensor


class Kernel(NoFunction):
    """How points become queries, keys and values. Subclass it and give `features`.

    `push` and `pull` are the derivative of `features` at some points (`At`) and its transpose, at
    fixed parameters and positions. The ones here differentiate `features` automatically, which
    takes 0.5 to 4 ms a product (more than the product itself below about 500 atoms); a subclass
    may give its own.
    The tangent of `k_centre` and `v_centre` counts as part of k and v, so a kernel that uses
    centres must give both. A kernel knows nothing of softmax, masks, weights and blocks.

    Example:
        >>> class HalfDotProduct(Kernel):
        ...     def features(self, parameters, points, positions):
        ...         q, k, v = parameters.project(points)
        ...         return Features(0.5 * parameters.scale[:, None, None] * q, k, v)

    Attributes:
        needs_positions: whether `features` look at positions; True of a subclass that gives
            `position_bias` or `reach`.
        reach: a row sees only columns less than this far from it in position.
        is_linear: whether `push` is the same at all points and positions.
        score: what the score is a function of, for bounds that are proved for some scores only.
        is_scaled: whether the layer's scale is a factor of the queries.
        takes_transforms: whether the score is a function of ⟨q, k⟩ alone, so that another kernel
            may rotate or normalise queries and keys.
    """

    _instead = "give it to a layer: SelfAttention(parameters, kernel=...)"
    needs_positions: bool = False
    reach: float = math.inf
    is_linear: bool = False
    score: Score = Score("other")
    is_scaled: bool = True
    takes_transforms: bool = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # A subclass that overrides what these are about does not inherit them: they describe the
        # parent's features, activation or scores.
        features, turn, activation, bias, reach = (
            _place(cls, name)
            for name in ("features", "turn", "activation", "position_bias", "reach")
        )
        for names, changed in (
            (("push", "pull", "feature_slopes"), features),
            (("motion", "bends", "is_shift_invariant"), min(features, turn)),
            (("curvature",), activation),
            (("score", "feature_sizes"), min(features, turn, activation, bias, reach)),
        ):
            for name in names:
                if _place(cls, name) > changed:
                    setattr(cls, name, getattr(Kernel, name))
        if _place(cls, "is_linear") > min(features, _place(cls, "push")):
            cls.is_linear = False
        # Without positions a bias or a reach of its own would be left out.
        if (
            vars(cls).get("needs_positions") is False
            and cls.position_bias is not Kernel.position_bias
        ):
            raise TypeError(
                f"{cls.__name__}: expected needs_positions = True, or none, of a kernel with a "
                "position_bias, got False; the bias would be left out"
            )
        if _place(cls, "needs_positions") > min(bias, reach):
            cls.needs_positions = True

    def is_shift_invariant(self, parameters: AttentionParameters) -> bool:
        """Whether no score changes, nor any derivative asked for, when all points are shifted."""
        return False

    def features(
        self, parameters: AttentionParameters, points: Tensor, positions: Tensor | None
    ) -> Features:
        """Features of points ``(*batch, n, d)`` at positions ``(*batch, n)`` or None."""
        raise NotImplementedError(f"{type(self).__name__} has to give `features`")

    def push(self, at: At, displacement: Tensor) -> Features:
        """The derivative of the features along displacements ``(*batch, n, d)``."""
        f = self.features(*at)
        if f.k_centre is not None or f.v_centre is not None:
            raise TypeError(
                f"{type(self).__name__}: expected features without k_centre and v_centre from a "
                "kernel that is differentiated automatically; leave them None, or give push and "
                "pull"
            )
        return Features(*pushed_forward(self._parts(at), at.points, displacement)[1])

    def pull(self, at: At, cotangents: Features) -> Tensor:
        """The transpose of `push`: cotangents of q, k, v and b to those of points."""
        given = tuple(c for c in cotangents[:4] if c is not None)
        return torch.func.vjp(self._parts(at), at.points)[1](given)[0]

    def feature_slopes(self, at: At) -> tuple[Tensor, Tensor] | None:
        """Aⱼ and Bᵢ with k̇ⱼ = AⱼKẋⱼ and q̇ᵢ = BᵢQ̃ẋᵢ, K the key matrices and Q̃ = scale · Q.

        Shapes ``(*batch, H or 1, n or 1, k′, k)``, k′ the width of the keys, with one more for the
        score biases if there are any. A kernel that gives them promises also: v̇ⱼ = V ẋⱼ. None if
        they are not known: only small maps then have certain bounds.
        """
        return None

    def motion(self, at: At, radius: Tensor) -> tuple[Motion, Motion] | None:
        """How queries and keys may move as every point moves by at most a radius.

        The radius has shape ``(..., *batch)``. None if it is not known: there are no bounds in a
        ball then.
        """
        return None

    def bends(self, parameters: AttentionParameters) -> tuple[Tensor, Tensor] | None:
        """Of squares in the score, −|Bx|² and −|Cy|²: 2‖B‖² and 2‖C‖² per head, (H,).

        Given these, `motion` leaves the squares out. None where there are none.
        """
        return None

    @property
    def curvature(self) -> float:
        """An upper bound of |s″|, s the `activation`, given that 0 ≤ s′ ≤ 1; ∞ if unknown."""
        return 0.0 if self.activation is None else math.inf

    def _parts(self, at: At) -> Callable[[Tensor], tuple[Tensor, ...]]:
        """The features as a function of points, for automatic differentiation."""

        def parts(x: Tensor) -> tuple[Tensor, ...]:
            f = self.features(at.parameters, x, at.positions)
            return (f.q, f.k, f.v) if f.b is None else (f.q, f.k, f.v, f.b)

        return parts

    @property
    def activation(self) -> Callable[[Tensor], Tensor] | None:
        """s, applied to ⟨q, k⟩ + b entry by entry; None is the identity."""
        return None

    def position_bias(
        self, parameters: AttentionParameters, rows: Tensor, columns: Tensor
    ) -> Tensor | None:
        """Added to scores ``(*batch, H, m, n)``: of positions ``(*batch, m)``, ``(*batch, n)``.

        −∞ where a row does not see a column at all.
        """
        return None

    def check(self, mu: ParticleMeasure) -> None:
        """Raise ValueError for measures that the kernel is not made for; any will do here."""

    def undefined(self, at: At) -> Tensor | None:
        """Where the features have no derivative, bool ``(*batch, n)``; None for nowhere."""
        return None

    def feature_sizes(self, parameters: AttentionParameters, radius: float) -> FeatureSizes | None:
        """For all points in the ball of this radius, at any positions; None if not known."""
        return None

    def head(self, index: int) -> Kernel:
        """The kernel of one head; `self` unless it holds numbers per head."""
        return self


def _place(cls: type, name: str) -> int:
    """The place in the method resolution order of the first class that defines a name."""
    places = (place for place, base in enumerate(cls.__mro__) if name in vars(base))
    return next(places, len(cls.__mro__))


def checked_inner(inner: Kernel) -> Kernel:
    """The kernel that another one changes.

    Raises:
        TypeError: no kernel, or the function that makes one.
    """
    if not isinstance(inner, Kernel):
        raise TypeError(
            f"inner: expected a kernel, got {describe(inner)}; "
            "soft_cap(10.0) is one, soft_cap is not"
        )
    return inner


def _of_inner(name: str) -> Any:
    """A member that is the inner kernel's."""
    return property(attrgetter(f"inner.{name}"), doc="The inner kernel's.")


class ModifiedKernel(Kernel):
    """Another kernel with something changed; members not overridden are the inner kernel's.

    Only `score` and `feature_sizes` are not: what is known of the inner scores need not hold of
    the changed ones.

    Attributes:
        inner: the kernel that is changed.
    """

    inner: Kernel

    needs_positions = _of_inner("needs_positions")
    reach = _of_inner("reach")
    is_linear = _of_inner("is_linear")
    is_scaled = _of_inner("is_scaled")
    takes_transforms = _of_inner("takes_transforms")
    activation = _of_inner("activation")
    curvature = _of_inner("curvature")
    check = _of_inner("check")
    is_shift_invariant = _of_inner("is_shift_invariant")
    features = _of_inner("features")
    push = _of_inner("push")
    pull = _of_inner("pull")
    undefined = _of_inner("undefined")
    feature_slopes = _of_inner("feature_slopes")
    motion = _of_inner("motion")
    bends = _of_inner("bends")
    position_bias = _of_inner("position_bias")

    def head(self, index: int) -> Kernel:
        """With the inner kernel of that head."""
        inner = self.inner.head(index)
        if inner is self.inner:
            return self
        other = copy(self)
        object.__setattr__(other, "inner", inner)  # kernels are frozen
        return other


class FeatureTransform(ModifiedKernel):
    """Another kernel whose queries and keys are changed particle by particle.

    Subclasses give `turn`, its derivative `turn_push`, and `turn_pull`, the transpose of that.
    They are written by hand: with automatic differentiation in their place a product takes 3 to 10
    times as long for at most 128 atoms, and 1.3 to 2.4 times for 512.
    """

    is_linear = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        places = {name: _place(cls, name) for name in ("turn", "turn_push", "turn_pull")}
        if len(set(places.values())) > 1:
            got = [name for name, place in places.items() if place == min(places.values())]
            raise TypeError(f"{cls.__name__}: expected turn, turn_push and turn_pull, got {got}")

    def turn(self, at: At, features: Features) -> Features:
        """The new features; the keys come measured from the origin."""
        raise NotImplementedError

    def turn_push(self, at: At, features: Features, tangents: Features) -> Features:
        """The derivative of `turn` at the features, along tangents of them."""
        raise NotImplementedError

    def turn_pull(self, at: At, features: Features, cotangents: Features) -> Features:
        """The transpose of `turn_push`."""
        raise NotImplementedError

    def features(
        self, parameters: AttentionParameters, points: Tensor, positions: Tensor | None
    ) -> Features:
        """`turn` of the inner kernel's features."""
        at = At(parameters, points, positions)
        return self.turn(at, self._inner_features(at))

    def inside(self, at: At) -> At:
        """Where the inner kernel is looked at."""
        return at

    def push(self, at: At, displacement: Tensor) -> Features:
        """The chain rule."""
        inner = self.inner.push(self.inside(at), displacement)
        return self.turn_push(at, self._inner_features(at), inner)

    def pull(self, at: At, cotangents: Features) -> Tensor:
        """The chain rule, backwards."""
        inner = self.turn_pull(at, self._inner_features(at), cotangents)
        return self.inner.pull(self.inside(at), inner)

    def feature_slopes(self, at: At) -> tuple[Tensor, Tensor] | None:
        """The chain rule: the columns of those inside, turned as one batch."""
        inner = self.inner.feature_slopes(self.inside(at))
        if inner is None:
            return None
        keys, queries = (slopes.movedim(-1, 0) for slopes in inner)
        here = self._inner_features(at)
        q, k, v = (t.expand(len(keys), *t.shape).contiguous() for t in here[:3])
        along = Features(queries.expand_as(q), keys.expand_as(k), torch.zeros_like(v))
        if at.positions is not None:
            at = at._replace(positions=at.positions.expand(len(keys), *at.positions.shape))
        turned = self.turn_push(at, Features(q, k, v), along).folded(0.0)
        return turned.k.movedim(0, -1), turned.q.movedim(0, -1)

    def motion(self, at: At, radius: Tensor) -> tuple[Motion, Motion] | None:
        """Not known of any transform; those that know it say it."""
        return None

    def _inner_features(self, at: At) -> Features:
        if not self.inner.takes_transforms:
            raise ValueError(
                f"{type(self).__name__}: expected an inner kernel whose scores are functions of "
                f"⟨q, k⟩, got {self.inner}, whose scores are not"
            )
        return self.inner.features(*self.inside(at)).whole_keys()
