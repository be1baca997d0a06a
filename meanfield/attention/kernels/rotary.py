"""Rotary positions: queries and keys turned by angles that grow with position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

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
from meanfield.checks import as_bool, count, number
from meanfield.habits import with_hints
from meanfield.linalg.vectors import beside


@final
@dataclass(frozen=True)
class Rotary(FeatureTransform):
    """Pair m of query and key coordinates turned by length · s · frequencies[m]; see `rotary`."""

    base: float
    dim: int | None
    frequencies: tuple[float, ...] | None
    length: float
    interleaved: bool
    inner: Kernel = dot_product
    needs_positions = True

    def turn(self, at: At, features: Features) -> Features:
        """R(s) q and R(s) k."""
        return self._rotated(features, at.positions, 1.0)

    def feature_sizes(self, parameters: AttentionParameters, radius: float) -> FeatureSizes | None:
        """Rotations keep lengths."""
        return self.inner.feature_sizes(parameters, radius)

    def turn_push(self, at: At, features: Features, tangents: Features) -> Features:
        """Linear in q and k."""
        return self._rotated(tangents, at.positions, 1.0)

    def turn_pull(self, at: At, features: Features, cotangents: Features) -> Features:
        """A rotation backwards."""
        return self._rotated(cotangents, at.positions, -1.0)

    def motion(self, at: At, radius: Tensor) -> tuple[Motion, Motion] | None:
        """The inner kernel's: rotations keep lengths."""
        return self.inner.motion(at, radius)

    def _rotated(self, features: Features, positions: Tensor | None, sign: float) -> Features:
        if positions is None:
            raise ValueError("rotary: expected a measure with positions, got one without")
        width = features.q.shape[-1] if self.dim is None else self.dim
        if width % 2 or features.q.shape[-1] < width:
            raise ValueError(
                f"rotary: expected an even number of coordinates to turn, at most the "
                f"{features.q.shape[-1]} of a query, got {width}; give dim="
            )
        angles = (self.length * positions[..., None, :, None]) * self._frequencies(
            width, positions
        )
        cos, sin = angles.cos(), sign * angles.sin()
        return features._replace(
            q=self._turned(features.q, cos, sin), k=self._turned(features.k, cos, sin)
        )

    def _frequencies(self, width: int, like: Tensor) -> Tensor:
        numbers = self.frequencies
        if numbers is None:
            numbers = tuple(self.base ** (-2 * m / width) for m in range(width // 2))
        return torch.as_tensor(numbers, dtype=like.dtype, device=like.device)

    def _turned(self, vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        width, axis = 2 * cos.shape[-1], -1 if self.interleaved else -2
        turned, rest = vectors[..., :width], vectors[..., width:]
        x, y = turned.unflatten(-1, (-1, 2) if self.interleaved else (2, -1)).unbind(axis)
        cos, sin = beside(cos, x), beside(sin, x)
        both = torch.stack([x * cos - y * sin, y * cos + x * sin], axis)
        return torch.cat([both.flatten(-2), rest], -1)


@with_hints
def rotary(
    base: float = 10_000.0,
    *,
    dim: int | None = None,
    length: float = 1.0,
    interleaved: bool = False,
    frequencies: Sequence[float] | None = None,
    inner: Kernel = dot_product,
) -> Rotary:
    """⟨R(s) q, R(t) k⟩ with rotations R: scores that depend on positions through s − t.

    Pair m of the first `dim` coordinates is turned by the angle length · s · base^{−2m/dim}.
    Positions of a measure lie in [0, 1]; for n tokens at i/n, ``length=n`` gives the angles of
    integer positions.

    Args:
        base: of the frequencies, > 0.
        dim: how many coordinates of queries and keys are turned, even; all of a head if None,
            fewer for partial rotary positions.
        length: of the sequence that [0, 1] stands for.
        interleaved: whether pair m is (2m, 2m + 1) instead of (m, m + p), p the number of pairs.
        frequencies: in place of base^{−2m/dim}, for scaled variants; dim/2 numbers.
        inner: the kernel whose queries and keys are turned.
    """
    base, length = number(base, "base", above=0), number(length, "length", above=0)
    interleaved = as_bool(interleaved, "interleaved")
    dim = None if dim is None else count(dim, "dim", least=2)
    if dim is not None and dim % 2:
        raise ValueError(f"dim: expected an even number ≥ 2, got {dim}")
    if frequencies is not None:
        frequencies = tuple(number(f, "frequencies") for f in frequencies)
        dim = 2 * len(frequencies) if dim is None else dim
        if 2 * len(frequencies) != dim:
            raise ValueError(f"frequencies: expected {dim // 2} numbers, got {len(frequencies)}")
    return Rotary(base, dim, frequencies, length, interleaved, checked_inner(inner))
