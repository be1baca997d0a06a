"""The Golub–Kahan–Lanczos process for a batch of linear maps."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from meanfield.linalg.basis import Basis
from meanfield.linalg.linear_map import LinearMap
from meanfield.linalg.vectors import finite


@dataclass(frozen=True, eq=False)
class Cycle:
    """The entries of B between two restarts: a diagonal, what is beside it, and spikes.

    With p triples kept from before, the first p columns of B are their values, column p + 1 has
    their spikes above its diagonal entry, and from there on B is upper bidiagonal.

    Attributes:
        kept: σᵢ of those triples, (batch, p); p is 0 in the first cycle.
        spikes: ρᵢ with Aᵀuᵢ = σᵢvᵢ + ρᵢv_{p+1}, (batch, p).
        alphas: the diagonal from column p + 1 on, (batch,) each.
        betas: beside it; the last is the length of the remainder.
        alpha_limits: what α may be at most where rounding hides it (there α is 0), (batch,) each.
        beta_limits: likewise.
    """

    kept: Tensor
    spikes: Tensor
    alphas: list[Tensor] = field(default_factory=list)
    betas: list[Tensor] = field(default_factory=list)
    alpha_limits: list[Tensor] = field(default_factory=list)
    beta_limits: list[Tensor] = field(default_factory=list)

    def scalars(self, part: slice = slice(None)) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The kept values, spikes, α and β, (batch, ·) each, float64."""
        alphas, betas = _stacked(self.alphas, part), _stacked(self.betas, part)
        return self.kept[part], self.spikes[part], alphas, betas

    def matrix(self, part: slice = slice(None)) -> Tensor:
        """B (batch, k, k), float64, without the remainder."""
        kept, spikes, alphas, betas = self.scalars(part)
        p = kept.shape[-1]
        matrix = torch.diag_embed(torch.cat([kept, alphas], -1))
        matrix[:, :p, p] = spikes
        matrix[:, p:, p:] += torch.diag_embed(betas[:, :-1], offset=1)
        return matrix

    def limits(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`scalars` with the longest that α and β may be."""
        alphas, betas = _stacked(self.alpha_limits), _stacked(self.beta_limits)
        return self.kept, self.spikes, alphas, betas


def _stacked(column: list[Tensor], part: slice = slice(None)) -> Tensor:
    return torch.stack([one[part] for one in column], -1).double()


class Bidiagonalisation:
    """The state of a batched Golub–Kahan–Lanczos process.

    A V = U B, Aᵀ U = V Bᵀ + β v eᵀ with V and U orthonormal, B upper bidiagonal but for what
    restarts leave, see `Cycle`.

    Args:
        linear_map: A.
        start: unit vectors (batch, n·d), the first column of V.
    """

    def __init__(self, linear_map: LinearMap, start: Tensor) -> None:
        self.map, self.batch = linear_map, start.shape[0]
        self.right, self.left = Basis(self.batch, start), Basis(self.batch, start)
        self.right.append(start)
        nothing = start.new_zeros(self.batch, 0, dtype=torch.float64)
        self.cycles = [Cycle(nothing, nothing)]

    @property
    def products(self) -> int:
        """Products with A so far; as many with Aᵀ."""
        return sum(len(cycle.alphas) for cycle in self.cycles)

    @property
    def size(self) -> int:
        """Columns of B."""
        return self.left.count

    @property
    def remainders(self) -> Tensor:
        """β of the last step, (batch,)."""
        return self.cycles[-1].betas[-1]

    def advance(self) -> None:
        """One product with A and one with Aᵀ."""
        cycle = self.cycles[-1]
        forth = image(self.map, self.right.newest())
        alpha, limit = self.left.extend(forth)
        cycle.alphas.append(alpha)
        cycle.alpha_limits.append(limit)
        back = image(self.map.T, self.left.newest())
        beta, limit = self.right.extend(back)
        cycle.betas.append(beta)
        cycle.beta_limits.append(limit)

    def restart(self, keep: int) -> None:
        """Go on from the first triples and the remainder alone, in the memory there is.

        The next thing must be to `advance`.

        The thick restart of Baglama and Reichel (Augmented implicitly restarted Lanczos
        bidiagonalization methods, SIAM J. Sci. Comput. 27, 2005, 19–42).
        """
        left, values, right, _ = self.triples()
        dtype = self.map.dtype
        rest = self.right.newest().clone()
        self.right.rotate(right[:, :keep].to(dtype))
        self.right.append(rest)
        self.left.rotate(left[..., :keep].mT.to(dtype))
        spikes = self.remainders.double()[:, None] * left[:, -1, :keep]
        self.cycles.append(Cycle(values[:, :keep].clone(), spikes))

    def triples(self, part: slice = slice(None)) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Left vectors, values, right vectors (rows) of B, and relative residuals; float64."""
        left, values, right = torch.linalg.svd(self.cycles[-1].matrix(part))
        share = self.remainders[part, None].double() / torch.where(values > 0, values, 1.0)
        return left, values, right, share * left[:, -1, :].abs()


def image(linear_map: LinearMap, vectors: Tensor) -> Tensor:
    """J of flat vectors (b, n·d), b the flattened batch; (b, m·e).

    Raises:
        OverflowError: it is not finite.
    """
    shaped = vectors.reshape(*linear_map.batch_shape, *linear_map.in_shape)
    return finite(linear_map.matvec(shaped).reshape(len(vectors), linear_map.rows))
