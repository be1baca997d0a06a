"""Dot-product attention, scale · ⟨Qx + b_Q, Ky + b_K⟩, and L2, −scale · ‖Qx + b_Q − Ky − b_K‖²."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from meanfield.attention.kernels.kernel import (
    At,
    Features,
    FeatureSizes,
    FeatureTransform,
    Kernel,
    Motion,
    Score,
)
from meanfield.attention.parameters import AttentionParameters
from meanfield.checks import carries_derivative
from meanfield.linalg.vectors import beside


@final
@dataclass(frozen=True)
class DotProduct(Kernel):
    """scale · ⟨Qx + b_Q, Ky + b_K⟩ ([CAP24] Definition 2.1)."""

    is_linear = True
    score = Score("dot product")

    def features(
        self, parameters: AttentionParameters, points: Tensor, positions: Tensor | None
    ) -> Features:
        """Keys and values are measured from those of a point beside all the others.

        In each coordinate it is the one nearest to 0 of the interval that they span. So no point
        is farther from it than from 0, and one far atom, with mass or without, costs the others no
        digits, as it would if their mean were taken.
        """
        low, high = points.detach().aminmax(dim=-2, keepdim=True)
        centre = beside(low.clamp_min(0) + high.clamp_max(0), points)
        q, k, v = parameters.project(points - centre)
        q_centre, k_centre, v_centre = parameters.project(centre)
        q = q + q_centre
        if parameters.query_bias is not None:
            q = q + beside(parameters.query_bias[:, None, :], q)
        if parameters.key_bias is not None:
            bias = parameters.per_head(parameters.key_bias)[:, None, :]
            k_centre = k_centre + beside(bias, k_centre)
        if parameters.value_bias is not None:
            bias = parameters.per_head(parameters.value_bias)[:, None, :]
            v_centre = v_centre + beside(bias, v_centre)
        scale = beside(parameters.scale[:, None, None], q)
        return Features(scale * q, k, v, None, k_centre, v_centre)

    def feature_sizes(self, parameters: AttentionParameters, radius: float) -> FeatureSizes:
        """From norms of the matrices."""
        scale = parameters.scale.abs()
        slopes, sizes = [], []
        for matrix, bias in (
            (parameters.query, parameters.query_bias),
            (parameters.key, parameters.key_bias),
        ):
            slope = parameters.per_head(torch.linalg.matrix_norm(matrix, 2))
            shift = 0.0 if bias is None else parameters.per_head(bias.norm(dim=-1))
            slopes.append(slope)
            sizes.append(slope * radius + shift)
        return FeatureSizes(
            scale * sizes[0], sizes[1], scale * slopes[0], slopes[1], torch.zeros_like(scale)
        )

    def push(self, at: At, displacement: Tensor) -> Features:
        """The linear part of the features, which are affine."""
        q, k, v = at.parameters.project(displacement)
        return Features(at.parameters.scale[:, None, None] * q, k, v)

    def pull(self, at: At, cotangents: Features) -> Tensor:
        """Its transpose."""
        q = at.parameters.scale[:, None, None] * cotangents.q
        return at.parameters.project_transposed(q, cotangents.k, cotangents.v)

    def feature_slopes(self, at: At) -> tuple[Tensor, Tensor]:
        """The identity, twice: keys move by Kẋ, and queries by Q̃ẋ."""
        width = at.parameters.key.shape[-2]
        eye = torch.eye(width, dtype=at.points.dtype, device=at.points.device)
        eye = eye.expand(*at.points.shape[:-2], 1, 1, width, width)
        return eye, eye

    def motion(self, at: At, radius: Tensor) -> tuple[Motion, Motion]:
        """‖Q̃‖ and ‖K‖ times the radius; slopes do not change."""
        parameters = at.parameters
        query = parameters.scale[:, None, None] * parameters.query
        motions = []
        for matrices in (query, parameters.per_head(parameters.key)):
            steepest = torch.linalg.matrix_norm(matrices, 2)[:, None]
            moved = steepest * radius[..., None, None]
            motions.append(Motion(moved, steepest, torch.zeros_like(moved)))
        return motions[0], motions[1]


dot_product = DotProduct()


@final
@dataclass(frozen=True)
class L2(FeatureTransform):
    """−scale · ‖Qx − Ky‖² [KPM21]; tied when the parameters have Q = K.

    Under the softmax the part ‖Qx‖² cancels, and a dot product 2·scale·⟨Qx, Ky⟩ remains, with the
    score bias −scale·‖Ky‖² of the key. Other normalisations need the whole square, so it is kept
    in the scores, through one coordinate more: q' = (2·scale·q, −scale·‖q‖²),
    k' = (k, 1).

    With Q = K a shift of all points changes no score, and clouds far from the origin keep their
    digits. Where Q ≠ K, or a derivative in the parameters is asked for, the squares are formed
    from the origin: scores carry rounding of eps · scale · ‖Ky‖². Under a sigmoid, an
    exponential, a sink or a cap they carry eps · scale · ‖Qx‖² in any case, with Q = K of x less
    the mean: keep that square below some 1e10 in float64 (1e4 in float32) for six (three) digits.
    """

    inner = dot_product
    takes_transforms = False
    score = Score("l2")

    def is_shift_invariant(self, parameters: AttentionParameters) -> bool:
        """Where Q = K, whatever the biases; not while Q or K may change, one without the other."""
        query, key = parameters.query, parameters.key
        if carries_derivative(query) or carries_derivative(key):
            return False
        return torch.equal(query, parameters.per_head(key))

    def motion(self, at: At, radius: Tensor) -> tuple[Motion, Motion]:
        """Of 2·scale·q and k, without the squares."""
        query, key = dot_product.motion(at, radius)
        return Motion(*(2 * part for part in query)), key

    def bends(self, parameters: AttentionParameters) -> tuple[Tensor, Tensor]:
        """Of scale · ‖Qx‖² and scale · ‖Ky‖²."""
        norms = [torch.linalg.matrix_norm(m, 2) for m in (parameters.query, parameters.key)]
        scale = 2 * parameters.scale.abs()
        return scale * norms[0].square(), scale * parameters.per_head(norms[1].square())

    def turn(self, at: At, features: Features) -> Features:
        """From scale · q, k to 2·scale · q, k and the biases."""
        q, k = features.q, features.k
        lengths, sizes = q.square().sum(-1), k.square().sum(-1)
        scale = at.parameters.scale[:, None]
        return Features(
            _with_one_more(q + q, -lengths / beside(_divisor(scale), lengths)),
            _with_one_more(k, lengths.new_ones(()).expand(k.shape[:-1])),
            features.v,
            -beside(scale, sizes) * sizes,
            v_centre=features.v_centre,
        )

    def turn_push(self, at: At, features: Features, tangents: Features) -> Features:
        """The derivatives of the squares beside those of q and k."""
        scale = at.parameters.scale[:, None]
        square = 2 * (features.q * tangents.q).sum(-1) / _divisor(scale)
        return Features(
            _with_one_more(2 * tangents.q, -square),
            _with_one_more(tangents.k, square.new_zeros(()).expand(tangents.k.shape[:-1])),
            tangents.v,
            -2 * scale * (features.k * tangents.k).sum(-1),
        )

    def turn_pull(self, at: At, features: Features, cotangents: Features) -> Features:
        """Its transpose."""
        scale = at.parameters.scale[:, None, None]
        assert cotangents.b is not None
        q, square = cotangents.q[..., :-1], cotangents.q[..., -1:]
        k = cotangents.k[..., :-1] - 2 * scale * cotangents.b[..., None] * features.k
        return Features(2 * q - 2 * square * features.q / _divisor(scale), k, cotangents.v)


def _divisor(scale: Tensor) -> Tensor:
    """The scale; 1 where it is 0, and what is divided by it too."""
    return torch.where(scale == 0, 1.0, scale)


def _with_one_more(vectors: Tensor, coordinate: Tensor) -> Tensor:
    return torch.cat([vectors, coordinate[..., None]], -1)


l2 = L2()
