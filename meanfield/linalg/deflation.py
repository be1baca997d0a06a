"""What bounds need of J less its part on a few directions, and the bound of J that follows.

Let Q have orthonormal columns, M = JᵀJ, Θ = QᵀMQ, G = RᵀR with R = MQ − QΘ, and U ≥ ‖J(I − QQᵀ)‖.
Then ‖J‖² ≤ λ for every λ > U² with (λI − Θ) − G/(λ − U²) ⪰ 0: with respect to the range of Q and
its complement M is [Θ, R′ᵀ; R′, C] with C ⪯ U²I and R′ᵀR′ = G, so that λI − M ⪰ 0 by the Schur
complement. Where U is below σ and the columns of Q are singular vectors, the least λ is σ² itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meanfield.linalg.blocks import Rows, TokenBlocks

# Halvings of the interval for λ, to the last digit.
_HALVINGS = 60


@dataclass(frozen=True, eq=False)
class Deflated:
    """The blocks of E = J − JQQᵀ, none of which is formed.

    Attributes:
        whole: the blocks of J.
        basis: Q, (n, d, k).
        images: A = JQ as it was computed, (n, e, k): ‖J(I − QQᵀ)‖ ≤ ‖J − AQᵀ‖ whatever A is.
    """

    whole: TokenBlocks
    basis: Tensor
    images: Tensor

    @classmethod
    def of(cls, whole: TokenBlocks, basis: Tensor) -> Deflated:
        """With A by products, from orthonormal vectors (n, d, k)."""
        rows, n = Rows(0, whole.n), whole.n
        each = basis.double().unbind(-1)
        columns = [whole.forth(vector.expand(n, *vector.shape), rows) for vector in each]
        return cls(whole, basis.double(), torch.stack(columns, -1))

    @property
    def n(self) -> int:
        """Number of tokens."""
        return self.whole.n

    @property
    def shape(self) -> tuple[int, int, int]:
        """n, e, d."""
        return self.whole.shape

    def back(self, x: Tensor, rows: Rows) -> Tensor:
        """Eᵢⱼᵀxᵢ for x (rows, e): (rows, n, d)."""
        shares = torch.einsum("rek,re->rk", self.images[rows.slice], x)
        return self.whole.back(x, rows) - torch.einsum("ndk,rk->rnd", self.basis, shares)

    def forth(self, y: Tensor, rows: Rows) -> Tensor:
        """Σⱼ Eᵢⱼyᵢⱼ for y (rows, n, d): (rows, e)."""
        shares = torch.einsum("ndk,rnd->rk", self.basis, y)
        taken = torch.einsum("rek,rk->re", self.images[rows.slice], shares)
        return self.whole.forth(y, rows) - taken

    def seen(self, rows: Rows) -> Tensor:
        """All columns: E is not masked where J is."""
        return torch.ones_like(self.whole.seen(rows))

    def gram(self, s: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Σⱼ sⱼ E_gjE_gjᵀ = R_g − XAᵀ − AXᵀ + A(Σⱼ sⱼ QⱼᵀQⱼ)Aᵀ, X = Σⱼ sⱼ J_gjQⱼ."""
        found, slack = self.whole.gram(s, rows)
        weights = s.repeat_interleave(rows.size, 0)[..., None]
        columns = [self.whole.forth(weights * vector, rows) for vector in self.basis.unbind(-1)]
        X, A = (rows.grouped(t).flatten(1, 2) for t in (
            torch.stack(columns, -1), self.images[rows.slice]))  # fmt: skip
        inner = torch.einsum("gn,ndk,ndl->gkl", s, self.basis, self.basis)
        crossed = X @ A.mT
        found = found - crossed - crossed.mT + A @ inner @ A.mT
        return found, slack + self._rounding(s, rows, A, inner)

    def _rounding(self, s: Tensor, rows: Rows, A: Tensor, inner: Tensor) -> Tensor:
        """Of the products with A, and of X by the sizes of the blocks."""
        n, e, d = self.shape
        room = 16 * (n + e + d + self.basis.shape[-1]) * torch.finfo(s.dtype).eps
        lengths = torch.linalg.vector_norm(self.basis, dim=(-2, -1))
        sizes = rows.grouped(self.whole.sizes(rows)).sum(1)
        size = torch.linalg.vector_norm(A, dim=(-2, -1))
        trace = inner.diagonal(0, -2, -1).sum(-1)
        return room * (2 * size * (s * sizes * lengths).sum(-1) + size**2 * trace)


def joined_bound(deflated: Deflated, rest: Tensor) -> Tensor:
    """The bound of ‖J‖ from U = `rest`, raised by the rounding of the products.

    A product with J errs by at most γS, S ≥ ‖[‖Jᵢⱼ‖]‖ the norm of the sizes of the blocks, by
    Schur's test. So does each column of A, and hence Θ by 2√k γS‖A‖ and R by √k γS‖A‖ twice.
    """
    whole, Q, A = deflated.whole, deflated.basis, deflated.images
    (n, e, d), k, eps = deflated.shape, Q.shape[-1], torch.finfo(Q.dtype).eps
    rows, flat, image = Rows(0, n), Q.flatten(0, 1), A.flatten(0, 1)
    back = torch.stack([whole.back(a, rows).sum(0) for a in A.unbind(-1)], -1).flatten(0, 1)
    theta = image.mT @ image
    defect = back - flat @ theta
    size = whole.sizes(rows)
    gamma = 4 * (n + 2 * e + 2 * d) * eps * (size.sum(0).max() * size.sum(1).max()).sqrt()
    length = torch.linalg.matrix_norm(image, 2)
    error = k**0.5 * gamma * length + (n * e + k) * eps * length.square()
    lost = torch.linalg.matrix_norm(flat.mT @ flat - torch.eye(k).to(Q), 2) + k * eps
    short = 2 * torch.linalg.matrix_norm(defect, 2) * error + error.square()
    eye = torch.eye(k).to(Q)
    theta, gram = theta + 2 * error * eye, defect.mT @ defect + 4 * short * eye
    found = _least(theta, gram, (rest * (1 + lost)).square())
    return (found * (1 + 4 * lost)).sqrt()


def _least(theta: Tensor, gram: Tensor, rest: Tensor) -> Tensor:
    """The least λ > rest with (λI − Θ)(λ − rest) − G ⪰ 0, up to bisection from above."""
    room = (1 + 8 * len(theta) * torch.finfo(theta.dtype).eps) - 1
    low = torch.maximum(torch.linalg.eigvalsh(theta)[-1].clamp_min(0), rest) * (1 + room)
    high = low + torch.linalg.matrix_norm(gram, 2).sqrt()
    eye = torch.eye(len(theta)).to(theta)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        part = (middle * eye - theta) * (middle - rest) - gram
        if middle > rest and bool(torch.linalg.eigvalsh(part)[0] >= 0):
            high = middle
        else:
            low = middle
    return high * (1 + room)
