"""What bounds need of J less its part on a few directions, and the bound of J that follows.

Let Q have orthonormal columns, M = JᵀJ, Θ = QᵀMQ, G = RᵀR with R = MQ − QΘ, and U ≥ ‖J(I − QQᵀ)‖.
Then ‖J‖² ≤ λ for every λ > U² with (λI − Θ) − G/(λ − U²) ⪰ 0: with respect to the range of Q and
its complement M is [Θ, R′ᵀ; R′, C] with C ⪯ U²I and R′ᵀR′ = G, so that λI − M ⪰ 0 by the Schur
complement. Where U is below σ and the columns of Q are singular vectors, the least λ is σ² itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from meanfield.linalg.blocks import Rows, TokenBlocks, portions

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
        return cls(whole, basis.double(), _images(whole, basis.double()))

    @cached_property
    def rough(self) -> TokenBlocks:
        """|J|, for rounding."""
        return self.whole.absolute()

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
        weights = rows.repeated(s)[..., None]
        columns = [self.whole.forth(weights * vector, rows) for vector in self.basis.unbind(-1)]
        X, A = (rows.grouped(t).flatten(1, 2) for t in (
            torch.stack(columns, -1), self.images[rows.slice]))  # fmt: skip
        inner = torch.einsum("gn,ndk,ndl->gkl", s, self.basis, self.basis)
        crossed = X @ A.mT
        found = found - crossed - crossed.mT + A @ inner @ A.mT
        return found, slack + self._rounding(s, rows, A, inner)

    def _rounding(self, s: Tensor, rows: Rows, A: Tensor, inner: Tensor) -> Tensor:
        """Of the products with A, and of X by those of absolute values."""
        room = 4 * (self.rough.terms + sum(self.basis.shape)) * torch.finfo(s.dtype).eps
        weights = rows.repeated(s)[..., None]
        rough = self.rough.forth(weights * self.basis.norm(dim=-1), rows)
        size = torch.linalg.vector_norm(A, dim=(-2, -1))
        trace = inner.diagonal(0, -2, -1).sum(-1)
        return room * (2 * size * rows.grouped(rough).flatten(1).norm(dim=-1) + size**2 * trace)


def joined_bound(deflated: Deflated, rest: Tensor) -> Tensor:
    """The bound of ‖J‖ from U = `rest`, raised by the rounding of the products.

    A product with J errs, entry by entry, by at most γ times that of absolute values, γ the number
    of its roundings. Hence ‖A − JQ‖ ≤ α = γ‖|J|q̂‖ in the Frobenius norm, q̂ the lengths of the rows
    of Q, and JᵀA errs by β = γ‖|J|ᵀâ‖. With the rounding τ of AᵀA and Q up to δ = ‖QᵀQ − I‖
    orthonormal, Θ errs by ϑ = τ + 2‖A‖α + α² + 3δ‖A‖², and R by (‖A‖ + α + U)α + β + ϑ.
    """
    if not bool(rest.pow(4).isfinite()):  # weights that say nothing
        return torch.full_like(rest, torch.inf)
    Q, A, whole = deflated.basis, deflated.images, deflated.whole
    k, unit = Q.shape[-1], torch.finfo(Q.dtype).eps / 2
    short = (sum(deflated.shape) + k + 8) * unit  # of sums over n tokens of short products
    theta, length = _gram(A), torch.linalg.matrix_norm(A.flatten(0, 1), 2)
    defect = _sum_of_rows(whole, A) - Q @ theta
    gamma = (1 + 1e-9) * whole.terms * unit
    alpha = gamma * _images(deflated.rough, Q.norm(dim=-1, keepdim=True)).norm()
    beta = gamma * _sum_of_rows(deflated.rough, A.norm(dim=-1, keepdim=True)).norm()
    eye = torch.eye(k).to(Q)
    lost = torch.linalg.matrix_norm(_gram(Q) - eye, 2) + k * short
    error = short * (k**0.5 * theta.norm() + A.square().sum()) + 2 * length * alpha + alpha**2
    error = error + 3 * lost * length**2
    off = (length + alpha + rest) * alpha + beta + error
    found = torch.linalg.matrix_norm(defect.flatten(0, 1), 2)
    gram = _gram(defect) + (2 * found * off + off**2 + short * defect.square().sum()) * eye
    return _least(theta + error * eye, gram, rest.square()).sqrt()


def _gram(columns: Tensor) -> Tensor:
    """CᵀC for C (n, d, k), token by token first: that many fewer roundings in a row."""
    return (columns.mT @ columns).sum(0)


def _sum_of_rows(blocks: TokenBlocks, columns: Tensor) -> Tensor:
    """JᵀC for C (n, e, k): (n, d, k)."""
    parts = portions(blocks.shape)
    found = [
        torch.stack([blocks.back(x[rows.slice], rows).sum(0) for rows in parts]).sum(0)
        for x in columns.unbind(-1)
    ]
    return torch.stack(found, -1)


def _images(blocks: TokenBlocks, columns: Tensor) -> Tensor:
    """JC for C (n, d, k): (n, e, k)."""
    found = [
        torch.stack(
            [blocks.forth(y.expand(rows.count, *y.shape), rows) for y in columns.unbind(-1)], -1
        )
        for rows in portions(blocks.shape)
    ]
    return torch.cat(found)


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
