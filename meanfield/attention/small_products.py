"""Products with the linearisation of attention between few atoms, in NumPy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from meanfield.checks import is_host, to_host

if TYPE_CHECKING:
    from meanfield.attention.tangent import AttentionTangent

# Entries of the matrices of all heads up to which the dozen calls of a product take longer than
# its arithmetic: at 64 atoms in 16 dimensions 70 µs here, and 200 to 400 by calls of torch.
_FEW_ENTRIES = 2**16


class SmallProducts:
    """J and Jᵀ of an `AttentionTangent`, whose formulas these are, without a batch.

    Args:
        tangent: one for which `fit` holds.
    """

    def __init__(self, tangent: AttentionTangent) -> None:
        assert tangent.rows.kept is not None
        ((g, n, m),) = tangent.rows.kept
        self.same = n is g  # tilts are 1
        self.g, self.n, self.m = (to_host(matrix) for matrix in (g, n, m))
        self.q, self.k, self.v = (to_host(part) for part in (tangent.q, tangent.k, tangent.v))
        self.means = to_host(tangent.rows.means)
        # Of displacements to q̇, k̇ and v̇ at once, (H, d, 2k + v), and of the heads to the output.
        self.push = np.concatenate([to_host(part[0, :, 0]) for part in tangent.unit_pushes], -1)
        output = tangent.weights.parameters.output
        self.join = None if output is None else _transposed(to_host(output))
        most, tilts = tangent.rows.most, tangent.rows.tilts
        self.tilts = None if tilts is None else to_host(tilts)
        self.most = None  # into the flat matrices
        if most is not None:
            first = np.arange(self.g[..., 0].size).reshape(*self.g.shape[:-1], 1)
            self.most = first * self.g.shape[-1] + to_host(most)

    @staticmethod
    def fit(tangent: AttentionTangent) -> bool:
        """Whether features are linear and one small block of matrices is kept, on the host."""
        weights, n_heads = tangent.weights, len(tangent.q)
        return (
            is_host(weights.points.device)
            and weights.kernel.is_linear
            and weights.order is None
            and n_heads == weights.parameters.n_heads  # no batch
            and n_heads * weights.n**2 <= _FEW_ENTRIES
            and len(tangent.blocks) == 1
            and tangent.rows.kept is not None
        )

    def matvec(self, displacement: np.ndarray) -> np.ndarray:
        """Jε, (1, n·d) to (1, n·d_out); see `AttentionTangent.matvec`."""
        moved = displacement.reshape(-1, self.push.shape[-2]) @ self.push
        width = self.q.shape[-1]
        q_dot, k_dot, v_dot = (
            moved[..., :width],
            moved[..., width : 2 * width],
            moved[..., 2 * width :],
        )
        w = q_dot @ _transposed(self.k)
        if self.same:
            w += self.q @ _transposed(k_dot)
            self._shift(w)
            w *= self.g
        else:
            x = self.q @ _transposed(k_dot)
            self._shift(w)
            w *= self.g
            if self.most is not None:
                w -= self.g * (x.reshape(-1)[self.most] * self.tilts)
            w += x * self.n
        heads = w @ self.v - w.sum(-1, keepdims=True) * self.means + self.m @ v_dot
        if self.join is not None:
            heads = heads @ self.join
        return heads.sum(0).reshape(1, -1)

    def _shift(self, w: np.ndarray) -> None:
        if self.most is not None:
            w -= w.reshape(-1)[self.most]

    def rmatvec(self, covector: np.ndarray) -> np.ndarray:
        """Jᵀζ, the other way; see `AttentionTangent.rmatvec`."""
        y = covector.reshape(1, self.g.shape[-2], -1)
        if self.join is not None:
            y = y @ _transposed(self.join)
        g = y @ _transposed(self.v) - (y * self.means).sum(-1, keepdims=True)
        by_key = g if self.same else g * self.n
        g *= self.g
        if self.most is not None:
            flat = g.reshape(-1)
            flat[self.most] = 0.0
            balance = -g.sum(-1, keepdims=True)
            flat[self.most] = balance
            if not self.same:
                by_key.reshape(-1)[self.most] = balance * self.tilts
        pulled = np.concatenate(
            [g @ self.k, _transposed(by_key) @ self.q, _transposed(self.m) @ y], -1
        )
        return (pulled @ _transposed(self.push)).sum(0).reshape(1, -1)


def _transposed(matrices: np.ndarray) -> np.ndarray:
    return matrices.swapaxes(-1, -2)  # NumPy 1 has no .mT
