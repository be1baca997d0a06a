"""Dot-product attention: the score is scale · ⟨Qx + b_Q, Ky + b_K⟩."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from meanfield.attention.kernels.kernel import (
    At,
    Features,
    FeatureSizes,
    Kernel,
    Motion,
    Score,
)
from meanfield.attention.parameters import AttentionParameters


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
        held = points.detach()
        low, high = held.amin(-2, keepdim=True), held.amax(-2, keepdim=True)
        return measured_from(parameters, points, low.clamp_min(0) + high.clamp_max(0))

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


def measured_from(parameters: AttentionParameters, points: Tensor, centre: Tensor) -> Features:
    """scale · (Qx + b_Q), Kx and Vx, the last two measured from their values at the centre."""
    q, k, v = parameters.project(points - centre)
    q_centre, k_centre, v_centre = parameters.project(centre)
    q = q + q_centre
    if parameters.query_bias is not None:
        q = q + parameters.query_bias[:, None, :]
    if parameters.key_bias is not None:
        k_centre = k_centre + parameters.per_head(parameters.key_bias)[:, None, :]
    if parameters.value_bias is not None:
        v_centre = v_centre + parameters.per_head(parameters.value_bias)[:, None, :]
    scale = parameters.scale[:, None, None]
    return Features(scale * q, k, v, None, k_centre, v_centre)


dot_product = DotProduct()
