"""Cosine attention and QK-norm: queries and keys divided by their lengths."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from meanfield.attention.kernels.bilinear import dot_product
from meanfield.attention.kernels.kernel import (
    At,
    Features,
    FeatureSizes,
    FeatureTransform,
    Kernel,
    Motion,
    checked_inner,
)
from meanfield.attention.parameters import AttentionParameters
from meanfield.checks import as_float_tensor, check_finite, number
from meanfield.copies import own_copy
from meanfield.habits import with_hints
from meanfield.linalg.vectors import units
from meanfield.maps.map import normalised_in_ball


@final
@dataclass(frozen=True, eq=False)
class NormalisedFeatures(FeatureTransform):
    """q ↦ g_q ∘ q/‖q‖ and k ↦ g_k ∘ k/‖k‖, with ‖·‖ a length or a root mean square, and eps.

    Made by `cosine` and `qk_norm`. At eps = 0 the derivative is 1/‖q‖, without bound near q = 0;
    a query or key that is 0 stays 0, and has none.

    Attributes:
        query_gain: g_q, a number or a tensor that broadcasts to (H, 1, k).
        key_gain: g_k, likewise.
        eps: added to the square of each length.
        rms: whether lengths are root mean squares, and the layer's scale stays a factor of the
            scores. Otherwise they are Euclidean, and it does not.
        inner: the kernel whose queries and keys are normalised.
    """

    query_gain: Any
    key_gain: Any
    eps: float
    rms: bool
    inner: Kernel = dot_product

    def head(self, index: int) -> NormalisedFeatures:
        """With the gains of that head."""
        q, k = (
            gain[index][None]
            if isinstance(gain, Tensor) and gain.ndim == 3 and len(gain) > 1
            else gain
            for gain in (self.query_gain, self.key_gain)
        )
        return replace(self, query_gain=q, key_gain=k, inner=self.inner.head(index))

    def undefined(self, at: At) -> Tensor | None:
        """At eps = 0 where a query or a key is 0, and where the inner kernel has no derivative."""
        inner = self.inner.undefined(at)
        if self.eps > 0:
            return inner
        features = self._inner_features(at)
        gone = [(x == 0).all(-1).any(-2) for x in (features.q, features.k)]
        own = gone[0] | gone[1]
        return own if inner is None else own | inner

    def turn(self, at: At, features: Features) -> Features:
        """Unit vectors times the gains."""
        q_gain, k_gain = self._gains(at.parameters)
        return features._replace(
            q=q_gain * features.q * self._inverse_length(features.q),
            k=k_gain * features.k * self._inverse_length(features.k),
        )

    def feature_sizes(self, parameters: AttentionParameters, radius: float) -> FeatureSizes | None:
        """|q| ≤ max|g|, times √k for root mean squares; slopes by 1/√eps, None at eps = 0."""
        inner = self.inner.feature_sizes(self._inside(parameters), radius)
        if inner is None or self.eps == 0:
            return None
        length = parameters.query.shape[-2] ** 0.5 if self.rms else 1.0
        found = []
        for gain in self._gains(parameters):
            each = torch.as_tensor(gain, dtype=inner.bias.dtype, device=inner.bias.device).abs()
            found.append(each.amax((-2, -1)) if each.ndim == 3 else each.amax())
        q_gain, k_gain = found
        scale = parameters.scale.abs()
        return FeatureSizes(
            (q_gain * length).expand_as(scale),
            (k_gain * length).expand_as(scale),
            q_gain * inner.query_slope / self.eps**0.5,
            k_gain * inner.key_slope / self.eps**0.5,
            inner.bias,
        )

    def turn_push(self, at: At, features: Features, tangents: Features) -> Features:
        """The part of each tangent across its vector, over the length."""
        q_gain, k_gain = self._gains(at.parameters)
        return tangents._replace(
            q=q_gain * self._across(features.q, tangents.q),
            k=k_gain * self._across(features.k, tangents.k),
        )

    def turn_pull(self, at: At, features: Features, cotangents: Features) -> Features:
        """Its transpose: the projection is symmetric."""
        q_gain, k_gain = self._gains(at.parameters)
        return cotangents._replace(
            q=self._across(features.q, q_gain * cotangents.q),
            k=self._across(features.k, k_gain * cotangents.k),
        )

    def feature_slopes(self, at: At) -> tuple[Tensor, Tensor] | None:
        """Those at scale 1, over the scale where that is no factor; None if it is nearly 0."""
        found, scale = super().feature_slopes(self.inside(at)), at.parameters.scale
        if found is None or self.rms or not self.inner.is_scaled:
            return found
        kind = torch.finfo(scale.dtype)
        if bool((scale.abs() < kind.tiny / kind.eps).any()):  # times it matrices lose digits
            return None
        return found[0], found[1] / scale[:, None, None, None]

    @property
    def is_scaled(self) -> bool:  # type: ignore[override]
        """Not if lengths are Euclidean: the temperature stands for the layer's scale."""
        return self.rms

    def _inside(self, parameters: AttentionParameters) -> AttentionParameters:
        if not self.inner.is_scaled:
            return parameters
        other = copy(parameters)
        vars(other)["scale"] = torch.ones_like(parameters.scale)
        return other

    def inside(self, at: At) -> At:
        """With scale 1 if that is a factor of the inner queries: lengths are without it."""
        return at._replace(parameters=self._inside(at.parameters))

    def motion(self, at: At, radius: Tensor) -> tuple[Motion, Motion] | None:
        """From the least length in the ball, as for `meanfield.layers.RMSNorm`."""
        inner = self.inner.motion(self.inside(at), radius)
        if inner is None or self.inner.activation is not None:
            return None
        f, gains = self._inner_features(at), self._gains(at.parameters)
        sides = zip((f.q, f.k), inner, gains, strict=True)
        q, k = (self._moved(*side) for side in sides)
        return q, k

    def _moved(self, z: Tensor, before: Motion, gain: Any) -> Motion:
        """The motion of g ∘ z/σ(z)."""
        root = math.sqrt(z.shape[-1]) if self.rms else 1.0
        largest = torch.as_tensor(gain, dtype=z.dtype, device=z.device).abs()
        largest = largest.amax((-2, -1))[..., None] if largest.ndim > 1 else largest.max()
        peak = largest * root  # of the images, which have length √k or 1 before the gain
        length = 1 / self._inverse_length(z)[..., 0]
        if not self.eps:  # there the direction jumps, and what comes of it is ∞ or no number
            length = torch.where((z == 0).all(-1), 0.0, length)
        step, slope = (t / root for t in (before.moved, before.steepest))
        least, bent = normalised_in_ball(length, step, self.eps)
        steepest = peak * slope / least
        turned = peak * slope * bent + peak * before.bent / root / least
        moved = (peak * step / least).minimum(2 * peak)
        return Motion(torch.where(step > 0, moved, 0.0), steepest, turned)

    def _gains(self, parameters: AttentionParameters) -> tuple[Any, Any]:
        factor = parameters.scale[:, None, None] if self.rms else 1.0
        query, key = (
            gain.to(parameters.query) if isinstance(gain, Tensor) else gain
            for gain in (self.query_gain, self.key_gain)
        )
        return query * factor, key

    def _inverse_length(self, vectors: Tensor) -> Tensor:
        unit = units(vectors, math.sqrt(self.eps))
        square = (vectors / unit).square()
        square = square.mean(-1, keepdim=True) if self.rms else square.sum(-1, keepdim=True)
        square = square + self.eps / unit / unit
        away = square > 0
        return torch.where(away, torch.where(away, square, 1.0).rsqrt() / unit, 1.0)

    def _across(self, at: Tensor, along: Tensor) -> Tensor:
        """The derivative of x ↦ x/‖x‖ along y: w (y − w² x ⟨x, y⟩), w = 1/‖x‖."""
        w = self._inverse_length(at)
        unit = at * w
        share = unit * along
        part = share.mean(-1, keepdim=True) if self.rms else share.sum(-1, keepdim=True)
        return w * (along - unit * part)


