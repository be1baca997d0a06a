"""A coarse model of attention's linearisation: few shapes over the atoms, every feature."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meanfield.linalg import CoarseSpace
from meanfield.linalg.vectors import normalised

if TYPE_CHECKING:
    from meanfield.attention.heads import JoinedHeads
    from meanfield.attention.tangent import AttentionTangent

__all__ = ["coarse_space", "diffuse_shape", "turning_shape"]

# Passes over M for the diffuse shape, and over the model for the directions that turn most: little
# beside a product with J.
_SMOOTHING, _POWERS = 3, 2
# How many times farther than one value one key must be able to move the outputs for turns to be
# all that matters. In the adversarial configurations it is 6 to 11, for GPT-2-sized layers of
# LayerNormed inputs 1.2.
_DOMINATED = 4.0


def coarse_space(tangent: AttentionTangent) -> CoarseSpace:
    """Displacements ηⱼ = Σ_r Φⱼᵣ y_r of a few shapes Φ, with ZᵀJΦ.

    The top singular vector of J is nearly of rank one in (atom, feature): x ⊗ y with x near the
    `diffuse_shape` where attention is spread out, near the `turning_shape` where it is
    concentrated, or one atom alone, that of the largest turn, where few atoms have most of the
    weight. Where turns are all that matters, the diffuse shape is left out. What makes a Krylov
    iteration slow are the features, since the singular values of a layer's matrices are crowded at
    the top; the model has all of them. Z is M Φ, summed over the heads and made orthonormal.
    (Shapes and model are this package's own, found by measurement.)
    """
    turning, carrying = _alone(tangent)
    alone = torch.nn.functional.one_hot(turning.argmax(-1), turning.shape[-1]).to(turning.dtype)
    dominated = bool((turning.amax(-1) > _DOMINATED * carrying.amax(-1)).all())
    several = [turning, alone] if dominated else [diffuse_shape(tangent), turning, alone]
    shapes = _orthonormal(torch.stack(several, -1))
    model, par = _Compression.of(tangent, shapes), tangent.parameters
    if dominated:
        start = model.turned()
    else:
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

    (Σ_h Σᵢ Mᵢⱼ² |vⱼ − oᵢ|² |Kᵀqᵢ|²)^½, with |K|·|qᵢ| for the last; large at the atoms that decide
    where others look. In the adversarial configurations it is the shape of the top singular
    vector, to which a random displacement is almost orthogonal. Shape (*batch, n).
    """
    return _alone(tangent)[0]


def _alone(tangent: AttentionTangent) -> tuple[Tensor, Tensor]:
    """How far moving one key alone, and one value alone, moves the outputs, at most.

    `turning_shape`, and (Σ_h Σᵢ Mᵢⱼ² |V|²)^½; Frobenius norms. Shape (*batch, n) each.
    """
    outputs, values, par = tangent.outputs, tangent.interaction.values, tangent.parameters
    reach = tangent.queries.square().sum(-1) * par.key.square().sum((-2, -1))[:, None]
    gain = par.value.square().sum((-2, -1))[:, None]
    turning, carrying = torch.zeros_like(reach), torch.zeros_like(reach)
    for rows in tangent.rows:
        i, j = rows.block
        m = tangent.transition(rows)[1]
        weight = torch.cdist(outputs[..., i, :], values[..., j, :]).mul_(m).square_()
        turning[..., j] += (reach[..., None, i] @ weight).squeeze(-2)
        carrying[..., j] += gain * m.square().sum(-2)
    return turning.sum(-2).sqrt(), carrying.sum(-2).sqrt()


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
        size, width = shapes.shape[-1], keys.shape[-1]
        means = queries.new_empty(*queries.shape[:-1], size)
        mean_keys = torch.empty_like(queries)
        spread = values.new_empty(*values.shape[:-1], size, values.shape[-1])
        # Σⱼ Mᵢⱼ Φⱼ (vⱼ − oᵢ), and (MΦ)ᵢ.
        for rows in tangent.rows:
            i, j = rows.block
            p, m = tangent.transition(rows)
            mean_keys[..., i, :] = p @ keys[..., j, :]
            means[..., i, :] = m @ shapes[..., None, j, :]
            for r in range(size):
                spread[..., i, r, :] = m @ (shapes[..., None, j, r, None] * values[..., j, :])
        spread -= means[..., None] * outputs[..., None, :]
        images = _orthonormal(means.sum(-3))
        value = images[..., None, :, :].mT @ means
        # ZᵢₛΦᵢᵣ, and Σᵢ ZᵢₛΦᵢᵣPᵢⱼ of every head.
        both = (images[..., :, None] * shapes[..., None, :]).flatten(-2)[..., None, :, :]
        seen = both.new_zeros(*keys.shape[:-2], both.shape[-1], interaction.n)
        for rows in tangent.rows:
            i, j = rows.block
            seen[..., j] += both[..., i, :].mT @ tangent.transition(rows)[0]
        turn = values.new_empty(*keys.shape[:-2], size, values.shape[-1], size, 2 * width)
        for s, r in product(range(size), repeat=2):
            by_query, by_key = turn[..., s, :, r, :].split(width, -1)
            # Σᵢ ZᵢₛΦᵢᵣ Cᵢ, Cᵢ the covariance of values and keys that i sees.
            c = s * size + r
            by_query[...] = _moment(seen[..., c, :], values, keys)
            by_query -= _moment(both[..., c], outputs, mean_keys)
            by_key[...] = _moment(images[..., None, :, s], spread[..., r, :], queries)
        return cls(tangent.heads, turn.flatten(-2).flatten(-3, -2), value)

    def turned(self) -> Tensor:
        """Two unit y (2, *batch, p, d) that turn the outputs much by queries and keys, roughly."""
        # Of each head its top two directions by subspace iteration, weighed by what they do.
        most = self.turn.abs().amax(-2)
        signs = torch.ones_like(most)
        signs[..., ::2] = -1.0
        x = torch.stack([most, signs * most], -2)
        for _ in range(_POWERS):
            turned = torch.linalg.qr(x.mT).Q.mT @ self.turn.mT
            peak = turned.abs().amax((-3, -2, -1), keepdim=True)
            x = (turned / torch.where(peak > 0, peak, 1.0)) @ self.turn
        y = self._pulled(x.movedim(-2, 0), 0.0).nan_to_num(0.0, 0.0, 0.0)
        return normalised(y.flatten(-2))[0].reshape(y.shape)

    def matvec(self, y: Tensor) -> Tensor:
        """ZᵀJΦy, (k, *batch, p, d) → (k, *batch, q, d_out)."""
        q_dot, k_dot, v_dot = self.heads.project(y)
        turned = _each(torch.cat([q_dot, k_dot], -1).flatten(-2), self.turn.mT)
        shape = self.value.shape[-2], v_dot.shape[-1]
        return self.heads.join(turned.unflatten(-1, shape) + self.value @ v_dot)

    def rmatvec(self, zeta: Tensor) -> Tensor:
        """ΦᵀJᵀZζ, (k, *batch, q, d_out) → (k, *batch, p, d)."""
        y = self.heads.split(zeta)
        return self._pulled(_each(y.flatten(-2), self.turn), self.value.mT @ y)

    def _pulled(self, turned: Tensor, carried: Tensor | float) -> Tensor:
        """From queries and keys (k, *batch, H, p·2k) and values to features (k, *batch, p, d)."""
        p = self.value.shape[-1]
        joined = turned.new_empty(*turned.shape[:-2], p, self.heads.inner.shape[0])
        q_bar, k_bar, v_bar = self.heads.parts(joined)
        q_bar[...], k_bar[...] = turned.unflatten(-1, (p, -1)).chunk(2, -1)
        v_bar[...] = carried
        return joined @ self.heads.inner


def _each(vectors: Tensor, matrices: Tensor) -> Tensor:
    """Each of k vectors (k, *, a) times matrices (*, a, b): (k, *, b)."""
    # As rows: transposed products of a batch with columns are many times slower.
    return (vectors.movedim(0, -2) @ matrices).movedim(-2, 0)


def _moment(weights: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Σᵢ wᵢ aᵢ ⊗ bᵢ of (*, n), (*, n, a) and (*, n, b); (*, a, b)."""
    return (weights[..., None] * first).mT @ second
