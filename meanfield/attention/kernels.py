"""What two tokens say to each other: the unnormalised log-weights of attention."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from meanfield.attention.parameters import AttentionParameters

__all__ = ["Kernel", "Projections", "dot_product"]


@dataclass(frozen=True, eq=False)
class Projections:
    """Keys and values of the atoms, (*batch, H, n, k) and (*batch, H, n, v), without biases.

    Values are taken about `centre` (*batch, H, 1, v) and keys about a point of their own: the
    softmax does not see a shift of the keys, an average carries a shift of the values through,
    and differences between atoms that lie close together far from the origin keep their digits.
    """

    keys: Tensor
    values: Tensor
    centre: Tensor


@dataclass(frozen=True)
class Kernel:
    """A bilinear kernel: log κ(x, y) = scale · ⟨Q x + b_Q, K y⟩.

    A kernel says how points become queries, keys and values. The place for others (L2 attention
    adds a key-dependent log-weight, [KPM21]) is here.
    """

    name: str

    def queries(self, parameters: AttentionParameters, points: Tensor) -> Tensor:
        """scale · (Q x + b_Q), shape (*batch, H, n, k)."""
        q = points[..., None, :, :] @ parameters.query.mT
        if parameters.query_bias is not None:
            q = q + parameters.query_bias[:, None, :]
        return q * parameters.scale[:, None, None]

    def project(self, parameters: AttentionParameters, points: Tensor) -> Projections:
        """Keys and values of the atoms."""
        centre = points.mean(-2, keepdim=True)
        atoms = (points - centre)[..., None, :, :]
        return Projections(
            keys=atoms @ parameters.key.mT,
            values=atoms @ parameters.value.mT,
            centre=centre[..., None, :, :] @ parameters.value.mT,
        )


dot_product = Kernel("dot_product")
