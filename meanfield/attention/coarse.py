"""A coarse model of attention's linearisation: few shapes over the atoms, every feature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meanfield.linalg import CoarseSpace
from meanfield.linalg.vectors import normalised

if TYPE_CHECKING:
    from meanfield.attention.heads import JoinedHeads
    from meanfield.attention.tangent import AttentionTangent

__all__ = ["coarse_space", "diffuse_shape", "turning_shape"]

# Passes over M for the diffuse shape: little beside a product with J.
_SMOOTHING = 3


def coarse_space(tangent: AttentionTangent) -> CoarseSpace:
    """Displacements ηⱼ = Σ_r Φⱼᵣ y_r of three shapes Φ, with ZᵀJΦ.

    The top singular vector of J is nearly of rank one in (atom, feature): x ⊗ y with x near the
    `diffuse_shape` where attention is spread out, near the `turning_shape` where it is
    concentrated, or one atom alone, that of the largest turn, where few atoms have most of the
    weight. What makes a Krylov iteration slow are the features, since the singular values of a
    layer's matrices are crowded at the top; the model has all of them. Z is M Φ, summed over the
    heads and made orthonormal. (Shapes and model are this package's own, found by measurement.)
    """
    turning = turning_shape(tangent)
    alone = torch.nn.functional.one_hot(turning.argmax(-1), turning.shape[-1]).to(turning.dtype)
    shapes = _orthonormal(torch.stack([diffuse_shape(tangent), turning, alone], -1))
    model = _Compression.of(tangent, shapes)
    par = tangent.parameters
    # The diffuse shape is the first: with the top directions of the values it is near the top.
    directions = tangent.heads.value_directions()
    start = directions.new_zeros(len(directions), shapes.shape[-1], par.dim)
    start[:, 0] = directions
    start = start.unflatten(1, (*(1 for _ in shapes.shape[:-2]), -1))
    return CoarseSpace(
        shapes=tangent.interaction.unsort(shapes),
        matvec=model.matvec,
        rmatvec=model.rmatvec,
        in_shape=(shapes.shape[-1], par.dim),
        out_shape=(model.value.shape[-2], par.out_dim),
        start=start,
    )


def diffuse_shape(tangent: AttentionTangent) -> Tensor:
    """The x ≥ 0 that x ⊗ y is long for in the value part Σ_h M^h ⊗ W^h V^h of J, roughly.

    From power iteration with Σ_h M^hᵀ M^h; largest entry 1, shape (*batch, n).
    """
    logs = tangent.interaction.log_weights
    x = tangent.alive.to(logs.dtype)
    if not tangent.uniform:
        x = (0.5 * (logs - logs.amax(-1, keepdim=True))).exp()
    # One pass where each recomputes the softmax.
    for _ in range(_SMOOTHING if tangent.kept else 1):
        x = _smoothed(tangent, x)
    return x


def _smoothed(tangent: AttentionTangent, x: Tensor) -> Tensor:
    """Σ_h M^hᵀ M^h x, of largest entry 1; shape (*batch, n)."""
    out = torch.zeros_like(x)
    for rows in tangent.rows:
        m, j = tangent.transition(rows)[1], rows.block.columns
        seen = m @ x[..., None, j, None]
        # As a row: the transposed product of a batch with a column is 30 times slower.
        out[..., j] += (seen.mT @ m).squeeze(-2).sum(-2)
    peak = out.amax(-1, keepdim=True)
    # M of atoms of weight e^{−900} is beyond the root of the number range: x is good enough.
    return torch.where((peak > 0) & torch.isfinite(peak), out / peak, x)


def turning_shape(tangent: AttentionTangent) -> Tensor:
    """How far moving one key alone moves the outputs, at most.

    (Σ_h Σᵢ Mᵢⱼ² |vⱼ − oᵢ|² |Kᵀqᵢ|²)^½, large at the atoms that decide where others look. In the
    adversarial configurations it is the shape of the top singular vector, to which a random
    displacement is almost orthogonal. Shape (*batch, n).
    """
    outputs, values = tangent.outputs, tangent.interaction.values
    key = tangent.parameters.key
    reach = ((tangent.queries @ (key @ key.mT)) * tangent.queries).sum(-1)
    squares = torch.zeros_like(reach)
    for rows in tangent.rows:
        i, j = rows.block
        weight = torch.cdist(outputs[..., i, :], values[..., j, :])
        weight = weight.mul_(tangent.transition(rows)[1]).square_()
        squares[..., j] += (reach[..., None, i] @ weight).squeeze(-2)
    return squares.sum(-2).sqrt()


def _orthonormal(shapes: Tensor) -> Tensor:
    """An orthonormal basis of the columns of (*batch, n, p), completed where they depend."""
    columns = torch.where(torch.isfinite(shapes), shapes, 0.0).mT
    return torch.linalg.qr(normalised(columns)[0].mT).Q


@dataclass(frozen=True, eq=False)
class _Compression:
    """ZᵀJΦ by head: the features of p shapes to those of q.

    Attributes:
        heads: the layer's matrices side by side.
        turn: what moved queries and keys do, (*batch, H, q·v, p·2k).
        value: ZᵀMΦ, what moved values do, (*batch, H, q, p).
    """

    heads: JoinedHeads
    turn: Tensor
    value: Tensor

    @classmethod
    def of(cls, tangent: AttentionTangent, shapes: Tensor) -> _Compression:
        """The model of a tangent on these shapes (*batch, n, p), in the interaction's order."""
        interaction, queries, outputs = tangent.interaction, tangent.queries, tangent.outputs
        keys, values = interaction.keys, interaction.values
        # Φ ⊗ (v, 1), (*batch, H, n, p·(v + 1)): M of it gives Σⱼ Mᵢⱼ Φⱼ vⱼ and (MΦ)ᵢ at once.
        carried = torch.cat([values, torch.ones_like(values[..., :1])], -1)
        carried = (shapes[..., None, :, :, None] * carried[..., None, :]).flatten(-2)
        moved, mean_keys = torch.empty_like(carried), torch.empty_like(queries)
        for rows in tangent.rows:
            i, j = rows.block
            p, m = tangent.transition(rows)
            moved[..., i, :] = m @ carried[..., j, :]
            mean_keys[..., i, :] = p @ keys[..., j, :]
        moved = moved.unflatten(-1, (shapes.shape[-1], -1))
        means = moved[..., -1]
        spread = moved[..., :-1] - means[..., None] * outputs[..., None, :]
        images = _orthonormal(means.sum(-3))
        value = images[..., None, :, :].mT @ means
        by_key = _moments(images[..., None, :, :], spread.flatten(-2), queries)
        # ZᵢₛΦᵢᵣ, and Σᵢ ZᵢₛΦᵢᵣPᵢⱼ of every head.
        both = (images[..., :, None] * shapes[..., None, :]).flatten(-2)[..., None, :, :]
        seen = both.new_zeros(*keys.shape[:-2], both.shape[-1], keys.shape[-2])
        for rows in tangent.rows:
            i, j = rows.block
            seen[..., j] += both[..., i, :].mT @ tangent.transition(rows)[0]
        # Σᵢ ZᵢₛΦᵢᵣ Cᵢ, Cᵢ the covariance of values and keys that i sees.
        by_query = _moments(seen.mT, values, keys) - _moments(both, outputs, mean_keys)
        size = shapes.shape[-1], values.shape[-1]
        turn = torch.cat([by_query.unflatten(-3, (-1, size[0])), by_key.unflatten(-2, size)], -1)
        turn = turn.transpose(-2, -3).flatten(-2).flatten(-3, -2)
        return cls(tangent.heads, turn, value)

    def matvec(self, y: Tensor) -> Tensor:
        """ZᵀJΦy, (k, *batch, p, d) → (k, *batch, q, d_out)."""
        q_dot, k_dot, v_dot = self.heads.project(y)
        turned = _each(torch.cat([q_dot, k_dot], -1).flatten(-2), self.turn.mT)
        shape = self.value.shape[-2], v_dot.shape[-1]
        return self.heads.join(turned.unflatten(-1, shape) + self.value @ v_dot)

    def rmatvec(self, zeta: Tensor) -> Tensor:
        """ΦᵀJᵀZζ, (k, *batch, q, d_out) → (k, *batch, p, d)."""
        y = self.heads.split(zeta)
        p = self.value.shape[-1]
        joined = y.new_empty(*zeta.shape[:-2], p, self.heads.inner.shape[0])
        q_bar, k_bar, v_bar = self.heads.parts(joined)
        turned = _each(y.flatten(-2), self.turn).unflatten(-1, (p, -1))
        q_bar[...], k_bar[...] = turned.chunk(2, -1)
        v_bar[...] = self.value.mT @ y
        return joined @ self.heads.inner


def _each(vectors: Tensor, matrices: Tensor) -> Tensor:
    """Each of k vectors (k, *, a) times matrices (*, a, b): (k, *, b)."""
    # As rows: transposed products of a batch with columns are many times slower.
    return (vectors.movedim(0, -2) @ matrices).movedim(-2, 0)


def _moments(weights: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Σᵢ wᵢ ⊗ aᵢ ⊗ bᵢ of (*, n, w), (*, n, a) and (*, n, b); (*, w, a, b)."""
    # One weight at a time: all at once would take w times the room.
    parts = [(weight[..., None] * first).mT @ second for weight in weights.unbind(-1)]
    return torch.stack(parts, -3)
