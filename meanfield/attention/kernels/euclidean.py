"""L2 attention: the score is −scale · ‖Qx + b_Q − Ky − b_K‖²."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from meanfield.attention.kernels.bilinear import dot_product, measured_from
from meanfield.attention.kernels.kernel import At, Features, FeatureTransform, Motion, Score
from meanfield.attention.parameters import AttentionParameters
from meanfield.checks import carries_derivative


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
    from the origin: scores carry rounding of eps · scale · ‖Ky‖².
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

    def _inner_features(self, at: At) -> Features:
        if not self.is_shift_invariant(at.parameters):
            return super()._inner_features(at)
        # Attention has taken the mean off; that of the atoms would count those without mass.
        origin = torch.zeros_like(at.points[..., :1, :])
        return measured_from(at.parameters, at.points, origin).whole_keys()

    def turn(self, at: At, features: Features) -> Features:
        """From scale · q, k to 2·scale · q, k and the biases."""
        scale = at.parameters.scale[:, None]
        square = features.q.square().sum(-1) / scale
        return Features(
            _with_one_more(2 * features.q, -square),
            _with_one_more(features.k, square.new_ones(()).expand(features.k.shape[:-1])),
            features.v,
            -scale * features.k.square().sum(-1),
            v_centre=features.v_centre,
        )

    def turn_push(self, at: At, features: Features, tangents: Features) -> Features:
        """The derivatives of the squares beside those of q and k."""
        scale = at.parameters.scale[:, None]
        square = 2 * (features.q * tangents.q).sum(-1) / scale
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
        return Features(2 * q - 2 * square * features.q / scale, k, cotangents.v)


def _with_one_more(vectors: Tensor, coordinate: Tensor) -> Tensor:
    return torch.cat([vectors, coordinate[..., None]], -1)


l2 = L2()