@with_hints
def cosine(
    temperature: float, *, eps: float = 0.0, inner: Kernel = dot_product
) -> NormalisedFeatures:
    """temperature · ⟨q/|q|, k/|k|⟩: scaled cosine attention.

    Bounded scores, but on a ball no bounded gradient: it grows as 1/|x| towards the place where
    a query or key vanishes, unless eps > 0 (then |q| stands for √(|q|² + eps)).

    Args:
        temperature: factor of the cosine, > 0; it replaces the layer's scale.
        eps: added to the squared lengths.
        inner: the kernel whose queries and keys are normalised.
    """
    gain = number(temperature, "temperature", above=0)
    return NormalisedFeatures(gain, 1.0, number(eps, "eps", least=0), False, checked_inner(inner))


@with_hints
def qk_norm(
    query_gain: Any = 1.0, key_gain: Any = 1.0, *, eps: float = 1e-6, inner: Kernel = dot_product
) -> NormalisedFeatures:
    """scale · ⟨g_q ∘ q/rms(q), g_k ∘ k/rms(k)⟩, rms(q)² = |q|²/k + eps: RMS-normalised features.

    Args:
        query_gain: g_q, a number, one per coordinate of a head (k,), or (H, 1, k).
        key_gain: g_k, likewise.
        eps: added to the mean squares, as in RMSNorm.
        inner: the kernel whose queries and keys are normalised.
    """
    eps = number(eps, "eps", least=0)
    gains: list[Any] = []
    for gain, name in ((query_gain, "query_gain"), (key_gain, "key_gain")):
        given = own_copy(as_float_tensor(gain, name), "qk_norm")
        check_finite(given, name)
        if given.ndim > 1 and (given.ndim != 3 or given.shape[1] != 1):
            raise ValueError(
                f"{name}: expected a number, one per coordinate (k,), or (H, 1, k) for each head, "
                f"got shape {tuple(given.shape)}"
            )
        gains.append(given if given.ndim else gain)
    return NormalisedFeatures(gains[0], gains[1], eps, True, checked_inner(inner))
